"""The `gguf` format: an `eagle3` export, and beside it the file that llama.cpp's own converter makes of it.

The converter is a tool of the user's llama.cpp and is started as one. What it writes is compared with the export: names, shapes
and dtypes of tensors, the vocabulary map, the feature levels. The folder remains an `eagle3` export for every other reader.

Ref: llama.cpp b11434, conversion/llama.py and src/models/eagle3.cpp.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from checkpoints.export.configs import EngineConfig, default_levels
from checkpoints.export.folder import Weights
from checkpoints.export.formats.base import SPECULATIVE_TOKENS, Obstacle
from checkpoints.export.formats.eagle import Eagle3Format
from checkpoints.export.target import TargetFacts
from sage.io.model_files import read_config

FILE = "draft.gguf"
SCRIPT, PACKAGE = "convert_hf_to_gguf.py", "gguf-py"
IMAGE_TARGETS = ("qwen2_5_vl", "qwen3_vl")  # besides text targets; its converter and server read them
NOT_COMPUTED = ("fc_norm", "norm_output", "norm_before_residual")  # the last one by an `eagle3` folder's other engines
OUTTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}
NAMES = {
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
    "d2t": "d2t",
    **{f"midlayer.{name}.weight": f"blk.0.{theirs}.weight" for name, theirs in LAYER_NAMES.items()},
}
SUMMARY = """\
import json, sys
from gguf import GGUFReader
reader = GGUFReader(sys.argv[1])
tensors = {one.name: [[int(size) for size in one.shape[::-1]], one.tensor_type.name] for one in reader.tensors}
maps = [one.data.tolist() for one in reader.tensors if one.name == "d2t"]
levels = [field.contents() for name, field in reader.fields.items() if name.endswith(".target_layers")]
print(json.dumps({"tensors": tensors, "ids": maps[0] if maps else None, "levels": levels[0] if levels else None}))
"""


class GgufFormat(Eagle3Format):
    """EAGLE-3 drafts for llama.cpp."""

    def served_by(self, facts: TargetFacts) -> tuple[str, ...]:
        is_read = facts.is_known and (not facts.has_images or facts.model_type in IMAGE_TARGETS)
        return self.engines if is_read else ()

    def obstacles(self, draft: Any, facts: TargetFacts) -> Iterator[Obstacle]:
        yield from super().obstacles(draft, facts)
        for key in NOT_COMPUTED:
            if getattr(draft, key):
                remedy = "choose --format speculators, which vLLM serves"
                problem = "true, which llama.cpp's converter does not read from an `eagle3` folder"
                yield Obstacle(key=f"draft.{key}", value="true", problem=problem, remedy=remedy)

    def warnings(self, draft: Any, facts: TargetFacts) -> list[str]:
        return ["llama.cpp was measured with text prompts only, not with images."] if facts.has_images else []

    def recognizes(self, config: EngineConfig) -> bool:
        """Its folders are those of `eagle3`."""
        return False

    def complete(self, folder: Path, facts: TargetFacts, dtype: torch.dtype, converter: str | None) -> None:
        home, target = Path(converter or ""), Path(facts.name or "")
        if not (home / SCRIPT).is_file():
            raise ValueError(f"--converter {converter}: has no {SCRIPT}; give the source folder of llama.cpp")
        if not facts.name or not target.is_dir():
            raise ValueError(f"--target {facts.name}: is no folder; {SCRIPT} reads the target's tokenizer: give its folder")
        outputs = ["--outtype", OUTTYPES[dtype], "--outfile", str(folder / FILE)]
        _run(home, [str(home / SCRIPT), str(folder), "--target-model-dir", str(target), *outputs])
        found = json.loads(_run(home, ["-c", SUMMARY, str(folder / FILE)]).splitlines()[-1])
        if problems := _differences(folder, facts, dtype, found):
            raise ValueError(f"--converter {converter}: wrote another draft than the export: {'; '.join(problems)}")

    def serve_command(self, engine: str, target: str, draft: str, tokens: int = SPECULATIVE_TOKENS) -> str:
        """Returns the command that serves a target converted by the same script; llama.cpp reads no hub ids."""
        options = f"--spec-type draft-eagle3 --spec-draft-n-max {tokens} --spec-draft-p-min 0"
        return f"{SCRIPT} {target} --outfile target.gguf\nllama-server -m target.gguf -md {draft}/{FILE} \\\n  {options}"


def _run(home: Path, arguments: list[str]) -> str:
    """Runs Python with llama.cpp's package `gguf`; ValueError with the last line of its messages if it fails."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(home / PACKAGE), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=variables, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        remedy = "install what it misses (sentencepiece), or give a llama.cpp from b11434 on"
        raise ValueError(f"--converter {home}: failed: {reason}; {remedy}")
    return done.stdout


def _differences(folder: Path, facts: TargetFacts, dtype: torch.dtype, found: dict[str, Any]) -> list[str]:
    """Returns how the summary of a converted file differs from the export in its folder; vectors are float32."""
    weights, config = Weights(folder), EngineConfig(read_config(folder))
    kinds = {name: OUTTYPES[dtype].upper() if len(info.shape) > 1 else "F32" for name, info in weights.infos.items()}
    kinds["d2t"] = "I64"
    expected = {NAMES[name]: [list(info.shape), kinds[name]] for name, info in weights.infos.items() if name != "t2d"}
    tensors = {name: value for name, value in found["tensors"].items() if not name.startswith("rope_freqs")}
    pairs = {name: (tensors.get(name), expected.get(name)) for name in sorted(expected.keys() | tensors.keys())}
    problems = [f"{name} is {ours}, not {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]
    levels = config.vllm_levels or default_levels(facts.num_layers)
    if found["levels"] != levels:
        problems.append(f"layer ids {found['levels']}, not {levels}")
    ids = (weights["d2t"] + torch.arange(len(weights["d2t"]))).tolist() if "d2t" in weights.infos else None
    return [*problems, *([] if found["ids"] == ids else ["d2t maps to other tokens"])]
