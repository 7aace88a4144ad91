"""Every setting has one home: its range beside its type, its default and meaning in one dataclass, one default policy."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest

import sage
from data_prep.config import RegenerateConfig
from sage.commands.generate import parse_args
from sage.decoding.batch import BatchDecoder
from sage.decoding.generation import start
from sage.io.ranges import field_types, plain_type
from sage.serving.command import parse_args as serving_args
from sage.trees import DEFAULT_POLICY, FIRST_ANSWER_POLICY
from train.config.checks import check_ranges
from train.config.hydra_app import compose
from train.config.schema import Config, ConfigError


def numeric_keys(settings: Any, key: str = "") -> Iterator[tuple[Any, str, str]]:
    """Yields the owner, name and key of every number of a configuration."""
    for field in dataclasses.fields(settings):
        value, name = getattr(settings, field.name), f"{key}{field.name}"
        for label, part in value.items() if isinstance(value, dict) else [("", value)]:
            if dataclasses.is_dataclass(part):
                yield from numeric_keys(part, f"{name}.{label}." if label else f"{name}.")
        if plain_type(field_types(type(settings))[field.name]) in (int, float):
            yield settings, field.name, name


def test_every_number_of_a_composed_configuration_is_checked() -> None:
    config = compose("config", ["draft/compressor=select"], Config)
    found = list(numeric_keys(config))
    assert len(found) > 60
    for owner, name, key in found:
        before = getattr(owner, name)
        setattr(owner, name, math.nan)
        with pytest.raises(ConfigError, match=f"^{re.escape(key)}=nan: not allowed; give a"):
            check_ranges(config)
        setattr(owner, name, before)
    check_ranges(config)


# -- default policies ----------------------------------------------------------------------------------------------------


def test_the_default_policy_is_one_constant() -> None:
    assert DEFAULT_POLICY == "cost_aware" and FIRST_ANSWER_POLICY == "chain"
    for function in (sage.generate, sage.generate_batch, sage.stream, sage.trace, sage.Chat, BatchDecoder.add, start):
        assert inspect.signature(function).parameters["policy"].default is DEFAULT_POLICY
    assert RegenerateConfig().policy is DEFAULT_POLICY
    assert parse_args([]).policy is FIRST_ANSWER_POLICY
    assert serving_args(["--draft", "DIR"]).policy is DEFAULT_POLICY
