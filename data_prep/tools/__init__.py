"""The actions of `sage-data` and the target's own answers; usable from a notebook, without Hydra."""
