"""`python -m benchmarks.training`: time and memory of an optimizer step and of its parts."""
