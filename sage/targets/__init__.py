"""Target models: `Target`, and one `Family` per architecture."""

from sage.targets.family import Family, Prompt, Visual
from sage.targets.loading import is_target_folder, load_target
from sage.targets.target import Features, Target

__all__ = ["Family", "Features", "Prompt", "Target", "Visual", "is_target_folder", "load_target"]
