"""Costs of passes and draft levels: tables, measurement, timers; calibration of draft probabilities."""
