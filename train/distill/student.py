"""A draft in training: from a micro-batch of pairs to the loss, in one forward pass that the engine can shard.

Owns: what each kind of draft is fed and how it is saved. Does not own: the loss itself, the draft's architecture.

Draft and objective are one module because ZeRO-3 gathers parameters only within a module's forward, and the objective reads
the lm_head of a draft that has its own.

Shapes: B batch, P pairs, K steps, S supervised positions, D hidden, U words the draft may say.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sage.drafts import Draft, DraftHead, ModelDraft
from sage.drafts.registry import KINDS
from train.distill.objective import Drafted, Objective
from train.distill.pairs import Pairs, with_noise


class Student(nn.Module):
    """What is trained.

    Args:
        draft: the module that is trained and saved.
        objective: the loss.

    Attributes:
        levels: what the teacher has to hand out beside the last feature.
        token_map: LongTensor [U], the words the draft may say; None = all.
        for_decoder: the draft as `sage.generate` takes it.
    """

    levels: tuple[int, ...] = ()
    token_map: Tensor | None = None
    for_decoder: Draft

    def __init__(self, draft: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.draft: Any = draft
        self.objective = objective

    def forward(self, pairs: Pairs, lm_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, a sum over supervised positions, `Sums.detached()`, and BoolTensor [K, S], where draft and target agree.

        Args:
            lm_head: [U, D], the teacher's: frozen rows of the words the draft may say.
        """
        sums = self.objective(self.read(pairs, lm_head), pairs.wanted[pairs.mask], lm_head)
        return sums.loss, sums.detached(), sums.agree_KS

    def read(self, pairs: Pairs, lm_head: Tensor) -> Drafted:
        """What the draft makes of the pairs at supervised positions."""
        raise NotImplementedError

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Writes the draft so that `sage.load_draft` finds it there.

        Args:
            weights: whole, by name.
        """
        self.draft.save_pretrained(folder, state_dict=dict(weights))


class HeadStudent(Student):
    """An EAGLE or EAGLE-3 head.

    Args:
        noise: half-width of uniform noise on the target's features.
    """

    def __init__(self, draft: DraftHead, objective: Objective, noise: float = 0.0) -> None:
        super().__init__(draft, objective)
        self.noise = noise
        self.levels = draft.levels
        self.predicts_features = KINDS[draft.kind].predicts_features

    @property
    def token_map(self) -> Tensor | None:  # type: ignore[override]
        """The draft's own, asked for anew: a state that is loaded brings the words it was trained on."""
        found: Tensor | None = self.draft.token_map
        return found

    @property
    def for_decoder(self) -> DraftHead:  # type: ignore[override]
        head: DraftHead = self.draft
        return head

    def read(self, pairs: Pairs, lm_head: Tensor) -> Drafted:
        draft, dtype = self.draft, self.draft.dtype
        fused = draft.fuse(with_noise(pairs.features, self.noise)).to(dtype)
        short = draft.shorten(pairs.embeds_next.to(dtype), fused, pairs.position_ids, pairs.marks)
        steps = draft.unroll(short.embeds_next, short.features, short.position_ids, self.objective.steps, short.weight)
        rows_KSD, is_real_KS = at_supervised(steps, short.move(pairs.mask), short.run)
        features = rows_KSD if self.predicts_features else None
        return Drafted(draft.to_lm_head(rows_KSD), draft.lm_head_weight(lm_head), is_real_KS, features)


class ModelStudent(Student):
    """A smaller target that reads the same inputs for itself; it learns from logits alone."""

    def __init__(self, draft: ModelDraft, objective: Objective) -> None:
        super().__init__(draft.model.model, objective)
        self.for_decoder = draft

    def read(self, pairs: Pairs, lm_head: Tensor) -> Drafted:
        device = pairs.mask.device
        inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in pairs.inputs.items()}
        own = self.for_decoder.model.family.embed(self.draft, inputs)
        hidden = self.draft.model.language_model(
            inputs_embeds=own.embeds, position_ids=own.position_ids, attention_mask=own.attention_mask, use_cache=False
        ).last_hidden_state
        rows_KSD, is_real_KS = at_supervised([hidden[:, 1:-1]], pairs.mask)
        return Drafted(rows_KSD, self.draft.get_output_embeddings().weight[: len(lm_head)], is_real_KS)

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        super().save(folder, weights)
        if self.for_decoder.model.processor is not None:
            self.for_decoder.model.processor.save_pretrained(folder)


def at_supervised(steps_BPD: list[Tensor], mask_BP: Tensor, run_BP: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The supervised positions of an unrolled pass.

    Args:
        steps_BPD: K tensors [B, P - i, D], whose row s belongs to pair s + i.
        mask_BP: which pairs are supervised.
        run_BP: LongTensor, how many pairs before each one a chain to it may begin; None: all there are.

    Returns:
        [K, S, D], and BoolTensor [K, S], False where no chain can begin i pairs before.
    """
    batch_S, pair_S = mask_BP.nonzero(as_tuple=True)
    run_S = pair_S if run_BP is None else run_BP[batch_S, pair_S]
    rows, is_real = [], []
    for step, states in enumerate(steps_BPD):
        rows.append(states[batch_S, (pair_S - step).clamp(min=0, max=states.shape[1] - 1)])
        is_real.append(run_S >= step)
    return torch.stack(rows), torch.stack(is_real)
