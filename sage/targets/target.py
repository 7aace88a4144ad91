"""The frozen vision-language model: embedding, features, causal prefill, and the one implementation of a pass.

Shapes: B batch, T tokens, S keys, D hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BatchFeature

from sage.inputs.format import Inputs
from sage.inputs.processing import Messages, Processor
from sage.runtime.attention import AttentionRecorder, select_backends, use_tree_attention
from sage.runtime.cache import LayerSize, Queries, SharedCache, TreeCache, tile_mask
from sage.runtime.cpu import fast_prompts
from sage.runtime.linear_states import LinearSizes
from sage.runtime.modes import PassMode
from sage.runtime.prefix_attention import PassKeys
from sage.runtime.recurrent_cache import SharedRecurrentCache
from sage.targets.delta_net import use_our_states
from sage.targets.families import family_of
from sage.targets.family import FULL, LINEAR, Mask, Prompt
from sage.targets.placement import connect, is_multi_device, layer_devices
from sage.targets.weights import Adapter, dense_weight, is_quantized, prepare_layers, quantization_of


@dataclass
class Features:
    """Hidden states of the text layers.

    Attributes:
        last: [B, T, D], the input of lm_head.
        levels: the requested `hidden_states[k]`, each [B, T, D].
        attention: [P], attention of the text to each visual token, mean over layers, heads and queries; None unless requested.
    """

    last: Tensor
    levels: tuple[Tensor, ...] = ()
    attention: Tensor | None = None

    def at(self, index: Tensor) -> Features:
        """Returns the features of some tokens, `index` LongTensor [M]."""
        levels = tuple(level.index_select(1, index) for level in self.levels)
        return Features(self.last.index_select(1, index), levels, self.attention)

    @staticmethod
    def join(parts: Sequence[Features]) -> Features:
        """Concatenates the features of consecutive parts of one sequence."""
        if len(parts) == 1:
            return parts[0]
        levels = zip(*(part.levels for part in parts), strict=True)
        attention = [part.attention for part in parts if part.attention is not None and len(part.attention)]
        return Features(
            torch.cat([part.last for part in parts], 1),
            tuple(torch.cat(level, 1) for level in levels),
            attention[-1] if attention else None,
        )


class Target:
    """A model of a known family for decoding and training.

    Args:
        model: a model of transformers, such as `Qwen2_5_VLForConditionalGeneration`, on the device it will run on.
        processor: a `Processor` or a Hugging Face processor; not needed if inputs are tensors.
        adapter: what the model contains besides its checkpoint.
        quantize: what its checkpoint was quantized to at load, one of `Quantize`; None for the checkpoint's own weights.

    Attributes:
        passes: how tree passes and draft passes run: eager, compiled or captured.
        is_whole: whether all weights are on one device and not sharded; else passes are eager.
        quantization: method and precision of quantized weights; None without. With some, passes are eager.
        layer_sizes: (KV heads, head size) of each text layer.
        kv_layers: indices of those that keep keys and values of their own.
        groups: query heads per KV head, by type of the layer.
        logit_cap: soft cap of the logits; None without.
        linear: sizes of the linear layers; None without any.

    Raises:
        ValueError: the model is of no known family, or has text layers that a tree pass cannot run (names the reason).
    """

    def __init__(
        self, model: Any, processor: Any = None, *, adapter: Adapter | None = None, quantize: str | None = None
    ) -> None:
        prepare_layers(model)
        self.model = model.eval().requires_grad_(False)
        self.adapter, self.quantize = adapter, quantize
        self.family = family_of(model.config)
        self.eos_token_ids = as_list(model.generation_config.eos_token_id)
        self.processor = None if processor is None else Processor.wrap(processor, self.family, self.eos_token_ids)
        self.name = str(model.config._name_or_path or self.family.model_type)
        self.text_config = text = model.config.get_text_config()
        self.hidden_size, self.vocab_size = int(text.hidden_size), int(text.vocab_size)
        self.num_layers, self.layer_sizes = int(text.num_hidden_layers), layer_sizes(text)
        self.num_kv_heads, self.head_dim = self.layer_sizes[0]
        types = getattr(text, "layer_types", None) or [FULL]
        pairs = zip(types, self.layer_sizes, strict=False)
        self.groups = {kind: int(text.num_attention_heads) // kv_heads for kind, (kv_heads, _) in pairs}
        self.logit_cap: float | None = getattr(text, "final_logit_softcapping", None)
        self.text_model = self.family.text_model(model)
        parameters = inspect.signature(self.text_model.forward).parameters
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"  # since transformers 5.24, and before
        self.linear = LinearSizes.of(self.text_config, LINEAR)
        first_shared = self.num_layers - int(getattr(text, "num_kv_shared_layers", None) or 0)
        linear = self.linear.layers if self.linear else ()
        self.kv_layers = [layer for layer in range(first_shared) if layer not in linear] or [0]
        self.embed_tokens: nn.Module = model.get_input_embeddings()
        self.lm_head: nn.Module = model.get_output_embeddings()
        self.passes = PassMode.eager
        self.functions: dict[Any, Any] = {}  # pass functions by levels and dtype, see sage.targets.tree_passes
        self.is_whole = not is_multi_device(model)
        self.quantization = quantization_of(model.config) if is_quantized(model) else None
        if not self.is_whole:
            connect(model, self.text_model)
        self.family.optimize(model)
        if self.linear is not None:
            use_our_states(self.text_model)
        select_backends(self.device)

    @property
    def kv_sizes(self) -> list[LayerSize]:
        """Sizes of the layers that keep keys and values of their own."""
        return [self.layer_sizes[layer] for layer in self.kv_layers]

    @property
    def max_head_dim(self) -> int:
        """Largest head size of a text layer."""
        return max(size for _, size in self.layer_sizes)

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def layer_devices(self) -> list[torch.device]:
        """Device of each text layer: `device`, unless the target is on several devices."""
        return [self.device] * self.num_layers if self.is_whole else layer_devices(self.text_model)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def is_plain(self) -> bool:
        """Whether passes can be compiled or captured: all weights are on one device, and none is quantized or sharded."""
        return self.is_whole and self.quantization is None

    @property
    def lm_head_weight(self) -> Tensor:
        """The weight [V, D] of lm_head, dequantized."""
        # Never kept for others: a tracer replaces the parameter, and ZeRO its content.
        return self.lm_head.weight if self.quantization is None else self._dense_lm_head

    @cached_property
    def _dense_lm_head(self) -> Tensor:
        return dense_weight(self.lm_head, self.dtype)

    @property
    def is_meta(self) -> bool:
        """Whether the target has shapes only and no weights, as in the plan of a run."""
        return self.device.type == "meta"

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Family, sizes and changes at load, stored with each draft and compared when it is loaded."""
        adapted = {"adapter": self.adapter.digest} if self.adapter else {}
        return fingerprint_of(self.model.config) | adapted | ({"quantize": str(self.quantize)} if self.quantize else {})

    def prepare(self, messages: Messages) -> BatchFeature:
        """Returns the inputs of one prompt, up to the beginning of the assistant's turn.

        Args:
            messages: Hugging Face chat messages; images as path, URL or PIL image, videos as frames, folder or file.

        Raises:
            ValueError: no processor, an empty prompt, or an image or video that cannot be read.
            TypeError: `messages` is not a list of messages.
        """
        if self.processor is None:
            raise ValueError("target: has no processor, so it takes tensors only; use sage.load_target(path)")
        if not isinstance(messages, (list, tuple)) or not all(isinstance(message, Mapping) for message in messages):
            example = '[{"role": "user", "content": "What is this?"}]'
            raise TypeError(f"messages: {type(messages).__name__}; give a list of chat messages, such as {example}")
        return self.processor.prepare(messages)

    @torch.no_grad()
    def embed(self, inputs: Inputs, past: Prompt | None = None) -> Prompt:
        """Runs embedding and vision tower on inputs of any batch size.

        Args:
            past: an earlier prompt of the same conversation, whose visual embeddings are reused if the pixel inputs are equal.
        """
        placed = self.family.with_positions(self.model, inputs)
        moved = {k: v.to(self.device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in placed.items()}
        return self.family.embed(self.model, moved, past)

    @torch.no_grad()
    def features(self, prompt: Prompt, levels: Sequence[int] = ()) -> Features:
        """Returns the hidden states of complete sequences, without a cache; for training.

        Padding is on the right, where causal attention does not read it: no mask is built. Features of padding have no meaning.

        Args:
            levels: indices k of `hidden_states` to return as well (0 = embeddings).
        """
        return self.read(prompt, None, levels)

    @torch.no_grad()
    def prefill(self, prompt: Prompt, cache: TreeCache, levels: Sequence[int] = (), wants_attention: bool = False) -> Features:
        """Appends a prompt, or its new part, to a cache; returns features [1, T, D].

        Args:
            wants_attention: also return `Features.attention`.
        """
        recorder = AttentionRecorder(prompt.visual_mask[0]) if wants_attention else None
        with fast_prompts(self.text_model, self.passes is PassMode.compiled):
            features = self.read(prompt, cache, levels, recorder)
        return replace(features, attention=recorder.mean()) if recorder else features

    def read(
        self, prompt: Prompt, cache: Any = None, levels: Sequence[int] = (), recorder: AttentionRecorder | None = None
    ) -> Features:
        """Runs a prompt through the text layers, also with gradients; arguments as for `run`."""
        past = 0 if cache is None else cache.length
        mask = self.family.prefill_mask(prompt, past, self.tile)
        given = self.family.text_inputs(prompt) | self.family.inputs_of_tokens(self.text_model, prompt.input_ids)
        with use_tree_attention(self.text_model):
            return self.run(prompt.embeds, prompt.position_ids, mask, cache, levels, recorder, given)

    def tile(self, visible: Tensor, kind: str = FULL) -> Tensor:
        """Returns the additive mask of a Bool one (`tile_mask`) for text layers of a type."""
        return tile_mask(visible, self.group(kind), self.dtype)

    def group(self, kind: str) -> int:
        """Returns the query heads per KV head of text layers of a type."""
        return self.groups.get(kind) or next(iter(self.groups.values()))

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [.., V] of the last hidden states [.., D]."""
        logits: Tensor = self.lm_head(hidden)
        return soft_cap(logits, self.logit_cap)

    def prompt_logits(self, hidden: Tensor) -> Tensor:
        """Returns `logits` of some tokens of a prompt, which no pass computes."""
        with fast_prompts(self.lm_head, self.passes is PassMode.compiled):
            return self.logits(hidden)

    def run(
        self,
        embeds: Tensor,
        positions: Tensor,
        mask: Mask,
        cache: Any,
        levels: Sequence[int],
        recorder: AttentionRecorder | None = None,
        text_inputs: Inputs | None = None,
        keys: PassKeys | None = None,
        queries: Queries | None = None,
    ) -> Features:
        """Runs the text layers: the one implementation of a pass.

        Args:
            embeds: [B, T, D].
            positions: rope positions as `Prompt.position_ids`.
            mask: additive, tiled masks; None attends causally.
            cache: `TreeCache`, `PackedCache` or None.
            levels: indices k of `hidden_states` to return as well.
            recorder: records the attention of every layer.
            text_inputs: `Family.text_inputs` of a prompt.
            keys: what the pass attends to, in place of a mask.
            queries: of a pass over several rows, whose tokens are one sequence.
        """
        extra: dict[str, Any] = {} if recorder is None else {"attention_recorder": recorder}
        extra |= {} if keys is None else {"pass_keys": keys}
        extra |= {} if queries is None else {"packed_queries": queries}
        with self._captured(levels) as hidden_states:
            last = self.text_model(
                inputs_embeds=embeds,
                position_ids=positions,
                attention_mask=mask,
                use_cache=cache is not None,
                is_masked=mask is not None,
                **{self.cache_argument: cache},
                **(text_inputs or {}),
                **extra,
            ).last_hidden_state
        hidden_states |= {0: embeds, self.num_layers: last}
        return Features(last, tuple(hidden_states[k].to(self.device) for k in levels))

    @contextmanager
    def _captured(self, levels: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Yields a dict that receives the inputs of layers k for the levels k: unlike the outputs of layers k - 1, they contain
        deepstack features. `output_hidden_states=True` would keep the states of all layers until the end of the pass.
        """
        kept: dict[int, Tensor] = {}
        layers: Any = self.text_model.layers
        inner = [k for k in set(levels) if 0 < k < self.num_layers]
        hooks = [layers[k].register_forward_pre_hook(lambda _, args, k=k: kept.update({k: args[0]})) for k in inner]
        try:
            yield kept
        finally:
            for hook in hooks:
                hook.remove()

    def cache_bytes(self, tokens: int, nodes: int, itemsize: int | None = None) -> int:
        """Returns the bytes of a request's cache of so many tokens and, of linear layers, of the nodes of a pass."""
        itemsize = itemsize or self.dtype.itemsize
        row = 2 * sum(heads * size for heads, size in self.kv_sizes) * itemsize
        state, node = self.linear.num_bytes(itemsize) if self.linear else (0, 0)
        return tokens * row + state + nodes * node

    def new_cache(self, capacity: int) -> TreeCache:
        """Returns an empty cache for this target with a capacity in tokens."""
        devices, given = self.layer_devices, (self.kv_sizes, capacity, self.dtype)
        if self.linear is not None:
            return SharedRecurrentCache(self.linear, devices, *given).take()
        return SharedCache([devices[layer] for layer in self.kv_layers], *given).take()


def as_list(value: int | Sequence[int] | None) -> list[int]:
    """Returns the token ids of a setting that is one, several or none."""
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def layer_sizes(text_config: Any) -> list[LayerSize]:
    """Returns KV heads and head size of each text layer."""
    text, count = text_config, int(text_config.num_hidden_layers)
    layers = [text.per_layer_config[i] for i in range(count)] if getattr(text, "is_heterogeneous", False) else [text] * count
    usual = text.hidden_size // text.num_attention_heads
    return [(int(each.num_key_value_heads), int(getattr(each, "head_dim", None) or usual)) for each in layers]


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """Returns logits within (-cap, cap); as they are without a cap. Ref: Gemma 2, arXiv 2408.00118, section 2."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def fingerprint_of(config: Any) -> dict[str, Any]:
    """Returns `Target.fingerprint` of a target with this config."""
    text = config.get_text_config()
    return {
        "model_type": family_of(config).model_type,
        "hidden_size": int(text.hidden_size),
        "vocab_size": int(text.vocab_size),
        "num_layers": int(text.num_hidden_layers),
    }
