"""Export formats: one class and one row of `registry` each; what they share is in base and checkpoints.export.configs."""
