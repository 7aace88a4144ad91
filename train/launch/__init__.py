"""The ranks of a run: starting them, joining those of another launcher, supervising them, stopping on signals.

Does not own: what a rank does (train.run).
"""
