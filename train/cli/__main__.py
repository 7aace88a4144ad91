"""`python -m train.cli` is `sage-train`."""

from __future__ import annotations

from train.cli.train import main

if __name__ == "__main__":
    main()
