"""Widened pocket targets: the same texts and drafts with more weights, claims that do not hold, and mistakes."""

from __future__ import annotations

import json
import logging
import shutil
from argparse import Namespace
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.messages import check_message, refused
from support.train_helpers import make_target

import sage
from benchmarks.wide import widened
from data_prep.pocket import widen, world
from data_prep.pocket.families import FAMILIES, INNER
from sage.io.files import CannotWrite
from sage.io.manifest import write_manifest
from sage.targets import widened as record

SIZE = 640
POLICIES = (("autoregressive", 0.0), ("chain", 0.0), ("sage", 1.0), ("cost_aware", 0.0), ("static", 1.0))


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns by family a folder with a target, a draft for it, and the target widened."""

    @cache
    def make(family: str) -> Path:
        where = tmp_path_factory.mktemp(family)
        folder = make_target(where, family).rename(where / "narrow")
        draft = sage.new_draft(sage.load_target(folder, dtype=torch.float32), "eagle", seed=0)
        draft.network.save_pretrained(where / "draft")
        widen.widen(widen.find_source(str(folder)), SIZE, where / "wide")
        return where

    return make


@pytest.fixture
def made(worlds: Callable[[str], Path]) -> Path:
    return worlds("qwen2_5_vl")


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    """The widened target, to be changed."""
    return Path(shutil.copytree(made / "wide", tmp_path / "wide"))


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_and_drafts_stay_valid(family: str, worlds: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    made, question = worlds(family), world.sample("test", 0, ["caption"]).messages[:1]

    def texts(name: str) -> list[list[int]]:
        target = sage.load_target(made / name, dtype=torch.float32)
        draft, inputs = sage.load_draft(made / "draft", target), target.prepare(question)
        answers = []
        for policy, temperature in POLICIES:
            options: dict[str, Any] = {"max_new_tokens": 12, "temperature": temperature, "seed": 3}
            out = sage.generate(target, None if policy == "autoregressive" else draft, inputs, policy, **options)
            answers.append(out.tokens.tolist())
        return answers

    narrow = texts("narrow")
    with caplog.at_level(logging.INFO, "sage"):
        assert texts("wide") == narrow
    assert narrow[0] == narrow[1] != narrow[2] == narrow[4], "greedy answers are equal, and so are those of one seed"
    assert "same function" in caplog.text


@pytest.mark.parametrize("family", FAMILIES)
def test_added_weights_are_random_at_the_present_scale_and_have_no_effect(
    family: str, worlds: Callable[[str], Path], tmp_path: Path
) -> None:
    made = worlds(family)
    narrow, wide = (load_file(made / name / "model.safetensors") for name in ("narrow", "wide"))
    assert narrow.keys() == wide.keys()
    kinds = {name: kind for name in wide if (kind := record.projection_of(name))}
    assert sorted(kinds.values()) == ["down"] * 2 + ["gate"] * 2 + ["up"] * 2
    for name, kind in kinds.items():
        rows = wide[name].T if kind == "down" else wide[name]
        assert len(rows) == SIZE
        if kind == "down":
            assert not rows[INNER:].any()
        else:
            assert rows[INNER:].ne(0).float().mean() > 0.99
            assert 0.9 < rows[INNER:].float().std() / narrow[name].float().std() < 1.1
    assert all(torch.equal(wide[name], narrow[name]) for name in narrow if name not in kinds)
    assert not (made / "wide" / "score.json").exists()
    widen.widen(widen.find_source(str(made / "narrow")), SIZE, tmp_path / "again")
    again, first = (
        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (tmp_path / "again", made / "wide")
    )
    assert again == first


@pytest.mark.parametrize("change", ["down", "kept", "gate", "record", "keys", "file"])
def test_a_claim_that_does_not_hold_is_refused(change: str, made: Path, copied: Path) -> None:
    file, parts = copied / "model.safetensors", list[str]()
    tensors = load_file(file)
    names = {kind: name for name in sorted(tensors) if (kind := record.projection_of(name))}
    if change in ("down", "kept", "gate"):
        weight = tensors[names["gate" if change == "gate" else "down"]]
        place, value, *parts = {
            "down": ((3, INNER + 5), 0.5, names["down"], "not zero"),
            "kept": ((3, 5), 0.5, "not those of the source"),
            "gate": ((INNER + 5, 3), float("inf"), names["gate"], "can overflow"),
        }[change]
        weight[place] = value
        save_file(tensors, file, metadata={"format": "pt"})
    elif change == "record":
        content = json.loads((copied / record.RECORD).read_text())
        (copied / record.RECORD).write_text(json.dumps({**content, "fingerprint": {**content["fingerprint"], "num_layers": 3}}))
        parts = ["num_layers"]
    elif change == "keys":
        (copied / record.RECORD).write_text("{}")
        parts = ["keys"]
    if change == "file":
        (copied / "chat_template.jinja").write_text("other")
        parts = ["chat_template.jinja", "manifest.json"]
    else:
        write_manifest(copied, step=0)
    target = sage.load_target(copied, dtype=torch.float32)
    with refused(str(copied), "data_prep.pocket.widen", *parts):
        sage.load_draft(made / "draft", target)


def test_a_source_whose_weights_have_changed(copied: Path, made: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(made / "narrow", source)
    shutil.rmtree(copied)
    widen.widen(widen.find_source(str(source)), SIZE, copied)
    assert record.check_widening(copied).source == str(source)
    tensors = load_file(source / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, source / "model.safetensors")
    with refused("target", "have changed"):
        record.check_widening(copied)
    shutil.rmtree(source)
    assert record.check_widening(copied)


@pytest.mark.parametrize("megabytes", [20, 62, 226])
def test_sizes_of_record(megabytes: float) -> None:
    for family in FAMILIES:
        source = widen.find_source(f"pocket_{family}")
        assert widen.size_for(source, megabytes) == {20: 512, 62: 2048, 226: 8192}[megabytes]


def test_mistakes(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(Path(copied).with_name("narrow"))
    shutil.copytree(copied, source, ignore=shutil.ignore_patterns(record.RECORD))

    def command(*words: object) -> None:
        with patch("sys.argv", ["widen", *map(str, words)]):
            widen.main()

    out = tmp_path / "out"
    for size in (SIZE, SIZE - 1, 10**7):
        with refused("narrow", str(size), f"give {SIZE + 1} to"):
            command("--target", source, "--mlp", size, "--out", out)
    with refused("--target", "widened already", "give its source"):
        command("--target", copied, "--mlp", 2 * SIZE, "--out", out)
    for other in ("qwen2_5_vl_7b", tmp_path):
        with refused("--target", "no folder with a config.json", "pocket_llava_onevision"):
            command("--target", other, "--mlp", SIZE, "--out", out)
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "config.json").write_text('{"model_type": "qwen2_5_vl", "text_config": {"hidden_size": 3584}}')
    with refused("--target", "not a pocket target", "3584"):
        command("--target", stranger, "--mlp", SIZE, "--out", out)
    with refused("--out", "exists"):
        command("--target", source, "--mlp", 2 * SIZE, "--out", stranger)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with refused(str(blocked), error=CannotWrite):
        command("--target", source, "--mlp", 2 * SIZE, "--out", blocked / "out")
    for megabytes in (0.1, float("nan"), float("inf")):
        with refused("--widen-to", "megabytes"):
            widened(source, Namespace(widen_to=megabytes))
    assert not out.exists()
    command("--target", source, "--megabytes", 8, "--out", out)
    check_message(capsys.readouterr().out, "MLP of 1280")
    assert record.check_widening(out).source_size == SIZE


def test_a_size_is_made_once_and_kept(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "narrow"
    shutil.copytree(copied, source, ignore=shutil.ignore_patterns(record.RECORD))
    assert widened(str(source), Namespace(widen_to=None)) == str(source)
    present_mb = 4 * widen.find_source(str(source)).shape.pass_parameters / 1e6
    assert widened(str(source), Namespace(widen_to=present_mb)) == str(source)
    kept = widened(str(source), Namespace(widen_to=2 * present_mb))
    assert record.check_widening(Path(kept)).size > SIZE and tmp_path in Path(kept).parents
    with patch.object(widen, "widen", side_effect=AssertionError):
        assert widened(str(source), Namespace(widen_to=2 * present_mb)) == kept
