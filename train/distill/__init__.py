"""Online distillation: the frozen teacher, (feature, next token) pairs, the student with its draft, and the chunked objective.

Does not own the training loop (train.job), the engine (train.engine) or the draft architectures (sage.drafts).
"""
