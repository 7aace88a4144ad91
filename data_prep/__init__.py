"""Preparation of training data: from conversations with images and videos to batches of encoded examples.

The rooms, each of which imports only those before it: pocket (generated data and small targets), sources (readers of on-disk
formats), dataset (validated, cached, mixed examples), batching (micro-batches per step), tools (the actions of `sage-data`).
The modules beside them are shared by the rooms; `build` connects them.
"""
