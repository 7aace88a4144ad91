"""The `gguf` format: an `eagle3`, `dflash` or `dspark` export, and the file that llama.cpp's own converter makes of it.

The converter is a tool of the user's llama.cpp and is started as one. What it writes is compared with the export: names, shapes
and dtypes of tensors, the vocabulary map, the feature levels. The folder remains that export for every other reader.

Ref: llama.cpp b11434, conversion/llama.py and qwen.py, src/models/eagle3.cpp and dflash.cpp.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

from checkpoints.export.configs import EngineConfig, default_levels
from checkpoints.export.folder import Weights
from checkpoints.export.formats.base import SPECULATIVE_TOKENS, ExportFormat, Obstacle
from checkpoints.export.formats.block import BlockFormat, DFlashFormat, DSparkFormat
from checkpoints.export.formats.eagle import Eagle3Format
from checkpoints.export.target import TargetFacts
from sage.drafts.block import BlockConfig
from sage.io.model_files import read_config

FILE = "draft.gguf"
SCRIPT, PACKAGE = "convert_hf_to_gguf.py", "gguf-py"
TARGETS = ("llama", "mistral", "qwen3")  # by `make engines-llama`; of others it may keep no layers, and stop
NOT_COMPUTED = ("fc_norm", "norm_output", "norm_before_residual")  # the last one by an `eagle3` folder's other engines
OUTTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
LAYER = re.compile(r"(?:midlayer|layers\.(\d+))\.(.+)\.weight")
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}
NAMES = {
    "fc.weight": "fc.weight",
    **{f"{x}_norm.weight": "enc.output_norm.weight" for x in ("input", "hidden")},
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
    "d2t": "d2t",
    **{f"markov_head.markov_{x}.weight": f"markov_{x}.weight" for x in ("w1", "w2")},
    **{f"confidence_head.proj.{x}": f"conf_proj.{x}" for x in ("weight", "bias")},
}
SUMMARY = """\
import json, sys
from gguf import GGUFReader
reader = GGUFReader(sys.argv[1])
tensors = {tensor.name: [[int(size) for size in tensor.shape[::-1]], tensor.tensor_type.name] for tensor in reader.tensors}
maps = [tensor.data.tolist() for tensor in reader.tensors if tensor.name == "d2t"]
levels = [field.contents() for name, field in reader.fields.items() if name.endswith(".target_layers")]
print(json.dumps({"tensors": tensors, "ids": maps[0] if maps else None, "levels": levels[0] if levels else None}))
"""


class ConvertedFormat(ExportFormat):
    """What the drafts for llama.cpp have in common."""

    spec_type: ClassVar[str]  # the value of `--spec-type`

    @property
    def label(self) -> str:
        return self.name

    def served_by(self, facts: TargetFacts) -> tuple[str, ...]:
        """Returns llama.cpp too where it serves the target; others read the same folder."""
        return (*super().served_by(facts), *(self.engines if facts.model_type in TARGETS else ()))

    def recognizes(self, config: EngineConfig) -> bool:
        """Its folders are those of another format."""
        return False

    def complete(self, folder: Path, facts: TargetFacts, dtype: torch.dtype, converter: str | None) -> None:
        home, target = Path(converter or ""), Path(facts.name or "")
        if not (home / SCRIPT).is_file():
            raise ValueError(f"--converter {converter}: has no {SCRIPT}; give the source folder of llama.cpp")
        if not facts.name or not target.is_dir():
            raise ValueError(f"--target {facts.name}: is no folder; {SCRIPT} reads the target's tokenizer: give its folder")
        outputs = ["--outtype", OUTTYPES[dtype], "--outfile", str(folder / FILE)]
        run_python(home, [str(home / SCRIPT), str(folder), "--target-model-dir", str(target), *outputs])
        found = json.loads(run_python(home, ["-c", SUMMARY, str(folder / FILE)]).splitlines()[-1])
        if problems := self._differences(folder, facts, dtype, found):
            raise ValueError(f"--converter {converter}: wrote another draft than the export: {'; '.join(problems)}")

    def serve_command(self, engine: str, target: str, draft: str, tokens: int = SPECULATIVE_TOKENS) -> str:
        """Returns the command that serves a target converted by the same script; llama.cpp reads no hub ids."""
        options = f"--spec-type {self.spec_type} --spec-draft-n-max {tokens} --spec-draft-p-min 0"
        return f"{SCRIPT} {target} --outfile target.gguf\nllama-server -m target.gguf -md {draft}/{FILE} \\\n  {options}"

    @abstractmethod
    def read_levels(self, config: EngineConfig, facts: TargetFacts) -> list[int] | None:
        """Returns the indices k of the hidden_states[k] that the converter is to write."""

    def _differences(self, folder: Path, facts: TargetFacts, dtype: torch.dtype, found: dict[str, Any]) -> list[str]:
        """Returns how the summary of a converted file differs from the export in its folder; vectors are float32."""
        weights, levels = Weights(folder), self.read_levels(EngineConfig(read_config(folder)), facts)
        kinds = {name: OUTTYPES[dtype].upper() if len(info.shape) > 1 else "F32" for name, info in weights.infos.items()}
        kinds["d2t"] = "I64"
        expected = {gguf_name(name): [list(info.shape), kinds[name]] for name, info in weights.infos.items() if name != "t2d"}
        tensors = {name: value for name, value in found["tensors"].items() if not name.startswith("rope_freqs")}
        pairs = {name: (tensors.get(name), expected.get(name)) for name in sorted(expected.keys() | tensors.keys())}
        problems = [f"{name} is {ours}, not {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]
        if found["levels"] != levels:
            problems.append(f"layer ids {found['levels']}, not {levels}")
        ids = (weights["d2t"] + torch.arange(len(weights["d2t"]))).tolist() if "d2t" in weights.infos else None
        return [*problems, *([] if found["ids"] == ids else ["d2t maps to other tokens"])]


class GgufFormat(ConvertedFormat, Eagle3Format):
    """EAGLE-3 drafts for llama.cpp."""

    spec_type = "draft-eagle3"

    def for_draft(self, draft: Any) -> ExportFormat:
        if draft.model_type != BlockConfig.model_type:
            return self
        return (GgufDSparkFormat if draft.conditional == "markov" else GgufDFlashFormat)(self.row, self.flavour)

    def obstacles(self, draft: Any, facts: TargetFacts) -> Iterator[Obstacle]:
        yield from super().obstacles(draft, facts)
        for key in NOT_COMPUTED:
            if getattr(draft, key):
                remedy = "choose --format speculators, which vLLM serves"
                problem = "true, which llama.cpp's converter does not read from an `eagle3` folder"
                yield Obstacle(key=f"draft.{key}", value="true", problem=problem, remedy=remedy)

    def read_levels(self, config: EngineConfig, facts: TargetFacts) -> list[int]:
        return config.vllm_levels or default_levels(facts.num_layers)


class ConvertedBlockFormat(ConvertedFormat, BlockFormat):
    """One-pass drafts for llama.cpp."""

    def obstacles(self, draft: Any, facts: TargetFacts) -> Iterator[Obstacle]:
        yield from super().obstacles(draft, facts)
        if facts.scaled_rope:
            problem = f"{facts.scaled_rope.get('rope_type')}, which llama.cpp's converter drops from one-pass drafts"
            remedy = "choose --format dflash or dspark, which vLLM serves"
            yield Obstacle(key="draft.scaled_rope", problem=problem, remedy=remedy)

    def read_levels(self, config: EngineConfig, facts: TargetFacts) -> list[int] | None:
        return self.layout.read_levels(config)


class GgufDFlashFormat(ConvertedBlockFormat, DFlashFormat):
    """Block drafts whose first slot predicts nothing, for llama.cpp, which reads DFlash's own layout."""

    spec_type = "draft-dflash"
    is_native = True


class GgufDSparkFormat(ConvertedBlockFormat, DSparkFormat):
    """Block drafts with a markov head, for llama.cpp."""

    spec_type = "draft-dspark"


def gguf_name(name: str) -> str:
    """Returns the converter's name of an export's tensor."""
    layer = LAYER.fullmatch(name)
    return NAMES[name] if layer is None else f"blk.{layer[1] or 0}.{LAYER_NAMES[layer[2]]}.weight"


def run_python(home: Path, arguments: list[str]) -> str:
    """Runs Python with llama.cpp's package `gguf`; ValueError with the last line of its messages if it fails."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(home / PACKAGE), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=variables, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        remedy = "install what it misses (sentencepiece), or give a llama.cpp from b11434 on"
        raise ValueError(f"--converter {home}: failed: {reason}; {remedy}")
    return done.stdout
