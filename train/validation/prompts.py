"""Held-out prompts of validations and their model inputs, each prepared once and kept on the rank that decodes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any

from data_prep.conversation import FOLLOW_UPS, Conversation, expand_follow_ups
from sage.bench.measurement import BenchPrompt
from sage.decoding.generation import generate
from sage.decoding.settings import Sampling
from sage.trees import AUTOREGRESSIVE
from train.config.schema import DecodeConfig


class PromptSet:
    """Prompts and their model inputs.

    The later turns of a conversation follow the target's own answers to the earlier ones. The target is frozen, so they do not
    change from one validation to the next.

    Args:
        target: prepares the messages and answers them.
        decode: `num_prompts` limits the number of turns; the other settings are those of the answers.
        prompts: held-out conversations, which end with a question.
    """

    def __init__(self, target: Any, decode: DecodeConfig, prompts: Sequence[Conversation]) -> None:
        self.target, self.decode = target, decode
        self.prompts = limit_turns(prompts, decode.num_prompts)
        self._first_turns: dict[int, BenchPrompt] = {}  # by id of the prompt

    @property
    def num_turns(self) -> int:
        return sum(1 + len(_later_turns(prompt)) for prompt in self.prompts)

    def shard(self, rank: int, world_size: int) -> PromptSet:
        """Every `world_size`-th prompt, with the inputs that are prepared already."""
        shard = PromptSet(self.target, self.decode, self.prompts[rank::world_size])
        shard._first_turns = self._first_turns
        return shard

    def prepare_first_turns(self) -> None:
        """Prepares everything that needs no answer of the target, so that a mistake is found before training. Raises ValueError
        with the name of a prompt that cannot be prepared.
        """
        self._first_turns |= {id(prompt): self._prepare_turn(prompt) for prompt in self.prompts}

    @cached_property
    def conversations(self) -> list[Conversation]:
        """All prompts, each followed by the later turns of its conversation; decodes the target's answers at the first call."""
        return list(islice(expand_follow_ups(self.prompts, self._answer), self.decode.num_prompts))

    @cached_property
    def turns(self) -> list[BenchPrompt]:
        """The model inputs of `conversations`. Raises ValueError with the name of a prompt that cannot be prepared."""
        return self._prepare(self.conversations)

    @property
    def later_turns(self) -> list[Any]:
        """`conversations` with None in the place of the prompts, which every rank that decodes has."""
        prompts = {id(prompt) for prompt in self.prompts}
        return [None if id(turn) in prompts else turn for turn in self.conversations]

    def turns_of(self, rank: int, world_size: int, later_turns: Sequence[Any]) -> list[BenchPrompt]:
        """Returns `shard(rank, world_size).turns` with the answers decoded by that rank, whose `later_turns` are given."""
        prompts = iter(self.prompts[rank::world_size])
        return self._prepare([next(prompts) if turn is None else turn for turn in later_turns])

    def _prepare(self, conversations: Sequence[Conversation]) -> list[BenchPrompt]:
        return [self._first_turns.get(id(turn)) or self._prepare_turn(turn) for turn in conversations]

    def _prepare_turn(self, turn: Conversation) -> BenchPrompt:
        return BenchPrompt.of(self.target, turn.messages, turn.id, turn.family, "validation prompt ")

    def _answer(self, messages: list[dict[str, Any]]) -> str:
        inputs = self.target.prepare(messages)
        return generate(self.target, None, inputs, policy=AUTOREGRESSIVE, sampling=Sampling.from_attributes(self.decode)).text


def limit_turns(prompts: Sequence[Conversation], limit: int) -> list[Conversation]:
    """The conversations that hold the first `limit` turns, the last one truncated."""
    chosen: list[Conversation] = []
    for prompt in prompts:
        if limit < 1:
            break
        later = _later_turns(prompt)
        chosen.append(replace(prompt, meta=prompt.meta | {FOLLOW_UPS: later[: limit - 1]}) if len(later) >= limit else prompt)
        limit -= 1 + len(later)
    return chosen


def _later_turns(prompt: Conversation) -> list[str]:
    return list(prompt.meta.get(FOLLOW_UPS, ()))
