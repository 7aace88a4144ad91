"""Builds the decoders of a comparison with vLLM and runs them: ours in this process, each setting of vLLM in its own."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import sage
from benchmarks.engines.comparison import Decoder, OurDecoder, VllmDecoder, figures, take_turns
from benchmarks.engines.prompts import pocket_prompts
from checkpoints.engines.prompts import write_prompts
from checkpoints.engines.vllm_process import EngineSetting, VllmProcess
from checkpoints.export import ExportOptions, Format, export
from sage.bench.measurement import BenchPrompt
from sage.bench.options import Variant
from sage.bench.runners import AUTOREGRESSIVE, PolicyRunner, baseline_runner
from sage.sampling import Sampling
from sage.targets import Target

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Comparison:
    """What is compared.

    Attributes:
        python: interpreter of the environment with vLLM.
        target: folder of the target, a Qwen2.5-VL.
        drafts: folders by label; the first one, an `eagle3`, is exported in fp32 and served by vLLM too.
        variants: our policies, each with every draft.
        baselines: decoders without a draft beside our autoregressive loop, of `sage.bench.runners.BASELINES`.
        depths: values of vLLM's `num_speculative_tokens`.
        passes: argument of `sage.load_target`; None leaves it out.
        cores: that both sides are pinned to, with one thread each.
        log_folder: receives vLLM's logs.
    """

    python: Path
    target: str
    drafts: dict[str, Path]
    variants: Sequence[Variant]
    baselines: Sequence[str] = ()
    depths: Sequence[int] = (1, 2, 3, 4, 5)
    num_prompts: int = 32
    repeats: int = 5
    max_new_tokens: int = 128
    passes: str | None = None
    cores: Sequence[int] = field(default_factory=lambda: sorted(os.sched_getaffinity(0)))
    log_folder: Path | None = None

    @property
    def served_draft(self) -> str:
        """Label of the draft that both sides have."""
        return next(iter(self.drafts))


def measure(comparison: Comparison) -> dict[str, Any]:
    """Runs the comparison; returns the figures of every decoder, ratios, versions and settings."""
    affinity, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, comparison.cores)
    torch.set_num_threads(len(comparison.cores))
    try:
        with tempfile.TemporaryDirectory() as scratch, ExitStack() as processes:
            return _measure(comparison, Path(scratch), processes)
    finally:
        os.sched_setaffinity(0, affinity)
        torch.set_num_threads(threads)


def _measure(comparison: Comparison, scratch: Path, processes: ExitStack) -> dict[str, Any]:
    target = load_target(comparison)
    prompts, prompts_file = write_prompts(target, pocket_prompts(comparison.num_prompts), scratch)
    export_folder = scratch / Format.eagle3
    options = ExportOptions(target=comparison.target, dtype=torch.float32)
    export(comparison.drafts[comparison.served_draft], export_folder, Format.eagle3, options)
    ours = list(our_decoders(comparison, target, prompts))
    theirs, versions = [], {}
    for label, setting in engine_settings(comparison, export_folder).items():
        logger.info("loading %s", label)
        log = (comparison.log_folder or scratch) / f"{label.replace(' ', '_')}.log"
        process = VllmProcess(
            comparison.python, prompts_file, log, max_new_tokens=comparison.max_new_tokens, cores=comparison.cores
        )
        engine = processes.enter_context(process)
        versions = engine.load(setting)
        passes = [len(answer["rounds"]) for answer in engine.trace()]
        theirs.append(VllmDecoder(label, engine, passes, comparison.served_draft if setting.draft else ""))
    return {
        "engine": versions,
        "prompts": len(prompts),
        "repeats": comparison.repeats,
        "threads": len(comparison.cores),
        "passes": comparison.passes,
        **figures(take_turns([*ours, *theirs], comparison.repeats), comparison.served_draft),
    }


def load_target(comparison: Comparison) -> Target:
    """Returns the target in fp32, with its passes as asked for."""
    passes = {} if comparison.passes is None else {"passes": comparison.passes}
    return sage.load_target(comparison.target, dtype=torch.float32, **passes)


def our_decoders(comparison: Comparison, target: Target, prompts: Sequence[BenchPrompt]) -> Iterator[Decoder]:
    """Yields our autoregressive loop, the baselines, and every policy with every draft."""
    sampling = Sampling(max_new_tokens=comparison.max_new_tokens)
    for name in dict.fromkeys((AUTOREGRESSIVE, *comparison.baselines)):
        yield OurDecoder(name, baseline_runner(target, name), prompts, sampling)
    for draft_label, folder in comparison.drafts.items():
        draft = sage.load_draft(folder, target)
        for one in comparison.variants:
            runner = PolicyRunner(target, draft, one.label, sage.policy(one.policy, **one.options))
            yield OurDecoder(f"{one.label}, {draft_label}", runner, prompts, sampling, draft_label)


def engine_settings(comparison: Comparison, draft: Path) -> dict[str, EngineSetting]:
    """Returns the engines by label."""
    plain = EngineSetting(target=comparison.target)
    speculative = {f"vllm {depth} tokens": replace(plain, draft=draft, depth=depth) for depth in comparison.depths}
    return {"vllm": plain, "vllm enforce_eager": replace(plain, is_compiled=False), **speculative}
