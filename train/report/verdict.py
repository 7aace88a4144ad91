"""The verdict on a measured draft: faster or slower than decoding without it, the likeliest cause, and the next command.

`judge` is a pure function of recorded facts: report.json, metrics.jsonl, the configuration and the command of the run. Each
rule about a cause states its figures; the first one that applies is reported. Most rules need the records of a run.

    foreign answers      few supervised tokens are the target's own choice (data_prep.own_answers)
    no own outputs       trained with objective.steps=1, and its second token is accepted far less often than its first
    other prompts        far fewer tokens per pass than estimated on the training batches
    prompts together     several prompts share their passes, in which every drafted token is one more row
    too few steps        the estimate of acceptance was still rising at the end
    cost of a round      drafted tokens are accepted, but drafting and verifying them takes longer than it saves
    few prompts          the data hold out fewer prompts than were to be measured, and those decide nothing

A command never leads to the same verdict again: a rule does not apply where its command has been followed.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from statistics import mean
from typing import Any

from checkpoints.run_folder import METRICS, dotted_keys, read_command, read_metrics, read_run_config
from data_prep.own_answers import MIN_OWN_SHARE, OWN_ANSWERS
from sage.bench.report_table import decode_shares
from sage.drafts.registry import KINDS
from sage.trees import AUTOREGRESSIVE, CHAIN, COST_AWARE
from train.config.command_line import changed_command

ESTIMATE = "estimated_tokens_per_pass"
MIN_DEPTH_RATIO = 0.75  # acceptance of the second drafted token over that of the first
MIN_TRIED = 20  # rounds, below which a rate of acceptance is not judged
MIN_MEASURED_RATIO = 0.6  # measured over estimated tokens per target pass of a chain; usually around 1
RISE = 1.05  # of the estimate from the third to the last quarter of a run that is still improving
MIN_ACCEPTED = 1.5  # tokens per pass, from which the cost of a round is the cause rather than acceptance
UNROLLED_STEPS = 7  # of objective=eagle3
POCKET, DRAWING = "pocket", Path("examples/drawing.png")  # a picture of the demo's data, in a clone of the repository
SHALLOW = 2  # depth of the chain that is tried where a round costs too much
MAX_HOLDOUT = 0.2  # share of the training data that is given up for prompts


Cause = tuple[str, str, str]  # name of a rule, its sentence with figures, and the command that helps


class Result(StrEnum):
    """The comparison with decoding without a draft; clear if the 95% interval of the speedup excludes 1."""

    faster = "faster"
    slower = "slower"
    unclear = "unclear"


@dataclass(frozen=True, kw_only=True)
class Facts:
    report: Mapping[str, Any]  # content of report.json
    draft: str  # the folder that commands name
    run: str = ""  # the run that trained it; "" without one
    export: str = ""  # the `--format` in which an engine serves it; "" if none does
    num_prompts: int = 0  # those to be measured; more than `report["prompts"]` if all that there are have been measured
    lines: Sequence[Mapping[str, Any]] = ()  # of metrics.jsonl, up to the step of the draft
    config: Mapping[str, Any] = field(default_factory=dict)  # configuration of the run by dotted key
    command: Sequence[str] = ()  # `sys.argv` of the run


@dataclass(frozen=True)
class Verdict:
    """The verdict, as it is stored in report.json under `verdict`."""

    result: Result
    sentence: str  # the result with policy, speedup, interval and number of prompts
    cause: str  # name of the rule that explains it; "" if none applies
    explanation: str  # its sentence
    next: str  # the command to type next


def judge(facts: Facts) -> Verdict | None:
    """Returns the verdict; None if no drafting policy was measured."""
    name = best_policy(facts.report)
    if name is None:
        return None
    part = facts.report["policies"][name]
    result, sentence = _result(part), _sentence(facts.report, name)
    seems_faster = result is Result.faster or ("speedup_ci" not in part and part["speedup"] > 1)
    rules = [_foreign_answers] if seems_faster else CAUSES
    if result is Result.unclear:
        rules = [*rules, _few_prompts]
    cause = next((found for rule in rules if (found := rule(facts, name)) is not None), None)
    if cause is None:
        return Verdict(result, sentence, "", "", _next_command(facts, result))
    return Verdict(result, sentence, *cause)


def add_verdict(
    report: dict[str, Any], draft: str, run: Path | None, step: int | None, export: str = "", num_prompts: int = 0
) -> None:
    """Adds the verdict to the content of a report.json, from what the run has recorded up to `step`; None: not known."""
    facts = Facts(report=report, draft=draft, export=export, num_prompts=num_prompts)
    if run is not None and step is not None:
        facts = replace(
            facts,
            run=str(run),
            lines=[line for line in read_metrics(run / METRICS) if line["step"] <= step],
            config=dotted_keys(read_run_config(run)),
            command=read_command(run),
        )
    if (verdict := judge(facts)) is not None:
        report["verdict"] = asdict(verdict)


def verdict_lines(report: Mapping[str, Any]) -> list[str]:
    """Returns the verdict of a report as lines of text; none if it has no verdict."""
    verdict = report.get("verdict")
    if not verdict:
        return []
    cause = [f"likeliest cause: {verdict['explanation']}"] if verdict["explanation"] else []
    return [f"verdict: {verdict['sentence']}", *cause, f"next: {verdict['next']}"]


def verdict_markdown(report: Mapping[str, Any]) -> str:
    """Returns the verdict of a report as a list in Markdown, its command in backticks; empty if it has no verdict."""
    lines = (line.partition(": ") for line in verdict_lines(report))
    return "\n".join(f"* **{name}:** {f'`{text}`' if name == 'next' else text}" for name, _, text in lines)


def drafting_by_speed(report: Mapping[str, Any]) -> list[str]:
    """Returns the policies that draft, the one with the highest decoding speedup first."""
    names = [name for name in report["policies"] if name != AUTOREGRESSIVE]
    return sorted(names, key=lambda name: -float(report["policies"][name]["speedup"]))


def best_policy(report: Mapping[str, Any]) -> str | None:
    return next(iter(drafting_by_speed(report)), None)


def _result(part: Mapping[str, Any]) -> Result:
    low, high = part.get("speedup_ci") or (0.0, float("inf"))
    return Result.faster if low > 1 else Result.slower if high < 1 else Result.unclear


def _sentence(report: Mapping[str, Any], name: str) -> str:
    part = report["policies"][name]
    result, bounds = _result(part), part.get("speedup_ci")
    head = f"{result} than without a draft"
    if result is Result.unclear:
        head = "no clear difference from decoding without a draft" if bounds else "not decided by one prompt"
    sure = f"95% interval {bounds[0]:.2f} to {bounds[1]:.2f} over {report['prompts']} prompts" if bounds else "no interval"
    return f"{head}: {part['speedup']:.2f}x with {name} ({sure}), {part['tokens_per_target_pass']:.2f} tokens per target pass"


def _foreign_answers(facts: Facts, name: str) -> Cause | None:
    own = next((float(line[OWN_ANSWERS]) for line in facts.lines if OWN_ANSWERS in line), None)
    if own is None or own >= MIN_OWN_SHARE or facts.config.get("data.answers", "given") != "given":
        return None
    sentence = (
        f"foreign answers: {own:.0%} of the supervised tokens are the target's own choice, below {MIN_OWN_SHARE:.0%}; the "
        "draft has learned text that the target does not write"
    )
    return "foreign_answers", sentence, changed_command(facts.command, facts.run, "data.answers=target", "own")


def _no_own_outputs(facts: Facts, name: str) -> Cause | None:
    kind = KINDS.get(str(facts.config.get("draft.kind")))
    if facts.config.get("objective.steps") != 1 or (kind is not None and (kind.is_target or kind.is_parallel)):
        return None
    levels = facts.report["policies"].get(CHAIN, facts.report["policies"][name]).get("acceptance_by_depth", [])[:2]
    if len(levels) < 2 or min(level["tried"] for level in levels) < MIN_TRIED:
        return None
    first, second = (level["kept"] / level["tried"] for level in levels)
    if second >= MIN_DEPTH_RATIO * first:
        return None
    sentence = (
        f"training without the draft's own outputs (objective.steps=1): {first:.0%} of its first tokens are accepted and "
        f"{second:.0%} of its second ones, which follow its own first token"
    )
    change = f"objective.steps={UNROLLED_STEPS}"
    return "no_own_outputs", sentence, changed_command(facts.command, facts.run, change, "unrolled")


def _other_prompts(facts: Facts, name: str) -> Cause | None:
    measured = facts.report["policies"].get(CHAIN, {}).get("tokens_per_target_pass")
    estimate = facts.lines[-1].get(ESTIMATE) if facts.lines else None
    if measured is None or not estimate or measured >= MIN_MEASURED_RATIO * estimate:
        return None
    sentence = (
        f"prompts unlike the training data: {measured:.2f} tokens per target pass measured for chain, {estimate:.2f} estimated "
        "on the training batches; FILE needs rows like the prompts"
    )
    return "other_prompts", sentence, changed_command(facts.command, facts.run, "data.path=FILE", "like_prompts")


def _prompts_together(facts: Facts, name: str) -> Cause | None:
    count = facts.report.get("batch_size", 1)
    if count == 1:
        return None
    sentence = (
        f"{count} prompts decoded together: without a draft, their passes verify a token of each already, and every drafted "
        "token adds a row; the speedup of one request is measured with a batch size of 1"
    )
    return "prompts_together", sentence, f"sage-validate {_checkpoint(facts)} decode.batch_size=1"


def _too_few_steps(facts: Facts, name: str) -> Cause | None:
    last = facts.lines[-1]["step"] if facts.lines else 0
    quarters: tuple[list[float], list[float]] = ([], [])
    for line in facts.lines:
        if line["step"] > last / 2 and ESTIMATE in line:
            quarters[line["step"] > 3 * last / 4].append(line[ESTIMATE])
    if not all(quarters) or (after := mean(quarters[1])) < RISE * (before := mean(quarters[0])):
        return None
    sentence = (
        f"too few steps: the estimate rose from {before:.2f} to {after:.2f} tokens per target pass in the last quarter of "
        f"{last} steps"
    )
    return "too_few_steps", sentence, _longer_run(facts)


def _cost_of_a_round(facts: Facts, name: str) -> Cause | None:
    part = facts.report["policies"][name]
    tokens, shares = part["tokens_per_target_pass"], decode_shares(part) if part["time_s"] else None
    depth = facts.report.get("options", {}).get(CHAIN, {}).get("depth")
    is_tried = depth == SHALLOW and {CHAIN, COST_AWARE} <= facts.report["policies"].keys()
    if tokens < MIN_ACCEPTED or shares is None or not part["speedup"] or is_tried:
        return None
    sentence = (
        f"the cost of a round: it yields {tokens:.2f} tokens and takes as long as {tokens / part['speedup']:.2f} passes "
        f"without a draft; {shares[0]:.0%} of the time is the target's, {shares[1]:.0%} the draft's, {shares[-1]:.0%} host "
        "overhead"
    )
    options = f"decode.policies=[{AUTOREGRESSIVE},{CHAIN},{COST_AWARE}] decode.options.{CHAIN}.depth={SHALLOW}"
    return "cost_of_a_round", sentence, f"sage-validate {_checkpoint(facts)} {options}"


def _low_acceptance(facts: Facts, name: str) -> Cause | None:
    tokens = facts.report["policies"][name]["tokens_per_target_pass"]
    if tokens >= MIN_ACCEPTED or not facts.lines:
        return None
    sentence = f"low acceptance: {tokens:.2f} tokens per target pass at best after {facts.lines[-1]['step']} steps"
    return "low_acceptance", sentence, _longer_run(facts)


def _few_prompts(facts: Facts, name: str) -> Cause | None:
    count, wanted = facts.report["prompts"], facts.num_prompts
    if count >= wanted:
        return None
    sentence = f"few prompts: all {count} that the data hold out were measured, of {wanted} asked for"
    share = facts.config.get("data.holdout", MAX_HOLDOUT)
    if not facts.run:
        command = f"sage-validate {_checkpoint(facts)} data=auto data.path=FILE data.holdout={MAX_HOLDOUT}"
        return "few_prompts", f"{sentence}; FILE needs more rows", command
    if share >= MAX_HOLDOUT or any(key.startswith("data.validation.") for key in facts.config):
        command = changed_command(facts.command, facts.run, "data.path=FILE", "more_data")
        return "few_prompts", f"{sentence}; FILE needs more rows", command
    change = f"data.holdout={min(MAX_HOLDOUT, share * wanted / count):g}"
    return "few_prompts", sentence, changed_command(facts.command, facts.run, change, "more_prompts")


CAUSES: list[Callable[[Facts, str], Cause | None]] = [
    _foreign_answers, _no_own_outputs, _other_prompts, _prompts_together, _too_few_steps, _cost_of_a_round, _low_acceptance
]  # fmt: skip


def _longer_run(facts: Facts) -> str:
    values = {key: facts.config.get(key) for key in ("train.epochs", "train.max_minutes")}
    limits = [f"{key}={2 * value:g}" for key, value in values.items() if value]
    limits += [f"train.max_steps={2 * facts.lines[-1]['step']}"] if facts.config.get("train.max_steps") or not limits else []
    return f"sage-train --resume {shlex.quote(facts.run)} {' '.join(limits)}"


def _next_command(facts: Facts, result: Result) -> str:
    """Returns the command where no cause is known: use the draft, train it on, or measure it on more prompts."""
    if result is Result.slower and facts.lines:
        return _longer_run(facts)
    if result is Result.slower:
        return _generate(facts, AUTOREGRESSIVE)
    if result is Result.unclear:
        return f"sage-validate {_checkpoint(facts)} decode.num_prompts={4 * facts.report['prompts']} decode.repeats=3"
    chain = facts.report["policies"].get(CHAIN)
    if facts.run and facts.export and (chain is None or _result(chain) is not Result.slower):  # vLLM verifies chains
        out = shlex.quote(f"exports/{Path(facts.run).name}")
        return f"sage-export {shlex.quote(facts.run)} --format {facts.export} --out {out}"
    return _generate(facts, best_policy(facts.report))


def _generate(facts: Facts, policy: str | None) -> str:
    draft = shlex.quote(facts.run or facts.draft)
    image = f" --image {DRAWING}" if facts.config.get("data.name") == POCKET and DRAWING.exists() else ""
    return f'sage-generate --draft {draft} --policy {policy}{image} --prompt "What do you see?"'


def _checkpoint(facts: Facts) -> str:
    return shlex.quote(f"checkpoint={facts.draft}")
