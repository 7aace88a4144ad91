"""Device synchronizations and copies to the device per decoding round, counted on the pretend accelerator.

    PYTHONPATH=tests python -m support.synchronizations --draft runs/demo

The prefill is not counted. A first request fills the caches of tree shapes; the second one is counted.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.accelerator import DEVICE, ROOT, Kind, Traffic, on_device, pretend_accelerator

import sage
from data_prep.pocket import world
from sage.commands.cli import run
from sage.costs.tables import Costs, Curve
from sage.decoding import generation
from sage.drafts.draft import Draft
from sage.drafts.location import find_draft
from sage.io.tables import markdown_table
from sage.planning.base import Policy

POCKET_TARGETS = ROOT / "data_prep" / "pocket" / "targets"
MAX_UPLOADS = 2  # to the device per round
COSTS = Costs(Curve([1, 64], [1.0, 1.3]), Curve([1, 64], [0.02, 0.03]), context=0)  # drafting pays, whatever the machine


@dataclass
class RoundCounts:
    """Counts of one round: levels drafted, synchronizations, copies to the device, those of them that wait."""

    levels: int
    synchronizations: int
    uploads: int
    blocking_uploads: int


@dataclass
class Counts:
    """Counts of one answer; `lines` as in `Traffic`."""

    tokens: list[int]
    rounds: list[RoundCounts]
    lines: Counter[tuple[Kind, str]] = field(default_factory=Counter)

    def per_round(self, name: str) -> float:
        """Mean of a field of `RoundCounts`."""
        return statistics.mean(getattr(one, name) for one in self.rounds)


def new_policy(name: str, **options: Any) -> Policy:
    """A policy with fixed costs, which makes the rounds of `cost_aware` reproducible."""
    policy = sage.policy(name, **options)
    if policy.needs_costs:
        policy.costs = Costs.from_state(COSTS.state())
    return policy


def count_rounds(
    traffic: Traffic, target: sage.Target, draft: Draft | None, inputs: Any, policy: Policy, **options: Any
) -> Counts:
    """Decodes one prompt; `target` and `draft` lie on the accelerator. Arguments as for `sage.generate`."""
    request = generation.start(target, draft, inputs, policy, **options)
    levels = _count_levels(request)
    rounds, lines = [], Counter[tuple[Kind, str]]()
    for number, _ in enumerate(request.rounds()):
        if number:
            counted = RoundCounts(levels.total(), traffic.synchronizations, traffic.uploads, traffic.blocking_uploads)
            rounds.append(counted)
            lines += traffic.lines
        levels.clear()
        traffic.reset()
    return Counts(request.tokens, rounds, lines)


def _count_levels(request: generation.Generation) -> Counter[str]:
    """Counts the levels that the draft proposes from here on."""
    levels = Counter[str]()
    session: Any = request.request.session
    if session is not None:
        propose = session.propose

        def counting(*args: Any, **kwargs: Any) -> Any:
            levels["proposed"] += 1
            return propose(*args, **kwargs)

        session.propose = counting
    return levels


def table(counts: dict[str, Counts]) -> str:
    """Renders means per round as Markdown."""
    head = ("policy", "rounds", "levels", "synchronizations", "copies to the device", "of these blocking")
    fields = ("levels", "synchronizations", "uploads", "blocking_uploads")
    rows = [
        (f"`{name}`", str(len(one.rounds)), *(f"{one.per_round(field):.1f}" for field in fields))
        for name, one in counts.items()
    ]
    return markdown_table(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    options = _parser().parse_args(arguments)
    names = options.policies.split(",")
    if unknown := [name for name in names if name not in sage.POLICIES]:
        raise ValueError(f"--policies: {unknown[0]!r} is unknown; choose from {', '.join(sage.POLICIES)}")
    messages = world.sample("validation", options.prompt, ["caption"]).messages[:1]
    counts = {}
    with pretend_accelerator() as traffic:
        target = on_device(sage.load_target(options.target))
        draft = on_device(_draft(options.draft, target))
        inputs = target.prepare(messages)
        settings = {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature}
        for name in names:
            for _ in range(2):
                counts[name] = count_rounds(traffic, target, draft, inputs, new_policy(name), **settings)
    print(f"{Path(options.target).name}, {len(counts[name].tokens)} tokens, {DEVICE}\n\n{table(counts)}")
    if options.lines:
        for name, one in counts.items():
            print(f"\n{name}\n{Traffic(one.lines).table()}")
    return 0


def _draft(folder: str | None, target: sage.Target) -> Draft:
    if folder is None:
        return sage.new_draft(target, "eagle", seed=0)
    return sage.load_draft(find_draft(folder, "--draft"), target)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m support.synchronizations", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--target", default=str(POCKET_TARGETS / "pocket_qwen2_5_vl"), help="folder of a small target")
    parser.add_argument("--draft", help="folder of a draft, or of a run; default: an untrained EAGLE head")
    parser.add_argument("--policies", default=",".join(sage.POLICIES), help="separated by commas (default: all)")
    parser.add_argument(
        "--prompt", type=int, default=0, help="number of the caption in the validation split of the pocket world (default: 0)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--lines", action="store_true", help="also print the source lines that cause them")
    return parser


if __name__ == "__main__":
    run(main)
