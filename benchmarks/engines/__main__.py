"""`python -m benchmarks.engines`: decoding speed of our decoder, of vLLM and of llama.cpp, in turns on the same prompts.

Prompts are the held-out ones of the first draft's run. Without --server, vLLM runs on the CPU in an environment of its own
(`make engines-env`), and with --llama also llama.cpp (`make engines-llama`). With --server, a running OpenAI-compatible server
is measured; its key is read from OPENAI_API_KEY.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers.utils import logging as transformers_logging

from benchmarks.engines.comparison import report
from benchmarks.engines.measure import ENGINE_PYTHON, Comparison, measure
from benchmarks.figures import counts
from data_prep.config import KEY_VARIABLE
from sage.bench.options import baselines, new_policies, variants
from sage.bench.report import display_name, machine
from sage.bench.runners import BASELINES
from sage.commands.cli import add_device_option, add_passes_option, new_parser, run
from sage.drafts.location import DRAFT_HELP, find_draft, target_of
from sage.io.dtypes import LONG_NAMES, torch_dtype
from sage.io.files import write_json
from sage.io.machine import available_cores
from sage.io.ranges import PositiveInt, check_value, from_attributes

DEPTHS = "1,2,3,4,5"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the tables, and writes the figures to `--out`."""
    parser = new_parser("python -m benchmarks.engines", description=__doc__)
    draft_help = f"{DRAFT_HELP}; repeatable. The first one is also that of the engines, exported as eagle3, or of --server"
    parser.add_argument("--draft", metavar="[LABEL=]RUN", action="append", required=True, help=draft_help)
    parser.add_argument("--target", metavar="DIR", help="folder of the target; default: that of the first draft")
    parser.add_argument("--policies", metavar="A,B", help="our policies with default options; see `sage-bench --help`")
    parser.add_argument(
        "--policy", metavar="[LABEL=]NAME:KEY=VALUE,..", action="append", default=[], help="a policy with options"
    )
    parser.add_argument("--baselines", metavar="A,B", default="", help=f"of {', '.join(BASELINES)}; default: none")
    parser.add_argument("--num-speculative-tokens", metavar="N,N", help=f"of the engines; default: {DEPTHS}")
    parser.add_argument("--ngram", action="store_true", help="also measure vLLM's speculation by n-grams of the text")
    parser.add_argument("--llama", metavar="DIR", type=Path, help="llama.cpp too, in the folder of `make engines-llama`")
    parser.add_argument("--server", metavar="URL", help="a running OpenAI-compatible server, such as http://localhost:8000/v1")
    parser.add_argument("--server-model", metavar="NAME", help="its name of the target; default: the only one it serves")
    add_device_option(parser, "cpu")
    names = ", ".join(LONG_NAMES)
    dtype_help = f"dtypes of our decoders and vLLM, of {names}; default: fp32 on a CPU, else the target's"
    parser.add_argument("--dtypes", metavar="A,B", help=dtype_help)
    add_passes_option(parser)
    parser.add_argument("--prompts", type=int, default=32, help="number of prompts (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="timed turns of every decoder (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--threads", type=int, metavar="N", help="cores that all sides are pinned to; default: all")
    parser.add_argument(
        "--engine-python", dest="python", type=Path, default=ENGINE_PYTHON, help="with vLLM (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    comparison = _comparison(args)
    found = {"target": display_name(comparison.target), **measure(comparison), "machine": machine(args.device)}
    print(report(found))
    if args.out:
        write_json(args.out, found)
    return 0


def _comparison(args: argparse.Namespace) -> Comparison:
    """Returns the comparison of the command line; ValueError for an option that cannot be used."""
    if not args.server and not args.python.is_file():
        raise ValueError(f"--engine-python: {args.python}: no such file; `make engines-env` creates the environment")
    for option in ("prompts", "repeats", "max_new_tokens", "threads"):
        check_value(f"--{option.replace('_', '-')}", getattr(args, option), PositiveInt | None)
    without_draft = baselines(args.baselines)
    if args.server and args.num_speculative_tokens:
        raise ValueError("--num-speculative-tokens: has no effect with --server, which has its own setting")
    if args.server and args.ngram:
        raise ValueError("--ngram: has no effect with --server, which has its own setting")
    if not args.server and args.server_model:
        raise ValueError("--server-model: has no effect without --server")
    if args.server and args.llama:
        raise ValueError("--llama: has no effect with --server; start llama-server and give its URL, or leave out --server")
    if not args.server and args.device != "cpu":
        raise ValueError(f"--device {args.device}: has no effect without --server; vLLM runs on the CPU here")
    try:
        depths = counts(args.num_speculative_tokens or DEPTHS)
    except ValueError as error:
        raise ValueError(f"--num-speculative-tokens {error}") from error
    named = [text.rpartition("=") for text in args.draft]
    drafts = {label or Path(path).name: find_draft(path, "--draft") for label, _, path in named}
    compared = variants(args.policies, args.policy)
    new_policies(compared)  # refuses their options
    read = {
        "target": args.target or target_of(next(iter(drafts.values())), "--target"),
        "drafts": drafts,
        "variants": compared,
        "baselines": without_draft,
        "depths": depths,
        "num_prompts": args.prompts,
        "server_key": os.environ.get(KEY_VARIABLE, ""),
        "cores": available_cores()[: args.threads],
        "dtypes": [torch_dtype(name) for name in args.dtypes.split(",")] if args.dtypes else [None],
    }
    return from_attributes(Comparison, argparse.Namespace(**vars(args) | read))


if __name__ == "__main__":
    sys.exit(run(main))
