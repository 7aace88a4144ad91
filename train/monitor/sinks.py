"""Where metrics go: `metrics.jsonl` always, TensorBoard or Weights & Biases if asked. The only file that imports wandb.

Owns: the line format, sinks and their life time. Does not own: what is measured. Rank 0 alone has a tracker.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from checkpoints.run_folder import METRICS, read_metrics
from checkpoints.store import saving
from sage.files import write_text
from train.config.schema import Config, ConfigError, TrackingKind, WandbConfig, WandbMode
from train.launch import cluster_env

logger = logging.getLogger(__name__)
NO_LOGIN = ("offline", "disabled", "dryrun")  # ways of wandb that ask nothing of its server
WANDB_REMEDY = "run `wandb login` or set WANDB_API_KEY, or keep it in the run folder with tracking.mode=offline"
Metrics = Mapping[str, float | int]


class Sink(Protocol):
    """Something that takes one dictionary per log step."""

    def log(self, metrics: Metrics, step: int) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """All sinks of a run; closes every one of them at the end, whatever happens."""

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self.sinks = list(sinks)

    def log(self, metrics: Metrics, step: int) -> None:
        """Hands one log step to every sink."""
        for sink in self.sinks:
            sink.log(metrics, step)

    def close(self) -> None:
        """Flushes and closes; a sink that fails to close is reported and does not keep the others open."""
        for sink in self.sinks:
            try:
                sink.close()
            except Exception as error:  # the metrics are safe in metrics.jsonl; losing a mirror must not fail the run
                logger.error("%s did not close: %s", type(sink).__name__, error)


class Jsonl:
    """One JSON object per line. A resumed run drops the lines after the step it resumes from.

    Args:
        path: `runs/NAME/metrics.jsonl`.
        from_step: steps already behind the run.

    Raises:
        SaveFailed: the file cannot be written; so does `log`.
    """

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
    """TensorBoard event files in `runs/NAME/tensorboard`."""

    def __init__(self, folder: Path, from_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=from_step + 1)

    def log(self, metrics: Metrics, step: int) -> None:
        for name, value in metrics.items():
            if name != "step":
                self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """One Weights & Biases run; resumed under the same id.

    Raises:
        ConfigError: wandb refuses, or its server cannot be reached.
    """

    def __init__(self, folder: Path, config: WandbConfig, name: str, resolved: dict[str, Any]) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        identity = folder / "wandb_id"
        if not identity.exists():
            write_text(identity, uuid.uuid4().hex[:12])
        try:
            self.run = wandb.init(
                project=config.project,
                entity=config.entity,
                group=config.group,
                mode=wandb_mode(config),  # type: ignore[arg-type]
                name=name,
                id=identity.read_text(),
                resume="allow",
                dir=str(folder),
                config=resolved,
            )
        except wandb.errors.Error as error:
            raise ConfigError(f"tracking=wandb: {' '.join(str(error).split())}; {WANDB_REMEDY}") from error

    def log(self, metrics: Metrics, step: int) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


def open_tracker(config: Config, resolved: dict[str, Any], from_step: int) -> Tracker:
    """The sinks a configuration asks for.

    Args:
        resolved: the whole configuration as plain data, for sinks that show it.
        from_step: 0, or the step a resumed run goes on from.

    Raises:
        ConfigError: wandb does not let us in.
    """
    tracker = Tracker([Jsonl(Path(config.run.dir) / METRICS, from_step)])
    try:
        tracker.sinks += _mirrors(config, resolved, from_step)
    except BaseException:
        tracker.close()
        raise
    return tracker


def _mirrors(config: Config, resolved: dict[str, Any], from_step: int) -> list[Sink]:
    """What is asked for beside metrics.jsonl."""
    folder = Path(config.run.dir)
    if config.tracking.kind is TrackingKind.tensorboard:
        return [TensorBoard(folder / "tensorboard", from_step)]
    if isinstance(config.tracking, WandbConfig):
        return [Wandb(folder, config.tracking, config.run.name, resolved)]
    return []


def check_tracking(config: Config) -> None:
    """Refuses a sink whose package is missing, and wandb where nobody is logged in, before anything is written.

    Raises:
        ConfigError: names the package, or how to log in.
    """
    if config.tracking.kind is TrackingKind.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("tracking=tensorboard: the package tensorboard is missing; pip install 'sage-draft[tensorboard]'")
    if (
        isinstance(config.tracking, WandbConfig)
        and cluster_env.is_main_rank()  # other ranks have no tracker
        and wandb_mode(config.tracking) not in NO_LOGIN
        and not _has_login()
    ):
        raise ConfigError(f"tracking=wandb: nobody is logged in to wandb here; {WANDB_REMEDY}")


def wandb_mode(config: WandbConfig) -> str:
    """`tracking.mode`; the environment's WANDB_MODE goes before `online`, the default."""
    return str(config.mode) if config.mode is not WandbMode.online else os.environ.get("WANDB_MODE") or str(config.mode)


def _has_login() -> bool:
    """Whether wandb finds an API key or token, in the environment or its files; asks neither a person nor the server."""
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    if "prompt" in inspect.signature(wandb.login).parameters:
        return bool(wandb.login(prompt=False, verify=False))
    return bool(os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or wandb.api.api_key)  # older ones have no such question
