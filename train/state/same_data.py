"""Which data a run is trained on, told by content: a run that is resumed must not go on with other examples unnoticed.

Owns: what is remembered of the data in a state, and the comparison. Does not own: what a source takes for its content
(`Source.fingerprint` in data_prep.sources), the settings (train.config.checks compares those).
"""

from __future__ import annotations

from typing import Any

from data_prep.build import open_sources
from data_prep.dataset.prepare import content_hash
from data_prep.splits import Split
from train.config.schema import Config, ConfigError


def data_content(config: Config, dataset: Any) -> dict[str, str]:
    """A hash of the content of every training source, by the source's label.

    Unlike the keys of the data's cache it does not depend on our code: a newer version goes on with an older one's run.
    """
    opened = getattr(dataset, "sources", None) or getattr(dataset, "streams", None) or open_sources(config.data, Split.train)
    labels = config.data.resolved(Split.train)
    return {label: content_hash(source.fingerprint()) for label, source in zip(labels, opened, strict=True)}


def check_same_data(config: Config, saved: dict[str, str] | None, now: dict[str, str]) -> None:
    """Compares the data with what a state remembers of it; None: a state of a version that remembered nothing.

    Raises:
        ConfigError: names the first source whose content has changed.
    """
    for label, source in config.data.resolved(Split.train).items():
        if saved is not None and saved.get(label) != now[label]:
            raise ConfigError(
                f"data.path={source.path}: the content of data source {label} has changed since the run in {config.run.dir} "
                f"was started; resume with the data as it was, or start another run.dir"
            )
