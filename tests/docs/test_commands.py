"""The commands and programs of README.md, the examples and the notebook, executed in a copy of the checkout."""

import json
import re

import pytest
from support.doc_pages import ROOT, pages, read, spans
from support.doc_workspace import ENTRY_POINTS, Workspace
from support.fork_server import ForkServer

EXAMPLES = ROOT / "examples"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a page is one test


@pytest.fixture(scope="module")
def workspace(commands: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A checkout after the blocks of README.md, the first of which is `make demo`."""
    made = Workspace(tmp_path_factory.mktemp("docs") / "checkout", commands)
    made.execute("README.md")
    return made


def test_runs_named_in_docs_and_help_exist_after_the_demo(workspace: Workspace) -> None:
    texts = {page: "\n".join(span for _, span in spans(page)) for page in pages() if page != "CHANGELOG.md"}
    texts |= {name: workspace.run("bash", f"{name} --help", name) for name in ENTRY_POINTS}
    for where, text in texts.items():
        for path in re.findall(r"\bruns/demo[\w/]*", text):
            assert (workspace.folder / path).exists(), f"{where}: {path}"


def test_ones_own_data_become_a_run_and_an_export(workspace: Workspace) -> None:
    """In both layouts of README.md."""
    chats, llava = (text for text in workspace.execute("README.md") if "20 examples, 20 measured" in text)
    for text, name in ((chats, "chats"), (llava, "llava")):
        assert "0 invalid items skipped" in text and "own answers: " in text and "the longest of 20 examples" in text
        assert text.count("\nverdict: ") == 2 and "\nnext: sage-" in text and text.count("1 prompt, 1 run each") == 2
        run = workspace.folder / "runs" / f"pocket_qwen2_5_vl-eagle3-{name}"
        (report,) = (run / "validation").glob("*/report.json")
        assert all(found["match"] == found["total"] for found in json.loads(report.read_text())["policies"].values())
        assert list((run / "checks").iterdir())
        export = workspace.folder / "exports" / name
        assert (export / "model.safetensors").is_file() and "trained for 2 steps" in (export / "README.md").read_text()


def test_examples(workspace: Workspace) -> None:
    page = "examples/README.md"
    (output,) = workspace.execute(page)
    assert "step 10: loss" in output and "sage: " in output and output.count("confident: ") == 2
    assert "2/2 texts identical" in output and "2 prompts, 2 texts identical" in output
    for path in EXAMPLES.iterdir():
        if path.suffix in (".py", ".ipynb"):
            assert f"({path.name})" in read(page) and (path.suffix == ".ipynb" or f"python examples/{path.name}" in output)


def test_notebook(workspace: Workspace) -> None:
    cells = json.loads((EXAMPLES / "pocket_pipeline.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    output = workspace.run("python", "\n\n".join(code), "pocket_pipeline.ipynb")
    assert "tokens per target pass" in output and (workspace.folder / "runs/notebook/draft").is_dir()
