"""Section: training epochs."""

from __future__ import annotations

from itertools import pairwise

from matplotlib.figure import Figure

from benchmarks.papers.figures import Json
from benchmarks.papers.page.markdown import Expectation, Figures, by_policy, fill, join, title_of
from benchmarks.papers.page.plots import COLORS, integer_axis, line
from sage.io.tables import markdown_table
from train.report import style

POLICY = "static"  # the same tree in every round, so that only the draft changes between epochs


def values(figures: Figures) -> dict[str, str]:
    """Returns the placeholders of epochs.md."""
    return {"runs": join(*(_run(name, run) for name, run in figures["epochs"]["runs"].items()))}


def _run(name: str, run: Json) -> str:
    head, cells = by_policy([point["policies"] for point in run["points"]])
    rows = [
        [str(point["epoch"]), str(point["step"]), f"{point['estimate']:.2f}" if point["estimate"] else "", *row]
        for point, row in zip(run["points"], cells, strict=True)
    ]
    return fill(
        "epochs_run",
        name=name,
        target=title_of(run["target"]),
        prompts=run["prompts"],
        minutes=f"{run['training_s'] / 60:.1f}",
        table=markdown_table(["epoch", "step", "estimate", *head], rows),
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


def draw_epochs(figures: Figures) -> Figure:
    """Draws tokens per target pass by epoch, a line per run."""
    subtitle = "tokens per target pass of the static tree on held-out prompts"
    figure = style.figure(3.3, "Acceptance by training epoch", subtitle)
    axes = figure.subplots()
    for color, (name, run) in zip(COLORS, figures["epochs"]["runs"].items(), strict=False):
        epochs, (_, tokens) = [point["epoch"] for point in run["points"]], curve(run)
        line(axes, epochs, tokens, color, name)
        axes.text(epochs[-1], tokens[-1], f"  {tokens[-1]:.2f}", va="center", fontsize=9, color=color)
    integer_axis(axes, "epoch")
    axes.legend(loc="best", handlelength=1.4)
    style.despine(axes)
    return figure


PLOTS = {"epochs.png": draw_epochs}
