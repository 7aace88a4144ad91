"""Settings of measurements (also of the keys `decode.*`), the options of `sage-bench`, and the table of policies in the docs.

Imports no torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sage.commands.cli import CHECKPOINT_DTYPE, add_load_options, add_model_options, add_settings, named_models, new_parser
from sage.decoding.settings import DraftedAnswerSettings, Sampling
from sage.io.files import check_writable
from sage.io.ranges import NonNegativeInt, PositiveInt, Range, check_fields, from_attributes
from sage.io.tables import markdown_table
from sage.trees import AUTOREGRESSIVE, POLICIES, policy, policy_class, with_options

if TYPE_CHECKING:
    from sage.planning.base import Policy

HF_GENERATE, HF_STATIC, HF_COMPILED = "hf_generate", "hf_static_cache", "hf_compiled"
PROMPT_LOOKUP, HF_ASSISTED = "hf_prompt_lookup", "hf_assisted"
BASELINES = (AUTOREGRESSIVE, HF_GENERATE, HF_STATIC, HF_COMPILED, PROMPT_LOOKUP, HF_ASSISTED)
MeasuredTokens = Annotated[int, Range(ge=2, remedy="the prefill yields the first token, which is not decoded")]


@dataclass(kw_only=True)
class MeasurementSettings(DraftedAnswerSettings):
    """Settings of measured answers.

    Attributes:
        repeats: timed runs per prompt; the median counts.
        warmup: untimed runs of every policy before the first prompt.
        num_prompts: maximum number of prompts; without it, all.
        batch_size: prompts that a policy decodes together; Hugging Face decodes one by one. Speedups are then those of
            throughput.
    """

    max_new_tokens: MeasuredTokens = 128
    repeats: PositiveInt = 3
    warmup: NonNegativeInt = 1
    num_prompts: PositiveInt | None = None
    batch_size: PositiveInt = 1


DEFAULT_POLICIES = "chain,static,sage,cost_aware"
EXAMPLES = """\
several configurations of one policy side by side, on the captions of a file of prompts:
  sage-data action=convert data=pocket split=validation data.num_examples=400 out=prompts.jsonl
  sage-bench --draft runs/demo_pocket_qwen2_5_vl \\
      --prompts prompts.jsonl --family caption --num-prompts 16 \\
      --policies chain,cost_aware --policy sage:max_width=2,min_width=1 --policy deep=sage:max_depth=12,max_width=2 \\
      --baselines hf_generate,hf_prompt_lookup --out bench.json
  sage-report bench.json        # the same as a page with plots

policies and their options: sage-bench policies
"""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A configured policy; `label` is its name in the report."""

    label: str
    policy: str
    options: dict[str, Any] = field(default_factory=dict)


def variant(spec: str) -> Variant:
    """Parses `[LABEL=]POLICY[:option=value,...]`; the default label is the text itself. Raises ValueError for a part without
    `=`, or an unknown policy; builds none.
    """
    head, colon, tail = spec.partition(":")
    label, _, name = head.rpartition("=")
    try:
        name, options = with_options(name + colon + tail)
    except ValueError as error:
        raise ValueError(f"--policy {spec}: {error}") from error
    return Variant(label=label or spec, policy=name, options=options)


def variants(policies: str | None, specs: Sequence[str]) -> list[Variant]:
    """Returns the variants of `--policies`, with default options (`DEFAULT_POLICIES` without both), and of `--policy`. Raises
    ValueError for an unknown policy, or a label that occurs twice.
    """
    plain = names(("" if specs else DEFAULT_POLICIES) if policies is None else policies)
    if unknown := [name for name in plain if name not in POLICIES]:
        raise ValueError(f"--policies: {unknown[0]!r} is unknown; choose from {', '.join(POLICIES)}")
    found = [Variant(label=name, policy=name) for name in plain] + [variant(spec) for spec in specs]
    labels = [each.label for each in found]
    if twice := [label for label in labels if labels.count(label) > 1 or (label in BASELINES and label not in POLICIES)]:
        raise ValueError(f"--policy: {twice[0]!r} names two runners; write LABEL=POLICY:option=value with labels of your own")
    return found


def new_policies(variants: Sequence[Variant]) -> dict[str, Policy]:
    """Builds the policies by label. Raises ValueError for an unknown option, or a value that is not allowed."""
    built = {}
    for each in variants:
        try:
            built[each.label] = policy(each.policy, **each.options)
        except ValueError as error:
            raise ValueError(f"--policy {each.label}: {error}") from error
    return built


def check_compare(args: argparse.Namespace) -> None:
    """Refuses mistakes in the options of the comparison before torch is imported: raises ValueError for a number out of range,
    an unknown policy or baseline, or a missing draft or target.
    """
    check_fields(from_attributes(MeasurementSettings, args))
    needing = [each.label for each in variants(args.policies, args.policy) if each.policy != AUTOREGRESSIVE]
    baselines(args.baselines)
    if needing and args.draft is None:
        raise ValueError(f"--draft: missing; required by {', '.join(needing)}; give a draft folder")
    named_models(args)
    if args.out is not None:
        check_writable(Path(args.out))


def baselines(text: str) -> list[str]:
    """Returns the names of `--baselines`; ValueError for an unknown one."""
    found = names(text)
    if unknown := [name for name in found if name not in BASELINES]:
        raise ValueError(f"--baselines: {unknown[0]!r} is not a baseline; choose from {', '.join(BASELINES)}")
    return found


def names(text: str) -> list[str]:
    """Parses a list of names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def compare_parser() -> argparse.ArgumentParser:
    """Returns the parser of the comparison."""
    text = "Compares decoding policies and Hugging Face decoders, interleaved in one process."
    parser = new_parser("sage-bench", description=text, epilog=EXAMPLES)
    add_model_options(parser)
    group = parser.add_argument_group("policies and baselines")
    text = f"of {', '.join(POLICIES)}; with default options; default: {DEFAULT_POLICIES}, or none with --policy"
    group.add_argument("--policies", metavar="A,B", help=text)
    text = "a policy with options, see `sage-bench policies`; repeat to compare several configurations"
    group.add_argument("--policy", action="append", default=[], metavar="[LABEL=]NAME:KEY=VALUE,..", help=text)
    text = f"of {', '.join(BASELINES)}; default %(default)s"
    group.add_argument("--baselines", default=f"{HF_GENERATE},{PROMPT_LOOKUP}", metavar="A,B", help=text)
    text = "a smaller model; adds the baseline of Hugging Face assisted generation"
    group.add_argument("--assistant", metavar="DIR_OR_ID", help=text)
    group = parser.add_argument_group("prompts")
    text = "JSONL of chat messages, one conversation per line; relative image paths start at its folder"
    group.add_argument("--prompts", metavar="FILE", help=text)
    group.add_argument("--family", metavar="NAME", help="only the conversations of this task family")
    group.add_argument("--image", action="append", default=[], metavar="PATH", help="an image; may be repeated")
    group.add_argument("--prompt", metavar="TEXT", help="the question; without an image, a text-only prompt")
    add_settings(parser, MeasurementSettings)
    add_settings(parser, Sampling, "min_new_tokens")
    add_load_options(parser, CHECKPOINT_DTYPE)
    text = "a new policy for every run, as in a new process; with cost_aware:fresh_costs=true, times include measuring costs"
    parser.add_argument("--first-answer", action="store_true", help=text)
    parser.add_argument("--out", metavar="FILE", help="write the report as JSON, for `sage-report FILE`")
    return parser


def policy_table() -> str:
    """Returns a row per policy: name, first line of its docstring, options with defaults."""
    from sage.planning.base import defaults  # imports torch

    rows = []
    for name in POLICIES:
        kind = policy_class(name)
        rule = (kind.__doc__ or "").strip().splitlines()[0].rstrip(".")
        options = (f"`{option}` {_written(value)}" for option, value in defaults(kind).items())
        rows.append([f"`{name}`", rule, ", ".join(options)])
    return markdown_table(["policy", "rule", "options and defaults"], rows, "<")


def _written(default: Any) -> str:
    if isinstance(default, StrEnum):
        return " or ".join([default, *(other for other in type(default) if other != default)])
    if isinstance(default, Sequence):
        return f"({len(default)} paths of child ranks)"
    return f"{default:g}" if isinstance(default, float) else json.dumps(default)
