"""`sage-export --serve-check`: an export served by vLLM, beside the trained draft in our decoder, and the part at fault."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import sage
from checkpoints.export.exporter import CARD, find_source, load_trained
from checkpoints.export.formats import variants
from checkpoints.export.formats.base import ExportFormat, ImportOptions
from checkpoints.export.importer import CheckResult, check_folder
from checkpoints.export.serving import FED_INPUTS
from checkpoints.export.target import TargetFacts
from checkpoints.vllm_plugin import INSTALL_PLUGIN, RELEASES
from sage.bench.measurement import BenchPrompt
from sage.io.dtypes import dtype_name
from sage.io.files import check_writable
from sage.io.machine import available_cores
from sage.io.tables import text_table
from train.serve_check.acceptance import Answers, acceptance_table, decode_chain, render_check, verdict
from train.serve_check.vllm_process import (
    PROMPTS_FILE,
    EngineFacts,
    EngineFailed,
    EngineSetting,
    VllmProcess,
    check_engine,
    prompt_data,
    validation_prompts,
    write_prompts,
)

logger = logging.getLogger(__name__)
ENGINE = "vLLM"
PAGE_SUFFIX = "_serve_check.html"


@dataclass(frozen=True, kw_only=True)
class ServeCheck:
    source: Path  # the run or folder of the trained draft
    export: Path  # folder of its export
    python: Path  # interpreter of an environment with vLLM
    target: str | None = None  # folder or hub id of the target; None = the one the draft was trained with
    num_prompts: int = 16
    max_new_tokens: int = 64
    depth: int = 3  # drafted tokens per round
    page: Path | None = None  # file of the page; None = `EXPORT_serve_check.html` beside the export

    @property
    def page_path(self) -> Path:
        """Path of the page: `page`, or beside the export and named after it."""
        export = self.export.resolve() if self.export.name in ("", "..") else self.export
        return self.page or export.with_name(f"{export.name}{PAGE_SUFFIX}")


@dataclass(frozen=True)
class ServeResult:
    rows: dict[str, Answers]  # label, then answers, of every decoder that ran; empty if the engine was not started
    faults: list[str]  # one line per part at fault; empty: all good
    page: str = ""  # HTML; empty without rows

    def text(self) -> str:
        """Returns the table and the verdict."""
        lines = [text_table(*acceptance_table(self.rows))] if self.rows else []
        return "\n".join([*lines, *(self.faults or ["all good: draft, export and engine"])])


def serve_check(options: ServeCheck) -> ServeResult:
    """Decodes the same prompts with the trained draft, its export in our decoder, and its export in vLLM.

    Raises:
        ValueError: an option that cannot be used, an export or target that vLLM does not serve, no usable vLLM, or one that
            ended; names its log.
        CannotWrite: the page could not be written.
    """
    check_writable(options.page_path)
    source = find_source(options.source)
    trained = load_trained(source.draft)
    check_form(trained.config, options)
    facts = TargetFacts.of_folder(options.target or trained.config.target_path)
    fed_in_training = getattr(trained.config, "image_inputs", None)
    checked = check_folder(options.export, facts)
    if checked.errors:
        return ServeResult({}, [f"export bad: {error}" for error in checked.errors])
    format_ = check_served(checked, facts)
    most = format_.most_tokens(trained.config)
    if most is not None and options.depth > most:
        raise ValueError(f"--depth {options.depth}: the draft proposes at most {most} tokens per round; give at most {most}")
    engine, label = check_engine_of(format_, facts, options.python), format_.engine_label(ENGINE, facts)
    conversations = validation_prompts(prompt_data(source.run, str(facts.name)), options.num_prompts)
    try:
        exported = format_.read(options.export, facts, ImportOptions(image_inputs=fed_in_training))
    except ValueError as error:
        return ServeResult({}, [f"export bad: {error}"])
    with tempfile.TemporaryDirectory() as scratch:
        logger.info("decoding %d prompts with our decoder", len(conversations))
        drafts = (trained.to(exported.dtype), exported)
        (as_trained, as_exported), prompts, tokenizer, setting = _decode_ours(
            options, facts, conversations, drafts, Path(scratch)
        )
        gc.collect()
        torch.cuda.empty_cache()  # the engine needs the target's memory
        logger.info("decoding them with %s %s", label, engine.version)
        theirs = _decode_theirs(options, replace(setting, speculative=format_.vllm_options), Path(scratch))
    fed = FED_INPUTS[ENGINE] if facts.has_images and fed_in_training else fed_in_training
    settings = {
        "draft": source.draft,
        "export": options.export,
        "target": facts.name,
        "engine": f"{label} {engine.version}",
        "format": format_.label,
        "dtype": setting.dtype,
        "drafted tokens per round": options.depth,
        "maximum tokens": options.max_new_tokens,
    }
    shown = {name: str(value) for name, value in settings.items()}
    rows = {"trained, our decoder": as_trained, "export, our decoder": as_exported, f"export, {label}": theirs}
    has_fault = bool(facts.mrope_section) and facts.has_images and not engine.has_plugin
    faults = verdict([*rows.values()], fed, fed_in_training, has_fault)
    return ServeResult(rows, faults, render_check(rows, faults, prompts, tokenizer, shown))


def check_form(config: Any, options: ServeCheck) -> None:
    """Makes the draft of a target with an adapter one for the merged target.

    Raises:
        ValueError: that is not given, or the draft's target was quantized at load.
    """
    if method := config.target.get("quantize"):
        raise ValueError(f"RUN: {ENGINE} does not quantize its target to {method} at load; sage-validate measures the draft")
    if config.target.pop("adapter", None) and not options.target:
        merged = f"the folder that the command in {options.export / CARD} writes"
        raise ValueError(f"--target: missing; the draft's target has the adapter {config.target_adapter}; give {merged}")


def check_served(checked: CheckResult, facts: TargetFacts) -> ExportFormat:
    """Returns the format of an export; raises ValueError for a target or a format that vLLM does not serve."""
    if ENGINE not in facts.served_by:
        raise ValueError(f"--target {facts.name}: {ENGINE} serves no drafts for {facts.model_type}; decode with sage-generate")
    assert checked.format is not None, "a folder without errors has a format"
    if ENGINE not in checked.format.engines:
        names, label = ", ".join(variant.choice for variant in variants() if ENGINE in variant.engines), checked.format.label
        raise ValueError(f"--serve-check {checked.folder}: {label} is not served by {ENGINE}; export with --format {names}")
    return checked.format


def check_engine_of(format_: ExportFormat, facts: TargetFacts, python: Path) -> EngineFacts:
    """Returns the facts of `check_engine`; raises ValueError also if our plugin is needed and missing there."""
    engine = check_engine(python)
    if format_.needs_plugin(facts) and not engine.has_plugin:
        raise ValueError(
            f"--engine-python {python}: vLLM {engine.version} alone does not serve {format_.label} for {facts.model_type}; "
            f"with our plugin, vLLM {', '.join(RELEASES)} does: run `{INSTALL_PLUGIN}` in its environment"
        )
    return engine


def _decode_ours(
    options: ServeCheck, facts: TargetFacts, conversations: Sequence[Any], drafts: Sequence[Any], scratch: Path
) -> tuple[list[Answers], list[BenchPrompt], Any, EngineSetting]:
    """Returns the answers of the drafts in our decoder, prompts, tokenizer, and the setting of the engine; the target is
    released on return.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = None if device.type == "cuda" else torch.float32  # equal dtypes on both sides
    target = sage.load_target(str(facts.name), dtype=dtype, device=device)
    prompts, _ = write_prompts(target, conversations, scratch)
    answers = []
    for draft in drafts:
        draft.to(device=device, dtype=target.dtype).borrow(target)
        answers.append(decode_chain(target, draft, prompts, options.depth, options.max_new_tokens))
    longest = max(int(prompt.inputs["input_ids"].shape[1]) for prompt in prompts)
    setting = EngineSetting(
        target=str(facts.name),
        draft=options.export,
        depth=options.depth,
        dtype=dtype_name(target.dtype),
        max_model_len=longest + options.max_new_tokens + options.depth + 1,
        is_compiled=False,
    )
    return answers, prompts, target.processor.tokenizer if target.processor else None, setting


def _decode_theirs(options: ServeCheck, setting: EngineSetting, scratch: Path) -> Answers:
    """Returns the answers of the engine; ValueError if it ends before, which keeps its log."""
    handle, name = tempfile.mkstemp(prefix="sage-serve-check-", suffix=".log")
    os.close(handle)
    limits: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "cores": available_cores()}
    try:
        with VllmProcess(options.python, scratch / PROMPTS_FILE, Path(name), **limits) as process:
            process.load(setting)
            answers = process.trace()
    except EngineFailed as error:
        lines = Path(name).read_text(encoding="utf-8", errors="replace").split("\n")
        reasons = [line for line in lines if "Error" in line] or [line for line in lines if line.strip()] or ["no output"]
        ended = f"{ENGINE} ended with exit code {error.code}: {reasons[-1].strip()[:300]}"
        raise ValueError(f"--engine-python {options.python}: {ended}; its log is {name}") from error
    os.unlink(name)
    tokens, rounds, counts = ([answer.get(name, []) for answer in answers] for name in ("tokens", "rounds", "accepted"))
    return Answers(tokens, rounds, setting.depth, counts)
