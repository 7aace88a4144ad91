"""Command line of the bench: compares policies; `policies` lists the policies.

Imports torch after the command line is checked.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from sage.bench import options
from sage.commands.cli import find_models, load_options, new_parser, run
from sage.io.files import naming_write_errors, write_json
from sage.io.progress import progress_callback


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; the first argument may be the subcommand `policies`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["policies"]:
        new_parser("sage-bench policies", description="The policies with their rules and options.").parse_args(arguments[1:])
        print(options.policy_table())
        return
    args = options.compare_parser().parse_args(arguments)
    options.check_compare(args)
    compare(args, shlex.join(["python", "-m", "sage.bench", *arguments]))


def compare(args: argparse.Namespace, command: str) -> None:
    """Measures policies and baselines, prints the table and writes the report, after Ctrl-C of the prompts that are complete.

    `command` is recorded in the report.
    """
    from transformers.utils import logging as transformers_logging

    import sage
    from sage.bench.measurement import load_prompts, measure
    from sage.bench.report import build_report
    from sage.bench.report_table import format_table
    from sage.bench.runners import HF_ASSISTED, PolicyRunner, Runner, baseline_runners
    from sage.runtime.modes import resolve_pass_mode

    transformers_logging.set_verbosity_error()  # assisted generation logs warnings about its own defaults
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    variants, sampling = options.variants(args.policies, args.policy), sage.Sampling.from_attributes(args)
    policies = options.new_policies(variants)
    placement = load_options(args)
    path, folder = find_models(args)
    target = sage.load_target(path, **placement)
    draft = None if folder is None else sage.load_draft(folder, target)
    runners: list[Runner] = [
        PolicyRunner(target, draft, label, policy, is_first_answer=args.first_answer) for label, policy in policies.items()
    ]
    baselines = [*options.baselines(args.baselines), *([HF_ASSISTED] if args.assistant else [])]
    runners += baseline_runners(target, baselines, args.assistant, draft, leave_out=list(policies))
    prompts = load_prompts(target, args.prompts, args.image, args.prompt, args.num_prompts, args.family)
    num_answers = len(prompts) * args.repeats * len(runners)
    target.passes = resolve_pass_mode(args.passes, target.device.type, num_answers, target.is_plain)
    progress, ends = progress_callback("measuring"), (KeyboardInterrupt,)
    measurement = measure(
        runners, prompts, sampling, args.repeats, args.warmup, progress, ends=ends, batch_size=args.batch_size
    )
    report = build_report(
        measurement,
        target,
        str(folder or "none"),
        list(policies),
        kinds={variant.label: variant.policy for variant in variants},
        options={variant.label: variant.options for variant in variants if variant.options},
        command=command,
        **({"first_answer": True} if args.first_answer else {}),
    )
    print(format_table(report))
    if args.out is not None:
        with naming_write_errors(Path(args.out)):
            write_json(Path(args.out), report)
        print(f"written: {args.out}")


def console() -> None:
    sys.exit(run(main))


if __name__ == "__main__":
    console()
