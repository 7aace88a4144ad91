"""What `sage-generate --explain` prints: the tree of every round, what of it was accepted, and the policy's decision."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from sage.decoding.answer import Stats
from sage.decoding.decoder import Round
from sage.planning.base import Policy


def explanation(rounds: Sequence[Round], stats: Stats, policy: Policy, tokenizer: Any) -> Iterator[str]:
    """Yields lines: the prefill's token, then per round a summary and the tree below the last token of the round before.

    Args:
        rounds: those of the answer, the prefill first.
        tokenizer: writes the tokens.
    """

    def text_of(token: int) -> str:
        return json.dumps(tokenizer.decode([token]), ensure_ascii=False)

    if rounds:
        yield f"prefill  : 1 token, {' '.join(map(text_of, rounds[0].tokens))}"
    for number, entry in enumerate(stats.rounds_log, start=1):
        size = f"{entry['nodes']:2} {'node ' if entry['nodes'] == 1 else 'nodes'} {entry['depth']:2} deep"
        yield f"round {number:3}: {size}, {entry['accepted']} accepted  {policy.explain(entry)}".rstrip()
        round_ = rounds[number] if number < len(rounds) else None  # an interrupted answer may lack its last round
        if round_ is not None and round_.tree is not None and len(round_.tree.tokens) > 1:
            accepted = set(round_.path[: round_.num_drafted + 1])
            yield from tree_lines(round_.tree.tokens, round_.tree.parents, accepted, text_of)


def tree_lines(
    tokens: Sequence[int], parents: Sequence[int], accepted: Collection[int], text_of: Callable[[int], str]
) -> Iterator[str]:
    """Draws a tree, one node a line, with a `*` before accepted nodes.

    Args:
        tokens, parents: [N] each, the root first, parents before children; the root's parent is -1.
        accepted: indices of the accepted nodes.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)

    def below(node: int, indent: str) -> Iterator[str]:
        for child in children.get(node, []):
            is_last = child == children[node][-1]
            mark = "* " if child in accepted else ""
            yield f"{indent}{'└─' if is_last else '├─'} {mark}{text_of(tokens[child])}"
            yield from below(child, indent + ("   " if is_last else "│  "))

    yield f"  {text_of(tokens[0])}"
    yield from below(0, "  ")
