"""docs/results.md and its plots from the figures alone: prose in Markdown templates, tables and findings in Python."""
