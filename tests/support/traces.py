"""A trace made by hand, of any size and with any texts, without a model."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from sage.decoding.answer import Stats
from sage.decoding.generation import Output
from sage.replay.trace_page import Choice, Race, Trace, TracedRound

HOSTILE = (
    '<script>window.hacked = 1; alert("1")</script>',
    "</script><img src=x onerror='window.hacked = 2; alert(2)'>",
    "\"'`&lt;\x00\x07\x1b\u2028\u202e\ud800",
    "\n\t ",
)


class Words:
    """A tokenizer whose token i is the i-th text."""

    all_special_ids: tuple[int, ...] = ()

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = list(texts)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.texts[token % len(self.texts)] for token in tokens)


def made_trace(
    num_tokens: int = 40, num_nodes: int = 25, texts: Sequence[str] = ("a ", "red ", "box "), seed: int = 0
) -> Trace:
    """A trace of `num_tokens` tokens; each round verifies `num_nodes` nodes, and drafts six more, below random parents."""
    rng, stats, rounds = random.Random(seed), Stats(prompt_tokens=9, new_tokens=1), []
    tokens = [rng.randrange(5000) for _ in range(num_tokens)]
    while stats.new_tokens < num_tokens:
        path, parents, depths = [0], [-1], [0]
        for node in range(1, num_nodes + 6):
            parent = rng.randrange(min(node, num_nodes))
            parents.append(parent)
            depths.append(depths[parent] + 1)
            if node < num_nodes and parent == path[-1] and rng.random() < 0.3:
                path.append(node)
        accepted = min(len(path) - 1, num_tokens - stats.new_tokens)
        emitted = tokens[stats.new_tokens : stats.new_tokens + accepted + 1]
        nodes = [rng.randrange(5000) for _ in parents]
        for node, token in zip(path[1:], emitted, strict=False):
            nodes[node] = token
        has_bonus = len(emitted) > accepted
        figures = {"alpha": rng.random(), "planned_depth": 4.0}
        rounds.append(
            TracedRound(
                start=stats.new_tokens,
                tokens=emitted,
                num_accepted=accepted,
                num_verified=num_nodes,
                nodes=nodes,
                parents=parents,
                depths=depths,
                draft=[1.0, *(rng.random() for _ in nodes[1:])],
                calibrated=[1.0, *(rng.random() for _ in nodes[1:])],
                target=[rng.random() for _ in range(num_nodes)],
                path=path,
                bonus=Choice(emitted[-1], 0.9, 0.25, 1) if has_bonus else None,
                figures={**figures, "depth": max(depths[:num_nodes]), "nodes": num_nodes - 1, "accepted": accepted},
                reason="because <b>",
                time_s={"draft_steps": 0.002, "verify": 0.005, "policy": 0.0001},
            )
        )
        stats.add_round(max(depths[:num_nodes]), num_nodes - 1, accepted, figures)
        stats.new_tokens += len(emitted)
    tokenizer = Words(texts)
    output = Output(torch.tensor(tokens), stats, torch.zeros(num_tokens, dtype=torch.bool), tokenizer)
    race = Race(tokens, 0.006 * num_tokens)
    settings = {"target": "tiny", "draft": "runs/<x>", "policy": "sage"}
    prompt = [("user", texts[0])]
    return Trace(output=output, rounds=rounds, settings=settings, tokenizer=tokenizer, prompt=prompt, race=race)
