"""Datasets of encoded examples: the index of valid items, the cache of examples, their lengths and order, streams."""
