"""Host overhead beside the passes of a large target, and the recorded pocket drafts projected to its costs.

`costs`: passes of a large shape on this machine. `overhead`: share of host overhead, measured, beside those passes, and
projected to GPUs. `projection`: speedups at the costs of large shapes on GPUs; the page labels them as a projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

import sage
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab, select
from benchmarks.papers.markdown import times
from benchmarks.papers.studies.policies import policy_figures
from benchmarks.papers.study import OURS, Expectation, Study
from sage.bench.costs import cost_curve, measure_shape_costs, project, roofline_costs
from sage.bench.report_table import HOST_PHASES, SHARES, decode_shares
from sage.bench.runners import AUTOREGRESSIVE
from sage.bench.settings import NODES, WIDTHS
from sage.bench.shapes import shape_named
from sage.costs.tables import Costs
from sage.planning.base import Policy
from sage.replay.recording import Recording
from sage.replay.replay import replay

DTYPE = torch.bfloat16
REPLAYED = ("tokens_per_target_pass", "nodes_per_round", "draft_steps_per_round", "coverage")
MAX_MEASURED, MAX_PROJECTED = 0.05, 0.01  # share of decoding time
SMALL_SHAPE = "qwen2_5_vl_7b"
HOST_OVERHEAD = SHARES[-1]


def _measure(lab: Lab) -> None:
    plan, tables = lab.sizes["costs"], {target: policy_figures(lab, target) for target in lab.targets}
    inputs = {"study": lab.sizes["projection"], "tables": tables}

    def measure_costs() -> Json:
        shape, grid = shape_named(plan["shape"]), (plan["nodes"], plan["widths"], plan["contexts"])
        return measure_shape_costs(shape, plan["layers"], DTYPE, torch.device("cpu"), *grid, plan["repeats"])

    def measure_overhead() -> Json:
        return {target: _overhead(lab, table, costs) for target, table in tables.items()}

    costs = lab.figures("projection", "costs", measure_costs, costs=plan)
    lab.figures("projection", "overhead", measure_overhead, lab.main_runs(), **inputs, costs=costs)
    lab.figures("projection", "projection", lambda: {"rows": list(_projected(lab, tables))}, lab.main_runs(), **inputs)


def _roofline(lab: Lab, shape: str) -> Json:
    sizes = lab.sizes["projection"]
    return roofline_costs(shape_named(shape), DTYPE, sizes["bandwidths"][shape], NODES, WIDTHS, sizes["contexts"])


def _overhead(lab: Lab, table: Json, costs: Json) -> Json:
    """Returns shares of decoding time by policy: measured, beside passes of a large shape on this machine, and projected."""
    projected = {shape: project(table, _roofline(lab, shape)) for shape in lab.sizes["projection"]["shapes"]}
    on_this_machine = {row["policy"]: row["share"] for row in project(table, costs)}
    return {
        name: {
            "shares": dict(zip(SHARES, shares, strict=True)),
            "host_ms_per_round": 1e3 * host_s(part),
            "on_this_machine": on_this_machine.get(name),
            "projected": {
                shape: {str(row["context"]): row["share"] for row in rows if row["policy"] == name}
                for shape, rows in projected.items()
            },
        }
        for name, part in table["policies"].items()
        if (shares := decode_shares(part)) is not None
    }


def _projected(lab: Lab, tables: Mapping[str, Json]) -> Iterator[Json]:
    """Yields, per target, shape and context, the speedup of every policy as published, replayed at those costs."""
    sizes = lab.sizes["projection"]
    for target, table in tables.items():
        recordings = lab.recordings(target, lab.test_prompts(target, "projection"))
        for shape in sizes["shapes"]:
            costs = _roofline(lab, shape)
            for context in sizes["contexts"]:
                policies = {name: _replayed(recordings, name, table, costs, context) for name in sizes["policies"]}
                yield {"target": target, "shape": shape, "device": costs["device"], "context": context, "policies": policies}


def _replayed(recordings: Sequence[Recording], name: str, table: Json, shape_costs: Json, context: int) -> Json:
    """Returns the figures of a policy; the host overhead per round of this machine is added to both sides of the speedup."""
    verify, draft = (cost_curve(shape_costs[part], key, context) for part, key in (("verify", "nodes"), ("draft", "width")))
    costs = Costs(verify, draft, context, overhead=host_s(table["policies"][name]))
    return predicted(recordings, sage.policy(name), costs, host_s(table["policies"][AUTOREGRESSIVE]))


def predicted(recordings: Sequence[Recording], policy: Policy, costs: Costs, overhead_s: float) -> Json:
    """Returns the figures of a policy replayed at these costs, and its speedup over an autoregressive loop with a host overhead
    of `overhead_s` per token.
    """
    autoregressive_s = overhead_s + costs.verify(1)
    if policy.needs_costs:
        replay(recordings, policy, costs)
    summary = replay(recordings, policy, costs).summary()
    return {"speedup": summary["tokens_per_s"] * autoregressive_s, **select(summary, REPLAYED)}


def host_s(part: Json) -> float:
    """Returns the host overhead per round in seconds."""
    return float(sum(part["time_s"][phase] for phase in HOST_PHASES) / max(part["rounds"], 1))


def _size(shape: str) -> str:
    return shape.rpartition("_")[2].upper()


def _expectations(found: Json) -> Iterator[Expectation]:
    here = f"beside {_size(found['costs']['shape']['name'])} passes on this machine"
    for title, policies in found["overhead"].items():
        drafting = {name: row for name, row in policies.items() if name != AUTOREGRESSIVE}
        at_7b = {name: max(row["projected"].get(SMALL_SHAPE, {}).values(), default=0.0) for name, row in drafting.items()}
        yield from measured_overhead(title, drafting)
        yield _negligible(title, here, {name: row["on_this_machine"] for name, row in drafting.items()}, digits=3)
        yield _negligible(title, "projected to a 7B target on a GPU", at_7b, digits=2)
    for row in found["projection"]["rows"]:
        speedups = {name: float(part["speedup"]) for name, part in row["policies"].items()}
        best = max(speedups, key=speedups.__getitem__)
        where = f"{_size(row['shape'])} costs, L {row['context']}, drafts of the {row['target']}"
        evidence = f"{times(speedups[OURS])}; fastest `{best}`, {times(speedups[best])}"
        yield Expectation(f"Ours: `{OURS}` fastest at {where} (projection)", best == OURS, evidence)


def measured_overhead(title: str, policies: Mapping[str, Json]) -> Iterator[Expectation]:
    """Yields one expectation for the policies that this project is about, and one for all policies."""
    shares = {name: float(row["shares"][HOST_OVERHEAD]) for name, row in policies.items()}
    above = {name: share for name, share in shares.items() if share > MAX_MEASURED}
    evidence = f"{len(shares) - len(above)} of {len(shares)} policies within the limit"
    if above:
        worst = max(above, key=above.__getitem__)
        part, share = max(list(policies[worst]["shares"].items())[2:-1], key=lambda item: float(item[1]))  # of the host phases
        evidence += f", highest `{worst}` with {above[worst]:.1%} ({part} {share:.1%})"
    claim = f"{title}: {HOST_OVERHEAD} at most {MAX_MEASURED:.0%} of decoding time"
    both = ", ".join(f"`{name}` {shares[name]:.1%}" for name in ("sage", OURS))
    yield Expectation(f"{claim}, `sage` and `{OURS}`", not {"sage", OURS} & above.keys(), both)
    yield Expectation(f"{claim}, every policy", not above, evidence)


def _negligible(title: str, where: str, shares: Mapping[str, float], digits: int) -> Expectation:
    worst = max(shares, key=shares.__getitem__)
    evidence = f"`{OURS}` {shares[OURS]:.{digits}%}, highest `{worst}` {shares[worst]:.{digits}%}"
    claim = f"{title}: {HOST_OVERHEAD} at most {MAX_PROJECTED:.0%} {where}"
    return Expectation(claim, shares[worst] <= MAX_PROJECTED, evidence)


STUDY = Study(
    name="projection",
    measure=_measure,
    expectations=_expectations,
    files=("overhead", "projection", "costs"),
)
