"""Benchmarks and studies, run from a checkout; not part of the wheel."""
