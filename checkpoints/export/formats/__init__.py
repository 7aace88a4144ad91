"""Export formats, one module each, and the config fields and tensors that they share (layout)."""
