"""sage-train: composes the configuration, checks it, and starts the ranks."""

from __future__ import annotations

import sys

from train.checks import check
from train.config import Config
from train.hydra_app import configure_logging, run_app


def main() -> None:
    """Entry point of the console script; exits with the code that the contract gives."""
    sys.exit(run_app("config", Config, train))


def train(config: Config) -> int:
    """Checks before torch is imported, then trains."""
    check(config)
    configure_logging(config.debug)
    from train.launch import launch

    return launch(config)


if __name__ == "__main__":
    main()
