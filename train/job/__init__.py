"""The composition root, the training loop, the work of one rank, and the Python API."""
