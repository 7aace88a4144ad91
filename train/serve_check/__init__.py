"""A serving engine on this machine, in an environment of its own, and its acceptance of a draft beside that of our decoder."""
