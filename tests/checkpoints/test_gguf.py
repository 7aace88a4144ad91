"""The `gguf` format with a stand-in for llama.cpp's converter; `make engines-llama` runs the real one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.export_helpers import EXPORTS, REDUCED, export_draft, make_draft, save_draft
from support.fake_llama import llama_cpp
from support.messages import refused
from support.models import EAGLE_3_1, text_sizes
from transformers import LlamaConfig, LlamaForCausalLM

import sage
from checkpoints.export.formats import find_format
from checkpoints.export.formats.gguf import FILE
from checkpoints.export.importer import check_folder
from checkpoints.export.target import TargetFacts
from train.cli import export as command


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
