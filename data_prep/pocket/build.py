"""`python -m data_prep.pocket.build --family qwen2_5_vl --out DIR --seed 0`: trains a pocket target from a seed.

The vision tower first, then short captions, then all task families, then more layers. One process, one thread, bfloat16 matrix
products with float32 weights. Every stage has a fixed number of steps, so that the result depends on the recipe and the seed
alone. The target's folder has a `score.json`: command, seed, score by kind of fact, hash of the weights.

Shapes: B batch, T visual tokens, D hidden.
"""

from __future__ import annotations

import logging
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy, pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import sage
from data_prep.chat import Example, build_example
from data_prep.pocket import architecture, palette, world
from data_prep.pocket.architecture import FAMILIES, WIDTH
from data_prep.pocket.palette import COLOURS, MAX_HEIGHT, SHAPES, SIGNS, SIZES
from data_prep.pocket.score import score_table, score_target
from sage.commands import cli
from sage.inputs.processing import Processor
from sage.io.files import write_json
from sage.io.manifest import sha256
from sage.targets.families import family_of

logger = logging.getLogger(__name__)
BARS = 5
NUM_TOKENS = 16  # of an image
Loss = tuple[torch.Tensor, dict[str, float]]  # with figures for the log
PROBE_LR, WEIGHT_DECAY = 2e-3, 0.01
VISION_SCALE = 0.3  # of the learning rate, for the pretrained vision tower
WARMUP_STEPS, LOG_EVERY = 50, 50
# question -> (number of queries, number of classes); class 0: nothing in this place
QUESTIONS = {
    "colour": (9, 1 + len(COLOURS)),
    "shape": (9, 1 + len(SHAPES)),
    "size": (9, 1 + len(SIZES)),
    "bar": (BARS, 1 + len(COLOURS)),
    "height": (BARS, 1 + MAX_HEIGHT),
    "word": (1, 1 + len(SIGNS)),
    "digits": (2, 11),
    "board": (1, 1 + len(COLOURS)),
}


# -- the vision tower: learned queries attend to its tokens and classify what an image shows -------------------------------


def draw_labelled(rng: random.Random) -> tuple[Image.Image, dict[str, list[int]]]:
    """Draws a training image; returns it with the classes of all questions."""
    labels = {name: [0] * count for name, (count, _) in QUESTIONS.items()}
    ground, kind = palette.background(rng, "train"), rng.random()
    colours = list(COLOURS)
    if kind < 0.5:
        objects = palette.draw_objects(rng, rng.randint(1, 6))
        for obj in objects:
            labels["colour"][obj.cell] = 1 + colours.index(obj.colour)
            labels["shape"][obj.cell] = 1 + SHAPES.index(obj.shape)
            labels["size"][obj.cell] = 1 + list(SIZES).index(obj.size)
        return palette.draw_scene(objects, ground, rng), labels
    if kind < 0.75:
        bars = [(rng.choice(colours), rng.randint(1, MAX_HEIGHT)) for _ in range(rng.randint(3, BARS))]
        for place, (colour, height) in enumerate(bars):
            labels["bar"][place], labels["height"][place] = 1 + colours.index(colour), height
        return palette.draw_chart(bars, ground), labels
    word, number, board = rng.choice(("", *SIGNS)), rng.choice(("", str(rng.randint(10, 99)))), rng.choice(colours)
    labels["word"] = [1 + SIGNS.index(word) if word else 0]
    labels["digits"] = [1 + int(digit) for digit in number] or [0, 0]
    labels["board"] = [1 + colours.index(board)]
    return palette.draw_sign(word, number, board, ground, rng), labels


class Probe(nn.Module):
    """Queries over visual tokens (plus a position embedding with `has_positions`), with a linear classifier per question."""

    def __init__(self, width: int, has_positions: bool, inner: int = 128) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(NUM_TOKENS, inner) * 0.1, requires_grad=has_positions)
        self.has_positions = has_positions
        self.take = nn.Linear(width, inner)
        self.norm = nn.LayerNorm(width)
        self.queries = nn.ParameterDict({name: torch.randn(count, inner) * 0.1 for name, (count, _) in QUESTIONS.items()})
        self.attend = nn.MultiheadAttention(inner, 4, batch_first=True)
        self.answers = nn.ModuleDict({name: nn.Linear(inner, choices) for name, (_, choices) in QUESTIONS.items()})

    def forward(self, tokens_BTD: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns logits [B, queries, classes] by question."""
        keys = self.take(self.norm(tokens_BTD)) + self.has_positions * self.place
        queries = torch.cat(list(self.queries.values())).expand(len(keys), -1, -1)
        seen, _ = self.attend(queries, keys, keys, need_weights=False)
        parts = seen.split([count for count, _ in QUESTIONS.values()], dim=1)
        return {name: self.answers[name](part) for name, part in zip(QUESTIONS, parts, strict=True)}


def probe_loss(logits: dict[str, torch.Tensor], labels: dict[str, torch.Tensor]) -> Loss:
    """Returns the summed loss of the questions and, by question, the accuracy over places with an object."""
    loss, right = torch.zeros(()), {}
    for name, answer in logits.items():
        truth = labels[name]
        something = truth > 0
        # Empty places are easy and common, and weigh a fifth.
        weight = torch.where(something, 1.0, 0.2)
        each = cross_entropy(answer.float().flatten(0, 1), truth.flatten(), reduction="none")
        loss = loss + (2.0 if name == "shape" else 1.0) * (each * weight.flatten()).sum() / weight.sum()
        hits = (answer.argmax(-1) == truth) & something
        right[name] = hits.sum().item() / max(1, something.sum().item())
    return loss, right


def visual_tokens(model: Any, processor: Processor, images: list[Image.Image]) -> torch.Tensor:
    """Returns the visual tokens of images, with the deepstack features that are added to them later: [B, 16, D]."""
    family = family_of(model.config)
    inputs = family.encode_images(processor.image_processor, images)
    [visual] = family.visual_features(model, inputs).values()
    tokens = visual.embeds + sum(layer for extra in visual.extras.values() for layer in extra.unbind(1))
    # The tokens of several LLaVA-OneVision images are each followed by a newline.
    return tokens.view(len(images), -1, tokens.shape[-1])[:, :NUM_TOKENS]


# -- training ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """A number of language modelling steps on a mixture of task families."""

    name: str
    layers: int
    steps: int
    lr: float
    mixture: dict[str, float]
    min_lr_ratio: float = 0.05  # at the end of the cosine


FULL_MIXTURE = {name: float(weight) for name, weight in world.WEIGHTS.items()}
NAMING_MIXTURE = {"bare": 4.0, "compare": 1.0, "sign": 1.0, "chart": 1.0, "question": 1.0}


@dataclass(frozen=True)
class Recipe:
    """The hyper-parameters of a training run."""

    probe_steps: int
    stages: tuple[Stage, ...]
    has_positions: bool  # of the probe; without them, the visual tokens must encode their positions
    num_texts: int = 4000  # conversations for training the tokenizer
    probe_batch_size: int = 48
    batch_size: int = 32
    num_pooled: int = 4  # batches drawn at a time and sorted by length
    is_autocast: bool = True  # bfloat16 matrix products


def stages(naming_steps: int, language_steps: int, deep_steps: int, deep_lr: float = 1e-3, deep: int = 12) -> tuple[Stage, ...]:
    return (
        Stage("naming", 4, naming_steps, 2e-3, NAMING_MIXTURE, min_lr_ratio=0.6),
        Stage("language", 4, language_steps, 2e-3, FULL_MIXTURE, min_lr_ratio=0.1),
        Stage("deep", deep, deep_steps, deep_lr, FULL_MIXTURE, min_lr_ratio=0.02),
    )


RECIPES = {
    "qwen2_5_vl": Recipe(probe_steps=1300, has_positions=True, stages=stages(250, 2000, 550)),
    "qwen3_vl": Recipe(900, stages(200, 3000, 550, deep_lr=1.5e-3), True, batch_size=16, num_pooled=8, is_autocast=False),
    "qwen3_5": Recipe(900, stages(200, 2200, 550, deep_lr=1.5e-3, deep=8), True, batch_size=16, num_pooled=8),
    # Its patches are four times as large: shapes and digits take more steps to learn, but a step is cheap.
    # Its language model has no two-dimensional positions, so the visual tokens must encode their positions.
    "llava_onevision": Recipe(probe_steps=3000, has_positions=False, stages=stages(250, 3000, 900)),
}


def cosine(step: int, stage: Stage) -> float:
    """Returns the learning rate of a step as a share of the highest one."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    angle = math.pi * (step - WARMUP_STEPS) / max(1, stage.steps - WARMUP_STEPS)
    return stage.min_lr_ratio + (1 - stage.min_lr_ratio) * 0.5 * (1 + math.cos(angle))


def vision_parameters(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    inner: Any = model.model
    if hasattr(inner, "visual"):
        return list(inner.visual.parameters())
    return [*inner.vision_tower.parameters(), *inner.multi_modal_projector.parameters()]


def optimize(stage: Stage, groups: list[dict[str, Any]], losses: Iterator[Loss], betas: tuple[float, float]) -> None:
    """Takes the steps of a stage; losses come with figures for the log, groups with a `scale` of their learning rate."""
    optimizer = torch.optim.AdamW(groups, lr=stage.lr, weight_decay=WEIGHT_DECAY, betas=betas)
    start = time.monotonic()
    for step, (loss, figures) in zip(range(stage.steps), losses, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = stage.lr * group["scale"] * cosine(step, stage)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([parameter for group in groups for parameter in group["params"]], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % LOG_EVERY == LOG_EVERY - 1 or step == stage.steps - 1:
            listed = " ".join(f"{figure} {value:.3f}" for figure, value in figures.items())
            spent_s = time.monotonic() - start
            logger.info("%s %d/%d %.0f s loss %.3f %s", stage.name, step + 1, stage.steps, spent_s, loss.item(), listed)


def pretrain_vision(model: PreTrainedModel, processor: Processor, recipe: Recipe, seed: int) -> None:
    torch.manual_seed(seed)
    probe = Probe(WIDTH, recipe.has_positions)
    rng = random.Random(seed)

    def losses() -> Iterator[Loss]:
        while True:
            drawn = [draw_labelled(rng) for _ in range(recipe.probe_batch_size)]
            labels = {name: torch.tensor([label[name] for _, label in drawn]) for name in QUESTIONS}
            with torch.autocast("cpu", torch.bfloat16, enabled=recipe.is_autocast):
                logits = probe(visual_tokens(model, processor, [image for image, _ in drawn]))
            yield probe_loss(logits, labels)

    groups = [{"params": [*vision_parameters(model), *probe.parameters()], "scale": 1.0}]
    optimize(Stage("vision", 0, recipe.probe_steps, PROBE_LR, {}, 0.02), groups, losses(), betas=(0.9, 0.999))


def example_batches(processor: Processor, recipe: Recipe, stage: Stage, seed: int) -> Iterator[list[Example]]:
    """Yields batches of examples of similar length."""
    rng, index = random.Random(seed), 0
    names, weights = list(stage.mixture), list(stage.mixture.values())
    while True:
        pool = []
        for _ in range(recipe.batch_size * recipe.num_pooled):
            conversation = world.sample("train", seed * 10**8 + index, rng.choices(names, weights))
            pool.append(build_example(conversation, processor))
            index += 1
        pool.sort(key=lambda example: len(example["input_ids"]))
        batches = [pool[k : k + recipe.batch_size] for k in range(0, len(pool), recipe.batch_size)]
        rng.shuffle(batches)
        yield from batches


def padded(batch: dict[str, Any]) -> dict[str, Any]:
    """Pads token fields [B, T] to a multiple of 8: few different lengths, for each of which oneDNN prepares its kernels."""
    short = -batch["input_ids"].shape[1] % 8
    fields = ("input_ids", "attention_mask", "loss_mask", "mm_token_type_ids")
    return {key: pad(value, (0, short)) if key in fields else value for key, value in batch.items() if key != "id"}


def answer_loss(model: PreTrainedModel, batch: dict[str, torch.Tensor], recipe: Recipe) -> Loss:
    """Returns the mean cross entropy over supervised tokens and the accuracy of greedy choices."""
    inputs = dict(batch)
    chosen = inputs.pop("loss_mask")[:, 1:]
    with torch.autocast("cpu", torch.bfloat16, enabled=recipe.is_autocast):
        hidden = model.model(**inputs, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, :-1][chosen]).float()
    truth = batch["input_ids"][:, 1:][chosen]
    return cross_entropy(logits, truth), {"right": (logits.argmax(-1) == truth).float().mean().item()}


def run_stage(model: PreTrainedModel, processor: Processor, stage: Stage, recipe: Recipe, seed: int) -> None:
    vision = vision_parameters(model)
    rest = [parameter for parameter in model.parameters() if all(parameter is not other for other in vision)]
    groups = [{"params": rest, "scale": 1.0}, {"params": vision, "scale": VISION_SCALE}]
    batches = (padded(processor.collate(examples)) for examples in example_batches(processor, recipe, stage, seed))
    losses = (answer_loss(model, batch, recipe) for batch in batches)
    optimize(stage, groups, losses, betas=(0.9, 0.98))


def train(family: str, seed: int, recipe: Recipe) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Runs all stages of a recipe; returns the model and its tokenizer."""
    tokenizer = architecture.new_tokenizer(family, recipe.num_texts)
    model = architecture.new_model(family, tokenizer, recipe.stages[0].layers, seed)
    processor = architecture.new_processor(family, tokenizer)
    pretrain_vision(model, processor, recipe, seed)
    for number, stage in enumerate(recipe.stages):
        if model.config.text_config.num_hidden_layers != stage.layers:
            model = architecture.deepen(model, family, tokenizer, stage.layers, seed)
        run_stage(model, processor, stage, recipe, 100 * seed + number + 1)
    return model, tokenizer


def main() -> int:
    parser = cli.new_parser("python -m data_prep.pocket.build", description=__doc__)
    parser.add_argument("--family", required=True, choices=FAMILIES)
    parser.add_argument("--out", required=True, type=Path, help="the target's folder; an existing one is replaced")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    family, seed, folder = options.family, options.seed, options.out
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    # Matrices this small do not benefit from a second thread, and one thread gives the same sums on every machine.
    torch.set_num_threads(1)
    start = time.monotonic()
    architecture.save(*train(family, seed, RECIPES[family]), family, folder)
    wall_s = round(time.monotonic() - start)
    result = score_target(sage.load_target(folder, dtype=torch.float32))  # of the weights rounded to bfloat16
    weights = folder / architecture.WEIGHTS
    facts = {
        "command": f"python -m data_prep.pocket.build --family {family} --out {folder.name} --seed {seed}",
        "family": family, "seed": seed, "wall_s": wall_s, "threads": torch.get_num_threads(),
        "sha256": sha256(weights), "bytes": weights.stat().st_size,
        "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    write_json(folder / "score.json", facts | result)
    print(score_table(result))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
