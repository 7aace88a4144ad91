"""Projects the recorded pocket drafts to the costs of large targets on GPUs; the page labels these figures as a projection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import sage
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab
from benchmarks.papers.measure.policies import policy_figures
from sage.bench.costs import NODES, WIDTHS, measure_shape_costs
from sage.bench.projection import cost_curve, project
from sage.bench.report_table import HOST_PHASES, SHARES, decode_shares
from sage.bench.roofline import roofline_costs
from sage.bench.runners import AUTOREGRESSIVE
from sage.bench.shapes import shape_named
from sage.costs.tables import Costs
from sage.replay.recording import Recording
from sage.replay.replay import replay

DTYPE = torch.bfloat16


def measure(lab: Lab) -> None:
    """Measures `costs`, `overhead` and `projection`.

    `costs`: passes of a large shape on this machine. `overhead`: share of host overhead, measured, beside those passes, and
    projected to GPUs. `projection`: speedups at the costs of large shapes on GPUs.
    """
    plan, tables = lab.settings.costs, {target: policy_figures(lab, target) for target in lab.settings.targets}
    inputs = {"study": lab.settings.projection, "tables": tables}

    def measure_costs() -> Json:
        shape, device = shape_named(plan.shape), torch.device("cpu")
        return measure_shape_costs(shape, plan.layers, DTYPE, device, plan.nodes, plan.widths, plan.contexts, plan.repeats)

    def measure_overhead() -> Json:
        return {target: _overhead(lab, table, costs) for target, table in tables.items()}

    costs = lab.figures("projection", "costs", measure_costs, costs=plan)
    lab.figures("projection", "overhead", measure_overhead, lab.main_runs(), **inputs, costs=costs)
    lab.figures("projection", "projection", lambda: {"rows": _projected(lab, tables)}, lab.main_runs(), **inputs)


def _roofline(lab: Lab, shape: str) -> Json:
    study = lab.settings.projection
    return roofline_costs(shape_named(shape), DTYPE, study.bandwidths[shape], NODES, WIDTHS, study.contexts)


def _overhead(lab: Lab, table: Mapping[str, Any], costs: Json) -> Json:
    """Returns shares of decoding time by policy: measured, beside passes of a large shape on this machine, and projected."""
    projected = {shape: project(table, _roofline(lab, shape)) for shape in lab.settings.projection.shapes}
    on_this_machine = {row["policy"]: row["share"] for row in project(table, costs)}
    rows = {}
    for name, part in table["policies"].items():
        shares = decode_shares(part)
        if shares is None:
            continue
        rows[name] = {
            "shares": dict(zip(SHARES, shares, strict=True)),
            "host_ms_per_round": 1e3 * host_s(part),
            "on_this_machine": on_this_machine.get(name),
            "projected": {
                shape: {str(row["context"]): row["share"] for row in shares_of_shape if row["policy"] == name}
                for shape, shares_of_shape in projected.items()
            },
        }
    return rows


def _projected(lab: Lab, tables: Mapping[str, Any]) -> list[Json]:
    """Returns, per target, shape and context, the speedup of every policy as published, replayed at those costs."""
    study, rows = lab.settings.projection, []
    for target, table in tables.items():
        recordings = lab.recordings(target, lab.test_prompts(target, study))
        for shape in study.shapes:
            costs = _roofline(lab, shape)
            for context in study.contexts:
                speedups = {name: _speedup(recordings, name, table, _at(costs, context)) for name in study.policies}
                where = {"target": target, "shape": shape, "device": costs["device"], "context": context}
                rows.append({**where, "policies": speedups})
    return rows


def _at(costs: Mapping[str, Any], context: int) -> Costs:
    return Costs(cost_curve(costs["verify"], "nodes", context), cost_curve(costs["draft"], "width", context), context)


def _speedup(recordings: list[Recording], name: str, table: Mapping[str, Any], costs: Costs) -> Json:
    """The host overhead per round of this machine is added to both sides."""
    autoregressive_s = host_s(table["policies"][AUTOREGRESSIVE]) + costs.verify(1)
    costs.overhead = host_s(table["policies"][name])
    policy = sage.policy(name)
    if policy.needs_costs:
        replay(recordings, policy, costs)
    summary = replay(recordings, policy, costs).summary()
    figures = ("tokens_per_target_pass", "nodes_per_round", "draft_steps_per_round", "coverage")
    return {"speedup": summary["tokens_per_s"] * autoregressive_s, **{figure: summary[figure] for figure in figures}}


def host_s(part: Mapping[str, Any]) -> float:
    """Returns the host overhead per round in seconds."""
    return sum(part["time_s"][phase] for phase in HOST_PHASES) / max(part["rounds"], 1)
