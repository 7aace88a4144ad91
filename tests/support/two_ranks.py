"""One of two processes that srun seems to have started: runs a list of jobs, one after the other, and notes what it saw.

    python two_ranks.py JOBS.json NOTES.json

Starting processes and importing torch takes longer than these runs, so they share two processes.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from support.train_helpers import stopped_after

import sage
import train.run.build
from train.config.hydra_app import compose
from train.config.schema import Config
from train.engine.sharded_teacher import Shards
from train.launch.cluster_env import join_environment
from train.launch.launcher import run_rank
from train.launch.ranks import joined

LIMIT_S = 280
QUICK_REPORT = {"policies": {"sage": {"tokens_per_target_pass": 1.0}}}


def main(jobs: Path, notes: Path) -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    torch.set_num_threads(1)
    seen: dict[str, Any] = {"ranks": join_environment(), "rank": int(os.environ["RANK"]), "targets": {}}
    train.launch.launcher._summary = lambda *_: None  # type: ignore[assignment]
    real = train.validation.in_loop.validate
    for job in json.loads(jobs.read_text()):
        os.environ["MASTER_PORT"] = str(job["port"])
        train.validation.in_loop.validate = real if job["is_judged"] else lambda *_, **__: QUICK_REPORT
        look_at_targets(seen["targets"], job["name"])
        config: Config = compose("config", job["arguments"], Config)
        if job["stop"]:
            with joined("cpu", LIMIT_S) as ranks:
                stopped_after(config, ranks, job["stop"])
        else:
            assert run_rank(config) == 0
    notes.write_text(json.dumps(seen))


def look_at_targets(seen: dict[str, Any], name: str, load: Any = train.run.build.load_sharded) -> None:
    """Measures a sharded target as soon as it is loaded, and against a whole one; rank 0 sees a picture, rank 1 none."""

    def looking(load_target: Any, config: Config, ranks: Any) -> Shards:
        shards: Shards = load(load_target, config, ranks)
        target, whole = shards.target, sage.load_target(config.target.path, dtype=torch.float32)
        picture = [{"type": "image", "image": picture_file(Path(config.run.dir).parent)}] if ranks.is_main else []
        words = {"type": "text", "text": "what is this? " * (1 + ranks.rank)}
        inputs = whole.prepare([{"role": "user", "content": [*picture, words]}])
        ours, theirs = (one.features(one.embed(inputs)).last for one in (target, whole))
        layers: Any = list(target.text_model.layers.parameters())
        seen[name] = {
            "is_equal": torch.equal(ours, theirs),
            "own": sum(p.ds_tensor.numel() for p in layers),
            "live": sum(p.numel() for p in layers),
            "all": sum(p.numel() for p in whole.text_model.layers.parameters()),
            "is_tied": target.lm_head.weight is target.embed_tokens.weight,
        }
        return shards

    train.run.build.load_sharded = looking


def picture_file(folder: Path) -> str:
    from PIL import Image

    path = folder / "picture.png"
    if not path.exists():
        Image.new("RGB", (112, 112), (200, 30, 30)).save(path)
    return str(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
