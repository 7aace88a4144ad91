"""Every setting has one home: its range beside its type, its default and meaning in one dataclass, one default policy."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

import pytest
from support.messages import refused

import sage
from data_prep.config import RegenerateConfig
from sage.bench.options import DEFAULT_POLICIES
from sage.bench.settings import MeasurementSettings
from sage.commands.generate import parse_args
from sage.decoding.batch import BatchDecoder
from sage.decoding.generation import start
from sage.decoding.settings import AnswerSettings, Sampling
from sage.io.ranges import check_fields, field_types, plain_type
from sage.serving.command import parse_args as serving_args
from sage.trees import AUTOREGRESSIVE, DEFAULT_POLICY, FIRST_ANSWER_POLICY, POLICIES, policy_class
from train.cli.data import DataCommand
from train.config.checks import check_ranges
from train.config.hydra_app import compose
from train.config.schema import Config, ConfigError, ValidateConfig
from train.config.store import subschemas

SETTINGS = (MeasurementSettings, Sampling)  # of the commands that argparse reads
SCHEMAS = (Config, ValidateConfig, DataCommand, *dict.fromkeys(subschemas().values()))


def without_range(hint: Any) -> bool:
    """Whether an annotation allows a number of any size without saying so."""
    return hint in (int, float) or (get_origin(hint) is not Annotated and any(map(without_range, get_args(hint))))


def numbers_without_range(kind: type, key: str = "") -> Iterator[str]:
    for field in dataclasses.fields(kind):
        hint, name = field_types(kind)[field.name], f"{key}{field.name}"
        for part in (plain_type(hint), *get_args(hint)):
            if isinstance(part, type) and dataclasses.is_dataclass(part):
                yield from numbers_without_range(part, f"{name}.")
        if without_range(hint):
            yield name


@pytest.mark.parametrize("kind", [*SCHEMAS, *SETTINGS], ids=lambda kind: kind.__name__)
def test_every_number_of_a_configuration_has_a_range(kind: type) -> None:
    assert list(numbers_without_range(kind)) == []


@pytest.mark.parametrize("name", [name for name in POLICIES if dataclasses.is_dataclass(policy_class(name))])
def test_every_number_of_a_policy_has_a_range(name: str) -> None:
    assert list(numbers_without_range(policy_class(name))) == []


def test_negative_control_a_number_without_range_is_found() -> None:
    @dataclasses.dataclass
    class Inner:
        depth: int | None = None
        ratio: Annotated[float, "no range needed"] = 0.0

    outer = dataclasses.make_dataclass("Outer", [("inner", Inner), ("parts", dict[str, Inner]), ("sizes", list[int])])
    Inner.__annotations__ = {"depth": int | None, "ratio": Annotated[float, "no range needed"]}
    assert list(numbers_without_range(outer)) == ["inner.depth", "parts.depth", "sizes"]


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


@pytest.mark.parametrize("value", [math.inf, -math.inf, True, "1", [1], None])
def test_what_is_no_number_is_refused(value: object) -> None:
    with refused("temperature: ", "number", "greedy"):
        check_fields(dataclasses.replace(AnswerSettings(), temperature=value))  # type: ignore[arg-type]


# -- default policies ----------------------------------------------------------------------------------------------------


def test_the_default_policy_is_one_constant() -> None:
    assert DEFAULT_POLICY == "cost_aware" and FIRST_ANSWER_POLICY == "chain"
    for function in (sage.generate, sage.generate_batch, sage.stream, sage.trace, sage.Chat, BatchDecoder.add, start):
        assert inspect.signature(function).parameters["policy"].default is DEFAULT_POLICY
    assert RegenerateConfig().policy is DEFAULT_POLICY
    assert parse_args([]).policy is FIRST_ANSWER_POLICY
    assert serving_args(["--draft", "DIR"]).policy is DEFAULT_POLICY


def test_the_bench_and_a_run_measure_the_same_policies_by_default() -> None:
    assert compose("config", [], Config).decode.policies == [AUTOREGRESSIVE, *DEFAULT_POLICIES.split(",")]
