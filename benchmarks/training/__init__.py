"""`python -m benchmarks.training`: time and memory of the objective against the naive loss, of a step against its parts."""
