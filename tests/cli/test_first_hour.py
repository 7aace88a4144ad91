"""What a user meets in the first hour with answers: names of targets, what results print, wrong types, colors, Ctrl-C."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from support.messages import refused
from support.models import make_qwen
from support.processors import make_processor

import sage
from sage.bench.options import compare_parser
from sage.commands import cli, generate
from sage.decoding import generation as answers
from sage.decoding.generation import Chat
from sage.drafts.model import ModelDraft
from sage.io.files import config_dir
from sage.io.target_paths import path_of_target
from sage.targets.loading import load_processor
from sage.training import scripts
from train.cli import export
from train.config.checks import check_path
from train.config.hydra_app import compose
from train.config.schema import Config


@pytest.fixture
def target() -> sage.Target:
    return sage.Target(make_qwen().model, make_processor(make_qwen()))


def test_a_name_of_the_configuration_is_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pocket target is in the package, that of `make real` in the cache, others are hub ids; a folder of that name wins."""
    names = [path.stem for path in (config_dir() / "target").glob("*.yaml") if path.stem != "by_path"]
    assert len(names) > 40
    for name in names:
        found = path_of_target(name)
        if name.startswith("pocket_"):
            assert (Path(found) / "config.json").is_file()
        else:
            assert re.fullmatch(rf"[\w-]+/[\w.-]+|/.*/real/{name}", found)
    assert path_of_target("Qwen/Qwen2.5-VL-7B-Instruct") == "Qwen/Qwen2.5-VL-7B-Instruct"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pocket_qwen3_vl").mkdir()
    assert path_of_target("pocket_qwen3_vl") == "pocket_qwen3_vl"
    monkeypatch.setenv("HOME", str(tmp_path))
    for load in (sage.load_target, load_processor):
        for name, found in (("pocket_qwen3_vl", "pocket_qwen3_vl"), ("~/pocket_qwen3_vl", f"{tmp_path}/pocket_qwen3_vl")):
            with refused(f"target: {found}: no config.json there"):
                load(name)


def test_a_name_is_a_target_of_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = path_of_target("pocket_qwen3_vl")
    assert cli.find_models(generate.parse_args(["--target", "pocket_qwen3_vl"])) == (folder, None)
    assert cli.find_models(compare_parser().parse_args(["--target", "pocket_qwen3_vl"])) == (folder, None)
    exported = export.parse_args(["--check", folder, "--target", "pocket_qwen3_vl"])
    assert export._check_values(exported, "check") == folder
    assert load_processor("pocket_qwen3_vl").family.model_type == "qwen3_vl"
    config = compose("config", ["target.path=pocket_qwen3_vl"], Config)
    assert (config.target.name, config.target.path, config.target.dtype) == ("pocket_qwen3_vl", folder, "fp32")
    check_path("decode.assistant", "pocket_qwen3_vl")
    with refused("--target: pocket_qwen3_v", "did you mean pocket_qwen3_vl?"):
        cli.find_models(generate.parse_args(["--target", "pocket_qwen3_v"]))


@pytest.mark.parametrize(
    ("ask", "parts"),
    [
        (lambda chat: chat.ask(5), ["text: int", "string"]),
        (lambda chat: chat.ask("What?", images="photo.jpg"), ["images: str", "images=[...]"]),
        (lambda chat: chat.target.prepare("hello"), ["messages: str", '"role": "user"']),
    ],
)
def test_wrong_types_are_named_with_the_right_one(ask: Any, parts: list[str], target: sage.Target) -> None:
    chat = Chat(target, None, "autoregressive", max_new_tokens=2)
    with refused(*parts, error=TypeError):
        ask(chat)
    assert chat.messages == []


@pytest.mark.parametrize("forced", ["", "1"])
def test_drafted_text_is_colored_where_the_stream_has_colors(forced, target, monkeypatch, capsys):
    """And --explain draws its trees. The draft is the target itself, so all of its tokens are accepted."""
    monkeypatch.setenv("FORCE_COLOR", forced)
    monkeypatch.setattr(generate, "_load", lambda args: (target, ModelDraft(target, target)))
    words = ["--prompt", "a b", "--policy", "chain", "--show-drafted", "--explain", "--max-new-tokens", "8"]
    generate._generate(generate.parse_args(words))
    shown = capsys.readouterr()
    assert (generate.GREEN in shown.out) == bool(forced)
    assert shown.err.count("└─ * ") >= 5


def test_ctrl_c_ends_the_line_and_reports_what_was_decoded(target, monkeypatch, capsys):
    decode = answers.decode

    def interrupted(request: Any) -> Any:
        for number, round_ in enumerate(decode(request)):
            if number == 3:
                raise KeyboardInterrupt
            yield round_

    monkeypatch.setattr(answers, "decode", interrupted)
    monkeypatch.setattr(generate, "_load", lambda args: (target, None))
    words = ["--prompt", "a b", "--policy", "autoregressive", "--show-drafted", "--explain"]
    assert cli.run(lambda: generate._generate(generate.parse_args(words))) == 130
    shown = capsys.readouterr()
    assert shown.out.endswith("\n") and "\x1b" not in shown.out
    lines = shown.err.splitlines()
    assert (
        lines[-1] == "stopped"
        and "4 tokens: 1 from the prefill, 3 from 3 target passes (1.00 per pass)" in lines[-2]
        and sum("round" in line for line in lines) == 3
    )


def test_ctrl_c_while_a_command_imports_its_modules(monkeypatch, capsys):
    monkeypatch.setattr(scripts, "import_module", lambda name: signal.default_int_handler(2, None))
    with pytest.raises(SystemExit) as ended:
        scripts.run_script("sage-train")
    assert (ended.value.code, capsys.readouterr().err) == (130, "stopped\n")
