"""Measures in the first steps of a run how many supervised tokens are the target's own choice (data_prep.own_answers).

The features are those of the teacher's pass of the same step; only its lm_head is applied once more, and to the supervised
positions of the measured steps alone.

Shapes: B batch, P pairs, S supervised pairs, L labels of sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from data_prep.own_answers import OwnShare, own_choices
from sage import Target
from train.distill.teacher import Pairs
from train.launch.ranks import Ranks

MAX_STEPS = 8  # the measurement is complete before the tenth step
MIN_TOKENS = 4000  # over all ranks, after which no further step is measured


class OwnAnswers:
    """Counts own choices until `MIN_TOKENS` tokens or `MAX_STEPS` steps are measured.

    Args:
        labels: of the training sources, in the order of the configuration; other sources count for the first one.
        total_steps: of the run, if it has a limit; the last one completes the measurement.
        first_step: of the run; a resumed run that has measured before measures nothing.

    Attributes:
        found: the result, once it is complete.
    """

    def __init__(self, target: Target, labels: Sequence[str], total_steps: int | None, first_step: int = 0) -> None:
        self.target, self.labels = target, list(labels)
        self.found: OwnShare | None = None
        self._last_step = min(MAX_STEPS, total_steps or MAX_STEPS)
        self._is_open = first_step < self._last_step
        self._sums_L2 = torch.zeros(len(self.labels), 2, dtype=torch.float64, device=target.device)
        self._tokens = 0.0

    @torch.no_grad()
    def add(self, batch: dict[str, Any], pairs: Pairs) -> None:
        """Counts the supervised tokens of a micro-batch of this rank."""
        if not self._is_open:
            return
        mask_BP = pairs.mask
        ids_S = pairs.inputs["input_ids"][:, 2:][mask_BP]
        own_S = own_choices(self.target, pairs.features_next[mask_BP], ids_S)
        figures_S2 = torch.stack((own_S.double(), torch.ones_like(own_S, dtype=torch.float64)), 1)
        names = batch.get("sources") or [""] * len(batch["input_ids"])
        label_B = torch.tensor([self.labels.index(name) if name in self.labels else 0 for name in names], device=mask_BP.device)
        self._sums_L2.index_add_(0, label_B[mask_BP.nonzero()[:, 0]], figures_S2)

    def end_step(self, ranks: Ranks, step: int, num_supervised: float) -> OwnShare | None:
        """Ends a step of the run, `step` of which are taken, with `num_supervised` tokens over all ranks; returns the result
        once, in the step that completes it. Collective in that step.
        """
        self._tokens += num_supervised
        if not self._is_open or (step < self._last_step and self._tokens < MIN_TOKENS):
            return None
        self._is_open = False
        totals = ranks.sum(self._sums_L2).tolist()
        self.found = OwnShare({label: (int(own), int(total)) for label, (own, total) in zip(self.labels, totals, strict=True)})
        return self.found
