"""The target's pass over a prompt, as a function of tensors, for prompts that are short enough to gain by it.

Shapes: T prompt tokens, C cache capacity, D hidden, H KV heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sage.runtime.attention import use_tree_attention
from sage.runtime.cache import RowCache, TreeCache
from sage.runtime.executors import executor_of
from sage.runtime.pass_function import CAPACITY, PROMPT, Argument, Padding, PassFunction, Result
from sage.targets.family import Prompt
from sage.targets.target import Features, Target
from sage.targets.tree_passes import describe_target, family_modules

TIMED_ROWS = (32, 64, 128)
MIN_BYTES = 10_000_000  # of the text layers; a smaller model saves less than it costs to compile one more pass


class PromptPass(PassFunction):
    """The text layers' causal pass over a whole prompt, from its embeddings to features.

    Args:
        levels: indices k of `hidden_states` to return as well.
    """

    def __init__(self, target: Target, levels: Sequence[int]) -> None:
        axes = target.family.decode_positions(torch.zeros(1, dtype=torch.long)).shape[:-1]
        buffers = (1, target.num_kv_heads, CAPACITY, target.head_dim)
        arguments = (
            Argument("embeds", (1, PROMPT, target.hidden_size), target.dtype),
            Argument("positions", (*axes, PROMPT), torch.long),
            Argument("rows", (PROMPT,), torch.long),
            Argument("keys", buffers, target.dtype, Padding.cache, target.num_layers),
            Argument("values", buffers, target.dtype, Padding.cache, target.num_layers),
        )
        results = [Result((1, PROMPT, target.hidden_size))] * (1 + len(levels))
        names = ("the target's pass over a prompt",) * 2
        described, modules = (describe_target(target), tuple(levels)), family_modules(target)
        super().__init__("target", names, arguments, results, described, modules, TIMED_ROWS)
        self.text_model = target.text_model
        self._target, self._levels = target, tuple(levels)

    def forward(
        self, embeds: Tensor, positions: Tensor, rows: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Runs the pass.

        Args:
            embeds: [1, T, D].
            positions: rope positions as `Prompt.position_ids`.
            rows: LongTensor [T], 0 to T - 1, the cache rows that are written.
            keys, values: buffers of every layer, [1, H, C, d].

        Returns:
            the last features [1, T, D] and those of the levels.
        """
        with use_tree_attention(self.text_model):
            cache = RowCache(keys, values, rows, rows.shape[0])
            features = self._target.run(embeds, positions, None, cache, self._levels)
        return features.last, *features.levels


def read_prompt(
    target: Target, prompt: Prompt, cache: TreeCache, levels: Sequence[int] = (), wants_attention: bool = False
) -> Features:
    """Appends a prompt, or its new part, to a cache, as `Target.prefill` does; short prompts by a compiled pass.

    Args:
        levels: indices k of `hidden_states` to return as well.
        wants_attention: also return `Features.attention`.
    """
    executor, length = executor_of(target.passes), prompt.input_ids.shape[1]
    is_short = PROMPT.minimum <= length <= executor.max_prompt
    expresses = is_short and not (wants_attention or cache.length or target.family.text_inputs(prompt))
    function = _prompt_pass(target, tuple(levels)) if expresses else None
    if function is None:
        return target.prefill(prompt, cache, levels, wants_attention)
    run = executor.bind(function)
    cache.reserve(length)
    rows = torch.arange(length, device=prompt.input_ids.device)
    last, *others = run(prompt.embeds.contiguous(), prompt.position_ids.contiguous(), rows, cache.keys, cache.values)
    return Features(last, tuple(others))


def _prompt_pass(target: Target, levels: tuple[int, ...]) -> PromptPass | None:
    """Returns the target's pass over prompts; None if the pass does not express it, or is not worth compiling."""
    key = ("prompt", levels, target.dtype)
    if key not in target.functions:
        is_small = sum(weight.nbytes for weight in target.text_model.parameters()) < MIN_BYTES
        target.functions[key] = None if is_small or target.family.window is not None else PromptPass(target, levels)
    found: PromptPass | None = target.functions[key]
    return found
