"""The hand-over to the judge: measures a draft with the decoder on held-out prompts and writes the report.

Owns: the step from a configuration to a measurement, and the folder `validation/step_########/`. Does not own: measuring
(sage.bench), drawing (train.report), when a run validates (train.run.loop).
"""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from checkpoints.run_folder import REPORT, REPORT_PAGE, validation_folder
from checkpoints.store import saving
from data_prep.multi_turn import asked_in_turn
from sage.bench import (
    AUTOREGRESSIVE,
    BenchPrompt,
    PolicyRunner,
    Runner,
    baseline_runner,
    build_report,
    measure,
    write_json,
    write_text,
)
from sage.bench.calibration import calibration
from sage.bench.measurement import Measurement
from sage.bench.replays import all_policies, replays
from sage.bench.report import PACKAGES, versions
from sage.bench.runners import HF_ASSISTED, find_assistant
from sage.generation import generate
from sage.sampling import Sampling
from sage.trees import Policy
from sage.trees import policy as new_policy
from train.config.schema import DecodeConfig, Precision
from train.report.page import render_page
from train.report.plots import write_plots
from train.report.warnings import is_hardly_accepted

logger = logging.getLogger(__name__)

DTYPES = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16}


class HasDecode(Protocol):
    """Any configuration with a `decode` group: that of a training run or of sage-validate."""

    decode: DecodeConfig


def validate(
    config: HasDecode,
    target: Any,
    draft: Any,
    step: int,
    run_dir: str | Path,
    prompts: Sequence[Any],
    *,
    draft_name: str | None = None,
    command: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    merge: Callable[[Measurement], Measurement | None] = lambda own: own,
) -> dict[str, Any] | None:
    """Measures the draft and writes `report.json`, `report.md` and plots below `run_dir`.

    The weights, the training mode and the random state of the caller's models are as before afterwards.

    Args:
        config: its `decode` group says what is measured; `decode.dtype` unset keeps the target's dtype.
        target: a `sage.Target`, whole on one device.
        draft: the draft in training or just loaded; None if only `autoregressive` is measured.
        step: optimizer steps the draft was trained for; names the folder.
        prompts: held-out conversations (anything with `messages`), lists of chat messages, or model inputs of batch 1.
            Later turns of a conversation are prompts of their own, asked after the target's answers.
        draft_name: how the report calls the draft; default the run folder.
        command: the command line that repeats this; default this process's own.
        progress: called with (done, total), counting prompts once per repeat.
        merge: makes one measurement of those of several processes; where it answers None, nothing is written.

    Returns:
        the content of report.json, and the folder it lies in under "path"; None where another process reports.

    Raises:
        ValueError: an unknown policy, option or baseline, no prompts, or a prompt that cannot be prepared.
    """
    decode = config.decode
    folder = validation_folder(run_dir, step)
    runners, sampling = build_runners(decode, target, draft), Sampling.from_attributes(decode)
    with _measuring(target, draft, decode):
        asked = islice(asked_in_turn(prompts, partial(_answer, target, sampling)), decode.num_prompts)
        bench = [bench_prompt(target, prompt, index) for index, prompt in enumerate(asked)]
        measured = merge(measure(runners, bench, sampling, decode.repeats, decode.warmup, progress))
        if measured is None:
            return None
        report = build_report(
            measured,
            target,
            draft_name or str(run_dir),
            [str(name) for name in decode.policies],
            step=step,
            options={name: dict(options) for name, options in decode.options.items() if options},
            calibration=calibration(runners, measured),
            replay=replays(target, draft, measured.prompts, sampling, all_policies(decode.options)) if decode.replay else {},
            command=command or this_command(),
        )
    report["versions"] = versions((*PACKAGES, "deepspeed"))
    write(report, folder)
    if doubt := is_hardly_accepted(report):
        logger.warning("%s", doubt)
    return report | {"path": str(folder)}


def write(report: Mapping[str, Any], folder: Path) -> None:
    """Writes plots, page and, last, the JSON: a folder with a report.json is whole.

    Raises:
        SaveFailed: the folder cannot be written.
    """
    with saving(folder, then="measure again (sage-validate), or go on with the run (run.resume=true)"):
        folder.mkdir(parents=True, exist_ok=True)
        plots = write_plots(report, folder)
        write_text(folder / REPORT_PAGE, render_page(report, plots))
        write_json(report, folder / REPORT)
    logger.info("validation: %s", folder / REPORT_PAGE)


def build_runners(decode: DecodeConfig, target: Any, draft: Any) -> list[Runner]:
    """The policies with their options, then the baselines; our own autoregressive loop always takes part.

    Raises:
        ValueError: an unknown policy, option or baseline, a drafting policy without a draft, or `hf_assisted` without a model.
    """
    names = [str(name) for name in decode.policies]
    policies = build_policies(decode)
    if needing := [name for name in names if name != AUTOREGRESSIVE and draft is None]:
        raise ValueError(f"decode.policies: {', '.join(needing)} need a draft; give one, or measure autoregressive alone")
    runners: list[Runner] = [PolicyRunner(target, draft, name, policies[name]) for name in names]
    others = dict.fromkeys([AUTOREGRESSIVE, *(str(name) for name in decode.baselines)])
    assistant = find_assistant(target, decode.assistant, draft) if HF_ASSISTED in others else None
    return runners + [baseline_runner(target, name, assistant) for name in others if name not in names]


def build_policies(decode: DecodeConfig) -> dict[str, Policy]:
    """Every policy that is measured or has options, with these; takes no time, so a mistake shows before anything is loaded.

    Raises:
        ValueError: an unknown policy, or an option that it does not take; names the key.
    """
    names = dict.fromkeys([*map(str, decode.policies), *decode.options])
    return {name: _policy(name, decode.options.get(name, {})) for name in names}


def _policy(name: str, options: dict[str, Any]) -> Policy:
    try:
        return new_policy(name, **options)
    except ValueError as error:
        raise ValueError(f"decode.options.{name}: {error}" if options else str(error)) from error


def _answer(target: Any, sampling: Sampling, messages: list[dict[str, Any]]) -> str:
    """What the target itself says, for the next turn of a prompt that has one."""
    inputs = target.prepare(messages)
    return generate(target, None, inputs, policy=AUTOREGRESSIVE, sampling=sampling).text


def bench_prompt(target: Any, prompt: Any, index: int) -> BenchPrompt:
    """A conversation, a list of messages or ready model inputs as a prompt of the bench; the answer is left out.

    Raises:
        ValueError: names the prompt that cannot be prepared.
    """
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        return BenchPrompt(name=f"prompt-{index}", inputs=prompt)
    messages = list(getattr(prompt, "messages", prompt))
    name, family = str(getattr(prompt, "id", f"prompt-{index}")), str(getattr(prompt, "family", ""))
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    try:
        return BenchPrompt(name=name, family=family, inputs=target.prepare(messages))
    except ValueError as error:
        raise ValueError(f"validation prompt {name}: {error}") from error


def this_command() -> str:
    """This process's command line as a person would type it."""
    program = Path(sys.argv[0])
    name = f"python -m train.{program.stem}" if program.suffix == ".py" else program.name
    return " ".join([name, *(shlex.quote(argument) for argument in sys.argv[1:])])


@contextmanager
def _measuring(target: Any, draft: Any, decode: DecodeConfig) -> Iterator[None]:
    """Evaluation mode, one dtype for both models, and the caller's random state untouched."""
    dtype = DTYPES[decode.dtype] if decode.dtype is not None else target.dtype
    devices = [target.device] if target.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), _cast(target.model, dtype):
        if draft is None:
            yield
            return
        module = draft if isinstance(draft, nn.Module) else draft.model.model  # a smaller target in the role of a draft
        was_training = module.training
        module.eval()
        try:
            with _cast(module, dtype):
                yield
        finally:
            module.train(was_training)


@contextmanager
def _cast(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within the block all floating-point weights have `dtype`; the very same tensors are put back afterwards.

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
