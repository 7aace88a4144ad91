"""The pocket world: pictures drawn from a seed, talk about them, and two small targets that see them."""
