"""Destinations of metrics on rank 0: `metrics.jsonl` always, and a tracker (TensorBoard or Weights & Biases) if configured."""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from checkpoints.run_folder import METRICS, read_metrics
from checkpoints.store import saving
from sage.io.files import write_text
from train.config.schema import Config, ConfigError, TrackingKind, WandbConfig, WandbMode
from train.launch import cluster_env

logger = logging.getLogger(__name__)
WANDB_ID = "wandb_id"  # file of a run folder
NO_LOGIN_MODES = ("offline", "disabled", "dryrun")  # wandb modes that need no server
WANDB_REMEDY = "run `wandb login` or set WANDB_API_KEY, or keep it in the run folder with tracking.mode=offline"
Metrics = Mapping[str, float | int]


class Tracker:
    def __init__(self, sinks: Iterable[Jsonl | TensorBoard | Wandb] = ()) -> None:
        self.sinks = list(sinks)

    def log(self, metrics: Metrics, step: int) -> None:
        for sink in self.sinks:
            sink.log(metrics, step)

    def close(self) -> None:
        """Closes all sinks; an error of one is logged and does not prevent closing the others."""
        for sink in self.sinks:
            try:
                sink.close()
            except Exception as error:  # metrics.jsonl is complete; losing a copy of it must not fail the run
                logger.error("%s was not closed: %s", type(sink).__name__, error)


class Jsonl:
    """Writes one JSON object per line; SaveFailed if it cannot. A resumed run drops the lines after `from_step`."""

    def __init__(self, path: Path, from_step: int) -> None:
        kept = [line for line in read_metrics(path) if line["step"] <= from_step]
        self.path = path
        with saving(path):
            write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
            self.file = path.open("a", buffering=1)

    def log(self, metrics: Metrics, step: int) -> None:
        if "step" in metrics:
            with saving(self.path):
                self.file.write(json.dumps(dict(metrics)) + "\n")

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    def __init__(self, config: Config, resolved: dict[str, Any], from_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(Path(config.run.dir) / "tensorboard"), purge_step=from_step + 1)

    def log(self, metrics: Metrics, step: int) -> None:
        for name, value in metrics.items():
            if name != "step":
                self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """Logs to a Weights & Biases run; a resumed run keeps its id. ConfigError if wandb refuses or cannot be reached."""

    def __init__(self, config: Config, resolved: dict[str, Any], from_step: int) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        assert isinstance(config.tracking, WandbConfig)
        identity = Path(config.run.dir) / WANDB_ID
        if not identity.exists():
            write_text(identity, uuid.uuid4().hex[:12])
        try:
            self.run = wandb.init(
                project=config.tracking.project,
                entity=config.tracking.entity,
                group=config.tracking.group,
                mode=wandb_mode(config.tracking),  # type: ignore[arg-type]
                name=config.run.name,
                id=identity.read_text(),
                resume="allow",
                dir=config.run.dir,
                config=resolved,
            )
        except wandb.errors.Error as error:
            raise ConfigError(f"tracking=wandb: {' '.join(str(error).split())}; {WANDB_REMEDY}") from error

    def log(self, metrics: Metrics, step: int) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


# Sinks that `tracking=NAME` adds to metrics.jsonl; they take the arguments of `open_tracker`.
TRACKERS: dict[TrackingKind, type[TensorBoard] | type[Wandb]] = {
    TrackingKind.tensorboard: TensorBoard,
    TrackingKind.wandb: Wandb,
}


def open_tracker(config: Config, resolved: dict[str, Any], from_step: int) -> Tracker:
    """Opens metrics.jsonl and the configured tracker, which shows the `resolved` configuration; ConfigError if it cannot.

    `from_step` is 0, or the step a run is resumed from.
    """
    tracker = Tracker([Jsonl(Path(config.run.dir) / METRICS, from_step)])
    try:
        if config.tracking.kind in TRACKERS:
            tracker.sinks.append(TRACKERS[config.tracking.kind](config, resolved, from_step))
    except BaseException:
        tracker.close()
        raise
    return tracker


def check_tracking(config: Config) -> None:
    """Raises ConfigError if the package of the tracker or a login is missing; called before anything is written."""
    kind = config.tracking.kind  # also the name of the package and of the extra
    if kind in TRACKERS and importlib.util.find_spec(kind) is None:
        raise ConfigError(f"tracking={kind}: package {kind} is not installed; pip install 'sage-draft[{kind}]'")
    needs_login = isinstance(config.tracking, WandbConfig) and wandb_mode(config.tracking) not in NO_LOGIN_MODES
    if needs_login and cluster_env.is_main_rank() and not _has_login():  # other ranks have no sinks
        raise ConfigError(f"tracking=wandb: not logged in to wandb; {WANDB_REMEDY}")


def wandb_mode(config: WandbConfig) -> str:
    """Returns `tracking.mode`; the environment's WANDB_MODE takes precedence over the default, `online`."""
    return str(config.mode) if config.mode is not WandbMode.online else os.environ.get("WANDB_MODE") or str(config.mode)


def _has_login() -> bool:
    """Whether wandb finds an API key or token in the environment or its files; without a prompt or a request."""
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    if "prompt" in inspect.signature(wandb.login).parameters:
        return bool(wandb.login(prompt=False, verify=False))
    return bool(os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or wandb.api.api_key)  # versions without `prompt`
