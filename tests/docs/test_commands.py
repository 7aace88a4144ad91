"""The commands of README.md and docs/: every block is executed, or checked where its page marks it as `norun: REASON`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.doc_blocks import COMMANDS, ROOT, Block, blocks, command_lines, pages, spans, tracked_files
from support.doc_checks import check_call, check_settings, make_placeholders
from support.doc_workspace import ENTRY_POINTS, SHORTER, Workspace

POCKET, DEMO = "data_prep/pocket/targets/pocket_qwen2_5_vl", "runs/demo_pocket_qwen2_5_vl"
PAGES = pages()
pytestmark = pytest.mark.timeout(900)  # a page is one test
# What the placeholders of a page stand for when its blocks are executed, and figures that are smaller here.
SUBSTITUTIONS = {
    "README.md": {
        '"Qwen/Qwen2.5-VL-7B-Instruct", dtype=torch.bfloat16, device="cuda"': f'"{POCKET}"',
        '"runs/x"': f'"{DEMO}"',
        '"train.max_steps=100"': ", ".join(f'"{key}={value}"' for key, value in SHORTER["sage-train"].items()),
        "train.max_steps=30": "train.max_steps=2",
    },
    "docs/decoder.md": {
        "--num-prompts 4": "--num-prompts 2 --max-new-tokens 16 --repeats 1",
        "num_examples=100": "num_examples=24",
    },
    "docs/exporting.md": {"RUN": "runs/pocket_qwen2_5_vl-eagle3-chats", "TARGET": POCKET, "DIR": "exports/again"},
    "docs/launching.md": {"RUN": DEMO, "train.max_steps=20": "train.max_steps=2", "train.max_steps=600": "train.max_steps=4"},
}
EXAMPLE = re.compile(r"NAME|messages\.json|(llava|llava_7b)\.(py|yaml)$|^conf/data/mine")  # files that a reader may add
WITH_VALUE = ("--draft", "--inspect", "--serve-check")  # options that the text names without their value
SETTING = re.compile(r"\+?[a-z_]+([./@][a-z_0-9]+)*=\S*")


@pytest.fixture
def placeholders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_placeholders(tmp_path)
    monkeypatch.chdir(tmp_path)


def bash_blocks(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.language == "bash"]


@pytest.mark.slow
@pytest.mark.usefixtures("placeholders")
@pytest.mark.parametrize("page", PAGES)
def test_every_block_calls_commands_with_existing_options(page: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    for block in bash_blocks(page):
        calls = command_lines(block.text, tmp_path_factory.mktemp("recorders"))
        assert calls, f"{block.place}: no command"
        for call in calls:
            try:
                check_call(call)
            except (Exception, SystemExit) as error:
                raise AssertionError(f"{block.place}: {shlex.join(call)}: {error!r}") from error


@pytest.mark.slow
@pytest.mark.usefixtures("placeholders")
@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])  # which names what was removed
def test_commands_and_settings_in_the_text_exist(page: str) -> None:
    for line, span in spans(page):
        words = shlex.split(re.sub(r"\[(--[^]]*)\]", r"\1", span)) if span.count("'") % 2 == 0 else []
        try:
            if words and words[0] in COMMANDS:
                check_call(words if words[-1] not in WITH_VALUE else [*words, "DIR"])
            elif words and all(is_setting(word) for word in words):
                check_settings(words)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{page}:{line}: `{span}`: {error!r}") from error


def is_setting(word: str) -> bool:
    """Whether a word is an override, not a Python argument: its key is dotted or a group of choices."""
    key = word.lstrip("+").split("=")[0]
    return bool(SETTING.fullmatch(word)) and ("." in key or "/" in key or (ROOT / "conf" / key).is_dir())


@pytest.mark.parametrize("page", PAGES)
def test_links_and_files_exist(page: str) -> None:
    home, text = (ROOT / page).parent, (ROOT / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if path.startswith("http"):
            continue
        file = (home / path) if path else ROOT / page
        assert file.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors(file), f"{page}: {link}: no such section"
    tops = {name.split("/")[0] for name in tracked_files() if "/" in name}
    for line, span in spans(page):
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?", span) and span.split("/")[0] in tops and not EXAMPLE.search(span):
            assert (ROOT / span).exists(), f"{page}:{line}: `{span}`: no such file"


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub names them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """A checkout after the first block of README.md, `make demo`."""
    made = Workspace(tmp_path_factory.mktemp("docs") / "checkout")
    made.output = made.run(to_execute("README.md")[0], {})
    yield made
    made.commands.close()


def to_execute(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.language in ("bash", "python") and block.reason is None]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if to_execute(page)])
def test_the_blocks_run(page: str, workspace: Workspace) -> None:
    first = 1 if page == "README.md" else 0  # the fixture has executed `make demo`
    for block in to_execute(page)[first:]:
        workspace.run(block, SUBSTITUTIONS.get(page, {}))


@pytest.mark.slow
def test_runs_named_in_docs_and_help_exist_after_the_demo(workspace: Workspace) -> None:
    texts = {page: "\n".join(span for _, span in spans(page)) for page in PAGES if page != "CHANGELOG.md"}
    texts |= {name: workspace.shell(f"{name} --help") for name in ENTRY_POINTS}
    for where, text in texts.items():
        for path in re.findall(r"\bruns/demo[\w/]*", text):
            assert (workspace.folder / path).exists(), f"{where}: {path}"


@pytest.mark.slow
def test_a_run_states_at_its_start_and_at_its_end_which_engines_serve_its_draft(workspace: Workspace) -> None:
    first, last = (line for line in workspace.output.splitlines() if "can be served by" in line)
    served = (
        "can be served by this decoder only; not by vLLM and SGLang: draft.input_norm=true (train with draft.input_norm=false"
    )
    assert served in first and last.startswith(f"draft: {DEMO}/draft: {served}")


def test_every_target_of_make_is_documented() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    names = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split()
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES if page != "CHANGELOG.md")
    assert [name for name in names if not re.search(rf"\bmake {name}\b", text)] == []
