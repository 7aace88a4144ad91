"""The table of policies in the documentation, generated from their classes."""

from __future__ import annotations

from pathlib import Path

from support.messages import refused

import sage
from sage.bench.__main__ import main
from sage.bench.options import END, START, policy_table, with_table
from sage.planning.options import defaults


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
