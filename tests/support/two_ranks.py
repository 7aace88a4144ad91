"""One of two processes with srun's variables: runs a list of jobs one after another and writes its observations.

    python two_ranks.py JOBS.json OBSERVATIONS.json

Starting processes and importing torch takes longer than these runs, so they share two processes.
"""

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from support.train_helpers import train_quickly, train_until_signal

import sage
import train.job.build
from train.config.hydra_app import compose
from train.config.schema import Config
from train.engine.sharded_teacher import ShardedTarget
from train.job.run import run_rank
from train.launch.cluster_env import detect_launcher
from train.launch.ranks import process_group

LIMIT_S = 1000  # of processes that hang


def main(jobs: Path, observations: Path) -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    torch.set_num_threads(1)
    seen: dict[str, Any] = {"ranks": detect_launcher(), "rank": int(os.environ["RANK"]), "targets": {}}
    for job in json.loads(jobs.read_text()):
        os.environ["MASTER_PORT"] = str(job["port"])
        record_targets(seen["targets"], job["name"])
        config = compose("config", job["arguments"], Config)
        if job["stop"]:
            with process_group("cpu", LIMIT_S) as ranks:
                train_until_signal(config, ranks, job["stop"])
        else:
            assert (run_rank if job["is_validated"] else train_quickly)(config) == 0
    observations.write_text(json.dumps(seen))


def record_targets(seen: dict[str, Any], name: str, load: Any = train.job.build.load_sharded) -> None:
    """Compares a sharded target with a complete one as soon as it is loaded; rank 0 reads an image, rank 1 text alone."""

    def load_and_record(load_target: Any, config: Config, ranks: Any) -> ShardedTarget:
        shards: ShardedTarget = load(load_target, config, ranks)
        target, complete = shards.target, sage.load_target(config.target.path, dtype=torch.float32)
        image = [{"type": "image", "image": image_file(Path(config.run.dir).parent)}] if ranks.is_main else []
        text = {"type": "text", "text": "what is this? " * (1 + ranks.rank)}
        inputs = complete.prepare([{"role": "user", "content": [*image, text]}])
        sharded, expected = (one.features(one.embed(inputs)).last for one in (target, complete))
        layers: Any = list(target.text_model.layers.parameters())
        seen[name] = {
            "is_equal": torch.equal(sharded, expected),
            "own": sum(p.ds_tensor.numel() for p in layers),
            "live": sum(p.numel() for p in layers),
            "all": sum(p.numel() for p in complete.text_model.layers.parameters()),
            "is_tied": target.lm_head.weight is target.embed_tokens.weight,
        }
        return shards

    train.job.build.load_sharded = load_and_record


def image_file(folder: Path) -> str:
    from PIL import Image

    path = folder / "image.png"
    if not path.exists():
        Image.new("RGB", (112, 112), (200, 30, 30)).save(path)
    return str(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
