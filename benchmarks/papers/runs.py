"""Settings of the studies, and the training runs: `sage-train` in a separate process, once per command line."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks.text_target import build
from checkpoints.run_folder import METRICS, read_metrics
from sage.io.files import json_digest, write_text
from sage.io.manifest import sha256
from sage.io.target_paths import find_target
from train.serve_check.vllm_process import tail_of

Json = dict[str, Any]
logger = logging.getLogger(__name__)
SETTINGS = Path(__file__).with_name("settings.yaml")
MARKER = "trained"  # written into a run folder when training is complete: the digest of the run
DRAFT = "draft"
RANDOM = "random_llama"  # of `targets`: drawn by `benchmarks.text_target`


@dataclass(kw_only=True)
class Settings:
    runs_dir: str
    docs_dir: str
    defaults: Json  # of every measurement
    targets: dict[str, str]  # model folders by short name
    common: str  # arguments of every training run on a pocket target, before its own
    runs: dict[str, str]  # arguments of sage-train by name; the first word is the short name of the target
    studies: dict[str, dict[str, Json]]  # measurements of each study by name
    on_request: list[str]  # studies that `make results` leaves out, because they train drafts for long or need vLLM

    def target_of(self, run: str) -> str:
        return self.runs[run].split()[0]

    def arguments(self, run: str) -> list[str]:
        """Returns the arguments of sage-train for a run, without its folder."""
        _, own = self.runs[run].split(maxsplit=1)
        common = "" if "experiment=" in own else self.common  # an experiment brings its own data
        return shlex.split(f"{common} {own}")

    def run_digest(self, run: str) -> str:
        return digest([self.arguments(run), weights_digest(self.targets[self.target_of(run)])])

    def target_folder(self, name: str) -> str:
        """Returns the folder of a target; draws the random one where it is missing."""
        path = self.targets[name]
        return str(build(self.folder(path))) if path == RANDOM else find_target(path)

    def folder(self, run: str) -> Path:
        return Path(self.runs_dir) / run


def load_settings(path: Path = SETTINGS) -> Settings:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    content.pop("templates", None)
    settings = Settings(**content)
    studies = settings.studies.items()  # names may be numbers in YAML
    settings.studies = {study: {str(name): spec for name, spec in found.items()} for study, found in studies}
    return settings


def select_studies(settings: Settings, names: Iterable[str]) -> list[str]:
    """Returns the named studies, without names all but those on request; raises ValueError for an unknown one."""
    chosen = list(names)
    if unknown := [name for name in chosen if name not in settings.studies]:
        raise ValueError(f"{unknown[0]}: unknown study; choose from {', '.join(settings.studies)}")
    return chosen or [name for name in settings.studies if name not in settings.on_request]


def digest(value: Any) -> str:
    return json_digest(value)[:16]


@cache
def weights_digest(path: str) -> str:
    """Returns a hash of a target's weights; a hub id is returned as it is."""
    files = sorted(Path(path).glob("*.safetensors"))
    return digest([sha256(file) for file in files]) if files else path


class TrainingFailed(RuntimeError):
    """sage-train exited with an error; the message holds the last lines of its log."""


def ensure_trained(settings: Settings, run: str) -> Path:
    """Returns the run folder; trains the run if it is missing, incomplete or of other arguments. Raises TrainingFailed."""
    folder, wanted = settings.folder(run), settings.run_digest(run)
    if (folder / MARKER).is_file() and (folder / MARKER).read_text(encoding="utf-8") == wanted:
        return folder
    settings.target_folder(settings.target_of(run))
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_name(f"{run}.log")
    logger.info("training %s (log: %s)", run, log)
    # On the CPU, also where there is a GPU: all figures of the page are those of a CPU. One thread per rank, as in
    # `experiment=demo`: two small ranks use two cores better than two threads of one rank.
    command = [sys.executable, "-m", "train.cli.train", "launch.device=cpu", *settings.arguments(run), f"run.dir={folder}"]
    with log.open("w", encoding="utf-8") as out:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment, check=False)
    if done.returncode:
        raise TrainingFailed(f"sage-train ended with exit code {done.returncode}, see {tail_of(log)}")
    write_text(folder / MARKER, wanted)
    return folder


def training_of(settings: Settings, run: str) -> Json:
    """Returns steps and seconds of a trained run: all steps at the median time of a step, which interruptions do not change."""
    metrics: list[Any] = read_metrics(ensure_trained(settings, run) / METRICS)
    paces = [
        (after["time_s"] - before["time_s"]) / (after["step"] - before["step"])
        for before, after in pairwise(metrics)
        if after["step"] > before["step"]
    ]
    last = metrics[-1]
    return {"step": last["step"], "training_s": last["step"] * median(paces) if paces else last["time_s"]}
