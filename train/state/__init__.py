"""The saved state of a run, fingerprints of its data, and its provenance.

Does not own: files and checksums (checkpoints.store).
"""
