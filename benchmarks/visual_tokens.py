"""`python -m benchmarks.visual_tokens`: what a draft's visual tokens cost, by compressor (docs/compressor.md).

Counted at the sizes of a published target: operations and bytes, in bf16, for an `eagle` head of one layer, of the first token
without the vision tower, which a draft does not save, and of a round of `LEVELS` levels.

Measured, with `--measure`, at 1,024 and more visual tokens of a pocket target: a picture is repeated in rows and columns. The
pocket Qwen2.5-VL knows those of 16 visual tokens and fails on larger ones: it is adapted first: in attention, R copies of a
token are a single one whose logit is larger by log R (proportional attention, arXiv 2210.09461), so single pictures suffice.
Then all heads are trained on the same batches, and decode under a chain.
"""

from __future__ import annotations

import logging
import math
import random
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

import sage
from benchmarks.figures import counts, fill_blocks
from data_prep.chat import build_example
from data_prep.conversation import Conversation
from data_prep.pocket import architecture, world
from data_prep.pocket.scenes import CAPTION_PROMPTS
from data_prep.pocket.score import score_answer
from sage.bench.report import machine
from sage.commands.cli import new_parser, run
from sage.decoding.answer import Stats
from sage.decoding.generation import CachedPrefix, Generation, start
from sage.drafts.compressor import MODES, Resampler
from sage.io.files import read_json, write_json, write_text
from sage.io.tables import markdown_table
from sage.trees import AUTOREGRESSIVE
from train.config.hydra_app import compose
from train.config.schema import Config
from train.distill.build import fresh_draft, new_student
from train.distill.teacher import Staging, Teacher
from train.job.schedule import learning_rate
from train.plan.memory import MetaModels, build_on_meta, draft_rows

logger = logging.getLogger(__name__)
PAGE = Path(__file__).parents[1] / "docs" / "compressor.md"
FIGURES = PAGE.parent / "results" / "large_pictures.json"
LEVELS = 5
ITEM_BYTES = 2  # bf16
KINDS = ("none", *MODES)
HEAD = ("`draft/compressor`", "first token, %", "round, %")
MEASURED = {  # on a pocket target: figure, and its form
    "draft rows": ("rows", "{:.0f}"),
    "tokens/pass": ("tokens_per_pass", "{:.2f}"),
    "first token (pocket)": ("first_token", "{:.2%}"),
    "draft in a round (pocket)": ("round", "{:.0%}"),
}
FAMILY = "qwen2_5_vl"  # its M-RoPE: a picture of 128 x 128 tokens takes 128 positions
SIDE, TOKENS = 4, 16  # visual tokens of a single picture
ADAPTATION = (80, 16, 1e-3)  # steps, examples of a step, learning rate
STAGES = ((16, 100, 8), (1024, 10, 4))  # of the heads: visual tokens, steps, examples of a step
FAMILIES = ("caption", "question", "sign", "chart")  # with one picture
QUESTIONS, MAX_NEW_TOKENS = CAPTION_PROMPTS[:2], 64


def config_of(target: str, kind: str) -> Config:
    data = ["data=llava_instruct", "data.path=/no/data", "launch.plan=true", "optim.schedule=cosine"]
    return compose("config", [f"target={target}", "draft=eagle", f"draft/compressor={kind}", *data], Config)


def models_of(target: str, kind: str) -> MetaModels:
    """Returns a published target and a head with this compressor, without weights."""
    return build_on_meta(config_of(target, kind))


def counted(models: MetaModels, tokens: int) -> tuple[float, float]:
    """Returns the draft's share of the first token's operations, and its cache's share of a round's bytes.

    Of a prompt, a head of one layer computes keys and values alone (`sage.drafts.layer.LastQuery`).
    """
    target, head = models.target, models.draft.network
    rows, layer = draft_rows(head, tokens, tokens), models.layers_parameters / target.num_layers
    fc, values = 2 * target.hidden_size**2, 2 * target.num_kv_heads * target.head_dim
    pairs = 2 * target.text_config.num_attention_heads * target.head_dim
    attended = [part for part in head.modules() if isinstance(part, Resampler)]  # reads all tokens; the others are cheap
    read = sum(proj.weight.numel() for part in attended for proj in (part.k_proj, part.v_proj))
    draft = 2 * (fc + target.hidden_size * values) * rows + 2 * read * tokens
    text = 2 * models.layers_parameters * tokens + target.num_layers * pairs * tokens**2
    own, weights = values * ITEM_BYTES * rows, (layer + fc + target.vocab_size * target.hidden_size) * ITEM_BYTES
    total = models.read_parameters * ITEM_BYTES + target.num_layers * values * ITEM_BYTES * tokens + LEVELS * (weights + own)
    return draft / (draft + text), LEVELS * own / total


def conversations(first: int, count: int) -> list[Conversation]:
    return [world.sample("train", number, FAMILIES) for number in range(first, first + count)]


def adapt(folder: Path, steps: int, examples: int, rate: float) -> None:
    """Trains the text layers of the shipped target on pictures that count as 1 to 1,024 copies, and saves it to `folder`."""
    shipped = architecture.FAMILIES[FAMILY]
    model: Any = AutoModelForImageTextToText.from_pretrained(shipped, dtype=torch.float32, attn_implementation="eager").train()
    processor: Any = sage.load_target(shipped).processor
    model.model.visual.requires_grad_(False)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    torch.manual_seed(0)
    for step in range(steps):
        batch = processor.collate([build_example(talk, processor) for talk in conversations(10**6 + step * examples, examples)])
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 10) * (1 + math.cos(math.pi * step / steps / 2)) / 2
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.model(**repeated(model, batch, random.Random(step))).last_hidden_state
            chosen = batch["loss_mask"][:, 1:].bool()
            logits = model.lm_head(hidden[:, :-1][chosen]).float()
        loss = torch.nn.functional.cross_entropy(logits, batch["input_ids"][:, 1:][chosen])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        logger.info("adapting the target, step %d of %d: loss %.3f", step + 1, steps, loss.item())
    architecture.save(model, processor.tokenizer, FAMILY, folder)


def repeated(model: Any, batch: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Returns inputs in which each picture counts as k x k copies; a visual token has the position of one of its copies."""
    keys = ("input_ids", "attention_mask", "image_grid_thw", "mm_token_type_ids")
    positions, _ = model.model.get_rope_index(**{key: batch[key] for key in keys})
    ids, is_token = batch["input_ids"], batch["attention_mask"].bool()
    copies = torch.tensor([2 ** rng.randrange(6) for _ in ids])[:, None]
    visual = ids == model.config.image_token_id
    for axis in (1, 2):
        positions[axis] += torch.where(visual, SIDE * (torch.rand(ids.shape) * copies).long(), 0)
    positions += torch.where((visual.cumsum(1) > 0) & ~visual, SIDE * (copies - 1), 0)
    weight = torch.where(visual, 2 * copies.float().log(), 0.0).masked_fill(~is_token, -1e9)
    mask = weight[:, None, None] + torch.full((ids.shape[1],) * 2, -1e9).triu(1)
    given = {key: batch[key] for key in ("input_ids", "pixel_values", "image_grid_thw")}
    return given | {"position_ids": positions, "attention_mask": mask}


def enlarged(target: sage.Target, talk: Conversation, tokens: int) -> Conversation:
    """Returns a conversation whose picture is repeated to so many visual tokens, and lets the image processor accept it."""
    part, copies = talk.messages[0]["content"][0], math.isqrt(tokens // TOKENS)
    picture = part["image"]
    width, height = picture.size
    large = Image.new("RGB", (copies * width, copies * height))
    for place in range(copies**2):
        large.paste(picture, (place % copies * width, place // copies * height))
    images: Any = target.processor and target.processor.image_processor
    pixels = tokens * (images.patch_size * images.merge_size) ** 2
    images.size = {"shortest_edge": pixels, "longest_edge": pixels}
    part["image"] = large
    return talk


def train_heads(target: sage.Target, kinds: Sequence[str], folder: Path, stages: Iterable[tuple[int, int, int]]) -> None:
    """Trains a head per compressor with the objective and the rate of `sage-train`, and saves it to `folder / KIND`.

    All learn from the same batches, which the teacher reads once; every stage has a cosine of its own.
    """
    torch.manual_seed(0)
    configs = {kind: config_of(f"pocket_{FAMILY}", kind) for kind in kinds}
    students = {kind: new_student(fresh_draft(config, target, None), config) for kind, config in configs.items()}
    optim, first = configs[kinds[0]].optim, 0
    groups = [{"params": list(student.draft.parameters())} for student in students.values()]
    optimizer = torch.optim.AdamW(groups, betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=optim.weight_decay)
    teacher, staging, processor = Teacher(target), Staging(target, target.device, target.dtype), target.processor
    assert processor is not None
    for tokens, steps, examples in stages:
        for step in range(steps):
            talks = [enlarged(target, talk, tokens) for talk in conversations(first, examples)]
            first += examples
            pairs = teacher(staging(processor.collate([build_example(talk, processor) for talk in talks])))
            losses = []
            for group, student in zip(optimizer.param_groups, students.values(), strict=True):
                group["lr"] = learning_rate(optim, step, steps)
                loss = student(pairs, teacher.lm_head).loss / pairs.mask.sum()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(group["params"], optim.grad_clip)
                losses.append(f"{loss.item():.3f}")
            optimizer.step()
            optimizer.zero_grad()
            logger.info("%d visual tokens, step %d of %d: losses %s", tokens, step + 1, steps, " ".join(losses))
    for kind, student in students.items():
        student.draft.save_pretrained(folder / kind)


def measure(target: sage.Target, drafts: Mapping[str, Any], tokens: int, pictures: int) -> dict[str, Any]:
    """Decodes `QUESTIONS` about each picture, repeated to so many visual tokens, with every head.

    The target reads a picture once: what is cached of it serves all questions and heads. Each head reads all of it every time.
    """
    found, prefill_s = defaultdict[str, list[Stats]](list), list[float]()
    score, match = Counter[Any](), Counter[str]()
    prefix: CachedPrefix | None = None

    def decoded(draft: Any, policy: Any) -> Generation:
        generation = start(target, draft, inputs, policy, prefix=prefix, keep_prefix=True, max_new_tokens=MAX_NEW_TOKENS)
        deque(generation.rounds(), maxlen=0)
        return generation

    for index in range(pictures):
        talk, prefix = enlarged(target, world.sample("test", index, ["caption"]), tokens), None
        for question in QUESTIONS:
            content = [talk.messages[0]["content"][0], {"type": "text", "text": question}]
            inputs = target.prepare([{"role": "user", "content": content}])
            plain = decoded(None, AUTOREGRESSIVE)
            logger.info("%d visual tokens, picture %d of %d: %s", tokens, index + 1, pictures, plain.output().text)
            score += score_answer(plain.output().text, talk.meta["truth"], [])
            prefill_s += [] if prefix else [plain.stats.time_s["target_prefill"]]
            prefix = plain.prefix()
            for kind, draft in drafts.items():
                drafted = decoded(draft, sage.policy("chain", depth=LEVELS))
                prefix = drafted.prefix()
                found[kind].append(drafted.stats)
                match[kind] += drafted.tokens == plain.tokens
    right = sum(count for (_, is_right), count in score.items() if is_right) / max(1, score.total())
    heads = {kind: figures(stats, median(prefill_s)) | {"match": match[kind]} for kind, stats in found.items()}
    return {"answers": pictures * len(QUESTIONS), "right": right, "prefill_s": median(prefill_s), "heads": heads}


def figures(stats: Sequence[Stats], target_s: float) -> dict[str, float]:
    """Returns the figures of a head, given the seconds of the target's prefill; `round` is the draft's share of its time."""
    passes, draft_s = sum(each.target_passes for each in stats), median(each.time_s["draft_prefill"] for each in stats)
    steps_s, decode_s = sum(each.time_s["draft_steps"] for each in stats), sum(each.decode_s for each in stats)
    return {
        "rows": median(each.draft_context for each in stats),
        "tokens_per_pass": sum(each.new_tokens - 1 for each in stats) / passes,
        "first_token": draft_s / (draft_s + target_s),
        "round": steps_s / decode_s,
    }


def measure_sizes(folder: Path, kinds: Sequence[str], tokens: Sequence[int], pictures: int) -> Iterator[dict[str, Any]]:
    """Yields the figures of each number of visual tokens, for the target and the heads in `folder`, made if missing."""
    if not (folder / "target").exists():
        adapt(folder / "target", *ADAPTATION)
    target = sage.load_target(folder / "target", dtype=torch.float32)
    if not (folder / "heads").exists():
        train_heads(target, kinds, folder / "heads", STAGES)
    drafts = {kind: sage.load_draft(folder / "heads" / kind, target) for kind in kinds}
    for count in tokens:
        yield {str(count): measure(target, drafts, count, pictures) | {"machine": machine("cpu")}}


def table(target: str, tokens: list[int], measured: Mapping[str, Any]) -> str:
    """Returns a row per compressor, whose cells have the figures for each number of tokens, as far as they are measured."""
    rows, sizes = [], {count: measured[str(count)] for count in tokens if str(count) in measured}
    for kind in KINDS:
        models = models_of(target, kind)
        shares = zip(*(counted(models, count) for count in tokens), strict=True)
        cells = [[f"{100 * share:.2f}" for share in each] for each in shares]
        heads = [size["heads"][kind] for size in sizes.values() if kind in size["heads"]]
        for name, form in MEASURED.values():
            cells.append([form.format(head[name]) for head in heads])
        rows.append([f"`{kind}`", *map("/".join, cells)])
    numbers = "/".join(f"{count:,}" for count in tokens)
    note = f"{numbers} visual tokens: the draft's share counted at {target}, of a round that of its cache"
    for count, size in sizes.items():
        note += f"; {count:,}: {size['answers']} answers, {size['right']:.0%} of facts right"
    return f"{markdown_table((*HEAD, *MEASURED), rows, '<>>' + '>' * len(MEASURED))}\n\n{note}"


def main() -> int:
    parser = new_parser("python -m benchmarks.visual_tokens", description=__doc__)
    parser.add_argument("--tokens", metavar="N,N", default="1024,4096,16384", help="visual tokens; default %(default)s")
    parser.add_argument("--shape", metavar="NAME", default="qwen2_5_vl_7b", help="a target of conf/target; default %(default)s")
    parser.add_argument("--page", action="store_true", help=f"write the table into docs/{PAGE.name}")
    parser.add_argument("--measure", metavar="DIR", type=Path, help="measure first, target and heads in DIR, made if missing")
    parser.add_argument("--kinds", metavar="KIND,..", default=",".join(KINDS), help="compressors to measure; default: all")
    parser.add_argument("--pictures", type=int, default=2, help="measured of each size; default %(default)s")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    tokens, figures = counts(args.tokens), read_json(FIGURES) if FIGURES.is_file() else {}
    if args.measure:
        for measured in measure_sizes(args.measure, args.kinds.split(","), tokens, args.pictures):
            figures |= measured
            write_json(FIGURES, figures)
    text = table(args.shape, tokens, figures)
    print(text)
    if args.page:
        write_text(PAGE, fill_blocks(PAGE.read_text(encoding="utf-8"), "table", lambda _: text))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
