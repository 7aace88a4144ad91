"""One module per export format, and the layout of names and tensors that they share."""
