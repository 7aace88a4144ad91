"""`python -m benchmarks.training`: the cost of the objective against the naive loss, and of a step against its parts."""
