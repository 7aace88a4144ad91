"""The run folder: names of its files, and what can be read from them.

    config.yaml              the resolved configuration; makes the folder a run
    config_2_from_step_########.yaml   the configuration after a resume that changed it, and so on
    provenance.json          git revision, versions, command line, data fingerprint
    metrics.jsonl            one JSON object per log step
    state/step_########/     checkpoints to resume from (checkpoints.store)
    draft/, draft_best/      the latest draft, and the one with the highest validation score
    validation/step_########/report.json   measured by the run itself
    validation/step_########_partial/      of a validation that was interrupted; no reader counts it as a validation
    checks/DRAFT_step_########/report.json  measured later by sage-validate; never replaces another measurement
    .lock                    locked by the process that trains

The draft that a user names is found by sage.drafts.location.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from sage.drafts import location
from sage.io.files import read_json
from sage.io.manifest import has_manifest, read_manifest
from sage.trees import AUTOREGRESSIVE, SAGE

CONFIG, DRAFT, BEST_DRAFT = location.RUN_CONFIG, location.DRAFT, location.BEST_DRAFT
PROVENANCE, METRICS, LOCK = "provenance.json", "metrics.jsonl", ".lock"
STATE, VALIDATION, CHECKS = "state", "validation", "checks"
REPORT, REPORT_PAGE, REPORT_HTML = "report.json", "report.md", "report.html"
STEP_NAME = re.compile(r"step_(\d{8})")
CONFIGS = "config*.yaml"  # all configurations
CHANGED_CONFIG = re.compile(r"config_(\d+)_from_step_(\d{8})\.yaml")
RECIPE = ("optim.", "objective.")  # prefixes of the settings that may change during a run and alter what is trained
DEFAULT_METRIC = "tokens_per_target_pass"
WAIT_S = 100  # NFS keeps the locks of a node that has crashed for about 90 s, while its job may start again elsewhere

Report = dict[str, Any]
logger = logging.getLogger(__name__)


# -- the lock ----------------------------------------------------------------------------------------------------------


@contextmanager
def locked_run(folder: Path) -> Iterator[None]:
    """Keeps other processes from training in the folder, which is created if needed; the lock ends with this process.

    Only logs if the folder cannot be locked: it is not writable, or its file system has no locks.

    Raises:
        ValueError: another process holds the lock, for `WAIT_S` more.
    """
    lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(Timeout):
            lock.acquire(timeout=0)
        if not lock.is_locked:
            logger.warning(waiting_line(folder))
            lock.acquire(timeout=WAIT_S, poll_interval=1)
    except Timeout as error:
        raise ValueError(f"run.dir={folder}: another process is training there; wait until it ends, or stop it") from error
    except (OSError, NotImplementedError) as error:
        logger.info("run.dir=%s: cannot be locked (%s)", folder, error)
    try:
        yield
    finally:
        lock.release()


def is_locked(folder: Path) -> bool:
    """Whether another process trains in the folder; False where that cannot be found out. Creates nothing."""
    if not (folder / LOCK).exists():
        return False
    try:
        with FileLock(folder / LOCK).acquire(timeout=0):
            return False
    except Timeout:
        return True
    except (OSError, NotImplementedError):
        return False


def waiting_line(folder: Path) -> str:
    """Returns what a process says that finds the folder locked."""
    return (
        f"run.dir={folder}: another process is training there and holds {folder / LOCK}; waiting up to {WAIT_S} s for its end, "
        "because a file server may keep the lock of a process that has crashed"
    )


# -- names -------------------------------------------------------------------------------------------------------------


def is_run(folder: Path) -> bool:
    """Returns whether the folder holds a run."""
    return (folder / CONFIG).is_file()


def run_of(draft: Path) -> Path | None:
    """Returns the run folder that contains the folder of a draft, if any."""
    return draft.parent if is_run(draft.parent) else None


def state_folder(run: str | Path) -> Path:
    """Returns the folder of a run's checkpoints."""
    return Path(run) / STATE


def validation_folder(run: str | Path, step: int, is_partial: bool = False) -> Path:
    """Returns the folder of the validation at `step`, or of one that was interrupted."""
    return Path(run) / VALIDATION / f"{step_name(step)}{'_partial' if is_partial else ''}"


def next_check(home: Path, draft: str, step: int | None) -> Path:
    """Returns a new folder for a later measurement: `checks/draft_best_step_00000100`, then `..._2`, and so on.

    `home` is a run, or a folder for the checks of drafts without a run; `draft` is named after its folder.
    """
    first = home / CHECKS / (draft if step is None else f"{draft}_{step_name(step)}")
    candidates = (first.with_name(f"{first.name}_{number}") if number > 1 else first for number in itertools.count(1))
    return next(folder for folder in candidates if not folder.exists())


def is_check(folder: Path) -> bool:
    """Returns whether the folder holds a later measurement, below a run or a draft."""
    return folder.absolute().parent.name == CHECKS and (folder / REPORT).is_file()


def list_checks(home: Path) -> list[Path]:
    """Returns the folders of the later measurements of a run or draft, sorted by name."""
    return sorted(folder for folder in (home / CHECKS).glob("*") if is_check(folder))


def step_name(step: int) -> str:
    """Returns `step_00000100` for 100."""
    return f"step_{step:08d}"


def list_steps(folder: Path) -> list[int]:
    """Returns the steps of the `step_########` entries of a folder in ascending order; none if there is no folder."""
    names = (STEP_NAME.fullmatch(path.name) for path in (folder.iterdir() if folder.is_dir() else ()))
    return sorted(int(match.group(1)) for match in names if match)


# -- readers -----------------------------------------------------------------------------------------------------------


def config_files(run: Path, step: int | None = None) -> list[tuple[int, Path]]:
    """Returns the configurations of a run as (first step, path): config.yaml, then those of resumes that changed it.

    With `step`, only those in effect before this many steps were trained.
    """
    names = (CHANGED_CONFIG.fullmatch(path.name) for path in (run.iterdir() if run.is_dir() else ()))
    changed = sorted((int(match.group(1)), int(match.group(2)), match.group(0)) for match in names if match)
    return [(0, run / CONFIG), *((first, run / name) for _, first, name in changed if step is None or first < step)]


def next_config(run: Path, step: int) -> Path:
    """Returns the path for the configuration that takes effect at `step`; an earlier configuration is never overwritten."""
    return run / f"config_{len(config_files(run)) + 1}_from_step_{step:08d}.yaml" if is_run(run) else run / CONFIG


def read_run_config(run: Path, step: int | None = None) -> dict[str, Any]:
    """Reads the configuration last used (up to `step`), as nested plain values; ValueError if it cannot be read."""
    return _read_config(config_files(run, step)[-1][1])


def recipe_changes(run: Path, step: int | None = None) -> list[str]:
    """Returns one line per change of the training recipe (up to `step`): `from step 200: optim.lr 0.008 -> 0.001`."""
    files = config_files(run, step)
    recipes = [{k: v for k, v in dotted_keys(_read_config(path)).items() if k.startswith(RECIPE)} for _, path in files]
    lines = []
    for (first, _), before, after in zip(files[1:], recipes, recipes[1:], strict=False):
        keys = [key for key in sorted(before | after) if before.get(key) != after.get(key)]
        changed = ", ".join(f"{key} {before.get(key)} -> {after.get(key)}" for key in keys)
        lines += [f"from step {first:,}: {changed}"] if changed else []
    return lines


def dotted_keys(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens nested mappings: {"a": {"b": 1}} -> {"a.b": 1}."""
    if not isinstance(tree, dict) or not tree:
        return {prefix.rstrip("."): tree}
    return {key: value for name, part in tree.items() for key, value in dotted_keys(part, f"{prefix}{name}.").items()}


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({' '.join(str(error).split())}); give a complete run folder") from error
    return content if isinstance(content, dict) else {}


def read_reports(run: Path) -> list[tuple[int, Report]]:
    """Reads the validation reports of a run as (step, report.json), in ascending order of steps."""
    paths = {step: validation_folder(run, step) / REPORT for step in list_steps(run / VALIDATION)}
    return [(step, read_report(path)) for step, path in paths.items() if path.is_file()]


def read_report(path: Path) -> Report:
    """Reads one report.json. Raises ValueError if it is missing or cannot be parsed."""
    try:
        report = read_json(path)
    except ValueError as error:
        raise ValueError(f"{error}; validate that run again") from error
    if "policies" not in report:
        raise ValueError(f"{path}: has no policies; give a report.json of sage-validate or sage.bench")
    return report


def draft_step(draft: Path) -> int | None:
    """Returns the optimizer steps a draft was trained for, from its manifest.json; None without a manifest."""
    return int(read_manifest(draft)["step"]) if has_manifest(draft) else None


def draft_report(draft: Path) -> Report | None:
    """Returns the report of a run's draft: the run's own, at the step the draft was saved at, never a later check."""
    run, step = run_of(draft), draft_step(draft)
    report = dict(read_reports(run)).get(step) if run is not None and step is not None else None
    return None if report is None else {"step": step, **report}


def read_command(run: Path) -> list[str]:
    """Reads `sys.argv` of the command that started a run; empty if nothing is recorded."""
    path = run / PROVENANCE
    return list(read_json(path).get("command", ())) if path.exists() else []


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads the lines of a metrics.jsonl; none if there is no file. A last line truncated by a crash is dropped."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


# -- the validation score ----------------------------------------------------------------------------------------------


def score_policy(policies: Iterable[str], policy: str | None = None) -> str | None:
    """Returns the policy that is scored: `policy` if measured, else `sage`, else the first that drafts; None if none does."""
    drafting = [str(name) for name in policies if name != AUTOREGRESSIVE]
    return next((str(name) for name in (policy, SAGE, *drafting) if name is not None and str(name) in drafting), None)


def score(report: Mapping[str, Any], metric: str = DEFAULT_METRIC, policy: str | None = None) -> float | None:
    """Returns the score of a validation report (higher is better), see `score_policy`; None if no drafting policy was measured.

    The draft with the highest score is kept as `draft_best/`; early stopping and sweeps use it as well.
    """
    name = score_policy(report["policies"], policy)
    return None if name is None else float(report["policies"][name][str(metric)])
