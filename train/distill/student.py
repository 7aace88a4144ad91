"""Drafts in training: from a micro-batch of pairs to the loss, in one forward pass that the engine can shard.

Draft and objective are one module because ZeRO-3 gathers parameters only within the forward pass of a module, and the
objective reads the lm_head of a draft that has its own.

Shapes: B batch, P pairs, K steps or levels, S supervised positions, A anchors, R rows of the objective or of all levels, N
rows, D hidden size, U draft vocabulary, r rank of the conditional.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from sage.drafts.model import ModelDraft
from sage.drafts.registry import KINDS, ModelOptions, SlotOptions, TrainedPart
from sage.drafts.slots import SlotHead
from sage.drafts.spans import HeadInput
from sage.drafts.unroll import at_rows
from train.config.schema import Config
from train.distill.compiled_layers import CompiledLayers, Method
from train.distill.objective import DraftOutput, LossSums, Objective
from train.distill.rows import (
    Anchors,
    draw_anchors,
    every_pair,
    every_root,
    gather_chains,
    indices_of,
    is_root_of,
    within_turns,
)
from train.distill.teacher import Pairs, with_noise


class Student(nn.Module):
    """Base class: a draft, the module that is trained and saved, with its objective.

    The row of a kind in `sage.drafts.registry` names its student.

    Attributes:
        layers: methods of the draft that are compiled for the forward pass.
    """

    def __init__(self, draft: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.draft: Any = draft
        self.objective = objective
        self.layers = CompiledLayers()

    @classmethod
    def of(cls, draft: Any, config: Config) -> Self:
        """Returns the student of a draft; the trained part is in float32 and requires gradients."""
        return cls(draft.float().train().requires_grad_(True), Objective(config.objective))

    @property
    def decoding_draft(self) -> Any:
        """The draft as `sage.generate` expects it."""
        return self.draft

    @property
    def levels(self) -> tuple[int, ...]:
        """Indices of the target's hidden states that the draft reads beside the last feature."""
        return tuple(self.decoding_draft.levels)

    @property
    def token_map(self) -> Tensor | None:
        """Of the draft, if it has one; read anew on each access, since a loaded checkpoint replaces its buffer."""
        return getattr(self.decoding_draft, "token_map", None)

    def forward(self, pairs: Pairs, target_lm_head: Tensor) -> LossSums:
        """Compares the draft with the target, given the frozen rows [U, D] of its lm_head for the draft vocabulary."""
        with self.layers.installed():
            output = self.predict(pairs, target_lm_head)
        return self.objective(output, supervised_features(pairs, output), target_lm_head, pairs.logit_cap)

    def predict(self, pairs: Pairs, target_lm_head: Tensor) -> DraftOutput:
        """Runs the draft; returns its output at the supervised positions."""
        raise NotImplementedError

    def compilable(self) -> list[Method]:
        """Returns the methods of the draft's layers that may be compiled."""
        return []

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Writes the draft, with complete (unsharded) weights by name, into a folder that `sage.load_draft` can load."""
        self.draft.save_pretrained(folder, state_dict=dict(weights))


class HeadStudent(Student):
    """An EAGLE or EAGLE-3 head. With `objective.anchors` drafts start at anchors alone (see `train.distill.rows`)."""

    def head_input(self, pairs: Pairs) -> HeadInput:
        """Returns the pairs as the head reads them, with `objective.feature_noise` and compressed."""
        features = with_noise(pairs.features, self.objective.config.feature_noise)
        embeds, fused = pairs.embeds_next.to(self.draft.dtype), self.draft.fuse(features).to(self.draft.dtype)
        short: HeadInput = self.draft.shorten(embeds, fused, pairs.position_ids, pairs.pair_masks)
        return short

    def predict(self, pairs: Pairs, target_lm_head: Tensor) -> DraftOutput:
        draft, config, short = self.draft, self.objective.config, self.head_input(pairs)
        mask = short.move_mask(pairs.mask)
        if config.anchors is None:
            anchors = every_root(mask, config.steps)
        else:
            keep = [1.0] * min(config.steps, mask.shape[1])
            anchors = draw_anchors(is_root_of(mask, len(keep)), config.anchors, keep)
        roots = None if anchors.has_all_pairs else anchors.root_BA
        steps = draft.unroll(short, len(anchors.sizes), roots)
        hidden_RD, rows = gather_chains(torch.cat(steps, 1), mask, anchors, short.run_length)
        features = hidden_RD if KINDS[draft.kind].predicts_features else None
        return DraftOutput(draft.to_lm_head(hidden_RD), draft.lm_head_weight(target_lm_head), rows, features)

    def compilable(self) -> list[Method]:
        return [(module, name) for module in self.draft.modules() for name in getattr(module, "compilable", ())]


class ModelStudent(Student):
    """A smaller model of the target's family, which embeds the inputs itself and is trained on logits alone."""

    def __init__(self, draft: ModelDraft, objective: Objective) -> None:
        super().__init__(draft.network, objective)
        self._decoding_draft = draft

    @property
    def decoding_draft(self) -> ModelDraft:
        return self._decoding_draft

    @classmethod
    def of(cls, draft: ModelDraft, config: Config) -> Self:
        assert isinstance(config.draft, ModelOptions)
        model = draft.model
        parts = {
            TrainedPart.layers: [model.text_model.layers, model.text_model.norm],
            TrainedPart.text: [model.text_model, model.lm_head],
            TrainedPart.all: [model.model],
        }
        model.model.float().train()
        for module in parts[config.draft.train_part]:
            module.requires_grad_(True)
        return cls(draft, Objective(config.objective))

    def predict(self, pairs: Pairs, target_lm_head: Tensor) -> DraftOutput:
        model: Any = self.decoding_draft.model
        prompt = model.family.embed(self.draft, pairs.inputs)
        hidden = model.read(prompt).last  # padding is on the right, no token attends to it
        hidden_RD, rows = gather_chains(hidden[:, 1:-1], pairs.mask, every_pair(pairs.mask, 1))
        weight = self.draft.get_output_embeddings().weight[: len(target_lm_head)]
        return DraftOutput(hidden_RD, weight, rows, cap=model.logit_cap)

    def compilable(self) -> list[Method]:
        layers: Any = self.decoding_draft.model.text_model.layers
        return [(layer, "forward") for layer in layers]

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        super().save(folder, weights)
        if self.decoding_draft.model.processor is not None:
            self.decoding_draft.model.processor.save_pretrained(folder)


def supervised_features(pairs: Pairs, output: DraftOutput) -> Tensor:
    """Returns the target's features at the supervised positions of a draft's output, [S, D]."""
    places = indices_of(pairs.mask, pairs.mask.numel())[output.rows.among]
    return pairs.features_next.flatten(0, 1).index_select(0, places)


class SlotStudent(HeadStudent):
    """A head with slots, which drafts K tokens from random anchors of each sequence in one pass.

    An anchor is a supervised pair, as in decoding, where the target has emitted the second token of the pair. Anchor pair t is
    (feature of token t, embedding of token t + 1); level k of its block predicts token t + 2 + k, the label of pair t + k. Rows
    end with the turn: a slot never predicts a token of the answer to another question. Worked example for one sequence, K = 3:

        pair         0 1 2 3 4 5 6
        supervised   . . 1 1 1 . 1      two answers
        anchor 2         k k k          rows of levels 0 1 2 at pairs 2 3 4
        anchor 4             k          the turn ends: no rows of levels 1 and 2, although pair 6 is supervised again

    `keep` is the share of the anchors whose blocks have each level.
    """

    def __init__(self, draft: SlotHead, objective: Objective, keep: Sequence[float]) -> None:
        super().__init__(draft, objective)
        self.keep = keep

    @classmethod
    def of(cls, draft: SlotHead, config: Config) -> Self:
        assert isinstance(config.draft, SlotOptions)
        objective = Objective(replace(config.objective, steps=draft.num_levels))
        return cls(draft.float().train().requires_grad_(True), objective, config.draft.kept_shares(draft.num_levels))

    def predict(self, pairs: Pairs, target_lm_head: Tensor) -> DraftOutput:
        draft, short = self.draft, self.head_input(pairs)
        mask = short.move_mask(pairs.mask)
        anchors = within_turns(draw_anchors(mask, self.objective.config.anchors, self.keep), mask)
        hidden_BRD = draft.roll_out(short, anchors.root_BA, anchors.sizes)
        state_BRX = self._conditional_state(pairs, anchors, hidden_BRD)
        if draft.path_head is not None:
            hidden_BRD = hidden_BRD + draft.path_head.out(state_BRX)
        both_NX, rows = gather_chains(torch.cat((hidden_BRD, state_BRX), -1), mask, anchors)
        hidden_ND, state_NX = both_NX.split((hidden_BRD.shape[-1], state_BRX.shape[-1]), -1)
        correction = None if draft.markov_head is None else (state_NX, draft.markov_head.markov_w2.weight)
        confidence = None if draft.confidence_head is None else draft.confidence_head(both_NX.detach())
        weight = draft.lm_head_weight(target_lm_head)
        return DraftOutput(draft.to_lm_head(hidden_ND), weight, rows, correction=correction, confidence=confidence)

    def _conditional_state(self, pairs: Pairs, anchors: Anchors, hidden_BRD: Tensor) -> Tensor:
        """Returns the state [B, R, r] of every row from the tokens before its own; r = 0 without a conditional.

        The first token of a sequence has no embedding among the pairs; the second one stands for it.
        """
        draft, ids = self.draft, pairs.inputs["input_ids"]
        if draft.markov_head is not None:
            return draft.markov_head(ids.gather(1, (anchors.pair_BR + 1).clamp(max=ids.shape[1] - 1)))
        if draft.path_head is None:
            return hidden_BRD[..., :0]
        embeds, last_BR = pairs.embeds_next.to(draft.dtype), anchors.pair_BR.clamp(max=pairs.embeds_next.shape[1] - 1)
        before_BR = (last_BR - 1).clamp(min=0)
        return draft.path_head(at_rows(embeds, last_BR, 1), at_rows(embeds, before_BR, 1), hidden_BRD)
