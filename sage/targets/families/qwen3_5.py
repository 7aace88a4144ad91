"""Qwen3.5 and its mixture of experts, with and without a vision tower: gated delta nets in three of four text layers."""

from __future__ import annotations

from typing import Any, ClassVar

from sage.inputs.format import Inputs
from sage.targets.families.qwen3_vl import Qwen3_VL
from sage.targets.families.text import Text
from sage.targets.family import Prompt, Visual


class Qwen3_5(Qwen3_VL):
    """Images, videos and positions are those of Qwen3-VL, without deepstack. Ref: Gated Delta Networks, arXiv 2412.06464."""

    model_types = {
        "qwen3_5": "Qwen3_5ForConditionalGeneration",
        "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    }
    served_by = ()
    template_arguments = {"enable_thinking": False}
    leading_layers: ClassVar[int] = 1

    def _visual(self, out: Any) -> Visual:
        return Visual(out.pooler_output)

    def text_inputs(self, prompt: Prompt) -> Inputs:
        return {}


class Qwen3_5_Text(Text):
    """A checkpoint of the text model alone, whose positions have one axis, and Qwen3-Next."""

    model_types = {
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
        "qwen3_next": "Qwen3NextForCausalLM",
    }
    served_by = ()

    def rope(self) -> Any:
        return super().rope()._replace(section=None, interleaved=False)
