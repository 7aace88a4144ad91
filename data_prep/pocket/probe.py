"""Pretraining of the vision tower, before the language model is trained.

Learned queries attend to the visual tokens and classify the object in each place of a scene, the colour and height of each bar,
and the letters of a sign. Only the tower is kept.

Shapes: B batch, T visual tokens, D hidden.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy

from data_prep.pocket.palette import COLOURS, MAX_HEIGHT, SHAPES, SIGNS, SIZES, background, draw_chart, draw_scene, draw_sign
from data_prep.pocket.scenes import draw_objects
from sage.inputs.processing import Processor
from sage.targets.families import family_of

BARS = 5
NUM_TOKENS = 16  # of an image
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


def draw_labelled(rng: random.Random) -> tuple[Image.Image, dict[str, list[int]]]:
    """Draws a training image; returns it with the classes of all questions."""
    labels = {name: [0] * count for name, (count, _) in QUESTIONS.items()}
    ground, kind = background(rng, "train"), rng.random()
    colours = list(COLOURS)
    if kind < 0.5:
        objects = draw_objects(rng, rng.randint(1, 6))
        for obj in objects:
            labels["colour"][obj.cell] = 1 + colours.index(obj.colour)
            labels["shape"][obj.cell] = 1 + SHAPES.index(obj.shape)
            labels["size"][obj.cell] = 1 + list(SIZES).index(obj.size)
        return draw_scene(objects, ground, rng), labels
    if kind < 0.75:
        bars = [(rng.choice(colours), rng.randint(1, MAX_HEIGHT)) for _ in range(rng.randint(3, BARS))]
        for place, (colour, height) in enumerate(bars):
            labels["bar"][place], labels["height"][place] = 1 + colours.index(colour), height
        return draw_chart(bars, ground), labels
    word, number, board = rng.choice(("", *SIGNS)), rng.choice(("", str(rng.randint(10, 99)))), rng.choice(colours)
    labels["word"] = [1 + SIGNS.index(word) if word else 0]
    labels["digits"] = [1 + int(digit) for digit in number] or [0, 0]
    labels["board"] = [1 + colours.index(board)]
    return draw_sign(word, number, board, ground, rng), labels


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


def probe_loss(logits: dict[str, torch.Tensor], labels: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
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
    inputs, _ = family.encode_images(processor.image_processor, images)
    [visual] = family.visual_features(model, inputs).values()
    tokens = visual.embeds + sum(layer for extra in visual.extras.values() for layer in extra.unbind(1))
    # The tokens of several LLaVA-OneVision images are each followed by a newline.
    return tokens.view(len(images), -1, tokens.shape[-1])[:, :NUM_TOKENS]
