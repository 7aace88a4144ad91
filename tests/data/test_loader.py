"""Micro-batches of every step: independent of ranks, micro-batch size and restarts, and built ahead of the trainer."""

import logging
import multiprocessing
import os
import subprocess
import sys
import threading
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data_helpers import Numbers, ids_by_step, take
from support.data_helpers import collate_numbers as collate
from support.messages import check_message, refused

from data_prep.conversation import BadItem
from data_prep.dataset.order import MixedOrder, divide_step, group_by_length, next_source
from data_prep.loader import StepLoader
from data_prep.workers import loader_workers, worker_context


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(0, 3), st.sampled_from([(1, 4), (2, 2), (4, 1), (1, 2), (2, 1), (1, 1)]))
def test_steps_do_not_depend_on_ranks_and_micro_batch_size(size: int, seed: int, layout: tuple[int, int]) -> None:
    world_size, micro = layout
    data = Numbers(size)
    expected = take(StepLoader(data, collate, 4, 4, seed=seed), 6)
    ranks = [take(StepLoader(data, collate, 4, micro, rank, world_size, seed), 6) for rank in range(world_size)]
    for step in range(6):
        dealt = [names for m in range(4 // (micro * world_size)) for rank in ranks for names in rank[step][m]]
        assert dealt == expected[step][0]


class Long(Numbers):
    """Example i has lengths[i] tokens; `is_known`: whether the dataset provides the lengths."""

    def __init__(self, lengths: np.ndarray, is_known: bool) -> None:
        super().__init__(len(lengths))
        self.sizes = lengths
        if is_known:
            self.lengths = lengths

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"id": f"n{number}", "input_ids": torch.full((int(self.sizes[number]),), number)}


def tokens_of(steps: list[list[list[str]]], lengths: np.ndarray) -> list[list[int]]:
    return [[int(lengths[int(name[1:])]) for micro in step for name in micro] for step in steps]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 50), st.integers(1, 6), st.integers(1, 5), st.integers(0, 3), st.integers(0, 9))
def test_grouping_keeps_every_example_of_an_epoch_and_its_window(size, step, window, epoch, seed):
    generator = np.random.default_rng(seed)
    order, lengths, first = generator.permutation(size), generator.integers(1, 9, size), epoch * size
    found = group_by_length(order, lengths, first, step, window, seed)
    assert sorted(found) == sorted(order)
    for position in range(size):  # every example stays in its window
        window_of = (first + position) // (step * window)
        members = [n for n in range(size) if (first + n) // (step * window) == window_of]
        assert found[position] in order[members]
    assert group_by_length(order, lengths, first, step, 1, seed).shape == order.shape


def test_window_makes_steps_of_similar_lengths_and_shuffles_them() -> None:
    lengths = np.arange(1, 65)
    order = np.random.default_rng(0).permutation(64)
    found = lengths[group_by_length(order, lengths, 0, 4, 16, 0)].reshape(16, 4)
    assert (found[:, 0] - found[:, -1] == 3).all()  # four neighbours in length
    assert found[:, 0].tolist() != sorted(found[:, 0], reverse=True)  # but not sorted over steps
    found = lengths[group_by_length(np.arange(64), lengths, 2, 4, 16, 0)]  # the epoch begins within a step
    assert found[:2].tolist() == [62, 61] and (found[2:62].reshape(15, 4) @ [1, 0, 0, -1] == 3).all()
    assert group_by_length(order, lengths, 0, 4, 16, 0).tolist() == group_by_length(order, lengths, 0, 4, 16, 0).tolist()
    assert group_by_length(order, lengths, 0, 4, 16, 1).tolist() != group_by_length(order, lengths, 0, 4, 16, 0).tolist()


def lengths_like_conversations(number: int) -> np.ndarray:
    """Image tokens of uniform and text of log-normal length."""
    generator = np.random.default_rng(0)
    return (generator.integers(30, 130, number) + np.exp(generator.normal(3.2, 0.9, number))).astype(int)


@pytest.mark.parametrize("budget", [None, 400])
def test_the_largest_micro_batch_is_known_before_the_first_step(budget: int | None) -> None:
    """That of any rank in the first epoch, and under a budget one that no step exceeds."""
    lengths = lengths_like_conversations(64)
    ranks = [StepLoader(Long(lengths, True), collate, 8, 2, rank, 2, micro_batch_tokens=budget) for rank in range(2)]
    sizes = []
    for loader in ranks:
        with closing(iter(loader)) as steps:
            sizes += [batch["input_ids"].numel() for step in islice(steps, 8) for batch in step]
    found = [loader.largest()["input_ids"].numel() for loader in ranks]  # type: ignore[index]
    assert found[0] == found[1] and (found[0] == max(sizes) if budget is None else max(sizes) <= found[0] <= budget)
    assert StepLoader(Long(lengths, False), collate, 8, 2).largest() is None


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 30), st.integers(0, 12), st.sampled_from([None, False, True]))
def test_resume_continues_with_the_next_step(size: int, start: int, is_known: bool | None) -> None:
    """Also of examples grouped by their lengths, which may be known before they are built."""
    data = Numbers(size) if is_known is None else Long(lengths_like_conversations(size), is_known)
    expected = take(StepLoader(data, collate, 4, 2, length_window=3), 14)
    assert take(StepLoader(data, collate, 4, 2, start_step=start, length_window=3), 14 - start) == expected[start:]


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("size", [1, 7, 23])
def test_data_smaller_than_a_batch_are_repeated_evenly(size: int, is_known: bool) -> None:
    lengths = lengths_like_conversations(size)
    steps = take(StepLoader(Long(lengths, is_known), collate, 16, 4, length_window=16), 6)
    drawn = [name for step in steps for micro in step for name in micro]
    counts = [drawn.count(name) for name in set(drawn)]
    assert len(drawn) == 96 and len(counts) == size and max(counts) - min(counts) <= 1


@pytest.mark.parametrize("is_known", [True, False])
def test_the_longest_examples_of_a_step_come_first(is_known: bool) -> None:
    """On every rank; the examples of a step do not depend on the ranks. An epoch has every example once, in its own order."""
    lengths = lengths_like_conversations(24)
    ranks = [take(StepLoader(Long(lengths, is_known), collate, 12, 2, rank, 2), 4) for rank in range(2)]
    loader = StepLoader(Long(lengths, is_known), collate, 12, 12)
    expected = ids_by_step(take(loader, 4))
    assert [a | b for a, b in zip(*map(ids_by_step, ranks), strict=True)] == expected
    assert all(row == sorted(row, reverse=True) for steps in ranks for row in tokens_of(steps, lengths))
    assert loader.steps_per_epoch == 2 and expected[0] | expected[1] == expected[2] | expected[3]
    assert expected[0] not in expected[2:]
    assert ids_by_step(take(StepLoader(Long(lengths, is_known), collate, 12, 12, seed=1), 4)) != expected


def test_workers_are_by_default_the_cores_beside_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.workers.num_cores", lambda: 32)
    assert [loader_workers(None, ranks) for ranks in (1, 8, 32)] == [8, 3, 1] and loader_workers(0, 8) == 0


def test_errors_reach_the_trainer_and_the_thread_ends() -> None:
    class Broken(Numbers):
        def __getitem__(self, number: int) -> dict[str, Any]:
            raise BadItem("rows.json", number, "truncated")

    with refused("rows.json: item", "truncated", error=BadItem):
        next(iter(StepLoader(Broken(4), collate, 4, 4)))
    steps = iter(StepLoader(Numbers(4), collate, 4, 4))
    next(steps)
    assert [thread for thread in threading.enumerate() if thread.name.startswith("step-loader")]
    steps.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("step-loader")]


# -- a budget of tokens ------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 900))
def test_a_budget_divides_a_step_evenly(lengths: list[int], world_size: int, budget: int) -> None:
    lengths = lengths * world_size
    passes = divide_step(lengths, budget, world_size)
    groups = [group for ranks in passes for group in ranks]
    assert sorted(place for group in groups for place in group.members) == list(range(len(lengths)))
    assert all(len(ranks) == world_size for ranks in passes)
    for group in groups:
        assert group.longest == max(lengths[place] for place in group.members)
        assert group.padded_tokens <= budget or len(group.members) == 1
    largest = [max(group.padded_tokens for group in ranks) for ranks in passes]
    assert largest == sorted(largest, reverse=True)  # memory runs out immediately or never
    fewest = -(-len(one_rank) // world_size) if (one_rank := divide_step(lengths, budget, 1)) else 0
    assert len(passes) == fewest


def test_a_budget_balances_the_ranks() -> None:
    """Real / padded tokens, and the mean over ranks / their maximum, both in padded tokens of a pass."""
    lengths = lengths_like_conversations(64 * 32)
    order = group_by_length(np.arange(len(lengths)), lengths, 0, 64, 16, 0).reshape(-1, 64)
    for world_size, least in ((2, 0.97), (8, 0.95), (16, 0.9)):
        passes = [ranks for step in order for ranks in divide_step(lengths[step].tolist(), 1024, world_size)]
        tokens = np.array([[group.padded_tokens for group in ranks] for ranks in passes])
        assert lengths.sum() / tokens.sum() > 0.98
        assert tokens.mean(1).sum() / tokens.max(1).sum() > least


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_budget_changes_no_step_and_resumes_anywhere(world_size: int) -> None:
    lengths = lengths_like_conversations(40)
    data = Long(lengths, is_known=True)
    expected = ids_by_step(take(StepLoader(data, collate, 8, 8, length_window=3), 9))

    def loader(rank: int, start: int = 0) -> StepLoader:
        return StepLoader(data, collate, 8, 8, rank, world_size, 0, start, length_window=3, micro_batch_tokens=260)

    ranks = [take(loader(rank), 9) for rank in range(world_size)]
    for rank, steps in enumerate(ranks):
        assert [len(step) for step in steps] == [len(step) for step in ranks[0]]
        assert take(loader(rank, 4), 5) == steps[4:]
        sizes = [[int(lengths[int(name[1:])]) for name in micro] for step in steps for micro in step]
        assert all(len(micro) * max(micro) <= 260 or len(micro) == 1 for micro in sizes)
    together = [{name for steps in ranks for micro in steps[number] for name in micro} for number in range(9)]
    assert together == expected
    assert len({len(step) for step in ranks[0]}) > 1 or world_size == 4


def test_budgets_that_cannot_be_kept() -> None:
    with refused("train.micro_batch_tokens: 100", "unknown"):
        StepLoader(Numbers(4), collate, 4, 1, micro_batch_tokens=100)
    data = Long(np.array([5, 9, 30, 7]), is_known=True)
    check_message(StepLoader(data, collate, 4, 1, micro_batch_tokens=20).over_budget, "1 of 4 examples", "30 tokens")
    assert not StepLoader(data, collate, 4, 1, micro_batch_tokens=30).over_budget
    assert [len(micro) for micro in take(StepLoader(data, collate, 4, 1, micro_batch_tokens=20), 1)[0]] == [1, 2, 1]


# -- mixing -----------------------------------------------------------------------------------------------------------


def test_weights_are_shares_of_every_epoch() -> None:
    sources = [0] * 6 + [1] * 2
    mix = MixedOrder(np.array(sources), [1.0, 3.0])
    epochs = [mix.epoch(0, epoch) for epoch in range(3)]
    for order in epochs:
        assert np.bincount(np.array(sources)[order]).tolist() == [2, 6]
    assert sorted(number for order in epochs for number in order if number < 6) == list(range(6))  # continues in the next epoch
    assert np.bincount(epochs[0])[6:].tolist() == [3, 3]
    assert mix.epoch(0, 1).tolist() == epochs[1].tolist()
    assert mix.epoch(1, 1).tolist() != epochs[1].tolist()
    with refused("data.sources", "source number 0"):
        MixedOrder(np.array([1, 1]), [1.0, 1.0])
    taken = [0, 0]
    for expected in (0, 1, 0, 0, 1, 0):  # of a stream
        assert next_source([2.0, 1.0], taken) == expected
        taken[expected] += 1


@pytest.mark.slow
def test_worker_processes_warn_as_commands_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers imports torchao, which warns of every kernel that the machine lacks."""
    preload = Mock()
    monkeypatch.setattr(multiprocessing, "get_context", preload)
    worker_context()
    modules = preload().set_forkserver_preload.call_args.args[0]
    check = f"import logging, {', '.join(modules)}; print(logging.getLogger('torchao').level)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"{logging.ERROR}\n", "")


WORKERS = """
if __name__ == "__main__":
    import multiprocessing, os, signal, sys, time, torch
    from data_prep.build import build_dataset
    from data_prep.config import DataConfig
    from data_prep.loader import StepLoader
    from sage.targets.loading import load_processor

    processor = load_processor("pocket_qwen2_5_vl")
    dataset = build_dataset(DataConfig(num_examples=6, cache_dir=sys.argv[1]), processor)
    alone, together = (iter(StepLoader(dataset, processor.collate, 4, 2, num_workers=n)) for n in (0, 2))
    for _ in range(3):
        for worker in multiprocessing.active_children():  # as Ctrl-C does; the run ends its step with their batches
            os.kill(worker.pid, signal.SIGINT)
        for a, b in zip(next(alone), next(together), strict=True):
            assert a.keys() == b.keys()
            assert all(torch.equal(a[key], b[key]) if key not in ("ids", "sources") else a[key] == b[key] for key in a)
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_worker_processes_give_the_same_and_end_with_a_killed_parent(tmp_path: Path) -> None:
    """Workers hold the write end of its output pipe: a reader would wait forever."""
    (tmp_path / "main.py").write_text(WORKERS)
    command = [sys.executable, tmp_path / "main.py", tmp_path / "cache"]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == b"ready\n"
        rank.kill()
        assert rank.communicate(timeout=30)[0] == b""
