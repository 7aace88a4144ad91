"""How passes run: attention, caches, numbers of the host as tensors, executors, timers."""
