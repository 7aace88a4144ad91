"""Pages and plots rendered from `report.json` and run folders. Reads dictionaries, measures nothing.

Importing this package is cheap: modules that plot import matplotlib and are imported where they are used.
"""
