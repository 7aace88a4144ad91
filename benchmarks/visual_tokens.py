"""`python -m benchmarks.visual_tokens`: what a draft's visual tokens cost, and what each compressor leaves of it.

Operations and bytes are counted at the sizes of a published target in bf16, for an `eagle` head of one layer: those of the
first token without the vision tower, which a draft does not save, and those of a round of `LEVELS` levels. Times and tokens per
pass are measured on a pocket target whose prompts have that many visual tokens, with the heads in --runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

import sage
from benchmarks.figures import Figures, counts, describe_machine, fill_blocks
from benchmarks.shapes import Shape, shape_named, shapes
from data_prep.build import prompts as held_out_prompts
from data_prep.conversation import media_parts
from sage.commands.cli import new_parser, run
from sage.drafts.compressor import MODES, Resampler
from sage.io.files import write_text
from sage.io.tables import markdown_table
from train.config.hydra_app import compose
from train.config.schema import Config
from train.plan.memory import build_on_meta, draft_rows

PAGE = Path(__file__).parents[1] / "docs" / "compressor.md"
LEVELS = 5
NEW_TOKENS = 32
ITEM_BYTES = 2  # bf16
KINDS = ("none", *MODES)
HEAD = ("`draft/compressor`", "first token, counted", "round, counted", "first token", "round, ms", "tokens/pass")
UNKNOWN = ["-"] * 3


# -- counted -----------------------------------------------------------------------------------------------------------------


def prefill_operations(shape: Shape, layers: int, rows: int, fused: int = 0) -> float:
    """Returns the floating-point operations of reading `rows` tokens: linear layers and causal attention.

    Args:
        fused: parameters of further linear layers per token.
    """
    linear = 2 * (layers * shape.layer_parameters + fused) * rows
    return linear + layers * 2 * rows**2 * shape.num_heads * shape.head_dim


def cache_bytes(shape: Shape, layers: int, rows: int) -> int:
    return 2 * layers * shape.num_kv_heads * shape.head_dim * rows * ITEM_BYTES


def counted(shape: Shape, kind: str, tokens: int) -> tuple[float, float]:
    """Returns the draft's share of the first token's operations, and its cache's share of a round's bytes."""
    head = _head(shape.name, kind)
    rows, fused = draft_rows(head, tokens, tokens), 2 * shape.hidden_size**2
    attended = [part for part in head.modules() if isinstance(part, Resampler)]  # reads all tokens; the others are cheap
    read = sum(proj.weight.numel() for part in attended for proj in (part.k_proj, part.v_proj))
    draft = prefill_operations(shape, 1, rows, fused) + 2 * read * tokens
    weights = (shape.layer_parameters + fused + shape.vocab_size * shape.hidden_size) * ITEM_BYTES
    own = cache_bytes(shape, 1, rows)
    total = shape.pass_parameters * ITEM_BYTES + cache_bytes(shape, shape.num_layers, tokens) + LEVELS * (weights + own)
    return draft / (draft + prefill_operations(shape, shape.num_layers, tokens)), LEVELS * own / total


@cache
def _head(target: str, kind: str) -> Any:
    data = ["data=llava_instruct", "data.path=/no/data", "launch.plan=true"]
    config = compose("config", [f"target={target}", "draft=eagle", f"draft/compressor={kind}", *data], Config)
    return build_on_meta(config).draft.network


# -- measured ----------------------------------------------------------------------------------------------------------------


def prompts_of(target: sage.Target, name: str, tokens: int, number: int) -> list[Any]:
    """Returns prompts with about as many visual tokens: a held-out question after its image and those of others."""
    config = compose("config", [f"target={name}", "data=pocket", "draft=eagle"], Config)
    asked = []
    for prompt in held_out_prompts(config.data, "validation", 8 * number):
        question = prompt.messages[:1]
        if [part["type"] for part in media_parts(question)] == ["image"]:
            asked.append(question[0]["content"])
    slot, found = target.family.slots["image"], list[Any]()
    for start in range(number):
        each = int((target.prepare([{"role": "user", "content": asked[start]}])["input_ids"] == slot).sum())
        others = islice(cycle(asked[start + 1 :] + asked[: start + 1]), tokens // each - 1)
        images = [part for content in others for part in content if part["type"] == "image"]
        found.append(target.prepare([{"role": "user", "content": [*images, *asked[start]]}]))
    return found


def measured(name: str, tokens: int, repeats: int, runs: Path | None) -> dict[str, list[str]]:
    """Returns, by compressor, the draft's share of the first token, a round in ms, and tokens per pass."""
    target = sage.load_target(name, dtype=torch.float32, passes="eager")
    policy = sage.policy("chain", depth=LEVELS)
    sampling = sage.Sampling(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
    drafts = {kind: _draft(target, name, kind, runs) for kind in KINDS}
    turns: dict[str, list[Any]] = {kind: [] for kind in drafts}
    prompts = prompts_of(target, name, tokens, repeats)
    for turn, inputs in enumerate([*prompts_of(target, name, 64, 1), *prompts]):  # interleaved; the first turn warms up
        for kind, draft in drafts.items():
            stats = sage.generate(target, draft, dict(inputs), policy=policy, sampling=sampling).stats
            turns[kind] += [stats] if turn else []
    return {kind: _times(found, runs is not None) for kind, found in turns.items()}


def _draft(target: sage.Target, name: str, kind: str, runs: Path | None) -> Any:
    if runs is not None:
        return sage.load_draft(runs / kind, target)
    draft: Any = compose("config", [f"target={name}", "data=pocket", "draft=eagle", f"draft/compressor={kind}"], Config).draft
    options = {} if kind == KINDS[0] else {"compressor": vars(draft.compressor)}
    return sage.new_draft(target, "eagle", seed=0, **options)


def _times(runs: Sequence[Any], is_trained: bool) -> list[str]:
    first = median(run.total_s - run.decode_s for run in runs)
    drafted = median(run.time_s["draft_prefill"] for run in runs)
    round_s = median(run.decode_s / run.rounds for run in runs)
    accepted = f"{mean(run.tokens_per_target_pass for run in runs):.2f}" if is_trained else "-"
    return [f"{100 * drafted / first:.1f}", f"{1e3 * round_s:.1f}", accepted]


def main() -> int:
    parser = new_parser("python -m benchmarks.visual_tokens", description=__doc__)
    parser.add_argument("--tokens", metavar="N,N", default="1024,4096,16384", help="visual tokens; default %(default)s")
    parser.add_argument("--shape", default="qwen2_5_vl_7b", help=f"counted; default %(default)s; of {', '.join(shapes())}")
    parser.add_argument("--target", metavar="NAME", help="measure on this pocket target; default: count only")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="trained heads, DIR/COMPRESSOR; default: fresh ones")
    parser.add_argument("--most", type=int, default=sys.maxsize, metavar="N", help="count alone beyond N visual tokens")
    parser.add_argument("--repeats", type=int, default=5, help="timed prompts; default %(default)s")
    parser.add_argument("--out", metavar="FILE", help="also write the table as JSON, after each number of tokens")
    parser.add_argument("--page", action="store_true", help=f"write the table into docs/{PAGE.name}")
    args = parser.parse_args()
    tokens, shape = counts(args.tokens), shape_named(args.shape)
    cells: dict[str, list[list[str]]] = {kind: [] for kind in KINDS}
    for count in tokens:
        times = measured(args.target, count, args.repeats, args.runs) if args.target and count <= args.most else {}
        for kind, found in cells.items():
            first, cached = counted(shape, kind, count)
            found.append([f"{100 * first:.1f}", f"{100 * cached:.2f}", *times.get(kind, UNKNOWN)])
        figures = _figures(cells, tokens, shape.name, args.target)
        figures.write(args.out)
    print(figures.text())
    if args.page:
        table = markdown_table(figures.head, figures.rows, "<" + ">" * (len(figures.head) - 1))
        text = "\n\n".join((table, " ".join((figures.title, *figures.notes, figures.machine))))
        write_text(PAGE, fill_blocks(PAGE.read_text(encoding="utf-8"), "table", lambda _: text))
    return 0


def _figures(cells: dict[str, list[list[str]]], tokens: Sequence[int], shape: str, target: str | None) -> Figures:
    """Returns a row per compressor; a cell has the values for each number of tokens."""
    rows = [[f"`{kind}`", *("/".join(values) for values in zip(*found, strict=True))] for kind, found in cells.items()]
    numbers = "/".join(f"{count:,}" for count in tokens)
    title = f"{numbers} visual tokens: the draft's share in %, counted at {shape} (of a round that of its cache),"
    notes = [f"measured on {target} in float32 with chains of {LEVELS} levels;"] if target else []
    return Figures(title, HEAD, rows, notes, describe_machine(torch.device("cpu")))


if __name__ == "__main__":
    sys.exit(run(main))
