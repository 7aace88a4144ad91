"""Plots and Markdown pages: of a validation (`page`, `plots`), of a run (`run_page`), of several runs (`compare`).

Reads report.json and run folders. Does not own the measurement (sage.bench, train.validation).
"""
