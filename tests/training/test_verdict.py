"""The verdict on a draft, on made cases: foreign answers, too few steps, no own outputs in training, other prompts, slow
rounds, a good draft."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sage.runtime.timing import PHASES
from train.report.verdict import Facts, Result, judge

COMMAND = ["/x/bin/sage-train", "target=pocket_qwen2_5_vl", "data.path=my chats.jsonl", "run.dir=runs/a"]


def policy(tokens: float, speedup: float, ci: tuple[float, float] | None, kept: tuple[int, ...] = (80, 64)) -> dict[str, Any]:
    levels = zip((100, *kept), kept, strict=False)
    time_s = dict.fromkeys(PHASES, 0.0) | {"verify": 6.0, "draft_steps": 3.0, "policy": 1.0}
    figures = {"tokens_per_target_pass": tokens, "speedup": speedup, "time_s": time_s}
    depths = [{"depth": i, "tried": tried, "kept": count} for i, (tried, count) in enumerate(levels, 1)]
    return figures | {"acceptance_by_depth": depths} | ({"speedup_ci": list(ci)} if ci else {})


def facts(
    chain: dict[str, Any],
    prompts: int = 16,
    run: bool = True,
    own: float = 0.98,
    export: str = "eagle3",
    others: dict[str, dict[str, Any]] | None = None,
    num_prompts: int = 0,
    **changes: Any,
) -> Facts:
    """Facts of a run of 50 steps with a steady estimate of 2.0 tokens per pass, and own answers."""
    policies = {"autoregressive": policy(1.0, 1.0, None), "chain": chain, **(others or {})}
    report = {"policies": policies, "prompts": prompts}
    if (batch_size := changes.pop("batch_size", 1)) > 1:
        report["batch_size"] = batch_size
    if not run:
        return Facts(report=report, draft="exports/d")
    estimates = changes.pop("estimates", (1.2, 1.6, 2.0, 2.0, 2.0))
    lines = [{"step": 10 * i, "estimated_tokens_per_pass": estimate} for i, estimate in enumerate(estimates, 1)]
    lines[0]["own_answers"] = own
    folder = changes.pop("folder", "runs/a")
    config = {"objective.steps": 7, "draft.kind": "eagle3", "data.answers": "given", "train.epochs": None} | changes
    where = {"draft": f"{folder}/draft", "run": folder, "export": export, "num_prompts": num_prompts}
    return Facts(report=report, lines=lines, config=config, command=COMMAND, **where)


SLOW = policy(1.4, 0.7, (0.6, 0.8))
QUESTION = '--prompt "What do you see?"'
REPEATED = "sage-train target=pocket_qwen2_5_vl 'data.path=my chats.jsonl'"
FEW = policy(1.4, 1.1, None)  # seems faster, on one prompt
OTHER_PROMPTS = "sage-validate checkpoint=exports/d data=auto data.path=FILE data.holdout=0.2"
MORE_DATA = "sage-train target=pocket_qwen2_5_vl data.path=FILE run.dir=runs/a-more_data"
CASES: dict[str, tuple[Facts, Result, str, tuple[str, ...], str]] = {
    "foreign answers": (
        facts(SLOW, own=0.18),
        Result.slower,
        "foreign_answers",
        ("18%", "70%"),
        f"{REPEATED} data.answers=target run.dir=runs/a-own",
    ),
    "without its own outputs": (
        facts(policy(1.6, 0.9, (0.8, 0.95), kept=(80, 24)), **{"objective.steps": 1}),
        Result.slower,
        "no_own_outputs",
        ("objective.steps=1", "80%", "30%"),
        f"{REPEATED} objective.steps=7 run.dir=runs/a-unrolled",
    ),
    "other prompts": (
        facts(policy(1.1, 0.8, (0.7, 0.9))),
        Result.slower,
        "other_prompts",
        ("1.10", "2.00"),
        "sage-train target=pocket_qwen2_5_vl data.path=FILE run.dir=runs/a-like_prompts",
    ),
    "prompts together": (
        facts(policy(3.5, 0.95, (0.9, 1.05)), batch_size=8, estimates=(3.0, 3.1, 3.2, 3.4, 3.6)),
        Result.unclear,
        "prompts_together",
        ("8 prompts",),
        "sage-validate checkpoint=runs/a/draft decode.batch_size=1",
    ),
    "too few steps": (
        facts(SLOW, estimates=(1.0, 1.1, 1.2, 1.4, 1.6)),
        Result.slower,
        "too_few_steps",
        ("1.20", "1.50", "50 steps"),
        "sage-train --resume runs/a train.max_steps=100",
    ),
    "cost of a round": (
        facts(policy(1.8, 0.9, (0.8, 0.95))),
        Result.slower,
        "cost_of_a_round",
        ("1.80", "2.00 passes", "60%", "30%", "10%"),
        "sage-validate checkpoint=runs/a/draft decode.policies=[autoregressive,chain,cost_aware] decode.options.chain.depth=2",
    ),
    "low acceptance": (
        facts(SLOW, **{"train.epochs": 3}),
        Result.slower,
        "low_acceptance",
        ("1.40", "50 steps"),
        "sage-train --resume runs/a train.epochs=6",
    ),
    "a good draft": (
        facts(policy(3.6, 1.84, (1.7, 2.03))),
        Result.faster,
        "",
        ("1.84x", "chain", "1.70 to 2.03", "16 prompts", "3.60"),
        "sage-export runs/a --format eagle3 --out exports/a",
    ),
    "a good draft without its run": (
        facts(policy(3.6, 1.84, (1.7, 2.03)), run=False),
        Result.faster,
        "",
        (),
        f"sage-generate --draft exports/d --policy chain {QUESTION}",
    ),
    "a draft that is faster with trees only": (
        facts(policy(1.6, 0.86, (0.8, 0.9)), others={"cost_aware": policy(1.9, 1.16, (1.06, 1.24))}, **{"data.name": "pocket"}),
        Result.faster,
        "",
        ("1.16x", "cost_aware"),
        f"sage-generate --draft runs/a --policy cost_aware --image examples/drawing.png {QUESTION}",
    ),
    "one prompt": (
        facts(policy(1.4, 1.3, None), prompts=1, run=False),
        Result.unclear,
        "",
        ("not decided by one prompt", "1.30x"),
        "sage-validate checkpoint=exports/d decode.num_prompts=4 decode.repeats=3",
    ),
    "one prompt, all that are held out": (
        facts(policy(1.4, 1.3, None), prompts=1, num_prompts=32, **{"data.holdout": 0.01}),
        Result.unclear,
        "few_prompts",
        ("all 1", "32"),
        f"{REPEATED} data.holdout=0.2 run.dir=runs/a-more_prompts",
    ),
    "one prompt, which seems slower": (
        facts(policy(1.8, 0.9, None), prompts=1),
        Result.unclear,
        "cost_of_a_round",
        ("2.00 passes",),
        "sage-validate checkpoint=runs/a/draft decode.policies=[autoregressive,chain,cost_aware] decode.options.chain.depth=2",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_verdict_names_the_cause_with_its_figures_and_the_next_command(name: str) -> None:
    made, result, cause, figures, command = CASES[name]
    verdict = judge(made)
    assert verdict is not None
    assert (verdict.result, verdict.cause, verdict.next) == (result, cause, command)
    for figure in figures:
        assert figure in verdict.sentence + verdict.explanation
    assert (verdict.explanation == "") == (cause == "")


def tried(run: bool) -> Facts:
    """What `cost_of_a_round` advises has been measured, and drafting is slower still."""
    slower = policy(1.8, 0.9, (0.8, 0.95))
    found = facts(slower, run=run, others={"cost_aware": slower})
    return replace(found, report={**found.report, "options": {"chain": {"depth": 2}}})


@pytest.mark.parametrize(
    ("followed", "command"),
    [
        (facts(FEW, num_prompts=32, **{"data.holdout": 0.2}), MORE_DATA),
        (facts(FEW, num_prompts=32, **{"data.holdout": 0.01, "data.validation.x.path": "y"}), MORE_DATA),
        (replace(facts(FEW, run=False), num_prompts=32), OTHER_PROMPTS),
        (tried(run=True), "sage-train --resume runs/a train.max_steps=100"),
        (tried(run=False), f"sage-generate --draft exports/d --policy autoregressive {QUESTION}"),
    ],
)  # fmt: skip
def test_a_command_that_has_been_followed_is_not_given_again(followed: Facts, command: str) -> None:
    verdict = judge(followed)
    assert verdict is not None and verdict.next == command


def test_answers_of_the_target_are_not_called_foreign() -> None:
    """Sampled answers contain tokens that are not the most likely ones."""
    verdict = judge(facts(SLOW, own=0.5, **{"data.answers": "target"}))
    assert verdict is not None and verdict.cause == "low_acceptance"
