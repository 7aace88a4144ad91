"""sage-train: composes the configuration, checks it, and starts the ranks."""

from __future__ import annotations

import sys

from train.checks import check
from train.compare import SweepComparison
from train.config import Config
from train.hydra_app import EXIT_DONE, configure_logging, run_app


def main() -> None:
    """Entry point of the console script; exits with the code that the contract gives."""
    sys.exit(run_app("config", Config, train, SweepComparison()))


def train(config: Config) -> int:
    """Checks before torch is imported, then trains."""
    check(config)
    if not config.launch.plan:
        from train.tracking import check_tracking

        check_tracking(config)
    configure_logging(config.debug)
    if config.launch.plan:
        from train.plan import plan
        from train.plan_text import render

        print(render(plan(config)))
        return EXIT_DONE
    from train.launch import launch

    return launch(config)


if __name__ == "__main__":
    main()
