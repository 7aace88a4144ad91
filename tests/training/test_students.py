"""Training of every kind of draft: trained parameters, the saved draft, equal steps under sharding and splitting."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.messages import refused
from support.models import in_double, make_inputs, make_qwen, random_draft
from support.train_helpers import command, configured, draft_weights, metrics, single_process, train_quickly

import sage
from checkpoints.export.exporter import export
from checkpoints.inspect import inspect_folder
from data_prep.dataset.dataset import most_frequent
from sage.drafts.eagle import Eagle3Draft, PEagleDraft
from sage.drafts.model import ModelDraft, shallow_model
from sage.drafts.spans import HeadInput
from train.config.hydra_app import compose
from train.config.schema import Config, ObjectiveConfig
from train.distill.build import end_tokens, new_student
from train.distill.objective import Objective
from train.distill.rows import every_root
from train.distill.student import HeadStudent, ModelStudent
from train.distill.teacher import Teacher
from train.plan.estimate import plan
from train.plan.text import render

EAGLE3 = ["draft=eagle3", "draft.feature_levels=[0,1,2]", "draft.draft_vocab_size=200", "objective.steps=3"]
MODEL = ["draft=model", "draft.num_layers=1"]
BLOCK = [
    "draft=block",
    "draft.feature_levels=[1,2]",
    "draft.block_size=4",
    "draft.draft_vocab_size=200",
    "draft.confidence=true",
]
PEAGLE = ["draft=peagle", "draft.feature_levels=[0,1,2]", "draft.block_size=3", "draft.num_layers=2", "draft.mask_token=0"]
KINDS = {"eagle3": EAGLE3, "model": MODEL, "block": [*BLOCK, "objective.anchors=99", "draft.down_sample_ratio=1"]}


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, single_process(patch):
        yield


def train(folder: Path, run: Path, *overrides: str) -> Path:
    assert train_quickly(configured(folder / "target_qwen2_5_vl", run, f"data.cache_dir={folder}/cache", *overrides)) == 0
    return run


@pytest.fixture(scope="module")
def plain(folder: Path) -> Callable[[str], Path]:
    """Runs of two steps, by kind of draft; not to be changed."""

    def run_of(kind: str) -> Path:
        run = folder / f"plain_{kind}"
        return run if run.exists() else train(folder, run, *KINDS[kind])

    return run_of


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sharding_and_splitting_give_the_same_steps(folder, tmp_path, kind, plain):
    """ZeRO-3, which has to gather a draft's own lm_head for the objective, and other micro-batches. Sums run in another order;
    AdamW divides by the gradient's size, so where that is near zero a weight may move by some thousandths of a step (1e-3)."""
    other = train(folder, tmp_path / "other", *KINDS[kind], "deepspeed=zero3", "train.micro_batch_size=1")
    torch.testing.assert_close(draft_weights(plain(kind)), draft_weights(other), rtol=0, atol=1e-5)
    for one, two in zip(metrics(plain(kind)), metrics(other), strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)


@pytest.mark.slow
def test_an_eagle3_run_saves_a_draft_with_counted_vocabulary(folder: Path, plain: Callable[[str], Path]) -> None:
    run = plain("eagle3")
    target = sage.load_target(folder / "target_qwen2_5_vl", dtype=torch.float32)
    draft = sage.load_draft(run / "draft", target)
    assert isinstance(draft, Eagle3Draft) and draft.token_map is not None
    assert draft.levels == (0, 1, 2) and len(draft.token_map) == 200
    assert set(end_tokens(target)) <= set(draft.token_map.tolist())
    fresh = sage.new_draft(target, "eagle3", seed=0, vocabulary=draft.token_map, feature_levels=[0, 1, 2])
    moved = {name for name, value in fresh.state_dict().items() if not torch.equal(value, draft_weights(run)[name])}
    assert moved == {name for name, _ in fresh.named_parameters()}
    assert metrics(run)[-1]["loss_feature"] == 0 and metrics(run)[-1]["kl"] > 0


@pytest.mark.slow
def test_a_model_run_exports_a_complete_target_folder(folder: Path, plain: Callable[[str], Path]) -> None:
    """It loads as a draft and as a target; the vision tower is as it was, the rest has moved."""
    target = sage.load_target(folder / "target_qwen2_5_vl", dtype=torch.float32)
    draft = sage.load_draft(plain("model") / "draft", target)
    assert isinstance(draft, ModelDraft) and draft.model.num_layers == 1
    fresh = shallow_model(target, 1).model.model.state_dict()
    for name, value in draft.model.model.state_dict().items():
        assert torch.equal(value, fresh[name]) == (".visual." in name), name
    messages = [{"role": "user", "content": "what is this?"}]
    inputs = draft.model.prepare(messages)
    assert inputs["input_ids"].tolist() == target.prepare(messages)["input_ids"].tolist()
    plain_text = sage.generate(target, None, inputs, policy="autoregressive", max_new_tokens=8)
    assert torch.equal(sage.generate(target, draft, inputs, max_new_tokens=8).tokens, plain_text.tokens)


@pytest.mark.slow
def test_a_peagle_run_resumes_exactly_and_is_exported_as_peagle_only(folder: Path, tmp_path: Path) -> None:
    """Six steps are three and three more, bit for bit, with random anchors and dropped levels."""
    for name, lengths in (("straight", (6,)), ("resumed", (3, 6))):
        for steps in lengths:
            given = ["train.save_every=3", f"train.max_steps={steps}", f"run.resume={steps > lengths[0]}"]
            train(folder, tmp_path / name, *PEAGLE, "objective.anchors=4", *given)
    straight, resumed = (draft_weights(tmp_path / name) for name in ("straight", "resumed"))
    assert all(torch.equal(value, resumed[name]) for name, value in straight.items())
    losses = [line["loss"] for line in metrics(tmp_path / "straight")]
    assert losses[-1] < losses[0]
    target = sage.load_target(folder / "target_qwen2_5_vl", dtype=torch.float32)
    draft = sage.load_draft(tmp_path / "straight", target)
    assert isinstance(draft, PEagleDraft) and (draft.num_levels, draft.num_layers) == (3, 2)
    sizes = {"block_size": 3, "num_layers": 2, "feature_levels": [0, 1, 2], "mask_token": 0}
    fresh = sage.new_draft(target, "peagle", seed=0, **sizes).state_dict()
    assert all(torch.equal(value, fresh[name]) == (name in ("d2t", "t2d")) for name, value in straight.items())
    assert inspect_folder(tmp_path / "straight" / "draft").facts["architecture"] == "sage_peagle"
    with refused("draft=peagle; its formats: peagle"):
        export(tmp_path / "straight" / "draft", tmp_path / "out", "eagle3")


def test_a_peagle_run_is_planned() -> None:
    """Fewer parameters than EAGLE-3's head by its masks alone; its single pass takes less than seven unrolled steps."""
    arguments = ["launch.plan=true", "target=qwen2_5_vl_7b", "launch.gpus=8"]
    ours, eagle3 = (plan(compose("config", [*arguments, f"draft={kind}"], Config)) for kind in ("peagle", "eagle3"))
    assert ours.models.draft_parameters == eagle3.models.draft_parameters + 4 * 3584
    assert 0 < ours.flops["draft"] < eagle3.flops["draft"] / 2
    assert "can be served by vLLM (sage-export --format peagle" in render(ours)


@pytest.mark.parametrize(
    ("part", "still"), [("layers", ("visual", "embed_tokens", "lm_head")), ("text", ("visual",)), ("all", ())]
)
def test_the_trained_part_of_a_model(folder: Path, part: str, still: tuple[str, ...]) -> None:
    target = sage.load_target(folder / "target_qwen2_5_vl", dtype=torch.float32)
    arguments = [*command(folder / "target_qwen2_5_vl", folder / "none"), *MODEL, f"draft.train_part={part}"]
    student = new_student(shallow_model(target, 1), compose("config", arguments, Config))
    for name, parameter in student.named_parameters():
        assert parameter.requires_grad != any(word in name for word in still), name
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


def batch_of(target: sage.Target) -> dict[str, Any]:
    inputs = make_inputs(target, length=20)
    mask = torch.zeros_like(inputs["input_ids"])
    mask[:, -8:] = 1
    return {**inputs, "loss_mask": mask}


def objective(**options: Any) -> Objective:
    return Objective(ObjectiveConfig(**{"ce_weight": 1.0, "feature_weight": 0.0, "chunk_tokens": 3, **options}))


def test_the_loss_of_a_head_with_its_own_vocabulary_equals_the_loss_by_hand() -> None:
    """The student's loss and gradient against all logits at once, step by step of its unrolled pass, in float64."""
    target = make_qwen()
    target.model.double()
    vocabulary = torch.arange(0, 330, 3)
    draft = random_draft(target, "eagle3", vocabulary=vocabulary).double()
    student = HeadStudent(draft, objective(steps=3, step_decay=0.5))
    teacher = Teacher(target, levels=student.levels, token_map=student.token_map)
    pairs = teacher(in_double(batch_of(target)))
    ours = student(pairs, teacher.lm_head)[0]
    steps = draft.unroll(HeadInput(pairs.embeds_next, draft.fuse(pairs.features), pairs.position_ids), 3)
    total = torch.zeros((), dtype=torch.float64)
    for i, (hidden, weight) in enumerate(zip(steps, (4 / 7, 2 / 7, 1 / 7), strict=True)):
        p = (pairs.features_next[:, i:] @ target.lm_head.weight[vocabulary].T).softmax(-1)
        log_q = draft.logits(hidden, target).log_softmax(-1)
        total = total - weight * ((p * log_q).sum(-1) * pairs.mask[:, i:]).sum()
    torch.testing.assert_close(ours, total, rtol=1e-12, atol=0)
    parameters = list(draft.parameters())
    for mine, theirs in zip(*(torch.autograd.grad(loss, parameters) for loss in (ours, total)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 20])
def test_roots_are_the_pairs_whose_chains_reach_a_supervised_one(steps: int) -> None:
    mask = torch.rand(20, 12, generator=torch.Generator().manual_seed(0)) < 0.08
    mask[0] = False
    found = [{root for root in range(12) if row[root : root + steps].any()} for row in mask]
    anchors, most = every_root(mask, steps), max(map(len, found))
    roots = anchors.root_BA
    assert anchors.has_all_pairs == (most > 0.8 * 12)
    assert roots.shape == (20, 12 if anchors.has_all_pairs else most) and (roots[:, 1:] > roots[:, :-1]).all()
    assert all(expected <= set(row) for expected, row in zip(found, roots.tolist(), strict=True))


def test_a_draft_equal_to_its_target_has_zero_divergence() -> None:
    """Its own forward on the batch is aligned with the teacher's: equal weights, no divergence."""
    target, twin = make_qwen(), make_qwen()
    student = ModelStudent(ModelDraft(twin, target), objective())
    teacher = Teacher(target, levels=student.levels, token_map=student.token_map)
    _, sums, *_ = student(teacher(batch_of(target)), teacher.lm_head)
    _, _, _, agreement, acceptance, kl, count = sums.tolist()
    assert agreement == count == 8 and acceptance == pytest.approx(8, rel=1e-6) and kl == pytest.approx(0, abs=1e-5)
    other = ModelStudent(ModelDraft(make_qwen(seed=1), target), objective())
    assert float(other(teacher(batch_of(target)), teacher.lm_head)[1][5]) > 1  # negative control


def test_the_vocabulary_holds_the_most_frequent_tokens_and_eos() -> None:
    counts = torch.tensor([0, 5, 0, 7, 5, 1, 0])
    assert most_frequent(counts, 3, [6]).tolist() == [1, 3, 6]
    assert most_frequent(counts, 4, [6]).tolist() == [1, 3, 4, 6]
    assert most_frequent(counts, 6, [6]).tolist() == [0, 1, 3, 4, 5, 6]
    with refused("draft.draft_vocab_size=1", "2 or more"):
        most_frequent(counts, 1, [0, 6])


class TestMistakes:
    @pytest.mark.parametrize(
        ("overrides", "parts"),
        [
            (["draft=eagle3", "draft.draft_vocab_size=99999"], ("draft.draft_vocab_size=99999", "at most")),
            (["draft=eagle3"], ("draft.feature_levels", "2 layers")),
            (["draft=eagle3", "draft.feature_levels=[0,1,9]"], ("draft.feature_levels=[0, 1, 9]", "0 to 2")),
            (["draft=model", "draft.num_layers=2"], ("draft.num_layers", "1 to 1")),
        ],
    )
    def test_sizes_that_do_not_fit_the_target_are_refused_before_anything_is_written(self, folder, tmp_path, overrides, parts):
        with refused(*parts):
            train(folder, tmp_path / "run", *overrides)
        assert not (tmp_path / "run").exists()

    @pytest.mark.slow
    def test_a_saved_draft_with_other_options_is_refused(self, folder: Path, tmp_path: Path) -> None:
        target = sage.load_target(folder / "target_qwen2_5_vl", dtype=torch.float32)
        sage.new_draft(target, "eagle", image_inputs="token").save_pretrained(tmp_path / "eagle")
        with refused("draft.image_inputs=embed", "give draft.image_inputs=token"):
            train(folder, tmp_path / "run", f"draft.path={tmp_path}/eagle")
        with refused("draft.path", "draft=eagle,", "draft=eagle3"):
            train(folder, tmp_path / "run", "draft=eagle3", f"draft.path={tmp_path}/eagle")
