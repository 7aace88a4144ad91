"""Seeds faults into a copy of the checkout, one at a time, and runs the tests that should notice: `python tests/mutation_probe.py`.

A fault is one replaced piece of a source file: a sign, an index, a mask, a dropped reduction. It is caught if a test fails. Tests that
fail without a fault, and a piece that the file no longer contains exactly once, are errors: update the list with the code. Not
collected by pytest.
"""

# ruff: noqa: E501 (a fault is a row)

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[1]
DECODER = "tests/decoding/test_trees.py tests/decoding/test_level.py tests/decoding/test_decoder.py tests/decoding/test_batch.py tests/decoding/test_losslessness.py"
SAMPLING = "tests/decoding/test_noise.py tests/decoding/test_sampling.py tests/decoding/test_sampling_coupled.py"
POLICIES = "tests/decoding/test_policies.py tests/decoding/test_cost_aware.py tests/decoding/test_tree_properties.py"
PASSES = "tests/passes/test_passes.py tests/decoding/test_batch.py"
HEADS = "tests/drafts/test_unroll.py tests/drafts/test_drafts.py tests/drafts/test_slots.py"
OBJECTIVE = "tests/training/test_objective.py tests/training/test_pairs.py tests/training/test_anchors.py"
LOADER = "tests/data/test_loader.py tests/data/test_prompts.py"
STORE = "tests/checkpoints/test_store.py tests/checkpoints/test_export.py"
EXPORTS = "tests/checkpoints/test_export.py tests/checkpoints/test_export_check.py"


@dataclass(frozen=True)
class Fault:
    """`old` in `file` becomes `new`; `tests` are the files that should fail."""

    file: str
    old: str
    new: str
    tests: str


FAULTS = [
    # -- decoder: acceptance, trees, sampling, policies
    Fault("sage/decoding/verify.py", "if parent == last and tokens[node] == next_token", "if tokens[node] == next_token", DECODER),
    Fault("sage/decoding/verify.py", "last, next_token = node, next_tokens[node]", "last, next_token = node, next_tokens[parent]", DECODER),
    Fault("sage/decoding/verify.py", "float(token == target) for token in topk[1][:k]", "float(token == target) for token in topk[1][1:k]", POLICIES),
    Fault("sage/planning/tree.py", "row = rows[parent + 1][:]", "row = rows[parent][:]", DECODER),
    Fault("sage/planning/tree.py", "row[node] = 1", "row[node] = parent >= 0", DECODER),
    Fault("sage/planning/tree.py", "self._parents.append(nodes[row])", "self._parents.append(nodes[0])", DECODER),
    Fault("sage/planning/tree.py", "row, rank = divmod(pick, width)", "row, rank = divmod(pick, width + 1)", DECODER),
    Fault("sage/decoding/decoder.py", "(request.stats.new_tokens - 1)", "request.stats.new_tokens", DECODER),
    Fault("sage/decoding/decoder.py", "num_accepted = min(len(path) - 1, len(emitted))", "num_accepted = len(path)", DECODER),
    Fault("sage/decoding/decoder.py", "context = request.cache.length - len(tree)", "context = request.cache.length - len(path)", DECODER),
    Fault("sage/decoding/decoder.py", "features = features.at(cached_index(tuple(path), tree.tokens.device))", "pass", DECODER),
    Fault("sage/decoding/decoder.py", "last_level = min(last_level, session.max_depth)", "pass", DECODER + " " + HEADS),
    Fault("sage/decoding/verify.py", "noise = self._noise(self.num_new, tree.depth + 1)", "noise = self._noise(self.num_new + 1, tree.depth + 1)", SAMPLING),
    Fault("sage/decoding/verify.py", "noise.index_select(0, tree.depths)", "noise.index_select(0, tree.depths * 0)", SAMPLING + " " + DECODER),
    Fault("sage/decoding/verify.py", "self._noise(self.num_new + level - 1, 1)", "self._noise(self.num_new + level, 1)", SAMPLING),
    Fault("sage/decoding/verify.py", "prefixes = torch.cat((past.expand(len(nodes), -1), paths), 1)", "prefixes = past.expand(len(nodes), -1)", SAMPLING),
    Fault("sage/decoding/noise.py", "noise.copy_(bits)", "noise.copy_(bits.abs() // 2)", SAMPLING),
    Fault("sage/decoding/noise.py", "kept = gumbel(self.seed, positions, self.num_tokens), self._rows[first - self._first :]", "kept = gumbel(self.seed, positions, self.num_tokens), self._rows", SAMPLING),
    Fault("sage/trees/chain.py", "frontier.level < self.depth", "frontier.level <= self.depth", POLICIES + " " + DECODER),
    Fault("sage/trees/cost_aware/policy.py", "if total - price > best_net:", "if total + price > best_net:", POLICIES),
    Fault("sage/trees/cost_aware/policy.py", "net = total - price * (verify_s[nodes] - verify_s[0])", "net = total - price * verify_s[nodes]", POLICIES),
    Fault("sage/costs/calibration.py", "room -= acceptance", "room -= 0.0", POLICIES),
    # -- passes: masks, caches, several requests
    Fault("sage/runtime/cache.py", "tree = buffer.narrow(-2, start, self.length - start)", "tree = buffer.narrow(-2, start - 1, self.length - start)", PASSES + " tests/device/test_spread.py"),
    Fault("sage/runtime/cache.py", "new[..., : old.shape[-2], :] = old", "pass", PASSES + " tests/decoding/test_chat.py"),
    Fault("sage/runtime/cache.py", "cache.zero_to(cache.capacity)", "pass", PASSES),
    Fault("sage/runtime/cache.py", "self.owners * self.places.shape[1] + self.offsets", "self.owners * self.places.shape[1]", PASSES),
    Fault("sage/runtime/cache.py", "place = [owners[:, None], torch", "place = [owners[:, None] * 0, torch", PASSES),
    Fault("sage/runtime/packing.py", "places[row][: count + slots] = [*range(end - count, end), *behind]", "places[row][: count + slots] = [*range(count), *behind]", PASSES),
    Fault("sage/runtime/packing.py", 'values["steps"] = shared.steps.narrow(0, 0, max(cache.length for cache in caches))', 'values["steps"] = shared.steps.narrow(0, 0, min(cache.length for cache in caches))', PASSES),
    Fault("sage/targets/tree_passes.py", "(place < 0) | (self.visible.gather(1, place.clamp(0, last)) & (place <= last))", "(place <= 0) | (self.visible.gather(1, place.clamp(0, last)) & (place <= last))", PASSES),
    Fault("sage/targets/tree_passes.py", "(self.steps < near[:1]).expand", "(self.steps < near[:1] - 1).expand", PASSES),
    Fault("sage/targets/tree_passes.py", '"near": steps.narrow(0, end - seen, seen)', '"near": steps.narrow(0, end - seen - 1, seen)', PASSES),
    Fault("sage/runtime/attention.py", "dtype=torch.bool, device=device).tril(keys - queries)", "dtype=torch.bool, device=device).tril()", PASSES + " tests/decoding/test_chat.py"),
    Fault("sage/drafts/head_session.py", "itself = torch.eye(len(rows), dtype=torch.bool, device=self.device)", "itself = torch.ones(len(rows), len(rows), dtype=torch.bool, device=self.device)", HEADS + " tests/decoding/test_level.py"),
    Fault("sage/drafts/head_session.py", "cos, sin = self._rope(self.offset + self.depth, 1)", "cos, sin = self._rope(self.offset, 1)", HEADS),
    Fault("sage/drafts/head_session.py", "parents = self._frontier.index_select(0, rows)", "parents = self._frontier[:1].expand(len(rows))", HEADS),
    # -- objective: losses, gradients, pairs, unrolled steps
    Fault("sage/drafts/unroll.py", "return out[..., :size] + out[..., size : size + 1] * of_chain", "return out[..., :size] + of_chain", HEADS),
    Fault("sage/drafts/unroll.py", "(keys <= self.roots[..., None]) | (keys == key.shape[2])", "(keys < self.roots[..., None]) | (keys == key.shape[2])", HEADS),
    Fault("train/distill/teacher.py", "embeds_next=embeds[:, 1:-1]", "embeds_next=embeds[:, :-2]", OBJECTIVE),
    Fault("train/distill/teacher.py", "mask=loss_mask[:, 2:].bool()", "mask=loss_mask[:, 1:-1].bool()", OBJECTIVE),
    Fault("train/distill/teacher.py", "features_next=features.last[:, 1:-1]", "features_next=features.last[:, :-2]", OBJECTIVE),
    Fault("train/distill/chunked_loss.py", "difference_CU = q_CU.sub_(p_CU)", "difference_CU = q_CU.sub_(p_CU).neg_()", OBJECTIVE),
    Fault("train/distill/chunked_loss.py", "lk * overlap_C.log()", "lk * overlap_C", OBJECTIVE),
    Fault("train/distill/chunked_loss.py", "(-tv - lk / overlap_C)[..., None]", "(-tv - lk)[..., None]", OBJECTIVE),
    Fault("train/distill/chunked_loss.py", "grad_RD[chunk.rows] = (slope_CU @ lm_head_UD) * scale_C1", "grad_RD[chunk.rows] = slope_CU @ lm_head_UD", OBJECTIVE),
    Fault("train/distill/chunked_loss.py", "place_B = rows.position[block.rows] - block.positions.start", "place_B = (rows.position[block.rows] - block.positions.start) * 0", OBJECTIVE),
    Fault("train/distill/objective.py", "return decay_K / decay_K.sum()", "return decay_K", OBJECTIVE),
    Fault("train/distill/objective.py", "reached_CK @ from_KK * is_row_CK", "reached_CK @ from_KK.T * is_row_CK", "tests/drafts/test_block.py"),
    # -- loader: order, budgets, splits
    Fault("data_prep/dataset/order.py", "head = min(-start % step_size, len(part))", "head = 0", LOADER),
    Fault("data_prep/dataset/order.py", "np.argsort(-lengths[part], kind=\"stable\")", "np.argsort(lengths[part], kind=\"stable\")", LOADER),
    Fault("data_prep/dataset/order.py", "num_passes = -(-len(_cuts(longest_first, budget)) // world_size)", "num_passes = len(_cuts(longest_first, budget)) // world_size or 1", LOADER),
    Fault("data_prep/sources/base.py", "position < self.validation + self.test else", "position < self.test else", LOADER),
    Fault("data_prep/sources/base.py", "return hashlib.sha256(value).hexdigest()", "return conversation.id", LOADER),
    # -- store: atomic states, retention
    Fault("checkpoints/store.py", "write_manifest(part, step)\n        replace_folder(part, final)", "replace_folder(part, final)\n        write_manifest(final, step)", STORE),
    Fault("checkpoints/store.py", "kept = {best_step, *earlier[-self.keep_last :]}", "kept = {best_step, *earlier[: self.keep_last]}", STORE),
    Fault("checkpoints/store.py", "if saved > step or (saved not in kept and not is_due):", "if saved not in kept and not is_due:", STORE),
    Fault("checkpoints/store.py", 'if folder.name != step_name(manifest["step"]):', "if False:", STORE),
    Fault("sage/io/folders.py", "if old.exists() and not final.exists():", "if old.exists() and final.exists():", STORE),
    # -- exports
    Fault("checkpoints/export/formats/eagle.py", "[k - 1 for k in draft.feature_levels]", "list(draft.feature_levels)", EXPORTS),
    Fault("checkpoints/export/configs.py", "any(later <= earlier for earlier, later in", "any(later < earlier for earlier, later in", EXPORTS),
]  # fmt: skip


PROCESSES = multiprocessing.get_context("forkserver")  # forks of a process that has imported what takes seconds
IMPORTED = ["pytest", "torch", "datasets", "transformers.models.llava_onevision.modeling_llava_onevision"]
IMPORTED += ["transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"]


def fails(tests: str, copy: Path) -> bool:
    """Whether a test of these files fails or hangs in a copy."""
    process = PROCESSES.Process(target=run_tests, args=(tests, copy))
    process.start()
    process.join(900)
    process.kill()
    return process.exitcode != 0


def run_tests(tests: str, copy: Path) -> NoReturn:
    """Ends the process with the exit code of pytest."""
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    os._exit(pytest.main(["-x", "--assert=plain", "-p", "no:cacheprovider", "-m", "not slow", *tests.split()]))


def outcome(fault: Fault, copy: Path) -> str:
    """Returns `caught`, `MISSED`, or `error: ..`."""
    path = copy / fault.file
    before = path.read_text(encoding="utf-8")
    if before.count(fault.old) != 1:
        return f"error: found {before.count(fault.old)} times"
    path.write_text(before.replace(fault.old, fault.new), encoding="utf-8")
    try:
        return "caught" if fails(fault.tests, copy) else "MISSED"
    finally:
        path.write_text(before, encoding="utf-8")


def main() -> int:
    """Prints a line per fault; exit code 1 if one was missed or cannot be seeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="copies of the checkout that are tested at the same time")
    parser.add_argument("--only", default="", help="faults of files whose path contains this text")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in `make test`: sums depend on the number of threads
    PROCESSES.set_forkserver_preload(IMPORTED)
    faults = [fault for fault in FAULTS if args.only in fault.file]
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        copies = [Path(folder) / f"copy_{number}" for number in range(args.jobs)]
        for copy in copies:
            for name in filter(None, tracked):
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                (copy / name).write_bytes((ROOT / name).read_bytes())
        found = {}

        def probe(number: int) -> None:
            for fault in faults[number :: args.jobs]:
                found[fault] = outcome(fault, copies[number])
                print(f"{found[fault]}  {fault.file}: {fault.old[:70]!r}", flush=True)

        list(pool.map(probe, range(args.jobs)))
        used = sorted({name for fault in faults for name in fault.tests.split()})
        if any(pool.map(lambda number: fails(" ".join(used[number :: args.jobs]), copies[number]), range(args.jobs))):
            print("error: tests fail without a fault")
            return 1
    bad = [fault for fault in faults if found[fault] != "caught"]
    print(f"{len(faults) - len(bad)} of {len(faults)} faults are caught")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
