"""`python -m benchmarks.gpu_page [DIR ..]`: writes what benchmarks.gpu_quarter_hour has measured, wherever, into docs/gpu.md.

A block between `<!-- figures: NAME NAME -->` and `<!-- end -->` receives the tables of these steps, each with its command and
machine; of a step without a table its output. A block without a figure keeps its text. Without DIR, only the block `expected`
is written: floors follow from the data sheet of an H100, estimates from `launch.gpu_*` and the plan (docs/plan.md).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import training
from benchmarks.figures import Figures, fill_blocks
from benchmarks.gpu_quarter_hour import (
    CONTEXTS,
    FIGURES,
    LARGE,
    NODES,
    RESULTS,
    STEP_BATCH,
    STEP_LENGTH,
    TIMED_STEP,
    TRAIN_LARGE,
)
from sage.commands.cli import new_parser, run
from sage.io.files import read_json, write_text
from sage.io.tables import markdown_table
from sage.targets.families import family_of
from train.config.hydra_app import compose
from train.config.schema import Config
from train.plan.estimate import CALL_S, CALLS_PER_LAYER, LaunchPlan, bytes_of_step, flops_of_step
from train.plan.memory import MetaModels, Workload, build_on_meta

PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"
HIDDEN = re.compile(r"(error|warning): |USDT:|\s*$")  # lines of logs that no page quotes
Results = dict[str, Any]  # of figures.json
GB_PER_S = 3350.0  # of the data sheet
BF16_BYTES = 2
NOT_MEASURED = "-"
WARM = 2  # first steps of a run, which compile
HEAD = ("", "floor", "estimate", "measured")
Row = tuple[str, str, str, str]


def filled(text: str, results: list[dict[str, Any]], figures: dict[str, Any]) -> str:
    commands = {row["name"]: f"`python {' '.join(row['command'][1:])}`" for row in results}

    def content(names: str) -> str | None:
        if names == "steps" and results:
            return markdown_table(
                ("step", "", "seconds"), [(row["name"], row["outcome"], str(row["seconds"])) for row in results], "<<>"
            )
        if names == "expected":
            return markdown_table(HEAD, expected(figures), "<>>>")
        parts = [part for name in names.split() if (part := part_of(figures.get(name, {}), commands.get(name, "")))]
        return "\n\n".join(parts) or None

    return fill_blocks(text, "figures", content)


def part_of(step: dict[str, Any], command: str) -> str | None:
    """Returns the figures of a step in Markdown; None if it has none."""
    table = step.get("files", {}).get("table.json")
    if table is not None:
        figures = Figures.of(table)
        cells = markdown_table(figures.head, figures.rows, "<" + ">" * (len(figures.head) - 1))
        head = f"`{table['command']}`, measured on {figures.machine}:"
        return "\n\n".join((head, f"{figures.title}.", cells, f"{'; '.join(figures.notes)}."))
    lines = [line.rstrip() for line in step.get("output", "").splitlines() if not HIDDEN.match(line)]
    return "\n".join((f"{command}:\n", "```text", *lines, "```")) if lines else None


# -- what is expected ---------------------------------------------------------------------------------------------------


def expected(figures: Results) -> list[Row]:
    launch = Config().launch
    found = re.search(r"copy bandwidth +([\d.]+) GB/s", str(figures.get("check_device", {}).get("output", "")))
    bandwidth = NOT_MEASURED if found is None else found[1]
    rows = [("copy bandwidth, GB/s", f"{GB_PER_S:,.0f}", f"{launch.gpu_gb_per_s:,.0f}", bandwidth)]
    overrides = [*TIMED_STEP.split(), f"target={LARGE}", "data.path=/no/data", f"data.max_length={STEP_LENGTH}"]
    config = compose("config", [*overrides, "launch.plan=true"], Config)
    models = build_on_meta(config)
    return [*rows, *_passes(figures, models, launch.gpu_gb_per_s), *_step(figures, config, models), *_training(figures)]


def _passes(figures: Results, models: MetaModels, gb_per_s: float) -> Iterator[Row]:
    """A pass reads all weights of layers and lm_head, keys and values; an eager one also waits for its operator calls."""
    target = models.target
    calls_ms = 1e3 * target.num_layers * CALLS_PER_LAYER * CALL_S
    token = 2 * target.num_layers * target.num_kv_heads * target.head_dim
    for context in CONTEXTS:
        table = _table(figures, f"passes_{context}")
        for nodes in NODES:
            read = BF16_BYTES * (models.read_parameters + (context + nodes) * token)
            floor_ms, read_ms = (read / rate / 1e6 for rate in (GB_PER_S, gb_per_s))
            name = f"pass, {nodes} node(s), {context:,} tokens cached, ms: eager, captured"
            likely = f"{max(calls_ms, read_ms):.1f}, {read_ms:.1f}"
            values = [row[2] for row in table if row[0] == f"target pass, {nodes} nodes"]
            yield name, f"{floor_ms:.1f}", likely, ", ".join(values) or NOT_MEASURED


def _step(figures: Results, config: Config, models: MetaModels) -> Iterator[Row]:
    """The parts of a training step, whose operations are those of the plan."""
    architecture = models.target.model.config
    processor = training.image_processor(config.target.path, architecture)
    batch = training.make_batch(family_of(architecture), processor, STEP_BATCH, STEP_LENGTH)
    share = float(models.target.family.visual_mask(batch["input_ids"]).float().mean())
    work = Workload(config=config, models=models, ranks=1, visual_share=share)
    flops, traffic, peak = flops_of_step(work), bytes_of_step(work), config.launch.gpu_peak_tflops * 1e12
    measured = {row[0]: row[2] for row in _table(figures, "step")}
    for part, name in training.PARTS.items():
        times = (flops[part] / peak, flops[part] / work.flops_per_s + traffic[part] / work.bytes_per_s)
        floor, likely = (f"{1e3 * seconds:.0f}" for seconds in times)
        yield f"{name}, ms", floor, likely, measured.get(name, NOT_MEASURED)


def _training(figures: Results) -> Iterator[Row]:
    """A run whose examples are shorter than the longest ones of the plan."""
    config = compose("config", [*TRAIN_LARGE.split(), f"target={LARGE}", "data.path=/no/data", "launch.plan=true"], Config)
    plan = LaunchPlan(config=config, models=build_on_meta(config), ranks=1)
    files = figures.get("train_7b", {}).get("files", {})
    lines = files.get("metrics.jsonl", [])

    def measured(key: str, form: str, start: int = 0) -> str:
        values = [line[key] for line in lines[start:] if key in line]
        return form.format(median(values) if start else max(values)) if values else NOT_MEASURED

    tokens = config.train.global_batch_size * plan.length
    peak = config.launch.gpu_peak_tflops / config.launch.gpu_tflops
    speeds = [f"{tokens / seconds:,.0f}" for seconds in (plan.floor_s / peak, plan.step_s)]
    yield "training, tokens/s", speeds[0], speeds[1], measured("tokens_per_s", "{:,.0f}", WARM)
    yield "peak memory of training, GiB", "", f"{plan.total_bytes / 2**30:.1f}", measured("memory_gib", "{:.1f}")
    yield "share of waiting for data", "0", "", measured("data_wait", "{:.3f}", WARM)
    reports = [report for path, report in files.items() if path.endswith("report.json")]
    alone = [f"{report['baselines']['autoregressive']['tokens_per_s']:.1f}" for report in reports]
    read = plan.models.read_parameters * BF16_BYTES / 1e9
    floor, likely = (f"{rate / read:.0f}" for rate in (GB_PER_S, config.launch.gpu_gb_per_s))
    yield "autoregressive decoding, tokens/s", floor, likely, ", ".join(alone) or NOT_MEASURED
    same = [f"{policy['match']}/{policy['total']}" for report in reports for policy in report["policies"].values()]
    yield "texts equal to autoregressive ones", "all but near-ties", "", ", ".join(same) or NOT_MEASURED


def _table(figures: Results, step: str) -> list[list[str]]:
    rows: list[list[str]] = figures.get(step, {}).get("files", {}).get("table.json", {}).get("rows", [])
    return rows


def main() -> int:
    parser = new_parser("python -m benchmarks.gpu_page", description=__doc__)
    text = "--out of gpu_quarter_hour; the last one's steps win"
    parser.add_argument("folders", metavar="DIR", nargs="*", type=Path, help=text)
    parser.add_argument("--out", metavar="FILE", type=Path, default=PAGE, help="page to write; default: docs/gpu.md")
    args = parser.parse_args()
    results, figures = dict[str, Any](), dict[str, Any]()
    for folder in args.folders:
        results |= {row["name"]: row for row in read_json(folder / RESULTS)["steps"]}
        figures |= {name: step for name, step in read_json(folder / FIGURES).items() if step["output"]}
    write_text(args.out, filled(PAGE.read_text(encoding="utf-8"), list(results.values()), figures))
    print(f"written: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
