"""The data of a run in its plan: number of examples, invalid items, examples that are too long, and padding.

The run reuses what is prepared here from the cache. For padding, its loader divides examples that have lengths only.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from huggingface_hub import try_to_load_from_cache

from data_prep.build import build_dataset, long_examples, open_sources
from data_prep.chat import Fit, Lengths
from data_prep.config import MAX_DROPPED, Answers, Cache, DataConfig, check_paths
from data_prep.dataset.dataset import Preparation, measure_preparation
from data_prep.dataset.order import permutation
from data_prep.loader import StepLoader
from data_prep.own_answers import is_quickly_measured
from data_prep.sources import KINDS, Content
from data_prep.sources.base import Split
from data_prep.sources.files import is_hub_name
from data_prep.tools.actions import measure_own_answers
from sage.commands.cli import resolve_device
from sage.inputs.video import Size
from sage.targets.loading import load_processor
from train.config.schema import Config, Device
from train.plan.memory import Extent

logger = logging.getLogger(__name__)
NUM_STEPS = 16  # that are simulated
NUM_OWN = 16  # examples of which own answers are measured
ANSWERS = {
    Answers.given: "as given; the first steps of the run measure how many of their tokens are the target's own choice",
    Answers.target: "the target's own, generated before the first step and kept (data.answers=target)",
}


@dataclass(frozen=True)
class Balance:
    """The tokens of simulated steps."""

    mean_tokens: float  # per example
    real_share: float  # of the tokens with padding
    efficiency: float  # tokens by ranks x the padded tokens of the fullest rank, in each step or pass of a sharded target


@dataclass(frozen=True)
class DataPlan:
    """The data of a run; None stands for what is unknown, because the data were not opened or have no lengths."""

    num_examples: int | None  # for training
    rows: list[tuple[str, str]]  # name and text of each line of the plan
    balance: Balance | None = None
    extent: Extent | None = None
    preparation: Preparation | None = None  # the time of images; None without any
    pixels: Size | None = None  # the fewest and the most of an image (`InputFormat.pixel_limits`)
    dropped_share: float = 0.0  # of the examples, because they are too long
    refusal: str = ""  # why the run would not start


def plan_data(config: Config, ranks: int) -> DataPlan:
    """Opens the data if they and the target's tokenizer are on this machine; an error becomes a line of the plan."""
    folder: Any = os.path.expanduser(config.target.path)
    if not os.path.isdir(folder):
        file = try_to_load_from_cache(config.target.path, "preprocessor_config.json")
        folder = os.path.dirname(file) if isinstance(file, str) else None
    reason = _unopened(config) or ("" if folder else "the tokenizer of the target is not on this machine")
    if reason:
        return DataPlan(None, [("not opened", reason)])
    data = replace(config.data, cache=Cache.rows)
    try:
        check_paths(data)
        dataset = build_dataset(data, load_processor(folder), "train")
        is_trusted = all(source.is_trusted for source in open_sources(data, Split.train))
        long = None if is_trusted else long_examples(data, dataset)
        preparation = None if is_trusted else measure_preparation(dataset)
        answers = _answers(config, dataset, folder)
    except (ValueError, OSError) as error:
        return DataPlan(None, [("error", " ".join(str(error).split()))])
    names = ", ".join(source.path or source.kind for source in data.resolved(Split.train).values())
    examples = f"{len(dataset):,} for training in {names}"
    if not long or not long.num_measured:
        return DataPlan(len(dataset), [("examples", examples), ("answers", answers)])
    lengths = dataset.full_lengths()
    return DataPlan(
        len(dataset),
        [("examples", examples), ("lengths", long.line()), ("answers", answers)],
        balance_of(lengths[:, 0], config, ranks),
        extent_of(lengths, config.data, preparation is not None),
        preparation,
        dataset.processor.family.pixel_limits(dataset.processor.image_processor),
        long.dropped_share,
        long.refusal(MAX_DROPPED),
    )


def extent_of(lengths: np.ndarray, data: DataConfig, has_images: bool) -> Extent | None:
    """Returns the extent of the examples that are kept, from their `Lengths`, int [N, 3]; None if none is.

    Prompts before the first answer count as visual where examples have images.
    """
    kept = [row for row in map(Lengths._make, lengths.tolist()) if row.fit(data.max_length, data.on_long) is not Fit.dropped]
    if not kept:
        return None
    limit = data.max_length or max(row.total for row in kept)
    longest = min(limit, max(row.total for row in kept))
    visual = max(row.prompt for row in kept) if has_images else 0
    return Extent(longest, visual, max(min(limit, row.total) - row.prompt for row in kept))


def _answers(config: Config, dataset: Any, folder: str) -> str:
    """Returns whose the answers are; measures how many of their tokens are the target's own choice if it loads quickly."""
    if config.data.answers is Answers.target or not is_quickly_measured(folder):
        return ANSWERS[config.data.answers]
    device = resolve_device("cpu" if config.launch.device is Device.cpu else "auto")
    target = config.target.load(device)
    own = measure_own_answers(dataset, target, Split.train, NUM_OWN)
    if own.is_foreign:
        logger.warning("%s", own.warning())
    return f"as given; {own.line()}"


def _unopened(config: Config) -> str:
    """Returns why the data are not opened, empty if they can be."""
    for label, source in config.data.resolved(Split.train).items():
        content = KINDS[source.kind].content
        if content is not Content.none and not source.path:
            return f"data.path is not given for source {label}"
        if source.streaming or is_hub_name(source.kind, source.path):
            return f"{source.path} is on the hub"
    return ""


# -- padding and balance -----------------------------------------------------------------------------------------------


def balance_of(lengths: np.ndarray, config: Config, ranks: int) -> Balance:
    """Simulates `NUM_STEPS` steps of examples whose lengths are drawn from `lengths`, int [N]; longer ones are shortened."""
    drawn = np.random.default_rng(config.seed).choice(lengths, NUM_STEPS * config.train.global_batch_size)
    drawn = np.minimum(drawn, config.data.max_length or drawn.max())
    by_rank = [_padded_tokens(drawn, config, rank, ranks) for rank in range(ranks)]
    steps = [np.array(step) for step in zip(*by_rank, strict=True)]  # each [ranks, micro-batches]
    waits = [step if config.deepspeed.shard_target else step.sum(-1, keepdims=True) for step in steps]
    critical = ranks * sum(int(wait.max(0).sum()) for wait in waits)
    padded = sum(int(step.sum()) for step in steps)
    return Balance(float(drawn.mean()), float(drawn.sum() / padded), float(drawn.sum() / critical))


def _padded_tokens(lengths: np.ndarray, config: Config, rank: int, ranks: int) -> list[list[int]]:
    """Returns the tokens with padding of a rank's micro-batches, by step."""
    train = config.train
    loader = StepLoader(
        _Examples(lengths),
        lambda examples: {},
        train.global_batch_size,
        train.micro_batch_size,
        rank,
        ranks,
        config.seed,
        length_window=train.length_window,
        micro_batch_tokens=train.micro_batch_tokens,
    )
    return [[len(batch) * max(lengths[batch]) for batch in loader.micro_batches_of(step)] for step in range(NUM_STEPS)]


@dataclass
class _Examples:
    """Examples that have a length and no content."""

    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    def epoch(self, seed: int, epoch: int) -> np.ndarray:
        return permutation(len(self), seed, epoch)
