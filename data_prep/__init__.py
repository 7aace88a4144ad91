"""Preparation of training data: from conversations with images and videos to batches of encoded examples.

sources (readers of on-disk formats), pocket (generated data and small targets), dataset (validated, cached, mixed examples),
tools (the actions of `sage-data`) and server (answers of servers); `build` connects them.
"""
