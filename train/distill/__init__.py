"""What is trained on what: the frozen teacher, pairs of features and tokens, the student, and the chunked objective."""
