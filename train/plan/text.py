"""Renders a plan for a terminal. Owns the text only."""

from __future__ import annotations

from tqdm import tqdm

from checkpoints.export.serving import serving_line
from sage.io.tables import text_table
from train.plan.data import DataPlan
from train.plan.estimate import LaunchPlan

MIN_GB_BYTES = 5e6  # smaller amounts are shown in MB


def render(plan: LaunchPlan, data: DataPlan | None = None) -> str:
    """Returns the complete plan as text, with what was found in the data."""
    config, models = plan.config, plan.models
    head = f"plan: {config.draft.kind} draft for {config.target.name} on {plan.ranks} GPU(s), ZeRO {config.deepspeed.stage}"
    vision, text = models.vision_parameters, models.target_parameters - models.vision_parameters
    parts = [f"{billions(vision)} vision, {billions(text)} text"] if vision else []
    if models.active_parameters < models.target_parameters:
        parts.append(f"{billions(models.active_parameters)} active per token")
    target = billions(models.target_parameters) + (f"   ({'; '.join(parts)})" if parts else "")
    total, trained = models.draft_parameters, models.trained_parameters
    draft = billions(total) if trained == total else f"{billions(total)}   ({billions(trained)} of them trained)"
    sections = {
        "parameters": [("target", target), ("draft", draft)],
        "memory per GPU": _memory(plan),
        "one optimizer step": _step(plan),
    } | ({"data": data.rows} if data else {})
    tables = [f"{title}\n{text_table(None, rows, '<', indent=2, min_widths=(22,))}" for title, rows in sections.items()]
    serving = f"the draft {serving_line(models.draft, models.target.model.config)}"
    return "\n\n".join([head, *tables, serving, _verdict(plan)])


def _memory(plan: LaunchPlan) -> list[tuple[str, str]]:
    limit = f"{gigabytes(plan.total_bytes)} of {plan.config.launch.gpu_memory_gb:g} GB (launch.gpu_memory_gb)"
    return [*((part, gigabytes(amount)) for part, amount in plan.memory.items() if amount), ("total", limit)]


def _step(plan: LaunchPlan) -> list[tuple[str, str]]:
    config, total = plan.config, sum(plan.flops.values())
    split = f"{plan.ranks} rank(s) x {plan.micro_batch_size} x {plan.accumulation} accumulated"
    tokens = config.train.global_batch_size * plan.length
    visual = f", {plan.visual_share:.0%} of them assumed to be visual" if plan.visual_share else ""
    shares = ", ".join(f"{part} {amount / total:.0%}" for part, amount in plan.flops.items() if amount)
    rows = [
        ("batch", f"{config.train.global_batch_size} sequences = {split}"),
        ("tokens", f"at most {tokens:,} ({plan.length:,} per sequence{visual})"),
        ("compute", f"{total / 1e12:,.1f} TFLOP ({shares})"),
        ("time", f"at most {seconds(plan.step_s)} at {config.launch.gpu_tflops:g} TFLOP/s per GPU (launch.gpu_tflops)"),
    ]
    if plan.gather_s:
        rows.append(("", f"including {seconds(plan.gather_s)} for gathering the sharded target"))
    return [*rows, ("complete run", _duration(plan))]


def _duration(plan: LaunchPlan) -> str:
    steps = plan.num_steps
    if steps is None:
        return "depends on the size of the data; give train.max_steps or data.num_examples for an estimate"
    return f"{steps:,} steps, at most {tqdm.format_interval(steps * plan.step_s)}"


def _verdict(plan: LaunchPlan) -> str:
    spare = plan.limit_bytes - plan.total_bytes
    if plan.fits:
        return f"fits: {gigabytes(spare).strip()} to spare. Parameters are exact; activations and time are estimates."
    over = f"does not fit: {gigabytes(-spare).strip()} too much"
    if plan.change is None:
        return f"{over}; no change of batch, chunk, ZeRO stage or number of GPUs makes it fit"
    return f"{over}; it fits with {' '.join(plan.change)}"


def billions(parameters: int) -> str:
    """Returns `8.29 B` or `231.2 M`."""
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


def gigabytes(amount: float) -> str:
    """Returns bytes as `16.58 GB` (10^9)."""
    return f"{amount / 1e9:6.2f} GB" if amount >= MIN_GB_BYTES else f"{amount / 1e6:6.2f} MB"


def seconds(amount: float) -> str:
    """Returns `12.3 s` or `4.1 ms`."""
    return f"{amount:.1f} s" if amount >= 1 else f"{1e3 * amount:.1f} ms"
