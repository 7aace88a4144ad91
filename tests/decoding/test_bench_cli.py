"""`python -m sage.bench`: prompts from every source, table, JSON, and one-line errors."""

import json
import math

import pytest
from PIL import Image
from support.data_helpers import save_draft, save_target, user
from support.messages import check_message, refused
from torch.utils._pytree import tree_leaves

import sage
from sage.bench.__main__ import main
from sage.bench.measurement import load_prompts, read_jsonl
from sage.bench.options import Variant, variant, variants
from sage.commands.cli import run


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    target = save_target("qwen2_5_vl", folder / "target")
    return target, save_draft(folder / "draft", sage.load_target(target))


def bench(folders, *words):
    main(["--target", str(folders[0]), "--draft", str(folders[1]), "--max-new-tokens", "5", "--repeats", "1", *words])


@pytest.mark.slow
def test_several_configurations_of_one_policy_side_by_side(folders, tmp_path, capsys):
    out = tmp_path / "deep" / "bench.json"
    words = ["--policies", "chain", "--policy", "sage:max_width=2,min_width=1,history=false", "--policy", "one=chain:depth=1"]
    bench(folders, *words, "--num-prompts", "2", "--baselines", "hf_generate,hf_prompt_lookup", "--out", str(out))
    report = json.loads(out.read_text())
    labels, baselines = [words[1], words[3], "one"], ["autoregressive", "hf_generate", "hf_prompt_lookup"]
    assert all(math.isfinite(value) for value in tree_leaves(report) if isinstance(value, (int, float)))
    assert list(report["policies"]) == labels and list(report["baselines"]) == baselines
    assert all(part["match"] == part["match_hf"] == 2 for part in report["policies"].values())
    assert report["command"].startswith("python -m sage.bench --target")
    assert report["kinds"] == dict(zip(labels, ["chain", "sage", "chain"], strict=True))
    assert report["options"] == {labels[1]: {"max_width": 2, "min_width": 1, "history": False}, "one": {"depth": 1}}
    assert report["policies"]["one"]["draft_steps_per_round"] <= 1
    assert set(report["margins"]["over"]) | {report["margins"]["policy"]} == {*labels, *baselines}
    shown = capsys.readouterr().out
    assert "paired by prompt" in shown and "of decoding time" in shown and f"written: {out}" in shown


def test_specs_are_parsed():
    assert variant("talon") == Variant(label="talon", policy="talon")
    options = {"alpha_from": "root", "max_depth": 9}
    assert variant("a b=sage:alpha_from=root,max_depth=9") == Variant(label="a b", policy="sage", options=options)
    assert [one.label for one in variants(None, [])] == ["chain", "static", "sage", "cost_aware"]
    assert [one.label for one in variants(None, ["chain:depth=2"])] == ["chain:depth=2"]


def test_one_family_of_a_file_with_relative_images(tmp_path, folders):
    (tmp_path / "media").mkdir()
    Image.new("RGB", (16, 16), "red").save(tmp_path / "media" / "red.png")
    seen = {"role": "user", "content": [{"type": "image", "image": "media/red.png"}, {"type": "text", "text": "What?"}]}
    lines = [{"family": "caption", "messages": [seen]}, {"family": "text", "messages": [user("Well?")]}]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    target = sage.load_target(folders[0])
    [prompt] = load_prompts(target, str(file), [], None, None, family="caption")
    assert prompt.family == "caption" and "pixel_values" in prompt.inputs
    with refused("--family chart", "caption, text"):
        load_prompts(target, str(file), [], None, None, family="chart")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--policy", "sage:max_depth=abc"], ["--policy sage:max_depth=abc: policy.sage.max_depth: 'abc'", "integer"]),
        (["--policies", "chain", "--policy", "chain=chain:depth=2"], ["--policy: 'chain'", "LABEL="]),
        (["--baselines", "hf_assisted"], ["baselines: hf_assisted", "--assistant"]),
        (["--prompts", "/no/such.jsonl"], ["--prompts /no/such.jsonl"]),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(folders, capsys, words, parts):
    assert run(lambda: bench(folders, *words)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and len(error.strip().splitlines()) == 1
    check_message(error, *parts)


def test_a_smaller_model_as_the_draft_is_the_assistant(folders, capsys):
    words = ["--target", str(folders[0]), "--draft", str(folders[0]), "--policies", "chain", "--num-prompts", "1"]
    main([*words, "--baselines", "hf_assisted", "--repeats", "1", "--max-new-tokens", "4"])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("hf_assisted"))
    assert line.endswith("1/1")


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", []),
        ("{", ["line 1", "JSON"]),
        ("[1]", ["line 1", "messages"]),
        ('[{"role": "assistant", "content": []}]', ["line 1", "question"]),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path, content, parts):
    file = tmp_path / "chats.jsonl"
    file.write_text(content)
    with refused(f"--prompts {file}", *parts):
        read_jsonl(file)
