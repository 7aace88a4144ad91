"""Measures a draft with the decoder on held-out prompts, traces the best and the worst ones, and writes the report."""

from __future__ import annotations

import copy
import logging
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from checkpoints.export.serving import export_choice
from checkpoints.run_folder import REPORT, REPORT_PAGE, next_check, validation_folder
from checkpoints.store import saving
from sage.bench.measurement import BenchPrompt, Interrupted, Measurement, measure
from sage.bench.report import build_report
from sage.bench.runners import HF_ASSISTED, PolicyRunner, Runner, baseline_runners, on_device
from sage.bench.summary import RunningFigures
from sage.commands.cli import PACKAGES, versions
from sage.decoding.generation import start
from sage.decoding.settings import Sampling
from sage.io.dtypes import torch_dtype
from sage.io.files import write_json
from sage.io.folders import new_folder
from sage.planning.base import OptionError, Policy
from sage.runtime.executors import passes_as
from sage.tracing.trace import decode_race, record_rounds
from sage.tracing.trace_page import Trace
from sage.trees import AUTOREGRESSIVE
from sage.trees import policy as new_policy
from train.config.schema import DecodeConfig
from train.report import web
from train.report.page import write_pages
from train.report.verdict import add_verdict, drafting_by_speed
from train.report.web import ranked_prompts
from train.validation.prompts import PromptSet

logger = logging.getLogger(__name__)
NUM_POLICIES = 2  # that are traced, the fastest ones
Traces = Mapping[str, Mapping[str, Trace]]  # by prompt, then policy
NO_TRACES: Traces = {}
Merge = Callable[..., Measurement | None]  # the signature of `DecodeShard.merge`
Progress = Callable[[int, int, str], None]  # of `Display.show_validation`


@dataclass(frozen=True, kw_only=True)
class ReportInfo:
    """Names the draft in a report, and the folder the report is written to."""

    run_dir: str | Path  # the report is written to `validation/step_########/` below it, a check to a new folder in `checks/`
    step: int | None  # optimizer steps that the draft was trained for; None: unknown, for a check only
    draft_name: str | None = None  # default: `run_dir`
    check: str | None = None  # name of the draft's folder, for a later check; None: the run's own measurement
    run: Path | None = None  # the run that trained the draft, whose records explain its verdict; None: not known

    @property
    def folder(self) -> Path:
        """The folder for the report; that of a check does not exist yet."""
        if self.check is not None:
            return next_check(Path(self.run_dir), self.check, self.step)
        return validation_folder(self.run_dir, self.step or 0)

    @property
    def partial_folder(self) -> Path:
        """The folder for the report of an interrupted measurement, which replaces no complete one."""
        return self.folder if self.check is not None else validation_folder(self.run_dir, self.step or 0, is_partial=True)


def validate(
    decode: DecodeConfig,
    target: Any,
    draft: Any,
    prompts: PromptSet,
    info: ReportInfo,
    *,
    policies: Mapping[str, Policy] | None = None,
    progress: Progress = lambda *_: None,
    merge: Merge = lambda own, **_: own,
    ends: tuple[type[BaseException], ...] = (Interrupted,),
) -> dict[str, Any] | None:
    """Measures a draft and writes `report.json`, `report.md`, `report.html` and plots to `info.folder`.

    An interrupted measurement is reported in `info.partial_folder` with a section `partial`: the prompts that were measured.
    Restores weights, training mode and random state of the caller's models.

    Args:
        decode: the measured policies and settings; `decode.dtype` unset keeps the target's dtype.
        draft: None if only `autoregressive` is measured.
        policies: of `build_policies`; they learn from the measurement. None: builds them.
        progress: called with (done, total, figures so far) at the start and after each prompt, counted once per repeat, and
            so with traced prompts; may raise one of `ends`.
        merge: merges the measurements of several processes; where it returns None, nothing is written.
        ends: exceptions that interrupt the measurement; raised if no prompt is complete.

    Returns: the content of report.json with its folder as "path"; None where another process reports.

    Raises:
        ValueError: an unknown policy, option or baseline, no prompts, or a prompt that cannot be prepared.
    """
    policies = build_policies(decode) if policies is None else policies
    runners = build_runners(decode, target, draft, policies)
    with _measuring(target, draft, decode):
        if (measured := _measure(runners, prompts, decode, progress, merge, ends)) is None:
            return None
        is_complete, draft_name = measured.planned is None, info.draft_name or str(info.run_dir)
        report = build_report(
            measured,
            target,
            draft_name,
            [str(name) for name in decode.policies],
            **({} if info.step is None else {"step": info.step}),
            options={name: dict(options) for name, options in decode.options.items() if options},
            command=this_command(),
            versions=versions((*PACKAGES, "deepspeed")),
        )
        num_traces = decode.traces if is_complete else 0
        traces = _trace_extremes(report, measured, target, draft, policies, num_traces, progress, ends)
    export = "" if info.run is None else export_choice(draft, target.model.config)
    add_verdict(report, draft_name, info.run, info.step, export, decode.num_prompts)
    folder = info.folder if is_complete else info.partial_folder
    write(report, folder, measured.prompts, traces)
    if is_complete and info.check is None:  # a complete report replaces that of an interrupted measurement
        shutil.rmtree(info.partial_folder, ignore_errors=True)
    return report | {"path": str(folder)}


def _measure(
    runners: Sequence[Runner],
    prompts: PromptSet,
    decode: DecodeConfig,
    progress: Progress,
    merge: Merge,
    ends: tuple[type[BaseException], ...],
) -> Measurement | None:
    """Measures the runners on this process's prompts and merges the result; the arguments are those of `validate`."""
    figures = RunningFigures(runners, [str(name) for name in decode.policies])

    def after_prompt(done: int, total: int) -> None:
        progress(done, total, str(figures))

    turns, sampling = prompts.turns, Sampling.from_attributes(decode)
    try:
        after_prompt(0, decode.repeats * len(turns))
        own = measure(
            runners, turns, sampling, decode.repeats, decode.warmup, after_prompt, figures.add, ends, decode.batch_size
        )
    except Interrupted:
        return merge(None, is_interrupted=True)
    return merge(own)


def write(report: Mapping[str, Any], folder: Path, prompts: Sequence[BenchPrompt] = (), traces: Traces = NO_TRACES) -> None:
    """Writes plots, pages, JSON and the pages of traces; the folder is complete, or is not there. Raises SaveFailed."""
    remedy = "measure again with sage-validate, or continue the run with run.resume=true"
    with saving(folder, then=remedy), new_folder(folder) as temporary:
        pages: dict[str, dict[str, str]] = {}
        for number, (prompt, by_policy) in enumerate(traces.items(), start=1):
            pages[prompt] = {policy: f"traces/{number:02d}_{policy}.html" for policy in by_policy}
            for policy, trace in by_policy.items():
                trace.save(temporary / pages[prompt][policy])
        if described := web.describe_prompts(prompts, pages):
            write_json(temporary / web.PROMPTS_FILE, described)
        write_pages(report, temporary)
        write_json(temporary / REPORT, report)
    logger.info("validation: %s", folder / REPORT_PAGE)


def build_runners(decode: DecodeConfig, target: Any, draft: Any, policies: Mapping[str, Policy]) -> list[Runner]:
    """Builds the runners of the policies, then those of the baselines; `autoregressive` is always among them. Raises ValueError
    for an unknown baseline, a drafting policy without a draft, or `hf_assisted` without a model.
    """
    names = [str(name) for name in decode.policies]
    if needing := [name for name in names if name != AUTOREGRESSIVE and draft is None]:
        raise ValueError(f"decode.policies: {', '.join(needing)} need a draft; give one, or measure autoregressive alone")
    runners: list[Runner] = [PolicyRunner(target, draft, name, policies[name]) for name in names]
    return runners + baseline_runners(target, map(str, decode.baselines), decode.assistant, draft, leave_out=names)


def check_assistant(decode: DecodeConfig, target: Any, draft: Any) -> None:
    """Refuses `hf_assisted` without a model, or with one of another family or vocabulary. Keeps no model, which would occupy
    memory during training.
    """
    if HF_ASSISTED in decode.baselines:
        baseline_runners(target, [HF_ASSISTED], decode.assistant, draft, leave_out=[AUTOREGRESSIVE])


def build_policies(decode: DecodeConfig) -> dict[str, Policy]:
    """Builds every policy that is measured or has options; takes no time, so that mistakes are found before anything is loaded.
    Raises ValueError for an unknown policy or option, or a value that is not allowed; names the key.
    """
    names = dict.fromkeys([*map(str, decode.policies), *decode.options])
    try:
        return {name: new_policy(name, **decode.options.get(name, {})) for name in names}
    except OptionError as error:
        raise ValueError(error.under("decode.options")) from error


def this_command() -> str:
    """Returns this process's command line as it can be typed in a shell."""
    program, root = Path(sys.argv[0]), Path(__file__).parents[2]
    name = program.name
    if program.suffix == ".py":
        is_module = program.is_relative_to(root)
        module = ".".join(program.relative_to(root).with_suffix("").parts).removesuffix(".__main__") if is_module else ""
        name = f"python -m {module}" if is_module else f"python {shlex.quote(str(program))}"
    return " ".join([name, *map(shlex.quote, sys.argv[1:])])


@contextmanager
def _measuring(target: Any, draft: Any, decode: DecodeConfig) -> Iterator[None]:
    """Evaluation mode, `decode.dtype` and `decode.passes` inside the block; restores the state before, and the random state."""
    dtype = torch_dtype(decode.dtype) if decode.dtype is not None else target.dtype
    num_answers = decode.num_prompts * decode.repeats * len(decode.policies)
    with ExitStack() as stack:
        stack.enter_context(passes_as(decode.passes, target, num_answers))
        stack.enter_context(torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []))
        stack.enter_context(_cast(target.model, dtype))
        if draft is not None:
            stack.callback(draft.network.train, draft.network.training)
            draft.network.eval()
            stack.enter_context(_cast(draft.network, dtype))
        yield


@contextmanager
def _cast(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Casts all floating-point weights to `dtype` inside the block and restores the original tensors afterwards.

    Only `.data` is exchanged, so an optimizer or engine that holds the parameters, or views of a flat buffer, is unaffected.
    """
    weights = [(weight, weight.data) for weight in module.parameters() if weight.is_floating_point()]
    for weight, data in weights:
        weight.data = data.to(dtype)
    try:
        yield
    finally:
        for weight, data in weights:
            weight.data = data


def _trace_extremes(
    report: Mapping[str, Any],
    measured: Measurement,
    target: Any,
    draft: Any,
    policies: Mapping[str, Policy],
    count: int,
    progress: Progress,
    ends: tuple[type[BaseException], ...],
) -> Traces:
    """Returns the traces of the `count` best and worst prompts by tokens per target pass, for the fastest policies, until one
    of `ends` is raised. Copies of the policies decode, which know what the measured ones have learned; no figure changes.
    """
    ranked, by_name = ranked_prompts(report), {prompt.name: prompt for prompt in measured.prompts}
    chosen = list(dict.fromkeys([*ranked[:count], *ranked[max(len(ranked) - count, 0) :]])) if count else []
    copies = {name: copy.deepcopy(policies[name]) for name in drafting_by_speed(report)[:NUM_POLICIES]}
    traces: dict[str, dict[str, Trace]] = {}
    try:
        for done, name in enumerate(chosen):
            progress(done, len(chosen), "traced")
            prompt, settings = by_name[name], {"draft": str(report["draft"]), "prompt": name}
            inputs, sampling = on_device(prompt.inputs, target.device), prompt.seeded(measured.sampling)
            race = decode_race(target, inputs, sampling)
            for policy, traced in copies.items():
                recorder = record_rounds(start(target, draft, inputs, traced, sampling=sampling))
                traces.setdefault(name, {})[policy] = recorder.trace(settings, prompt.messages or None, race)
        if chosen:
            progress(len(chosen), len(chosen), "traced")
    except ends:
        logger.warning("interrupted after %d traces; the figures of the report are complete", sum(map(len, traces.values())))
    return traces
