"""A kind of draft is one row of the registry: it appears in the configuration, in help and in the Python API."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.config_store import ConfigStore
from support.messages import refused
from support.models import make_inputs, make_qwen
from support.train_helpers import python

import sage
from checkpoints.export.exporter import load_trained
from checkpoints.inspect import inspect_folder
from sage.drafts.eagle import EagleConfig, EagleDraft
from sage.drafts.options import EagleOptions
from sage.drafts.registry import KINDS, DraftKind
from train.config import store
from train.config.checks import check
from train.config.errors import unknown_key
from train.config.hydra_app import compose
from train.config.schema import Config
from train.distill.build import fresh_draft, new_student
from train.distill.student import HeadStudent, Student


@dataclass(kw_only=True)
class ScaledOptions(EagleOptions):
    """`scale` multiplies the target's feature."""

    scale: float = 1.0


class ScaledConfig(EagleConfig):
    model_type = "sage_scaled"

    def __init__(self, *, scale: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scale = scale


class ScaledDraft(EagleDraft):
    config_class = ScaledConfig

    def fuse(self, features: Any) -> torch.Tensor:
        return features.last * self.config.scale


ROW = DraftKind(
    name="scaled",
    options=ScaledOptions,
    draft=f"{__name__}:ScaledDraft",
    session="sage.drafts.head_session:HeadSession",
    student="train.distill.student:HeadStudent",
    predicts_features=True,
)
ARGUMENTS = ["launch.plan=true", "draft=scaled", "objective=eagle", "draft.scale=0.5"]


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> Iterator[DraftKind]:
    """The registry with one more row."""
    monkeypatch.setitem(KINDS, ROW.name, ROW)
    monkeypatch.setattr(store, "_registered", None)
    yield ROW
    ConfigStore.instance().repo["draft"].pop("scaled.yaml", None)


def test_a_row_is_a_choice_of_the_configuration(row: DraftKind) -> None:
    config = compose("config", ARGUMENTS, Config)
    check(config)
    draft: Any = config.draft
    assert (draft.kind, draft.scale, draft.input_norm) == ("scaled", 0.5, True)
    assert config.run.name.startswith("pocket_qwen2_5_vl-scaled")
    assert unknown_key("draft.scale", Config).endswith("draft=scaled")


@pytest.mark.parametrize("arguments", [ARGUMENTS, *([f"draft={kind}"] for kind in KINDS)], ids=lambda words: words[-1])
def test_a_configuration_can_be_sent_to_another_process(row: DraftKind, arguments: list[str]) -> None:
    config = compose("config", arguments, Config)
    again = pickle.loads(pickle.dumps(config))
    assert again == config and type(again.draft) is type(config.draft)


def test_a_row_is_trained_as_its_kind_of_student(row: DraftKind) -> None:
    config = compose("config", ARGUMENTS, Config)
    draft = fresh_draft(config, make_qwen(), None)
    student = new_student(draft, config)
    assert isinstance(draft, ScaledDraft) and draft.config.scale == 0.5
    assert isinstance(student, HeadStudent) and KINDS[draft.kind].predicts_features


def test_a_row_is_created_saved_loaded_and_decoded(row: DraftKind, tmp_path: Path) -> None:
    target = make_qwen()
    draft = sage.new_draft(target, "scaled", seed=0, scale=2.0)
    draft.save_pretrained(tmp_path)
    loaded = sage.load_draft(tmp_path, target)
    assert isinstance(loaded, ScaledDraft) and loaded.kind == "scaled" and loaded.config.scale == 2.0
    inputs = make_inputs(target)
    plain = sage.generate(target, None, inputs, policy="autoregressive", max_new_tokens=8)
    assert torch.equal(sage.generate(target, loaded, inputs, max_new_tokens=8).tokens, plain.tokens)
    assert isinstance(load_trained(tmp_path), ScaledDraft)
    assert inspect_folder(tmp_path).facts["architecture"] == "sage_scaled"


@pytest.mark.slow
def test_a_row_is_listed_in_help(tmp_path: Path) -> None:
    code = (
        "import sys; from dataclasses import replace; from sage.drafts.registry import KINDS\n"
        "KINDS['scaled'] = replace(KINDS['eagle'], name='scaled')\n"
        "from train.cli.train import main; main()"
    )
    done = python("-c", code, "--help", "draft", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    choices = f"\n{done.stdout}".split("\n  draft=\n")[1].split("\n\n")[0]
    assert re.findall(r"^[ *]{4}(\w+)", choices, re.MULTILINE) == ["block", "eagle", "eagle3", "model", "peagle", "scaled"]
    assert "scaled" in done.stdout


def test_without_the_row_the_kind_is_unknown() -> None:
    with refused("'scaled'", ", model"):
        sage.new_draft(make_qwen(), "scaled")
    with refused("draft=scaled", ", model"):
        compose("config", ARGUMENTS, Config)


def test_the_kind_cannot_be_changed_without_its_schema() -> None:
    with refused("draft.kind", "model"):
        check(compose("config", ["launch.plan=true", "draft.kind=model"], Config))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_agree_with_their_classes(kind: str) -> None:
    row = KINDS[kind]
    draft = row.draft_class()
    assert row.name == kind and callable(row.session_class()) and issubclass(row.student_class(), Student)
    assert row.is_target or draft.config_class.model_type == row.model_type
