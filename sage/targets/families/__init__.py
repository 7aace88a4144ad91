"""One module per target family, each with one `Family`."""
