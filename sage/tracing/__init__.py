"""The trace of one generation, as a page of one file."""
