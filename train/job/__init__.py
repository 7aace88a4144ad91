"""The composition root, the training loop, the work of one rank, and the Python API.

Does not own: process creation (train.launch), the command line (train.cli).
"""
