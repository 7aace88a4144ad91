"""The ranks of a run: starting and supervising them, the process group, the launchers' variables, signals."""
