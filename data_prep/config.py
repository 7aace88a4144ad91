"""What a person sets about data: plain dataclasses, usable from a notebook and from a ConfigStore.

Owns: names, defaults, cross-field checks. Every error names the dotted key. Imports no torch, so a command line that
only checks its configuration stays fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum


class OnLong(StrEnum):
    """What to do with an example longer than `max_length`."""

    turn = "turn"  # keep the leading turns that fit, drop the example when not even one does
    cut = "cut"  # as `turn`, but when the first answer is what is too long, keep its beginning
    drop = "drop"


class OnBad(StrEnum):
    """What to do with an item that cannot become an example."""

    error = "error"  # stop, naming file, index and reason
    skip = "skip"  # leave it out, count it, list it in `data.bad_list`


class Cache(StrEnum):
    """What is kept between runs."""

    examples = "examples"  # ready-made examples, pixels included: for data that fits on the disk many times over
    rows = "rows"  # which items are good; their pictures are opened while training


class Split(StrEnum):
    """Parts of the data that never share a picture."""

    train = "train"
    validation = "validation"
    test = "test"


@dataclass(kw_only=True)
class SourceConfig:
    """One source of conversations.

    Attributes:
        kind: a name in `data_prep.sources.KINDS`.
        path: file, folder, or hub name.
        media_root: folder that relative picture paths start from (default: the file's own folder).
        subset: hub configuration name.
        split: split of a hub data set or layout; empty: what the kind calls its training data.
        columns: hub column -> role; see data_prep.sources.hub.
        families: task families to keep; empty: all.
        weight: share of the examples drawn; null: as large as the source is. All sources of a mix or none.
        num_examples: the first so many good ones; 0: all.
        streaming: read on the fly, in order, shuffled within blocks.
        prompt: question asked where the source has none (frame folders, video files).
        long_answers: ask for a detailed explanation where the layout wants one word.
    """

    kind: str = "pocket"
    path: str = ""
    media_root: str = ""
    subset: str = ""
    split: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    families: list[str] = field(default_factory=list)
    weight: float | None = None
    num_examples: int = 0
    streaming: bool = False
    prompt: str = ""
    long_answers: bool = False


@dataclass(kw_only=True)
class DataConfig:
    """All data of a run.

    Attributes:
        name: label in reports.
        sources: training sources by label.
        validation: prompt sources by label; empty: the held-out part of `sources`.
        path, media_root, num_examples: fill in what one of `sources` leaves empty.
        holdout: share of each source kept out of training where `validation` is empty (by picture; the pocket world
            has held-out splits of its own).
        max_length: tokens per example, visual ones included; null: no limit.
        on_long: what to do with longer ones.
        on_bad: what to do with broken ones.
        bad_list: file that lists what was skipped; empty: `skipped.jsonl` in the cache folder of this data.
        cache: what is kept between runs.
        cache_dir: where; empty: `sage-draft` under the user's cache folder.
        num_workers: processes that prepare examples while training; 0: a thread.
        num_frames: frames per clip, at most.
        shuffle_block: streams are shuffled within blocks of so many items.
    """

    name: str = "pocket"
    sources: dict[str, SourceConfig] = field(default_factory=lambda: {"pocket": SourceConfig()})
    validation: dict[str, SourceConfig] = field(default_factory=dict)
    path: str = ""
    media_root: str = ""
    num_examples: int = 0
    holdout: float = 0.01
    max_length: int | None = None
    on_long: OnLong = OnLong.turn
    on_bad: OnBad = OnBad.error
    bad_list: str = ""
    cache: Cache = Cache.rows
    cache_dir: str = ""
    num_workers: int = 0
    num_frames: int = 32
    shuffle_block: int = 256

    def resolved(self, split: Split) -> dict[str, SourceConfig]:
        """The sources that serve a split; those of `sources` with the top-level fallbacks filled in."""
        if self.validation and split != Split.train:
            return self.validation
        return {
            label: replace(
                source,
                path=source.path or self.path,
                media_root=source.media_root or self.media_root,
                num_examples=source.num_examples or self.num_examples,
            )
            for label, source in self.sources.items()
        }


@dataclass(kw_only=True)
class RegenerateConfig:
    """How the target answers its own prompts.

    Attributes:
        draft: folder of the draft that speeds the target up; empty: none. The answers are the same.
        policy: how the draft is used, a name of `sage.POLICIES`.
        temperature: 0 is greedy; `top_k` 0 and `top_p` 1 cut nothing off.
    """

    draft: str = ""
    policy: str = "sage"
    max_new_tokens: int = 512
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def validate(config: DataConfig) -> None:
    """Cross-field checks.

    Raises:
        ValueError: names the dotted key, the value, what is allowed.
    """
    if not config.sources:
        raise ValueError("data.sources: empty; name at least one source, e.g. data=pocket")
    for group, sources in (("sources", config.sources), ("validation", config.validation)):
        for label, source in sources.items():
            _validate_source(f"data.{group}.{label}", source)
    for name in ("path", "media_root"):
        if getattr(config, name) and not any(_takes(source, name) for source in config.sources.values()):
            raise ValueError(f"data.{name}: {getattr(config, name)}; has no effect, no source of data={config.name} takes it")
    _at_least("data.max_length", config.max_length, 2)
    _at_least("data.num_frames", config.num_frames, 1)
    _at_least("data.num_workers", config.num_workers, 0)
    _at_least("data.num_examples", config.num_examples, 0)
    _at_least("data.shuffle_block", config.shuffle_block, 1)
    if not 0 <= config.holdout < 0.5:  # as much again is kept for `test`
        raise ValueError(f"data.holdout: {config.holdout}; allowed: from 0 to below 0.5, a share of each source")
    weights = [source.weight is None for source in config.sources.values()]
    if any(weights) and not all(weights):
        raise ValueError("data.sources: some have a weight and some do not; give a weight to each or to none")
    for group, sources in (("sources", config.sources), ("validation", config.validation)):
        streams = [source.streaming for source in sources.values()]
        if any(streams) and (not all(streams) or config.cache is Cache.examples):
            raise ValueError(f"data.{group}: streaming and prepared sources in one mix; stream all, with data.cache=rows")


def _takes(source: SourceConfig, name: str) -> bool:
    from data_prep.sources import KINDS

    return not getattr(source, name) and name in KINDS[source.kind].heeds


def _validate_source(key: str, source: SourceConfig) -> None:
    from data_prep.sources import KINDS

    if source.kind not in KINDS:
        raise ValueError(f"{key}.kind: {source.kind!r}; allowed: {', '.join(sorted(KINDS))}")
    plain = SourceConfig()
    for name in ("path", "media_root", "subset", "split", "columns", "families", "streaming", "prompt", "long_answers"):
        value = getattr(source, name)
        if value != getattr(plain, name) and name not in KINDS[source.kind].heeds:
            heeds = ", ".join(KINDS[source.kind].heeds)
            raise ValueError(f"{key}.{name}: {value}; has no effect on kind {source.kind}, which heeds {heeds}")
    if source.weight is not None and source.weight <= 0:
        raise ValueError(f"{key}.weight: {source.weight}; allowed: above 0, or null")
    _at_least(f"{key}.num_examples", source.num_examples, 0)


def _at_least(key: str, value: int | None, lowest: int) -> None:
    if value is not None and value < lowest:
        raise ValueError(f"{key}: {value}; allowed: {lowest} or more")
