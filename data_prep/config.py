"""The `data` and `regenerate` settings: dataclasses with their defaults and cross-field checks.

Every error names the dotted key. Imports neither torch nor Hydra: the same classes serve a notebook and a ConfigStore, and a
command that only checks its configuration stays fast. Does not own: the options of each source kind (data_prep.sources.KINDS).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from data_prep.splits import Split, check_shares

KEY_VARIABLE = "OPENAI_API_KEY"  # as OpenAI's own clients name it


class OnLong(StrEnum):
    """Handling of an example longer than `max_length`."""

    turn = "turn"  # keep the leading turns that fit; drop the example if the first does not
    cut = "cut"  # as `turn`, but keep the beginning of a first answer that does not fit
    drop = "drop"


class OnBad(StrEnum):
    """Handling of an item that cannot become an example."""

    error = "error"  # stop with file, index and reason
    skip = "skip"  # skip and count the item, and list it in `data.bad_list`


class Images(StrEnum):
    """How a server receives images."""

    inline = "inline"  # in the request, as data URLs
    path = "path"  # as file:// URLs, for a server that reads the same files (vLLM: --allowed-local-media-path)


class Cache(StrEnum):
    """Content of the cache folder."""

    examples = "examples"  # encoded examples with pixels: for data sets much smaller than the disk
    rows = "rows"  # the index of valid items; images are opened while training


@dataclass(kw_only=True)
class SourceConfig:
    """One source of conversations.

    Attributes:
        kind: a name in `data_prep.sources.KINDS`.
        path: file, folder, or hub name.
        media_root: base folder of relative image and video paths (default: the folder of the file).
        subset: hub configuration name.
        split: split of a hub data set; empty: the training split (prompt sets: the test split).
        columns: role -> column of a table; see data_prep.sources.hub.
        families: task families to keep; empty: all.
        weight: share of the examples of an epoch; null: proportional to the size of the source. All sources or none.
        num_examples: number of valid items to keep, from the first on; 0: all.
        streaming: read on the fly, in order, shuffled within blocks.
        prompt: question for sources that have none (folders of images and videos).
        long_answers: request a detailed explanation in place of a one-word answer.
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
        validation: prompt sources by label, with the keys of `sources`; empty: the held-out part of `sources`.
        path, media_root, num_examples: default of this key for every one of `sources` that leaves it empty.
        holdout: share of the images (or texts) that are validation prompts instead of training examples where `validation`
            is empty; at least one. The pocket world has splits of its own.
        test_holdout: share that is kept for a test split and used by neither training nor validation.
        max_length: tokens per example, visual tokens included; null: no limit.
        on_long: handling of longer examples.
        on_bad: handling of items that cannot become an example.
        bad_list: file that lists the skipped items; empty: `skipped.jsonl` in the cache folder of this data.
        cache: content of the cache folder.
        cache_keep: number of data sets whose cached examples are kept, the most recently used ones; null: all.
        cache_dir: the cache folder; empty: `sage-draft` in the user's cache folder.
        num_workers: processes that prepare examples while training; 0: a thread.
        num_frames: maximum number of frames per video.
        shuffle_block: items per block within which a stream is shuffled.
    """

    name: str = "pocket"
    sources: dict[str, SourceConfig] = field(default_factory=lambda: {"pocket": SourceConfig()})
    validation: dict[str, SourceConfig] = field(default_factory=dict)
    path: str = ""
    media_root: str = ""
    num_examples: int = 0
    holdout: float = 0.01
    test_holdout: float = 0.0
    max_length: int | None = None
    on_long: OnLong = OnLong.turn
    on_bad: OnBad = OnBad.error
    bad_list: str = ""
    cache: Cache = Cache.rows
    cache_dir: str = ""
    cache_keep: int | None = 8
    num_workers: int = 0
    num_frames: int = 32
    shuffle_block: int = 256

    def resolved(self, split: Split) -> dict[str, SourceConfig]:
        """Returns the sources of a split by label: `~` expanded, the top-level defaults filled in for those of `sources`."""
        is_prompts = bool(self.validation) and split != Split.train
        defaults = DataConfig() if is_prompts else self
        return {
            label: replace(
                source,
                path=os.path.expanduser(source.path or defaults.path),
                media_root=os.path.expanduser(source.media_root or defaults.media_root),
                num_examples=source.num_examples or defaults.num_examples,
            )
            for label, source in (self.validation if is_prompts else self.sources).items()
        }

    def source_weights(self) -> list[float] | None:
        """Returns the weights of the training sources, None if they have none."""
        weights = [source.weight for source in self.sources.values() if source.weight is not None]
        return weights or None


@dataclass(kw_only=True)
class RegenerateConfig:
    """Decoding settings for answers that the target generates itself.

    Attributes:
        draft: RUN or the folder of a draft, for speculative decoding; empty: none. The answers do not depend on it.
        policy: a name of `sage.POLICIES`.
        max_new_tokens: maximum length of an answer, in tokens.
        temperature: sampling temperature; 0: greedy decoding.
        top_k: sample from the k most likely tokens; 0: all.
        top_p: sample from the most likely tokens of this total probability.
        seed: seed of the sampling noise.
        server: base URL of an OpenAI-compatible server of the target that answers instead, or a list of several, like
            http://host:8000/v1; empty: this project's decoder.
        model: id under which the servers serve the target; empty: the only one, if it has the target's name.
        concurrency: number of conversations answered at the same time, over all servers.
        images: how a server receives images.
        retries: number of further attempts after a connection error, a timeout, or status 429 or 5xx.
        retry_delay_s: pause before the first retry, doubled for each further one, unless the server names a time.
        timeout_s: maximum time for one answer.
        key_variable: environment variable with the key of the servers, if they need one.
    """

    draft: str = ""
    policy: str = "sage"
    max_new_tokens: int = 512
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    server: Any = ""
    model: str = ""
    concurrency: int = 32
    images: Images = Images.inline
    retries: int = 6
    retry_delay_s: float = 1.0
    timeout_s: float = 600.0
    key_variable: str = KEY_VARIABLE

    def urls(self) -> list[str]:
        """Returns the base URLs of the servers."""
        listed = [self.server] if isinstance(self.server, str) else list(self.server)
        return [url.rstrip("/") for url in listed if url]

    def sampling(self) -> dict[str, Any]:
        """Returns the settings that determine the answers."""
        return {name: getattr(self, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p", "seed")}


def data_config(stored: Mapping[str, Any]) -> DataConfig:
    """Returns the settings that a run's config.yaml holds under `data`.

    Raises:
        ValueError: a key or value of another version.
    """
    kinds: dict[str, Any] = {"on_long": OnLong, "on_bad": OnBad, "cache": Cache}
    try:
        values = {key: kinds[key](value) if key in kinds else value for key, value in stored.items()}
        for group in ("sources", "validation"):
            values[group] = {label: SourceConfig(**source) for label, source in (stored.get(group) or {}).items()}
        return DataConfig(**values)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"data: the run's configuration cannot be read ({error}); it was written by another version"
        ) from error


def validate(config: DataConfig) -> None:
    """Checks the fields and their combinations.

    Raises:
        ValueError: names the dotted key, the value and the allowed values.
    """
    if not config.sources:
        raise ValueError("data.sources: empty; name at least one source, e.g. data=pocket")
    for group, sources in (("sources", config.sources), ("validation", config.validation)):
        for label, source in sources.items():
            _validate_source(f"data.{group}.{label}", source)
    for name in ("path", "media_root"):
        if getattr(config, name) and not any(_uses_default(source, name) for source in config.sources.values()):
            raise ValueError(f"data.{name}: {getattr(config, name)}; has no effect, no source of data={config.name} uses it")
    _at_least("data.max_length", config.max_length, 2)
    _at_least("data.cache_keep", config.cache_keep, 1)
    _at_least("data.num_frames", config.num_frames, 1)
    _at_least("data.num_workers", config.num_workers, 0)
    _at_least("data.num_examples", config.num_examples, 0)
    _at_least("data.shuffle_block", config.shuffle_block, 1)
    check_shares(config.holdout, config.test_holdout)
    weights = [source.weight is None for source in config.sources.values()]
    if any(weights) and not all(weights):
        raise ValueError("data.sources: some have a weight and some do not; give a weight to each or to none")
    for group, sources in (("sources", config.sources), ("validation", config.validation)):
        streams = [source.streaming for source in sources.values()]
        if any(streams) and (not all(streams) or config.cache is Cache.examples):
            raise ValueError(f"data.{group}: streaming and prepared sources in one mix; stream all, with data.cache=rows")


def _uses_default(source: SourceConfig, name: str) -> bool:
    from data_prep.sources import KINDS

    return not getattr(source, name) and name in KINDS[source.kind].options


def _validate_source(key: str, source: SourceConfig) -> None:
    from data_prep.sources import KINDS

    if source.kind not in KINDS:
        raise ValueError(f"{key}.kind: {source.kind!r}; allowed: {', '.join(sorted(KINDS))}")
    defaults = SourceConfig()
    for name in ("path", "media_root", "subset", "split", "columns", "families", "streaming", "prompt", "long_answers"):
        value = getattr(source, name)
        if value != getattr(defaults, name) and name not in KINDS[source.kind].options:
            options = ", ".join(KINDS[source.kind].options)
            raise ValueError(f"{key}.{name}: {value}; has no effect on kind {source.kind}; its options: {options}")
    if source.weight is not None and source.weight <= 0:
        raise ValueError(f"{key}.weight: {source.weight}; allowed: above 0, or null")
    _at_least(f"{key}.num_examples", source.num_examples, 0)


def _at_least(key: str, value: int | None, lowest: int) -> None:
    if value is not None and value < lowest:
        raise ValueError(f"{key}: {value}; allowed: {lowest} or more")
