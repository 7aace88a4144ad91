"""The entry points of `sage-train`, `sage-validate` and `sage-data`."""
