"""Conversations of several turns that reuse the target's cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sage.decoding.generation import CachedPrefix, Generation, Output, start
from sage.drafts.draft import Draft
from sage.planning.base import Policy
from sage.targets import Target
from sage.trees import DEFAULT_POLICY
from sage.trees import policy as new_policy


class Chat:
    """A conversation with a target; tokens of earlier turns are not prefilled again. Target, draft and options are those of
    `sage.generate`; the policy keeps its learned state over all turns.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        policy: str | Policy = DEFAULT_POLICY,
        system: str | None = None,
        **options: Any,
    ) -> None:
        self.target, self.draft, self.options = target, draft, options
        self.policy = new_policy(policy) if isinstance(policy, str) else policy
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self._prefix: CachedPrefix | None = None
        self._current: tuple[Generation, dict[str, Any]] | None = None  # the turn in progress and its message

    def ask(self, text: str, images: Sequence[Any] = (), videos: Sequence[Any] = ()) -> Output:
        """Answers a message; images and videos, as for `Target.prepare`, are placed before the text. Raises ValueError as
        `sage.generate` does, and TypeError for a text that is none or media that are not a list; the conversation is unchanged.
        """
        generation = self.start(text, images, videos)
        for _ in generation.rounds():
            pass
        return self.finish(generation)

    def start(self, text: str, images: Sequence[Any] = (), videos: Sequence[Any] = ()) -> Generation:
        """Starts a turn, for streaming; `finish` ends it. A turn without `finish` leaves the conversation unchanged."""
        if not isinstance(text, str):
            raise TypeError(f"text: {type(text).__name__}; give the question as a string")
        for name, items in (("images", images), ("videos", videos)):
            if not isinstance(items, (list, tuple)):
                raise TypeError(f"{name}: {type(items).__name__}; give a list, such as {name}=[...], also for a single one")
        media = [{"type": kind, kind: item} for kind, items in (("image", images), ("video", videos)) for item in items]
        message = {"role": "user", "content": [*media, {"type": "text", "text": text}]}
        inputs = self.target.prepare([*self.messages, message])
        prefix, self._prefix = self._prefix, None
        generation = start(self.target, self.draft, inputs, self.policy, prefix=prefix, keep_prefix=True, **self.options)
        self._current = generation, message
        return generation

    def finish(self, generation: Generation) -> Output:
        """Ends a turn: appends message and answer. Raises ValueError unless `generation` is the turn started last."""
        if self._current is None or self._current[0] is not generation:
            raise ValueError("chat: this is not the turn started last; call finish before the next start")
        output = generation.output()
        self._prefix = generation.prefix()
        self.messages += [self._current[1], {"role": "assistant", "content": [{"type": "text", "text": output.text}]}]
        self._current = None
        return output
