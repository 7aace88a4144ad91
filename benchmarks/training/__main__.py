"""`python -m benchmarks.training`: prints what an optimizer step costs. See docs/performance.md."""

from __future__ import annotations

import argparse
import sys

import torch

from benchmarks.training import parts, step
from sage.commands.cli import new_parser, run
from train.config.checks import MAX_STAGE, check
from train.config.hydra_app import compose
from train.config.schema import Config
from train.launch.ranks import pick_device, process_group


def main() -> int:
    arguments, overrides = _parser().parse_known_args()
    if unknown := [word for word in overrides if word.startswith("-")]:
        raise ValueError(f"{unknown[0]}: unknown to benchmarks.training; see --help")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    print(_step(arguments, overrides) if arguments.images is None else _parts(arguments, overrides))
    return 0


def _step(arguments: argparse.Namespace, overrides: list[str]) -> str:
    config: Config = compose("config", [*overrides, f"launch.device={arguments.device}"], Config)
    check(config)
    if config.deepspeed.stage == MAX_STAGE:
        raise ValueError("deepspeed.stage=3: allowed: 0, 1 or 2 here; under ZeRO-3 the draft cannot run outside the engine")
    with process_group(arguments.device, config.launch.timeout_s) as ranks:
        return step.measure(config, ranks, arguments.measured, arguments.warmup)


def _parts(arguments: argparse.Namespace, overrides: list[str]) -> str:
    config: Config = compose("config", [*overrides, "launch.plan=true"], Config)  # opens no data
    check(config)
    sizes = parts.Sizes(
        sequences=config.train.micro_batch_size,
        length=arguments.length,
        image=arguments.images,
        supervised=arguments.supervised,
    )
    device = pick_device(arguments.device, 0)
    found = parts.measure(config, sizes, arguments.layers, device, arguments.measured, arguments.warmup, arguments.out)
    return found.text()


def _size(text: str) -> tuple[int, int]:
    """Parses `640x480`."""
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise argparse.ArgumentTypeError(f"{text!r}: give width and height in pixels, such as 640x480")
    return int(width), int(height)


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: allowed: above 0, at most 1")
    return value


def _parser() -> argparse.ArgumentParser:
    description = "an optimizer step against its parts; also takes overrides of sage-train"
    parser = new_parser("python -m benchmarks.training", description=description)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--threads", type=int, help="CPU threads; default: as torch chooses")
    parser.add_argument("--measured", type=int, default=20, help="steps to time")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the timed ones")
    parser.add_argument("--layers", type=int, help="text layers of --images; default: all")
    parser.add_argument("--length", type=int, default=2048, help="tokens of each sequence of --images (default: %(default)s)")
    text = "time the parts of a step on sequences with one image each, with random weights; default %(const)s"
    parser.add_argument("--images", metavar="WxH", type=_size, nargs="?", const="640x480", help=text)
    parser.add_argument("--supervised", type=_share, default=0.25, help="share of the text of --images (default: %(default)s)")
    parser.add_argument("--out", metavar="FILE", help="write the table of --images as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(run(main))
