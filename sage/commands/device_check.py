"""What `sage-generate --check-device` reports: the kernels, the bandwidth and the synchronizations of an installation.

It only measures; the expected figures are in docs/gpu.md.

Shapes: N nodes of a tree pass, S context tokens.
"""

from __future__ import annotations

import re
import statistics
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from sage.costs.measure import empty_cache, verify_pass
from sage.decoding.generation import Generation, start
from sage.drafts.draft import Draft
from sage.inputs.format import Inputs
from sage.io.dtypes import dtype_name
from sage.runtime.executors import describe_passes, executor_of
from sage.runtime.pass_function import Eager, Executor
from sage.runtime.timing import TimedCall, interleaved_s
from sage.targets import Target
from sage.targets.tree_passes import TreePasses
from sage.trees import AUTOREGRESSIVE

NODES, CONTEXT = 16, 512
REPEATS = 10
COPY_BYTES, GPU_COPY_BYTES = 2**26, 2**29  # larger than the caches
IMAGE_SIDE = 448  # pixels
NEW_TOKENS = 32
OPERATOR = re.compile(r"(?:aten::_scaled_dot_product|flash_attn:|torch_attn:)[_:]*(\w+)")
KERNEL, KERNEL_WIDTH = re.compile(r"flash|fmha|attention|sdpa", re.IGNORECASE), 60
SYNCHRONIZING = "synchronizing CUDA operation"  # of the warnings that torch.cuda.set_sync_debug_mode turns on


def check_device(target: Target, draft: Draft | None, policy: str) -> Iterator[tuple[str, str]]:
    """Yields the report as (name, value), each as soon as it is measured, with the synchronizations of `policy`.

    Without a draft, they are those of autoregressive decoding.
    """
    device = target.device
    is_gpu = device.type == "cuda"
    yield "device", f"{device}, {torch.cuda.get_device_name(device) if is_gpu else f'{torch.get_num_threads()} thread(s)'}"
    yield "versions", f"torch {torch.__version__}, transformers {transformers.__version__}"
    weights = sum(p.nbytes for name, p in target.text_model.named_parameters() if not name.startswith("embed_tokens"))
    weights += sum(p.nbytes for p in target.lm_head.parameters())  # of the embedding, a pass reads single rows only
    yield "target", f"{Path(target.name).name}, {target.num_layers} layers on {len(set(target.layer_devices))} device(s)"
    yield "dtype", dtype_name(target.dtype)
    inputs = _inputs(target)
    prompt = target.embed(inputs)
    yield "vision attention", attention_used(TimedCall(lambda: target.embed(inputs)), device)
    cache_of = partial(target.new_cache, prompt.embeds.shape[1])
    yield "prefill attention", attention_used(TimedCall(lambda: target.prefill(prompt, cache_of())), device)
    yield "tree attention", attention_used(_tree_pass(target, AsEager(executor_of(target.passes))), device)
    tree = _tree_pass(target)
    bandwidth = copy_bandwidth(device)
    pass_s = _median_s(tree, device)
    read = weights + target.cache_bytes(CONTEXT + NODES, NODES)
    bound_s = read / bandwidth
    yield "copy bandwidth", f"{bandwidth / 1e9:.1f} GB/s"
    yield (
        "target pass",
        f"{1e3 * pass_s:.2f} ms for {NODES} nodes after {CONTEXT} tokens; reads {read / 1e9:.3f} GB, at the copy bandwidth "
        f"{1e3 * bound_s:.2f} ms: {pass_s / bound_s:.1f}x",
    )
    policy = policy if draft is not None else AUTOREGRESSIVE
    count = synchronizations_per_round(start(target, draft, inputs, policy, max_new_tokens=NEW_TOKENS), device)
    yield "synchronizations", "n/a" if count is None else f"{count:.1f} per round of the policy {policy}"
    yield "passes", describe_passes(target)


class AsEager(Eager):
    """Runs the passes of another executor operator by operator: a replay shows no operators, and a capture shows them twice."""

    def __init__(self, executor: Executor) -> None:
        self.splits_keys = executor.splits_keys  # type: ignore[method-assign]


def _tree_pass(target: Target, executor: Executor | None = None) -> TimedCall:
    passes = TreePasses(target, (), executor)
    return verify_pass(passes, target, empty_cache(passes, CONTEXT + NODES), NODES, CONTEXT)


def _inputs(target: Target) -> Inputs:
    image = Image.effect_noise((IMAGE_SIDE, IMAGE_SIDE), 64).convert("RGB")
    content = [{"type": "image", "image": image}, {"type": "text", "text": "Describe the image."}]
    return target.prepare([{"role": "user", "content": content}])


@torch.inference_mode()
def _median_s(call: TimedCall, device: torch.device) -> float:
    return statistics.median(interleaved_s([call], REPEATS, device)[0])


def copy_bandwidth(device: torch.device) -> float:
    """Returns the bytes read and written per second by copies of one large tensor to another."""
    source = torch.ones(GPU_COPY_BYTES if device.type == "cuda" else COPY_BYTES, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    return 2 * source.nbytes / _median_s(TimedCall(lambda: copy.copy_(source)), device)


def attention_used(call: TimedCall, device: torch.device) -> str:
    """Returns the attention operators that `call` runs, with their number, and on a GPU the kernels."""
    call.reset()
    with AttentionOperators() as operators:
        call.run()
    counts = ", ".join(f"{name} x {count}" for name, count in operators.counts.items()) or "no fused operator"
    if device.type != "cuda":
        return counts
    call.reset()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        call.run()
    kernels = [event.key[:KERNEL_WIDTH] for event in trace.key_averages() if KERNEL.search(event.key)]
    return f"{counts} ({', '.join(kernels)})" if kernels else counts


class AttentionOperators(TorchDispatchMode):
    """Counts the fused attention operators that run; the fallback consists of other operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if match := OPERATOR.fullmatch(func._schema.name):
            self.counts[match[1]] += 1
        return func(*args, **(kwargs or {}))


def synchronizations_per_round(generation: Generation, device: torch.device) -> float | None:
    """Runs a request; returns how often a round after the prefill waits for the GPU, on average; None on other devices."""
    if device.type != "cuda":
        return None
    rounds = generation.rounds()
    next(rounds)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in rounds:
                pass
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = sum(SYNCHRONIZING in str(warning.message) for warning in caught)
    return waits / max(generation.stats.rounds, 1)
