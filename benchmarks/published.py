"""`python -m benchmarks.published NAME DIR`: DIR/target with the published sizes and layout of conf/target/NAME.yaml and random
weights: `config.json` of its release, tokenizer, template, processors, shards with old weight names. With `--photos N` also
conversations about N generated images, DIR/photos.jsonl, in the layout of `data=messages`.
"""

from __future__ import annotations

import json
import math
import random
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import split_torch_state_dict_into_shards
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig

from benchmarks.shapes import published_architecture
from sage.commands.cli import add_device_option, new_parser, resolve_device, run
from sage.io.files import write_json
from sage.targets.families import family_of

LAYOUTS = Path(__file__).with_name("layouts")
FIRST_SPECIAL = 151643  # all of Qwen's vocabulary lies below
SPLIT = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
BLANK = "\u0120"  # of byte-level BPE
SHARD_SIZE = "2GB"
PEAKED = 8.0  # gain of the last norm: distributions as peaked as those of trained models
ADDS = ("o_proj.weight", "down_proj.weight", "fc2.weight", "attn.proj.weight")  # to the residual stream
PHOTO_SIZES = ((640, 480), (480, 640), (512, 512), (800, 600), (1024, 768), (336, 336))
WORDS = "the a cat street red two people near small building sky water holding on of with and bright old wooden"


def build(name: str, folder: Path, device: torch.device, is_small: bool = False) -> int:
    """Writes the folder of a target of conf/target; returns its parameters. ValueError for a family without a layout."""
    architecture = published_architecture(name)
    layouts = yaml.safe_load((LAYOUTS / "published.yaml").read_text(encoding="utf-8"))
    layout = layouts.get(architecture["model_type"])
    if layout is None:
        raise ValueError(f"{name}: the published layout of its family is not known here; choose one of {', '.join(layouts)}")
    if is_small:
        small = layout["small"]
        architecture["text_config"] |= small["text"]
        architecture["vision_config"] |= small["vision"]
        if "mrope_section" in small:
            architecture["text_config"]["rope_parameters"]["mrope_section"] = small["mrope_section"]
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", _config(architecture, layout))
    write_json(folder / "generation_config.json", layout["generation"])
    write_json(folder / "preprocessor_config.json", layout["preprocessor"])
    if "processor" in layout:
        write_json(folder / "processor_config.json", layout["processor"])
    _write_tokenizer(folder, layout)
    return _write_weights(folder, layout, device)


def _config(architecture: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    """Returns `config.json` in the layout of its release, before `rope_parameters`."""
    rest = {key: value for key, value in architecture.items() if not key.endswith("_config")}
    text = architecture["text_config"] | layout.get("text", {})
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    if "rope" in layout:
        text["rope_scaling"] = layout["rope"] | {key: value for key, value in rope.items() if key.startswith("mrope")}
    vision = {"vision_config": architecture["vision_config"] | layout["vision"]}
    parts: dict[str, Any] = text if layout.get("is_flat") else {"text_config": text}
    family = family_of(AutoConfig.for_model(**architecture))
    return {**parts, **rest, **layout["config"], **vision, "architectures": [family.model_types[family.model_type]]}


def _write_tokenizer(folder: Path, layout: dict[str, Any]) -> None:
    """Byte-level BPE whose merges are common pairs of letters; made-up words fill the vocabulary below the special tokens."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [pair for a, b in product("tsaoiewcpbdfmrnlhgu", "aeiourntlsh") for pair in ((a, b), (BLANK, a))]
    merges = list(dict.fromkeys(merges))
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    rng, syllables = random.Random(0), ["".join(pair) for pair in product("bcdfghjklmnprstvwz", "aeiou")]
    while len(vocabulary) < FIRST_SPECIAL:
        word = rng.choice((BLANK, "")) + "".join(rng.choices(syllables, k=rng.randint(2, 5)))
        vocabulary.setdefault(word, len(vocabulary))
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.normalizer, made.decoder = normalizers.NFC(), decoders.ByteLevel()
    parts = [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    made.pre_tokenizer = pre_tokenizers.Sequence(parts)
    fixed = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": FIRST_SPECIAL + i, "content": token, **fixed} for i, token in enumerate(layout["tokens"].split())]
    write_json(folder / "tokenizer.json", json.loads(made.to_str()) | {"added_tokens": added})
    template = {"chat_template": (LAYOUTS / layout["template"]).read_text(encoding="utf-8").rstrip("\n")}
    write_json(folder / "chat_template.json", template)
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None, "unk_token": None}
    settings = {"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": False, "model_max_length": 131072, **ends}
    write_json(folder / "tokenizer_config.json", settings | ({} if layout.get("is_template_apart") else template))


def _write_weights(folder: Path, layout: dict[str, Any], device: torch.device) -> int:
    """Writes shards with an index, drawing tensor by tensor on the device."""
    config, dtype = AutoConfig.from_pretrained(folder), getattr(torch, layout["dtype"])
    with torch.device("meta"):
        weights = dict(family_of(config).auto_class.from_config(config, dtype=dtype).named_parameters())
    plan = split_torch_state_dict_into_shards(weights, max_shard_size=SHARD_SIZE)
    generator = torch.Generator(device).manual_seed(0)
    for file, names in plan.filename_to_tensors.items():
        tensors = {_old_name(name, layout["renames"]): _draw(name, weights[name].shape, dtype, generator) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        weight_map = {_old_name(name, layout["renames"]): file for name, file in plan.tensor_to_filename.items()}
        write_json(folder / "model.safetensors.index.json", {"metadata": plan.metadata, "weight_map": weight_map})
    return sum(weight.numel() for weight in weights.values())


def _old_name(name: str, renames: list[list[str]]) -> str:
    for new, old in renames:
        if name.startswith(new):
            return old + name.removeprefix(new)
    return name


def _draw(name: str, shape: torch.Size, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Returns a weight with which activations keep their size from layer to layer."""
    if len(shape) == 1 and "norm" in name and name.endswith("weight"):
        return torch.full(shape, PEAKED if name.endswith("language_model.norm.weight") else 1.0, dtype=dtype)
    std = 0.02
    if len(shape) > 1 and "embed" not in name and "lm_head" not in name:
        std = (0.2 if name.endswith(ADDS) else 0.7) / math.sqrt(math.prod(shape[1:]))
    value = torch.empty(shape, dtype=dtype, device=generator.device)
    for rows in value.view(value.shape[0], -1).split(8192):  # which bounds the memory of drawing in float32
        rows.copy_(torch.randn(rows.shape, generator=generator, device=generator.device).mul_(std))
    return value.cpu()


# -- conversations ------------------------------------------------------------------------------------------------------


def write_photos(folder: Path, count: int) -> None:
    """Writes `photos.jsonl`: conversations of two turns, about images of usual sizes."""
    rng, rows = random.Random(0), []
    for number in range(count):
        image = write_image(folder / "photos" / f"{number:03d}.jpg", PHOTO_SIZES[number % len(PHOTO_SIZES)])
        rows.append(conversation(rng, [{"type": "image", "image": str(image.relative_to(folder))}], turns=2))
    (folder / "photos.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_image(path: Path, size: tuple[int, int]) -> Path:
    """Writes coarse noise, which compresses as photographs do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    small = (max(size[0] // 8, 1), max(size[1] // 8, 1))
    Image.effect_noise(small, 90).resize(size).convert("RGB").save(path, quality=90)
    return path


def conversation(rng: random.Random, parts: list[dict[str, Any]], turns: int = 1) -> dict[str, Any]:
    """Returns a conversation whose first question has these images and videos, and whose answers are random words."""
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        text = {"type": "text", "text": "Say more." if turn else "What is this?"}
        answer = " ".join(rng.choice(WORDS.split()) for _ in range(rng.randint(20, 160)))
        messages.append({"role": "user", "content": [text] if turn else [*parts, text]})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": f"{answer}."}]})
    return {"messages": messages}


def main() -> int:
    parser = new_parser("python -m benchmarks.published", description=__doc__)
    parser.add_argument("name", metavar="NAME", help="a target of conf/target")
    parser.add_argument("folder", metavar="DIR", type=Path)
    parser.add_argument("--photos", type=int, default=0, metavar="N", help="images; default: none")
    parser.add_argument("--small", action="store_true", help="few narrow layers; vocabulary and layout as published")
    add_device_option(parser, "cpu")
    args = parser.parse_args()
    count = build(args.name, args.folder / "target", resolve_device(args.device), args.small)
    if args.photos:
        write_photos(args.folder, args.photos)
    print(f"{args.name}: {count:,} parameters in {args.folder / 'target'}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
