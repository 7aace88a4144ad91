"""Names of drafts and targets, the same in every command: a run, a folder, a path alone; a corrupt draft is refused by all."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from hydra.core.config_store import ConfigStore
from support.data_helpers import save_run, save_target
from support.export_helpers import LEVELS, export_draft, make_draft, outputs
from support.export_helpers import save_target as save_deeper_target
from support.messages import check_message, exit_code, refused

import sage
from sage.bench.__main__ import main as bench
from sage.commands import cli, generate
from sage.commands.cli import find_models
from sage.commands.generate import main as sage_generate
from sage.drafts.draft import open_draft
from sage.drafts.location import find_draft, target_of
from sage.io.manifest import write_manifest
from sage.serving.command import main as sage_serve
from sage.targets.loading import meta_target
from train.cli.data import DataCommand
from train.cli.data import check as check_data_command
from train.cli.export import main as sage_export
from train.cli.validate import main as validate_main
from train.config.checks import check
from train.config.command_line import expand
from train.config.hydra_app import compose
from train.config.resuming import with_run_of_draft
from train.config.schema import Config, Precision, ValidateConfig
from train.config.store import target_dtype, target_name
from train.distill.build import build_student


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target("qwen2_5_vl", tmp_path_factory.mktemp("names") / "target")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """A run whose best draft is of step 7 and whose latest one is of step 12."""
    run = save_run(tmp_path_factory.mktemp("names") / "run", target)
    best = shutil.copytree(run / "draft", run / "draft_best")
    (best / "manifest.json").unlink()
    write_manifest(best, step=7)
    return run


def test_a_run_stands_for_its_best_draft(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_draft(run) == run / "draft_best"
    assert find_draft(str(run / "draft")) == run / "draft"
    copy = Path(shutil.copytree(run / "draft", tmp_path / "copy"))
    assert find_draft(copy) == copy
    monkeypatch.setenv("HOME", str(run.parent))
    assert find_draft("~/run") == run / "draft_best"
    unscored = shutil.copytree(run, tmp_path / "unscored", ignore=shutil.ignore_patterns("draft_best"))
    assert find_draft(unscored) == unscored / "draft"
    shutil.rmtree(unscored / "draft")
    with refused("--draft: ", "unscored", "draft_best or draft", "train further"):
        find_draft(unscored, "--draft")
    with refused("--draft: ", "neither a run (config.yaml) nor a draft (config.json)", "RUN/draft_best"):
        find_draft(tmp_path, "--draft")
    with refused("--draft: ", "no such folder", "RUN/draft_best"):
        find_draft(tmp_path / "none", "--draft")


def test_the_target_of_a_draft(run: Path, target: Path, tmp_path: Path) -> None:
    assert target_of(run / "draft", "--target") == str(target)
    (tmp_path / "config.json").write_text("{}")
    with refused("target: missing", "give --target"):
        target_of(tmp_path, "--target")
    (tmp_path / "config.json").write_text("{")
    with refused("config.json", "copy the draft again"):
        target_of(tmp_path, "--target")


def test_a_run_is_a_draft_in_python_and_in_configurations(run: Path, target: Path, tmp_path: Path) -> None:
    assert sage.load_draft(run, sage.load_target(target)).kind == "eagle"
    check(compose("config", [f"target.path={target}", f"run.dir={tmp_path}/new", f"draft.path={run}"], Config))
    ConfigStore.instance().store(name="prepare_schema", node=DataCommand)
    check_data_command(compose("prepare", [f"target.path={target}", f"regenerate.draft={run}"], DataCommand))


@pytest.mark.slow
def test_an_export_is_a_draft_of_every_command(tmp_path: Path) -> None:
    """`sage-generate --draft`, `sage-validate draft=`, the continuation of training from it, and its plan."""
    loaded, target = save_deeper_target(tmp_path / "target"), tmp_path / "target"
    made = make_draft(loaded)
    made.save_pretrained(tmp_path / "draft")
    out = tmp_path / "export"
    export_draft(tmp_path / "draft", out, dtype=torch.float32)
    assert find_models(generate.parse_args(["--draft", str(out)])) == (str(target), out)
    assert torch.equal(outputs(sage.load_draft(out, loaded)), outputs(made))
    found = with_run_of_draft(compose("validate", [], ValidateConfig), out, None, [])
    assert (found.target.path, found.target.dtype) == (str(target), "fp32")
    config = compose("config", [f"target.path={target}", "draft=eagle3", f"draft.path={out}"], Config)
    config.draft.feature_levels = LEVELS  # type: ignore[attr-defined]
    started = build_student(config, loaded, None, None).decoding_draft  # type: ignore[arg-type]
    assert torch.equal(outputs(started), outputs(made))
    planned = open_draft(out, meta_target(loaded.model.config), torch.float32)
    assert {weight.device.type for weight in planned.network.parameters()} == {"meta"}


@pytest.fixture
def corrupt_run(target: Path, tmp_path: Path) -> Path:
    """A run whose draft has one flipped bit in its weights."""
    run = save_run(tmp_path / "run", target)
    path = run / "draft" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    return run


@pytest.mark.parametrize("command", ["sage-generate", "sage-validate", "sage-export", "sage-serve", "sage-bench"])
def test_commands_find_the_draft_of_a_run_and_refuse_a_corrupt_one(corrupt_run, target, command, capsys):
    draft, models = corrupt_run / "draft", ["--target", target, "--draft", corrupt_run]
    main, arguments = {
        "sage-generate": (sage_generate, [*models, "--prompt", "Hi"]),
        "sage-validate": (validate_main, [f"checkpoint={corrupt_run}"]),
        "sage-serve": (sage_serve, [*models, "--port", 0]),
        "sage-export": (sage_export, [corrupt_run, "--format", "eagle3", "--out", corrupt_run / "out"]),
        "sage-bench": (lambda: sys.exit(cli.run(bench)), models),
    }[command]
    assert exit_code(main, *arguments) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    check_message(error, str(draft / "model.safetensors"), "sha256", "manifest.json", "copy the draft again")


def folder_of(home: Path, **config: object) -> Path:
    """The part of a target's folder that is read before it is loaded."""
    folder = home / "Own-7B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("key", "dtype", "expected"), [("dtype", "float32", "fp32"), ("torch_dtype", "float16", "bf16"), ("dtype", None, "bf16")]
)
def test_the_precision_is_that_of_the_folder(tmp_path: Path, key: str, dtype: str | None, expected: str) -> None:
    config = compose("config", [f"target.path={folder_of(tmp_path, **{key: dtype})}/"], Config)
    assert (config.target.name, config.target.dtype, config.train.precision) == ("Own-7B", expected, expected)
    assert config.run.dir == "runs/Own_7B-eagle3-pocket"


@pytest.mark.parametrize("content", ["{", "[]", None])
def test_the_default_precision_is_bf16(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert target_dtype(str(tmp_path)) is Precision.bf16
    assert target_dtype("Qwen/Qwen2.5-VL-7B-Instruct") is Precision.bf16
    assert target_name("Qwen/Qwen2.5-VL-7B-Instruct") == "Qwen2.5-VL-7B-Instruct"


@pytest.mark.parametrize(
    "name",
    [
        "my file",
        "a[1]",
        "it's",
        "k=v",
        "c,d",
        '"d"',
        "end\\'s",
        "${x}",
        "~t",
        " {a: 1} ",
        "(日本)",
    ],
)
def test_any_path_is_read_as_the_shell_delivers_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.touch()
    for word in (f"data={path}", f"data.path={path}"):
        found: Config = compose("config", [word], Config)
        assert (found.data.path, found.data.name) == (str(path), "auto")


@pytest.mark.parametrize(("word", "form"), [("run.name=it's", "key='it\\'s'"), ("data.media_root=a, b", "key='a,b'")])
def test_what_needs_quotes_is_told_so_in_a_line(word: str, form: str) -> None:
    with refused(word, form) as caught:
        compose("config", [word], Config)
    assert "\n" not in str(caught.value)


def test_a_tilde_is_the_home_folder() -> None:
    assert compose("config", ["run.dir=~/my runs/a"], Config).run.dir == os.path.expanduser("~/my runs/a")


def test_a_run_alone_is_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    assert expand([str(tmp_path)], ValidateConfig) == [f"checkpoint={tmp_path}"]
    assert expand([str(tmp_path)], Config) == [str(tmp_path)]


def test_a_draft_without_run_is_measured_in_its_targets_dtype(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, dtype="bfloat16")
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text(json.dumps({"target_path": str(folder)}))
    draft = tmp_path / "draft"
    settled = with_run_of_draft(compose("validate", [], ValidateConfig), draft, None, [])
    assert (settled.target.path, settled.target.dtype) == (str(folder), "bf16")
    words = ["target.dtype=fp32"]
    assert with_run_of_draft(compose("validate", words, ValidateConfig), draft, None, words).target.dtype == "fp32"
