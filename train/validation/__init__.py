"""A draft measured by the decoder: during training, at its end, and by `sage-validate`."""
