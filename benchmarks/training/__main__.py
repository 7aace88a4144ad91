"""`python -m benchmarks.training NAME`: prints what training costs. See docs/performance.md."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields

import torch

from benchmarks.figures import counts
from benchmarks.random_targets import layers_that_fit
from benchmarks.training import images, objective, step
from sage.bench.shapes import shape_named, shapes
from sage.commands.cli import new_parser, run
from sage.io.dtypes import torch_dtype
from train.config.checks import MAX_STAGE, check
from train.config.hydra_app import compose
from train.config.schema import Config, ObjectiveConfig, Precision
from train.distill.chunked_loss import TERMS
from train.launch.ranks import pick_device, process_group


def main() -> int:
    arguments, overrides = _parser().parse_known_args()
    unknown = [word for word in overrides if arguments.what != "step" or word.startswith("-")]
    if unknown:
        raise ValueError(f"{unknown[0]}: unknown to benchmarks.training {arguments.what}; see --help")
    if getattr(arguments, "threads", None):
        torch.set_num_threads(arguments.threads)
    match arguments.what:
        case "objective":
            print(_objective(arguments))
        case "step":
            print(_step(arguments, overrides))
    return 0


def _objective(arguments: argparse.Namespace) -> str:
    sizes = objective.Sizes(**{field.name: getattr(arguments, field.name) for field in fields(objective.Sizes)})
    weights = {f"{term.name}_weight": getattr(arguments, term.name) for term in TERMS}
    config = ObjectiveConfig(**weights, feature_weight=0.0, chunk_tokens=arguments.chunk)
    dtype = torch_dtype(arguments.dtype)
    return objective.measure(sizes, config, arguments.repeats, dtype, pick_device(arguments.device, 0))


def _step(arguments: argparse.Namespace, overrides: list[str]) -> str:
    if arguments.images is not None:
        return _images(arguments, overrides)
    config = _config(arguments, overrides)
    if config.deepspeed.stage == MAX_STAGE:
        raise ValueError("deepspeed.stage=3: allowed: 0, 1 or 2 here; under ZeRO-3 the draft cannot run outside the engine")
    with process_group(arguments.device, config.launch.timeout_s) as ranks:
        if arguments.shape is None:
            made = step.run_of_target(config, ranks)
        else:
            shape = shape_named(arguments.shape)
            layers = arguments.layers or layers_that_fit(shape, torch_dtype(config.target.dtype), ranks.device)
            made = step.run_of_shape(config, ranks, shape, layers, arguments.length)
        with made as run_of_parts:
            return step.measure(run_of_parts, arguments.measured, arguments.warmup)


def _config(arguments: argparse.Namespace, overrides: list[str]) -> Config:
    config: Config = compose("config", [*overrides, f"launch.device={arguments.device}"], Config)
    check(config)
    return config


def _images(arguments: argparse.Namespace, overrides: list[str]) -> str:
    if arguments.shape is not None:
        raise ValueError("--shape: --images takes the sizes of the target; give target=NAME")
    config: Config = compose("config", [*overrides, "launch.plan=true"], Config)  # opens no data
    check(config)
    lengths = arguments.lengths or [arguments.length] * config.train.micro_batch_size
    sizes = images.Sizes(lengths=tuple(lengths), image=arguments.images, supervised=arguments.supervised)
    device = pick_device(arguments.device, 0)
    found = images.measure(config, sizes, arguments.layers, device, arguments.measured, arguments.warmup)
    found.write(arguments.out)
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
    parser = new_parser("python -m benchmarks.training", description=__doc__)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    shared.add_argument("--threads", type=int, help="CPU threads; default: as torch chooses")
    kinds = parser.add_subparsers(dest="what", required=True)
    loss = kinds.add_parser("objective", parents=[shared], help="the chunked loss against the naive loss")
    sizes = objective.Sizes()
    loss.add_argument("--tokens", type=int, default=sizes.tokens, help="supervised positions")
    loss.add_argument("--vocabulary", type=int, default=sizes.vocabulary)
    loss.add_argument("--hidden", type=int, default=sizes.hidden)
    loss.add_argument("--steps", type=int, default=sizes.steps, help="unrolled steps")
    loss.add_argument("--draft-vocab-size", type=int, help="of a draft with a trained lm_head; default: the target's lm_head")
    loss.add_argument("--chunk", type=int, default=ObjectiveConfig.chunk_tokens, help="objective.chunk_tokens")
    for term in TERMS:
        default, text = float(term.name == "ce"), f"objective.{term.name}_weight"
        loss.add_argument(f"--{term.name}", type=float, default=default, help=text)
    loss.add_argument("--dtype", default="fp32", choices=[str(name) for name in Precision])
    loss.add_argument("--repeats", type=int, default=3)
    timed = argparse.ArgumentParser(add_help=False, parents=[shared])
    timed.add_argument("--measured", type=int, default=20, help="steps to time")
    timed.add_argument("--warmup", type=int, default=3, help="steps before the timed ones")
    steps = kinds.add_parser("step", parents=[timed], help="an optimizer step against its parts; also takes overrides")
    steps.add_argument("--shape", choices=list(shapes()), help="use a random target of these sizes")
    steps.add_argument("--layers", type=int, help="text layers; default: with --shape as many as fit, with --images all")
    steps.add_argument("--length", type=int, default=2048, help="tokens per sequence of --shape and --images")
    text = "parts of a step on sequences with one image each: counted without weights, on a GPU also timed; default %(const)s"
    steps.add_argument("--images", metavar="WxH", type=_size, nargs="?", const="640x480", help=text)
    steps.add_argument("--lengths", metavar="N,N", type=counts, help="tokens of each sequence of --images")
    steps.add_argument("--supervised", type=_share, default=0.25, help="share of the text of --images (default: %(default)s)")
    steps.add_argument("--out", metavar="FILE", help="write the table of --images as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(run(main))
