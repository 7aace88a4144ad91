"""The saved state of a run, fingerprints of its data, and its provenance; files and checksums are in checkpoints.store."""
