"""A draft that differs from its manifest.json is refused by every command that loads it, and by the Python API."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.messages import check_message, exit_code, refused
from support.validate_helpers import save_draft, save_run, save_target

import sage
from sage.commands.generate import main as generate_main
from sage.io.manifest import write_manifest
from train.cli.export import main as export_main
from train.cli.validate import main as validate_main


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def run(target_folder: Path, tmp_path: Path) -> Path:
    """A run whose draft has one flipped bit in its weights."""
    run = save_run(tmp_path / "run", target_folder)
    path = run / "draft" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    return run


@pytest.mark.parametrize("command", ["sage-generate", "sage-validate", "sage-export"])
def test_commands_exit_with_2_and_one_line(
    run: Path, target_folder: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = run / "draft"
    main, arguments = {
        "sage-generate": (generate_main, ["--target", target_folder, "--draft", draft, "--prompt", "Hi"]),
        "sage-validate": (validate_main, [f"checkpoint={run}"]),
        "sage-export": (export_main, [run, "--format", "eagle3", "--out", run / "out"]),
    }[command]
    assert exit_code(main, *arguments) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    check_message(error, str(draft / "model.safetensors"), "sha256", "manifest.json", "copy the draft again")


def test_load_draft_refuses(run: Path, target_folder: Path) -> None:
    with refused(str(run / "draft" / "model.safetensors"), "sha256", "copy the draft again"):
        sage.load_draft(run / "draft", sage.load_target(target_folder))


def test_load_draft_accepts_an_intact_draft_and_one_without_manifest(target_folder: Path, tmp_path: Path) -> None:
    target = sage.load_target(target_folder)
    folder = save_draft(tmp_path / "draft", target)
    assert sage.load_draft(folder, target).config.hidden_size == 32
    write_manifest(folder, 3)
    assert sage.load_draft(folder, target).config.hidden_size == 32
