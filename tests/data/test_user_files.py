"""What users feed in: public layouts through `data=auto`, keys that templates render, text that looks like markup, bad rows."""

import copy
import gzip
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.data_helpers import make_processor, make_target, png, save_images, share_turns, train_step
from support.messages import refused

import sage
from data_prep.build import build_dataset
from data_prep.chat import encode_example
from data_prep.config import DataConfig, Images, OnBad, Thinking
from data_prep.conversation import BadItem, Conversation, check_conversation
from data_prep.dialog import Outcome, TargetAnswer
from data_prep.server.answers import answer_of
from data_prep.server.client import MediaPolicy, request_messages
from data_prep.sources import SourceConfig, open_source
from data_prep.sources.base import Split, as_prompt
from data_prep.sources.hub import Rows
from data_prep.sources.layouts import table_messages
from data_prep.sources.rows import RawRows
from data_prep.tools.actions import described
from sage.inputs.processing import Processor

ASKED, TOLD = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "Red."}
EMBEDDED = {"bytes": png(), "path": None}
LAYOUTS: dict[str, dict[str, Any]] = {  # published layouts: one row of each
    "LLaVA": {"id": "0", "image": "a.png", "conversations": share_turns("<image>\nWhat?", "Red.")},
    "LLaVA-OneVision": {"image": EMBEDDED, "conversations": share_turns("<image>\nWhat?", "Red."), "data_source": "x"},
    "ShareGPT": {"id": "0", "conversations": share_turns("What?", "Red.")},
    "ShareGPT4V": {"id": "0", "image": "a.png", "conversations": share_turns("What?\n<image>", "Red.")},
    "FineVision": {"images": [EMBEDDED], "texts": [{"user": "What?", "assistant": "Red."}], "source": "x", "relevance_min": 4},
    "OpenAI fine-tuning": {"messages": [{"role": "system", "content": "Be brief."}, ASKED, TOLD | {"weight": 1}]},
    "OpenAI batch": {"custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [ASKED, TOLD]}},
    "SpecForge": {"id": "0", "conversations": [ASKED, TOLD]},
    "HF image column": {"question": "What?", "answer": "Red.", "image": EMBEDDED},
}
FORMS: dict[str, Callable[[Path, list[dict[str, Any]]], Path]] = {
    "lines": lambda at, rows: _put(at / "rows.jsonl", "\n".join(map(json.dumps, rows)).encode()),
    "array": lambda at, rows: _put(at / "rows.json", json.dumps(rows).encode()),
    "array in lines' clothing, with a byte order mark": lambda at, rows: _put(
        at / "rows.jsonl", ("\ufeff" + json.dumps(rows, indent=1)).encode()
    ),
    "lines named as an array": lambda at, rows: _put(at / "rows.json", "\n".join(map(json.dumps, rows)).encode()),
    "gzip": lambda at, rows: _put(at / "rows.jsonl.gz", gzip.compress("\n".join(map(json.dumps, rows)).encode())),
    "shards": lambda at, rows: (
        [_put(at / "d" / f"{i}.jsonl", json.dumps(row).encode()) for i, row in enumerate(rows)][0].parent
    ),
    "pattern": lambda at, rows: FORMS["shards"](at, rows) / "*.jsonl",
    "nested": lambda at, rows: FORMS["shards"](at / "n", rows).parent,
    "parquet": lambda at, rows: _table(rows, lambda table: table.to_parquet(at / "t.parquet"), at / "t.parquet"),
    "saved": lambda at, rows: _table(rows, lambda table: table.save_to_disk(at / "disk"), at / "disk"),
    "arrow": lambda at, rows: next(FORMS["saved"](at, rows).glob("*.arrow")),
}


def _put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(content)
    return path


def _table(rows: list[dict[str, Any]], save: Callable[[datasets.Dataset], Any], path: Path) -> Path:
    save(datasets.Dataset.from_list(rows))
    return path


def opened(path: Path, **options: Any) -> Any:
    return open_source("it", SourceConfig(kind="auto", path=str(path), **options), Split.train, str(path.parent / "cache"))


@pytest.fixture(scope="module")
def target() -> sage.Target:
    return make_target("qwen2_5_vl")


@pytest.mark.parametrize("name", LAYOUTS)
def test_public_layouts_are_recognized_and_trained(name: str, target: sage.Target, tmp_path: Path) -> None:
    save_images(tmp_path, "a.png")
    rows = [LAYOUTS[name]] * 4
    path = FORMS["parquet" if EMBEDDED in (rows[0].get("image"), *rows[0].get("images", ())) else "lines"](tmp_path, rows)
    config = DataConfig(sources={"it": SourceConfig(kind="auto", path=str(path))}, holdout=0.0, cache_dir=str(tmp_path / "c"))
    dataset = build_dataset(config, target.processor)
    assert len(dataset) == 4
    messages = check_conversation(dataset.conversation(0)).messages
    has_image = any(key in rows[0] for key in ("image", "images"))
    expected = (["text", "image"] if name == "ShareGPT4V" else ["image", "text"]) if has_image else ["text"]
    assert [part["type"] for part in messages[-2]["content"]] == expected
    assert messages[-1]["content"] == [{"type": "text", "text": "Red."}]
    recognized, *shown = described(dataset)
    assert "4 rows" in recognized and len(shown) == 3 and all("assistant: Red." in line for line in shown)
    assert 0 < train_step(target, target.processor.collate([dataset[i] for i in range(4)])) < 20


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_path_is_read(form: str, tmp_path: Path) -> None:
    source = opened(FORMS[form](tmp_path, [LAYOUTS["SpecForge"] | {"id": str(i)} for i in range(3)]))
    assert [source.example(i).id for i in range(3)] == ["0", "1", "2"]
    assert "{role, content} in 'conversations'" in source.description()


def test_files_that_are_not_read_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    row = json.dumps(LAYOUTS["SpecForge"]).encode()
    _put(tmp_path / "d" / "sub" / "b.jsonl", row)
    assert len(opened(_put(tmp_path / "d" / "a.jsonl", row).parent)) == 1
    assert "1 file not read" in caplog.text and "b.jsonl" in caplog.text


@pytest.mark.parametrize("name", ["files", "folders", "DatasetDict", "names of UltraChat"])
def test_held_out_rows_of_the_data_are_the_validation_prompts(name: str, tmp_path: Path) -> None:
    row = LAYOUTS["SpecForge"]
    parts = {"train": [row | {"id": f"t{i}"} for i in range(4)], "validation": [row | {"id": "v"}]}
    if name in ("files", "folders"):
        for part, rows in parts.items():
            place = tmp_path / "d" / (f"{part}.jsonl" if name == "files" else f"{part}/0.jsonl")
            _put(place, "\n".join(map(json.dumps, rows)).encode())
    else:
        tables = {part: datasets.Dataset.from_list(rows) for part, rows in parts.items()}
        names = (
            {"train": "train_sft", "validation": "test_sft"}
            if name == "names of UltraChat"
            else dict(zip(tables, tables, strict=True))
        )
        datasets.DatasetDict({names[part]: table for part, table in tables.items()}).save_to_disk(tmp_path / "d")
    config = SourceConfig(kind="auto", path=str(tmp_path / "d"))
    for split, expected in ((Split.train, 4), (Split.validation, 1)):
        source = open_source("it", config, split, str(tmp_path / "c"))
        assert len(source) == expected and source.has_splits
    assert as_prompt(source.conversation(0)).id == "v"


# -- text is text --------------------------------------------------------------------------------------------------------

TEXTS = [  # question, images of the row, expected parts; None: refused
    ("How does the <video> tag of HTML5 work?", 0, ["text"]),
    ("<video>\n<source src='a.mp4'>\n</video>\nWhy does it not play?", 0, ["text"]),
    ("Which is right, <img> or <image>?", 0, ["text"]),
    ("<image>Write HTML that shows it in a <video> element.", 1, ["image", "text"]),
    ("<image>\nWhich tag shows it, <image> or <img>?", 1, ["image", "text"]),
    ("First <image> then <image>, what changed?", 2, ["text", "image", "text", "image", "text"]),
    ("What is this?", 1, ["image", "text"]),
    ("<image>\nWhat?", 0, None),
    ("What?\n<image>", 0, None),
    ("<video>", 0, None),
    ("<image>Both?", 2, None),
    ("Draw it.<answer><image>", 1, None),
    ("Which tag is it?<answer>It is the <image> tag.", 1, ["image", "text"]),
]


@pytest.mark.parametrize(("text", "images", "expected"), TEXTS)
@pytest.mark.parametrize("layout", ["from", "role"])
def test_placeholders_count_where_the_layout_puts_them(layout: str, text: str, images: int, expected: list[str] | None) -> None:
    question, _, answer = text.partition("<answer>")
    turns = share_turns(question, answer or "Red.")
    if layout == "role":
        turns = [ASKED | {"content": question}, TOLD | {"content": answer or "Red."}]
    row = {"conversations": turns, "images": [b"x"] * images}
    if expected is None:
        with refused("image" if "image" in text else "video"):
            table_messages(row, {}, "")
    else:
        assert [part["type"] for part in table_messages(row, {}, "")[0]["content"]] == expected


# -- keys that templates render ------------------------------------------------------------------------------------------

THINKER = """{%- if tools %}{{- 'tools: ' + tools | tojson }}{%- endif %}
{%- for m in messages %}{%- set c = m.content[0].text if m.content else '' %}{%- set r = '' %}
{%- if m.role == 'assistant' and '</think>' in c %}{%- set r = c.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set c = c.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.last %}{{- '<think>\\n' + r + '\\n</think>\\n\\n' }}{%- endif %}{{- c }}
{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


@pytest.fixture
def thinker() -> Processor:
    """The processor of a hybrid thinking model: its template is that of Qwen3 where it matters here."""
    processor = make_processor("qwen2_5_vl")
    processor.tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>", "<|box_start|>"])
    processor.chat_template = THINKER
    processor.family.template_arguments = {"enable_thinking": False}  # type: ignore[misc]
    return processor


def rendered(processor: Processor, row: dict[str, Any]) -> tuple[str, str, Any]:
    """Returns the text that is not supervised, that which is, and the example."""
    messages = table_messages(row, {}, "")
    example = encode_example(Conversation("c", messages), processor)
    mask, ids = example["loss_mask"], example["input_ids"]
    return processor.tokenizer.decode(ids[~mask]), processor.tokenizer.decode(ids[mask]), example


HEADER, EMPTY, END = "<|im_start|>assistant\n", "<think>\n\n</think>\n\n", "<|im_end|>"
CALLED = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\nRed."


def chat(told: dict[str, Any], asked: Any = (), **row: Any) -> dict[str, Any]:
    """Returns a row with further keys of its answer, its question and its own."""
    return row | {"messages": [ASKED | dict(asked), TOLD | told]}


BAD_TURN = TOLD | {"content": "Bad."}
KEYS: dict[str, tuple[dict[str, Any], str, str]] = {  # row -> end of the prompt, supervised text
    "plain": (chat({}), HEADER + EMPTY, f"Red.{END}"),
    "thoughts in the text": (chat({"content": THOUGHT}), HEADER, THOUGHT + END),
    "reasoning_content": (chat({"reasoning_content": "Hm."}), HEADER, THOUGHT + END),
    "columns": ({"prompt": [ASKED], "completion": "Red.", "reasoning_content": "Hm."}, HEADER, THOUGHT + END),
    "tool_calls": (chat({"tool_calls": [CALL]}, tools=TOOLS), HEADER + EMPTY, f"Red.{CALLED}{END}"),
    "tool_calls as text": (chat({"tool_calls": json.dumps([CALL])}, tools=TOOLS), HEADER + EMPTY, f"Red.{CALLED}{END}"),
    "tools, system": (chat({}, {"tools": json.dumps(TOOLS)}, system="In French."), HEADER + EMPTY, f"Red.{END}"),
    "system": (chat({}, system="In French."), HEADER + EMPTY, f"Red.{END}"),
    "weight": ({"messages": [ASKED, BAD_TURN | {"weight": 0}, ASKED, TOLD]}, HEADER + EMPTY, f"Red.{END}"),
    # cut off in a model that does not think by default
    "thoughts that are cut": (chat({"content": "<think>\nHm", "unfinished": True}), HEADER + EMPTY, "<think>\nHm"),
}


@pytest.mark.parametrize("name", KEYS)
def test_keys_are_rendered_by_the_template(name: str, thinker: Processor) -> None:
    row, ending, expected = KEYS[name]
    prompt, answer, example = rendered(thinker, row)
    assert prompt.endswith(ending) and answer == expected
    assert ("In French." in prompt) == ("system" in name) and ("tools: " in prompt) == ("tool" in name)
    markers = [token for token in ("<think>", "</think>", "<tool_call>", "</tool_call>") if token in answer]
    ids = example["input_ids"][example["loss_mask"]].tolist()
    assert all(ids.count(thinker.tokenizer.convert_tokens_to_ids(token)) == 1 for token in markers)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tool_calls": (chat({"tool_calls": [CALL]}), "tool_calls"),
    "reasoning_content": (chat({"reasoning_content": "Hm."}), "reasoning_content"),
    "tools": (chat({}, tools=TOOLS), "tools"),
    "function_call": (chat({"function_call": {"name": "x"}}), "function_call"),
    "weight": (chat({"weight": 0.5}), "weight 0.5"),
    "no answer has a weight": (chat({"weight": 0}), "weight 0"),
    "train_detail": (chat({"train_detail": [{"begin_offset": 0}]}), "train_detail"),
    "thoughts of a user": (chat({}, {"thought": "Hm."}), "message 0: reasoning_content"),
    "two lists of tools": (chat({}, {"tools": [{}]}, tools=TOOLS), "tools: different"),
    "nested tools": (chat({}, tools=json.loads("[" * 200 + "]" * 200)), "tools is nested"),
    "template arguments": (chat({}, chat_template_kwargs={"enable_thinking": True}), "chat_template_kwargs"),
    "system that is a list": (chat({}, system=["a"]), "system is list"),
    "images in another column": (chat({}, photos=[EMBEDDED]), "columns.image=photos"),
    "part without its image": (chat({}, {"content": [{"type": "image", "index": 1}]}, images=[b"x"]), "image part"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_keys_that_the_template_does_not_render_are_refused(name: str) -> None:
    row, part = REFUSED[name]
    with refused(part):
        rendered(make_processor("qwen2_5_vl"), row)


def test_thinking_is_a_setting(thinker: Processor) -> None:
    thought = KEYS["reasoning_content"][0]
    thinker.thinking = Thinking.off.flag
    assert rendered(thinker, thought)[:2] == (f"<|im_start|>user\nWhat?{END}\n{HEADER}{EMPTY}", f"Red.{END}")
    for cut in ("<think>\nHm.", "<think>\nHm.\n</think>\n\n"):
        with refused("nothing but thoughts"):
            rendered(thinker, chat({"content": cut}))
    thinker.thinking = Thinking.on.flag
    assert thinker.template_arguments == {"enable_thinking": True}
    assert rendered(thinker, thought)[0].endswith(HEADER)
    assert rendered(thinker, KEYS["plain"][0])[1] == f"Red.{END}"  # as it was written after the same prompt


def test_token_ids_of_an_answer_of_another_target_are_not_used(thinker: Processor) -> None:
    """Those of own answers are: tests/targets/test_text.py."""
    foreign = TOLD | {"content": "Red.", "token_ids": [70]}
    assert rendered(thinker, {"messages": [ASKED, foreign]})[1] == f"Red.{END}"


def test_what_a_server_renders_in_its_own_way_is_not_asked(thinker: Processor) -> None:
    policy = MediaPolicy((), Images.inline)
    for messages in ([ASKED | {"tools": TOOLS}], [ASKED, TOLD, {"role": "tool", "content": "Sun."}]):
        with refused("tools", "without regenerate.server"):
            request_messages(messages, policy)
    reply: Any = {"choices": [{"message": {"content": None, "reasoning_content": "Hm"}, "finish_reason": "length"}]}
    assert answer_of(reply, thinker) == TargetAnswer("<think>\nHm", Outcome.cut)  # thoughts that are cut stay open
    reply["choices"][0]["token_ids"] = ids = thinker.tokens_of("<|im_start|>a")
    assert answer_of(reply, thinker) == TargetAnswer("<|im_start|>a", Outcome.cut, token_ids=tuple(ids))
    # a server may strip blanks, and call an end with the last allowed token a cut
    reply["choices"][0]["token_ids"] = [*thinker.tokens_of(" padded "), thinker.tokenizer.eos_token_id]
    assert answer_of(reply, thinker) == TargetAnswer(" padded ", Outcome.answered)


# -- bad rows ------------------------------------------------------------------------------------------------------------

DEEP = '{"x": ' + "[" * 100_000 + "]" * 100_000 + ', "messages": []}'
BAD = {
    "nested": DEEP,
    "surrogate": json.dumps({"id": "\ud800", "messages": [ASKED | {"content": "a\ud800"}, TOLD]}),
    "number as content": json.dumps({"messages": [ASKED | {"content": 3}, TOLD]}),
    "huge number": '{"messages": [], "n": ' + "9" * 5000 + "}",
    "turns that are text": json.dumps({"messages": "What?"}),
    "null": "null",
}


@pytest.mark.parametrize("form", ["lines", "array"])
def test_bad_rows_are_skipped_one_by_one(form: str, tmp_path: Path) -> None:
    good = [json.dumps({"id": "same", "messages": [ASKED | {"content": f"What {i}?"}, TOLD]}) for i in range(40)]
    text = "\n".join([*BAD.values(), *good]) if form == "lines" else f"[{','.join([*BAD.values(), *good])}]"
    path = _put(tmp_path / "rows.json", text.encode())
    options: dict[str, Any] = {"cache_dir": str(tmp_path / "c"), "on_bad": OnBad.skip, "holdout": 0.2}
    config = DataConfig(sources={"it": SourceConfig(kind="auto", path=str(path))}, **options)
    dataset = build_dataset(config, make_processor("qwen2_5_vl"))
    assert 20 < len(dataset) < 40  # the rest is held out, although all rows have one id
    assert len(dataset.skipped_items()) == len(BAD)


WORDS = st.sampled_from(["", " ", "\ud800", "<image>", "<|im_end|>", "user", "a.png"])
LEAVES: st.SearchStrategy[Any] = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), WORDS)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
SEEDS = [*LAYOUTS.values(), *(row for row, _ in REFUSED.values()), *(row for row, _, _ in KEYS.values())]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields every (container, key) of a row."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _places(inner)


ROWS = Rows(RawRows("rows", "", ()), SourceConfig(kind="auto"), "")
PROCESSOR = make_processor("qwen2_5_vl")


NUM_EXAMPLES = int(os.environ.get("ROW_EXAMPLES", "100"))


@settings(max_examples=NUM_EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(SEEDS), st.lists(st.tuples(st.integers(0, 99), VALUES, st.booleans()), min_size=1, max_size=3))
def test_mutated_rows_are_examples_or_bad_items(row: dict[str, Any], changes: list[tuple[int, Any, bool]]) -> None:
    row = copy.deepcopy(row)
    for number, value, is_removed in changes:
        if places := list(_places(row)):
            container, key = places[number % len(places)]
            container[key] = value
            if is_removed:
                del container[key]
    for use in (as_prompt, lambda conversation: encode_example(conversation, PROCESSOR)):
        try:
            use(ROWS.convert(row, 0))
        except BadItem as error:
            str(error).encode()
