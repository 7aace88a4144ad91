"""Section: training epochs."""

from __future__ import annotations

from itertools import pairwise

from benchmarks.papers.figures import Json
from benchmarks.papers.page.expectations import Expectation
from benchmarks.papers.page.markdown import Figures, fill, join, times, title_of
from sage.bench.tables import markdown_table

POLICY = "static"  # the same tree in every round, so that only the draft changes between epochs


def values(figures: Figures) -> dict[str, str]:
    """Returns the placeholders of epochs.md."""
    return {"runs": join(*(_run(name, run) for name, run in figures["epochs"]["runs"].items()))}


def _run(name: str, run: Json) -> str:
    policies = list(run["points"][0]["policies"])
    head = ["epoch", "step", "estimate", *(f"`{one}`" for one in policies), *(f"`{one}` speedup" for one in policies)]
    rows = []
    for point in run["points"]:
        parts = [point["policies"][policy] for policy in policies]
        estimate = f"{point['estimate']:.2f}" if point["estimate"] else ""
        tokens = [f"{part['tokens_per_target_pass']:.2f}" for part in parts]
        rows.append([str(point["epoch"]), str(point["step"]), estimate, *tokens, *(times(part["speedup"]) for part in parts)])
    return fill(
        "epochs_run",
        name=name,
        target=title_of(run["target"]),
        prompts=run["prompts"],
        minutes=f"{run['training_s'] / 60:.1f}",
        table=markdown_table(head, rows),
        command=run["command"],
    )


def curve(run: Json) -> tuple[str, list[float]]:
    """Returns a policy, `POLICY` if measured, and its tokens per target pass after each epoch."""
    measured = run["points"][0]["policies"]
    policy = POLICY if POLICY in measured else next(iter(measured))
    return policy, [point["policies"][policy]["tokens_per_target_pass"] for point in run["points"]]


def expectations(figures: Figures) -> list[Expectation]:
    """SpecVLM: acceptance increases with every epoch."""
    return [_increases(name, run) for name, run in figures["epochs"]["runs"].items()]


def _increases(name: str, run: Json) -> Expectation:
    policy, tokens = curve(run)
    is_met = all(after > before for before, after in pairwise(tokens))
    evidence = f"`{policy}`: {', '.join(f'{value:.2f}' for value in tokens)} tokens per pass"
    if not is_met:
        smallest = min(after - before for before, after in pairwise(tokens))
        evidence += f"; smallest change between epochs {smallest:+.2f}, on {run['prompts']} prompts"
    return Expectation(f"SpecVLM: acceptance increases with every epoch, `{name}`", is_met, evidence)
