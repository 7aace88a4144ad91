"""One of several processes with the variables of a launcher; writes what it has observed.

    python rank_process.py jobs JOBS.json OBSERVATIONS.json         # runs of two ranks, one after another
    python rank_process.py nodes ARGUMENTS.json OBSERVATIONS.json   # a target sharded over two ranks on each of two nodes

Starting processes and importing torch takes longer than these runs, so the runs share two processes.
"""

import faulthandler
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from PIL import Image
from support.train_helpers import train_quickly, train_until_signal

import sage
import train.job.build
from train.config.hydra_app import compose
from train.config.schema import Config
from train.engine.sharded_teacher import ShardedTarget, load_sharded
from train.job.run import run_rank
from train.launch.cluster_env import detect_launcher
from train.launch.ranks import Ranks, process_group

LIMIT_S = 1000  # of processes that hang


def main(kind: str, given: Path, observations: Path) -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    torch.set_num_threads(1)
    seen = (run_jobs if kind == "jobs" else shard_over_nodes)(json.loads(given.read_text()))
    observations.write_text(json.dumps(seen))


def features_of(target: sage.Target, content: list[Any]) -> torch.Tensor:
    return target.features(target.embed(target.prepare([{"role": "user", "content": content}]))).last


def text_of(ranks: Ranks) -> list[Any]:
    return [{"type": "text", "text": "what is this? " * (1 + ranks.rank)}]


# -- two ranks -------------------------------------------------------------------------------------------------------------


def run_jobs(jobs: list[Any]) -> dict[str, Any]:
    seen: dict[str, Any] = {"ranks": detect_launcher(), "rank": int(os.environ["RANK"]), "targets": {}}
    for job in jobs:
        os.environ["MASTER_PORT"] = str(job["port"])
        record_targets(seen["targets"], job["name"])
        config = compose("config", job["arguments"], Config)
        if job["stop"]:
            with process_group("cpu", LIMIT_S) as ranks:
                train_until_signal(config, ranks, job["stop"])
        else:
            assert (run_rank if job["is_validated"] else train_quickly)(config) == 0
    return seen


def record_targets(seen: dict[str, Any], name: str) -> None:
    """Compares a sharded target with a complete one as soon as it is loaded; rank 0 reads an image, rank 1 text alone."""

    def load_and_record(load_target: Any, config: Config, ranks: Ranks) -> ShardedTarget:
        shards = load_sharded(load_target, config, ranks)
        target, complete = shards.target, sage.load_target(config.target.path, dtype=torch.float32)
        image = [{"type": "image", "image": Image.new("RGB", (112, 112), (200, 30, 30))}] if ranks.is_main else []
        layers: Any = list(target.text_model.layers.parameters())
        seen[name] = {
            "is_equal": torch.equal(*(features_of(one, [*image, *text_of(ranks)]) for one in (target, complete))),
            "own": sum(p.ds_tensor.numel() for p in layers),
            "live": sum(p.numel() for p in layers),
            "all": sum(p.numel() for p in complete.text_model.layers.parameters()),
            "is_tied": target.lm_head.weight is target.embed_tokens.weight,
        }
        return shards

    train.job.build.load_sharded = load_and_record


# -- four ranks ------------------------------------------------------------------------------------------------------------


def shard_over_nodes(words: list[str]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    with process_group("cpu", LIMIT_S) as ranks:
        for over in ("world", "auto"):
            config = compose("config", [*words, f"deepspeed.shard_over={over}"], Config)
            load = partial(sage.load_target, config.target.path, dtype=torch.float32, device=ranks.device)
            seen[over] = observed(load_sharded(load, config, ranks), load(), ranks)
    return seen


def observed(shards: ShardedTarget, complete: sage.Target, ranks: Ranks) -> dict[str, Any]:
    """Passes of a sharded target, and the groups that gathered it."""
    backend: Any = deepspeed.comm.comm.cdb
    gather, gathers = backend.all_gather_into_tensor, []

    def recorded(*args: Any, group: Any = None, **options: Any) -> Any:
        gathers.append(dist.get_process_group_ranks(group or dist.group.WORLD))
        return gather(*args, group=group, **options)

    backend.all_gather_into_tensor = recorded
    found, expected = (features_of(one, text_of(ranks)) for one in (shards.target, complete))
    backend.all_gather_into_tensor = gather
    layers: Any = shards.target.text_model.layers
    ahead: list[bool] = []
    hook = layers[0].mlp.register_forward_pre_hook(
        lambda *_: ahead.append(all(weight.ds_status is not ZeroParamStatus.NOT_AVAILABLE for weight in layers[1].parameters()))
    )
    again = features_of(shards.target, text_of(ranks))  # DeepSpeed knows the order of layers from the first pass
    hook.remove()
    weights: Any = list(layers.parameters())
    parts = [getattr(weight, name) for weight in weights for name in ("ds_tensor", "ds_secondary_tensor")]
    return {
        "per_node": ranks.per_node(),
        "is_equal": torch.equal(found, expected) and torch.equal(again, expected),
        "ahead": ahead,
        "groups": sorted({tuple(group) for group in gathers}),
        "own": sum(part.numel() for part in parts if part is not None),
        "all": sum(weight.numel() for weight in complete.text_model.layers.parameters()),
    }


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
