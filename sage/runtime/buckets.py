"""Sizes that captured passes are padded to. Imports nothing."""

from __future__ import annotations

MIN_KEYS, KEY_STEP = 256, 1024


def node_bucket(count: int) -> int:
    """Returns the smallest power of two that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()


def key_bucket(count: int) -> int:
    """Returns the keys of a graph for `count` keys: a power of two up to `KEY_STEP`, else a multiple of it."""
    if count <= KEY_STEP:
        return max(node_bucket(count), MIN_KEYS)
    return -(-count // KEY_STEP) * KEY_STEP
