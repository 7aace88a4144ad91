"""What a process writes to stderr: log messages, and errors as one line with an exit code. Imports neither torch nor Hydra."""
