"""Section: host overhead and projection to GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from matplotlib.figure import Figure

from benchmarks.papers.figures import Json
from benchmarks.papers.page.headline import OURS
from benchmarks.papers.page.markdown import Expectation, Figures, cells, join, times, title_of
from sage.bench.runners import AUTOREGRESSIVE
from sage.io.tables import markdown_table

MAX_MEASURED, MAX_PROJECTED = 0.05, 0.01  # share of decoding time
SMALL_SHAPE = "qwen2_5_vl_7b"
HOST_OVERHEAD = "host overhead"
SHARE_COLUMNS = ["decoder", "target", "draft", "accept", "commit", "policy", "other", f"**{HOST_OVERHEAD}**", "host per round"]


def values(figures: Figures) -> dict[str, Any]:
    """Returns the placeholders of projection.md."""
    costs = figures["costs"]
    tables = {"overhead": _overhead(figures["overhead"], costs), "projected": _projected(figures["projection"]["rows"])}
    return {"layers_measured": costs["layers_measured"], "layers": costs["layers"], **tables}


def _overhead(figures: Json, costs: Json) -> str:
    shapes = next(iter(next(iter(figures.values())).values()))["projected"]
    columns = [(shape, context) for shape, contexts in shapes.items() for context in contexts]
    projected = [f"{_size(shape)}, L {context}" for shape, context in columns]
    head = [*SHARE_COLUMNS, f"{_size(costs['shape']['name'])}, this machine", *projected]
    blocks = []
    for target, policies in figures.items():
        table = markdown_table(head, [_overhead_row(name, row, columns) for name, row in policies.items()])
        blocks.append(f"### {title_of(target)}\n\n{table}")
    return join(*blocks)


def _overhead_row(name: str, row: Json, columns: list[tuple[str, str]]) -> list[str]:
    projected = [row["projected"].get(shape, {}).get(context) for shape, context in columns]
    cells = [f"{share:.3%}" if share is not None else "" for share in (row["on_this_machine"], *projected)]
    return [f"`{name}`", *(f"{share:.1%}" for share in row["shares"].values()), f"{row['host_ms_per_round']:.3f} ms", *cells]


def _size(shape: str) -> str:
    return shape.rpartition("_")[2].upper()


def _projected(rows: list[Json]) -> str:
    lines = []
    for row in rows:
        speeds = ["{} ({})".format(*cells(part, "speedup", "tokens/pass")) for part in row["policies"].values()]
        lines.append([title_of(row["target"]), _size(row["shape"]), row["device"], str(row["context"]), *speeds])
    return markdown_table(["target", "shape", "device", "L", *(f"`{name}`" for name in rows[0]["policies"])], lines, "<<<>")


def expectations(figures: Figures) -> list[Expectation]:
    """Host overhead is small beside pocket passes and negligible beside large ones; the projected ranking of policies."""
    results = []
    for target, policies in figures["overhead"].items():
        drafting, title = {name: row for name, row in policies.items() if name != AUTOREGRESSIVE}, title_of(target)
        here = {name: row["on_this_machine"] for name, row in drafting.items()}
        at_7b = {name: max(row["projected"].get(SMALL_SHAPE, {}).values(), default=0.0) for name, row in drafting.items()}
        where = f"beside {_size(figures['costs']['shape']['name'])} passes on this machine"
        results += [*measured_overhead(title, drafting), _negligible(title, where, here, digits=3)]
        results.append(_negligible(title, "projected to a 7B target on a GPU", at_7b, digits=2))
    return results + [_fastest(row) for row in figures["projection"]["rows"]]


def measured_overhead(title: str, policies: Mapping[str, Any]) -> list[Expectation]:
    """Returns one expectation for the policies that this project is about, and one for all policies."""
    shares = {name: row["shares"][HOST_OVERHEAD] for name, row in policies.items()}
    above = {name: share for name, share in shares.items() if share > MAX_MEASURED}
    evidence = f"{len(shares) - len(above)} of {len(shares)} policies within the limit"
    if above:
        worst = max(above, key=lambda name: float(above[name]))
        parts = policies[worst]["shares"]
        part = max(("acceptance", "cache commit", "policy and tree", "other"), key=lambda phase: float(parts[phase]))
        evidence += f", highest `{worst}` with {above[worst]:.1%} ({part} {parts[part]:.1%})"
    claim = f"{title}: {HOST_OVERHEAD} at most {MAX_MEASURED:.0%} of decoding time"
    both = ", ".join(f"`{name}` {shares[name]:.1%}" for name in ("sage", OURS))
    return [
        Expectation(f"{claim}, `sage` and `{OURS}`", not {"sage", OURS} & above.keys(), both),
        Expectation(f"{claim}, every policy", not above, evidence),
    ]


def _negligible(title: str, where: str, shares: Mapping[str, float], digits: int) -> Expectation:
    worst = max(shares, key=lambda name: shares[name])
    evidence = f"`{OURS}` {shares[OURS]:.{digits}%}, highest `{worst}` {shares[worst]:.{digits}%}"
    claim = f"{title}: {HOST_OVERHEAD} at most {MAX_PROJECTED:.0%} {where}"
    return Expectation(claim, shares[worst] <= MAX_PROJECTED, evidence)


def _fastest(row: Json) -> Expectation:
    speedups = {name: part["speedup"] for name, part in row["policies"].items()}
    best = max(speedups, key=lambda name: float(speedups[name]))
    where = f"{_size(row['shape'])} costs, L {row['context']}"
    claim = f"Ours: `{OURS}` fastest at {where}, drafts of the {title_of(row['target'])} (projection)"
    return Expectation(claim, best == OURS, f"{times(speedups[OURS])}; fastest `{best}`, {times(speedups[best])}")


PLOTS: dict[str, Callable[[Figures], Figure]] = {}
