"""Target models: one module per family behind `Target`."""

from sage.inputs.processing import Processor
from sage.targets.family import Family, Prompt
from sage.targets.target import Features, Target, is_target_folder, load_target

__all__ = ["Family", "Features", "Processor", "Prompt", "Target", "is_target_folder", "load_target"]
