"""A target given by its path alone has the name and precision of its own folder, not of the default target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.messages import exit_code, refused

from train.cli.train import main
from train.config.hydra_app import compose
from train.config.overrides import expand, refuse_unknown_options
from train.config.resolvers import target_dtype, target_name
from train.config.schema import Config, ConfigError, Precision, ValidateConfig
from train.validation.selection import Checkpoint, settle


def folder_of(home: Path, **config: object) -> Path:
    """The part of a target's folder that is read before it is loaded."""
    folder = home / "Own-7B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    ("dtype", "expected"), [("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "bf16"), (None, "bf16")]
)
def test_the_precision_is_that_of_the_folder(tmp_path: Path, key: str, dtype: str | None, expected: str) -> None:
    config: Config = compose("config", [f"target.path={folder_of(tmp_path, **{key: dtype})}/"], Config)
    assert (config.target.name, config.target.dtype, config.train.precision) == ("Own-7B", expected, expected)
    assert config.run.dir == "runs/Own_7B-eagle3-pocket"


@pytest.mark.parametrize("content", ["{", "[]", None])
def test_the_default_precision_is_bf16(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert target_dtype(str(tmp_path)) is Precision.bf16
    assert target_dtype("Qwen/Qwen2.5-VL-7B-Instruct") is Precision.bf16
    assert target_name("Qwen/Qwen2.5-VL-7B-Instruct") == "Qwen2.5-VL-7B-Instruct"


@pytest.mark.slow
def test_the_path_replaces_the_target_of_an_experiment(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, dtype="float32")
    config: Config = compose("config", ["experiment=eagle3", f"target.path={folder}"], Config)
    assert (config.target.name, config.target.dtype, config.run.name) == ("Own-7B", "fp32", "eagle3-Own-7B")


@pytest.mark.parametrize("name", ["my file.jsonl", "a[1].jsonl", "it's.jsonl", "k=v.jsonl", "über.jsonl", "c,d.jsonl"])
def test_any_path_is_read_as_the_shell_delivers_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.touch()
    for word in (f"data={path}", f"data.path={path}"):
        found: Config = compose("config", [word], Config)
        assert (found.data.path, found.data.name) == (str(path), "auto")


def test_a_run_alone_is_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    assert expand([str(tmp_path)], ValidateConfig) == [f"checkpoint={tmp_path}"]
    assert expand([str(tmp_path)], Config) == [str(tmp_path)]


def test_options_for_keys_name_the_key() -> None:
    with refused("--data", "data=VALUE, without dashes", error=ConfigError):
        refuse_unknown_options(["--data", "x.jsonl"], Config)


def test_a_draft_without_run_is_measured_in_its_targets_dtype(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, dtype="bfloat16")
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text(json.dumps({"target_path": str(folder)}))
    alone = Checkpoint(draft=tmp_path / "draft", run=None)
    assert settle(compose("validate", [], ValidateConfig), alone, []).target.dtype == "bf16"
    words = ["target.dtype=fp32"]
    assert settle(compose("validate", words, ValidateConfig), alone, words).target.dtype == "fp32"


def test_the_command_line_composes_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path, dtype="float32")
    assert exit_code(main, f"target.path={folder}", "--cfg", "job", "--resolve") == 0
    shown = capsys.readouterr().out
    assert "  name: Own-7B\n" in shown and "  dtype: fp32\n" in shown and "dir: runs/Own_7B-eagle3-pocket" in shown
