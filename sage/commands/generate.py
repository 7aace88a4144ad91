"""sage-generate: answers a prompt about images or videos with speculative decoding; text is printed as it is accepted."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from sage.commands import cli
from sage.decoding.settings import Sampling
from sage.trees import FIRST_ANSWER_POLICY, POLICIES

GREEN, RESET, DIM = "\x1b[32m", "\x1b[0m", "\x1b[2m"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = cli.new_parser("sage-generate", description=__doc__)
    add = parser.add_argument
    cli.add_model_options(parser)
    add("--image", action="append", default=[], help="path or URL of an image; can be repeated")
    add("--video", action="append", default=[], help="video file or folder of frames; can be repeated")
    add("--prompt", help="text of the prompt")
    text = f"one of {', '.join(POLICIES)}; cost_aware is the fastest for many answers of one process"
    add("--policy", default=FIRST_ANSWER_POLICY, help=f"{text}, %(default)s (the default) for the first one")
    cli.add_settings(parser, Sampling)
    add("--prune", type=float, default=0.0, help="share of visual tokens removed from the draft's input (default: %(default)s)")
    add(
        "--prune-method",
        default="attention",
        help="how visual tokens are selected: attention, uniform or random (default: %(default)s)",
    )
    cli.add_device_option(parser, "auto")
    cli.add_device_map_option(parser)
    cli.add_passes_option(parser)
    cli.add_dtype_option(
        parser, None, "dtype of target and draft (default: that of the checkpoint; on a CPU fp32, which is faster there)"
    )
    add(
        "--check-device",
        action="store_true",
        help="print attention kernels, bandwidth, time of a pass and synchronizations on this device instead of an answer",
    )
    add("--explain", action="store_true", help="print the tree and the policy's decision of every round")
    add("--show-drafted", action="store_true", help="print accepted draft tokens in green")
    return parser.parse_args(argv)


def main() -> None:
    """Console entry point."""

    def run() -> None:
        args = parse_args()
        (_check_device if args.check_device else _generate)(args)

    sys.exit(cli.run(run))


def _check_device(args: argparse.Namespace) -> None:
    from sage.commands.device_check import check_device

    target, draft = _load(args)
    for name, value in check_device(target, draft, args.policy):
        print(f"{name:<20}{value}", flush=True)


def _generate(args: argparse.Namespace) -> None:
    import sage
    from sage.decoding.generation import pieces, start

    messages = [{"role": "user", "content": _content(args)}]
    policy, sampling = sage.policy(args.policy), Sampling.from_attributes(args)
    if policy.num_candidates and not args.draft:
        raise ValueError(
            f"--draft: missing, and the policy {args.policy!r} needs one; give a draft folder or --policy autoregressive"
        )
    target, draft = _load(args)
    generation = start(
        target,
        draft,
        target.prepare(messages),
        policy=policy,
        sampling=sampling,
        pruning=sage.Pruning(args.prune, args.prune_method, args.seed),
    )
    is_green = args.show_drafted and cli.has_colors(sys.stdout)
    try:
        for piece in pieces(generation):
            print(f"{GREEN}{piece.text}{RESET}" if is_green and piece.is_drafted else piece.text, end="", flush=True)
    except KeyboardInterrupt:
        _finish(args, policy, generation.stats)
        raise
    _finish(args, policy, generation.stats)


def _finish(args: argparse.Namespace, policy: Any, stats: Any) -> None:
    """Ends the line of the answer, complete or interrupted, and reports what was decoded."""
    print(flush=True)
    if args.explain:
        _explain(policy, stats)
    if stats.new_tokens:
        _report(stats, args.show_drafted and cli.has_colors(sys.stdout) and cli.has_colors(sys.stderr))


def _load(args: argparse.Namespace) -> tuple[Any, Any]:
    """Returns the target, and the draft if there is one."""
    from transformers.utils import logging

    import sage

    logging.disable_progress_bar()
    path, folder = cli.find_models(args)
    target = sage.load_target(path, passes=args.passes, **cli.load_options(args, cpu_dtype="float32"))
    draft = sage.load_draft(folder, target) if folder is not None else None
    return target, draft


def _content(args: argparse.Namespace) -> list[dict[str, Any]]:
    if not (args.prompt or "").strip():
        raise ValueError("--prompt: missing or empty; give a text, for example 'Describe the image.'")
    media = [{"type": kind, kind: source} for kind in ("image", "video") for source in getattr(args, kind)]
    return [*media, {"type": "text", "text": args.prompt}]


def _explain(policy: Any, stats: Any) -> None:
    for number, entry in enumerate(stats.rounds_log, start=1):
        tree = f"{entry['nodes']:2} nodes {entry['depth']:2} deep, {entry['accepted']} accepted"
        line = f"round {number:3}: {tree}  {policy.explain(entry)}".rstrip()
        print(f"{DIM}{line}{RESET}" if cli.has_colors(sys.stderr) else line, file=sys.stderr)


def _report(stats: Any, show_drafted: bool) -> None:
    legend = f"; {GREEN}green{RESET}{DIM} = drafted and accepted" if show_drafted else ""
    rate = (stats.new_tokens - 1) / stats.decode_s if stats.decode_s else 0.0
    line = (
        f"{stats.new_tokens} tokens in {stats.target_passes} target passes "
        f"({stats.tokens_per_target_pass:.2f} tokens per pass), {rate:.0f} tokens/s{legend}"
    )
    if not stats.target_passes:
        line = f"1 token, from the prefill{legend}"
    print(f"{DIM}{line}{RESET}" if cli.has_colors(sys.stderr) else line, file=sys.stderr)
