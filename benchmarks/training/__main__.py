"""`python -m benchmarks.training objective|step`: what training costs, printed. See docs/performance.md."""

from __future__ import annotations

import argparse
import sys

import torch

from benchmarks.training import objective, step
from benchmarks.training.step import DTYPES
from sage.bench.shapes import SHAPES, layers_that_fit, shape_named
from sage.cli import run
from train.config.checks import MAX_STAGE, check
from train.config.hydra_app import compose
from train.config.schema import Config, Precision, register
from train.distill.chunked_loss import Terms
from train.launch.ranks import joined, pick_device


def main() -> int:
    """Entry point."""
    arguments, overrides = _parser().parse_known_args()
    unknown = [word for word in overrides if arguments.what == "objective" or word.startswith("-")]
    if unknown:
        raise ValueError(f"{unknown[0]}: unknown to benchmarks.training {arguments.what}; see --help")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    print(_objective(arguments) if arguments.what == "objective" else _step(arguments, overrides))
    return 0


def _objective(arguments: argparse.Namespace) -> str:
    sizes = objective.Sizes(
        tokens=arguments.tokens,
        vocabulary=arguments.vocabulary,
        hidden=arguments.hidden,
        steps=arguments.steps,
        words=arguments.words,
    )
    terms = Terms(ce=arguments.ce, tv=arguments.tv, lk=arguments.lk, chunk_tokens=arguments.chunk)
    dtype = DTYPES[Precision(arguments.dtype)]
    return objective.measure(sizes, terms, arguments.repeats, dtype, pick_device(arguments.device, 0))


def _step(arguments: argparse.Namespace, overrides: list[str]) -> str:
    register()
    config: Config = compose("config", [*overrides, f"launch.device={arguments.device}"], Config)
    check(config)
    if config.deepspeed.stage == MAX_STAGE:
        raise ValueError("deepspeed.stage=3: allowed: 0, 1 or 2 here; ZeRO-3 takes the draft apart, so nothing runs it alone")
    with joined(arguments.device, config.launch.timeout_s) as ranks:
        if arguments.shape is None:
            with step.run_of_target(config, ranks) as made:
                return step.measure(made, arguments.measured, arguments.warmup)
        shape = shape_named(arguments.shape)
        layers = arguments.layers or layers_that_fit(shape, DTYPES[config.target.dtype], ranks.device)
        with step.run_of_shape(config, ranks, shape, layers, arguments.length) as made:
            return step.measure(made, arguments.measured, arguments.warmup)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    shared.add_argument("--threads", type=int, help="of a CPU; default torch's own choice")
    kinds = parser.add_subparsers(dest="what", required=True)
    _add_objective(kinds.add_parser("objective", parents=[shared], help="the chunked loss against the naive one"))
    _add_step(kinds.add_parser("step", parents=[shared], help="a whole step against its parts; takes sage-train's overrides"))
    return parser


def _add_objective(parser: argparse.ArgumentParser) -> None:
    sizes, terms = objective.Sizes(), Terms()
    parser.add_argument("--tokens", type=int, default=sizes.tokens, help="supervised positions")
    parser.add_argument("--vocabulary", type=int, default=sizes.vocabulary)
    parser.add_argument("--hidden", type=int, default=sizes.hidden)
    parser.add_argument("--steps", type=int, default=sizes.steps, help="unrolled steps")
    parser.add_argument("--words", type=int, help="size of a draft vocabulary with a trained lm_head of its own")
    parser.add_argument("--chunk", type=int, default=terms.chunk_tokens, help="objective.chunk_tokens")
    parser.add_argument("--ce", type=float, default=1.0)
    parser.add_argument("--tv", type=float, default=terms.tv)
    parser.add_argument("--lk", type=float, default=terms.lk)
    parser.add_argument("--dtype", default="fp32", choices=[str(name) for name in Precision])
    parser.add_argument("--repeats", type=int, default=3)


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--measured", type=int, default=20, help="steps to time")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--shape", choices=list(SHAPES), help="a random target of these sizes in place of a folder's")
    parser.add_argument("--layers", type=int, help="text layers of --shape; default as many as fit")
    parser.add_argument("--length", type=int, default=2048, help="tokens per sequence of --shape")


if __name__ == "__main__":
    sys.exit(run(main))
