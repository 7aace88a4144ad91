"""Monitoring of a run: metrics, their trackers (the only place that imports wandb), the progress display, profiler traces."""
