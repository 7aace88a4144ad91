"""Plots and page of a validation, from a hand-made report."""

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from support.messages import refused
from support.reports import example_report, with_cost_aware

from checkpoints.store import SaveFailed
from train.report.page import best_policy, headline, render_page
from train.report.plots import write_plots
from train.validation.validate import write

pytestmark = pytest.mark.usefixtures("rendered_plots")


def test_calibration_error_by_depth_before_and_after():
    """Depths 7, 8 and 9 have as many labels each, so their errors after calibration, .07, .08 and .09, average to .08."""
    page = render_page(with_cost_aware(example_report()))
    assert "| `cost_aware` | 1 | 500 | 0.100 | 0.010 |" in page
    assert "| `cost_aware` | 7+ | 1500 | 0.100 | 0.080 |" in page
    assert "| `cost_aware` | all | 4500 | 0.100 | 0.050 |" in page
    assert "over 250 rounds of `cost_aware`" in page and "expected 3.50 accepted draft tokens" in page
    assert "## Calibration" not in render_page(example_report())


def test_replayed_policies_have_a_table():
    page = render_page(with_cost_aware(example_report()))
    assert "| `chain` | 4.02 | 5.0 | 5.0 | 4.90 | 612 | 98.7% | 1.2% |" in page
    assert "same 200 recorded rounds for every policy (policy eagle2, total 64)" in page
    assert "## Replay" not in render_page(example_report())


def test_one_is_singular():
    report = example_report()
    report |= {"repeats": 1, "prompts": 1, "machine": report["machine"] | {"cores": 1, "torch_threads": 1}}
    page = render_page(report)
    assert "- 1 prompt, one run each, " in page and ", 1 core, 1 thread, load" in page


@pytest.mark.slow
def test_every_plot_is_written_at_readme_width(tmp_path):
    plots = write_plots(with_cost_aware(example_report()), tmp_path)
    assert [plot.file for plot in plots] == ["speed.png", "acceptance.png", "time.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(plot.file for plot in plots)
    for plot in plots:
        pixels = imread(tmp_path / plot.file)
        assert pixels.shape[1] == 1292 and pixels.std() > 0.02  # not blank


def test_plots_without_data_are_left_out(tmp_path):
    report = example_report()
    report["policies"] = {"autoregressive": report["policies"]["autoregressive"]}
    assert [plot.file for plot in write_plots(report, tmp_path)] == ["speed.png", "time.png"]


@pytest.mark.slow
def test_page_embeds_plots_by_relative_name_and_shows_the_command(tmp_path):
    report = example_report()
    page = render_page(report, write_plots(report, tmp_path))
    assert "](speed.png)" in page and str(tmp_path) not in page
    assert "sage-validate checkpoint=runs/demo" in page and "transformers 5.23.0" in page
    assert "| `sage` | 4.87 | 3.87 | 336.0 | 2.24x | 2.08-2.37 | 1.99x |" in page
    assert "sage against each of the others, paired by prompt: static 1.20x (1.10-1.30)." in page


def test_headline_names_the_fastest_policy_and_identical_output():
    text = headline(example_report())
    assert "`sage` decodes **2.24x** faster than" in text and "`hf_generate`" in text
    assert "All 48 outputs are identical to greedy decoding of the target." in text


def test_headline_says_when_output_differs_or_the_policy_is_slower():
    report = example_report()
    for part in report["policies"].values():
        part["speedup"] = 0.5
    report["policies"]["sage"]["match"] = 15
    text = headline(report)
    assert "**slower**, at **0.50x** the speed of the fastest" in text and "47 of 48 outputs are identical" in text


def test_headline_of_sampling_mentions_the_seed():
    assert "sampling from the target with the same seed" in headline(example_report() | {"temperature": 0.7})


def test_a_failed_baseline_is_listed_with_its_reason():
    page = render_page(example_report() | {"failed_baselines": {"hf_assisted": "ValueError on prompt p3: no cache"}})
    assert "`hf_assisted` was left out: ValueError on prompt p3: no cache." in page


def test_differing_outputs_show_their_logit_gaps():
    report = example_report()
    report["policies"]["sage"] |= {"match": 14, "first_gaps": [0.00012, 0.031]}
    assert "| `sage` | 14 of 16 | 16 of 16 | 0.00012, 0.031 |" in render_page(report)


def test_host_overhead_is_the_sum_of_the_host_stages():
    """accept + commit + policy + other of 2.4 / 2.24 s, over that plus the 0.02 s of draft prefill."""
    page = render_page(example_report())
    decode_s = 2.4 / 2.24
    expected = 0.08 * decode_s / (decode_s + 0.02)
    row = next(line for line in page.splitlines() if line.startswith("| `sage`") and line.endswith("% |"))
    assert row.endswith(f"| {expected:.1%} |")


def test_best_policy_ignores_autoregressive():
    report = example_report()
    report["policies"]["autoregressive"]["speedup"] = 9.0
    assert best_policy(report) == "sage"


def test_a_full_disk_leaves_no_part_of_a_report(tmp_path, monkeypatch):
    def savefig(figure, path, **_):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", savefig)
    with refused("checks/step", "No space left on device", error=SaveFailed):
        write(with_cost_aware(example_report()), tmp_path / "checks" / "step")
    assert list((tmp_path / "checks").iterdir()) == []
