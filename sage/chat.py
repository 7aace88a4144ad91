"""A conversation of several turns; the target's cache is kept between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sage.drafts import Draft
from sage.generation import Generation, Output, start
from sage.prefix import CachedPrefix
from sage.targets import Target
from sage.trees import Policy
from sage.trees import policy as new_policy


class Chat:
    """Asks turn after turn; what was read before is not prefilled again.

    Args:
        target, draft: as in `sage.generate`.
        policy: kept over the turns, with what it learns.
        system: a system message.
        options: of `sage.generate`.
    """

    def __init__(
        self, target: Target, draft: Draft | None, policy: str | Policy = "sage", system: str | None = None, **options: Any
    ) -> None:
        self.target, self.draft, self.options = target, draft, options
        self.policy = new_policy(policy) if isinstance(policy, str) else policy
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self._prefix: CachedPrefix | None = None
        self._begun: tuple[Generation, dict[str, Any]] | None = None  # the turn under way, and what it asks

    def ask(self, text: str, images: Sequence[Any] = (), videos: Sequence[Any] = ()) -> Output:
        """Answers one more message.

        Args:
            text: the question.
            images, videos: come before the text; as in `Target.prepare`.

        Raises:
            ValueError: as `sage.generate`; the conversation is as it was before.
        """
        generation = self.start(text, images, videos)
        for _ in generation.rounds():
            pass
        return self.finish(generation)

    def start(self, text: str, images: Sequence[Any] = (), videos: Sequence[Any] = ()) -> Generation:
        """Begins a turn, for callers that stream it; end it with `finish`. A turn that is not ended was never asked."""
        media = [{"type": kind, kind: item} for kind, items in (("image", images), ("video", videos)) for item in items]
        message = {"role": "user", "content": [*media, {"type": "text", "text": text}]}
        inputs = self.target.prepare([*self.messages, message])
        prefix, self._prefix = self._prefix, None
        generation = start(self.target, self.draft, inputs, self.policy, prefix=prefix, keep_prefix=True, **self.options)
        self._begun = generation, message
        return generation

    def finish(self, generation: Generation) -> Output:
        """Ends a turn: question and answer become part of the conversation.

        Raises:
            ValueError: it is not the turn begun last.
        """
        if self._begun is None or self._begun[0] is not generation:
            raise ValueError("chat: this turn is not the one begun last; finish a turn before the next is begun")
        output = generation.output()
        self._prefix = generation.prefix()
        self.messages += [self._begun[1], {"role": "assistant", "content": [{"type": "text", "text": output.text}]}]
        self._begun = None
        return output
