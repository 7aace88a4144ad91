"""What a run saves and resumes from, and its provenance.

Does not own: files and checksums (checkpoints.store).
"""
