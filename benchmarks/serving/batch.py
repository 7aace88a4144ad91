"""`python -m benchmarks.serving.batch`: answers per second by the number of requests that are decoded together.

Every batch size decodes the same prompts of the pocket world, in turns; every text is compared with that of batch size 1.
Policies keep what they learn from turn to turn.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

import sage
from benchmarks.engines.prompts import pocket_prompts
from benchmarks.wide import add_widen_option, widened
from sage.commands.cli import new_parser, run
from sage.io.tables import text_table
from sage.runtime.pass_modes import PassMode
from sage.trees import AUTOREGRESSIVE


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table; returns 1 if a text differs."""
    parser = new_parser("python -m benchmarks.serving.batch", description=__doc__)
    parser.add_argument(
        "--target", default="pocket_qwen2_5_vl", help="name or folder of a pocket target (default: %(default)s)"
    )
    parser.add_argument("--draft", metavar="RUN", help="draft for the target; without it, autoregressive decoding alone")
    parser.add_argument("--policies", default="chain", metavar="A,B", help="policies with the draft (default: %(default)s)")
    parser.add_argument("--batch-sizes", default="1,2,4,8", metavar="N,..", help="batch sizes (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=64, help="prompts (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="turns, of which the median counts (default: %(default)s)")
    add_widen_option(parser)
    args = parser.parse_args(argv)
    target = sage.load_target(widened(args.target, args), dtype=torch.float32, passes=PassMode.compiled)
    draft = sage.load_draft(args.draft, target) if args.draft else None
    inputs = [target.prepare(prompt.messages) for prompt in pocket_prompts(args.prompts)]
    sizes = [int(size) for size in args.batch_sizes.split(",")]
    policies = [AUTOREGRESSIVE, *(args.policies.split(",") if draft is not None else [])]
    rows, num_different = [], 0
    for policy in policies:
        seconds, different = _measure(target, draft, inputs, policy, sizes, args)
        num_different += sum(different)
        for size, own, wrong in zip(sizes, seconds, different, strict=True):
            same = f"{len(inputs) - wrong}/{len(inputs)}"
            rows.append([policy, str(size), f"{len(inputs) / own:.1f}", f"{seconds[0] / own:.2f}x", same])
    print(text_table(["policy", "requests", "answers/s", f"to {sizes[0]}", "same text"], rows))
    return int(num_different > 0)


def _measure(
    target: sage.Target, draft: Any, inputs: Sequence[Any], policy: str, sizes: Sequence[int], args: Any
) -> tuple[list[float], list[int]]:
    """Returns, for every batch size, the median seconds for all prompts, and the texts that differ from the first size's."""
    options = {"max_new_tokens": args.max_new_tokens}
    policies = [sage.policy(policy) for _ in sizes]
    for size, own in zip(sizes, policies, strict=True):  # compiles what is missing
        sage.generate_batch(target, draft, inputs[: 2 * size], own, batch_size=size, **options)
    seconds: list[list[float]] = [[] for _ in sizes]
    different = [0 for _ in sizes]
    first: list[list[int]] = []
    for _ in range(args.repeats):
        for place, size in enumerate(sizes):
            start = time.perf_counter()
            out = sage.generate_batch(target, draft, inputs, policies[place], batch_size=size, **options)
            seconds[place].append(time.perf_counter() - start)
            tokens = [one.tokens.tolist() for one in out]
            first = first or tokens
            different[place] = max(different[place], sum(own != other for own, other in zip(tokens, first, strict=True)))
    return [median(own) for own in seconds], different


if __name__ == "__main__":
    sys.exit(run(main))
