"""The papers' experiments on the pocket suite: trains missing drafts, measures, and writes docs/results.md.

settings.py   what is trained and measured (full.yaml, quick.yaml)
runs.py       training runs
figures.py    figures as JSON, measured again only when their inputs change
lab.py        targets, drafts, prompts, recordings and runners, created on first use
study.py      the record of a study: how it is measured, and the tables, expectations and plots of its section
studies/      the records; comparison.py, tuning.py and answers.py are what their measurements share
page/         the prose of docs/results.md, one Markdown template per study; render.py fills them, with markdown.py and plots.py

A study is added by its record in studies/, its template in page/ and, for what a user may change, its sizes in full.yaml.
"""
