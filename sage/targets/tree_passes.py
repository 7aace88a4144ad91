"""The target's passes over trees and over short prompts, as functions of tensors; the tree passes of one request.

Shapes: N tree nodes, T prompt tokens, X visible rows, S keys, C cache capacity, D hidden, V vocabulary, H KV heads, d head
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from sage.runtime.attention import use_tree_attention
from sage.runtime.cache import PackedCache, Queries, TreeCache, by_row
from sage.runtime.executors import executor_of
from sage.runtime.linear_states import LinearStates, Window
from sage.runtime.packing import BoundPass, CachedInputs, Pass, buffers, run_passes
from sage.runtime.pass_function import (
    CAPACITY,
    EAGER,
    LINEAR_INPUTS,
    LINEAR_SLOTS,
    NODES,
    PER_ROW,
    PROMPT,
    ROWS,
    SEEN,
    VISIBLE,
    Executor,
    Padding,
    PassFunction,
    PassInputs,
    argument,
)
from sage.runtime.prefix_attention import PassKeys, key_parts
from sage.runtime.recurrent_cache import PackedRecurrentCache
from sage.targets.family import FULL, SLIDING, Mask, Prompt
from sage.targets.target import Features, Target

state = partial(argument, dtype=torch.float32, padding=Padding.cache)
NAN_TOKEN = -1  # in place of a token where a logit is NaN
MIN_PROMPT_BYTES = 10_000_000  # of the text layers; a smaller model saves less than it costs to compile one more pass


@dataclass
class TreeOutput:
    """Result of a tree pass: features of all nodes [1, N, D], logits [N, V], and the greedy tokens [N]."""

    features: Features
    logits: Tensor
    greedy: Tensor | None = None


@dataclass(kw_only=True)
class NodeInputs(CachedInputs):
    """Arguments of a pass over nodes of trees.

    Attributes:
        offsets, places: as of a `Layout`.
        visible: BoolTensor [T, X], attention of each node to X columns of its row, its own among them; False for padding.
        near: LongTensor [B, X], these columns; all before the first of them are visible to all nodes of the row.
    """

    offsets: Tensor = argument(NODES)
    places: Tensor = argument(ROWS, PER_ROW)
    visible: Tensor = argument(NODES, VISIBLE, dtype=torch.bool, padding=Padding.masked)
    near: Tensor = argument(ROWS, VISIBLE, padding=Padding.spare)

    @property
    def queries(self) -> Queries | None:
        """The nodes as queries; None for a single row."""
        return Queries.of(self.owners, self.offsets, self.places)

    def seen(self) -> Tensor:
        """Returns the columns that each node attends to, Bool [T, S]; of one row in fewer operator calls."""
        if self.queries is None:
            near = self.near.flatten()
            return (self.steps < near[:1]).expand(self.visible.shape[0], -1).clone().index_copy_(1, near, self.visible)
        place = self.steps - self.near[:, 0].index_select(0, self.owners)[:, None]
        last = self.visible.shape[1] - 1
        return (place < 0) | (self.visible.gather(1, place.clamp(0, last)) & (place <= last))

    def cache(self) -> PackedCache:
        """Returns the cache as the layers of the pass see it."""
        return PackedCache(self.keys, self.values, self.owners, self.columns, self.steps.shape[0], self.queries)


@dataclass(kw_only=True)
class TreeInputs(NodeInputs):
    """Arguments of a tree pass: of each node its token and its rope position, LongTensor [T]."""

    tokens: Tensor = argument(NODES)
    positions: Tensor = argument(NODES)


@dataclass(kw_only=True)
class SplitTreeInputs(TreeInputs):
    """Arguments of a `SplitTreePass`: `steps` has the capacity of the cache, so that no size is the number of keys."""

    steps: Tensor = argument(CAPACITY, padding=Padding.counting)
    visible: Tensor = argument(NODES, SEEN, dtype=torch.bool, padding=Padding.masked)
    near: Tensor = argument(ROWS, SEEN, padding=Padding.spare)


@dataclass(kw_only=True)
class RecurrentTreeInputs(TreeInputs):
    """Arguments of a `RecurrentTreePass`, with the attributes of `LinearStates`."""

    linear_state: Tensor = state(ROWS, "linear", "value_heads", "key_size", "value_size")
    linear_inputs: Tensor = argument(ROWS, "linear", LINEAR_INPUTS, "channels", dtype=None, padding=Padding.cache)
    linear_keys: Tensor = state(ROWS, "linear", LINEAR_SLOTS, "key_heads", "key_size")
    linear_updates: Tensor = state(ROWS, "linear", LINEAR_SLOTS, "value_heads", "value_size")
    linear_decays: Tensor = state(ROWS, "linear", LINEAR_SLOTS, 2, "value_heads")

    @property
    def states(self) -> LinearStates:
        """The states of the rows."""
        return LinearStates(*(getattr(self, each.name) for each in fields(LinearStates)))

    def window(self, kernel: int) -> Window:
        """Returns what the nodes see of the tokens since the base states: columns from the first near one on."""
        slots = self.columns - self.near[:, 0].index_select(0, self.owners)
        return Window(self.visible, slots, self.owners, self.queries, kernel)


class TreePass(PassFunction):
    """The target's pass over the tree of one request or of several, with its lm_head and its greedy choice at every node.

    Args:
        levels: indices k of `hidden_states` to return as well.
    """

    arguments_type: type[TreeInputs] = TreeInputs

    def __init__(self, target: Target, levels: Sequence[int]) -> None:
        names = ("the target's pass over one node", "the target's pass over several nodes")
        results = ((NODES,), (NODES, target.vocab_size), *[(1, NODES, target.hidden_size)] * (1 + len(levels)))
        facts = describe_target(target), tuple(levels)
        super().__init__("target", names, self.arguments_type, cache_sizes(target), target.dtype, results, facts)
        self.text_model, self.embed_tokens, self.lm_head = target.text_model, target.embed_tokens, target.lm_head
        self._target, self._levels = target, tuple(levels)

    def compute(self, inputs: TreeInputs) -> tuple[Tensor, ...]:
        """Returns greedy tokens [T] (`greedy_tokens`), logits [T, V], the last features [1, T, D] and those of the levels.
        Features equal those of a sequential pass along each node's path.
        """
        target, (mask, keys) = self._target, self._attention(inputs)
        tokens, places = target.family.text_ids(inputs.tokens), target.family.decode_positions(inputs.positions)
        embeds, given = self.embed_tokens(tokens)[None], target.family.inputs_of_tokens(self.text_model, tokens[None])
        options: dict[str, Any] = {"text_inputs": given, "keys": keys, "queries": inputs.queries}
        with use_tree_attention(self.text_model):
            features = target.run(embeds, places, mask, self._cache(inputs), self._levels, **options)
        logits = target.logits(features.last[0])
        return greedy_tokens(logits), logits, features.last, *features.levels

    def _cache(self, inputs: Any) -> PackedCache:
        """Returns the cache as the layers of the pass see it."""
        return inputs.cache()

    def _attention(self, inputs: TreeInputs) -> tuple[Mask, PassKeys | None]:
        """Returns what nodes attend to: additive masks, or the keys; no mask if a single node attends to all of them."""
        if inputs.queries is None and inputs.visible.shape[1] == 1 and not self._target.family.window:
            return None, None
        return self._target.family.tree_mask(by_row(inputs.seen(), inputs.queries), self._target.tile), None


class SplitTreePass(TreePass):
    """A tree pass of one request that masks the columns of the tree only; the number of keys is a tensor of the device."""

    arguments_type = SplitTreeInputs

    def _attention(self, inputs: TreeInputs) -> tuple[Mask, PassKeys | None]:
        target, given = self._target, (inputs.visible, inputs.near.flatten(), inputs.steps.shape[0])
        window = target.family.window
        types = getattr(target.text_config, "layer_types", None) or [SLIDING if window else FULL]
        keys = {False: key_parts(*given, target.group(FULL), target.dtype)} if FULL in types else {}
        return None, keys if window is None else keys | {True: key_parts(*given, target.group(SLIDING), target.dtype, window)}


class RecurrentTreePass(TreePass):
    """A tree pass of a target with linear layers, each of whose nodes continues the state of its parent."""

    arguments_type = RecurrentTreeInputs

    def _cache(self, inputs: RecurrentTreeInputs) -> PackedCache:
        sizes = self._target.linear
        assert sizes is not None
        given = (inputs.keys, inputs.values, inputs.owners, inputs.columns, inputs.steps.shape[0], inputs.queries)
        return PackedRecurrentCache(*given, sizes=sizes, states=inputs.states, window=inputs.window(sizes.kernel))


class TreePasses:
    """Tree passes of a target.

    Args:
        levels: indices k of `hidden_states` to return as well.
        executor: None for that of the target's pass mode. Those of a target with linear layers are not captured.

    Attributes:
        is_split: whether a pass of one request costs the keys that there are, not those of a bucket (see `SplitTreePass`).
    """

    def __init__(self, target: Target, levels: Sequence[int], executor: Executor | None = None) -> None:
        self.target, self.executor = target, executor or executor_of(target.passes)
        if target.linear is not None and self.executor.has_buckets:
            self.executor = EAGER
        self.is_split = self.executor.splits_keys(target.device, target.dtype, target.max_head_dim)
        kinds = [TreePass if target.linear is None else RecurrentTreePass, *([SplitTreePass] if self.is_split else [])]
        functions = [self._function(kind, tuple(levels)) for kind in kinds]
        self._pass = BoundPass(self.executor, functions[0], target.device, *functions[1:])
        self._steps = torch.empty(0, dtype=torch.long)

    def _function(self, kind: type[TreePass], levels: tuple[int, ...]) -> PassFunction:
        functions, key = self.target.functions, (kind, levels, self.target.dtype)
        if key not in functions:
            functions[key] = kind(self.target, levels)
        return functions[key]

    def capacity(self, num_tokens: int) -> int:
        """Returns the capacity of a cache for `num_tokens` tokens."""
        return self.executor.capacity(num_tokens)

    def new_cache(self, num_tokens: int) -> TreeCache:
        """Returns an empty cache for `num_tokens` tokens."""
        return self.executor.new_cache(self.target, num_tokens, self.target.new_cache)

    def __call__(self, tokens: Tensor, positions: Tensor, visible: Tensor, cache: TreeCache) -> TreeOutput:
        """Runs one pass; arguments as of `over`."""
        return run_passes([self.over(tokens, positions, visible, cache)])[0]

    def over(self, tokens: Tensor, positions: Tensor, visible: Tensor, cache: TreeCache) -> Pass:
        """Returns one pass, which appends N columns to the cache and gives a `TreeOutput`.

        Args:
            tokens: LongTensor [N] node tokens, parents before children.
            positions: LongTensor [N] rope positions.
            visible: BoolTensor [N, X], X >= N: attention of each node to the last X - N cached tokens and to the N nodes;
                earlier tokens are visible to all nodes. With X = N it is the tree's `ancestors`.
        """
        nodes, seen = visible.shape
        first = cache.reserve(nodes, seen - nodes)
        end = first + nodes
        if self._steps.shape[0] < cache.capacity:
            self._steps = torch.arange(cache.capacity, device=self.target.device)
        steps = self._steps
        tensors = {
            "tokens": tokens,
            "positions": positions,
            "columns": steps.narrow(0, first, nodes),
            "visible": visible,
            "near": steps.narrow(0, end - seen, seen).unsqueeze(0),
            "steps": steps.narrow(0, 0, cache.capacity if self.is_split else end),
        }
        return Pass(self._pass, nodes, tensors, _as_output, cache)


def _as_output(results: Sequence[Tensor]) -> TreeOutput:
    greedy, logits, last, *levels = results
    return TreeOutput(Features(last, tuple(levels)), logits, greedy)


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
    keys: Sequence[Tensor] = buffers(1)
    values: Sequence[Tensor] = buffers(1)
    positions: Tensor = argument("num_axes", PROMPT)


class PromptPass(PassFunction):
    """The text layers' causal pass over a whole prompt, from its embeddings to features, also of the hidden states `levels`."""

    def __init__(self, target: Target, levels: Sequence[int]) -> None:
        self._axes = target.family.decode_positions(torch.zeros(1, dtype=torch.long)).shape[:-1]
        sizes = cache_sizes(target) | {"hidden_size": target.hidden_size, "num_axes": self._axes.numel()}
        results = [(1, PROMPT, target.hidden_size)] * (1 + len(levels))
        facts, names = (describe_target(target), tuple(levels)), ("the target's pass over a prompt",) * 2
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
    """Appends a prompt, or its new part, to a cache; short prompts by a compiled pass. Arguments as of `Target.prefill`."""
    executor, length = executor_of(target.passes), prompt.input_ids.shape[1]
    is_short = PROMPT.minimum <= length <= executor.max_prompt
    is_expressed = is_short and not (wants_attention or cache.length or target.family.text_inputs(prompt))
    function = _prompt_pass(target, tuple(levels)) if is_expressed else None
    if function is None:
        return target.prefill(prompt, cache, levels, wants_attention)
    cache.reserve(length)
    embeds, positions = prompt.embeds.contiguous(), prompt.position_ids.flatten(0, -2).contiguous()
    columns = torch.arange(length, device=prompt.input_ids.device)
    inputs = PromptInputs(embeds=embeds, columns=columns, positions=positions, **cache.tensors())
    last, *others = executor.bind(function)(inputs)
    return Features(last, tuple(others))


def _prompt_pass(target: Target, levels: tuple[int, ...]) -> PromptPass | None:
    """Returns the target's pass over prompts; None if the pass does not express it, or is not worth compiling."""
    key = (PromptPass, levels, target.dtype)
    if key not in target.functions:
        is_small = sum(weight.nbytes for weight in target.text_model.parameters()) < MIN_PROMPT_BYTES
        is_other = target.family.window is not None or target.linear is not None
        target.functions[key] = None if is_small or is_other else PromptPass(target, levels)
    return target.functions[key]


def greedy_tokens(logits: Tensor) -> Tensor:
    """Returns the argmax of each row of logits [N, V], `NAN_TOKEN` where a logit is NaN, LongTensor [N]."""
    is_nan = logits.amax(-1).isnan()  # `max` also returns the index and is slower than `amax` and `argmax` together
    return logits.argmax(-1).masked_fill(is_nan, NAN_TOKEN)


def cache_sizes(target: Target) -> dict[str, Any]:
    """Returns the sizes that `CachedInputs` names, of a target's cache."""
    kv_heads, head_dims = zip(*target.kv_sizes, strict=True)
    sizes = {"kv_heads": kv_heads, "head_dim": head_dims, "num_layers": len(kv_heads)}
    linear = target.linear
    return sizes if linear is None else sizes | vars(linear) | {"linear": len(linear.layers), "channels": linear.channels}


def describe_target(target: Target) -> dict[str, Any]:
    """Returns what passes of a target depend on, besides weights: the configuration of its text layers."""
    return {"model_type": target.family.model_type, **without_paths(target.text_config)}


def without_paths(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns a configuration without the folders that it came from."""
    return {key: value for key, value in config.to_dict().items() if key not in ("_name_or_path", "target_path")}
