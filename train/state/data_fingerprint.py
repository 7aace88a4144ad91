"""Fingerprints of the training data in a state (see `Source.fingerprint`), so that a run is not resumed with other examples."""

from __future__ import annotations

from typing import Any

from data_prep.build import open_sources
from data_prep.splits import Split
from sage.io.files import json_digest
from train.config.schema import Config, ConfigError


def fingerprint_data(config: Config, dataset: Any) -> dict[str, str]:
    """Returns label -> hash of the content of every training source.

    Unlike the keys of the data cache it does not depend on the code, so that a newer version can resume an older run.
    """
    opened = getattr(dataset, "sources", None) or getattr(dataset, "streams", None) or open_sources(config.data, Split.train)
    labels = config.data.resolved(Split.train)
    return {label: json_digest([source.fingerprint()]) for label, source in zip(labels, opened, strict=True)}


def check_same_data(config: Config, saved: dict[str, str] | None, current: dict[str, str]) -> None:
    """Compares the fingerprints of the data with the saved ones; None: a new run.

    Raises:
        ConfigError: names the first source whose content has changed.
    """
    for label, source in config.data.resolved(Split.train).items():
        if saved is not None and saved.get(label) != current[label]:
            raise ConfigError(
                f"data.path={source.path}: the content of data source {label} has changed since the run in {config.run.dir} "
                f"was started; resume with the original data, or start another run.dir"
            )
