"""Small processors and targets of both families: one token per byte, four visual tokens per image, published templates."""

import io
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image
from support.models import (
    EOS,
    IMAGE_TOKEN,
    LLAVA_IDS,
    QWEN_IDS,
    VIDEO_TOKEN,
    llava_config,
    qwen_config,
    random_target,
    text_sizes,
)
from support.processors import byte_tokenizer_of
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import sage
from data_prep.build import build_dataset
from data_prep.chat import encode_example
from data_prep.config import DataConfig, RegenerateConfig, Thinking
from data_prep.conversation import Conversation, Message
from data_prep.dataset.order import MixedOrder
from data_prep.dialog import Dialog, Drive, TargetAnswer
from data_prep.loader import StepLoader
from data_prep.own_answers import OwnShare, measure_own
from data_prep.sources import SourceConfig
from data_prep.tools.actions import regenerate_data
from data_prep.tools.regenerate import skipped_path
from sage.drafts.model import shallow_model
from sage.inputs.processing import Processor
from sage.io.manifest import write_manifest
from sage.targets.families.llava import LlavaOnevision
from sage.targets.families.qwen2_5_vl import Qwen2_5_VL
from train.config.schema import ObjectiveConfig
from train.distill.objective import Objective
from train.distill.student import HeadStudent, ModelStudent, Student
from train.distill.teacher import Teacher

SPECIAL = {"<|endoftext|>": 0, "<|im_end|>": EOS, "<|im_start|>": 2}
MEDIA_TOKENS = {
    "qwen2_5_vl": {"<|image_pad|>": IMAGE_TOKEN, "<|video_pad|>": VIDEO_TOKEN, "<|vision_start|>": 62, "<|vision_end|>": 63},
    "llava_onevision": {"<image>": IMAGE_TOKEN, "<video>": VIDEO_TOKEN},
}
# Qwen2.5-VL adds a system prompt to a conversation without one.
QWEN_TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' -%}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
# LLaVA-OneVision renders images first, a blank after the role, and nothing between turns.
LLAVA_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + ' ' -}}
{%- for part in message.content if part.type == 'image' -%}{{ '<image>' }}{%- endfor -%}
{%- for part in message.content if part.type == 'video' -%}{{ '<video>' }}{%- endfor -%}
{%- for part in message.content if part.type == 'text' -%}{{ '\\n' + part.text }}{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""


def make_processor(family: str, hidden_size: int = 32) -> Processor:
    """Returns a processor: 16 x 16 images are 4 visual tokens (Qwen2.5-VL), 8 x 8 images 4 + 6 (LLaVA-OneVision).

    Its family has the configuration of a target of two layers.
    """
    tokenizer = byte_tokenizer_of(SPECIAL | MEDIA_TOKENS[family], eos="<|im_end|>")
    text = text_sizes(num_hidden_layers=2, hidden_size=hidden_size, max_position_embeddings=2048)
    if family == "qwen2_5_vl":
        images: Any = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=256, max_pixels=256)
        return Processor(tokenizer, images, Qwen2_5_VL(qwen_config(text, QWEN_IDS)), QWEN_TEMPLATE)
    images = LlavaOnevisionImageProcessorPil(
        size={"height": 8, "width": 8}, image_grid_pinpoints=[[8, 8]], image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    return Processor(tokenizer, images, LlavaOnevision(llava_config(text, LLAVA_IDS, [[8, 8]])), LLAVA_TEMPLATE)


def make_image(size: int = 16, colour: str = "red") -> Image.Image:
    return Image.new("RGB", (size, size), colour)


def make_noise(width: int = 64, height: int = 64, deviation: float = 90.0) -> Image.Image:
    """Returns a gray image of seeded noise; `Image.effect_noise` depends on what was drawn before in the process."""
    noise = np.random.default_rng(0).normal(128, deviation, (height, width))
    return Image.fromarray(noise.clip(0, 255).astype(np.uint8)).convert("RGB")


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": [_part(item) for item in content]}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def _part(item: Any) -> dict[str, Any]:
    if isinstance(item, str):
        return {"type": "text", "text": item}
    return {"type": "video", "video": item} if isinstance(item, list) else {"type": "image", "image": item}


def save_images(folder: Path, *names: str) -> None:
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        make_image(16, ("red", "green", "blue", "yellow")[i % 4]).save(folder / name)


def make_target(family: str, hidden_size: int = 32) -> Any:
    """Returns a target of two layers with random weights and the processor of `make_processor`."""
    processor = make_processor(family, hidden_size)
    return random_target(processor.family.config, processor=processor)


def make_student(target: sage.Target, kind: str, **options: Any) -> Student:
    """A student of a new draft, `kind` eagle, eagle3 (with a vocabulary of its own) or model; `options` of its objective."""
    unroll = {"steps": 3} if kind == "eagle3" else {}
    config = ObjectiveConfig(**{"ce_weight": 0.1, "feature_weight": float(kind == "eagle"), **unroll, **options})
    if kind == "model":
        draft = shallow_model(target, 1)
        draft.model.model.requires_grad_(True)
        return ModelStudent(draft, Objective(config))
    levels = {"feature_levels": [0, 1, 2], "vocabulary": torch.arange(50)} if kind == "eagle3" else {}
    return HeadStudent(sage.new_draft(target, kind, seed=0, **levels).requires_grad_(True), Objective(config))


def train_step(target: Any, batch: dict[str, Any]) -> float:
    """Runs a distillation step of a new draft (teacher, draft, objective, gradient); returns the mean loss."""
    objective = Objective(ObjectiveConfig(ce_weight=0.1, feature_weight=1.0, chunk_tokens=64))
    student = HeadStudent(sage.new_draft(target, "eagle"), objective)
    teacher = Teacher(target)
    pairs = teacher(batch)
    loss, *_ = student(pairs, teacher.lm_head)
    mean = loss / pairs.mask.sum()
    mean.backward()
    gradients = [parameter.grad for parameter in student.parameters() if parameter.requires_grad]
    assert all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients)
    return float(mean.detach())


def save_target(family: str, folder: Path, hidden_size: int = 32) -> Path:
    target = make_target(family, hidden_size)
    target.model.save_pretrained(folder)
    target.processor.tokenizer.chat_template = target.processor.chat_template
    target.processor.tokenizer.save_pretrained(folder)
    target.processor.image_processor.save_pretrained(folder)
    return folder


def png(colour: str = "red") -> bytes:
    stream = io.BytesIO()
    make_image(16, colour).save(stream, "PNG")
    return stream.getvalue()


def share_turns(*values: str, roles: tuple[str, ...] = ("human", "gpt")) -> list[dict[str, str]]:
    return [{"from": roles[i % len(roles)], "value": value} for i, value in enumerate(values)]


def save_onevision(path: Path, **columns: list[Any]) -> None:
    """Writes a table with the columns of LLaVA-OneVision-Data."""
    word = datasets.Value("string")
    kinds = {"image": datasets.Image(), "conversations": [{"from": word, "value": word}]}
    features = datasets.Features({name: kinds.get(name, word) for name in columns})
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(columns, features).to_parquet(path)


class Numbers:
    """A dataset whose example i is the token i, in the order of a mixture of sources."""

    def __init__(self, size: int, weights: list[float] | None = None, sources: list[int] | None = None) -> None:
        self.size = size
        self.order = MixedOrder(np.array(sources or [0] * size), weights)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"id": f"n{number}", "input_ids": torch.tensor([number])}

    def epoch(self, seed: int, epoch: int) -> np.ndarray:
        return self.order.epoch(seed, epoch)


def collate_numbers(examples: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [example["input_ids"] for example in examples]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    return {"input_ids": padded, "attention_mask": (padded >= 0).long()}


class TwoTurnConversations:
    """Conversations with an image and two turns; number 3 is invalid."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def conversation(self, number: int) -> Conversation:
        question = user(make_image(8, ("red", "blue")[number % 2]), f"q{number}?")
        messages = [question, assistant("old"), user("more"), assistant("older")]
        return Conversation(f"c{number}", messages[: 3 if number == 3 else 4], "chats", meta={"index": number})


def one_by_one(answer: Callable[[list[Message], int], TargetAnswer]) -> Drive:
    """Returns a source of answers that are a function of messages and seed."""

    def drive(dialogs: Iterator[Dialog]) -> Iterator[Dialog]:
        for dialog in dialogs:
            while (request := dialog.next_request()) is not None:
                dialog.add(answer(*request))
            yield dialog

    return drive


def take(loader: StepLoader, count: int) -> list[list[list[str]]]:
    """Returns the ids of the first steps: [step][micro-batch][example]."""
    steps = iter(loader)
    found = [[batch["ids"] for batch in step] for step in islice(steps, count)]
    steps.close()  # type: ignore[attr-defined]
    return found


def ids_by_step(steps: list[list[list[str]]]) -> list[set[str]]:
    return [{name for micro in step for name in micro} for step in steps]


def content(out: Path) -> dict[str, bytes]:
    """Returns the files that a regeneration has written, by the end of their names."""
    return {path.name.removeprefix(out.name): path.read_bytes() for path in (out, skipped_path(out)) if path.exists()}


def rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a JSON-lines file; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def own_answers(
    target: sage.Target, chats: list[list[Any]], folder: Path, thinking: Thinking = Thinking.auto
) -> tuple[OwnShare, list[int]]:
    """Writes the target's answers to some chats and reads them back; returns how many of their tokens are the target's own
    choice, and these tokens.
    """
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"messages": messages}) for messages in chats))
    config = DataConfig(
        sources={"it": SourceConfig(kind="auto", path=str(folder / "rows.jsonl"))}, holdout=0.0, thinking=thinking
    )
    config.cache_dir, out = str(folder / "cache"), folder / "own.jsonl"
    regenerate_data(config, target, None, RegenerateConfig(max_new_tokens=12), "train", out)
    config.sources["it"].path = str(out)
    dataset = build_dataset(config, target.processor)
    examples = [encode_example(dataset.conversation(i), target.processor) for i in range(len(dataset))]
    ids = torch.cat([example["input_ids"][example["loss_mask"]] for example in examples]).tolist()
    return measure_own(target, (("it", example) for example in examples)), ids


def save_draft(folder: Path, target: sage.Target) -> Path:
    sage.new_draft(target, "eagle", seed=0).save_pretrained(folder)
    return folder


def save_run(folder: Path, target_folder: Path, num_prompts: int = 2) -> Path:
    """What sage-train leaves behind, as far as sage-validate reads it."""
    target = sage.load_target(target_folder)
    write_manifest(save_draft(folder / "draft", target), step=12)
    (folder / "state").mkdir()
    (folder / "config.yaml").write_text(
        f"""
target: {{name: tiny, path: {target_folder}, revision: null, dtype: fp32}}
data:
  name: pocket
  max_length: 777
  sources: {{pocket: {{kind: pocket}}}}
decode:
  policies: [autoregressive, static]
  options: {{static: {{}}, sage: {{max_depth: 5}}}}
  baselines: [hf_generate]
  num_prompts: {num_prompts}
  max_new_tokens: 6
  traces: 0
""",
        encoding="utf-8",
    )
    return folder
