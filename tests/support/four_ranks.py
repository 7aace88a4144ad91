"""One of four processes, two on each of two simulated nodes: passes of a sharded target, and the groups that gathered it.

python four_ranks.py CONFIG_ARGUMENTS.json OBSERVATIONS.json
"""

import faulthandler
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

import sage
from train.config.hydra_app import compose
from train.config.schema import Config
from train.engine.sharded_teacher import ShardedTarget, load_sharded
from train.launch.ranks import Ranks, process_group

LIMIT_S = 1000  # of processes that hang


def main(arguments: Path, observations: Path) -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    torch.set_num_threads(1)
    seen: dict[str, Any] = {}
    words = json.loads(arguments.read_text())
    with process_group("cpu", LIMIT_S) as ranks:
        for over in ("world", "auto"):
            config = compose("config", [*words, f"deepspeed.shard_over={over}"], Config)
            load = partial(sage.load_target, config.target.path, dtype=torch.float32, device=ranks.device)
            seen[over] = observed(load_sharded(load, config, ranks), load(), ranks)
    observations.write_text(json.dumps(seen))


def observed(shards: ShardedTarget, complete: sage.Target, ranks: Ranks) -> dict[str, Any]:
    backend: Any = deepspeed.comm.comm.cdb
    gather, gathers = backend.all_gather_into_tensor, []

    def recorded(*args: Any, group: Any = None, **options: Any) -> Any:
        gathers.append(dist.get_process_group_ranks(group or dist.group.WORLD))
        return gather(*args, group=group, **options)

    backend.all_gather_into_tensor = recorded
    text = {"type": "text", "text": "what is this? " * (1 + ranks.rank)}
    inputs = complete.prepare([{"role": "user", "content": [text]}])
    found, expected = (one.features(one.embed(inputs)).last for one in (shards.target, complete))
    backend.all_gather_into_tensor = gather
    layers: Any = shards.target.text_model.layers
    ahead: list[bool] = []
    hook = layers[0].mlp.register_forward_pre_hook(
        lambda *_: ahead.append(all(weight.ds_status is not ZeroParamStatus.NOT_AVAILABLE for weight in layers[1].parameters()))
    )
    again = shards.target.features(shards.target.embed(inputs)).last  # DeepSpeed knows the order of layers from the first pass
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
    main(Path(sys.argv[1]), Path(sys.argv[2]))
