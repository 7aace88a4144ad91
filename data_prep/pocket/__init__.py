"""The pocket world: images generated from a seed with conversations about them, and small targets trained on them.

Owns the generation (`world`), the training of the targets (`build`) and their score.
"""
