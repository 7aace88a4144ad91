"""Tiny random targets of both families, random drafts, and a scripted draft."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

import sage
from sage.drafts.session import DraftSession
from sage.runtime.host_tensors import Tokens

VOCABULARY = 330  # 64 ids for the tests and one per byte
IMAGE_TOKEN, VIDEO_TOKEN, EOS = 60, 61, 1


def text_sizes(kv_heads: int = 2, tied: bool = False, **extra: Any) -> dict[str, Any]:
    """Returns the configuration of a tiny text model: three layers of width 32."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "tie_word_embeddings": tied,
        "initializer_range": 0.3,
        **extra,
    }


def make_qwen(kv_heads: int = 2, tied: bool = False, seed: int = 0, **text: Any) -> sage.Target:
    """A random Qwen2.5-VL of three layers, width 32; `text` changes its text model."""
    config = Qwen2_5_VLConfig(
        text_config=text_sizes(
            kv_heads, tied, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}, **text
        ),
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 16,
            "fullatt_block_indexes": [0],
        },
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=62,
        vision_end_token_id=63,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    return _target(Qwen2_5_VLForConditionalGeneration(config))


def make_llava(kv_heads: int = 2, tied: bool = False, seed: int = 0) -> sage.Target:
    """A random LLaVA-OneVision of three layers, width 32."""
    config = LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **text_sizes(kv_heads, tied)},
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 4,
            "vision_use_head": False,
        },
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        image_grid_pinpoints=[[8, 8], [8, 16], [16, 8]],
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    return _target(LlavaOnevisionForConditionalGeneration(config))


def _target(model: Any) -> sage.Target:
    # A zero row has logit 0, so greedy decoding never emits a placeholder, as no trained model does.
    model.lm_head.weight.data[[IMAGE_TOKEN, VIDEO_TOKEN]] = 0
    model.generation_config.eos_token_id = EOS
    model.generation_config.pad_token_id = 0
    return sage.Target(model)


def make_inputs(target: sage.Target, seed: int = 0, length: int = 12) -> dict[str, torch.Tensor]:
    """One prompt as tensors, with an image in the middle if the family has images."""
    generator = torch.Generator().manual_seed(seed)

    def text_ids(count: int) -> torch.Tensor:
        return torch.randint(2, 60, (count,), generator=generator)

    pixels: dict[str, torch.Tensor] = {}
    visual = 0
    if "image_grid_thw" in target.family.pixel_keys:
        pixels = {
            "pixel_values": torch.randn(16, 3 * 2 * 4 * 4, generator=generator),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
        }
        visual = 4
    elif target.family.pixel_keys:
        pixels = {
            "pixel_values": torch.randn(1, 2, 3, 8, 8, generator=generator),
            "image_sizes": torch.tensor([[8, 8]]),
            "batch_num_images": torch.tensor([1]),
        }
        visual = 4 + 2 * 3
    half = length // 2
    ids = torch.cat((text_ids(half), torch.full((visual,), IMAGE_TOKEN), text_ids(length - half)))[None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **target.family.token_inputs(ids), **pixels}


def in_float64(target: sage.Target, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Converts target and inputs to float64, where sums in a different order agree to 1e-12."""
    target.model.double()
    return {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}


def random_draft(target: sage.Target, kind: str = "eagle", seed: int = 0, **options: Any) -> Any:
    """A draft with random weights in all layers; the blocks of a new draft have zero output, which would hide their inputs."""
    draft = sage.new_draft(target, kind, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return draft


class OracleSession(DraftSession):
    """A scripted draft session that knows the answer and errs on purpose, so that deep paths, branches and misses occur.

    On a path that follows the answer, the next token has a rank drawn with the seed; on other paths the candidates are random.
    """

    context = 0

    def __init__(self, answer: list[int], vocabulary: int, seed: int) -> None:
        self.answer, self.vocabulary, self.seed = answer, vocabulary, seed

    def prefill(self, prompt: object, features: object, root: torch.Tensor) -> torch.Tensor:
        self.known = 1
        return self._start()

    def expand(self, rows: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        paths = [self.paths[row] for row in rows.tolist()]
        self.paths = [
            None if at is None or at >= len(self.answer) or token != self.answer[at] else at + 1
            for at, token in zip(paths, map(int, tokens), strict=True)
        ]
        return torch.stack([self._logits(at) for at in self.paths])

    def commit(self, features: object, tokens: Tokens) -> torch.Tensor:
        self.known += len(tokens)
        return self._start()

    def _start(self) -> torch.Tensor:
        self.paths: list[int | None] = [self.known]
        return self._logits(self.known)[None]

    def _logits(self, at: int | None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1000 + (at or 0))
        logits = torch.randn(self.vocabulary, generator=generator)
        if at is not None and at < len(self.answer):
            rank = int(torch.multinomial(torch.tensor([0.7, 0.15, 0.1, 0.05]), 1, generator=generator))
            logits[self.answer[at]] = logits.max() + 2.0 - rank
        return logits
