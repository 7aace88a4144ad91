"""The composition root, the training loop, and the work of one rank."""
