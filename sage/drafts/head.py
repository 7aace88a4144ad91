"""Base class of draft heads: from the target's features and the next tokens to hidden states for an lm_head.

Heads are created and loaded here, and run in decoding (with a cache, under a tree mask) and in training (unrolled).

Shapes: B batch, T tokens, P pairs, Q rows after compression, D hidden, K unrolled steps, U draft vocabulary, V target
vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from sage.drafts.compressor import Compressor, Gate, Resampler
from sage.drafts.head_passes import CommitPass, LevelPass
from sage.drafts.layer import Angles
from sage.drafts.registry import MODEL_TYPE_PREFIX, DraftKind
from sage.drafts.spans import HeadInput, PairMasks
from sage.drafts.unroll import Chains, at_rows
from sage.io.model_files import load_weights, read_config
from sage.runtime.cache import SharedCache, TreeCache
from sage.runtime.pass_function import PassFunction
from sage.targets import Features, Prompt, Target
from sage.targets.tree_passes import without_paths

FORM = ("adapter", "quantize")  # fields of a target's fingerprint in which training may continue with another one


class HeadConfig(PreTrainedConfig):
    """Configuration of a draft head: sizes after the target, its rope, and the target itself.

    Args:
        target: fingerprint of the target, which `load_draft` compares.
        target_path: folder or hub id of the target, the default of `sage-generate`.
        target_adapter: folder or hub id of the adapter that the target contained.
        mrope_section, mrope_interleaved, scaled_rope: the target's rope (see `sage.targets.rope`).
    """

    hidden_size: int = 192
    intermediate_size: int = 512
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    vocab_size: int = 1024
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope_theta: float = 1e6
    mrope_section: list[int] | None = None
    mrope_interleaved: bool = False
    scaled_rope: dict[str, Any] | None = None
    initializer_range: float = 0.02
    target: dict[str, Any] = field(default_factory=dict)
    target_path: str | None = None
    target_adapter: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of config.json; some fields are written only if set."""
        optional = ("mrope_interleaved", "scaled_rope", "target_adapter", "compressor")
        return {name: value for name, value in super().to_dict().items() if name not in optional or value}


class DraftHead(PreTrainedModel):
    """A head over pairs (feature of token t, embedding of token t + 1) at the position of token t.

    The embedding is the target's and is not saved. A subclass has a `rope` and implements `fuse` and `read`. With a vocabulary
    of its own, buffers `d2t` [U] int64 (target id = draft id + d2t[draft id]) and `t2d` [V] bool are saved with the weights,
    the layout of serving engines.

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
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._functions: dict[Any, tuple[PassFunction, ...]] = {}

    @classmethod
    def new(cls, target: Target, kind: DraftKind, vocabulary: Tensor | None, **config: Any) -> Self:
        """Creates a head with the target's sizes, dtype and device, as of `Draft`; `config` overrides sizes.

        Raises:
            ValueError: an unknown key, or attention heads that are no multiple of the key-value heads.
        """
        sizes = _sizes_after(target)
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
        sizes = read_config(folder)
        check_target(sizes["target"], target, folder, FORM)
        if target.is_meta:
            return cls(cls.config_class(**sizes))
        head: Self = load_weights(cls, folder, "draft", dtype=dtype).to(target.device).eval()
        head.borrow(target)
        return head

    def assign(self, target: Target) -> None:
        """Makes a loaded head one for another form of its target (`FORM`), with which its training continues."""
        self.config.update(_identity(target))

    def borrow(self, target: Target) -> None:
        """Copies what the head reads of the target and does not save; called after loading."""

    @classmethod
    def with_defaults(cls, config: dict[str, Any], target: Target) -> dict[str, Any]:
        """Returns the configuration with options filled in that depend on the target."""
        return config

    def reset_parameters(self, target: Target, vocabulary: Tensor | None = None) -> None:
        """Draws fresh weights; `vocabulary` as for `new`."""
        raise NotImplementedError

    def check(self, target: Target) -> None:
        check_target(self.config.target, target, self.config._name_or_path or "the draft")

    @property
    def kind(self) -> str:
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
        return int(getattr(self.config, "draft_vocab_size", None) or self.config.vocab_size)

    @property
    def token_map(self) -> Tensor | None:
        if self.num_draft_tokens == self.config.vocab_size:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def register_vocabulary(self) -> None:
        """Creates the buffers of a draft vocabulary of the first U tokens."""
        self.register_buffer("d2t", torch.zeros(self.num_draft_tokens, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(self.config.vocab_size) < self.num_draft_tokens)

    def set_vocabulary(self, ids: Tensor) -> None:
        """Sets the draft vocabulary: U increasing target ids. Raises ValueError for anything else."""
        is_ordered = bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < self.config.vocab_size
        if len(ids) != self.num_draft_tokens or not is_ordered:
            raise ValueError(
                f"draft.draft_vocab_size: need {self.num_draft_tokens} different ids below {self.config.vocab_size} in "
                f"increasing order, got {len(ids)}"
            )
        self.d2t.copy_(ids.to(self.d2t) - torch.arange(len(ids)).to(self.d2t))
        self.t2d.zero_()
        self.t2d[ids.to(self.t2d.device)] = True

    def options(self) -> dict[str, Any]:
        names = ["image_inputs", "input_norm", "fc_norm", "norm_output", "compressor", "block_size", "num_layers"]
        names += ["conditional", "conditional_rank", "feed", "causal", "confidence"]
        return {name: getattr(self.config, name) for name in names if hasattr(self.config, name)}

    def describe(self) -> dict[str, Any]:
        return {**without_paths(self.config), "dtype": self.dtype, "is_training": self.training}

    def new_cache(self, capacity: int) -> TreeCache:
        """Returns an empty cache of its layers, with a capacity in tokens."""
        devices, size = [self.device] * self.num_layers, (self.config.num_key_value_heads, self.config.head_dim)
        return SharedCache(devices, [size] * self.num_layers, capacity, self.dtype).take()

    @property
    def num_layers(self) -> int:
        """Decoder layers with a cache."""
        return int(getattr(self.config, "num_layers", 1))

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
        return tuple(getattr(self.config, "feature_levels", ()))

    def is_of_context(self, name: str) -> bool:
        """Whether the parameter `name` is applied to every pair, also to those from which nothing is drafted."""
        return any(part in f".{name}" for part in (".fc.", ".fc_norm.", ".k_proj.", ".v_proj."))

    def fuse(self, features: Features) -> Tensor:
        """Returns the features [B, T, D] of the pairs."""
        raise NotImplementedError

    def read(self, embeds_next: Tensor, features: Tensor, rope: Angles, mask: Tensor | None, cache: Any) -> Tensor:
        """Runs the layers on pairs, [B, T, D] each -> [B, T, D]; mask and cache as in `DraftLayer.forward`."""
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

    def forward(self, embeds_next: Tensor, features: Tensor, position_ids: Tensor, cache: Any = None) -> Tensor:
        """Runs the head on pairs (features[t], embeds_next[t]), which attend causally.

        Args:
            embeds_next: [B, T, D], embeddings of tokens t + 1.
            features: [B, T, D], `fuse(..)` of tokens t that the target has read, outputs of this method for drafted ones.
            position_ids: rope positions of tokens t, [B, T] or [3, B, T].
            cache: KV cache to extend in decoding, or the `Chains` of an unrolled pass.

        Returns:
            [B, T, D], the features of the next pairs and the input of `logits`; in step 0 of chains with roots, [B, R, D].
        """
        return self.read(embeds_next, features, self.rope(position_ids, embeds_next.dtype), None, cache)

    def shorten(self, embeds_next: Tensor, features: Tensor, position_ids: Tensor, pair_masks: PairMasks) -> HeadInput:
        """Compresses complete sequences of P pairs, as in `forward`, to Q rows; without a compressor, Q = P. In training mode
        the compressor samples what it prunes and selects.
        """
        if self.compressor is None:
            return HeadInput(embeds_next, features, position_ids)
        shortened: HeadInput = self.compressor(embeds_next, features, position_ids, pair_masks, is_sampling=self.training)
        return shortened

    def unroll(self, pairs: HeadInput, steps: int = 1, roots: Tensor | None = None) -> list[Tensor]:
        """Drafts `steps` tokens ahead of every position in parallel, each step from the output of the previous one.

        Args:
            pairs: complete right-padded sequences, as of `shorten`.
            roots: LongTensor [B, R], positions to draft from, different in each sequence; None for all.

        Returns:
            K tensors; number i is [B, P - i, D], and its row s belongs to pair s + i: the output of decoding if the target
            has read up to pair s and the later tokens are drafted. With `roots`, [B, R, D]: the rows of the roots, which are
            undefined beyond pair P - 1.

        Ref: EAGLE-3, arXiv 2503.01840, section 3.2 (training-time test).
        """
        embeds, features, positions = pairs.embeds_next, pairs.features, pairs.position_ids
        chains, outputs, last = Chains(pairs.weight, roots), [], embeds.shape[1] - 1
        for step in range(min(steps, last + 1)):
            if step and roots is not None:
                rows = (roots + step).clamp(max=last)
                embeds = at_rows(pairs.embeds_next, rows, 1)
                positions = pairs.position_ids.gather(-1, rows.expand(*positions.shape[:-1], -1))
            elif step:
                embeds, positions, features = embeds[:, 1:], positions[..., 1:], features[:, :-1]
            features = self(embeds, features, positions, cache=chains)
            outputs.append(features)
        return outputs

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, (Resampler, Gate)):  # after the linear layers within them
            module.reset_parameters()


def check_target(made_for: dict[str, Any], target: Target, where: Any, ignored: Collection[str] = ()) -> None:
    """Raises ValueError, naming both, if `made_for` is not the target's fingerprint, except for `ignored` fields."""
    fields = made_for.keys() | target.fingerprint.keys()
    if differing := {key for key in fields if made_for.get(key) != target.fingerprint.get(key)} - {*ignored}:
        changes = [key for key in FORM if key in differing]
        hint = "".join(f", or load the target as it was then (--{key}, target.{key})" for key in changes)
        raise ValueError(
            f"draft: {where} was made for {_describe(made_for)}, but the target is {_describe(target.fingerprint)}; "
            f"give the draft trained for this target{hint}"
        )


def _describe(fingerprint: dict[str, Any]) -> str:
    sizes = ", ".join(f"{key} {value}" for key, value in sorted(fingerprint.items()) if key != "model_type")
    return f"{fingerprint.get('model_type', 'an unknown target')} ({sizes})"


def _sizes_after(target: Target) -> dict[str, Any]:
    """Returns the arguments of a head's configuration that are those of its target."""
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
        **_identity(target),
    }


def _identity(target: Target) -> dict[str, Any]:
    adapter = target.adapter.path if target.adapter else None
    return {"target": target.fingerprint, "target_path": target.name, "target_adapter": adapter}
