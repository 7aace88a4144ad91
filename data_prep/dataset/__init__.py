"""Datasets of encoded examples: the index of valid items, the cache of examples, streams, the draft vocabulary, skipped items.

Reading an invalid item raises its BadItem where `data.on_bad` is `error`; else the item is skipped and listed.

Owns the order of examples (`mixing`), a pure function of data, seed and epoch. Reads items from data_prep.sources.
"""
