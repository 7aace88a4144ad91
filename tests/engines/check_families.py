"""Serves drafts for targets of every family with vLLM and compares it with our decoder: `make engines-families` runs this.

Each family has a small random target and an `eagle3` draft, trained on the target's own answers until some of its tokens are
accepted. Its export is served by vLLM (float32, greedy, `DEPTH` drafted tokens per round) and compared with our policy `chain`
of the same depth: the same token ids and rounds for every prompt, acceptance by position within the tolerance of
check_exports.py. Prompts of a family with images have one each, and vLLM's drafting after images is corrected
(`train.serve_check.vllm_worker`).

Evidence for `Family.served_by`: it names vLLM only where this check passes.

    python tests/engines/check_families.py --engine-python .venv-engines/bin/python [--only NAME ...]
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from check_exports import Engine, Row, conclude, new_parser

import sage
from checkpoints.export.exporter import export
from checkpoints.export.formats.registry import find_format
from checkpoints.export.result import ExportOptions
from data_prep.conversation import Conversation
from data_prep.pocket import world
from sage.bench.measurement import BenchPrompt
from sage.io.machine import available_cores, pin
from sage.targets.families import FAMILIES
from train.config.schema import ObjectiveConfig
from train.distill.objective import Objective
from train.distill.student import HeadStudent
from train.distill.teacher import Teacher
from train.serve_check.acceptance import Answers, decode_chain
from train.serve_check.prompts import PROMPTS_FILE, write_prompts
from train.serve_check.vllm_process import EngineSetting

POCKET = Path(__file__).resolve().parents[2] / "data_prep" / "pocket" / "targets" / "pocket_qwen2_5_vl"
IMAGE_SIDE = 128  # pixels
NUM_PROMPTS, MAX_NEW_TOKENS, DEPTH = 8, 48, 3
TRAIN_PROMPTS, STEPS, BATCH, LR = 32, 80, 8, 3e-3
EMBEDDING_STD = 0.5
SPECIAL_IDS = range(1024, 1030)  # of the pocket tokenizer

TEXT = {
    "vocab_size": 1030,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1025,
    "pad_token_id": 0,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
}
SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 64}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 10, 10], "mrope_interleaved": True}
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
VISION = {"depth": 4, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "patch_size": 16, "out_hidden_size": 128}
VISION |= {"num_position_embeddings": 64, "deepstack_visual_indexes": (0, 1, 2)}
IDS = {"vision_start_token_id": 1026, "vision_end_token_id": 1027, "image_token_id": 1028, "video_token_id": 1029}


def llama() -> Any:
    """Llama 3 with scaled rope."""
    return transformers.LlamaConfig(**TEXT, head_dim=64, rope_parameters=SCALED)


def qwen3() -> Any:
    return transformers.Qwen3Config(**TEXT, head_dim=64)


def qwen2() -> Any:
    return transformers.Qwen2Config(**TEXT)


def qwen3_vl() -> Any:
    """Three deepstack layers, between which the draft's first feature level lies."""
    text = {**TEXT, "head_dim": 64, "rope_parameters": MROPE}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=VISION, tie_word_embeddings=False, **IDS)


def mistral() -> Any:
    return transformers.MistralConfig(**TEXT, head_dim=64, sliding_window=None)


def qwen3_moe() -> Any:
    return transformers.Qwen3MoeConfig(**TEXT, head_dim=64, **EXPERTS)


CONFIGS: dict[str, Callable[[], Any]] = {one.__name__: one for one in (llama, qwen3, qwen2, qwen3_vl, mistral, qwen3_moe)}


def main() -> int:
    """Builds, trains, exports, serves and compares; returns 0 if all checks pass."""
    parser = new_parser(__doc__, list(CONFIGS))
    parser.add_argument("--scratch", type=Path, help="folder of targets, exports and logs, kept; default: a temporary one")
    args = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = args.scratch or Path(temporary)
        rows = check(args.only or list(CONFIGS), scratch, args.engine_python)
    return conclude("families", ["target"], rows, begin)


def check(names: Sequence[str], scratch: Path, python: Path) -> list[Row]:
    """Prepares one family after the other on the first core; vLLM serves them on the last one meanwhile."""
    cores = available_cores()
    torch.set_num_threads(1)
    served = []
    with Engine(scratch, python, cores[-1], MAX_NEW_TOKENS) as engine, ThreadPoolExecutor(1) as threads:
        pin(0, cores[:1])
        for name in names:
            begin = time.monotonic()
            prepared = prepare(name, scratch / name)
            print(f"prepared {name}: {time.monotonic() - begin:.0f} s", flush=True)
            served.append(threads.submit(serve, engine, prepared))
        return [future.result() for future in served]


@dataclass(frozen=True)
class Prepared:
    """A target and the export of a draft in `folder`, and our decoder's answers."""

    name: str
    folder: Path
    ours: Answers
    has_images: bool


def prepare(name: str, folder: Path) -> Prepared:
    """Builds the target, trains its draft on its own answers, exports it, and decodes the prompts."""
    target = build_target(name, folder / "target")
    draft = train_draft(target, folder)
    draft.save_pretrained(folder / "draft")
    options = ExportOptions(target=str(folder / "target"), dtype=torch.float32, allow_unserved=True)
    export(folder / "draft", folder / "export", "eagle3", options)
    prompts, _ = write_prompts(target, questions(_kind(target), "test", NUM_PROMPTS), folder)
    ours = decode_chain(target, draft.eval(), prompts, DEPTH, MAX_NEW_TOKENS)
    return Prepared(name, folder, ours, bool(target.family.placeholders))


def build_target(
    name: str, folder: Path, files: Path = POCKET, save_processors: Callable[[Path], None] | None = None
) -> sage.Target:
    """Saves a random target with the tokenizer of a pocket target and image processors, and loads it."""
    config = CONFIGS[name]()
    torch.manual_seed(0)
    model = getattr(transformers, FAMILIES[config.model_type].model_types[config.model_type])(config)
    model.get_input_embeddings().weight.data.normal_(std=EMBEDDING_STD)  # the next token depends mostly on the last one
    model.lm_head.weight.data[list(SPECIAL_IDS)] = 0  # never generated, as in a trained model
    model.save_pretrained(folder)
    for file in ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(files / file, folder)
    if FAMILIES[config.model_type].placeholders:
        (save_processors or save_processor)(folder)
    return sage.load_target(folder, dtype=torch.float32)


def save_processor(folder: Path) -> None:
    """Saves processors of Qwen3-VL: every image has 128 x 128 pixels, which are 16 visual tokens."""
    pixels = IMAGE_SIDE**2
    sizes = {"patch_size": 16, "size": {"shortest_edge": pixels, "longest_edge": pixels}, "processor_class": "Qwen3VLProcessor"}
    for file, more in (
        ("preprocessor_config.json", {"min_pixels": pixels, "max_pixels": pixels}),
        ("video_preprocessor_config.json", {"video_processor_type": "Qwen3VLVideoProcessor"}),
    ):
        stored = json.loads((POCKET / file).read_text())
        for key in ("min_pixels", "max_pixels"):
            del stored[key]
        (folder / file).write_text(json.dumps({**stored, **sizes, **more}))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen3VLProcessor"}))


def questions(kind: str, split: str, count: int) -> list[Conversation]:
    """Returns first questions of a kind of the pocket world: `text`, or `question` about an image."""
    talks = [world.sample(split, index, [kind]) for index in range(count)]
    return [replace(talk, id=f"{talk.id}-{kind}", family=kind, messages=talk.messages[:1]) for talk in talks]


def _kind(target: sage.Target) -> str:
    return "question" if target.family.placeholders else "text"


def train_draft(target: sage.Target, folder: Path) -> Any:
    """Trains an EAGLE-3 draft on the target's answers to training prompts."""
    draft: Any = sage.new_draft(target, "eagle3", seed=0, image_inputs="token")
    objective = ObjectiveConfig(ce_weight=1.0, feature_weight=0.0, steps=DEPTH)
    rows = answers_to(target, questions(_kind(target), "train", TRAIN_PROMPTS), folder / "training")
    train(target, HeadStudent(draft, Objective(objective)), rows, STEPS)
    return draft


def train(target: sage.Target, student: Any, rows: Sequence[dict[str, Any]], steps: int) -> None:
    """Trains the draft of a student on `rows`."""
    teacher = Teacher(target, "token", student.draft.levels, student.draft.token_map)
    student.train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=LR, weight_decay=0.0)
    for step in range(steps):
        chosen = [rows[(step * BATCH + place) % len(rows)] for place in range(BATCH)]
        pairs = teacher(target.processor.collate(chosen))
        loss, *_ = student(pairs, teacher.lm_head)
        optimizer.zero_grad()
        (loss / pairs.mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()


def answers_to(target: sage.Target, prompts: Sequence[Conversation], folder: Path) -> list[dict[str, Any]]:
    """Returns training examples: prompts with the target's answers; `folder` receives their images."""
    folder.mkdir()
    return [answered(target, prompt) for prompt in write_prompts(target, prompts, folder)[0]]


def answered(target: sage.Target, prompt: BenchPrompt) -> dict[str, Any]:
    """Returns a training example: a prompt with the target's greedy answer, which is supervised."""
    inputs = prompt.inputs
    answer = sage.generate(target, None, inputs, "autoregressive", max_new_tokens=MAX_NEW_TOKENS).tokens
    question = inputs["input_ids"][0]
    ids = torch.cat((question, answer))
    row = {key: value for key, value in inputs.items() if key in target.family.pixel_keys}
    tokens = {key: value[0] for key, value in target.family.token_inputs(ids[None]).items()}
    return {"input_ids": ids, "loss_mask": torch.arange(len(ids)) >= len(question), **tokens, **row}


def serve(engine: Engine, prepared: Prepared) -> Row:
    """Serves a family's export."""
    begin, folder = time.monotonic(), prepared.folder
    setting = EngineSetting(
        target=str(folder / "target"),
        draft=folder / "export",
        depth=DEPTH,
        speculative=find_format("eagle3").vllm_options,
        max_model_len=1024,
        is_compiled=False,
        corrects_slots=prepared.has_images,
    )
    row = Row([prepared.name], prepared.ours, engine.trace(setting, folder / PROMPTS_FILE))
    print(f"served {prepared.name}: {time.monotonic() - begin:.0f} s; {' | '.join(row.cells()[1:])}", flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
