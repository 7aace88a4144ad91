"""Imported by worker processes before transformers, which imports torchao: they warn as commands do."""

from sage.commands.cli import plain_warnings

plain_warnings()
