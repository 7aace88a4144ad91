"""Serves drafts that predict a block in one pass with vLLM and compares it with our decoder: `make engines` runs this too.

DFlash and P-EAGLE drafts are trained on the targets' own answers: text prompts for the pocket Qwen2.5-VL, prompts with an image
each for a small random LLaVA-1.5, whose positions count along the stream. Each is exported, served by vLLM (float32, greedy,
`DEPTH` drafted tokens per round) and compared with our policy `chain`: the same texts and rounds, acceptance by position within
the tolerance of engine_checks.py, by vLLM's own metrics of each request. Negative controls are exports that vLLM loads without
a word: levels in the other convention, the other causality, a foreign lm_head. They must be accepted less.

vLLM 0.32 for CPUs applies the k_norm of the first layer to the context of all layers (tests/engines/vllm_k_norm.md): `fault`
shows it with two layers; other drafts of two layers have equal ones. What this engine cannot run: DSpark, DFlash 2 and mixed
sliding and full attention need the V2 model runner, which needs Triton; images of M-RoPE targets collide in the draft's cache.

    python tests/engines/check_one_pass.py --engine-python .venv-engines/bin/python [--all] [--only NAME ...]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import check_families as families
import torch
from check_families import MAX_NEW_TOKENS, answers_to, questions
from engine_checks import DEPTH, Damage, Engine, Row, conclude, exported, new_parser
from layouts import POCKET, TEXT, save_target
from safetensors.torch import load_file, save_file

import sage
from checkpoints.export.formats import find_format
from sage.drafts.registry import draft_kind, resolve
from sage.io.machine import available_cores
from train.config.schema import ObjectiveConfig
from train.distill.objective import Objective
from train.serve_check.acceptance import Answers, decode_chain
from train.serve_check.vllm_process import PROMPTS_FILE, EngineSetting, write_prompts

BLOCK = 4
STEPS, ANCHORS = 120, 12
TRAIN_PROMPTS = 32
NUM_PROMPTS = {"qwen2_5_vl": 48, "llava": 8}  # answers to texts are short
FAMILY = {"qwen2_5_vl": "text", "llava": "question"}  # of prompts
BLOCK_DRAFT = {"feed": False, "conditional": "none", "block_size": BLOCK}
DRAFTS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> kind, options
    "dflash": ("block", BLOCK_DRAFT),
    "causal": ("block", BLOCK_DRAFT | {"causal": True}),
    "reduced": ("block", BLOCK_DRAFT | {"vocabulary": 600}),
    "tied": ("block", BLOCK_DRAFT | {"num_layers": 2}),
    "untied": ("block", BLOCK_DRAFT | {"num_layers": 2}),
    "peagle": ("peagle", {"block_size": BLOCK, "image_inputs": "token"}),
    "peagle2": ("peagle", {"block_size": BLOCK, "image_inputs": "token", "num_layers": 2}),
}


def other_convention(config: dict[str, Any], folder: Path) -> None:
    """Writes the ids of layers where those of hidden states belong."""
    config["aux_hidden_state_layer_ids"] = [level - 1 for level in config["aux_hidden_state_layer_ids"]]


def other_causality(config: dict[str, Any], folder: Path) -> None:
    """Masks the later slots of a block, as vLLM does by default for the flag that speculators writes by default."""
    del config["transformer_layer_config"]["is_causal"]
    config["sliding_window_non_causal"] = False


def foreign_lm_head(config: dict[str, Any], folder: Path) -> None:
    """Adds an lm_head that is not the target's: its rows in the opposite order."""
    tensors = load_file(folder / "model.safetensors")
    target = load_file(folder.parent / "target" / "model.safetensors")
    (name,) = [name for name in target if name.endswith("lm_head.weight")]
    save_file({**tensors, "lm_head.weight": target[name].flip(0)}, folder / "model.safetensors", metadata={"format": "pt"})


@dataclass(frozen=True)
class Case:
    """One export."""

    target: str
    draft: str
    format: str
    flavour: str | None = None
    damage: Damage | None = None  # changes the export; vLLM must accept less than our decoder does of the intact one
    is_fault: bool = False  # a fault of vLLM, whose rounds must differ from ours
    is_extra: bool = False  # runs with `--all` only

    @property
    def name(self) -> str:
        damage, fault = self.damage and self.damage.__name__, "fault" if self.is_fault else None
        return "-".join(word for word in (self.target, self.draft, self.flavour, damage, fault) if word)


CASES = (
    Case("qwen2_5_vl", "dflash", "dflash", "native"),
    Case("qwen2_5_vl", "peagle", "peagle"),
    Case("llava", "dflash", "dflash"),
    Case("llava", "tied", "dflash"),
    Case("llava", "peagle", "peagle"),
    Case("llava", "dflash", "dflash", damage=other_convention),
    Case("llava", "dflash", "dflash", damage=other_causality),
    Case("llava", "dflash", "dflash", damage=foreign_lm_head),
    Case("llava", "untied", "dflash", is_fault=True),
    Case("llava", "causal", "dflash", is_extra=True),
    Case("llava", "reduced", "dflash", is_extra=True),
    Case("llava", "peagle2", "peagle", is_extra=True),
    Case("qwen2_5_vl", "dflash", "dflash", is_extra=True),
)


def main() -> int:
    """Builds, trains, exports, serves and compares; returns 0 if all checks pass."""
    parser = new_parser(__doc__, [case.name for case in CASES])
    parser.add_argument("--all", action="store_true", help="also the cases that take longer")
    args, begin = parser.parse_args(), time.monotonic()
    cases = [case for case in CASES if (case.name in args.only if args.only else args.all or not case.is_extra)]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        rows = check(cases, Path(scratch), args.engine_python)
    return conclude("one pass", ["target and draft", "format"], rows, begin)


def check(cases: Sequence[Case], scratch: Path, python: Path) -> list[Row]:
    """Prepares one export after the other; vLLM serves them on the last core meanwhile."""
    with Engine(scratch, python, available_cores()[-1], MAX_NEW_TOKENS) as engine, ThreadPoolExecutor(1) as thread:
        lab = Lab(scratch, engine)
        served = [thread.submit(lab.serve, case, lab.prepare(case)) for case in cases]
        return [future.result() for future in served]


@dataclass
class World:
    """A target, its folder, training examples, and the prompts that both sides decode."""

    target: sage.Target
    folder: Path
    rows: list[dict[str, Any]]
    prompts: list[Any]


class Lab:
    """Targets, drafts and answers, each made once."""

    def __init__(self, scratch: Path, engine: Engine) -> None:
        self.scratch, self.engine = scratch, engine
        self.world, self.ours = cache(self._world), cache(self._ours)

    def _world(self, name: str) -> World:
        folder = self.scratch / name
        target = save_target({"qwen2_5_vl": POCKET.name}.get(name, name), folder / "target")
        rows = answers_to(target, questions(FAMILY[name], "train", TRAIN_PROMPTS), folder / "training")
        prompts, _ = write_prompts(target, questions(FAMILY[name], "test", NUM_PROMPTS[name]), folder)
        return World(target, folder, rows, prompts)

    def _ours(self, target: str, name: str) -> Answers:
        """Trains and saves a draft; returns our decoder's answers with it."""
        begin, made = time.monotonic(), self.world(target)
        kind, options = DRAFTS[name]
        draft = train(made, kind, dict(options))
        if name in ("tied", "untied"):
            set_key_norms(draft, name == "tied")
        draft.save_pretrained(made.folder / f"{name}-draft")
        print(f"trained {target}-{name}: {time.monotonic() - begin:.0f} s", flush=True)
        return decode_chain(made.target, draft, made.prompts, DEPTH, MAX_NEW_TOKENS)

    def prepare(self, case: Case) -> EngineSetting:
        """Exports the draft of a case and damages the export."""
        folder, format_ = self.world(case.target).folder, find_format(case.format, case.flavour)
        self.ours(case.target, case.draft)
        draft, out = folder / f"{case.draft}-draft", folder / case.name
        return exported(draft, folder / "target", out, format_, case.damage, max_model_len=1024)

    def serve(self, case: Case, setting: EngineSetting) -> Row:
        """Serves a case."""
        begin, kind = time.monotonic(), "control: " if case.damage else "fault: " if case.is_fault else ""
        labels, ours = [f"{kind}{case.name}", case.format], self.ours(case.target, case.draft)
        theirs = self.engine.trace(setting, self.world(case.target).folder / PROMPTS_FILE)
        row = Row(labels, ours, theirs, is_control=case.damage is not None, is_fault=case.is_fault)
        print(f"served {case.name}: {time.monotonic() - begin:.0f} s; {' | '.join(row.cells()[2:])}", flush=True)
        return row


def train(made: World, kind: str, options: dict[str, Any]) -> Any:
    """Trains a draft on the target's answers; noise in its first weights makes every part of it matter."""
    target, size = made.target, options.pop("vocabulary", None)
    levels = [2, target.num_layers // 2, target.num_layers - 2]
    vocabulary = None if size is None else most_frequent(made.rows, size)
    draft: Any = sage.new_draft(target, kind, seed=0, vocabulary=vocabulary, feature_levels=levels, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if "self_attn" in name and weight.dim() == 2:
                weight += 0.1 * torch.randn(weight.shape, generator=generator)
    config = ObjectiveConfig(ce_weight=1.0, feature_weight=0.0, steps=draft.num_levels, anchors=ANCHORS)
    student = resolve(draft_kind(kind).student)(draft, Objective(config), [1.0] * draft.num_levels)
    torch.manual_seed(0)
    families.train(target, student, made.rows, STEPS)
    return draft.eval()


def most_frequent(rows: Sequence[dict[str, Any]], size: int) -> torch.Tensor:
    """Returns the most frequent tokens of the answers, in increasing order."""
    answers = torch.cat([row["input_ids"][row["loss_mask"]] for row in rows])
    return torch.bincount(answers, minlength=TEXT["vocab_size"]).topk(size).indices.sort().values


@torch.no_grad()
def set_key_norms(draft: Any, is_tied: bool) -> None:
    """Gives all layers the k_norm of the first one, or very different ones."""
    first, *others = (layer.self_attn.k_norm.weight for layer in draft.layers)
    for weight in others:
        weight.copy_(first if is_tied else first.flip(0) * torch.linspace(0.2, 3, len(first)))


if __name__ == "__main__":
    sys.exit(main())
