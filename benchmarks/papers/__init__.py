"""The papers' tables on the pocket suite, by `python -m benchmarks.papers`: trains what is missing, measures, writes the page.

settings.py    what is trained and measured (full.yaml, quick.yaml)
store.py       figures as JSON, made again only when what they depend on has changed
lab.py         targets, drafts, prompts and runners, each made when first asked for
tuning.py      policies tuned by replay, the best of them timed
studies        table, training, visual, dynamics, entropy, ablations, projection: what is measured
items.py       which studies there are, and in which order
page.py        docs/results.md from the figures alone; *_page.py and *_plot.py its sections and pictures
"""
