"""Serves our exports with vLLM and compares it with our decoder: `make engines` and `make engines-families` run this.

Drafts are trained on the targets' own answers, exported, and served by vLLM (greedy, `DEPTH` drafted tokens per round). Our
side decodes with the trained draft, its weights rounded to the export's dtype, under the policy `chain` of the same depth.
Checked are, by engine_checks.py, token ids, rounds, and the shares of rounds that accept each position, for three groups:

    exports    drafts of the EAGLE kinds for the pocket Qwen2.5-VL, prompts with an image each
    one-pass   drafts that predict a block in one pass: text prompts for the same target, whose axes of positions they do not
               have, prompts with images for a small random LLaVA-1.5, whose positions count along the stream
    families   an EAGLE-3 draft for a small random target of every family: the evidence for `Family.served_by`

Negative controls are exports that vLLM loads without a word although they are wrong for it: the texts must be the same, and
accepted tokens at least `MIN_LOSS` fewer. vLLM 0.32 drafts wrongly after images, which our plugin corrects; it is also run as
released: once its rounds equal ours, the correction can go. For CPUs it applies the k_norm of the first layer to the context of
all layers (vllm_k_norm.md), which `untied` shows. What it cannot run: DSpark, DFlash 2 and mixed sliding and full attention,
which need the V2 model runner.

    python tests/engines/check_exports.py exports one-pass --engine-python .venv-engines/bin/python [--all] [--only NAME ...]
"""

from __future__ import annotations

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from engine_checks import (
    DEPTH,
    DTYPES,
    MAX_NEW_TOKENS,
    Damage,
    Engine,
    Row,
    answers_to,
    conclude,
    exported,
    gap_at_difference,
    new_parser,
    questions,
    train,
)
from layouts import LAYOUTS, POCKET, PUBLISHED, save_target
from safetensors.torch import load_file, save_file

import sage
from checkpoints.export.configs import LEVELS_KEY
from checkpoints.export.formats import find_format
from sage.io.machine import available_cores, pin
from train.serve_check.acceptance import Answers, decode_chain
from train.serve_check.vllm_process import PROMPTS_FILE, EngineSetting, write_prompts

GROUPS = ("exports", "one-pass", "families")
QWEN, QWEN35, LLAVA, ONEVISION = POCKET.name, "qwen3_5", "llava", "pocket_llava_onevision"
REFUSAL = "Model does not support EAGLE3 interface"  # by vLLM as released
TRAIN_PROMPTS, NUM_PROMPTS, NUM_TEXTS = 32, 16, 48  # answers to texts are short
HIGH_LEVELS = "two, middle and last but one"  # levels that a config names
EAGLE3: dict[str, Any] = {"image_inputs": "token"}
NORMS = {"fc_norm": True, "norm_output": True}
BLOCK = {"feed": False, "conditional": "none", "block_size": 4, "feature_levels": HIGH_LEVELS}
SLOTS = {"block_size": 4, "image_inputs": "token", "feature_levels": HIGH_LEVELS}
DRAFTS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> kind, options
    "token": ("eagle3", EAGLE3),
    "reduced": ("eagle3", EAGLE3 | {"vocabulary": 400}),
    "levels": ("eagle3", EAGLE3 | {"feature_levels": [3, 7, 11]}),
    "eagle_3_1": ("eagle3", EAGLE3 | NORMS),
    "embed": ("eagle3", {"image_inputs": "embed"}),
    "eagle": ("eagle", {"image_inputs": "token", "input_norm": False}),
    "norm": ("eagle", {"image_inputs": "token"}),
    "family": ("eagle3", EAGLE3 | {"feature_levels": HIGH_LEVELS}),
    "dflash": ("block", BLOCK),
    "causal": ("block", BLOCK | {"causal": True}),
    "few": ("block", BLOCK | {"vocabulary": 600}),
    "tied": ("block", BLOCK | {"num_layers": 2}),
    "untied": ("block", BLOCK | {"num_layers": 2}),
    "peagle": ("peagle", SLOTS),
    "peagle2": ("peagle", SLOTS | {"num_layers": 2}),
}


# -- damages: exports that vLLM accepts, and that are wrong ------------------------------------------------------------


def off_by_one_levels(config: dict[str, Any], folder: Path) -> None:
    """Names the hidden states one layer below those that the draft was trained on, as SGLang's field does."""
    config[LEVELS_KEY] = [level - 1 for level in config[LEVELS_KEY]]


def first_levels(config: dict[str, Any], folder: Path) -> None:
    """Names the first hidden states; those one layer below the right ones are too similar to them in some targets."""
    config[LEVELS_KEY] = [1, 2, 3]


def absolute_d2t(config: dict[str, Any], folder: Path) -> None:
    """Writes target ids instead of offsets, as far as their sums stay in the vocabulary: beyond it vLLM ends on a CPU."""
    tensors = load_file(folder / "model.safetensors")
    ids, size = torch.arange(len(tensors["d2t"])), len(tensors["t2d"])
    tensors["d2t"] = torch.minimum(tensors["d2t"] + ids, size - 1 - ids)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def without_norm_output(config: dict[str, Any], folder: Path) -> None:
    """Leaves out that later levels read the normed output, which no tensor shows."""
    del config["norm_output"]


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


# -- cases -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """One export."""

    group: str
    target: str = QWEN
    draft: str
    format: str = "eagle3"
    flavour: str | None = None
    dtype: str = "float32"
    target_dtype: str = "float32"
    damage: Damage | None = None
    is_control: bool = False  # vLLM must accept less than our decoder, as of a damaged export
    is_fault: bool = False  # a fault of vLLM, whose rounds must differ from ours
    is_released: bool = False  # vLLM without our plugin
    is_refused: bool = False  # by vLLM
    is_extra: bool = False  # runs with `--all` only

    @property
    def name(self) -> str:
        damage, released = self.damage and self.damage.__name__, "released" if self.is_released else None
        words = (self.target, self.draft, self.format, self.flavour, self.dtype, damage, released)
        return "-".join(word for word in words if word)

    @property
    def world(self) -> tuple[str, str]:
        """The target, and the kind of its prompts: `all` are those of the pocket world that have one image."""
        is_text = self.group == "one-pass" and self.target == QWEN
        is_text |= self.target in LAYOUTS and LAYOUTS[self.target].image is None
        is_pocket = self.group == "exports" or self.target == ONEVISION
        return self.target, "text" if is_text else "all" if is_pocket else "question"


def cases_of(group: str, target: str, rows: list[dict[str, Any]]) -> list[Case]:
    return [Case(group=group, target=target, **row) for row in rows]


EXPORTS = [
    *({"draft": name} for name in ("token", "reduced", "levels")),
    {"draft": "reduced", "dtype": "bfloat16"},
    {"draft": "token", "format": "speculators"},
    {"draft": "reduced", "format": "speculators", "dtype": "bfloat16"},
    {"draft": "eagle_3_1"},
    {"draft": "eagle_3_1", "format": "speculators", "dtype": "bfloat16"},
    {"draft": "eagle_3_1", "damage": without_norm_output},
    *({"draft": "eagle", "format": "eagle", "flavour": "vllm", "dtype": dtype} for dtype in DTYPES),
    {"draft": "norm", "format": "eagle", "flavour": "plugin"},
    {"draft": "embed", "is_control": True},
    {"draft": "levels", "damage": off_by_one_levels},
    {"draft": "reduced", "damage": absolute_d2t},
    {"draft": "token", "is_released": True, "is_fault": True},
]
ONE_PASS_QWEN = [
    {"draft": "dflash", "format": "dflash", "flavour": "native"},
    {"draft": "peagle", "format": "peagle"},
    {"draft": "dflash", "format": "dflash", "is_extra": True},
]
ONE_PASS_LLAVA = [
    *({"draft": name, "format": "dflash"} for name in ("dflash", "tied")),
    {"draft": "peagle", "format": "peagle"},
    *({"draft": "dflash", "format": "dflash", "damage": one} for one in (other_convention, other_causality, foreign_lm_head)),
    {"draft": "untied", "format": "dflash", "is_fault": True},
    *({"draft": name, "format": "dflash", "is_extra": True} for name in ("causal", "few")),
    {"draft": "peagle2", "format": "peagle", "is_extra": True},
]
FAMILIES = {name: [{"draft": "family"}] for name in (*LAYOUTS, ONEVISION, PUBLISHED) if name != LLAVA}
FAMILIES[QWEN35] = [{"draft": "family", "dtype": "bfloat16", "target_dtype": "bfloat16"}]
FAMILIES[ONEVISION] += [{"draft": "family", "damage": first_levels}]
FAMILIES[PUBLISHED] += [{"draft": "family", "is_released": True, "is_refused": True}]
CASES = [
    *cases_of("exports", QWEN, EXPORTS),
    *cases_of("one-pass", QWEN, ONE_PASS_QWEN),
    *cases_of("one-pass", LLAVA, ONE_PASS_LLAVA),
    *(case for name, rows in FAMILIES.items() for case in cases_of("families", name, rows)),
]


def main() -> int:
    """Builds, trains, exports, serves and compares; returns 0 if all checks pass."""
    parser = new_parser(__doc__, [case.name for case in CASES])
    parser.add_argument("groups", nargs="+", choices=GROUPS, metavar="GROUP", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--all", action="store_true", help="also the cases that take longer")
    args, begin = parser.parse_args(), time.monotonic()
    cases = [case for case in CASES if case.group in args.groups and (not case.is_extra or args.all)]
    cases = [case for case in CASES if case.name in args.only] if args.only else cases
    cores = available_cores()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch, Engine(Path(scratch), args.engine_python, cores[-1]) as engine:
        pin(0, cores[:1])
        lab = Lab(Path(scratch), engine)
        with ThreadPoolExecutor(1) as thread:  # vLLM serves on the last core meanwhile
            served = [thread.submit(lab.serve, case, lab.prepare(case)) for case in cases]
            rows = [future.result() for future in served]
    return conclude("engines", ["export"], rows, begin)


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
        self.world, self.draft, self.ours = cache(self._world), cache(self._draft), cache(self._ours)

    def _world(self, name: str, kind: str) -> World:
        folder = self.scratch / f"{name}-{kind}"
        target = save_target(name, folder / "target")
        rows = answers_to(target, questions(kind, "train", TRAIN_PROMPTS), folder / "training")
        count = NUM_TEXTS if (name, kind) == (QWEN, "text") else NUM_PROMPTS
        prompts, _ = write_prompts(target, questions(kind, "test", count), folder)
        return World(target, folder, rows, prompts)

    def _draft(self, world: tuple[str, str], name: str) -> Path:
        """Trains and saves a draft; returns its folder."""
        begin, made = time.monotonic(), self.world(*world)
        draft = train_draft(made, name)
        draft.save_pretrained(made.folder / f"{name}-draft")
        print(f"trained {name} for {world[0]}: {time.monotonic() - begin:.0f} s", flush=True)
        return made.folder / f"{name}-draft"

    def _ours(self, world: tuple[str, str], name: str, dtype: str, target_dtype: str) -> Answers:
        """Decodes with a draft whose weights are rounded to `dtype`."""
        made = self.world(*world)
        target = made.target
        if target_dtype != "float32":
            target = sage.load_target(made.folder / "target", dtype=DTYPES[target_dtype])
        draft = sage.load_draft(self.draft(world, name), target)
        draft.to(DTYPES[dtype]).to(target.dtype)
        return decode_chain(target, draft, made.prompts, DEPTH, MAX_NEW_TOKENS)

    def prepare(self, case: Case) -> EngineSetting:
        """Decodes on our side, and exports the draft of a case."""
        folder, format_ = self.world(*case.world).folder, find_format(case.format, case.flavour)
        self.ours(case.world, case.draft, case.dtype, case.target_dtype)
        draft = self.draft(case.world, case.draft)
        longest = 1024 if case.group == "one-pass" else 2048
        setting = exported(draft, folder / "target", folder / case.name, format_, case.damage, DTYPES[case.dtype], longest)
        return replace(setting, dtype=case.target_dtype)

    def serve(self, case: Case, setting: EngineSetting) -> Row:
        """Serves a case."""
        begin, is_control = time.monotonic(), case.is_control or case.damage is not None
        theirs = self.engine.trace(setting, self.world(*case.world).folder / PROMPTS_FILE, case.is_released)
        is_refused = REFUSAL in self.engine.last_error if case.is_refused else None
        ours = self.ours(case.world, case.draft, case.dtype, case.target_dtype)
        label = f"{'control: ' if is_control else ''}{case.name}"
        gaps = self._gaps(case, ours, theirs) if theirs and case.target_dtype != "float32" else ()
        flags = {"is_control": is_control, "is_fault": case.is_fault, "by_number": case.group == "exports"}
        row = Row([label], ours, theirs, is_refused=is_refused, gaps=gaps, **flags)
        print(f"served {case.name}: {time.monotonic() - begin:.0f} s; {' | '.join(row.cells()[1:])}", flush=True)
        return row

    def _gaps(self, case: Case, ours: Answers, theirs: Answers) -> list[float | None]:
        """Returns the gaps of the target in float32 where both texts first differ."""
        world = self.world(*case.world)
        texts = zip(world.prompts, ours.tokens, theirs.tokens, strict=True)
        return [gap_at_difference(world.target, prompt, mine, other) for prompt, mine, other in texts]


def train_draft(made: World, name: str) -> Any:
    """Trains a draft on the target's answers."""
    target, (kind, options) = made.target, DRAFTS[name]
    if options.get("feature_levels") == HIGH_LEVELS:
        options = options | {"feature_levels": [2, target.num_layers // 2, target.num_layers - 2]}
    if "vocabulary" in options:  # the most frequent tokens of the answers, in increasing order
        answers = torch.cat([row["input_ids"][row["loss_mask"]] for row in made.rows])
        frequent = torch.bincount(answers, minlength=target.vocab_size).topk(options["vocabulary"])
        options = options | {"vocabulary": frequent.indices.sort().values}
    draft: Any = sage.new_draft(target, kind, seed=0, **options)
    if kind in ("block", "peagle"):  # noise in its first weights makes every part of it matter
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight_name, weight in draft.named_parameters():
                if "self_attn" in weight_name and weight.dim() == 2:
                    weight += 0.1 * torch.randn(weight.shape, generator=generator)
    train(target, draft, kind, made.rows)
    if name in ("tied", "untied"):  # all layers have the k_norm of the first one, or very different ones
        first, *others = (layer.self_attn.k_norm.weight.data for layer in draft.layers)
        for weight in others:
            weight.copy_(first if name == "tied" else first.flip(0) * torch.linspace(0.2, 3, len(first)))
    return draft.eval()


if __name__ == "__main__":
    sys.exit(main())
