"""What a GPU would give: the drafts measured here at the costs of large shapes. A projection, marked as one wherever shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

import sage
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab
from benchmarks.papers.measure.policies import policies
from sage.bench.costs import NODES, WIDTHS, measure_costs
from sage.bench.projection import project
from sage.bench.report_table import HOST_STAGES, SHARES, decode_shares
from sage.bench.roofline import roofline_costs
from sage.bench.runners import AUTOREGRESSIVE
from sage.bench.shapes import shape_named
from sage.costs.tables import Costs, Curve
from sage.replay.recording import Recording
from sage.replay.replay import replay

DTYPE = torch.bfloat16


def measure_projection(lab: Lab) -> None:
    """`costs`: of a large shape's passes on this machine; `overhead`: what is no model compute, measured, beside those passes
    and projected; `projection`: speedups at the costs of large shapes."""
    tables = {target: policies(lab, target) for target in lab.settings.targets}
    study = lab.settings.projection
    inputs = lab.origin(*(lab.settings.main[target] for target in tables)) | lab.study(study)
    inputs |= {"tables": tables}
    here = _costs_here(lab)
    beside = inputs | {"costs": here}
    lab.make("projection", "overhead", beside, lambda: {name: _overhead(lab, table, here) for name, table in tables.items()})
    lab.make("projection", "projection", inputs, lambda: {"rows": _projected(lab, tables)})


def _costs(lab: Lab, shape: str) -> Json:
    study = lab.settings.projection
    return roofline_costs(shape_named(shape), DTYPE, study.bandwidths[shape], NODES, WIDTHS, study.contexts)


def _costs_here(lab: Lab) -> Json:
    plan = lab.settings.costs

    def measure() -> Json:
        return measure_costs(
            shape_named(plan.shape),
            plan.layers,
            DTYPE,
            torch.device("cpu"),
            plan.nodes,
            plan.widths,
            plan.contexts,
            plan.repeats,
        )

    return lab.make("projection", "costs", {"costs": asdict(plan)}, measure)


def _overhead(lab: Lab, table: Mapping[str, Any], here: Json) -> Json:
    """Shares of decoding time by policy: as measured, beside a large shape's passes on this machine, and beside the least
    that passes of large shapes can take on a GPU."""
    projected = {shape: project(table, _costs(lab, shape)) for shape in lab.settings.projection.shapes}
    beside = {row["policy"]: row["share"] for row in project(table, here)}
    rows = {}
    for name, part in table["policies"].items():
        shares = decode_shares(part)
        if shares is None:
            continue
        rows[name] = {
            "shares": dict(zip(SHARES, shares, strict=True)),
            "host_ms_per_round": 1e3 * host_s(part),
            "here": beside.get(name),
            "projected": {
                shape: {str(row["context"]): row["share"] for row in found if row["policy"] == name}
                for shape, found in projected.items()
            },
        }
    return rows


def _projected(lab: Lab, tables: Mapping[str, Any]) -> list[Json]:
    """Per target, shape and context: predicted speedup of every policy as published, replayed at those costs."""
    study, rows = lab.settings.projection, []
    for target, table in tables.items():
        recordings = lab.recordings(target, lab.tested(target, study))
        for shape in study.shapes:
            found = _costs(lab, shape)
            for context in study.contexts:
                speedups = {name: _speedup(recordings, name, table, _at(found, context)) for name in study.policies}
                rows.append(
                    {"target": target, "shape": shape, "device": found["device"], "context": context, "policies": speedups}
                )
    return rows


def _at(costs: Mapping[str, Any], context: int) -> Costs:
    verify = sorted((int(row["nodes"]), row["seconds"]) for row in costs["verify"] if row["context"] == context)
    draft = sorted((int(row["width"]), row["seconds"]) for row in costs["draft"] if row["context"] == context)
    verify_curve = Curve([nodes for nodes, _ in verify], [seconds for _, seconds in verify])
    return Costs(verify_curve, Curve([width for width, _ in draft], [seconds for _, seconds in draft]), context)


def _speedup(recordings: list[Recording], name: str, table: Mapping[str, Any], costs: Costs) -> Json:
    """This machine's bookkeeping per round is charged on both sides."""
    alone_s = host_s(table["policies"][AUTOREGRESSIVE]) + costs.verify(1)
    costs.overhead = host_s(table["policies"][name])
    policy = sage.policy(name)
    if policy.learns:
        replay(recordings, policy, costs)
    summary = replay(recordings, policy, costs).summary()
    figures = ("tokens_per_target_pass", "nodes_per_round", "draft_steps_per_round", "coverage")
    return {"speedup": summary["tokens_per_s"] * alone_s, **{figure: summary[figure] for figure in figures}}


def host_s(part: Mapping[str, Any]) -> float:
    """Seconds of a round that are no model compute."""
    return sum(part["time_s"][stage] for stage in HOST_STAGES) / max(part["rounds"], 1)
