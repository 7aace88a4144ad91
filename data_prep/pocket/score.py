"""`python -m data_prep.pocket.score --target DIR`: scores the answers of a pocket target about held-out images.

Answers are generated greedily for prompts of the test split and parsed by `grammar`. An answer is finished if it ends with an
end-of-sequence token within `MAX_NEW_TOKENS`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import sage
from data_prep.conversation import Conversation
from data_prep.pocket import world
from data_prep.pocket.grammar import Score, score_answer
from sage.commands import cli
from sage.inputs.processing import open_media
from sage.io.tables import text_table

KINDS = ("colour", "shape", "size", "position", "sign", "height")
MAX_NEW_TOKENS = 200
BATCH = 20  # prompts


def prompt_turn(conversation: Conversation) -> tuple[list[dict[str, Any]], int]:
    """Returns the messages up to one of the questions, and the number of its turn."""
    turns = len(conversation.messages) // 2
    turn = int(conversation.id.split("-")[-1]) % turns
    return conversation.messages[: 2 * turn + 1], turn


def pad_left(batch: dict[str, Any]) -> dict[str, Any]:
    """Moves the padding of token fields [B, T] from right to left, for generation."""
    mask = batch["attention_mask"]
    shifts = (mask.shape[1] - mask.sum(1)).tolist()
    fields = [key for key in ("input_ids", "attention_mask", "mm_token_type_ids") if key in batch]
    moved = {key: torch.stack([row.roll(by) for row, by in zip(batch[key], shifts, strict=True)]) for key in fields}
    return batch | moved


@torch.inference_mode()
def answers(target: Any, prompts: list[list[dict[str, Any]]]) -> list[tuple[str, int, bool]]:
    """Generates greedy answers: text, number of tokens, and whether the answer is finished."""
    processor, examples = target.processor, []
    for prompt in prompts:
        images, videos, fps = open_media(prompt)
        example = processor.encode([(processor.render(prompt, True), False)], images, videos, fps)
        del example["loss_mask"]
        examples.append(example)
    batch = pad_left(processor.collate(examples))
    tokens = target.model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)[:, batch["input_ids"].shape[1] :]
    found = []
    for row in tokens.tolist():
        ends = [place for place, token in enumerate(row) if token in target.eos_token_ids]
        row = row[: ends[0]] if ends else row
        found.append((processor.tokenizer.decode(row), len(row), bool(ends)))
    return found


def score_family(target: Any, family: str, count: int, samples: list[str]) -> dict[str, Any]:
    """Scores `count` held-out prompts of one task family."""
    conversations = [world.sample("test", index, [family]) for index in range(count)]
    score: Score = Counter()
    lengths, finished = [], 0
    for begin in range(0, count, BATCH):
        part = conversations[begin : begin + BATCH]
        for conversation, (text, length, ended) in zip(part, answers(target, [prompt_turn(t)[0] for t in part]), strict=True):
            score += score_answer(text, conversation.meta["truth"], conversation.meta["expect"][prompt_turn(conversation)[1]])
            lengths.append(length)
            finished += ended
            if begin == 0 and len(samples) < 200 and conversation is part[0]:
                samples.append(f"{family}: {prompt_turn(conversation)[0][-1]['content'][-1]['text']} -> {text}")
    return {"score": score, "tokens": sum(lengths) / count, "finished": finished, "count": count}


def summary(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the share of right facts by kind over all task families, and the errors of each family."""
    total: Score = Counter()
    for part in parts.values():
        total += part["score"]
    kinds = list(dict.fromkeys([*KINDS, *sorted(kind for kind, _ in total)]))
    words = {kind: total[kind, True] + total[kind, False] for kind in kinds}
    return {
        "right": {kind: round(total[kind, True] / words[kind], 4) for kind in kinds if words[kind]},
        "words": {kind: words[kind] for kind in kinds if words[kind]},
        "finished": sum(part["finished"] for part in parts.values()) / sum(part["count"] for part in parts.values()),
        "families": {
            name: {
                "prompts": part["count"],
                "mean_tokens": round(part["tokens"], 1),
                "wrong": {kind: n for (kind, right), n in sorted(part["score"].items()) if not right and n},
            }
            for name, part in parts.items()
        },
    }


def score_target(target: Any, count: int = 60, samples: list[str] | None = None) -> dict[str, Any]:
    """Scores a loaded target (`sage.load_target`) on `count` held-out prompts of each task family."""
    kept = [] if samples is None else samples
    return summary({name: score_family(target, name, count, kept) for name in world.FAMILIES})


def score_table(result: dict[str, Any]) -> str:
    """Formats a score for a terminal."""
    rows = [[kind, f"{100 * share:.1f}%", str(result["words"][kind])] for kind, share in result["right"].items()]
    rows.append(["finished", f"{100 * result['finished']:.1f}%", ""])
    return text_table(("kind", "right", "words"), rows, ruled=False)


def main() -> int:
    parser = cli.new_parser("python -m data_prep.pocket.score", description=__doc__)
    parser.add_argument("--target", required=True, help="a pocket target's folder")
    parser.add_argument("--prompts", type=int, default=60, help="held-out prompts per family")
    parser.add_argument("--samples", action="store_true", help="print one answer per family")
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    samples: list[str] = []
    result = score_target(sage.load_target(options.target), options.prompts, samples=samples)
    print(score_table(result))
    if options.samples:
        print("\n".join(samples))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if min(result["right"][kind] for kind in KINDS) >= 0.95 and result["finished"] == 1 else 1


if __name__ == "__main__":
    sys.exit(cli.run(main))
