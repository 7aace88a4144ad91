"""The pocket world: images generated from a seed with conversations about them, and small targets trained on them."""
