"""The actions of `sage-data`: check with statistics and an HTML report, convert to JSON lines, regenerate answers.

Usable from a notebook, without Hydra.
"""
