"""Projects host overhead measured with a small target to the cost tables of a large target.

Policy, acceptance, cache commit and other host work take about the same time for every model. Their time per round, measured
with a small target, is compared with the model time of a round of the large target: verification of the same number of nodes
and the same number of draft levels, from the cost tables. All levels are assumed to have the same width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sage.bench.report_table import HOST_PHASES, decode_shares
from sage.costs.tables import Curve
from sage.io.tables import text_table


def project(report: Mapping[str, Any], costs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns, per drafting policy and context length, seconds of model compute and of host overhead per round, and its share.

    Args:
        report: a `report.json`.
        costs: cost tables of the large target, from `measure_shape_costs`. Raises ValueError if one of the two is malformed.
    """
    if "policies" not in report or costs.get("kind") != "costs":
        raise ValueError("--project: needs a report.json of sage-validate or sage.bench")
    contexts = sorted({int(row["context"]) for row in costs["verify"]})
    parts = {name: part for name, part in report["policies"].items() if part["draft_steps_per_round"] > 0}
    return [_row(name, part, costs, context) for name, part in parts.items() for context in contexts]


def _row(name: str, part: Mapping[str, Any], costs: Mapping[str, Any], context: int) -> dict[str, Any]:
    levels = part["draft_steps_per_round"]
    width = max(part["nodes_per_round"] / levels, 1.0)
    compute_s = cost_curve(costs["verify"], "nodes", context)(round(part["nodes_per_round"]) + 1)
    compute_s += levels * cost_curve(costs["draft"], "width", context)(round(width))
    host_s = sum(part["time_s"][phase] for phase in HOST_PHASES) / part["rounds"]
    shares = decode_shares(part)
    return {
        "policy": name,
        "context": context,
        "compute_s": compute_s,
        "bookkeeping_s": host_s,
        "share": host_s / (host_s + compute_s),
        "measured_share": shares[-1] if shares else 0.0,
    }


def cost_curve(rows: Sequence[Mapping[str, float]], key: str, context: int) -> Curve:
    """Returns the seconds of passes at one context length, by the count `key` of each row."""
    chosen = sorted((int(row[key]), row["seconds"]) for row in rows if row["context"] == context)
    return Curve([count for count, _ in chosen], [seconds for _, seconds in chosen])


def format_projection(rows: Sequence[Mapping[str, Any]], name: str, measured: str) -> str:
    """Returns a table of the share of host overhead: of the target `measured`, and projected to the shape `name`."""
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    table = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = {row["context"]: row for row in rows if row["policy"] == policy}
        first = own[contexts[0]]
        shares = [f"{own[context]['share']:.2%}" for context in contexts]
        table.append([policy, f"{1e3 * first['bookkeeping_s']:.3f}", f"{first['measured_share']:.1%}", *shares])
    head = ["policy", "ms/round", measured[:22], *(f"L = {context}" for context in contexts)]
    title = f"share of host overhead in decoding time: measured, and projected to {name}"
    return f"{title}\n{text_table(head, table, ruled=False)}"
