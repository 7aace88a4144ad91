"""A hub that cannot be reached: one line after one request, for targets and data sets."""

from pathlib import Path

import pytest
from huggingface_hub import constants
from support.messages import refused

import sage
from checkpoints.export.configs import TargetFacts
from data_prep.sources.hub import load_table
from sage.io import hub
from sage.io.hub import HubUnreachable


class Unreachable:
    """A client that counts its requests."""

    def __init__(self) -> None:
        self.num_requests = 0

    def head(self, url: str, timeout: float) -> None:
        self.num_requests += 1
        raise OSError("connection refused")


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Unreachable:
    found = Unreachable()
    monkeypatch.setattr(hub, "get_session", lambda: found)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return found


def test_target_is_requested_once(client: Unreachable) -> None:
    with refused("target: owner/missing", constants.ENDPOINT, "HF_HOME", "HF_HUB_OFFLINE=1", error=HubUnreachable):
        sage.load_target("owner/missing")
    assert client.num_requests == 1


def test_data_set_is_requested_once(client: Unreachable, tmp_path: Path) -> None:
    with refused("data.path: owner/missing", constants.ENDPOINT, "HF_HOME", error=HubUnreachable):
        load_table("owner/missing", "", "train", str(tmp_path), streaming=False)
    assert client.num_requests == 1


def test_the_target_of_an_export_is_requested_once(client: Unreachable) -> None:
    with refused("--target: owner/missing", constants.ENDPOINT, "HF_HOME", error=HubUnreachable):
        TargetFacts.of_folder("owner/missing")
    assert client.num_requests == 1


def test_offline_mode_sends_no_request(client: Unreachable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with refused("target: owner/missing", "HF_HUB_OFFLINE", error=HubUnreachable):
        sage.load_target("owner/missing")
    assert client.num_requests == 0


def test_cached_target_is_left_to_the_cache(client: Unreachable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda name, file: f"/cache/{file}")
    hub.require_hub("owner/missing", "target")
    assert client.num_requests == 0
