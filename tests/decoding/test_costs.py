"""Costs of passes: curves and what corrects them; kept on disk, measured again if anything that matters differs."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.messages import check_message, refused
from support.models import Operators, make_inputs, make_qwen, random_draft

import sage
from sage.costs import measure
from sage.costs.measure import ROOM, costs_folder, known_costs, rounded_contexts
from sage.costs.tables import Costs, Curve
from sage.drafts.draft import new_session
from sage.drafts.model import ModelDraft
from sage.runtime.modes import PassMode
from sage.runtime.pass_function import key_bucket


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, int]]:
    """An empty cache folder; returns the contexts at which costs are asked for from here on. Nothing is measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls: list[tuple[int, int]] = []

    def recorded(target: Any, draft: Any, context: int, longer: int) -> tuple[Costs, bool]:
        calls.append((context, longer))
        return Costs(Curve([1, 2], [1.0, 1.1]), Curve([1], [0.1]), context), False

    monkeypatch.setattr(measure, "measure_costs", recorded)
    return calls


def files() -> list[Path]:
    return sorted(costs_folder().iterdir())


def test_measured_once_for_requests_of_similar_length(measured: list[Any], tiny_qwen: sage.Target) -> None:
    draft = random_draft(tiny_qwen).eval()
    first = known_costs(tiny_qwen, draft, 20, 60)
    again = known_costs(make_qwen(seed=1), draft, 60, 100)
    assert len(measured) == 1 and again == first
    (path,) = files()
    known = json.loads(path.read_text())["depends_on"]
    assert known["threads"] == torch.get_num_threads() and known["contexts"] == list(measured[0])


def test_a_request_reads_them(measured: list[Any], tiny_qwen: sage.Target) -> None:
    draft = random_draft(tiny_qwen).eval()
    for _ in range(2):
        sage.generate(tiny_qwen, draft, make_inputs(tiny_qwen), "cost_aware", max_new_tokens=2)
    assert len(measured) == 1
    sage.generate(tiny_qwen, draft, make_inputs(tiny_qwen), sage.policy("cost_aware", fresh_costs=True), max_new_tokens=2)
    assert len(measured) == 2 and len(files()) == 1


@pytest.mark.parametrize("what", ["threads", "passes", "dtype", "draft", "kind", "target", "context", "processor", "source"])
def test_measured_again_where_something_differs(what, measured, tiny_qwen, monkeypatch):
    target, context = tiny_qwen, 20
    known_costs(target, random_draft(target).eval(), context, 60)
    if what == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    elif what == "processor":
        monkeypatch.setattr(measure, "processor_name", lambda device: "another one")
    elif what == "source":
        monkeypatch.setattr("sage.io.machine.source_digest", lambda *modules: "another one")
    elif what == "passes":
        monkeypatch.setattr(target, "passes", PassMode.captured)
    elif what == "dtype":
        target.model.double()
    elif what == "target":
        target.text_config.max_position_embeddings += 1
    elif what == "context":
        context = 2000
    draft: Any = random_draft(target, intermediate_size=24 if what == "draft" else 48).eval()
    draft = ModelDraft(make_qwen(seed=1), target) if what == "kind" else draft.to(target.dtype)
    known_costs(target, draft, context, context + 40)
    assert len(measured) == 2 and len(files()) == 2


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_costs_that_other_programs_disturb_are_not_kept(share, tiny_qwen, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    start = time.perf_counter()
    monkeypatch.setattr(measure.time, "thread_time", lambda: share * (time.perf_counter() - start))
    known_costs(tiny_qwen, random_draft(tiny_qwen).eval(), 20, 60)
    assert costs_folder().exists() is (share == 1.0)


@pytest.mark.parametrize(
    "content",
    ["{", '{"costs": {"verify": 1, "draft": 2}}', "unknown"],
)
def test_a_damaged_file_is_replaced(content: str, measured: list[Any], tiny_qwen: sage.Target) -> None:
    draft = random_draft(tiny_qwen).eval()
    known_costs(tiny_qwen, draft, 20, 60)
    (path,) = files()
    good = json.loads(path.read_text())
    if content == "unknown":
        content = json.dumps({"costs": good["costs"] | {"new": 1}})
    path.write_text(content)
    known_costs(tiny_qwen, draft, 20, 60)
    known_costs(tiny_qwen, draft, 20, 60)
    assert len(measured) == 2 and files() == [path]


def test_a_folder_that_cannot_be_written(measured: list[Any], tiny_qwen: sage.Target, tmp_path: Path) -> None:
    (tmp_path / "sage-draft").mkdir()
    costs_folder().write_text("a file")
    with pytest.warns(UserWarning) as caught:
        known_costs(tiny_qwen, random_draft(tiny_qwen).eval(), 20, 60)
    (warning,) = caught
    check_message(str(warning.message), str(costs_folder()), "not kept")


@pytest.mark.parametrize(("context", "longer"), [(1, 2), (100, 300), (191, 192), (192, 193), (2000, 5000)])
def test_contexts_fill_buckets(context: int, longer: int) -> None:
    first, second = rounded_contexts(context, longer, 1 << 20)
    assert first >= context and second >= longer and second - first >= measure.MIN_CONTEXT_SPAN
    for found in (first, second):
        assert key_bucket(found + ROOM + 1) == found + ROOM + 1 < key_bucket(found + ROOM + 2)


class TestCurve:
    @pytest.mark.parametrize("count,seconds", [(1, 1.0), (2, 1.5), (3, 2.0), (8, 4.5), (2.5, 1.75)])
    def test_lines_between_points_and_beyond(self, count: float, seconds: float) -> None:
        curve = Curve([1, 3, 5], [1.0, 2.0, 3.0], scale=1.0)
        assert curve(count) == pytest.approx(seconds)
        assert curve(count) == pytest.approx(seconds), "and the second time, when it is known"

    def test_a_noisy_count_is_pooled_with_its_neighbours(self) -> None:
        """The least squares among non-decreasing curves: no price is raised to that of one slow run before it."""
        assert Curve([1, 2, 4, 8, 16], [4.0, 1.0, 2.5, 2.5, 3.0]).seconds == [2.5, 2.5, 2.5, 2.5, 3.0]
        assert Curve([1, 2, 4, 8], [1.0, 4.0, 2.0, 5.0]).seconds == [1.0, 3.0, 3.0, 5.0]

    def test_live_timings_move_it_and_interruptions_do_not(self) -> None:
        curve = Curve([1, 3], [1.0, 2.0])
        for seconds in (1.5 * 1.2, 100.0):
            curve.correct(curve(2), seconds, 1.0)
            assert curve(3) == pytest.approx(2.4)

    def test_nodes_of_a_shared_pass_cost_what_they_add_to_it(self) -> None:
        """Four requests, 16 nodes of the three others; draft passes are shared by as many nodes of all."""
        costs = Costs(Curve([1, 8, 64], [1.0, 1.0, 8.0]), Curve([1, 64], [0.1, 0.73]), context=0, commit_s=0.2, overhead=0.01)
        shared = costs.shared(16, 4)
        assert [shared.verify(n) for n in (1, 9)] == pytest.approx([costs.verify(17), costs.verify(25)])
        assert shared.draft(2) == pytest.approx(costs.draft(8) / 4) and shared.first_level_s == pytest.approx(0.05)
        assert costs.shared(100, 2).verify(5) - costs.shared(100, 2).verify(1) == pytest.approx(4 * 7 / 56), "the last slope"
        policy = sage.policy("cost_aware")
        policy.costs = costs
        alone = policy.prices
        policy.share(16, 4)
        assert policy.prices.verify_s[7] - policy.prices.verify_s[0] == pytest.approx(7 * 7 / 56)
        assert alone.verify_s[7] == alone.verify_s[0], "nodes up to the eighth are free for a request alone"
        policy.share(0, 1)
        assert policy.prices == alone

    def test_every_node_attends_to_the_context(self) -> None:
        """100 more tokens take 100 * (0.01 + 2 * 0.002) for three nodes; a pass over a shorter one still takes time."""
        costs = Costs(Curve([1, 3], [1.0, 2.0]), Curve([1], [0.1]), context=1000, verify_per_token=0.01, verify_per_pair=0.002)
        assert costs.verify_s(1, 1100) == pytest.approx(2.0) and costs.verify_s(3, 1100) == pytest.approx(3.4)
        costs.verify.scale = 1.5
        assert costs.verify_s(3, 1100) == pytest.approx(1.5 * 3.4) and costs.verify_s(3, 0) == pytest.approx(1.5 * 2.0 / 2)

    def test_a_captured_pass_costs_as_much_as_the_edge_of_its_bucket(self) -> None:
        """5 nodes are padded to 8, 65 to 128; 1 + 300 + 1 keys to 512, as 1 + 400 + 1, and 1 + 600 + 1 to 1024, unless the pass
        reads the number of keys from the device.
        """
        curve = Curve([1, 2, 4, 8, 64], [1.0, 2.0, 3.0, 7.0, 8.0], is_stepped=True)
        assert curve.up_to(9) == [1.0, 2.0, 3.0, 3.0, 7.0, 7.0, 7.0, 7.0, pytest.approx(7 + 1 / 7)]
        assert curve(65) == curve(128) > curve(64)
        costs = Costs(curve, Curve([1], [0.1]), context=300, verify_per_token=0.001, has_key_buckets=True)
        assert costs.verify_s(1, 300) == costs.verify_s(1, 400) == 1.0
        assert costs.verify_s(1, 600) == pytest.approx(1.512)
        costs.has_key_buckets = False
        assert costs.verify_s(1, 400) == pytest.approx(1.1)

    @pytest.mark.parametrize("seconds", [[], [1.0], [1.0, 0.0], [1.0, math.nan]])
    def test_a_curve_without_a_time_for_every_count_is_refused(self, seconds: list[float]) -> None:
        with refused("costs", "[1, 2]"):
            Curve([1, 2], seconds)

    @pytest.mark.parametrize("kind", ["eagle", "model"])
    def test_a_timed_level_is_that_of_decoding(self, kind: str, tiny_qwen: sage.Target) -> None:
        """One pass over distinct tokens and one product with lm_head, both of the draft; nothing of the target's."""
        drafting = make_qwen(seed=1) if kind == "model" else tiny_qwen
        draft = ModelDraft(drafting, tiny_qwen) if kind == "model" else sage.new_draft(tiny_qwen)
        session = new_session(draft, tiny_qwen, 40)
        tokens: list[int] = []
        drafting.embed_tokens.register_forward_hook(lambda _, inputs, __: tokens.extend(inputs[0].tolist()))
        call = measure.draft_level(session, tiny_qwen, 4, context=20)
        with Operators() as in_reset:
            call.reset()
        with Operators() as in_run:
            first = call.run()
        for seen, expected in ((in_reset, []), (in_run, [4])):
            products = [shape for name, shape in seen.calls if name.endswith("mm") and shape[-1] == tiny_qwen.vocab_size]
            assert [shape[-2] for shape in products] == expected
        call.reset()
        assert session.context == 20 and len(set(tokens)) == 4
        assert torch.equal(call.run(), first)  # every run starts from the same state
