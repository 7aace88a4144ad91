"""The target's pass over a prompt, as a function of tensors, for prompts that are short enough to gain by it.

Shapes: T prompt tokens, C cache capacity, D hidden, H KV heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sage.runtime.attention import use_tree_attention
from sage.runtime.cache import PackedCache, TreeCache
from sage.runtime.executors import executor_of
from sage.runtime.pass_function import CAPACITY, PROMPT, Padding, PassFunction, PassInputs, Result, argument
from sage.targets.family import Prompt
from sage.targets.target import Features, Target
from sage.targets.tree_passes import cache_sizes, describe_target

BUFFER = (1, "kv_heads", CAPACITY, "head_dim")
MIN_BYTES = 10_000_000  # of the text layers; a smaller model saves less than it costs to compile one more pass


@dataclass(kw_only=True)
class PromptInputs(PassInputs):
    """Arguments of a `PromptPass`.

    Attributes:
        embeds: [1, T, D].
        columns: LongTensor [T], 0 to T - 1, the places in the cache that are written.
        keys, values: buffers of every layer, [1, H, C, d].
        positions: LongTensor [A, T], rope positions of every axis.
    """

    embeds: Tensor = argument(1, PROMPT, "hidden_size", dtype=None)
    columns: Tensor = argument(PROMPT)
    keys: Sequence[Tensor] = argument(*BUFFER, dtype=None, padding=Padding.cache, count="num_layers")
    values: Sequence[Tensor] = argument(*BUFFER, dtype=None, padding=Padding.cache, count="num_layers")
    positions: Tensor = argument("num_axes", PROMPT)


class PromptPass(PassFunction):
    """The text layers' causal pass over a whole prompt, from its embeddings to features.

    Args:
        levels: indices k of `hidden_states` to return as well.
    """

    def __init__(self, target: Target, levels: Sequence[int]) -> None:
        self._axes = target.family.decode_positions(torch.zeros(1, dtype=torch.long)).shape[:-1]
        sizes = cache_sizes(target) | {"hidden_size": target.hidden_size, "num_axes": self._axes.numel()}
        results = [Result((1, PROMPT, target.hidden_size))] * (1 + len(levels))
        names = ("the target's pass over a prompt",) * 2
        facts = describe_target(target), tuple(levels)
        super().__init__("target", names, PromptInputs, sizes, target.dtype, results, facts)
        self.text_model = target.text_model
        self._target, self._levels = target, tuple(levels)

    def compute(self, inputs: PromptInputs) -> tuple[Tensor, ...]:
        """Returns the last features [1, T, D] and those of the levels."""
        columns, positions = inputs.columns, inputs.positions.view(*self._axes, -1)
        cache = PackedCache(inputs.keys, inputs.values, columns, columns, columns.shape[0])
        with use_tree_attention(self.text_model):
            features = self._target.run(inputs.embeds, positions, None, cache, self._levels)
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
    is_expressed = is_short and not (wants_attention or cache.length or target.family.text_inputs(prompt))
    function = _prompt_pass(target, tuple(levels)) if is_expressed else None
    if function is None:
        return target.prefill(prompt, cache, levels, wants_attention)
    cache.reserve(length)
    inputs = PromptInputs(
        embeds=prompt.embeds.contiguous(),
        columns=torch.arange(length, device=prompt.input_ids.device),
        keys=cache.keys,
        values=cache.values,
        positions=prompt.position_ids.flatten(0, -2).contiguous(),
    )
    last, *others = executor.bind(function)(inputs)
    return Features(last, tuple(others))


def _prompt_pass(target: Target, levels: tuple[int, ...]) -> PromptPass | None:
    """Returns the target's pass over prompts; None if the pass does not express it, or is not worth compiling."""
    key = ("prompt", levels, target.dtype)
    if key not in target.functions:
        is_small = sum(weight.nbytes for weight in target.text_model.parameters()) < MIN_BYTES
        is_other = target.family.window is not None or target.linear is not None
        target.functions[key] = None if is_small or is_other else PromptPass(target, levels)
    return target.functions[key]
