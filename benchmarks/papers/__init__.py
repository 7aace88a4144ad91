"""The tables of docs/results.md, measured on the pocket targets: `make results`, or one of them with `make results-NAME`.

settings.yaml   training runs, and the measurements of each study
runs.py         settings, and training of the runs that are missing
measure.py      the kinds of measurement, and their figures as JSON
tables.py       figures -> tables and pictures of the page

A study is an entry of settings.yaml, a function of tables.py, and a section of docs/results.md with the table's markers.
"""
