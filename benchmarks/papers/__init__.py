"""The papers' experiments on the pocket suite: trains missing drafts, measures, and writes docs/results.md.

settings.py   what is trained and measured (full.yaml, quick.yaml)
runs.py       training runs
figures.py    figures as JSON, measured again only when their inputs change
lab.py        targets, drafts, prompts, recordings and runners, created on first use
measure/      the studies, one module each
page/         docs/results.md from the figures: prose in Markdown templates, tables and expectations in Python, plots
"""
