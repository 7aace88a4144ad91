"""`--help` and `--version` of every command: each key with value and meaning, the groups that the command takes."""

import re
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from support.messages import check_message, exit_code, refused

from sage.bench.__main__ import main as bench
from sage.commands.cli import run
from sage.commands.generate import main as sage_generate
from sage.serving.command import main as sage_serve
from train.cli.data import DataCommand
from train.cli.data import main as sage_data
from train.cli.export import main as sage_export
from train.cli.train import main as sage_train
from train.cli.validate import main as sage_validate
from train.config.help import help_text
from train.config.schema import Config, ValidateConfig
from train.config.store import choice_meaning, group_choices, keys_of, register

COMMANDS: dict[str, tuple[str, Any]] = {
    "sage-train": ("config", Config),
    "sage-validate": ("validate", ValidateConfig),
    "sage-data": ("prepare", DataCommand),
}
DATA_GROUPS = {"target", "data"}
MEASURED = DATA_GROUPS | {"data/validation", "decode/policy"}
TRAINED = {"draft", "draft/compressor", "objective", "optim", "deepspeed", "tracking", "sweep", "experiment"}
GROUPS = {"sage-data": DATA_GROUPS, "sage-validate": MEASURED, "sage-train": MEASURED | TRAINED}
KEY = re.compile(r"  ([a-z][\w.]+)(?:=(\S*))?(?: +(.*))?")


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """The schemas of all commands, and a terminal of a known width."""
    register()
    ConfigStore.instance().store(name="prepare_schema", node=DataCommand)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "120")
        yield


@cache
def helped(command: str, *words: str) -> str:
    return help_text(*COMMANDS[command], [*words, "--help"])


def key_lines(text: str) -> dict[str, tuple[str | None, str]]:
    """Key -> (value, meaning) of the second half of a complete help."""
    lines = text[text.index("Keys (") : text.index("Exit codes") if "Exit codes" in text else None].splitlines()
    found = {}
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if match := KEY.fullmatch(line):
            found[match.group(1)] = (match.group(2), match.group(3) or following.strip())
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_every_key_and_group_is_shown(command: str) -> None:
    """On one screen and in the complete help, there with a meaning."""
    schema = COMMANDS[command][1]
    shown, screen = key_lines(helped(command, "all")), helped(command)
    expected = keys_of(schema).keys()
    assert {"data.sources.LABEL.kind", "target.path"} < expected
    assert shown.keys() == expected
    assert [key for key, (_, meaning) in shown.items() if not meaning] == []
    words = set(screen[screen.index("Keys (") :].replace("=", " ").split())
    for key in expected:
        assert key.rpartition(".")[2] in words, key
    assert set(re.findall(r"^  ([\w/]+)=$", helped(command, "all"), flags=re.MULTILINE)) == GROUPS[command]
    assert set(re.findall(r"^  ([a-z/]+)= ", screen, flags=re.MULTILINE)) == GROUPS[command]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_fits_a_screen(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = help_text(*COMMANDS[command], ["--help"])
    assert len(text.splitlines()) < 100
    keys = text[text.index("Choices (") :].partition("Exit codes")[0]
    assert max(map(len, keys.splitlines())) <= 80


@pytest.mark.slow
def test_topics_are_described() -> None:
    text = helped("sage-train", "optim")
    assert "optim=\n  * adamw " in text and "  optim.grad_clip=1.0 " in text and "train." not in text
    assert "optim.lr=0.5 " in helped("sage-train", "optim.lr", "optim.lr=0.5")
    assert "target.recipe.lr" in helped("sage-train", "lr")
    assert helped("sage-train", "draft/compressor").count("\n  draft.compressor.") > 3
    assert "qwen2_5_vl_72b" in helped("sage-train", "target") and "num_hidden_layers" not in helped("sage-train", "target")
    for topic, near in (("optim.learning", ""), ("lrr", "did you mean lr?"), ("optm", "did you mean optim?")):
        with refused("--help", topic, near):
            helped("sage-train", topic)


@pytest.mark.parametrize(
    "group", ["target", "draft", "draft/compressor", "data", "decode/policy", "objective", "tracking", "experiment", "sweep"]
)
def test_every_choice_has_a_meaning(group: str) -> None:
    assert [choice for choice in group_choices(group) if not choice_meaning(group, choice)] == []


@pytest.mark.slow
def test_the_composed_configuration_is_shown() -> None:
    words = ("experiment=demo", "draft=model", "target=qwen2_5_vl_7b", "optim.lr=0.5", "all")
    text = helped("sage-train", *words)
    shown = key_lines(text)
    assert (shown["optim.lr"][0], shown["train.max_steps"][0], shown["run.dir"][0]) == ("0.5", "550", "runs/demo")
    assert shown["decode.options"][0] == "{autoregressive,chain,static,sage,cost_aware}"
    assert shown["decode.policies"][0] == "[autoregressive,chain,static,sage,cost_aware]"
    assert shown["target.path"][0] == "Qwen/Qwen2.5-VL-7B-Instruct"
    assert "  * model " in text and shown["draft.kind"][0] == "model" and shown["draft.num_layers"][0] == "null"
    assert "only with draft=eagle3|peagle|block" in " ".join(text.split()) and shown["draft.draft_vocab_size"][0] == "null"
    assert shown["draft.compressor.ratio"][0] is None  # set by other choices
    missing = key_lines(helped("sage-train", "target=by_path", "all"))
    assert missing["target.path"][0] == "???" and str(missing["target.name"][0]).startswith("${")
    assert key_lines(helped("sage-train", "-m", "seed=1,2", "train.max_steps=3", "all"))["train.max_steps"][0] == "3"


@pytest.mark.parametrize(
    "main", [sage_train, sage_validate, sage_data, sage_generate, sage_export, sage_serve, lambda: sys.exit(run(bench))]
)
def test_version(main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(main, "--version") == 0
    assert re.fullmatch(r"sage-draft \S+, torch \S+, transformers \S+, Python \S+\n", capsys.readouterr().out)


def test_mistakes_beside_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(sage_train, "draft=eagel", "--help") == 2
    check_message(capsys.readouterr().err, "draft=eagel", "draft=eagle")
    assert exit_code(sage_validate, "-h") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Measures") and "sage-validate checkpoint=runs/demo" in shown
