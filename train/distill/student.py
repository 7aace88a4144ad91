"""Drafts in training: from a micro-batch of pairs to the loss, in one forward pass that the engine can shard.

Draft and objective are one module because ZeRO-3 gathers parameters only within the forward pass of a module, and the
objective reads the lm_head of a draft that has its own.

Shapes: B batch, P pairs, K steps, S supervised positions, R rows of the objective, D hidden size, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from sage.drafts.draft import Draft
from sage.drafts.head import DraftHead
from sage.drafts.model import ModelDraft
from sage.drafts.options import ModelOptions, TrainedPart
from sage.drafts.registry import KINDS
from train.config.schema import Config
from train.distill.anchors import draw_anchors, gather_chains, is_root_of
from train.distill.compiled_layers import CompiledLayers, Method
from train.distill.objective import DraftOutput, Objective
from train.distill.pairs import Pairs, with_noise
from train.distill.rows import ChainRows, Rows, indices_of

MAX_ROOTS = 0.8  # share of the pairs beyond which an unrolled pass computes all of them


class Student(nn.Module):
    """Base class: a draft, the module that is trained and saved, with its objective.

    The row of a kind in `sage.drafts.registry` names its student.

    Attributes:
        levels: indices of the target's hidden states that the draft reads beside the last feature.
        token_map: LongTensor [U], target ids of the draft vocabulary; None = the target's vocabulary.
        layers: methods of the draft that are compiled for the forward pass.
        decoding_draft: the draft as `sage.generate` expects it.
    """

    levels: tuple[int, ...] = ()
    token_map: Tensor | None = None
    decoding_draft: Draft

    def __init__(self, draft: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.draft: Any = draft
        self.objective = objective
        self.layers = CompiledLayers()

    @classmethod
    def of(cls, draft: Any, config: Config) -> Self:
        """Returns the student of a draft; the trained part is in float32 and requires gradients."""
        raise NotImplementedError

    def forward(self, pairs: Pairs, target_lm_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the loss, a sum over supervised positions, `LossSums.stacked()`, and `LossSums.agreements`.

        Args:
            target_lm_head: [U, D], frozen rows of the target's lm_head for the draft vocabulary.
        """
        with self.layers.installed():
            output = self.predict(pairs, target_lm_head)
        sums = self.objective(output, supervised_features(pairs, output), target_lm_head)
        return sums.loss, sums.stacked(), sums.agreements

    def predict(self, pairs: Pairs, target_lm_head: Tensor) -> DraftOutput:
        """Runs the draft; returns its output at the supervised positions."""
        raise NotImplementedError

    def compilable(self) -> list[Method]:
        """Returns the methods of the draft's layers that may be compiled; none unless a kind names them."""
        return []

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Writes the draft, with complete (unsharded) weights by name, into a folder that `sage.load_draft` can load."""
        self.draft.save_pretrained(folder, state_dict=dict(weights))


class HeadStudent(Student):
    """An EAGLE or EAGLE-3 head; `objective.feature_noise` is added to the target's features.

    With `objective.anchors` drafts start at anchors alone (see `train.distill.anchors`).
    """

    def __init__(self, draft: DraftHead, objective: Objective) -> None:
        super().__init__(draft, objective)
        self.levels = draft.levels

    @classmethod
    def of(cls, draft: DraftHead, config: Config) -> Self:
        return cls(draft.float().train().requires_grad_(True), Objective(config.objective))

    @property
    def token_map(self) -> Tensor | None:  # type: ignore[override]
        """The draft's own buffer, read anew on each access since a loaded checkpoint replaces it."""
        return self.draft.token_map

    @property
    def decoding_draft(self) -> DraftHead:  # type: ignore[override]
        return self.draft

    def predict(self, pairs: Pairs, target_lm_head: Tensor) -> DraftOutput:
        draft, dtype, config = self.draft, self.draft.dtype, self.objective.config
        fused = draft.fuse(with_noise(pairs.features, config.feature_noise)).to(dtype)
        short = draft.shorten(pairs.embeds_next.to(dtype), fused, pairs.position_ids, pairs.pair_masks)
        mask, anchors = short.move_mask(pairs.mask), None
        if config.anchors is not None:
            keep = [1.0] * min(config.steps, mask.shape[1])
            anchors = draw_anchors(is_root_of(mask, len(keep)), config.anchors, keep)
        roots = roots_of(mask, config.steps) if anchors is None else anchors.root_BA
        steps = draft.unroll(short.embeds_next, short.features, short.position_ids, config.steps, short.weight, roots)
        if anchors is None:
            hidden_RD, rows = gather_supervised(steps, mask, short.run_length, roots)
        else:
            hidden_RD, rows = gather_chains(torch.cat(steps, 1), mask, anchors, short.run_length)
        features = hidden_RD if KINDS[draft.kind].predicts_features else None
        return DraftOutput(draft.to_lm_head(hidden_RD), draft.lm_head_weight(target_lm_head), rows, features)

    def compilable(self) -> list[Method]:
        """Returns those that the modules of the head name."""
        return [(module, name) for module in self.draft.modules() for name in getattr(module, "compilable", ())]


class ModelStudent(Student):
    """A smaller model of the target's family, which embeds the inputs itself and is trained on logits alone."""

    decoding_draft: ModelDraft

    def __init__(self, draft: ModelDraft, objective: Objective) -> None:
        super().__init__(draft.network, objective)
        self.decoding_draft = draft

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
        hidden_RD, rows = gather_supervised([hidden[:, 1:-1]], pairs.mask)
        return DraftOutput(hidden_RD, self.draft.get_output_embeddings().weight[: len(target_lm_head)], rows)

    def compilable(self) -> list[Method]:
        layers: Any = self.decoding_draft.model.text_model.layers
        return [(layer, "forward") for layer in layers]

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        super().save(folder, weights)
        if self.decoding_draft.model.processor is not None:
            self.decoding_draft.model.processor.save_pretrained(folder)


def roots_of(mask_BP: Tensor, steps: int) -> Tensor | None:
    """Returns the pairs from which a chain of at most K - 1 drafted tokens reaches a supervised pair.

    An unrolled pass costs in proportion to them. Worked example, two steps:

        supervised [. . 1 1 .] [1 . . . .]    roots [1 2 3] [0 . .], filled up with other pairs: [1 2 3] [0 1 2]

    Args:
        mask_BP: supervised pairs.

    Returns:
        LongTensor [B, R]; None if computing all pairs costs less, since causal attention needs no mask. R is read from the
        device, and at least 1: attention kernels need a query.
    """
    is_root_BP = is_root_of(mask_BP, steps)
    num_roots = max(1, int(is_root_BP.sum(1).max()))
    if num_roots > MAX_ROOTS * mask_BP.shape[1]:
        return None
    return (~is_root_BP).to(torch.uint8).argsort(stable=True)[:, :num_roots].sort(1).values


def supervised_features(pairs: Pairs, output: DraftOutput) -> Tensor:
    """Returns the target's features at the supervised positions of a draft's output, [S, D]."""
    rows = output.rows
    if isinstance(rows, ChainRows):
        places = indices_of(pairs.mask, pairs.mask.numel())[rows.among]
    else:
        places = indices_of(pairs.mask, len(rows.counts))
    return pairs.features_next.flatten(0, 1).index_select(0, places)


def gather_supervised(
    steps_BPD: list[Tensor], mask_BP: Tensor, history_BP: Tensor | None = None, roots_BR: Tensor | None = None
) -> tuple[Tensor, Rows]:
    """Gathers the predictions of the supervised positions from an unrolled pass.

    Args:
        steps_BPD: K tensors [B, P - i, D]; row s of the i-th belongs to pair s + i. With `roots_BR`, K tensors [B, R', D] that
            have the rows of R' roots only.
        mask_BP: supervised pairs.
        history_BP: LongTensor, number of preceding pairs at which a chain to this pair may start; None = all of them.
        roots_BR: LongTensor, the roots in increasing order; None = all pairs.

    Returns:
        [R, D], and their rows: those of every step for which a chain can start so many pairs earlier.
    """
    batch_S, pair_S = mask_BP.nonzero(as_tuple=True)
    if len(steps_BPD) == 1:
        rows = Rows.one_per_position(len(pair_S), mask_BP.device)
    else:
        history_S = pair_S if history_BP is None else history_BP[batch_S, pair_S]
        rows = Rows.of(torch.stack([history_S >= step for step in range(len(steps_BPD))]))
    places_BP = None
    if roots_BR is not None:
        roots = torch.arange(roots_BR.shape[1], device=roots_BR.device).expand_as(roots_BR)
        places_BP = torch.zeros_like(mask_BP, dtype=torch.long).scatter_(1, roots_BR, roots)
    sources, first = [], 0
    for step, states in enumerate(steps_BPD):
        root_S = (pair_S - step).clamp(min=0)
        place_S = root_S.clamp(max=states.shape[1] - 1) if places_BP is None else places_BP[batch_S, root_S]
        sources.append(first + batch_S * states.shape[1] + place_S)
        first += states.shape[0] * states.shape[1]
    flat = [states.flatten(0, 1) for states in steps_BPD]
    states_XD = torch.cat(flat) if len(flat) > 1 else flat[0]
    return states_XD.index_select(0, torch.stack(sources)[rows.step, rows.position]), rows
