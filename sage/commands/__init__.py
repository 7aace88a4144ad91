"""sage-generate, and what all commands share."""
