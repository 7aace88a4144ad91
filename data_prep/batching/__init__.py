"""Micro-batches of every optimizer step, for any number of ranks, prepared ahead of the trainer.

Takes any dataset of data_prep.dataset. Owns the grouping of examples by length.
"""
