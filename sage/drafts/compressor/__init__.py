"""Visual compressor of a draft head: operators, visual spans, and the modes that combine operators.

Does not own: the attention of the draft (sage.drafts.layer).
"""
