"""From a `report.json` to something a person wants to look at: plots and a page. Reads dictionaries, measures nothing."""

from train.report.page import render_page
from train.report.plots import Plot, write_plots

__all__ = ["Plot", "render_page", "write_plots"]
