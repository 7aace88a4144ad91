"""Prompts of every kind, both families: the output equals that of Hugging Face; errors of the command line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.data_helpers import save_target
from support.messages import check_message, exit_code, refused
from support.models import make_inputs, make_qwen, random_draft
from support.toy_helpers import make_policy

import sage
from sage.commands import cli
from sage.commands.generate import _generate, main, parse_args
from sage.targets.tree_passes import TreePass

LENGTH = 10


@pytest.mark.parametrize("policy", sage.POLICIES)
def test_an_answer_may_fill_the_context_to_the_last_token(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees larger than the remaining context: nothing is drafted or written beyond it, and one more token is refused."""
    target = make_qwen()
    inputs, draft = make_inputs(target), random_draft(target, seed=0)
    length = inputs["input_ids"].shape[1]
    expected = sage.generate(target, None, inputs, policy="autoregressive", max_new_tokens=4).tokens.tolist()
    monkeypatch.setattr(target.text_config, "max_position_embeddings", length + 4)
    positions: list[int] = []
    compute = TreePass.compute
    monkeypatch.setattr(
        TreePass, "compute", lambda own, inputs: (positions.append(int(inputs.positions.max())), compute(own, inputs))[1]
    )
    out = sage.generate(target, draft, inputs, policy=make_policy(policy, {}), max_new_tokens=4)
    assert out.tokens.tolist() == expected
    # The answer's last token is never read, so no pass goes beyond the one before it.
    offset = int(target.embed(inputs).next_position) - length
    assert max(positions) - offset <= length + 2
    with refused("max_new_tokens: 5", str(length + 4), "at most 4"):
        sage.generate(target, draft, inputs, policy=policy, max_new_tokens=5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target and its draft on disk."""
    folder = tmp_path_factory.mktemp("generate")
    target = save_target("qwen2_5_vl", folder / "target")
    random_draft(sage.load_target(target), seed=0).save_pretrained(folder / "draft")
    return str(target), str(folder / "draft")


def generate(*words: str) -> int:
    """Exit code of the console script."""
    return exit_code(main, "--prompt", "Hi", *words)


class TestCommand:
    def run(self, folders: tuple[str, str], *words: str, policy: str = "sage") -> int:
        arguments = ["--target", folders[0], "--draft", folders[1], "--prompt", "Hi", "--policy", policy, *words]
        return cli.run(lambda: _generate(parse_args(arguments)))

    @pytest.mark.parametrize(
        ("words", "parts"),
        [
            (["--top-p", "3"], ("top_p: 3.0",)),
            (["--prompt", " "], ("--prompt",)),
            (["--device-map", '{"model.visual": 0, "lm_head": "cpu"}'], ("device_map", "lm_head", "cpu")),
            (["--device-map", "{nothing"], ("--device-map", "JSON")),
        ],
    )
    def test_mistakes_are_one_line_and_code_2(self, folders, words, parts, capsys):
        assert self.run(folders, *words) == 2
        check_message(capsys.readouterr().err.strip().splitlines()[-1], "error: ", *parts)

    def test_default_dtype_is_fp32_on_a_cpu_and_that_of_the_checkpoint_elsewhere(self, folders, monkeypatch):
        load, given = sage.load_target, []

        def recorded(*args: Any, **options: Any) -> sage.Target:
            given.append(options["dtype"])
            return load(*args, **options | {"device": "cpu"})

        monkeypatch.setattr(sage, "load_target", recorded)
        assert parse_args([]).device == "auto"
        words = ["--target", folders[0], "--policy", "autoregressive", "--max-new-tokens", "2", "--device", "cpu"]
        assert generate(*words) == 0
        assert generate(*words, "--dtype", "bf16") == 0
        monkeypatch.setattr(cli, "resolve_device", lambda name: torch.device("cuda"))
        assert generate(*words) == 0
        assert given == [torch.float32, torch.bfloat16, None]

    def test_a_checkpoint_in_fp16_is_loaded_in_bf16_unless_asked_for(self, folders: tuple[str, str], tmp_path: Path) -> None:
        """The dtype in which drafts for it are trained."""
        folder = shutil.copytree(folders[0], tmp_path / "target")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
        given = (None, torch.float16, torch.float32)
        assert [sage.load_target(folder, dtype).dtype for dtype in given] == [torch.bfloat16, torch.float16, torch.float32]

    def test_a_policy_has_options(self, folders: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
        words = ["--draft", folders[1], "--max-new-tokens", "6", "--explain", "--policy"]
        assert generate(*words, "chain:depth=1") == 0
        shown = capsys.readouterr().err
        assert "1 deep" in shown and "2 deep" not in shown
        for options, message in {"depth=0": "depth", "depht=2": "depht", "depth": "'depth' has no value"}.items():
            assert generate(*words, f"chain:{options}") == 2
            check_message(capsys.readouterr().err, "error: ", message)

    @pytest.mark.parametrize("policy", ["sage", "cost_aware"])
    def test_explain_says_why_for_every_round(self, folders, policy, capsys):
        assert self.run(folders, "--max-new-tokens", "8", "--explain", policy=policy) == 0
        shown = capsys.readouterr().err.splitlines()
        lines = [line for line in shown if line.startswith("round ")]
        why = {"sage": "planned depth", "cost_aware": "tokens/s"}[policy]
        assert lines and all(why in line and "accepted" in line for line in lines)
        assert shown[0].startswith('prefill  : 1 token, "')
        nodes = [int(line.split()[2]) for line in lines]
        assert sum("─ " in line for line in shown) == sum(nodes)
        assert sum("─ * " in line for line in shown) == sum(int(line.split()[6]) for line in lines)
