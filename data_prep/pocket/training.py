"""Trains a pocket target from its seed: first seeing, then short captions, then everything, then depth.

One process, one thread, bfloat16 matrix products over float32 weights. Every stage is a fixed number of steps, so
the result depends on the plan and the seed, not on the machine's speed.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data_prep.pocket import architecture, world
from data_prep.pocket.batches import Encoder, Example, collate, pixels
from data_prep.pocket.probe import Probe, draw_labelled, probe_loss, visual_tokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stage:
    """Some steps of language modelling on a mixture of families."""

    name: str
    layers: int
    steps: int
    lr: float
    mixture: dict[str, float]
    vision_scale: float = 0.3  # of the learning rate, for the tower that the probe has already taught
    warm_up: int = 50
    floor: float = 0.05  # of the learning rate, at the end of the cosine


EVERYTHING = {name: float(weight) for name, weight in world.WEIGHTS.items()}


NAMES = {"bare": 4.0, "compare": 1.0, "sign": 1.0, "chart": 1.0, "question": 1.0}


@dataclass(frozen=True)
class Plan:
    """All numbers of a training run."""

    probe_steps: int
    stages: tuple[Stage, ...]
    tells_places: bool  # whether the probe knows each token's place, or the tower must write it into the token
    texts: int = 4000  # conversations the tokenizer is trained on
    probe_batch: int = 48
    probe_lr: float = 2e-3
    batch: int = 32
    pool: int = 4  # batches drawn at a time and sorted by length
    weight_decay: float = 0.01
    log_every: int = 50


PLANS = {
    "qwen2_5_vl": Plan(
        probe_steps=1300,
        tells_places=True,
        stages=(
            Stage("name", 4, 250, 2e-3, NAMES, floor=0.6),
            Stage("talk", 4, 2000, 2e-3, EVERYTHING, floor=0.1),
            Stage("deep", 12, 550, 1e-3, EVERYTHING, floor=0.02),
        ),
    ),
    # Its patches are four times as large: they need longer to tell shapes and digits apart, but a step is cheap.
    # Its language model has no two-dimensional positions, so the tokens themselves must say where they are.
    "llava_onevision": Plan(
        probe_steps=3000,
        tells_places=False,
        stages=(
            Stage("name", 4, 250, 2e-3, NAMES, floor=0.6),
            Stage("talk", 4, 3000, 2e-3, EVERYTHING, floor=0.1),
            Stage("deep", 12, 900, 1e-3, EVERYTHING, floor=0.02),
        ),
    ),
}


def world_texts(count: int) -> list[str]:
    """Everything said in the first `count` training conversations."""
    talks = (world.sample("train", index).messages for index in range(count))
    return [part["text"] for talk in talks for message in talk for part in message["content"] if part["type"] == "text"]


def probe_batches(plan: Plan, seed: int) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    rng = random.Random(seed)
    while True:
        drawn = [draw_labelled(rng) for _ in range(plan.probe_batch)]
        labels = {name: torch.tensor([label[name] for _, label in drawn]) for name in drawn[0][1]}
        yield torch.from_numpy(pixels([picture for picture, _ in drawn])), labels


def cosine(step: int, steps: int, warm_up: int, floor: float) -> float:
    """Share of the learning rate at a step."""
    if step < warm_up:
        return (step + 1) / warm_up
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def vision_parameters(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    inner: Any = model.model
    if hasattr(inner, "visual"):
        return list(inner.visual.parameters())
    return [*inner.vision_tower.parameters(), *inner.multi_modal_projector.parameters()]


def teach_seeing(model: PreTrainedModel, family: str, plan: Plan, seed: int) -> None:
    """Train the vision tower against the probe's questions."""
    torch.manual_seed(seed)
    probe = Probe(architecture.WIDTH, 16, plan.tells_places)
    parameters = [*vision_parameters(model), *probe.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=plan.probe_lr, weight_decay=plan.weight_decay)
    start = time.monotonic()
    for step, (pictures, labels) in zip(range(plan.probe_steps), probe_batches(plan, seed), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = plan.probe_lr * cosine(step, plan.probe_steps, 50, 0.02)
        with torch.autocast("cpu", torch.bfloat16):
            logits = probe(visual_tokens(model, family, pictures))
        loss, right = probe_loss(logits, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % plan.log_every == 0 or step == plan.probe_steps - 1:
            shares = " ".join(f"{name} {share:.2f}" for name, share in right.items())
            logger.info(
                "seeing %d/%d %.0f s loss %.2f %s",
                step,
                plan.probe_steps,
                time.monotonic() - start,
                loss.item(),
                shares,
            )


def example_batches(encoder: Encoder, plan: Plan, stage: Stage, seed: int) -> Iterator[list[Example]]:
    """Batches of examples of similar length."""
    rng, index = random.Random(seed), 0
    names, weights = list(stage.mixture), list(stage.mixture.values())
    while True:
        pool = []
        for _ in range(plan.batch * plan.pool):
            pool.append(encoder(world.sample("train", seed * 10**8 + index, rng.choices(names, weights))))
            index += 1
        pool.sort(key=lambda example: len(example["ids"]))
        batches = [pool[k : k + plan.batch] for k in range(0, len(pool), plan.batch)]
        rng.shuffle(batches)
        yield from batches


def answer_loss(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross entropy over supervised tokens, and the share of them that the model would have chosen."""
    inputs = dict(batch)
    chosen = inputs.pop("loss_mask")[:, 1:]
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(**inputs, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, :-1][chosen]).float()
    truth = batch["input_ids"][:, 1:][chosen]
    return cross_entropy(logits, truth), (logits.argmax(-1) == truth).float().mean()


def run_stage(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, family: str, stage: Stage, plan: Plan, seed: int
) -> None:
    """Language modelling for the steps of one stage."""
    seen = {id(parameter) for parameter in vision_parameters(model)}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in seen]
    groups = [{"params": rest, "scale": 1.0}, {"params": vision_parameters(model), "scale": stage.vision_scale}]
    optimizer = torch.optim.AdamW(groups, lr=stage.lr, weight_decay=plan.weight_decay, betas=(0.9, 0.98))
    batches = example_batches(Encoder(tokenizer, family), plan, stage, seed)
    start, recent = time.monotonic(), []
    for step, examples in zip(range(stage.steps), batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = stage.lr * group["scale"] * cosine(step, stage.steps, stage.warm_up, stage.floor)
        loss, right = answer_loss(model, collate(examples, family, tokenizer))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent.append((loss.item(), right.item()))
        if step % plan.log_every == plan.log_every - 1 or step == stage.steps - 1:
            mean_loss, mean_right = np.mean(recent, axis=0)
            recent.clear()
            spent = time.monotonic() - start
            logger.info("%s %d/%d %.0f s loss %.3f right %.3f", stage.name, step + 1, stage.steps, spent, mean_loss, mean_right)
