"""The papers' experiments on the pocket suite: trains missing drafts, measures, and writes docs/results.md.

runs.py       what is trained and measured (full.yaml, quick.yaml), and the training runs
figures.py    figures as JSON, measured again only when their inputs change
lab.py        targets, drafts, prompts, recordings and runners, created on first use
study.py      the record of a study: how it is measured, and the tables, expectations and plots of its section
studies/      the records; lab.py and tuning.py are what their measurements share
page/         the prose of docs/results.md, one Markdown template per study; render.py fills them, with markdown.py and plots.py

A study is added by its record in studies/, its template in page/ and, for what a user may change, its sizes in full.yaml.
"""
