"""Checks of a draft's config and tensors against what serving engines expect."""
