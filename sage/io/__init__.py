"""Files, folders, manifests, and what commands print."""
