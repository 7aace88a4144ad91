"""The visual compressor of a draft head: fewer visual rows for the draft to read.

Owns: the operators, the visual spans, and the modes that combine them. Does not own: the draft's attention (sage.drafts.layer).
"""
