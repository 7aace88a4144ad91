"""Drafts for serving engines: exported, checked, described, and imported.

`exporter.export` writes a trained draft in a format of `registry.py`, `importer.check_folder` checks the folder of any draft,
`importer.convert` imports a third-party one. The command is `sage-export`.
"""
