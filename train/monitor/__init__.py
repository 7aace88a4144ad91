"""A run while it trains: metrics, their sinks (the only room that imports wandb), the progress line, profiler traces."""
