"""Tiny random targets of both families, their inputs, random drafts, and a scripted draft."""

import copy
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForImageTextToText, LlavaOnevisionConfig, Qwen2_5_VLConfig

import sage
from sage.drafts.draft import DraftSession
from sage.drafts.model import ModelDraft
from sage.runtime.host_tensors import Tokens

VOCABULARY = 330  # 64 ids for the tests and one per byte
IMAGE_TOKEN, VIDEO_TOKEN, EOS = 60, 61, 1
LLAVA_IDS = {"image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN}
QWEN_IDS = {**LLAVA_IDS, "vision_start_token_id": 62, "vision_end_token_id": 63}
SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIGLIP |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4, "vision_use_head": False}


def text_sizes(kv_heads: int = 2, tied: bool = False, **extra: Any) -> dict[str, Any]:
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


def qwen_config(text: dict[str, Any], ids: dict[str, int], tied: bool = False) -> Qwen2_5_VLConfig:
    width = text["hidden_size"]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [width // 8 - 2, 1, 1]}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": width, "patch_size": 4}
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16, "fullatt_block_indexes": [0]}
    texts = {"rope_parameters": rope, **text}
    return Qwen2_5_VLConfig(text_config=texts, vision_config=vision, tie_word_embeddings=tied, **ids)


def llava_config(text: dict[str, Any], ids: dict[str, int], tiles: list[list[int]], tied: bool = False) -> LlavaOnevisionConfig:
    texts = {"model_type": "qwen2", **text}
    return LlavaOnevisionConfig(
        text_config=texts, vision_config=SIGLIP, image_grid_pinpoints=tiles, tie_word_embeddings=tied, **ids
    )


def make_qwen(kv_heads: int = 2, tied: bool = False, seed: int = 0, **text: Any) -> sage.Target:
    """A random Qwen2.5-VL of three layers, width 32; `text` changes its text model."""
    return random_target(qwen_config(text_sizes(kv_heads, tied, **text), QWEN_IDS, tied), seed)


def make_llava(kv_heads: int = 2, tied: bool = False, seed: int = 0) -> sage.Target:
    config = llava_config(text_sizes(kv_heads, tied), LLAVA_IDS, [[8, 8], [8, 16], [16, 8]], tied)
    return random_target(config, seed)


MAKERS = {"qwen2_5_vl": make_qwen, "llava_onevision": make_llava}


def random_target(config: Any, seed: int = 0, processor: Any = None) -> sage.Target:
    torch.manual_seed(seed)
    model: Any = AutoModelForImageTextToText.from_config(config)
    # A zero row has logit 0, so greedy decoding never emits a placeholder, as no trained model does.
    model.lm_head.weight.data[[IMAGE_TOKEN, VIDEO_TOKEN]] = 0
    model.generation_config.eos_token_id = EOS
    model.generation_config.pad_token_id = 0
    return sage.Target(model, processor)


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
    return {**token_fields(target, ids), **pixels}


def token_fields(target: sage.Target, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The inputs that follow from token ids [B, T]."""
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **target.family.token_inputs(ids)}


def followed_by(target: sage.Target, inputs: dict[str, torch.Tensor], tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The inputs of a prompt and the tokens [T] after it."""
    return {**inputs, **token_fields(target, torch.cat((inputs["input_ids"], tokens[None]), 1))}


def cut(inputs: dict[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    """The inputs of the first `length` tokens, after all images."""
    shape = inputs["input_ids"].shape
    return {k: v[:, :length] if isinstance(v, torch.Tensor) and v.shape == shape else v for k, v in inputs.items()}


def in_double(inputs: Any) -> dict[str, Any]:
    return {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


def in_float64(target: sage.Target, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Converts target and inputs to float64, where sums in a different order agree to 1e-12."""
    target.model.double()
    return in_double(inputs)


def padded_batch(target: sage.Target, lengths: tuple[int, ...] = (14, 9)) -> dict[str, Any]:
    """Conversations as the loader yields them: one image each, padded on the right, the second half of each supervised."""
    examples = [make_inputs(target, seed, length) for seed, length in enumerate(lengths)]
    ids = [example["input_ids"][0] for example in examples]
    pixels = [key for key in target.family.pixel_keys if key in examples[0]]
    tokens = {
        "input_ids": ids,
        "attention_mask": [torch.ones_like(one) for one in ids],
        "loss_mask": [torch.arange(len(one)) >= len(one) // 2 for one in ids],
    }
    batch = {key: nn.utils.rnn.pad_sequence(values, batch_first=True) for key, values in tokens.items()}
    batch |= {key: target.family.stack(key, [example[key] for example in examples]) for key in pixels}
    return {**batch, **target.family.token_inputs(batch["input_ids"]), "ids": ["a", "b"]}


def greedy_text(target: sage.Target, inputs: dict[str, torch.Tensor], length: int, **options: Any) -> list[int]:
    """The reference: the tokens of Hugging Face's greedy `generate` of the model itself."""
    ids = target.model.generate(**inputs, max_new_tokens=length, do_sample=False, **options)
    return ids[0, inputs["input_ids"].shape[1] :].tolist()


EAGLE_3_1 = {"fc_norm": True, "norm_output": True}


def random_draft(target: sage.Target, kind: str = "eagle", seed: int = 0, **options: Any) -> Any:
    """A draft with random weights in all layers; the blocks of a new draft have zero output, which would hide their inputs.

    An EAGLE-3 head reads the levels 1 to 3 of a target with too few layers for the default ones.
    """
    if kind != "eagle" and target.num_layers == 3:
        options.setdefault("feature_levels", [1, 2, 3])
    draft = sage.new_draft(target, kind, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return draft


SMALL_BLOCK = {"feature_levels": [1, 3], "block_size": 4, "conditional_rank": 5}
SLOT_HEADS: dict[str, dict[str, Any]] = {
    "dflash": {"kind": "block", **SMALL_BLOCK, "feed": False, "conditional": "none"},
    "dspark": {"kind": "block", **SMALL_BLOCK, "feed": False, "conditional": "markov", "causal": True, "num_layers": 2},
    "mlp": {"kind": "block", **SMALL_BLOCK, "feed": True, "conditional": "mlp", "num_layers": 2},
    "peagle": {"kind": "peagle", "feature_levels": [1, 2, 3], "block_size": 4, "num_layers": 2},
}


def slot_head(target: sage.Target, form: str, **options: Any) -> Any:
    return random_draft(target, **(SLOT_HEADS[form] | options)).eval()


class Operators(TorchDispatchMode):
    """Records the operators that run: their names, and the shapes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func._schema.name, getattr(out, "shape", ())))
        return out


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

    def expand_pass(self, rows: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        paths = [self.paths[row] for row in rows.tolist()]
        self.paths = [
            None if at is None or at >= len(self.answer) or token != self.answer[at] else at + 1
            for at, token in zip(paths, map(int, tokens), strict=True)
        ]
        return torch.stack([self._logits(at) for at in self.paths])

    def commit_pass(self, features: object, tokens: Tokens) -> torch.Tensor:
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


def near_draft(target: sage.Target, noise: float = 0.01) -> ModelDraft:
    """Returns a copy of the target with normal noise of this size in its text layers; many of its tokens are accepted."""
    model = copy.deepcopy(target.model)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.model.language_model.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=generator)
    return ModelDraft(sage.Target(model), target)
