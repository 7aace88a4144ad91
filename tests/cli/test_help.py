"""`--help` and `--version` of every command: each key with default and meaning, the groups that the command takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from support.messages import check_message, exit_code, refused
from support.train_helpers import environment

from data_prep.sources import SourceConfig
from sage.bench.__main__ import main as bench
from sage.commands.cli import run
from sage.commands.generate import main as sage_generate
from sage.io.docstrings import key_meanings, parse_section
from sage.planning.options import defaults
from sage.serving.command import main as sage_serve
from sage.trees import POLICIES, policy_class
from train.cli.data import DataCommand
from train.cli.data import main as sage_data
from train.cli.export import main as sage_export
from train.cli.train import main as sage_train
from train.cli.validate import main as sage_validate
from train.config.descriptions import choice_meaning, policy_options
from train.config.errors import keys
from train.config.help import help_text
from train.config.hydra_app import register_resolvers
from train.config.schema import Config, ValidateConfig
from train.config.store import group_choices, register

COMMANDS: dict[str, tuple[str, Any, Any]] = {
    "sage-train": ("config", Config, sage_train),
    "sage-validate": ("validate", ValidateConfig, sage_validate),
    "sage-data": ("prepare", DataCommand, sage_data),
}
KEY = re.compile(r"  ([\w.]+)=(\S*)(?: +(.*))?")


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    register()
    register_resolvers()
    ConfigStore.instance().store(name="prepare_schema", node=DataCommand)


def helped(command: str, *words: str) -> str:
    name, schema, _ = COMMANDS[command]
    return help_text(name, schema, [*words, "--help", "all"])


def key_lines(text: str) -> dict[str, tuple[str, str]]:
    """Key -> (value, meaning) of the second half of a help."""
    lines = text[text.index("Keys (") :].splitlines()
    found = {}
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if match := KEY.fullmatch(line):
            found[match.group(1)] = (match.group(2), match.group(3) or following.strip())
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_every_key_has_a_value_and_a_meaning(command: str) -> None:
    shown = key_lines(helped(command))
    schema = COMMANDS[command][1]
    expected = {key for key in keys(schema) if not any(other.startswith(f"{key}.") for other in keys(schema))}
    expected -= {"data.sources", "decode.options"}
    expected |= {f"data.sources.LABEL.{name}" for name in key_meanings(SourceConfig)}
    if "decode" in schema.__dataclass_fields__:
        expected |= {f"decode.options.{name}.{option}" for name in POLICIES for option in defaults(policy_class(name))}
    assert shown.keys() == expected
    assert [key for key, (_, meaning) in shown.items() if not meaning] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_fits_a_screen_and_names_every_group_and_key(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name, schema, _ = COMMANDS[command]
    text = help_text(name, schema, ["--help"])
    assert len(text.splitlines()) < 100
    assert (
        max(
            len(line)
            for line in text[text.index("Choices (") : text.index("Exit codes") if "Exit" in text else None].splitlines()
        )
        < 110
    )
    groups = set(re.findall(r"^  ([\w/]+)=$", helped(command), flags=re.MULTILINE))
    assert groups == set(re.findall(r"^  ([a-z/]+)= ", text, flags=re.MULTILINE))
    shown = set(text[text.index("Keys (") :].replace("=", " ").split())
    for key in key_lines(helped(command)):
        part, _, last = key.rpartition(".")
        assert (last if not part.startswith("decode.options") else part.rpartition(".")[2]) in shown, key


def test_topics_are_described() -> None:
    def about(*topics: str) -> str:
        return help_text("config", Config, [*topics, "--help"])

    text = about("optim")
    assert "optim=\n  * adamw " in text and "  optim.grad_clip=1.0 " in text and "train." not in text
    assert "give a number above 0; SpecVLM uses 8e-5 for a 7B target" in about("optim.lr", "optim.lr=0.5")
    assert "optim.lr=0.5 " in about("optim.lr", "optim.lr=0.5")
    assert about("lr").count("peak learning rate") == 1 and "target.recipe.lr" in about("lr")
    assert "decode.options.sage.max_depth=8 " in about("sage")
    assert about("draft").count("\n  draft.compressor.") == about("draft/compressor").count("\n  draft.compressor.") > 3
    assert "qwen2_5_vl_72b" in about("target") and "num_hidden_layers" not in about("target")
    assert [line.split("=")[0] for line in about("seed").splitlines() if "=" in line] == ["  seed"]
    for topic, parts in (
        ("optim.learning", ["optim.learning:"]),
        ("lrr", ["lrr:", "did you mean lr?"]),
        ("optm", ["did you mean optim?"]),
    ):
        with refused("--help", *parts):
            about(topic)


@pytest.mark.parametrize("command", COMMANDS)
def test_only_groups_that_the_command_takes(command: str) -> None:
    groups = set(re.findall(r"^  ([\w/]+)=$", helped(command), flags=re.MULTILINE))
    data = {"target", "data"}
    measured = data | {"data/validation", "decode/policy"}
    trained = {"draft", "draft/compressor", "objective", "optim", "deepspeed", "tracking", "sweep", "experiment"}
    assert groups == {"sage-data": data, "sage-validate": measured, "sage-train": measured | trained}[command]


@pytest.mark.parametrize(
    "group", ["target", "draft", "draft/compressor", "data", "objective", "tracking", "experiment", "sweep"]
)
def test_every_choice_has_a_meaning(group: str) -> None:
    assert [choice for choice in group_choices(group) if not choice_meaning(group, choice)] == []


@pytest.mark.parametrize("choice", ["eagle", "eagle3", "peagle", "model"])
def test_keys_of_every_draft_under_every_choice(choice: str) -> None:
    text = helped("sage-train", f"draft={choice}")
    shown = key_lines(text)
    assert f"  * {choice} " in text and shown["draft.kind"][0] == choice
    assert shown["draft.draft_vocab_size"][0] == "null" and "only with draft=eagle3|peagle|block" in " ".join(text.split())
    assert shown["draft.num_layers"][0] == ("null" if choice == "model" else "1") and shown["draft.input_norm"][0] == "true"


def test_defaults_of_other_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "128")  # a narrow terminal breaks a long list of choices
    shown = " ".join(helped("sage-train").split())
    others = "block|distill|eagle|lk|model|peagle"
    assert f"objective.steps=7 unrolled draft steps per training step; 1 with objective={others}" in shown
    assert "draft.compressor.ratio=20" in shown and "3 with draft/compressor=conv|weighted" in shown
    assert "data.num_workers=0" in shown and "8 with data=llava_onevision" in shown
    assert "launch.device=auto device of the ranks; one of auto, cpu, cuda" in shown
    assert key_lines(helped("sage-train", "objective=eagle"))["objective.steps"][0] == "1"


@pytest.mark.parametrize("words", [("sage-train",), ("sage-train", "experiment=demo"), ("sage-validate",)])
def test_the_default_policies_include_cost_aware(words: tuple[str, ...]) -> None:
    assert key_lines(helped(*words))["decode.policies"][0] == "[autoregressive,chain,static,sage,cost_aware]"


def test_the_composed_configuration_is_shown() -> None:
    shown = key_lines(helped("sage-train", "experiment=demo", "target=qwen2_5_vl_7b", "optim.lr=0.5"))
    assert (shown["optim.lr"][0], shown["train.max_steps"][0], shown["run.dir"][0]) == ("0.5", "550", "runs/demo")
    assert (shown["decode.options.sage.max_width"][0], shown["decode.options.sage.max_nodes"][0]) == ("2", "64")
    assert shown["target.path"][0] == "Qwen/Qwen2.5-VL-7B-Instruct"
    missing = key_lines(helped("sage-train", "target=by_path"))
    assert missing["target.path"][0] == "???" and missing["target.name"][0].startswith("${")
    assert key_lines(helped("sage-train", "-m", "seed=1,2", "train.max_steps=3"))["train.max_steps"][0] == "3"


@pytest.mark.parametrize("policy", POLICIES)
def test_options_read_from_the_source_are_those_of_the_class(policy: str) -> None:
    options, expected = policy_options(policy), defaults(policy_class(policy))
    assert options.keys() == expected.keys()
    for name, option in options.items():
        if (policy, name) != ("static", "paths"):
            value = expected[name]
            assert option.default == (value if isinstance(value, str) else json.dumps(value))


def test_sections_of_docstrings() -> None:
    doc = """Title.

    Attributes:
        one, two: first line
            and second.
        three: last; a: b.

    Raises:
        four: not an attribute.
    """
    assert parse_section(doc) == {"one": "first line and second.", "two": "first line and second.", "three": "last; a: b."}
    assert parse_section("No section.") == {}


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("draft=", {"draft=block", "draft=eagle", "draft=eagle3", "draft=model", "draft=peagle"}),
        ("draft=eagle3 draft.draft_v", {"draft.draft_vocab_size="}),
    ],
)
def test_shell_completion(line: str, expected: set[str], tmp_path: Path) -> None:
    """The function that `sage-train -sc install=bash` defines, called as bash calls it after the tab key."""
    folder = Path(sys.executable).parent
    assert (folder / "sage-train").is_file(), "the package is installed"
    words = f"sage-train {line}".split(" ")
    script = f"""
        eval "$(sage-train -sc install=bash)"
        export COMP_LINE="sage-train {line}" COMP_POINT={len(line) + 11} COMP_CWORD={len(words) - 1}
        hydra_bash_completion
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    path = f"{folder}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment() | {"PATH": path}, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == expected
    assert list(tmp_path.iterdir()) == []
