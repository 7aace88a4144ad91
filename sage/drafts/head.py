"""Base class of draft heads: from the target's features and the next tokens to hidden states for an lm_head.

Owns: creation and loading of heads, and their forward pass, in decoding (with a cache, under a tree mask) and in training
(unrolled). Does not own: layers (sage.drafts.layer), attention of unrolled steps (sage.drafts.unroll), visual compression
(sage.drafts.compressor.compressor).

Shapes: B batch, T tokens, P pairs, Q rows after compression, D hidden, K unrolled steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sage.drafts.compressor.compressor import Compressor, Gate
from sage.drafts.compressor.operators import Conv, Resampler
from sage.drafts.compressor.spans import HeadInput, PairMasks
from sage.drafts.head_passes import CommitPass, LevelPass
from sage.drafts.registry import MODEL_TYPE_PREFIX, DraftKind
from sage.drafts.unroll import Chains, at_rows
from sage.io.model_files import load_weights, read_config
from sage.runtime.cache import SharedCache, TreeCache
from sage.runtime.pass_function import PassFunction
from sage.targets import Features, Prompt, Target
from sage.targets.tree_passes import without_paths


class DraftHead(PreTrainedModel):
    """A head over pairs (feature of token t, embedding of token t + 1) at the position of token t.

    The embedding is the target's and is not saved. A subclass has a `rope` and implements `fuse` and `read`.

    Attributes:
        levels: indices k of the target's hidden_states[k] that it reads in addition to the last.
        token_map: LongTensor [U], draft id -> target id; None if they are equal.
        compressor: shortens the visual part of the input; None to read every visual token.
    """

    base_model_prefix = "draft"
    reads_features = True
    has_own_lm_head = False
    assistant = None
    rope: nn.Module
    compressor: Compressor | None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._functions: dict[Any, tuple[PassFunction, ...]] = {}

    @classmethod
    def new(cls, target: Target, kind: DraftKind, vocabulary: Tensor | None, **config: Any) -> Self:
        """Creates a head with fresh weights (none on the meta device) and the target's sizes, dtype and device.

        Args:
            vocabulary: LongTensor [U], target ids of the draft vocabulary; None = all.
            config: overrides of the sizes; further options of the kind.

        Raises:
            ValueError: an unknown key, or attention heads that are no multiple of the key-value heads.
        """
        sizes = _sizes(target)
        known = {*sizes, *kind.keys, "compressor", "initializer_range"}
        unknown = [key for key in config if key not in known]
        if unknown:
            raise ValueError(f"draft.{unknown[0]}: unknown; choose from {', '.join(sorted(known))}")
        sizes |= config
        heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
        if heads % kv_heads:
            raise ValueError(
                f"draft.num_attention_heads={heads}: allowed: a multiple of draft.num_key_value_heads={kv_heads}; change one "
                f"(a size that is not given is the target's)"
            )
        if kind.has_vocabulary:
            sizes["draft_vocab_size"] = target.vocab_size if vocabulary is None else len(vocabulary)
        head = cls(cls.config_class(**cls.with_defaults(sizes, target)))
        if not target.is_meta:
            head.reset_parameters(target, vocabulary)
        return head.to(device=target.device, dtype=target.dtype)

    @classmethod
    def load(cls, folder: Path, target: Target, dtype: torch.dtype) -> Self:
        """Loads a trained head; ValueError for corrupt files, or a head for another target (names both)."""
        sizes = read_config(folder)
        check_target(sizes["target"], target, folder)
        if target.is_meta:
            return cls(cls.config_class(**sizes))
        head: Self = load_weights(cls, folder, "draft", dtype=dtype).to(target.device).eval()
        head.borrow(target)
        return head

    def borrow(self, target: Target) -> None:
        """Copies what the head reads of the target and does not save; called after loading."""

    @classmethod
    def with_defaults(cls, config: dict[str, Any], target: Target) -> dict[str, Any]:
        """The configuration with options filled in that depend on the target."""
        return config

    def reset_parameters(self, target: Target, vocabulary: Tensor | None = None) -> None:
        """Draws fresh weights; `vocabulary` as for `new`."""
        raise NotImplementedError

    def check(self, target: Target) -> None:
        """Raises ValueError, naming both, if the head was made for another target."""
        check_target(self.config.target, target, self.config._name_or_path or "the draft")

    @property
    def kind(self) -> str:
        """Name of its row in `sage.drafts.registry.KINDS`."""
        return str(self.config.model_type).removeprefix(MODEL_TYPE_PREFIX)

    @property
    def network(self) -> Self:
        return self

    @property
    def compressor_kind(self) -> str | None:
        return None if self.compressor is None else self.config.compressor["kind"]

    @property
    def num_draft_tokens(self) -> int:
        """Size U of the draft vocabulary."""
        return int(self.config.vocab_size)

    def options(self) -> dict[str, Any]:
        names = ("image_inputs", "input_norm", "fc_norm", "norm_output", "compressor")
        return {name: getattr(self.config, name) for name in names if hasattr(self.config, name)}

    def describe(self) -> dict[str, Any]:
        return {**without_paths(self.config), "dtype": self.dtype, "is_training": self.training}

    def new_cache(self, capacity: int) -> TreeCache:
        """Returns an empty cache of its layers, with a capacity in tokens."""
        devices = [self.device] * self.num_layers
        return SharedCache(devices, self.config.num_key_value_heads, self.config.head_dim, capacity, self.dtype).take()

    @property
    def num_layers(self) -> int:
        """Decoder layers with a cache."""
        return 1

    def pass_functions(self, target: Target) -> tuple[PassFunction, ...]:
        """Returns the functions of its passes in decoding, which live as long as the head: of a commit, then of a level."""
        key = (target, self.dtype, self.device)
        if key not in self._functions:
            self._functions[key] = self._new_functions(target)
        return self._functions[key]

    def _new_functions(self, target: Target) -> tuple[PassFunction, ...]:
        return CommitPass(self, target), LevelPass(self, target)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_functions": {}}  # a copy has functions of its own

    def placed(self, prompt: Prompt) -> Prompt:
        """Returns the prompt with the rope positions that the head reads."""
        return prompt

    def decode_positions(self, positions: Tensor, target: Target) -> Tensor:
        """Returns the rope positions [1, N] or [3, 1, N] of text tokens at `positions` [N]."""
        return target.family.decode_positions(positions)

    @property
    def levels(self) -> tuple[int, ...]:
        return ()

    @property
    def token_map(self) -> Tensor | None:
        return None

    def is_of_context(self, name: str) -> bool:
        """Whether the parameter `name` is applied to every pair, also to those from which nothing is drafted."""
        return any(part in f".{name}" for part in (".fc.", ".fc_norm.", ".k_proj.", ".v_proj."))

    def fuse(self, features: Features) -> Tensor:
        """Returns the features [B, T, D] of the pairs."""
        raise NotImplementedError

    def read(
        self, embeds_next: Tensor, features: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: Any
    ) -> Tensor:
        """Runs the layer on pairs, [B, T, D] each -> [B, T, D]; mask and cache as in `DraftLayer.forward`."""
        raise NotImplementedError

    def to_lm_head(self, hidden: Tensor) -> Tensor:
        """Returns the input [.., D] of the lm_head for the head's output [.., D]."""
        return hidden

    def lm_head_weight(self, target_rows: Tensor) -> Tensor:
        """Returns the lm_head's weight [U, D]: the head's own, or the target's rows as given."""
        return target_rows

    def logits(self, hidden: Tensor, target: Target) -> Tensor:
        """Returns logits [.., U] for the head's output [.., D]."""
        return nn.functional.linear(self.to_lm_head(hidden), self.lm_head_weight(target.lm_head_weight))

    def forward(
        self,
        embeds_next: Tensor,
        features: Tensor,
        position_ids: Tensor,
        tree_mask: Tensor | None = None,
        cache: Any = None,
        rope: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Runs the head on pairs (features[t], embeds_next[t]).

        Args:
            embeds_next: [B, T, D], embeddings of tokens t + 1.
            features: [B, T, D], `fuse(..)` of tokens t that the target has read, outputs of this method for drafted ones.
            position_ids: rope positions of tokens t, [B, T] or [3, B, T].
            tree_mask: additive, tiled mask [1, 1, G * T, S] from `tile_mask`; None attends causally, also in right-padded
                batches, where no pair attends to the padding after it.
            cache: one-layer KV cache to extend in decoding, or the `Chains` of an unrolled pass.
            rope: cos and sin of `position_ids`, if precomputed.

        Returns:
            [B, T, D], the features of the next pairs and the input of `logits`; in step 0 of chains with roots, [B, R, D].
        """
        return self.read(embeds_next, features, rope or self.rope(position_ids, embeds_next.dtype), tree_mask, cache)

    def shorten(self, embeds_next: Tensor, features: Tensor, position_ids: Tensor, pair_masks: PairMasks) -> HeadInput:
        """Compresses complete sequences of P pairs to Q rows; without a compressor, Q = P.

        In training mode the compressor samples what it prunes and selects.

        Args:
            embeds_next, features, position_ids: as in `forward`.
            pair_masks: masks of the P pairs.
        """
        if self.compressor is None:
            return HeadInput(embeds_next, features, position_ids)
        shortened: HeadInput = self.compressor(embeds_next, features, position_ids, pair_masks, is_sampling=self.training)
        return shortened

    def unroll(
        self,
        embeds_next: Tensor,
        features: Tensor,
        position_ids: Tensor,
        steps: int = 1,
        weight: Tensor | None = None,
        roots: Tensor | None = None,
    ) -> list[Tensor]:
        """Drafts `steps` tokens ahead of every position in parallel, each step from the output of the previous one.

        Args:
            embeds_next, features, position_ids: as in `forward`, of complete right-padded sequences of P pairs, or of the Q
                rows returned by `shorten` (then P = Q).
            steps: K.
            weight: [B, P], factors of the attention values (`HeadInput.weight`); None for 1.
            roots: LongTensor [B, R], positions to draft from, different in each sequence; None for all.

        Returns:
            K tensors; number i is [B, P - i, D], and its row s belongs to pair s + i: the output of decoding if the target
            has read up to pair s and the later tokens are drafted. With `roots`, [B, R, D]: the rows of the roots, which are
            undefined beyond pair P - 1.

        Ref: EAGLE-3, arXiv 2503.01840, section 3.2 (training-time test).
        """
        chains, outputs, last = Chains(weight, roots), [], embeds_next.shape[1] - 1
        for step in range(min(steps, last + 1)):
            if roots is None:
                embeds, positions = embeds_next[:, step:], position_ids[..., step:]
                features = features[:, : embeds.shape[1]]
            elif step:
                pairs = (roots + step).clamp(max=last)
                embeds = at_rows(embeds_next, pairs, 1)
                positions = position_ids.gather(-1, pairs.expand(*position_ids.shape[:-1], -1))
            else:
                embeds, positions = embeds_next, position_ids
            features = self(embeds, features, positions, cache=chains)
            outputs.append(features)
        return outputs

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, (Conv, Resampler, Gate)):  # after the linear layers within them
            module.reset_parameters()


ADAPTER_HINT = ", or the adapter it was trained with (--adapter, target.adapter)"


def check_target(made_for: dict[str, Any], target: Target, where: Any) -> None:
    """Raises ValueError, naming both, if `made_for` is not the target's fingerprint."""
    if made_for != target.fingerprint:
        raise ValueError(
            f"draft: {where} was made for {_describe(made_for)}, but the target is {_describe(target.fingerprint)}; "
            f"give the draft trained for this target{ADAPTER_HINT if made_for.get('adapter') else ''}"
        )


def _describe(fingerprint: dict[str, Any]) -> str:
    sizes = ", ".join(f"{key} {value}" for key, value in sorted(fingerprint.items()) if key != "model_type")
    return f"{fingerprint.get('model_type', 'an unknown target')} ({sizes})"


def _sizes(target: Target) -> dict[str, Any]:
    """A head's sizes after its target, as arguments of its configuration class."""
    text = target.text_config
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": getattr(text, "intermediate_size", None) or target.family.mlp_width,
        "num_attention_heads": text.num_attention_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": text.max_position_embeddings,
        "rms_norm_eps": text.rms_norm_eps,
        "hidden_act": getattr(text, "hidden_act", "silu"),
        **target.family.rope().fields,
        "target": target.fingerprint,
        "target_path": target.name,
        "target_adapter": target.adapter.path if target.adapter else None,
    }
