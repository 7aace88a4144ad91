"""Tables as Markdown and as text: alignment, padding, rules, escapes."""

from sage.io.tables import RULE, markdown_table, text_table

HEAD = ["policy", "tokens", "speed"]
ROWS = [["chain", "12", "1.50x"], ["cost_aware", "3", ""]]


def test_markdown_columns_are_aligned_by_side():
    assert markdown_table(HEAD, ROWS).splitlines() == [
        "| policy | tokens | speed |",
        "| :-- | --: | --: |",
        "| chain | 12 | 1.50x |",
        "| cost_aware | 3 |  |",
    ]
    assert markdown_table(HEAD, ROWS, "<<>").splitlines()[1] == "| :-- | :-- | --: |"
    assert markdown_table(HEAD, [], "<").splitlines()[1] == "| :-- | :-- | :-- |"


def test_markdown_pipes_are_escaped_once():
    assert markdown_table(["a"], [["x|y"], [r"x\|y"]]).splitlines()[2:] == [r"| x\|y |", r"| x\|y |"]


def test_text_columns_are_padded_to_the_widest_cell():
    assert text_table(HEAD, [ROWS[0], RULE, ROWS[1]]).splitlines() == [
        "policy      tokens  speed",
        "-------------------------",
        "chain           12  1.50x",
        "-------------------------",
        "cost_aware       3",
    ]


def test_text_layout_options():
    text = text_table(HEAD, ROWS, "<", indent=2, min_widths=(12,), ruled=False)
    assert text.splitlines() == [
        "  policy        tokens  speed",
        "  chain         12      1.50x",
        "  cost_aware    3",
    ]
    assert text_table(None, ROWS, indent=1).splitlines()[1] == " cost_aware   3"
    assert text_table(None, []) == ""
