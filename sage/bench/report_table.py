"""The terminal summary of a report: speeds per policy and baseline, margins, shares of decoding time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from textwrap import fill
from typing import Any

from sage.io.tables import RULE, counted, text_table

WIDTH = 118
HEADER = ("policy", "tokens/pass", "accepted", "tokens/s", "speedup", "95% interval", "end to end", "identical", "to HF")
HOST_PHASES = ("accept", "commit", "policy", "other")
SHARE_HEADER = ("of decoding time", "target", "draft", *HOST_PHASES, "overhead", "ms/token", "nodes", "levels")
TARGET_PREFILL_PHASES = ("vision", "target_prefill")  # all other phases are decoding
BUSY = 1.25  # load average per core, above which other programs took part of the time
SHARE_NOTE = "overhead: host overhead, the sum of accept, commit, policy and other; nodes verified and levels drafted per round"


def format_table(report: Mapping[str, Any]) -> str:
    """Returns speeds, margins and shares of decoding time as text; `*` marks the baseline of the speedups."""
    rows, others = speed_rows(report)
    failed = [f"{name} left out: {reason}" for name, reason in report["failed_baselines"].items()]
    footnote = f"* fastest autoregressive baseline. {measured_with(report)}."
    machine = report.get("machine") or {}
    load, cores = machine.get("load_average", 0), machine.get("cores", 1)
    busy = f"The machine was busy (load average {load:.1f} on {counted(cores, 'core')}): tokens/pass holds, speeds may not."
    notes = [footnote, *([busy] if load > BUSY * cores else []), *failed]
    speeds = "\n".join([text_table(HEADER, [*rows, RULE, *others]), *notes])
    wrapped, shared = fill(margins(report), WIDTH, subsequent_indent="  "), share_rows(report)
    shares = f"{text_table(SHARE_HEADER, shared)}\n{SHARE_NOTE}" if shared else ""
    return "\n\n".join(part for part in (speeds, wrapped, shares) if part)


def decode_shares(part: Mapping[str, Any]) -> list[float] | None:
    """Returns the shares of a policy's decoding time, as `SHARE_HEADER` names them; None without timed decoding.

    Decoding time excludes the vision tower and the target's prefill. The last share sums up `HOST_PHASES`.
    """
    time_s = part["time_s"]
    total_s = sum(seconds for phase, seconds in time_s.items() if phase not in TARGET_PREFILL_PHASES)
    if total_s <= 0:
        return None
    draft_s = time_s["draft_prefill"] + time_s["draft_steps"]
    shares = [seconds / total_s for seconds in (time_s["verify"], draft_s, *(time_s[phase] for phase in HOST_PHASES))]
    return [*shares, sum(shares[2:])]


def share_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Returns the rows below `SHARE_HEADER`: a policy's shares of decoding time, its time per token, and sizes of its trees."""
    rows = []
    for name, part in report["policies"].items():
        shares = decode_shares(part)
        if shares is not None:
            figures = (f"{part['nodes_per_round']:.1f}", f"{part['draft_steps_per_round']:.2f}")
            rows.append((name, *(f"{share:.1%}" for share in shares), f"{1e3 / max(part['tokens_per_s'], 1e-9):.3f}", *figures))
    return rows


def margins(report: Mapping[str, Any]) -> str:
    """Returns the lead of the fastest drafting policy over every other runner, as a sentence; empty without such a policy."""
    found = report.get("margins")
    if not found or not found["over"]:
        return ""
    others = sorted(found["over"].items(), key=lambda item: item[1]["ratio"])
    ratios = (
        f"{name} {part['ratio']:.2f}x" + (f" ({interval(part['ci'])})" if part.get("ci") else "") for name, part in others
    )
    return f"{found['policy']} against each of the others, paired by prompt: {', '.join(ratios)}"


def speed_rows(report: Mapping[str, Any]) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Returns the rows below `HEADER`: those of the policies, and those of the other baselines."""
    policies, baselines = report["policies"], report["baselines"]
    rows = [_speed_row(name, section, report) for name, section in policies.items()]
    return rows, [_speed_row(name, section, report) for name, section in baselines.items() if name not in policies]


def _speed_row(name: str, section: Mapping[str, Any], report: Mapping[str, Any]) -> tuple[str, ...]:
    is_policy = "tokens_per_target_pass" in section
    return (
        f"{name} *" if name == report["fastest_baseline"] else name,
        f"{section['tokens_per_target_pass']:.2f}" if is_policy else "",
        f"{section['mean_accepted_draft']:.2f}" if is_policy else "",
        f"{section['tokens_per_s']:.1f}",
        f"{section['speedup']:.2f}x",
        interval(section.get("speedup_ci")),
        f"{section['speedup_end_to_end']:.2f}x",
        f"{section['match']}/{section['total']}" if "match" in section else "-",
        f"{section['match_hf']}/{section['total']}" if "match_hf" in section else "-" if is_policy else "",
    )


def interval(bounds: Sequence[float] | None) -> str:
    """Returns `1.94-2.31`; `-` for a single prompt and for the baseline compared with itself."""
    return "-" if bounds is None or bounds[0] == bounds[1] else f"{bounds[0]:.2f}-{bounds[1]:.2f}"


def measured_with(report: Mapping[str, Any]) -> str:
    """Returns the settings of a measurement: `16 prompts, 3 runs each, float32 on cpu, temperature 0, at most 128 new tokens`.

    Every table of figures states them. Settings that a report does not contain are left out.
    """
    forms: tuple[tuple[str, Callable[[Any], str]], ...] = (
        ("partial", interruption),
        ("prompts", lambda count: counted(count, "prompt")),
        ("repeats", lambda count: f"{counted(count, 'run')} each"),
        ("batch_size", lambda count: f"policies decode {counted(count, 'prompt')} together"),
        ("dtype", lambda dtype: f"{dtype} on {report['device']}"),
        ("temperature", lambda temperature: f"temperature {temperature:g}"),
        ("max_new_tokens", lambda count: f"at most {counted(count, 'new token')}"),
        ("first_answer", lambda _: "a new policy for every run"),
    )
    return ", ".join(form(report[key]) for key, form in forms if key in report)


def interruption(partial: Mapping[str, Any]) -> str:
    """Returns `partial: interrupted after 5 of 16 prompts`, from the section `partial` of a report."""
    text = f"partial: interrupted after {partial['prompts']} of {counted(partial['planned_prompts'], 'prompt')}"
    repeats = f" in run {partial['repeats']} of {partial['planned_repeats']}"
    return text + repeats * (partial["planned_repeats"] > 1)
