"""A frozen target spread over the ranks by ZeRO-3: each rank holds its part of every text layer and gathers a layer to run it.

Whole on every rank stay the vision tower, the embedding, the last norm and lm_head. Together they are a few percent of a large
target, and this way a rank may have no picture in its micro-batch, the objective reads lm_head without a gather per chunk,
and a draft borrows both matrices as always.

Running the text layers takes all ranks. In training every rank runs them once per micro-batch, and all have as many. When
rank 0 decodes alone it leads (`leading`), and the others follow: for every pass of rank 0 they run one of their own, over a
single token, which gathers the same layers in the same order.

Owns: loading in parts, leading and following. Does not own: what the target computes (sage.targets).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.integrations import HfDeepSpeedConfig

from sage import Target
from train.config.schema import Config, ConfigError, Precision
from train.engine.engine import import_deepspeed
from train.launch.ranks import Ranks

WHOLE_BELOW = 10_000  # elements; norms and biases are not worth a gather


class Shards:
    """The ranks' parts of one target.

    Attributes:
        target: for all ranks to use together.
    """

    def __init__(self, target: Target, engine: Any, ranks: Ranks) -> None:
        self.target, self.ranks = target, ranks
        self._engine = engine  # its hooks, which gather the layers, live as long as it does

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Within the block this rank, which must be 0, may use the target alone; the others are in `follow` meanwhile."""
        # Before DeepSpeed's own hook, which starts to gather: every rank has to hear of the pass first.
        hook = self.target.text_model.register_forward_pre_hook(self._announce, prepend=True)
        try:
            yield
        finally:
            hook.remove()
            self._tell(False)

    @torch.no_grad()
    def follow(self) -> None:
        """Lends rank 0 this rank's parts until it has left `leading`."""
        target = self.target
        embeds = torch.zeros(1, 1, target.hidden_size, dtype=target.dtype, device=target.device)
        positions = target.family.decode_positions(torch.zeros(1, dtype=torch.long, device=target.device))
        while self._tell(False):
            target.text_model(inputs_embeds=embeds, position_ids=positions, use_cache=False)

    def _announce(self, *_: Any) -> None:
        self._tell(True)

    def _tell(self, is_next: bool) -> bool:
        """Rank 0's word on every rank: whether another pass comes. On the CPU, so that no GPU spins."""
        word = torch.tensor([is_next], dtype=torch.uint8)
        dist.broadcast(word, src=0)
        return bool(word)


def load_sharded(load: Callable[[], Target], config: Config, ranks: Ranks) -> Shards:
    """Loads a target of which no rank ever holds all. Every rank has to call it.

    Rank 0 reads one tensor after the other and hands out the parts; on the way a device holds one whole tensor at most, beside
    its own parts.

    Args:
        load: calls `from_pretrained` with `target.dtype`.

    Raises:
        ConfigError: there is only one rank.
    """
    if ranks.world_size == 1:
        raise ConfigError("deepspeed.shard_target=true: has no effect on one rank; start more, or drop it")
    deepspeed = import_deepspeed(ranks.device.type)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": config.target.dtype is Precision.bf16},
        "steps_per_print": None,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": WHOLE_BELOW,
            "stage3_max_reuse_distance": 0,  # a layer's next use is a whole pass away: let go of it at once
        },
    }
    switch = HfDeepSpeedConfig(settings)  # transformers loads in parts for as long as this object lives
    try:
        target = load()
    finally:
        del switch
    text: Any = target.text_model
    _make_whole(target.model, text.layers, deepspeed)
    embedding, norm = text.embed_tokens, text.norm
    text.embed_tokens = text.norm = None  # DeepSpeed would take them for forgotten and spread them again
    engine, *_ = deepspeed.initialize(model=text, config=settings, dist_init_required=False)
    text.embed_tokens, text.norm = embedding, norm
    text.eval()
    return Shards(target, engine, ranks)


def _make_whole(model: nn.Module, layers: nn.Module, deepspeed: Any) -> None:
    """Gathers every parameter outside `layers` for good; what was tied stays tied."""
    spread = {id(parameter) for parameter in layers.parameters()}
    whole: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in spread or not hasattr(parameter, "ds_id"):
                continue
            if id(parameter) not in whole:
                with deepspeed.zero.GatheredParameters([parameter]):
                    whole[id(parameter)] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
            setattr(module, name, whole[id(parameter)])
