"""The verdict on a draft, on made cases: its result, the likeliest cause with its figures, and the next command."""

from typing import Any

import pytest

from sage.runtime.timing import PHASES
from train.report.verdict import Facts, judge

COMMAND = ["/x/bin/sage-train", "target=pocket_qwen2_5_vl", "data.path=my chats.jsonl", "run.dir=runs/a"]


def policy(tokens: float, speedup: float, ci: tuple[float, float] | None, kept: tuple[int, ...] = (80, 64)) -> dict[str, Any]:
    levels = zip((100, *kept), kept, strict=False)
    time_s = dict.fromkeys(PHASES, 0.0) | {"verify": 6.0, "draft_steps": 3.0, "policy": 1.0}
    figures = {"tokens_per_target_pass": tokens, "speedup": speedup, "time_s": time_s}
    depths = [{"depth": i, "tried": tried, "kept": count} for i, (tried, count) in enumerate(levels, 1)]
    return figures | {"acceptance_by_depth": depths} | ({"speedup_ci": list(ci)} if ci else {})


def facts(
    chain: dict[str, Any],
    run: bool = True,
    own: float = 0.98,
    others: dict[str, dict[str, Any]] | None = None,
    num_prompts: int = 0,
    estimates: tuple[float, ...] = (1.2, 1.6, 2.0, 2.0, 2.0),
    report: dict[str, Any] | None = None,
    **changes: Any,
) -> Facts:
    """Facts of a run of 50 steps with a steady estimate of 2.0 tokens per pass, and own answers."""
    policies = {"autoregressive": policy(1.0, 1.0, None), "chain": chain, **(others or {})}
    content = {"policies": policies, "prompts": 16, **(report or {})}
    if not run:
        return Facts(report=content, draft="exports/d", num_prompts=num_prompts)
    lines = [{"step": 10 * i, "estimated_tokens_per_pass": estimate} for i, estimate in enumerate(estimates, 1)]
    lines[0]["own_answers"] = own
    config = {"objective.steps": 7, "draft.kind": "eagle3", "data.answers": "given", "train.epochs": None} | changes
    where = {"draft": "runs/a/draft", "run": "runs/a", "export": "eagle3", "num_prompts": num_prompts}
    return Facts(report=content, lines=lines, config=config, command=COMMAND, **where)


ONE = {"prompts": 1}
SLOW, SLOW_ROUNDS = policy(1.4, 0.7, (0.6, 0.8)), policy(1.8, 0.9, (0.8, 0.95))
GOOD, FEW = policy(3.6, 1.84, (1.7, 2.03)), policy(1.4, 1.3, None)
TREES = {"cost_aware": policy(1.9, 1.16, (1.06, 1.24))}
QUESTION = '--prompt "What do you see?"'
TRAIN = "sage-train target=pocket_qwen2_5_vl"
REPEATED = f"{TRAIN} 'data.path=my chats.jsonl'"
MORE_DATA = f"{TRAIN} data.path=FILE run.dir=runs/a-more_data"
SHALLOW = "sage-validate checkpoint=runs/a/draft decode.policies=[autoregressive,chain,cost_aware] decode.options.chain.depth=2"
TRIED = {"options": {"chain": {"depth": 2}}}  # what `cost_of_a_round` advises has been measured
CASES: list[tuple[Facts, str, str, str]] = [  # facts, cause, next command, parts of the sentences
    (facts(SLOW, own=0.18), "foreign_answers", f"{REPEATED} data.answers=target run.dir=runs/a-own", "slower|18%|70%"),
    (
        facts(policy(1.6, 0.9, (0.8, 0.95), kept=(80, 24)), **{"objective.steps": 1}),
        *("no_own_outputs", f"{REPEATED} objective.steps=7 run.dir=runs/a-unrolled", "slower|objective.steps=1|80%|30%"),
    ),
    (facts(policy(1.1, 0.8, (0.7, 0.9))), "other_prompts", f"{TRAIN} data.path=FILE run.dir=runs/a-like_prompts", "1.10|2.00"),
    (
        facts(policy(3.5, 0.95, (0.9, 1.05)), report={"batch_size": 8}, estimates=(3.0, 3.1, 3.2, 3.4, 3.6)),
        *("prompts_together", "sage-validate checkpoint=runs/a/draft decode.batch_size=1", "no clear difference|8 prompts"),
    ),
    (
        facts(SLOW, estimates=(1.0, 1.1, 1.2, 1.4, 1.6)),
        *("too_few_steps", "sage-train --resume runs/a train.max_steps=100", "1.20|1.50|50 steps"),
    ),
    (facts(SLOW_ROUNDS), "cost_of_a_round", SHALLOW, "1.80|2.00 passes|60%|30%|10%"),
    (facts(SLOW, **{"train.epochs": 3}), "low_acceptance", "sage-train --resume runs/a train.epochs=6", "1.40|50 steps"),
    (
        facts(GOOD),
        "",
        "sage-export runs/a --format eagle3 --out exports/a",
        "faster|1.84x with chain|1.70 to 2.03 over 16|3.60",
    ),
    (
        facts(policy(1.6, 0.86, (0.8, 0.9)), others=TREES, **{"data.name": "pocket"}),
        "",
        f"sage-generate --draft runs/a --policy cost_aware --image examples/drawing.png {QUESTION}",
        "faster|1.16x with cost_aware",
    ),
    (
        facts(FEW, run=False, report=ONE),
        *("", "sage-validate checkpoint=exports/d decode.num_prompts=4 decode.repeats=3", "not decided by one prompt|1.30x"),
    ),
    (
        facts(FEW, num_prompts=32, report=ONE, **{"data.holdout": 0.01}),
        *("few_prompts", f"{REPEATED} data.holdout=0.2 run.dir=runs/a-more_prompts", "all 1|32"),
    ),
    # a command that has been followed is not given again
    (facts(FEW, num_prompts=32, **{"data.holdout": 0.2}), "few_prompts", MORE_DATA, ""),
    (
        facts(SLOW_ROUNDS, others={"cost_aware": SLOW_ROUNDS}, report=TRIED),
        *("", "sage-train --resume runs/a train.max_steps=100", "slower"),
    ),
]


@pytest.mark.parametrize(("made", "cause", "command", "parts"), CASES)
def test_verdict_names_the_cause_with_its_figures_and_the_next_command(made, cause, command, parts):
    verdict = judge(made)
    assert verdict is not None and (verdict.cause, verdict.next) == (cause, command)
    for part in parts.split("|"):
        assert part in verdict.sentence + verdict.explanation
    assert (verdict.explanation == "") == (cause == "")
