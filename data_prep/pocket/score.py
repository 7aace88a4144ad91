"""`python -m data_prep.pocket.score --target DIR`: scores the answers of a pocket target about held-out images.

Answers are decoded greedily for prompts of the test split and parsed by `grammar`. An answer is finished if it ends with an
end-of-sequence token within `MAX_NEW_TOKENS`.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import sage
from data_prep.pocket import world
from data_prep.pocket.grammar import Score, score_answer
from sage.commands import cli
from sage.io.tables import text_table

KINDS = ("colour", "shape", "size", "position", "sign", "height")
MAX_NEW_TOKENS = 200


def score_target(target: sage.Target, count: int = 60) -> dict[str, Any]:
    """Returns the share of right facts (`right`) and the number of facts (`words`) by kind, and the share of finished answers.

    Args:
        count: held-out prompts of each task family; the questions of a conversation are asked in turn.
    """
    score: Score = Counter()
    num_finished = 0
    for conversation in (world.sample("test", index, [name]) for name in world.FAMILIES for index in range(count)):
        turn = int(conversation.id.split("-")[-1]) % (len(conversation.messages) // 2)
        inputs = target.prepare(conversation.messages[: 2 * turn + 1])
        out = sage.generate(target, None, inputs, policy="autoregressive", max_new_tokens=MAX_NEW_TOKENS)
        score += score_answer(out.text, conversation.meta["truth"], conversation.meta["expect"][turn])
        num_finished += int(out.tokens[-1]) in target.eos_token_ids
    words = {kind: score[kind, True] + score[kind, False] for kind in (*KINDS, *sorted({kind for kind, _ in score} - {*KINDS}))}
    return {
        "right": {kind: round(score[kind, True] / number, 4) for kind, number in words.items() if number},
        "words": {kind: number for kind, number in words.items() if number},
        "finished": num_finished / (count * len(world.FAMILIES)),
    }


def score_table(result: dict[str, Any]) -> str:
    """Formats a score for a terminal."""
    rows = [[kind, f"{100 * share:.1f}%", str(result["words"][kind])] for kind, share in result["right"].items()]
    rows.append(["finished", f"{100 * result['finished']:.1f}%", ""])
    return text_table(("kind", "right", "words"), rows, ruled=False)


def main() -> int:
    parser = cli.new_parser("python -m data_prep.pocket.score", description=__doc__)
    parser.add_argument("--target", required=True, help="a pocket target's folder")
    parser.add_argument("--prompts", type=int, default=60, help="held-out prompts per family")
    options = parser.parse_args()
    result = score_target(sage.load_target(options.target), options.prompts)
    print(score_table(result))
    return 0 if min(result["right"].get(kind, 0.0) for kind in KINDS) >= 0.95 and result["finished"] == 1 else 1


if __name__ == "__main__":
    sys.exit(cli.run(main))
