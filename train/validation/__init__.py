"""Measures a draft with the decoder: during training, at its end, and for `sage-validate`."""
