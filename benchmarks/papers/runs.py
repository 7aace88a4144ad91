"""What `make results` trains and measures, and the training runs.

Typed settings: the values are in full.yaml, shortened by quick.yaml. Runs: `sage-train` in a separate process, once per command
line.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, cast

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from benchmarks.papers.figures import Json, digest
from checkpoints.run_folder import METRICS, read_metrics
from sage.io.files import write_text
from sage.io.manifest import sha256

FULL, QUICK = "full", "quick"
logger = logging.getLogger(__name__)
MARKER = "trained"  # written into a run folder when training is complete: the digest of the run
DRAFT = "draft"
LOG_TAIL_LINES = 12


@dataclass(kw_only=True)
class RunSettings:
    """One training run: the short name of its target, and its arguments of sage-train; `extra` follows `overrides`.

    `is_alone`: the arguments are complete; those common to the other runs are left out.
    """

    target: str = MISSING
    is_alone: bool = False
    overrides: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class MatchedHead:
    """A draft of the study `drafts`: its arguments of sage-train, and the optimizer steps of its runs by budget."""

    overrides: list[str] = MISSING
    steps: dict[str, int] = MISSING


@dataclass(kw_only=True)
class DerivedBudget:
    """A budget of the study `drafts` with the steps of another one, `steps`, and further arguments of sage-train."""

    steps: str = MISSING
    overrides: list[str] = MISSING


@dataclass(kw_only=True)
class TrainingSettings:
    """`common` arguments precede those of each run, `last` follow them.

    `matched`: the drafts of the study `drafts`, by name. Every part of the study without `runs` of its own has a run of each of
    them, or of those that it names, with `matched_common` arguments and those of its budget; equal runs are shared.
    """

    common: list[str] = MISSING
    last: list[str] = field(default_factory=list)
    runs: dict[str, RunSettings] = MISSING
    matched_common: list[str] = MISSING
    budgets: dict[str, DerivedBudget] = field(default_factory=dict)
    matched: dict[str, MatchedHead] = MISSING


@dataclass(kw_only=True)
class Settings:
    """All settings: what the studies share, and under `sizes` all other keys of full.yaml."""

    threads: int = MISSING
    runs_dir: str = MISSING
    docs_dir: str = MISSING
    targets: dict[str, str] = MISSING  # model folder or id by short name
    families: list[str] = MISSING
    max_new_tokens: int = MISSING
    passes: str = MISSING  # of our decoder, argument of `sage.load_target`
    training: TrainingSettings = field(default_factory=TrainingSettings)
    main_runs: dict[str, str] = MISSING  # by target, the run whose draft it is measured with
    assistant_runs: dict[str, str] = MISSING  # by target, the run of a smaller model of the same family
    sizes: dict[str, Any] = field(default_factory=dict)  # of each study, of `tuning` and of `costs`, by name


def load_settings(*names_or_paths: str | Path) -> Settings:
    """Returns full.yaml merged with each named file (`quick`, or a path).

    Raises:
        ValueError: an unknown key, or a value of the wrong type.
    """
    here = Path(__file__).parent
    files = [here / f"{one}.yaml" if one in (FULL, QUICK) else Path(one) for one in (FULL, *names_or_paths)]
    try:
        full, *changes = (cast(DictConfig, OmegaConf.load(file)) for file in files)
        merged = cast(DictConfig, OmegaConf.merge(full, *changes))
        known = {str(key): full[key] for key in full if key not in Settings.__annotations__}
        sizes = {name: merged.pop(name) for name in known}
        settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Settings), merged, {"sizes": sizes}))
    except (OmegaConfBaseException, YAMLError) as error:
        raise ValueError(f"{files[-1]}: {str(error).splitlines()[0]}") from error
    assert isinstance(settings, Settings)
    for name, part in settings.sizes.items():
        _check_sizes(f"{files[-1]}: {name}", part, cast(Json, OmegaConf.to_container(known[name])))
    settings.training.runs |= matched_runs(settings)
    return settings


def matched_runs(settings: Settings) -> dict[str, RunSettings]:
    """Returns the runs that the parts of the study `drafts` compare, by name, except those that a part names itself."""
    training, found = settings.training, {}
    for part in settings.sizes["drafts"]["parts"]:
        if "runs" in part:
            continue
        target, budget = Path(settings.targets[part["target"]]).name, training.budgets.get(part["budget"])
        fixed = [f"target={target}", f"seed={part['seed']}", "train.epochs=null", *training.matched_common]
        for head in matched_heads(settings, part):
            own = [*training.matched[head].overrides, *(budget.overrides if budget else ())]
            own.append(f"train.max_steps={_matched_steps(settings, head, part)}")
            found[matched_run(settings, head, part)] = RunSettings(target=part["target"], overrides=[*fixed, *own])
    return found


def matched_heads(settings: Settings, part: Json) -> list[str]:
    """Returns the drafts that a part of the study `drafts` compares, unless it names its runs."""
    return list(part.get("drafts") or settings.training.matched)


def matched_run(settings: Settings, head: str, part: Json) -> str:
    """Returns the name of a draft's run in a part of the study `drafts`."""
    kind = f"_{part['budget']}" if part["budget"] in settings.training.budgets else ""
    return f"{head}_{part['target']}_{_matched_steps(settings, head, part)}{kind}_{part['seed']}"


def _matched_steps(settings: Settings, head: str, part: Json) -> int:
    """Returns the optimizer steps of a draft's run in a part of the study `drafts`."""
    budget = settings.training.budgets.get(part["budget"])
    return settings.training.matched[head].steps[budget.steps if budget else part["budget"]]


def _check_sizes(where: str, sizes: Json, known: Json) -> None:
    for key, value in sizes.items():
        if key not in known:
            raise ValueError(f"{where}.{key}: unknown; choose from {', '.join(known)}")
        if type(value) is not type(known[key]):
            raise ValueError(f"{where}.{key}: {value!r} is not of type {type(known[key]).__name__}")


class TrainingFailed(RuntimeError):
    """sage-train exited with an error; the message holds the last lines of its log."""


def overrides(settings: Settings, name: str) -> list[str]:
    """Returns the arguments of sage-train for a run, without the folder; raises ValueError for a run without settings."""
    known = settings.training.runs
    if name not in known:
        raise ValueError(f"training.runs: {name!r} is not one of {', '.join(known)}")
    common = [] if known[name].is_alone else settings.training.common
    return [*common, *known[name].overrides, *known[name].extra, *settings.training.last]


def run_digest(settings: Settings, name: str) -> str:
    """Returns a hash of the run's overrides and of the target's weights."""
    target = settings.training.runs[name].target
    return digest([overrides(settings, name), weights_digest(settings.targets[target])])


@cache
def weights_digest(path: str) -> str:
    """Returns a hash of a target's weights; a hub id is returned as it is."""
    files = sorted(Path(path).glob("*.safetensors"))
    return digest([sha256(file) for file in files]) if files else path


def run_folder(settings: Settings, name: str) -> Path:
    """Returns the folder of a run."""
    return Path(settings.runs_dir) / name


def command_line(settings: Settings, name: str) -> str:
    """Returns the run as a shell command."""
    words = [word if " " not in word else f"'{word}'" for word in overrides(settings, name)]
    return " ".join(["sage-train", *words, f"run.dir={run_folder(settings, name)}"])


def training_of(settings: Settings, name: str) -> Json:
    """Returns how a run is trained: its command, steps and tokens, and the seconds of all steps at the median time of a step,
    which interruptions of the run do not change; trains it if it is missing.
    """
    metrics = read_metrics(ensure_trained(settings, name) / METRICS)
    paces = [
        (after["time_s"] - before["time_s"]) / (after["step"] - before["step"])
        for before, after in pairwise(metrics)
        if after["step"] > before["step"]
    ]
    step, tokens, time_s = (metrics[-1][key] for key in ("step", "tokens", "time_s"))
    training_s = step * median(paces) if paces else time_s
    return {"command": command_line(settings, name), "step": step, "tokens": tokens, "training_s": training_s}


def is_trained(settings: Settings, name: str) -> bool:
    """Whether the run folder exists, is complete and has the same digest."""
    marker = run_folder(settings, name) / MARKER
    return marker.is_file() and marker.read_text(encoding="utf-8") == run_digest(settings, name)


def ensure_trained(settings: Settings, name: str) -> Path:
    """Returns the run folder; trains the run if it is missing, incomplete or of other overrides.

    Raises:
        TrainingFailed: sage-train exited with an error.
    """
    folder = run_folder(settings, name)
    if is_trained(settings, name):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_name(f"{folder.name}.log")
    logger.info("training %s (log: %s)", name, log)
    start = time.perf_counter()
    # On the CPU, also where there is a GPU: two ranks need two GPUs, and all figures of the page are those of a CPU. One thread
    # per rank, as in `experiment=demo`: two small ranks use two cores better than two threads of one rank.
    command = [sys.executable, "-m", "train.cli.train", "launch.device=cpu", *overrides(settings, name), f"run.dir={folder}"]
    with log.open("w", encoding="utf-8") as out:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment, check=False)
    if done.returncode:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_TAIL_LINES:])
        raise TrainingFailed(f"sage-train ended with exit code {done.returncode}, see {log}:\n{tail}")
    logger.info("trained %s in %.0f s", name, time.perf_counter() - start)
    write_text(folder / MARKER, run_digest(settings, name))
    return folder
