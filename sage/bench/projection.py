"""What bookkeeping would weigh beside a large target: a report's host work over measured costs of the target's shape.

Policy, acceptance, cache commit and everything else that is no model compute run on the host and cost about the same
whatever the model. So their time per round, measured with a small target, stands against a round of the large one:
verification of as many nodes and as many draft levels, from the cost tables. The levels are taken to be equally wide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sage.bench.table import BOOKKEEPING, decode_shares
from sage.costs.tables import Curve


def project(report: Mapping[str, Any], costs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Per drafting policy and context length: seconds of a round of model compute, of bookkeeping, and its share.

    Args:
        report: a `report.json`, measured with the decoder to be judged.
        costs: what `measure_costs` returns for the large target.

    Raises:
        ValueError: one of the two is something else.
    """
    if "policies" not in report or costs.get("kind") != "costs":
        raise ValueError("--project: needs a report.json of sage-validate or sage.bench")
    contexts = sorted({int(row["context"]) for row in costs["verify"]})
    parts = {name: part for name, part in report["policies"].items() if part["draft_steps_per_round"] > 0}
    return [_row(name, part, costs, context) for name, part in parts.items() for context in contexts]


def _row(name: str, part: Mapping[str, Any], costs: Mapping[str, Any], context: int) -> dict[str, Any]:
    levels = part["draft_steps_per_round"]
    width = max(part["nodes_per_round"] / levels, 1.0)
    compute_s = _curve(costs["verify"], "nodes", context)(round(part["nodes_per_round"]) + 1)
    compute_s += levels * _curve(costs["draft"], "width", context)(round(width))
    host_s = sum(part["time_s"][stage] for stage in BOOKKEEPING) / part["rounds"]
    share = host_s / (host_s + compute_s)
    shares = decode_shares(part)
    return {
        "policy": name,
        "context": context,
        "compute_s": compute_s,
        "bookkeeping_s": host_s,
        "share": share,
        "measured_share": shares[-1] if shares else 0.0,
    }


def _curve(rows: Sequence[Mapping[str, float]], key: str, context: int) -> Curve:
    chosen = sorted((int(row[key]), row["seconds"]) for row in rows if row["context"] == context)
    return Curve([count for count, _ in chosen], [seconds for _, seconds in chosen])


def format_projection(rows: Sequence[Mapping[str, Any]], name: str, measured: str) -> str:
    """A small table: what is no model compute, as a share of decoding time, with the small target and beside the large one.

    Args:
        rows: of `project`.
        name: the large target's shape.
        measured: the target that the report is about.
    """
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    head = f"{'policy':24}{'ms/round':>10}{measured[:22]:>24}" + "".join(f"{f'L = {context}':>12}" for context in contexts)
    lines = [f"what is no model compute, of decoding time: measured, and projected to {name}", head]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = {row["context"]: row for row in rows if row["policy"] == policy}
        first = own[contexts[0]]
        cells = "".join(f"{own[context]['share']:>12.2%}" for context in contexts)
        lines.append(f"{policy:24}{1e3 * first['bookkeeping_s']:>10.3f}{first['measured_share']:>24.1%}{cells}")
    return "\n".join(lines)
