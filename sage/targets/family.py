"""Interface of a target family: visual embeddings, rope positions, masks, and the embedded prompt.

A new family is a module in sage/targets/families, a YAML file in conf/target and a test class.

Shapes: B batch, T tokens, D hidden, N tree nodes, S keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from sage.inputs.format import InputFormat, Inputs
from sage.targets.rope import RopeConfig

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
# `attention_mask` of a text model; a dict has one for each of its `layer_types`.
Mask: TypeAlias = Tensor | dict[str, Tensor] | None
# Bool [N, S] or [B, N, S], True = attend, and a type of layer -> the additive mask of `sage.runtime.attention`
Tile = Callable[..., Tensor]
POSITIONS, NEXT_POSITION = "position_ids", "next_position"  # keys of inputs, see `Family.with_positions`
VISION = "vision."  # prefix of such keys


@dataclass(frozen=True)
class Visual:
    """Output of the vision tower for the images or videos of a prompt, in reading order.

    Attributes:
        embeds: [tokens, D], one for each slot.
        extras: further values per visual token, [tokens, ...] by name, such as deepstack features.
    """

    embeds: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Prompt:
    """Model inputs after embedding and vision tower, before the text layers; right-padded.

    Attributes:
        input_ids: LongTensor [B, T].
        embeds: [B, T, D], visual embeddings in place.
        position_ids: rope positions, [3, B, T] (M-RoPE) or [B, T].
        next_position: LongTensor [B], rope position of the first token after the prompt.
        attention_mask: LongTensor [B, T], 1 = real token.
        visual_mask: BoolTensor [B, T], True at image and video positions.
        inputs: the model inputs it was embedded from.
        visual: slot -> output of the vision tower.
        extras: `Visual.extras` of all slots, one row per True of `visual_mask`, in its order.
        kept: LongTensor [T'], the tokens a draft reads; None = all.
    """

    input_ids: Tensor
    embeds: Tensor
    position_ids: Tensor
    next_position: Tensor
    attention_mask: Tensor
    visual_mask: Tensor
    inputs: Inputs = field(default_factory=dict)
    visual: dict[int, Visual] = field(default_factory=dict)
    extras: dict[str, Tensor] = field(default_factory=dict)
    kept: Tensor | None = None

    def after(self, known: int) -> Prompt:
        """Returns the prompt without its first `known` tokens."""
        return self.at(torch.arange(known, self.input_ids.shape[1], device=self.input_ids.device)) if known else self

    def without_embeddings(self) -> Prompt:
        """Returns ids, positions and masks alone, which is what decoding reads after the prefill."""
        embeds = self.embeds.new_empty(1, 0, self.embeds.shape[-1])
        return replace(self, embeds=embeds, inputs={}, visual={}, extras={})

    def at(self, index: Tensor) -> Prompt:
        """Returns the prompt reduced to some of its tokens, increasing `index` LongTensor [T']; positions are kept."""
        extras = self.extras
        if extras:
            row_BT = (self.visual_mask.flatten().cumsum(0) - 1).view_as(self.visual_mask)
            rows = row_BT[:, index][self.visual_mask[:, index]]
            extras = {name: values[rows] for name, values in extras.items()}
        return replace(
            self,
            input_ids=self.input_ids[:, index],
            embeds=self.embeds[:, index],
            position_ids=self.position_ids[..., index],
            attention_mask=self.attention_mask[:, index],
            visual_mask=self.visual_mask[:, index],
            extras=extras,
            kept=None,
        )


class Family(InputFormat):
    """One architecture, such as Qwen2.5-VL: its input format, and the step from inputs to the text layers.

    The defaults are those of a text model with plain rope positions.

    Attributes:
        model_types: `model_type` of the configuration -> class of the model, which exports name.
        auto_class: class of transformers that loads the model.
        vision_types: `model_type` of the vision towers that the family takes; empty: of one class, not checked.
        served_by: engines that serve drafts for the family: vLLM if a check in tests/engines passes, SGLang as it documents.
        needs_plugin: whether vLLM needs our plugin to do so.
        is_packed: whether the vision tower takes all images as one sequence and attends within its parts.
    """

    model_types: ClassVar[dict[str, str]] = {}
    auto_class: ClassVar[Any] = AutoModelForImageTextToText
    vision_types: ClassVar[tuple[str, ...]] = ()
    served_by: ClassVar[tuple[str, ...]] = ()
    needs_plugin: ClassVar[bool] = False
    is_packed: ClassVar[bool] = False

    # -- the model -------------------------------------------------------------------------------------------------------------

    def text_model(self, model: Any) -> nn.Module:
        """Returns the text layers with their final norm."""
        return model.get_decoder()

    def optimize(self, model: nn.Module) -> None:
        """Replaces slow modules of a loaded model by equivalent ones, with the same weights under the same names."""

    def vision_blocks(self, model: nn.Module) -> list[nn.Module]:
        """Returns the repeated blocks of the vision tower: the longest list of modules beside the text layers."""
        text = set(self.text_model(model).modules())
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and module not in text]
        return list(max(lists, key=len, default=()))

    def rope(self) -> RopeConfig:
        """Returns the rope of the text layers; ValueError for one that draft heads cannot follow."""
        return RopeConfig.of(self.config.get_text_config().rope_parameters)

    @property
    def window(self) -> int | None:
        """Sliding window of text layers, in tokens; None without."""
        text = self.config.get_text_config()
        layer_types = getattr(text, "layer_types", None)
        return None if layer_types and SLIDING not in layer_types else getattr(text, "sliding_window", None)

    @property
    def leading_layers(self) -> int:
        """Number of text layers in front that a model made of some of the layers keeps: those with deepstack features."""
        return len(getattr(getattr(self.config, "vision_config", None), "deepstack_visual_indexes", ())) or 1

    # -- a prompt --------------------------------------------------------------------------------------------------------------

    def visual_features(self, model: Any, inputs: Inputs) -> dict[int, Visual]:
        """Returns slot -> output of the vision tower in reading order, for the pixel inputs that are present.

        By default for families whose `pixel_keys` are the arguments of the model's `get_image_features`.
        """
        pixels = [inputs.get(key) for key in self.pixel_keys]
        if not pixels or pixels[0] is None:
            return {}
        out = model.model.get_image_features(*pixels, return_dict=True)
        return {self.slots["image"]: Visual(torch.cat(tuple(out.pooler_output)))}

    def vision_layout(self, inputs: Inputs) -> Inputs:
        """Returns what the vision tower derives from the sizes of images and videos, under keys that begin with `VISION`."""
        return {}

    def positions(self, model: Any, inputs: Inputs, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rope positions of the prompt, [3, B, T] or [B, T], and of the token after it, [B]."""
        return (attention_mask.cumsum(-1) - 1).clamp(min=0), attention_mask.sum(-1)

    def decode_positions(self, position_N: Tensor) -> Tensor:
        """Returns positions [N] of generated tokens in the layout of the text layers, batch 1."""
        return position_N.view(1, -1)

    def text_inputs(self, prompt: Prompt) -> Inputs:
        """Returns inputs of the text layers for a pass over a prompt, such as deepstack features; tree passes have none."""
        return {}

    def text_ids(self, input_ids: Tensor) -> Tensor:
        """Returns the tokens whose embeddings the text layers read in place of `input_ids`."""
        return input_ids

    def inputs_of_tokens(self, text_model: Any, input_ids: Tensor) -> Inputs:
        """Returns inputs of the text layers that are looked up by token, LongTensor [B, T], in every pass."""
        return {}

    def visible(self, prompt: Prompt, past: int) -> Tensor:
        """Returns the keys that the last T tokens of a prompt may attend to, after `past` cached ones, in layers with full
        attention: Bool [T, past + T] or [B, T, past + T]. Only called for a text model with windows; others attend causally.
        """
        length = prompt.input_ids.shape[1]
        return torch.ones(length, past + length, dtype=torch.bool, device=prompt.input_ids.device).tril(past)

    def visible_in_windows(self, prompt: Prompt, past: int) -> Tensor:
        """Returns the same for layers with sliding windows, whatever the window."""
        return self.visible(prompt, past)

    def prefill_mask(self, prompt: Prompt, past: int, tile: Tile) -> Mask:
        """Returns the mask of a prompt, or of its last T tokens, after `past` cached ones; None attends causally."""
        if self.window is None:
            return None
        visible = self.visible(prompt, past)
        place = torch.arange(visible.shape[-1], device=visible.device)
        near = self.visible_in_windows(prompt, past) & (place > place[past:, None] - self.window)
        return layer_masks(self.config.get_text_config(), visible, near, tile)

    def tree_mask(self, visible_NS: Tensor, tile: Tile) -> Mask:
        """Returns the mask of a tree pass.

        Args:
            visible_NS: BoolTensor, of several requests [B, N, S], the keys that each node may attend to: cached tokens,
                ancestors and itself. Along a row, the
                number of True up to a key is the key's place in the sequence that ends with the node. Operations have to be
                exportable: no numbers of the host.
        """
        if self.window is None:
            return tile(visible_NS)
        place = visible_NS.long().cumsum(-1)
        near = visible_NS & (place > place[..., -1:] - self.window)
        return layer_masks(self.config.get_text_config(), visible_NS, near, tile)

    # -- plans -----------------------------------------------------------------------------------------------------------------

    def active_parameters(self, model: nn.Module) -> int:
        """Returns the parameters that a token uses: of a mixture of experts, those of the experts that it is routed to."""
        text = self.config.get_text_config()
        total = sum(p.numel() for p in model.parameters())
        experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
        return total - experts + (experts * self.experts_per_token // text.num_experts if experts else 0)

    @property
    def experts_per_token(self) -> int:
        """Experts that a token is routed to; 0 without any."""
        return int(getattr(self.config.get_text_config(), "num_experts_per_tok", None) or 0)

    @property
    def mlp_width(self) -> int:
        """Hidden size of the MLP of a text layer, over the experts that a token is routed to."""
        text = self.config.get_text_config()
        experts, shared = getattr(text, "moe_intermediate_size", None), getattr(text, "shared_expert_intermediate_size", 0)
        return int(experts * text.num_experts_per_tok + shared if experts else text.intermediate_size)

    @property
    def vision_sizes(self) -> tuple[int, int, int]:
        """Width, MLP width and values per patch of the vision tower; zeros without one."""
        vision = getattr(self.config, "vision_config", None)
        if vision is None:
            return 0, 0, 0
        values = 3 * vision.patch_size**2 * getattr(vision, "temporal_patch_size", 1)
        return vision.hidden_size, vision.intermediate_size, values

    # -- embedding -------------------------------------------------------------------------------------------------------------

    def with_positions(self, model: nn.Module, inputs: Inputs) -> Inputs:
        """Returns the inputs with their rope positions and the layout of the vision tower's input, for `embed`.

        Both read the grids of images and videos number by number. For inputs on the CPU, this does not wait for the GPU that
        they are moved to.
        """
        if NEXT_POSITION in inputs:
            return inputs
        try:
            position_ids, next_position = self.positions(model, inputs, _attention_mask(inputs))
            layout = self.vision_layout(inputs)
        except (IndexError, StopIteration):  # fewer images than the text has; `embed` names the mistake
            return inputs
        return {**inputs, **layout, POSITIONS: position_ids, NEXT_POSITION: next_position}

    def embed(self, model: Any, inputs: Inputs, past: Prompt | None = None) -> Prompt:
        """Runs embedding and vision tower once; arguments as for `Target.embed`.

        Raises ValueError if the numbers of slots and of visual embeddings differ.
        """
        placed, inputs = self.with_positions(model, inputs), without_positions(inputs)
        input_ids, attention_mask = inputs["input_ids"], _attention_mask(inputs)
        embeds = model.get_input_embeddings()(self.text_ids(input_ids))
        visual_mask = torch.zeros_like(input_ids, dtype=torch.bool)
        visual = past.visual if past and self._has_same_pixels(inputs, past.inputs) else self.visual_features(model, placed)
        for token_id, output in visual.items():
            mask = input_ids == token_id
            if int(mask.sum()) != len(output.embeds):
                raise ValueError(
                    f"inputs: {int(mask.sum())} visual placeholders for {len(output.embeds)} visual embeddings; "
                    f"prepare text and images together with target.prepare(messages)"
                )
            embeds = embeds.masked_scatter(mask[..., None], output.embeds.to(embeds))
            visual_mask |= mask
        extras = _join_extras(visual, input_ids, visual_mask)
        position_ids, next_position = placed[POSITIONS], placed[NEXT_POSITION]
        return Prompt(input_ids, embeds, position_ids, next_position, attention_mask, visual_mask, inputs, visual, extras)

    def _has_same_pixels(self, inputs: Inputs, earlier: Inputs) -> bool:
        ours, theirs = ([i.get(key) for key in self.pixel_keys] for i in (inputs, earlier))
        return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(ours, theirs, strict=True))


def _join_extras(visual: dict[int, Visual], input_ids: Tensor, visual_mask: Tensor) -> dict[str, Tensor]:
    """Returns the extras of all slots in the order of the positions; zeros for a slot without one."""
    joined: dict[str, Tensor] = {}
    for token_id, output in visual.items():
        for name, values in output.extras.items():
            is_slot = input_ids[visual_mask] == token_id
            into = joined.setdefault(name, values.new_zeros(len(is_slot), *values.shape[1:]))
            into[is_slot] = values
    return joined


def without_positions(inputs: Inputs) -> Inputs:
    """Returns the inputs as they were before `Family.with_positions`; another model computes its own positions."""
    return {key: value for key, value in inputs.items() if key not in (POSITIONS, NEXT_POSITION) and not key.startswith(VISION)}


def _attention_mask(inputs: Inputs) -> Tensor:
    mask = inputs.get("attention_mask")
    return torch.ones_like(inputs["input_ids"]) if mask is None else mask


def layer_masks(text_config: Any, visible: Tensor, near: Tensor, tile: Tile) -> Mask:
    """Returns a mask for each of `layer_types`, or one for all layers if the configuration names no types.

    Args:
        visible: Bool [N, S] or [B, N, S], the keys that each token may attend to in layers with full attention.
        near: Bool [N, S] or [B, N, S], those in layers with sliding windows.
    """
    within = tile(near, SLIDING)
    return {FULL: tile(visible, FULL), SLIDING: within} if getattr(text_config, "layer_types", None) else within
