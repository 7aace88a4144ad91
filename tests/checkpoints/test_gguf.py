"""The `gguf` format with a stand-in for llama.cpp's converter; `make engines-llama` runs the real one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.export_helpers import EXPORTS, REDUCED, export_draft, make_draft, save_draft
from support.messages import refused
from support.models import EAGLE_3_1, text_sizes
from transformers import LlamaConfig, LlamaForCausalLM

import sage
from checkpoints.export.formats import find_format
from checkpoints.export.formats.gguf import FILE
from checkpoints.export.importer import check_folder
from checkpoints.export.target import TargetFacts
from train.cli import export as command

CONVERTER = """
import array, json, sys
from pathlib import Path
folder, out = Path(sys.argv[1]), Path(sys.argv[sys.argv.index("--outfile") + 1])
assert (Path(sys.argv[sys.argv.index("--target-model-dir") + 1]) / "config.json").is_file()
kind = sys.argv[sys.argv.index("--outtype") + 1].upper()
whole = {"norm.weight": "output_norm.weight", "hidden_norm.weight": "enc.output_norm.weight"}
names = {"midlayer": "blk.0", "layers.": "blk.", "self_attn.": "attn_", "mlp.": "ffn_", "attn_o_proj": "attn_output"}
names |= {"_proj": "", "lm_head": "output", "input_layernorm": "attn_norm"}
names |= {"hidden_norm": "attn_norm_2", "post_attention_layernorm": "ffn_norm"}
names |= {"markov_head.": "", "confidence_head.proj": "conf_proj"}
written = {}
content = (folder / "model.safetensors").read_bytes()
start = 8 + int.from_bytes(content[:8], "little")
header = json.loads(content[8:start])
header.pop("__metadata__")
for name, tensor in header.items():
    plain = name
    for old, new in names.items():
        name = whole.get(plain) or name.replace(old, new)
    if name != "t2d":
        shape = tensor["shape"]
        written[name] = [shape[::-1], "I64" if name == "d2t" else kind if len(shape) > 1 else "F32"]
        if name == "d2t":
            first, last = (start + offset for offset in tensor["data_offsets"])
            ids = [index + offset for index, offset in enumerate(array.array("q", content[first:last]))]
config = json.loads((folder / "config.json").read_text())
levels = config.get("eagle_aux_hidden_state_layer_ids") or config.get("aux_hidden_state_layer_ids")
levels = levels or [layer + 1 for layer in config["dflash_config"]["target_layer_ids"]]
DAMAGE
out.write_text(json.dumps([written, ids if "d2t" in written else None, levels]))
"""
READER = """
import json
from types import SimpleNamespace as Found
def GGUFReader(file):
    tensors, ids, levels = json.load(open(file))
    shapes = {name: Found(name=name, shape=shape, tensor_type=Found(name=kind)) for name, (shape, kind) in tensors.items()}
    if ids:
        shapes["d2t"].data = Found(tolist=lambda: ids)
    return Found(tensors=list(shapes.values()), fields={"eagle3.target_layers": Found(contents=lambda: levels)})
"""


def llama_cpp(folder: Path, damage: str = "") -> str:
    (folder / "gguf-py" / "gguf").mkdir(parents=True)
    (folder / "convert_hf_to_gguf.py").write_text(CONVERTER.replace("DAMAGE", damage))
    (folder / "gguf-py" / "gguf" / "__init__.py").write_text(READER)
    return str(folder)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> sage.Target:
    """A tiny Llama, which llama.cpp serves with drafts."""
    found = sage.Target(LlamaForCausalLM(LlamaConfig(**text_sizes())))
    found.name = str(tmp_path_factory.mktemp("llama"))
    found.model.save_pretrained(found.name)
    return found


@pytest.fixture
def draft(target: sage.Target, tmp_path: Path) -> Path:
    return save_draft(tmp_path / "draft", target, vocabulary=REDUCED)


def test_the_converted_file_lies_beside_an_export_that_others_read(draft, tmp_path, monkeypatch, capsys):
    home, out = llama_cpp(tmp_path / "llama.cpp"), tmp_path / "out"
    monkeypatch.setattr("sys.argv", ["sage-export", str(draft), "--format", "gguf", "--converter", home, "--out", str(out)])
    with pytest.raises(SystemExit, match="0"):
        command.main()
    assert f"llama-server -m target.gguf -md {out}/{FILE}" in capsys.readouterr().out
    written, *_ = json.loads((out / FILE).read_text())
    assert written["blk.0.attn_output.weight"][1] == "BF16" and written["output.weight"][0] == [32, len(REDUCED)]
    check = check_folder(out)
    assert not check.errors and check.format is not None and check.format.name == "eagle3"
    assert "--spec-type draft-eagle3" in (out / "README.md").read_text()


@pytest.mark.parametrize(("form", "kind"), [("native", "dflash"), ("dspark", "dspark")])
def test_one_pass_drafts_are_converted_from_the_layouts_that_llama_cpp_reads(target, tmp_path, form, kind):
    _, config, vocabulary, *_ = EXPORTS[form]
    draft = save_draft(tmp_path / "draft", target, "block", vocabulary=vocabulary, **config)
    export_draft(draft, tmp_path / "out", "gguf", converter=llama_cpp(tmp_path / "llama.cpp"))
    written, *_ = json.loads((tmp_path / "out" / FILE).read_text())
    assert "blk.0.attn_q_norm.weight" in written and ("markov_w1.weight" in written) == (kind == "dspark")
    check = check_folder(tmp_path / "out")
    assert not check.errors and check.format is not None and check.format.name == kind
    assert (
        f"--spec-type draft-{kind} --spec-draft-n-max {3 if kind == 'dflash' else 4} "
        in (tmp_path / "out/README.md").read_text()
    )


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        ("del written['fc.weight']", "fc.weight is None"),
        ("written['output.weight'][1] = 'F16'", "output.weight is"),
        ("levels[0] += 1", "layer ids [1, 1, 2], not [0, 1, 2]"),
        ("ids[3] += 1", "d2t maps to other tokens"),
        ("raise ImportError('no sentencepiece')", "no sentencepiece; install"),
    ],
)
def test_a_converter_that_writes_another_draft_or_fails_is_named(draft: Path, tmp_path: Path, damage: str, part: str) -> None:
    with refused("--converter", part):
        export_draft(draft, tmp_path / "out", "gguf", converter=llama_cpp(tmp_path / "llama.cpp", damage))
    assert not (tmp_path / "out").exists()


def test_what_llama_cpp_cannot_serve_is_refused(targets: dict[str, sage.Target], draft: Path, tmp_path: Path) -> None:
    with refused("--converter", "convert_hf_to_gguf.py", "source folder"):
        export_draft(draft, tmp_path / "out", "gguf", converter=str(tmp_path))
    newer = save_draft(tmp_path / "newer", targets["qwen2_5_vl"], **EAGLE_3_1)
    options = {"converter": llama_cpp(tmp_path / "llama.cpp"), "allow_unserved": False}
    unserved = "target: llama.cpp is not known to serve drafts for qwen2_5_vl", "vLLM and SGLang, sage-generate"
    with refused("draft.fc_norm: true", "draft.norm_output: true", *unserved):
        export_draft(newer, tmp_path / "out", "gguf", **options)
    block = make_draft(targets["qwen2_5_vl"], "block", **EXPORTS["plain"][1]).config
    facts = replace(TargetFacts.of_draft(block), scaled_rope={"rope_type": "llama3", "factor": 8.0})
    [obstacle] = find_format("gguf").for_draft(block).obstacles(block, facts)
    assert str(obstacle).startswith("draft.scaled_rope: llama3") and "--format dflash" in obstacle.remedy
