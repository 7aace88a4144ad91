"""`python -m sage.bench`: prompts from every source, the table, the JSON, and mistakes in one line."""

import json

import pytest
from PIL import Image
from train_validate_helpers import save_draft, save_target

import sage
from sage.bench.__main__ import main
from sage.bench.prompts import TEXTS, load_prompts, read_jsonl
from sage.bench.table import format_table, interval
from sage.cli import run


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    target = save_target(folder / "target")
    return target, save_draft(folder / "draft", sage.load_target(target))


@pytest.fixture(scope="module")
def target(folders):
    return sage.load_target(folders[0])


def bench(folders, *words):
    main(["--target", str(folders[0]), "--draft", str(folders[1]), "--max-new-tokens", "5", "--repeats", "1", *words])


def user(text):
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def test_it_prints_a_table_and_writes_the_report(folders, tmp_path, capsys):
    out = tmp_path / "deep" / "bench.json"
    bench(
        folders,
        "--policies",
        "chain,sage",
        "--baselines",
        "hf_generate,hf_prompt_lookup",
        "--num-prompts",
        "2",
        "--out",
        str(out),
    )
    report = json.loads(out.read_text())
    assert list(report["policies"]) == ["chain", "sage"]
    assert set(report["baselines"]) == {"autoregressive", "hf_generate", "hf_prompt_lookup"}
    assert all(part["match"] == part["match_hf"] == 2 for part in report["policies"].values())
    assert report["command"].startswith("python -m sage.bench --target")
    shown = capsys.readouterr().out
    assert "hf_prompt_lookup" in shown and f"written: {out}" in shown


def test_an_assistant_adds_assisted_generation(folders, capsys):
    bench(folders, "--policies", "sage", "--assistant", str(folders[0]), "--prompt", "Hello")
    assert "hf_assisted" in capsys.readouterr().out


def test_the_table_marks_the_baseline_and_lines_up(folders, tmp_path):
    out = tmp_path / "b.json"
    bench(folders, "--policies", "sage", "--num-prompts", "1", "--out", str(out))
    report = json.loads(out.read_text())
    lines = format_table(report).splitlines()
    assert sum(" *" in line for line in lines[:-1]) == 1
    assert lines[-1].startswith("* fastest autoregressive baseline. 1 prompt, 1 run each, float32 on cpu")
    column = lines[0].index("tokens/s") + len("tokens/s")
    assert all(line[column - 1].isdigit() for line in lines[2:-1] if not line.startswith("-"))
    assert interval(None) == interval([1.0, 1.0]) == "-" and interval([1.234, 5.0]) == "1.23-5.00"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policies", "oracle"], "--policies: 'oracle' is unknown; choose from autoregressive"),
        (["--baselines", "vllm"], "'vllm' is not a baseline"),
        (["--prompts", "/no/such.jsonl"], "/no/such.jsonl: no such file"),
        (["--image", "/no/such.png"], "such.png"),
        (["--max-new-tokens", "1"], "max_new_tokens: 1 leaves nothing to decode"),
        (["--num-prompts", "0"], "no prompt to measure on"),
        (["--device", "cuda:9"], "--device cuda:9"),
    ],
)
def test_mistakes_are_one_line_and_code_2(folders, capsys, words, message):
    assert run(lambda: bench(folders, *words)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and len(error.strip().splitlines()) == 1


def test_policies_that_draft_need_a_draft(folders):
    with pytest.raises(ValueError, match="--draft: missing, and chain, sage need one"):
        main(["--target", str(folders[0]), "--policies", "autoregressive,chain,sage"])


def test_a_file_of_chats_drops_answers_and_keeps_names(tmp_path, target):
    file = tmp_path / "chats.jsonl"
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Fine."}]}
    lines = [[user("How are you?"), answer], {"id": "q7", "family": "small talk", "messages": [user("Well?")]}]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert [(name, family, len(messages)) for name, family, messages in read_jsonl(file)] == [
        ("chats-1", "", 1),
        ("q7", "small talk", 1),
    ]
    prompts = load_prompts(target, str(file), [], None, 1)
    assert [prompt.name for prompt in prompts] == ["chats-1"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no line in it"),
        ("{", "line 1: not JSON"),
        ('{"text": "hi"}', "line 1: no chat messages"),
        ("[1]", "line 1: no chat messages"),
        ('[{"role": "assistant", "content": []}]', "line 1: no question is left"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path, content, message):
    file = tmp_path / "chats.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_jsonl(file)


def test_pictures_texts_and_defaults(tmp_path, target):
    Image.new("RGB", (16, 16), "red").save(tmp_path / "red.png")
    prompts = load_prompts(target, None, [str(tmp_path / "red.png")] * 2, "What is it?", None)
    assert [prompt.name for prompt in prompts] == ["red.png"] * 2 and "pixel_values" in prompts[0].inputs
    assert len(load_prompts(target, None, [], "One question", None)) == 1
    assert len(load_prompts(target, None, [], None, None)) == len(TEXTS)
