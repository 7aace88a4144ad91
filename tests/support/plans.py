"""Plans of runs that are not started."""

from __future__ import annotations

from train.config.hydra_app import compose
from train.config.schema import Config
from train.plan.estimate import LaunchPlan
from train.plan.search import plan


def configure(*overrides: str) -> Config:
    draft = [] if any(word.startswith(("draft=", "experiment=")) for word in overrides) else ["draft=eagle"]
    config: Config = compose("config", ["launch.plan=true", "data.path=/no/data", *draft, *overrides], Config)
    return config


def big(target: str, *overrides: str) -> LaunchPlan:
    return plan(configure(f"target={target}", "data=llava_instruct", *overrides))
