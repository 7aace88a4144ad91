"""`python -m sage.training train ...` is `sage-train ...`, and so on for every command of the packages above `sage`."""

from __future__ import annotations

from sage.training.scripts import main

if __name__ == "__main__":
    main()
