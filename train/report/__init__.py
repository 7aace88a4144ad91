"""Plots and Markdown pages of a validation (`page`, `plots`), of a run (`run_page`), of several runs (`compare`)."""
