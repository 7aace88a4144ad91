"""`python -m benchmarks.visual_tokens`: what a draft's visual tokens cost, and what a compressor saves, by their number.

Times are measured on a pocket target whose prompts hold that many visual tokens. Operations and bytes are counted at the sizes
of published targets in bf16, for an `eagle` head of one layer: those of the first token without the vision tower, which a draft
does not save, and those of a round of `LEVELS` levels.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from PIL import Image

import sage
from benchmarks.figures import Figures, counts, describe_machine
from benchmarks.shapes import Shape, shape_named, shapes
from sage.commands.cli import new_parser, run

LEVELS = 5
NEW_TOKENS = 12
ITEM_BYTES = 2  # bf16
RATIO = 20
COMPRESSORS: dict[str, dict[str, Any]] = {  # by label: its options
    "none": {},
    "pool": {"compressor": {"kind": "pool", "ratio": RATIO}},
    "select": {"compressor": {"kind": "select", "ratio": RATIO, "conv_ratio": 3, "queries": 2, "temperature": 1.0}},
    "text_only": {"compressor": {"kind": "text_only"}},
}


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


def counted(shape: Shape, tokens: int, draft_rows: int) -> tuple[float, float, float]:
    """Returns the draft's share of the first token's operations and of a round's bytes, and the share of its cache in these."""
    fused = 2 * shape.hidden_size**2
    draft = prefill_operations(shape, 1, draft_rows, fused)
    first = draft / (draft + prefill_operations(shape, shape.num_layers, tokens))
    weights = (shape.layer_parameters + fused + shape.vocab_size * shape.hidden_size) * ITEM_BYTES
    own = LEVELS * (weights + cache_bytes(shape, 1, draft_rows))
    total = own + shape.pass_parameters * ITEM_BYTES + cache_bytes(shape, shape.num_layers, tokens)
    return first, own / total, LEVELS * cache_bytes(shape, 1, draft_rows) / total


def counted_table(names: Sequence[str], tokens: Sequence[int], out: str | None) -> Figures:
    rows = []
    for shape in map(shape_named, names):
        for count in tokens:
            for label, kept in (("none", count), (f"pool, ratio {RATIO}", -(-count // RATIO))):
                first, round_, cache = counted(shape, count, kept)
                cached = f"{cache_bytes(shape, 1, kept) / 2**20:.1f}"
                rows.append([shape.name, str(count), label, f"{first:.1%}", f"{round_:.1%}", f"{cache:.2%}", cached])
    head = ("target", "visual tokens", "compressor", "of the first token", "of a round", "of which its cache", "cache, MiB")
    notes = [f"the draft's share of operations of the first token, of bytes of a round with {LEVELS} levels; bf16"]
    figures = Figures("counted at published sizes", head, rows, notes, "")
    figures.write(out)
    return figures


# -- measured ----------------------------------------------------------------------------------------------------------------


def prompt_of(target: sage.Target, tokens: int) -> tuple[Any, int]:
    """Returns a prompt with about as many visual tokens, of equal images one after the other, and their number."""
    image = Image.effect_noise((112, 112), 80).convert("RGB")
    slot = target.family.slots["image"]

    def prompt(images: int) -> Any:
        parts = [{"type": "image", "image": image}] * images
        return target.prepare([{"role": "user", "content": [*parts, {"type": "text", "text": "What do you see?"}]}])

    each = int((prompt(4)["input_ids"] == slot).sum()) / 4  # one image alone may have more tiles
    found = prompt(round(tokens / each))
    return found, int((found["input_ids"] == slot).sum())


def measured_table(path: str, tokens: Sequence[int], repeats: int, out: str | None) -> Figures:
    """Times first token and rounds of a pocket target; `out` receives row by row."""
    target, rows = sage.load_target(path, dtype=torch.float32, passes="eager"), list[list[str]]()
    sampling = sage.Sampling(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
    for count in tokens:
        inputs, found = prompt_of(target, count)
        drafts = {name: sage.new_draft(target, "eagle", seed=0, **options) for name, options in COMPRESSORS.items()}
        turns: dict[str, list[Any]] = {name: [] for name in COMPRESSORS}
        for turn in range(repeats + 1):  # interleaved; the first turn warms up
            for name, draft in drafts.items():
                stats = sage.generate(
                    target, draft, dict(inputs), policy=sage.policy("chain", depth=LEVELS), sampling=sampling
                ).stats
                turns[name] += [stats] if turn else []
        for name, runs in turns.items():
            rows.append([str(found), name, str(runs[0].draft_context), *_times(runs)])
            figures = Figures(
                f"{target.name} in float32, an untrained `eagle` head",
                ("visual tokens", "compressor", "draft rows", "first token, ms", "draft's share", "round, ms", "draft's share"),
                rows,
                [f"first token: vision tower and both prefills; round: {LEVELS} levels; medians of {repeats} turns"],
                describe_machine(target.device),
            )
            figures.write(out)
    return figures


def _times(runs: Sequence[Any]) -> list[str]:
    first = median(run.total_s - run.decode_s for run in runs)
    drafted = median(run.time_s["draft_prefill"] for run in runs)
    round_s = median(run.decode_s / run.rounds for run in runs)
    levels = median(run.time_s["draft_steps"] / run.rounds for run in runs)
    return [f"{1e3 * first:.1f}", f"{drafted / first:.1%}", f"{1e3 * round_s:.2f}", f"{levels / round_s:.1%}"]


def main() -> int:
    parser = new_parser("python -m benchmarks.visual_tokens", description=__doc__)
    parser.add_argument("--tokens", metavar="N,N", default="1024,4096,16384", help="visual tokens; default %(default)s")
    parser.add_argument("--shapes", metavar="A,B", help=f"count at these sizes instead of measuring: {', '.join(shapes())}")
    parser.add_argument("--target", default="pocket_qwen2_5_vl", help="pocket target to measure; default %(default)s")
    parser.add_argument("--repeats", type=int, default=5, help="timed turns; default %(default)s")
    parser.add_argument("--out", metavar="FILE", help="also write the table as JSON")
    args = parser.parse_args()
    tokens = counts(args.tokens)
    if args.shapes:
        figures = counted_table(args.shapes.split(","), tokens, args.out)
    else:
        figures = measured_table(args.target, tokens, args.repeats, args.out)
    print(figures.text())
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
