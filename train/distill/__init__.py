"""Online distillation: the frozen teacher, (feature, next token) pairs, the student and its draft, the chunked objective."""
