"""Folders in the layout of published checkpoints, with random weights."""
