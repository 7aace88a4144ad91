"""A plan as text for a terminal: what is needed, of what, and what to change."""

from __future__ import annotations

from collections.abc import Iterable

from train.monitor.progress import clock
from train.plan.memory import VISUAL_SHARE, Plan

SMALLEST_SHOWN = 5e6  # bytes; a smaller part is shown with more digits


def render(made: Plan) -> str:
    """The whole plan, a line per fact."""
    config, pair = made.config, made.pair
    head = f"plan: {config.draft.kind} draft for {config.target.name} on {made.ranks} GPU(s), ZeRO {config.deepspeed.stage}"
    vision = f"{billions(pair.vision_parameters)} vision, {billions(pair.target_parameters - pair.vision_parameters)} text"
    rows = [("target", f"{billions(pair.target_parameters)}   ({vision})"), ("draft", _draft(made))]
    return "\n".join([head, "", "parameters", *_columns(rows), "", *_memory(made), "", *_work(made), "", _verdict(made)])


def _draft(made: Plan) -> str:
    whole, trained = made.pair.draft_parameters, made.pair.trained_parameters
    return billions(whole) if trained == whole else f"{billions(whole)}   ({billions(trained)} of them trained)"


def _memory(made: Plan) -> list[str]:
    rows = [(part, gigabytes(amount)) for part, amount in made.memory.items() if amount]
    last = ("total", f"{gigabytes(made.total)} of {made.config.launch.gpu_memory_gb:g} GB (launch.gpu_memory_gb)")
    return ["memory per GPU", *_columns([*rows, last])]


def _work(made: Plan) -> list[str]:
    config = made.config
    split = f"{made.ranks} rank(s) x {config.train.micro_batch_size} x {made.accumulation} accumulated"
    tokens = config.train.global_batch_size * made.length
    total = sum(made.flops.values())
    shares = ", ".join(f"{part} {amount / total:.0%}" for part, amount in made.flops.items())
    rows = [
        ("batch", f"{config.train.global_batch_size} sequences = {split}"),
        ("tokens", f"at most {tokens:,} ({made.length:,} per sequence, {VISUAL_SHARE:.0%} of them taken to be visual)"),
        ("compute", f"{total / 1e12:,.1f} TFLOP ({shares})"),
        ("time", f"at most {seconds(made.step_s)} at {config.launch.gpu_tflops:g} TFLOP/s per GPU (launch.gpu_tflops)"),
    ]
    if made.gather_s:
        rows.append(("", f"of it {seconds(made.gather_s)} for gathering the sharded target"))
    steps = made.steps
    unknown = "by the size of the data; give train.max_steps or data.num_examples to have it estimated"
    rows.append(("whole run", unknown if steps is None else f"{steps:,} steps, at most {clock(steps * made.step_s)}"))
    return ["one optimizer step", *_columns(rows)]


def _verdict(made: Plan) -> str:
    if made.fits:
        return f"fits: {gigabytes(made.limit - made.total)} to spare. Parameters are exact; activations and time are estimates."
    over = f"does not fit: {gigabytes(made.total - made.limit)} too much"
    if made.change is None:
        return f"{over}; no change of batch, chunk, ZeRO stage or number of GPUs makes it fit"
    return f"{over}; it fits with {' '.join(made.change)}"


def _columns(rows: Iterable[tuple[str, str]]) -> list[str]:
    return [f"  {name:<24}{value}" for name, value in rows]


def billions(parameters: int) -> str:
    """`8.29 B` or `231.2 M`."""
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


def gigabytes(amount: float) -> str:
    """Bytes as `16.58 GB` (10^9)."""
    return f"{amount / 1e9:6.2f} GB" if amount >= SMALLEST_SHOWN else f"{amount / 1e6:6.2f} MB"


def seconds(amount: float) -> str:
    """`12.3 s` or `4.1 ms`."""
    return f"{amount:.1f} s" if amount >= 1 else f"{1e3 * amount:.1f} ms"
