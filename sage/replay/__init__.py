"""Recorded decoding, and what other policies would have made of it without the models."""
