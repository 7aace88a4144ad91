"""Hydra YAML, shipped inside the wheel as `train._conf`. No code lives here."""
