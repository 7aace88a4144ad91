"""Plots of the page: each function draws one figure from the figures of a study."""
