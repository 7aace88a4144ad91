"""Optimizer steps as lists of micro-batches, in an order that does not depend on the number of ranks."""
