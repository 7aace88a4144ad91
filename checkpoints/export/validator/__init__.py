"""Checks an exported folder: its configuration, its tensors, and whether they fit the target."""
