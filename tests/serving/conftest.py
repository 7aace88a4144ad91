"""The server of the tests: an untrained pocket target and a draft with random weights; shared by all tests of this folder."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import random_draft
from support.serving_helpers import LIMITS, MODEL, Running, serving

import sage
from sage.serving.service import new_service
from sage.serving.settings import ServerLimits


@pytest.fixture(scope="session")
def models(target: Path) -> tuple[sage.Target, Any]:
    loaded = sage.load_target(target, torch.float32)  # in bfloat16, passes of a tree and of one token differ at near-ties
    return loaded, random_draft(loaded)


@pytest.fixture(scope="session")
def new(models: tuple[sage.Target, Any]) -> Callable[..., Any]:
    """Starts a server: `policy`, limits in place of `LIMITS`, and fields of `Access`."""

    def start(policy: str = "chain", limits: dict[str, Any] | None = None, **options: Any) -> Any:
        service = new_service(*models, policy, ServerLimits(**LIMITS | (limits or {})), MODEL, **options)
        return serving(service, models[0])

    return start


@pytest.fixture(scope="session")
def server(new: Callable[..., Any]) -> Iterator[Running]:
    with new() as running:
        yield running
