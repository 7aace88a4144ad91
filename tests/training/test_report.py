"""The pages and plots of a validation, from a hand-made report; plots are read before they are rendered."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from support.made_pages import example_report, with_cost_aware
from support.messages import refused

from checkpoints.store import SaveFailed
from sage.bench.report_table import format_table
from train.report.compare import draw_comparison
from train.report.page import PLOTS, best_policy, headline, render_page, write_plots
from train.report.web import markdown_html
from train.validation.validate import write


def test_every_figure_of_a_report_is_on_its_page():
    report = with_cost_aware(example_report()) | {"failed_baselines": {"hf_assisted": "ValueError on prompt p3: no cache"}}
    report["policies"]["sage"] |= {"first_gaps": [0.00012, 0.031]}
    page = render_page(report)
    for row in (
        "| sage | 4.87 | 3.87 | 336.0 | 2.24x | 2.08-2.37 | 1.99x | 16/16 | 16/16 |",
        "| hf_prompt_lookup |  |  | 163.0 | 1.09x | 0.98-1.21 | 1.05x | - |  |",
        "| caption | 16 | `sage` | 4.90 | 2.30x |",
        "static 1.20x (1.10-1.30)",
        "checkpoint=runs/demo",
        "transformers 5.23.0",
        "`hf_assisted` was left out: ValueError on prompt p3: no cache.",
        "at the first difference: `sage` 0.00012, 0.031.",
    ):
        assert row in page


def test_headline_names_the_fastest_policy_that_drafts_and_identical_output():
    report = example_report()
    report["policies"]["autoregressive"]["speedup"] = 9.0
    assert best_policy(report) == "sage"
    text = headline(report)
    assert "`sage` decodes **2.24x** faster than" in text and "`hf_generate`" in text
    assert "All 32 outputs are identical to greedy decoding of the target." in text
    assert "sampling from the target with the same seed" in headline(report | {"temperature": 0.7})


@pytest.mark.slow
@pytest.mark.usefixtures("rendered_plots")
def test_every_plot_is_written_at_readme_width_and_embedded_by_name(tmp_path: Path):
    report = with_cost_aware(example_report())
    plots = write_plots(report, tmp_path)
    assert [plot.file for plot in plots] == ["speed.png", "acceptance.png", "time.png"]
    for plot in plots:
        pixels = imread(tmp_path / plot.file)
        assert pixels.shape[1] == 1292 and pixels.std() > 0.02  # not blank
    page = render_page(report, plots)
    assert "](speed.png)" in page and str(tmp_path) not in page
    assert markdown_html(page, tmp_path).count('src="data:image/png;base64,') == 3


def test_markdown_becomes_sortable_tables_and_relative_links(tmp_path: Path):
    (tmp_path / "a.html").touch()
    text = "| `a<b` | n |\n| :-- | --: |\n| x_1 | 2 |\n\n[a](a.md) [b](b.md) [c](javascript:d)\n\nwarning: <b>"
    page = markdown_html(text, tmp_path)
    assert '<table class="sortable">' in page and '<th class="name"><code>a&lt;b</code></th>' in page and "<td>2</td>" in page
    assert 'href="a.html"' in page and 'href="b.md"' in page and "[c](javascript:d)" in page
    assert '<p class="warning">warning: &lt;b&gt;</p>' in page and "style=" not in page


@pytest.mark.usefixtures("rendered_plots")
def test_a_full_disk_leaves_no_part_of_a_report(tmp_path: Path, monkeypatch):
    def savefig(figure, path, **_):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", savefig)
    with refused("checks/step", "No space left on device", error=SaveFailed):
        write(with_cost_aware(example_report()), tmp_path / "checks" / "step")
    assert list((tmp_path / "checks").iterdir()) == []


def drawn(file: str, report: dict[str, Any]) -> Axes:
    made = next(plot for plot in PLOTS if plot.file == file).draw(report)
    assert made is not None
    (axes,) = made.axes
    return axes


def test_the_time_per_token_is_that_of_the_table():
    """Bars and their numbers are 1 / `tokens_per_s`, with the shares of the phases after the target's prefill."""
    report = example_report()
    axes, parts = drawn("time.png", report), report["policies"].values()
    per_token = [1e3 / part["tokens_per_s"] for part in parts]
    assert [text.get_text().strip() for text in axes.texts] == [f"{ms:.2f} ms" for ms in per_token]
    assert sum(bar.get_width() for bar in axes.patches) == pytest.approx(sum(per_token))
    assert f" {per_token[-1]:.3f} " in format_table(report)


@pytest.mark.parametrize(("load", "is_named"), [(2.4, False), (2.6, True)])
def test_a_busy_machine_is_named_beside_the_speeds(load: float, is_named: bool):
    report = example_report()
    report["machine"] |= {"load_average": load, "cores": 2}
    assert ("The machine was busy (load average 2.6 on 2 cores)" in format_table(report)) == is_named


def test_a_comparison_shows_every_policy_with_its_interval():
    policies = example_report()["policies"]
    made = draw_comparison({"runs": [{"run": "a", "changed": {}, "policies": policies}], "changed": []})
    assert made is not None
    _, speedups = made.axes
    static, adaptive = (dots.get_offsets()[0].tolist() for dots in speedups.collections)
    assert (static[0], adaptive[0]) == (policies["static"]["speedup"], policies["sage"]["speedup"]) and static[1] != adaptive[1]
    intervals = [policies[name]["speedup_ci"] for name in ("static", "sage")]
    assert [list(line.get_xdata()) for line in speedups.lines[:2]] == intervals
