"""The `data` and `regenerate` settings: dataclasses with their defaults, ranges and cross-field checks.

Every error names the dotted key. Imports neither torch nor Hydra: the same classes serve a notebook and a ConfigStore, and a
command that only checks its configuration stays fast.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Annotated, Any
from urllib.parse import urlsplit

from data_prep.sources.base import Share, Shares, Split
from data_prep.sources.files import KINDS, SourceConfig, check_path, check_source
from sage.decoding.settings import AnswerSettings
from sage.inputs.media import LIMIT_KEYS
from sage.io.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Range, check_fields
from sage.trees import DEFAULT_POLICY

KEY_VARIABLE = "OPENAI_API_KEY"  # as OpenAI's own clients name it
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SCHEMES = ("http", "https")


class OnLong(StrEnum):
    """Handling of an example longer than `max_length`."""

    turn = "turn"  # keep the leading turns that fit; drop the example if the first does not
    cut = "cut"  # as `turn`, but keep the beginning of a first answer that does not fit
    drop = "drop"


class OnBad(StrEnum):
    """Handling of an item that cannot become an example."""

    error = "error"  # stop with file, index and reason
    skip = "skip"  # skip and count the item, and list it in `data.bad_list`


class Answers(StrEnum):
    """The answers that a draft is trained on."""

    given = "given"  # those of the data
    target = "target"  # the target's own, generated before training (data_prep.tools.regenerate)


class Thinking(StrEnum):
    """Whether a hybrid model, which can think before it answers, does so."""

    auto = "auto"  # where a given answer has thoughts; the target's own answers have none
    on = "on"
    off = "off"  # thoughts of given answers are removed

    @property
    def flag(self) -> bool | None:
        """The setting as `Processor.thinking`."""
        return None if self is Thinking.auto else self is Thinking.on


MAX_DROPPED = 0.2  # share of the examples that a run drops without being asked to
DROPPED = "dropped_examples"  # this share in metrics.jsonl


class OnCut(StrEnum):
    """What is done with an answer of the target that does not end within `max_new_tokens`."""

    keep = "keep"  # as the last one of its conversation; all of its tokens are trained on, no end is
    drop = "drop"


class Images(StrEnum):
    """How a server receives images."""

    inline = "inline"  # in the request, as data URLs
    path = "path"  # as file:// URLs, for a server that reads the same files (vLLM: --allowed-local-media-path)


class Cache(StrEnum):
    """Content of the cache folder."""

    examples = "examples"  # encoded examples with pixels: for data sets much smaller than the disk
    rows = "rows"  # the index of valid items; images are opened while training


@dataclass(kw_only=True)
class DataConfig:
    """All data of a run.

    Attributes:
        name: label in reports.
        sources: training sources by label.
        validation: prompt sources by label, with the keys of `sources`; empty: the held-out part of `sources`.
        answers: the answers to train on: those of the data, or the target's own, generated before training with the settings
            of `regenerate`.
        thinking: whether a hybrid model thinks before it answers.
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
        num_workers: processes of a rank that prepare examples while training; 0: a thread; null: up to 8, as the cores allow.
        num_frames: maximum number of frames per video.
        min_pixels, max_pixels: limits of the pixels of an image, which is scaled; null: those of the target alone. Keys of
            these names in the part of an image come first.
        shuffle_block: items per block within which a stream is shuffled.
    """

    name: str = "pocket"
    sources: dict[str, SourceConfig] = field(default_factory=lambda: {"pocket": SourceConfig()})
    validation: dict[str, SourceConfig] = field(default_factory=dict)
    answers: Answers = Answers.given
    thinking: Thinking = Thinking.auto
    path: str = ""
    media_root: str = ""
    num_examples: NonNegativeInt = 0
    holdout: Share = 0.01
    test_holdout: Share = 0.0
    max_length: Annotated[int, Range(ge=2)] | None = None
    on_long: OnLong = OnLong.turn
    on_bad: OnBad = OnBad.error
    bad_list: str = ""
    cache: Cache = Cache.rows
    cache_dir: str = ""
    cache_keep: PositiveInt | None = 8
    num_workers: NonNegativeInt | None = 0
    num_frames: PositiveInt = 32
    min_pixels: PositiveInt | None = None
    max_pixels: PositiveInt | None = None
    shuffle_block: PositiveInt = 256

    @property
    def shares(self) -> Shares:
        """The shares of the splits; none with separate validation sources."""
        return Shares() if self.validation else Shares(self.holdout, self.test_holdout)

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

    def is_streamed(self, split: Split = Split.train) -> bool:
        return any(source.streaming for source in self.resolved(split).values())

    def pixel_limits(self) -> dict[str, int]:
        """Returns the limits of images as keys of their parts."""
        return {key: value for key in LIMIT_KEYS if (value := getattr(self, key)) is not None}

    def source_weights(self) -> list[float] | None:
        """Returns the weights of the training sources, None if they have none."""
        return [source.weight for source in self.sources.values() if source.weight is not None] or None


@dataclass(kw_only=True)
class RegenerateConfig(AnswerSettings):
    """Decoding settings for answers that the target generates itself.

    Attributes:
        draft: RUN or the folder of a draft, for speculative decoding; empty: none. The answers do not depend on it.
        policy: a name of `sage.POLICIES`.
        batch_size: conversations that this project's decoder answers together. In fp32 the answers do not depend on it; in half
            precision, tokens of almost equal logits may.
        on_cut: what is done with an answer that does not end within `max_new_tokens`.
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
    policy: str = DEFAULT_POLICY
    max_new_tokens: PositiveInt = 512
    batch_size: PositiveInt = 16
    on_cut: OnCut = OnCut.keep
    server: Any = ""
    model: str = ""
    concurrency: PositiveInt = 32
    images: Images = Images.inline
    retries: NonNegativeInt = 6
    retry_delay_s: PositiveFloat = 1.0
    timeout_s: PositiveFloat = 600.0
    key_variable: str = KEY_VARIABLE

    def urls(self) -> list[str]:
        listed = [self.server] if isinstance(self.server, str) else list(self.server)
        return [url.rstrip("/") for url in listed if url]

    def sampling(self) -> dict[str, Any]:
        """Returns the settings that determine the answers."""
        return {part.name: getattr(self, part.name) for part in fields(AnswerSettings)} | {"on_cut": str(self.on_cut)}


def data_config(stored: Mapping[str, Any]) -> DataConfig:
    """Returns the settings that a run's config.yaml holds under `data`; ValueError for a key or value of another version."""
    kinds: dict[str, Any] = {"on_long": OnLong, "on_bad": OnBad, "cache": Cache, "answers": Answers, "thinking": Thinking}
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
    """Checks the fields and their combinations; ValueError with the dotted key, the value and the allowed values."""
    if not config.sources:
        raise ValueError("data.sources: empty; name at least one source, e.g. data=pocket")
    for group, sources in (("sources", config.sources), ("validation", config.validation)):
        for label, source in sources.items():
            check_source(f"data.{group}.{label}", source)
    check_fields(config, "data.")
    for name in ("path", "media_root"):
        users = (source for source in config.sources.values() if name in KINDS[source.kind].options)
        if getattr(config, name) and all(getattr(source, name) for source in users):
            raise ValueError(f"data.{name}: {getattr(config, name)}; has no effect, no source of data={config.name} uses it")
    if (config.min_pixels or 0) > (config.max_pixels or math.inf):
        raise ValueError(f"data.min_pixels: {config.min_pixels}; above data.max_pixels={config.max_pixels}; lower it")
    if config.pixel_limits() and all("path" not in KINDS[source.kind].options for source in config.sources.values()):
        raise ValueError(f"data.max_pixels: has no effect on generated images of data={config.name}; remove it")
    if config.holdout + config.test_holdout >= 1:
        raise ValueError(
            f"data.test_holdout: {config.test_holdout}; leaves no training data with data.holdout={config.holdout}; lower one"
        )
    if config.test_holdout and not config.holdout:
        raise ValueError(f"data.test_holdout: {config.test_holdout}; has no effect with data.holdout=0; give a share to both")
    weights = [source.weight is None for source in config.sources.values()]
    if any(weights) and not all(weights):
        raise ValueError("data.sources: some have a weight and some do not; give a weight to each or to none")
    for group, sources in (("sources", config.sources), ("validation", config.validation)):
        streams = [source.streaming for source in sources.values()]
        if any(streams) and (not all(streams) or config.cache is Cache.examples):
            raise ValueError(f"data.{group}: streaming and prepared sources in one mix; stream all, with data.cache=rows")
        if any(streams) and group == "sources" and config.answers is Answers.target:
            raise ValueError(
                "data.answers: target; a stream has no fixed items to answer; write a part of it first (sage-data "
                "action=convert data.num_examples=N out=PART.jsonl), then give data=messages data.path=PART.jsonl"
            )


def check_paths(config: DataConfig) -> None:
    """Checks the path of every source of a configuration; ValueError with the path and the remedy."""
    for split in (Split.train, Split.validation):
        for source in config.resolved(split).values():
            if source.path:
                check_path(source.kind, source.path)
            if source.media_root and not os.path.isdir(source.media_root):
                raise ValueError(f"data.media_root: {source.media_root}; no such folder; relative image paths start there")


# -- addresses and key of the servers; no message repeats them ------------------------------------------------------------


def check_server(settings: RegenerateConfig, environment: Mapping[str, str]) -> None:
    """Checks the settings of the servers; a ValueError names neither a URL nor the key of a server."""
    if not isinstance(settings.server, (str, list)) or not all(isinstance(url, str) for url in settings.server):
        raise ValueError(f"regenerate.server: {type(settings.server).__name__}; allowed: a URL or a list of URLs")
    for number, url in enumerate(settings.urls(), 1):
        if problem := url_problem(url, "the variable of regenerate.key_variable"):
            raise ValueError(f"regenerate.server: URL {number} {problem}; give for example http://host:8000/v1")
    check_fields(settings, "regenerate.")
    read_key(settings, environment)


def read_key(settings: RegenerateConfig, environment: Mapping[str, str]) -> str:
    """Returns the key of the servers, empty if they have none; ValueError for a missing variable or a key that is none."""
    name = settings.key_variable
    if not VARIABLE_NAME.fullmatch(name):
        raise ValueError(
            "regenerate.key_variable: not the name of an environment variable; the key itself stays out of settings"
        )
    if name != KEY_VARIABLE and name not in environment:
        raise ValueError("regenerate.key_variable: the environment has no variable of this name; export it")
    key = environment.get(name, "")
    if not is_key(key):
        raise ValueError(f"regenerate.key_variable: {name} has a line break, a blank or another character that no key has")
    return key


def is_key(key: str) -> bool:
    """Returns whether a key can be sent. An empty key is not sent."""
    return key.isascii() and key.isprintable() and " " not in key


def url_problem(url: str, key_variable: str) -> str:
    """Describes what is wrong with the URL of a server without repeating it; "" for a valid one. Keys go to `key_variable`."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError for an invalid port
    except ValueError:
        return "is not valid"
    if not is_key(url):
        return "has a line break, a blank or another character that no URL has"
    if parts.scheme not in SCHEMES:
        return f"is not of the scheme {' or '.join(SCHEMES)}"
    if parts.username is not None or parts.password is not None:
        return f"has a user or a password in it; export the key in {key_variable}"
    return "has no host" if not parts.hostname else "has a query or a fragment" if parts.query or parts.fragment else ""
