"""Commands, options, keys, files, sections, tests, plans and messages named by the pages exist; each check can fail."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.doc_commands import check_blocks, check_call, check_text, make_placeholders
from support.doc_pages import REVIEW, REVIEW_ROW, ROOT, check_files, check_links, check_review, pages, read
from support.doc_quotes import MESSAGES, PLAN, check_generated, check_messages, quoted_plan
from support.messages import SNAPSHOT, refused

import sage
from sage.bench.__main__ import main
from sage.bench.policies import END, START, policy_table, with_table
from sage.planning.options import defaults

PAGES = pages()
FAST, SLOW = (check_links, check_files, check_review, check_messages), (check_blocks, check_text, check_generated)
CHECKS = [*FAST, *(pytest.param(check, marks=pytest.mark.slow) for check in SLOW)]
Check = Callable[[str], None]
HEADER = "| # | finding | state | test or reason |\n| --: | :-- | :-- | :-- |\n"
PLANNED = "target=qwen2_5_vl_7b data=llava_instruct launch.gpus=8 launch.gpu_memory_gb=48"


@pytest.fixture(autouse=True)
def placeholders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_placeholders(tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_page_is_right(check: Check, page: str) -> None:
    if (check, page) != (check_text, "CHANGELOG.md"):  # which names what was removed
        check(page)


def bash(script: str) -> str:
    return f"```bash norun: wrong\n{script}\n```\n"


@pytest.mark.parametrize(
    ("check", "text", "reason"),
    [
        (check_links, "[x](gone.md)", "gone.md: no such file"),
        (check_links, "# A `b`, c\n[x](#a-b-c) [y](#a-b)", "#a-b: no such section"),
        (check_files, "`tests/docs/test_pages.py` `docs/gone.md`", "`docs/gone.md`: no such file"),
        (check_review, HEADER + "| 1 | x | open | |\n| 3 | x | open | |", "finding 3 follows 1"),
        (check_review, HEADER + "| 1 | x | fixed | |", "no state or evidence"),
        (check_review, HEADER + "| 1 | x | fixed | `test_pages.py`: `wrong_page`, `no_such_" + "name` |", "no such test"),
        (check_review, HEADER + "| 1 | x | fixed | `test_no_such_" + "file.py` |", "no such test"),
        (check_blocks, "```sh\nmake\n```\n", "language 'sh'"),
        (check_blocks, "```bash slow\nmake\n```\n", "only `norun: REASON`"),
        (check_blocks, "```text norun: output\nmake\n```\n", "only `norun: REASON`"),
        (check_blocks, "```bash\nsage-generate --prom x\n```\n", "--prom"),
        (check_blocks, bash("# nothing"), "no command"),
        (check_blocks, bash("make demo; wget x"), "wget"),
        (check_blocks, bash("make 'demo"), "unexpected EOF"),
        (check_blocks, bash("make demonstrate"), "demonstrate"),
        (check_blocks, bash("pip install '.[gone]'"), "gone"),
        (check_blocks, bash("python examples/gone.py"), "gone.py: no such file"),
        (check_blocks, bash("python -m pytest tests/gone.py"), "tests/gone.py"),
        (check_blocks, bash("python -m sage.gone"), "sage.gone"),
        (check_blocks, bash("python -m sage.bench costs --shapes x"), "--shapes"),
        (check_blocks, bash("python -m benchmarks.training step draft=gone"), "draft"),
        (check_blocks, bash("vllm serve x --speculative-config '{}'"), "--speculative-config"),
        (check_blocks, bash("srun --nodes=1 sage-train target=gone"), "target"),
        (check_blocks, bash("deepspeed --no_pythons sage-train"), "--no_pythons"),
        (check_blocks, bash("python -m torch.distributed.run --nproc=2 sage-train"), "--nproc=2"),
        (check_blocks, bash("sage-train target=pocket_qwen2_5_vl data=pocket --gone"), "SystemExit"),
        (check_blocks, bash("sage-train target=pocket_qwen2_5_vl data=pocket optim.gone=1"), "optim.gone"),
        (
            check_blocks,
            bash("sage-train target=pocket_qwen2_5_vl data=pocket train.micro_batch_size=3"),
            "train.micro_batch_size",
        ),
        (check_blocks, bash("sage-train -m target=pocket_qwen2_5_vl optim.gone=1,2"), "optim.gone"),
        (check_blocks, bash("sage-train -m target=pocket_qwen2_5_vl draft=eagle,gone"), "gone"),
        (check_blocks, bash("sage-train -m sweep=gone optim.lr=1,2"), "gone"),
        (check_blocks, bash("sage-validate checkpoints=DIR"), "checkpoints"),
        (check_blocks, bash("sage-validate --compare RUN --outs x"), "--outs"),
        (check_blocks, bash("sage-data action=remove"), "action"),
        (check_blocks, bash("sage-generate --prom x"), "--prom"),
        (check_blocks, bash("sage-generate --prompt x --policy gone"), "gone"),
        (check_blocks, bash("sage-export RUN --format gguf"), "gguf"),
        (check_text, "`sage-export --inspects DIR`", "--inspects"),
        (check_text, "`make demonstrate`", "demonstrate"),
        (check_text, "`optim.gone=1`", "optim.gone"),
        (check_text, "`optim.lr=high`", "optim.lr"),
        (check_text, "`draft=eagle9`", "eagle9"),
        (check_text, "`decode.options.sage.gone=1`", "no option gone"),
        (check_generated, f"{START}\n| policy |\n{END}", "make docs"),
        (check_generated, "<!-- plan: target=qwen2_5_vl_7b -->\n```\n```\n", "no block of text"),
        (check_generated, f"<!-- verdict: {PLANNED} -->\n```text\nfits\n```\n<!-- end -->", "make docs"),
        (check_messages, "```text\nerror: d2t: holds absolute ids\n```\n", "holds absolute ids"),
        (check_messages, "<!-- messages -->\n```text\nloss is near zero\n```\n<!-- end -->", "loss is near zero"),
        (check_messages, "<!-- messages -->\n```text\n```\n", "no end"),
        (check_messages, "<!-- messages -->\n| `error: fc.weight: left out` |\n<!-- end -->", "fc.weight"),
    ],
)
def test_a_wrong_page_is_refused(check: Check, text: str, reason: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    with pytest.raises((AssertionError, ValueError)) as caught:
        check(str(page))
    assert reason in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--cpu",)])
def test_the_commands_of_the_first_gpu_hour_exist(options: tuple[str, ...]) -> None:
    done = subprocess.run(["benchmarks/first_gpu_hour.sh", "--list", *options], cwd=ROOT, capture_output=True, text=True)
    steps = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert done.returncode == 0 and len(steps) >= 18
    for call in map(shlex.split, steps.values()):
        if "--resume" not in call and call[0] != "sage-data":
            check_call(call)
    if not options:
        blocks = re.findall(r"<!-- figures: ([\w ]+) -->", read("docs/gpu.md"))
        assert {name for block in blocks for name in block.split()} - {"steps"} <= steps.keys()


@pytest.mark.slow
def test_a_changed_figure_of_a_plan_is_renewed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    verdict = quoted_plan("verdict", PLANNED)
    page.write_text(f"<!-- verdict: {PLANNED} -->\n```text\n{verdict}\n```\n<!-- end -->", encoding="utf-8")
    check_generated(str(page))
    page.write_text(page.read_text().replace(" GB too much", "0 GB too much"), encoding="utf-8")
    with pytest.raises(AssertionError, match="make docs"):
        check_generated(str(page))


def test_no_check_has_lost_its_subject() -> None:
    text = "\n".join(map(read, PAGES))
    assert {found[2] for found in PLAN.finditer(text)} == {"plan", "serving", "verdict"} and START in text
    assert len(MESSAGES.findall(text)) >= 10 and len(REVIEW_ROW.findall("".join(REVIEW.findall(text)))) == 42


def test_every_target_of_make_is_documented() -> None:
    names = re.search(r"^\.PHONY: (.*)$", read("Makefile"), re.MULTILINE)[1].split()
    text = "\n".join(read(page) for page in PAGES if page != "CHANGELOG.md")
    assert [name for name in names if not re.search(rf"\bmake {name}\b", text)] == []


def test_the_recorded_messages_are_those_of_tests_that_exist() -> None:
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    suites = "\n".join(text for name, text in sources.items() if name.startswith("tests/support/"))
    for name in json.loads(SNAPSHOT.read_text(encoding="utf-8")):
        file, test = name.split("::")[0], re.findall(r"::(\w+)", name.partition("[")[0])[-1]
        assert f"def {test}(" in sources[file] + suites, f"{name}: remove it from messages.json"


def test_every_policy_has_a_row_with_its_options_and_defaults() -> None:
    rows = policy_table().splitlines()[2:]
    assert len(rows) == len(sage.POLICIES)
    for name, row in zip(sage.POLICIES, rows, strict=True):
        assert row.startswith(f"| `{name}` |")
        assert all(f"`{option}` " in row for option in defaults(sage.trees.policy_class(name)))
    text = "\n".join(rows)
    for part in ("`depth` 5", "`ratio` 0.03", "`max_depth` null", "`history` true", "`threshold` cumulative or node"):
        assert part in text


def test_writing_replaces_what_is_between_the_markers(tmp_path: Path, capsys) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{START}\nold\n{END}\nafter\n")
    main(["policies", "--write", str(page)])
    assert page.read_text() == f"before\n{START}\n{policy_table()}\n{END}\nafter\n"
    main(["policies"])
    assert capsys.readouterr().out.strip() == policy_table()


def test_a_page_without_markers_is_refused() -> None:
    with refused("--write", START):
        with_table("no table here")
