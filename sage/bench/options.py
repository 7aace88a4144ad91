"""The command line of `python -m sage.bench`: its options, and how a policy with its options is written in one word."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sage
from sage.bench import costs as cost
from sage.bench.runners import BASELINES, HF_GENERATE, PROMPT_LOOKUP
from sage.bench.shapes import SHAPES
from sage.dtypes import LONG_NAMES

DEFAULT_POLICIES = "chain,static,sage"
EXAMPLES = """\
several configurations of one policy side by side, on the captions of a file of prompts:
  sage-data action=convert data=pocket split=validation data.num_examples=400 out=prompts.jsonl
  python -m sage.bench --target data_prep/pocket/targets/pocket_qwen2_5_vl --draft runs/demo/draft \\
      --prompts prompts.jsonl --family caption --num-prompts 16 \\
      --policies chain,cost_aware --policy sage:max_width=2,min_width=1 --policy deep=sage:max_depth=12,max_width=2 \\
      --baselines hf_generate,hf_prompt_lookup --out bench.json
  python -m train.report bench.json        # the same as a page with plots

a second mode measures what passes cost without any weights: python -m sage.bench costs --help
"""


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One of our policies as it takes part: `label` names it in the report, `policy` is its public name."""

    label: str
    policy: str
    options: dict[str, Any] = field(default_factory=dict)


def contestant(spec: str) -> Contestant:
    """Reads `[LABEL=]POLICY[:option=value,...]`; without a label the words themselves are the label.

    Raises:
        ValueError: a word that is no option=value, or a policy or option that does not exist.
    """
    head, _, tail = spec.partition(":")
    label, _, name = head.rpartition("=")
    options = {}
    for word in _names(tail):
        key, sign, value = word.partition("=")
        if not sign:
            raise ValueError(f"--policy {spec}: {word!r} is not an option; write POLICY:option=value,option=value")
        options[key] = _value(value)
    try:
        sage.policy(name, **options)
    except ValueError as error:
        raise ValueError(f"--policy {spec}: {error}") from error
    return Contestant(label=label or spec, policy=name, options=options)


def contestants(policies: str | None, specs: Sequence[str]) -> list[Contestant]:
    """Those of `--policies`, with their default options, then those of `--policy`; a few usual ones if neither is given.

    Raises:
        ValueError: an unknown policy or option, or a label used twice.
    """
    if policies is None:
        policies = "" if specs else DEFAULT_POLICIES
    names = _names(policies)
    if unknown := [name for name in names if name not in sage.POLICIES]:
        raise ValueError(f"--policies: {unknown[0]!r} is unknown; choose from {', '.join(sage.POLICIES)}")
    found = [Contestant(label=name, policy=name) for name in names] + [contestant(spec) for spec in specs]
    labels = [one.label for one in found]
    if twice := [label for label in labels if labels.count(label) > 1 or (label in BASELINES and label not in sage.POLICIES)]:
        raise ValueError(f"--policy: {twice[0]!r} names two runners; write LABEL=POLICY:option=value with labels of your own")
    return found


def _value(text: str) -> Any:
    """Numbers and true/false as such, anything else as text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def baselines(text: str) -> list[str]:
    """The names of `--baselines`."""
    return _names(text)


def counts(text: str) -> list[int]:
    """A list of positive whole numbers.

    Raises:
        ValueError: it is none.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise ValueError(f"{text!r}: not a list of counts; write positive whole numbers separated by commas")
    return found


def compare_parser() -> argparse.ArgumentParser:
    """Options of the first mode."""
    parser = argparse.ArgumentParser(
        prog="python -m sage.bench",
        description="Compares decoding policies and Hugging Face decoders side by side, interleaved in one process.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", required=True, metavar="DIR_OR_ID", help="the target model")
    parser.add_argument("--draft", metavar="DIR", help="the draft; not needed for the policy autoregressive alone")
    _contestant_options(parser)
    _prompt_options(parser)
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--min-new-tokens", type=int, default=0, metavar="N", help="no answer ends before; default: no limit")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, default=0, help="0 is off (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="1 is off (default)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3, help="timed runs per prompt; the median counts")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--dtype", choices=tuple(LONG_NAMES), help="default: the checkpoint's own")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument(
        "--replay", action="store_true", help="also say what every policy would have achieved on the same drafts"
    )
    parser.add_argument("--out", metavar="FILE", help="write the report as JSON; `python -m train.report FILE` draws it")
    return parser


def _contestant_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("who takes part")
    group.add_argument(
        "--policies",
        metavar="A,B",
        help=f"with their default options, of {', '.join(sage.POLICIES)}; default {DEFAULT_POLICIES} unless --policy is given",
    )
    group.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="[LABEL=]NAME:KEY=VALUE,..",
        help="a policy with options of its own, see docs/decoder.md; repeat it to compare several configurations",
    )
    group.add_argument(
        "--baselines",
        default=f"{HF_GENERATE},{PROMPT_LOOKUP}",
        metavar="A,B",
        help=f"of {', '.join(BASELINES)}; default %(default)s",
    )
    group.add_argument(
        "--assistant", metavar="DIR_OR_ID", help="a smaller model: adds Hugging Face assisted generation with it"
    )


def _prompt_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("on what")
    group.add_argument(
        "--prompts", metavar="FILE", help="JSONL of chat messages, one conversation per line; pictures by paths from its folder"
    )
    group.add_argument("--family", metavar="NAME", help="only the conversations of FILE that belong to this task family")
    group.add_argument("--image", action="append", default=[], metavar="PATH", help="a picture to ask about; may be repeated")
    group.add_argument("--prompt", metavar="TEXT", help="the question; without a picture, a text-only prompt")
    group.add_argument("--num-prompts", type=int, metavar="N", help="use at most N prompts")


def costs_parser() -> argparse.ArgumentParser:
    """Options of the second mode."""
    parser = argparse.ArgumentParser(
        prog="python -m sage.bench costs",
        description="Measures verification c_t(nodes, context) and draft levels c_d(width, context) on random weights.",
    )
    parser.add_argument("--shape", required=True, metavar="NAME", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--layers", type=int, metavar="N", help="layers to build; default: as many as fit, 2 on a CPU")
    parser.add_argument("--nodes", default=",".join(map(str, cost.NODES)), metavar="N,N")
    parser.add_argument("--widths", default=",".join(map(str, cost.WIDTHS)), metavar="N,N")
    parser.add_argument("--contexts", default=",".join(map(str, cost.CONTEXTS)), metavar="N,N")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--bandwidth", type=float, metavar="GB/S", help="measure nothing: the least times on a device of this memory bandwidth"
    )
    parser.add_argument("--dtype", choices=tuple(LONG_NAMES), default="bf16")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--project", metavar="FILE", help="a report.json whose bookkeeping to project to this shape")
    parser.add_argument("--out", metavar="FILE", help="write the tables as JSON")
    return parser
