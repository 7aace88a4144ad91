"""Serving engines beside our decoder: the same target, draft and prompts, one process each."""
