"""A trace made by hand, of any size and with any texts, without a model; and what a page contains: elements, texts, data."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import torch

from sage.decoding.answer import Stats
from sage.decoding.generation import Output
from sage.tracing.trace_page import Choice, Trace, TracedRound

HOSTILE = (
    '<script>window.hacked = 1; alert("1")</script>',
    "</script><img src=x onerror='window.hacked = 2; alert(2)'>",
    "\"'`&lt;\x00\x07\x1b\u2028\u202e\ud800",
    "\n\t ",
)
VOID = {"meta", "img", "input"}


class Words:
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
    race = replace(output, stats=Stats(time_s={"verify": 0.006 * num_tokens}))
    settings = {"target": "tiny", "draft": "runs/<x>", "policy": "sage"}
    prompt = [("user", texts[0])]
    return Trace(output=output, rounds=rounds, settings=settings, tokenizer=tokenizer, prompt=prompt, race=race)


class Page(HTMLParser):
    """Tags with attributes, the content of scripts and style sheets, all other text, and the answer of a trace by token."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self.text = ""
        self.answer: list[str] = []
        self._is_answer = False
        self.feed(text)
        assert not self.open, "an element is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open += [tag] if tag not in VOID else []
        if dict(attrs).get("id") == "answer":
            self._is_answer = True
        elif self._is_answer and tag == "span":
            self.answer.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"<{tag}> is closed at another place than opened"
        self._is_answer = self._is_answer and tag != "div"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.raw:
            self.raw[self.open[-1]].append(data)
            return
        self.text += data
        if self._is_answer:
            self.answer[-1] += data

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.raw["script"][0])
        return found
