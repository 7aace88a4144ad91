"""What a user meets in the first hour with answers: names of targets, what results print, wrong types, colors, Ctrl-C."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from support.messages import refused
from support.models import make_inputs, make_qwen, random_draft
from support.processors import make_processor

import sage
from sage.commands import cli, generate
from sage.decoding import generation as answers
from sage.decoding.chat import Chat
from sage.io.files import config_dir
from sage.targets.loading import path_of_target


@pytest.fixture
def target() -> sage.Target:
    return sage.Target(make_qwen().model, make_processor(make_qwen()))


def test_a_name_of_the_configuration_is_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pocket target is a folder of the package, another one a hub id; a folder of that name takes precedence."""
    names = [path.stem for path in (config_dir() / "target").glob("*.yaml") if path.stem != "by_path"]
    assert len(names) > 40
    for name in names:
        found = path_of_target(name)
        assert (Path(found) / "config.json").is_file() if name.startswith("pocket_") else re.fullmatch(r"[\w-]+/[\w.-]+", found)
    assert path_of_target("Qwen/Qwen2.5-VL-7B-Instruct") == "Qwen/Qwen2.5-VL-7B-Instruct"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pocket_qwen3_vl").mkdir()
    assert path_of_target("pocket_qwen3_vl") == "pocket_qwen3_vl"
    with refused("pocket_qwen3_vl", "no config.json there"):
        sage.load_target("pocket_qwen3_vl")


def test_an_answer_prints_its_text_and_its_figures_in_a_line(target: sage.Target) -> None:
    out = Chat(target, random_draft(target).eval(), "static", max_new_tokens=12).ask("a b")
    assert str(out) == out.text and out.text
    assert repr(out) == f"Output({out.text!r}, {out.stats!r})" and "\n" not in repr(out)
    assert re.fullmatch(
        rf"Stats\(12 tokens, {out.stats.rounds} target passes \(\d\.\d\d tokens per pass\), \d+ draft passes, [\d.]+ s\)",
        repr(out.stats),
    )


@pytest.mark.parametrize(
    ("ask", "parts"),
    [
        (lambda chat: chat.ask(5), ["text: int", "string"]),
        (lambda chat: chat.ask("What?", images="photo.jpg"), ["images: str", "images=[...]"]),
        (lambda chat: chat.ask("What?", videos=Path("clip.mp4")), ["videos: PosixPath", "videos=[...]"]),
        (lambda chat: chat.target.prepare("hello"), ["messages: str", '"role": "user"']),
        (lambda chat: chat.target.prepare(["hello"]), ["messages: list", '"role": "user"']),
    ],
)
def test_wrong_types_are_named_with_the_right_one(ask: Any, parts: list[str], target: sage.Target) -> None:
    chat = Chat(target, None, "autoregressive", max_new_tokens=2)
    with refused(*parts, error=TypeError):
        ask(chat)
    assert chat.messages == []


def test_a_prompt_beyond_the_context_is_to_be_shortened(target: sage.Target) -> None:
    target.text_config.max_position_embeddings = 8
    with refused("prompt: 16 tokens", "context length is 8", "shorten the prompt"):
        sage.generate(target, None, make_inputs(target, length=12), "autoregressive", max_new_tokens=4)


@pytest.mark.parametrize(
    ("is_terminal", "variables", "expected"),
    [(True, {}, True), (False, {}, False), (True, {"NO_COLOR": "1"}, False), (False, {"FORCE_COLOR": "1"}, True)],
)
def test_colors_are_for_terminals(
    is_terminal: bool, variables: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal, raising=False)
    assert cli.has_colors(stream) is expected


def test_ctrl_c_ends_the_line_and_reports_what_was_decoded(
    target: sage.Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decode = answers.decode

    def interrupted(request: Any) -> Any:
        for number, round_ in enumerate(decode(request)):
            if number == 3:
                raise KeyboardInterrupt
            yield round_

    monkeypatch.setattr(answers, "decode", interrupted)
    monkeypatch.setattr(generate, "_load", lambda args: (target, None))
    words = ["--prompt", "a b", "--policy", "autoregressive", "--show-drafted", "--explain"]
    assert cli.run(lambda: generate._generate(generate.parse_args(words))) == cli.EXIT_CRASH
    shown = capsys.readouterr()
    assert shown.out.endswith("\n") and "\x1b" not in shown.out
    lines = shown.err.splitlines()
    assert lines[-1] == "stopped" and "4 tokens in 3 target passes" in lines[-2] and sum("round" in line for line in lines) == 3
