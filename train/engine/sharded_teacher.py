"""A frozen target sharded over the ranks by ZeRO-3: each rank holds a part of every text layer and gathers a layer to run it.

The vision tower, the embedding, the last norm and lm_head stay complete on every rank: a rank may have no image in its
micro-batch, the objective reads lm_head without a gather per chunk, and the draft borrows both matrices as usual.

Running the text layers takes all ranks. When rank 0 decodes alone (`leading`), the others `follow`: for every pass of rank 0
they run one of their own over a single token, which gathers the same layers in the same order.

On several nodes, the ranks of each node hold all layers among them if they fit (`sharding_ranks`), so that no layer travels
over the network. DeepSpeed calls this a secondary partition (hpZ of ZeRO++, arXiv 2306.10209); the primary one over all ranks,
which only an optimizer would need, is released after loading.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig
from transformers.integrations import HfDeepSpeedConfig

from sage import Target
from sage.io.dtypes import torch_dtype
from sage.targets.loading import meta_target
from train.config.derived import sharding_ranks
from train.config.schema import Config, ConfigError, Precision, ShardOver
from train.engine.engine import import_deepspeed
from train.launch.ranks import Ranks

logger = logging.getLogger(__name__)

UNSHARDED_BELOW = 10_000  # elements; gathering norms and biases costs more than it saves


class ShardedTarget:
    """A target whose text layers are sharded over the ranks; every pass of `target` takes all ranks."""

    def __init__(self, target: Target, engine: Any, ranks: Ranks) -> None:
        self.target, self.ranks = target, ranks
        self._engine = engine  # its hooks gather the layers

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Rank 0 may use the target alone inside the block, while the other ranks are in `follow`."""
        # Prepended to DeepSpeed's own hook, which starts to gather: the pass has to be announced first.
        hook = self.target.text_model.register_forward_pre_hook(self._announce, prepend=True)
        try:
            yield
        finally:
            hook.remove()
            self._broadcast_next(False)

    @torch.no_grad()
    def follow(self) -> None:
        """Takes part in the passes of rank 0 until it leaves `leading`."""
        target = self.target
        embeds = torch.zeros(1, 1, target.hidden_size, dtype=target.dtype, device=target.device)
        tokens = torch.zeros(1, 1, dtype=torch.long, device=target.device)
        positions = target.family.decode_positions(tokens[0])
        given = target.family.inputs_of_tokens(target.text_model, tokens)
        while self._broadcast_next(False):
            target.text_model(inputs_embeds=embeds, position_ids=positions, use_cache=False, **given)

    def _announce(self, *_: Any) -> None:
        self._broadcast_next(True)

    def _broadcast_next(self, is_next: bool) -> bool:
        """Broadcasts from rank 0 whether another pass follows; on the CPU, so that GPUs stay idle."""
        flag = torch.tensor([is_next], dtype=torch.uint8)
        dist.broadcast(flag, src=0, group=self.ranks.group)
        return bool(flag)


def load_sharded(load: Callable[[], Target], config: Config, ranks: Ranks) -> ShardedTarget:
    """Loads a target sharded, so that no rank ever holds all of it. Every rank has to call it.

    Rank 0 reads one tensor after another and scatters it; a device holds at most one complete tensor beside its own parts.
    `load` calls `from_pretrained` with `target.dtype`. ConfigError on one rank, or for `shard_over=node` without regular nodes.
    """
    if ranks.world_size == 1:
        raise ConfigError("deepspeed.shard_target=true: has no effect on one rank; start more, or drop it")
    group = _group_size(config, ranks)
    deepspeed = import_deepspeed(ranks.device.type)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": config.target.dtype is Precision.bf16},
        "steps_per_print": None,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": UNSHARDED_BELOW,
            "stage3_max_reuse_distance": 0,  # a layer is used once per pass: release it at once
            "zero_hpz_partition_size": group if group < ranks.world_size else 1,
        },
    }
    switch = HfDeepSpeedConfig(settings)  # transformers loads sharded while this object exists
    try:
        target = load()
    finally:
        del switch
    target.is_whole = False
    text: Any = target.text_model
    _gather_permanently(target.model, text.layers, deepspeed)
    complete = {name: module for name, module in text.named_children() if module is not text.layers}
    for name in complete:
        setattr(text, name, None)  # DeepSpeed would shard them again
    settings["zero_optimization"] |= gathered_ahead(text.layers)
    engine, *_ = deepspeed.initialize(model=text, config=settings, dist_init_required=False)
    for name, module in complete.items():
        setattr(text, name, module)
    text.eval()
    if group < ranks.world_size:
        _keep_node_partition(text.layers, deepspeed)
    return ShardedTarget(target, engine, ranks)


def gathered_ahead(layers: nn.Module) -> dict[str, int]:
    """Returns settings with which a layer is gathered while the one before it runs, and no more than these two are held.

    By default, DeepSpeed looks 5 x 10^7 elements ahead, less than one matrix of a large layer.
    """
    largest = max(
        sum(getattr(weight, "ds_numel", weight.numel()) for weight in layer.parameters()) for layer in layers.children()
    )
    return {"stage3_prefetch_bucket_size": largest, "stage3_max_live_parameters": 2 * largest}


def _group_size(config: Config, ranks: Ranks) -> int:
    """Returns the number of consecutive ranks that hold the layers once; every rank has to call it."""
    per_node, chosen = ranks.per_node(), config.target
    if config.deepspeed.shard_over is ShardOver.node and not 1 < per_node <= ranks.world_size:
        raise ConfigError("deepspeed.shard_over=node: there is one rank per node; choose world")
    if per_node == ranks.world_size:
        return per_node
    revision = {} if chosen.revision is None else {"revision": chosen.revision}
    layers: Any = meta_target(AutoConfig.from_pretrained(chosen.path, **revision)).text_model.layers
    layer_bytes = sum(weight.numel() for weight in layers.parameters()) * torch_dtype(chosen.dtype).itemsize
    size = sharding_ranks(config, layer_bytes, ranks.world_size, per_node)
    where = "each node" if size < ranks.world_size else "all nodes"
    logger.info("target: layers are sharded over the %d ranks of %s, %.3g GB each", size, where, layer_bytes / size / 1e9)
    return size


def _keep_node_partition(layers: nn.Module, deepspeed: Any) -> None:
    """Releases the partition over all ranks, which is not read again; hides the group of the node from the draft's engine."""
    for weight in layers.parameters():
        partition = getattr(weight, "ds_tensor", None)
        if partition is not None and getattr(weight, "ds_secondary_tensor", None) is not None:
            partition.data = partition.data.new_empty(0)
    deepspeed.utils.groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def _gather_permanently(model: nn.Module, layers: nn.Module, deepspeed: Any) -> None:
    """Gathers every parameter outside `layers`; tied parameters stay tied."""
    sharded = {id(parameter) for parameter in layers.parameters()}
    gathered: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in sharded or not hasattr(parameter, "ds_id"):
                continue
            if id(parameter) not in gathered:
                with deepspeed.zero.GatheredParameters([parameter]):
                    gathered[id(parameter)] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
            setattr(module, name, gathered[id(parameter)])
