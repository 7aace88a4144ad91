"""What every draft head is: from the target's features and the next tokens to states that an lm_head can read.

Owns: the form of a head's forward pass, in decoding (on a cache, under a tree mask) and in training (unrolled). Does not own:
layers (sage.drafts.layer), what an unrolled step attends to (sage.drafts.unroll), what stands for a picture
(sage.drafts.compressor.compressor).

Shapes: B batch, T tokens, P pairs, Q rows they are shortened to, D hidden, K unrolled steps.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from sage.drafts.compressor.compressor import Compressor, Gate
from sage.drafts.compressor.operators import Conv, Resampler
from sage.drafts.compressor.spans import Marks, Shortened
from sage.drafts.unroll import Chains
from sage.targets import Features, Target


class DraftHead(PreTrainedModel):
    """A head over pairs (feature of token t, embedding of token t + 1) at the position of token t.

    The embedding is the target's and is not saved. A subclass has a `rope` and says in `fuse` and `read` what it makes of a
    pair.

    Attributes:
        levels: indices k of the target's hidden_states[k] it reads beside the last.
        token_map: LongTensor [U], draft id -> target id; None when they are the same.
        predicts_features: whether its output is meant to be the target's next feature.
        compressor: makes pictures shorter before the head reads them; None to read every visual token.
    """

    base_model_prefix = "draft"
    predicts_features = False
    rope: nn.Module
    compressor: Compressor | None

    @property
    def levels(self) -> tuple[int, ...]:
        return ()

    @property
    def token_map(self) -> Tensor | None:
        return None

    def fuse(self, features: Features) -> Tensor:
        """The feature [B, T, D] a pair is made with."""
        raise NotImplementedError

    def read(
        self, embeds_next: Tensor, features: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: Any
    ) -> Tensor:
        """[B, T, D] each -> [B, T, D]; mask and cache as in `DraftLayer.forward`."""
        raise NotImplementedError

    def to_lm_head(self, hidden: Tensor) -> Tensor:
        """What the lm_head is applied to, from the head's output."""
        return hidden

    def lm_head_weight(self, target_rows: Tensor) -> Tensor:
        """[U, D], the lm_head's weight: its own, or the target's rows as given."""
        return target_rows

    def logits(self, hidden: Tensor, target: Target) -> Tensor:
        """[.., U] from the head's output [.., D]."""
        return nn.functional.linear(self.to_lm_head(hidden), self.lm_head_weight(target.lm_head.weight))

    def forward(
        self,
        embeds_next: Tensor,
        features: Tensor,
        position_ids: Tensor,
        tree_mask: Tensor | None = None,
        cache: Any = None,
        rope: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """One pass over pairs (features[t], embeds_next[t]).

        Args:
            embeds_next: [B, T, D], the embedding of token t + 1.
            features: [B, T, D], `fuse(..)` of token t where the target has read it, this very output where it is drafted.
            position_ids: rope positions of token t, [B, T] or [3, B, T].
            tree_mask: additive, tiled mask [1, 1, G * T, S] from `sage.attention.tile_mask`; None attends causally, which
                is also right for right-padded batches: no real pair reaches the padding after it.
            cache: one-layer KV cache to extend when decoding, or the `Chains` of an unrolled pass.
            rope: cos and sin of `position_ids`, where they are at hand.

        Returns:
            [B, T, D], what the next pair takes as its feature and `logits` reads.
        """
        return self.read(embeds_next, features, rope or self.rope(position_ids, embeds_next.dtype), tree_mask, cache)

    def shorten(self, embeds_next: Tensor, features: Tensor, position_ids: Tensor, marks: Marks) -> Shortened:
        """What the head reads of whole sequences of P pairs: with a compressor, Q rows; else the pairs themselves.

        In training mode a compressor draws (what it prunes, what it selects), as `EagleSession` never does.

        Args:
            embeds_next, features, position_ids: as in `forward`.
            marks: of the pairs.
        """
        if self.compressor is None:
            return Shortened(embeds_next, features, position_ids)
        shortened: Shortened = self.compressor(embeds_next, features, position_ids, marks, is_drawing=self.training)
        return shortened

    def unroll(
        self,
        embeds_next: Tensor,
        features: Tensor,
        position_ids: Tensor,
        steps: int = 1,
        weight: Tensor | None = None,
    ) -> list[Tensor]:
        """The training form: drafts `steps` tokens ahead of every position at once, each step on the one before.

        Args:
            embeds_next, features, position_ids: as in `forward`, of whole right-padded sequences of P pairs, or of the Q rows
                that `shorten` made of them; P is then Q.
            steps: K.
            weight: [B, P], what each row counts when it is attended to (`Shortened.weight`); None for 1.

        Returns:
            K tensors; number i is [B, P - i, D] and its row s belongs to pair s + i: what decoding gives there if the target
            has read up to pair s and the tokens after it are drafted.

        Ref: EAGLE-3, arXiv 2503.01840, section 3.2 (training-time test).
        """
        chains, outputs = Chains(weight), []
        for step in range(min(steps, embeds_next.shape[1])):
            embeds = embeds_next[:, step:]
            features = self(embeds, features[:, : embeds.shape[1]], position_ids[..., step:], cache=chains)
            outputs.append(features)
        return outputs

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, (Conv, Resampler, Gate)):  # after the linear layers within them
            module.reset_parameters()
