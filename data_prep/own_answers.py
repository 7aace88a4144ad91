"""The share of supervised tokens that are the target's own choice: how far data are the target's own answers.

A draft predicts the tokens that its target chooses. Answers of another author consist of tokens that the target would not have
chosen, and teach the draft little about decoding. Measured on a pocket target: 1.00 for greedy answers of the target itself,
0.81 for answers sampled at temperature 0.7, 0.77 for the templates that it was trained on, 0.45 for templates about another
image, 0.18 for those in another style. The bound lies between the answers that train useful drafts and the others.

Shapes: B batch, T tokens, S supervised tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

MIN_OWN_SHARE = 0.7
OWN_ANSWERS = "own_answers"  # key of metrics.jsonl; of one source: `own_answers/LABEL`
CHUNK_TOKENS = 256  # positions whose logits exist at a time
MAX_BYTES = 10**9  # of the weights of a target that is loaded for this measurement alone
REMEDY = "data.answers=target"


@dataclass(frozen=True)
class OwnShare:
    """Counts of supervised tokens, by the label of their source: (those that are the target's own choice, all)."""

    counts: Mapping[str, tuple[int, int]]

    @property
    def num_tokens(self) -> int:
        return sum(total for _, total in self.counts.values())

    @property
    def share(self) -> float:
        """The share over all sources; 1.0 without tokens."""
        return sum(own for own, _ in self.counts.values()) / self.num_tokens if self.num_tokens else 1.0

    @property
    def is_foreign(self) -> bool:
        return self.share < MIN_OWN_SHARE

    def by_source(self) -> dict[str, float]:
        return {label: own / total for label, (own, total) in self.counts.items() if total}

    def metrics(self) -> dict[str, float]:
        """Returns the figures of a line of metrics.jsonl; those of single sources where there are several."""
        sources = self.by_source() if len(self.counts) > 1 else {}
        return {OWN_ANSWERS: self.share, **{f"{OWN_ANSWERS}/{label}": share for label, share in sources.items()}}

    def as_json(self) -> dict[str, Any]:
        return {"share": self.share, "tokens": self.num_tokens, "sources": self.by_source()}

    def line(self) -> str:
        listed = listed_shares(self.by_source()) if len(self.counts) > 1 else ""
        return f"own answers: {self.share:.0%} of {self.num_tokens:,} supervised tokens are the target's own choice{listed}"

    def warning(self, command: str = REMEDY) -> str:
        """Returns the warning about foreign answers, which names `command` as the remedy."""
        return (
            f"the answers are not the target's own: {self.share:.0%} of the supervised tokens are its choice, below "
            f"{MIN_OWN_SHARE:.0%}. A draft trained on them predicts text that the target does not write, and is often slower "
            f"than no draft; regenerate them with: {command}"
        )


def listed_shares(by_source: Mapping[str, float]) -> str:
    """Returns ` (chats 10%, docs 100%)`; empty without sources."""
    listed = ", ".join(f"{label} {share:.0%}" for label, share in by_source.items())
    return f" ({listed})" if listed else ""


def is_quickly_measured(target_path: str) -> bool:
    """Whether a target is a local folder with weights of at most `MAX_BYTES`."""
    files = list(Path(target_path).expanduser().glob("*.safetensors"))
    return 0 < sum(file.stat().st_size for file in files) <= MAX_BYTES


def own_choices(target: Any, features_SD: Tensor, ids_S: Tensor) -> Tensor:
    """Returns BoolTensor [S], whether each token of `ids_S` is the most likely one of the target.

    `features_SD` are the last hidden states of the tokens before them.
    """
    import torch  # verdicts read the bound above without it

    weight = target.lm_head_weight
    parts = zip(features_SD.split(CHUNK_TOKENS), ids_S.split(CHUNK_TOKENS), strict=True)
    are_best = [(part_CD.to(weight.dtype) @ weight.T).argmax(-1) == ids_C.to(weight.device) for part_CD, ids_C in parts]
    return torch.cat(are_best) if are_best else torch.zeros(0, dtype=torch.bool, device=weight.device)


def measure_own(target: Any, examples: Iterable[tuple[str, dict[str, Any]]]) -> OwnShare:
    """Runs the target once over each (label of its source, example of `data_prep.chat.encode_example`)."""
    counts: dict[str, tuple[int, int]] = {}
    for label, example in examples:
        batch = target.processor.collate([{key: value for key, value in example.items() if key != "id"}])
        features_TD = target.features(target.embed(batch)).last[0]  # without gradients
        mask_T = example["loss_mask"][1:].bool()
        found_S = own_choices(target, features_TD[:-1][mask_T.to(features_TD.device)], example["input_ids"][1:][mask_T])
        own, total = counts.get(label, (0, 0))
        counts[label] = own + int(found_S.sum()), total + len(found_S)
    return OwnShare(counts)
