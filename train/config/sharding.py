"""A sharded target: the ranks that it is divided over, and the validation of its draft if none is configured."""

from __future__ import annotations

from collections.abc import Collection

from sage.trees import AUTOREGRESSIVE, SAGE
from train.config.schema import Config, PolicyName, ShardOver

NODE_SHARE = 0.25  # of a GPU's memory that the layers may take; the rest is for the draft, activations and the objective
NUM_PROMPTS, MAX_NEW_TOKENS = 4, 64  # of a validation in which every pass gathers the target


def sharding_ranks(config: Config, layer_bytes: float, ranks: int, ranks_per_node: int) -> int:
    """Returns the number of ranks that hold the layers of the target once.

    Within a node, layers are gathered over NVLink instead of the network, and each rank holds a larger part of them.

    Args:
        layer_bytes: of all text layers of the target.
        ranks_per_node: consecutive ranks that share a machine; 1 or `ranks` if there is no such division.
    """
    is_divided = 1 < ranks_per_node < ranks and ranks % ranks_per_node == 0
    if not is_divided or config.deepspeed.shard_over is ShardOver.world:
        return ranks
    fits = layer_bytes / ranks_per_node <= NODE_SHARE * config.launch.gpu_memory_gb * 1e9
    return ranks_per_node if fits or config.deepspeed.shard_over is ShardOver.node else ranks


def shorten_validation(config: Config, given: Collection[str]) -> None:
    """Makes validations of a sharded target short where no key of theirs was given: every pass gathers all layers.

    One policy, the one that is scored, is measured beside autoregressive decoding, on few prompts and without baselines.

    Args:
        given: keys and groups of the command line.
    """
    decode = config.decode
    if not config.deepspeed.shard_target:
        return
    if not {"decode.policies", "decode/policy"} & set(given):
        drafting = [name for name in decode.policies if name != AUTOREGRESSIVE]
        preferred = [config.score.policy, *(name for name in drafting if name == SAGE), *drafting]
        decode.policies = [PolicyName(name) for name in preferred if name is not None][:1] or decode.policies
    if "decode.baselines" not in given:
        decode.baselines = []
    if "decode.num_prompts" not in given:
        decode.num_prompts = min(decode.num_prompts, NUM_PROMPTS)
    if "decode.max_new_tokens" not in given:
        decode.max_new_tokens = min(decode.max_new_tokens, MAX_NEW_TOKENS)


def validation_line(config: Config) -> str:
    """Returns the line about the validations of a sharded target; empty for another one."""
    decode = config.decode
    if not config.deepspeed.shard_target:
        return ""
    names = " and ".join([*map(str, decode.policies), *map(str, decode.baselines)])
    return (
        f"validations of the sharded target: {names} on {decode.num_prompts} prompt(s) of at most {decode.max_new_tokens} "
        f"tokens, since every pass gathers it; decode.policies, .baselines, .num_prompts and .max_new_tokens ask for more"
    )
