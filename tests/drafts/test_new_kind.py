"""A kind of draft is one module and one row of the registry.

With a session, pass functions and training of its own, it trains, resumes, decodes under every policy in every pass mode, is
planned and inspected, and an export is refused by name. Here it is a bigram model: the logits of the next token are a linear
function of the last token's embedding, without a cache and without a context.

Shapes: D hidden; K steps, S supervised positions.
"""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.config_store import ConfigStore
from safetensors.torch import load_file
from support.models import make_inputs
from support.pass_helpers import call_again, capture_with, without_compiler
from support.toy_helpers import make_policy
from support.train_helpers import configured, make_target, metrics, single_process, train_quickly
from torch import Tensor, nn

import sage
from checkpoints.export.exporter import export
from checkpoints.inspect import inspect_folder
from sage.drafts.draft import DraftSession
from sage.drafts.head import DraftHead, HeadConfig
from sage.drafts.registry import KINDS, DraftKind
from sage.runtime.executors import executor_of
from sage.runtime.host_tensors import Tokens, TokenStagingBuffer
from sage.runtime.modes import PassMode
from sage.runtime.pass_function import EAGER, NODES, PassFunction, PassInputs, argument
from sage.targets import Features, Prompt
from train.config import store
from train.config.checks import check
from train.config.command_line import unknown_key
from train.config.hydra_app import compose
from train.config.schema import Config
from train.distill.objective import DraftOutput
from train.distill.rows import every_pair, gather_chains
from train.distill.student import Student
from train.distill.teacher import Pairs
from train.plan.estimate import plan
from train.plan.text import render


@dataclass(kw_only=True)
class BigramOptions:
    """The distribution of the next token by the last one.

    Attributes:
        scale: factor of the embedding.
    """

    scale: float = 1.0


class BigramConfig(HeadConfig):
    model_type = "sage_bigram"

    scale: float = 1.0


class BigramDraft(DraftHead):
    config_class = BigramConfig
    compressor = None

    def __init__(self, config: BigramConfig) -> None:
        super().__init__(config)
        self.next_hidden = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.post_init()

    @torch.no_grad()
    def reset_parameters(self, target: sage.Target, vocabulary: Tensor | None = None) -> None:
        self.next_hidden.weight.normal_(std=0.1)

    def hidden(self, embeds: Tensor) -> Tensor:
        """[.., D] -> [.., D], the input of the target's lm_head."""
        return self.next_hidden(self.config.scale * embeds)

    def _new_functions(self, target: sage.Target) -> tuple[PassFunction, ...]:
        return (BigramPass(self, target),)


@dataclass(kw_only=True)
class BigramInputs(PassInputs):
    tokens: Tensor = argument(NODES)


class BigramPass(PassFunction):
    def __init__(self, draft: BigramDraft, target: sage.Target) -> None:
        names, results = ("the bigram of one token", "the bigrams of several tokens"), [(NODES, target.vocab_size)]
        super().__init__("draft", names, BigramInputs, {}, draft.dtype, results, draft.config.to_dict())
        self.draft, self.embed_tokens, self.lm_head = draft, target.embed_tokens, target.lm_head

    def compute(self, inputs: BigramInputs) -> tuple[Tensor]:
        return (self.lm_head(self.draft.hidden(self.embed_tokens(inputs.tokens))),)


class BigramSession(DraftSession):
    """Looks up the logits of every node; nothing is remembered but the number of committed tokens."""

    context = 0

    def __init__(self, draft: BigramDraft, target: sage.Target, capacity: int) -> None:
        executor = EAGER if draft.training else executor_of(target.passes)
        self._run = executor.bind(draft.pass_functions(target)[0])
        self._staging = TokenStagingBuffer(target.device)

    @torch.no_grad()
    def prefill(self, prompt: Prompt, features: Features, root: Tensor) -> Tensor:
        return self._run(BigramInputs(tokens=root))[0]

    @torch.no_grad()
    def expand_pass(self, rows: Tensor, tokens: Tokens) -> Tensor:
        return self._run(BigramInputs(tokens=self._staging.stage(tokens)))[0]

    @torch.no_grad()
    def commit_pass(self, features: Features, tokens: Tokens) -> Tensor:
        return self._run(BigramInputs(tokens=self._staging.stage(tokens)[-1:]))[0]

    def set_synthetic_state(self, context: int, width: int) -> None:
        self.context = context


class BigramStudent(Student):
    def predict(self, pairs: Pairs, target_lm_head: Tensor) -> DraftOutput:
        hidden = self.draft.hidden(pairs.embeds_next.to(self.draft.dtype))
        hidden_RD, rows = gather_chains(hidden, pairs.mask, every_pair(pairs.mask, 1))
        return DraftOutput(hidden_RD, target_lm_head, rows)


ROW = DraftKind(
    name="bigram",
    options=BigramOptions,
    draft=f"{__name__}:BigramDraft",
    session=f"{__name__}:BigramSession",
    student=f"{__name__}:BigramStudent",
)

BIGRAM = ["draft=bigram", "objective=model", "draft.scale=0.5"]


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(KINDS, ROW.name, ROW)
    store.register_schemas.cache_clear()
    yield
    ConfigStore.instance().repo.get("draft", {}).pop("bigram.yaml", None)


@pytest.fixture
def draft(tiny_qwen: sage.Target) -> Any:
    return sage.new_draft(tiny_qwen, "bigram", seed=0, scale=0.5).eval()


@pytest.mark.parametrize(
    ("policy", "mode"), [*((policy, "eager") for policy in sage.POLICIES), ("static", "compiled"), ("static", "captured")]
)
def test_it_decodes(policy, mode, tiny_qwen, draft, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    without_compiler(monkeypatch)
    capture_with(monkeypatch, call_again)
    inputs = make_inputs(tiny_qwen)
    plain = sage.generate(tiny_qwen, None, inputs, "autoregressive", max_new_tokens=8)
    tiny_qwen.passes = PassMode(mode)
    out = sage.generate(tiny_qwen, draft, inputs, make_policy(policy), max_new_tokens=8)
    assert torch.equal(out.tokens, plain.tokens)
    assert (out.stats.draft_steps > 0) == (policy != "autoregressive") or policy == "cost_aware"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """A target's folder, and a run of six steps that was resumed after three."""
    target = make_target(tmp_path)
    with single_process(monkeypatch):
        for folder, lengths in (("straight", (6,)), ("resumed", (3, 6))):
            for steps in lengths:
                given = ["train.save_every=3", f"train.max_steps={steps}", f"run.resume={steps > lengths[0]}"]
                assert train_quickly(configured(target, tmp_path / folder, *BIGRAM, *given)) == 0
        yield target, tmp_path


@pytest.mark.slow
def test_it_trains_resumes_and_is_loaded_inspected_and_not_exported(run: tuple[Path, Path]) -> None:
    path, folder = run
    straight, resumed = (load_file(folder / name / "draft" / "model.safetensors") for name in ("straight", "resumed"))
    assert all(torch.equal(value, resumed[name]) for name, value in straight.items())
    losses = [line["loss"] for line in metrics(folder / "straight")]
    assert losses[-1] < losses[0]
    target = sage.load_target(path, dtype=torch.float32)
    draft = sage.load_draft(folder / "straight", target)
    assert isinstance(draft, BigramDraft) and draft.config.scale == 0.5
    assert torch.equal(draft.next_hidden.weight, straight["next_hidden.weight"])
    assert inspect_folder(folder / "straight" / "draft").facts["architecture"] == "sage_bigram"
    with pytest.raises(ValueError, match="draft=bigram; its formats: none"):
        export(folder / "straight" / "draft", folder / "out", "eagle3")
    assert not (folder / "out").exists()


def test_it_is_planned(tmp_path: Path) -> None:
    arguments = ["launch.plan=true", "target=qwen2_5_vl_7b", "launch.gpus=8", *BIGRAM]
    found = plan(compose("config", arguments, Config))
    assert found.models.draft_parameters == 3584**2
    assert "draft=bigram (it has no export" in render(found)


@pytest.mark.parametrize(("kind", "mode"), [("bigram", "eager"), ("eagle", "compiled"), ("model", "captured")])
def test_a_draft_does_not_outlive_its_use(kind, mode, tiny_qwen, monkeypatch):
    """Nothing of the target refers to it, also after three validations."""
    without_compiler(monkeypatch)
    capture_with(monkeypatch, call_again)
    tiny_qwen.passes = PassMode(mode)
    alive: list[Any] = []
    for seed in range(3):
        options = {"num_layers": 1} if kind == "model" else {"seed": seed}
        made: Any = sage.new_draft(tiny_qwen, kind, **options)
        made.network.eval()
        sage.generate(tiny_qwen, made, make_inputs(tiny_qwen), "static", max_new_tokens=4)
        alive.append(weakref.ref(made))
        del made
    gc.collect()
    assert [one() for one in alive] == [None] * 3


# -- configuration ----------------------------------------------------------------------------------------------------------


def test_a_row_is_a_choice_of_the_configuration() -> None:
    config = compose("config", ["launch.plan=true", *BIGRAM], Config)
    check(config)
    draft: Any = config.draft
    assert (draft.kind, draft.scale) == ("bigram", 0.5)
    assert config.run.name.startswith("pocket_qwen2_5_vl-bigram")
    assert unknown_key("draft.scale", Config).endswith("draft=bigram")
