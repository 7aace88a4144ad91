"""The EAGLE draft head: predicts the target's next feature from its last feature and the next token.

Ref: EAGLE, arXiv 2401.15077, section 4.1; with all visual tokens, SpecVLM, arXiv 2509.11815 (EagleVLM baseline).

Index shift, for a prompt of three tokens x0 x1 x2 whose target features are f0 f1 f2, and a first answer token x3:
    pair 0 = (f0, e(x1)) predicts f1; pair 1 = (f1, e(x2)) predicts f2; pair 2 = (f2, e(x3)) predicts f3,
    and lm_head(f3) is the distribution of x4. Pair t sits at the rope position of token t.

Shapes: B batch, T tokens, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sage.drafts.compressor.compressor import Compressor, check_compressor
from sage.drafts.config import HeadConfig
from sage.drafts.head import DraftHead
from sage.drafts.layer import DraftLayer
from sage.drafts.options import ImageInputs
from sage.drafts.rope import Rope
from sage.targets import Features, Target


class EagleConfig(HeadConfig):
    """Configuration of an EAGLE head; further arguments are those of `HeadConfig`.

    Args:
        input_norm: normalize the input of the layer's attention (EagleVLM does, EAGLE-1 does not).
        image_inputs: `embed` feeds visual embeddings at image and video positions, `token` the placeholder's embedding.
        compressor: visual compressor, such as `{"kind": "pool", "ratio": 20}` (see `Compressor`); None keeps all visual tokens.
    """

    model_type = "sage_eagle"

    input_norm: bool = True
    image_inputs: str = "embed"
    compressor: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.image_inputs not in tuple(ImageInputs):
            raise ValueError(f"draft.image_inputs: {self.image_inputs!r} is not one of {', '.join(ImageInputs)}")
        self.image_inputs = str(self.image_inputs)
        if self.compressor is not None:
            check_compressor(self.compressor)
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of config.json; `compressor` is written only if set."""
        return {name: value for name, value in super().to_dict().items() if name != "compressor" or value is not None}


class EagleDraft(DraftHead):
    """One decoder layer over fc(concat(e(x_{t+1}), f_t)); the output predicts the target's feature f_{t+1}.

    Embedding and lm_head are the target's and are not saved.
    """

    config_class = EagleConfig
    _no_split_modules = ["DraftLayer"]

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = DraftLayer(config)
        self.rope = Rope(config)
        self.compressor = None if config.compressor is None else Compressor(config)
        self.post_init()

    @torch.no_grad()
    def reset_parameters(self, target: Target, vocabulary: Tensor | None = None) -> None:
        """Draws fresh weights: fc starts as feature + embedding and both residual blocks at zero, which learns fastest."""
        self.apply(self._init_weights)
        self.fc.weight += torch.eye(self.config.hidden_size).repeat(1, 2)
        self.layer.self_attn.o_proj.weight.zero_()
        self.layer.mlp.down_proj.weight.zero_()

    def fuse(self, features: Features) -> Tensor:
        """Returns the target's last feature, [B, T, D]."""
        return features.last

    def read(
        self, embeds_next: Tensor, features: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: Any
    ) -> Tensor:
        hidden = self.fc(torch.cat((embeds_next, features), -1))
        return self.layer(hidden, rope, mask, cache)
