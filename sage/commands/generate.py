"""sage-generate: answers a prompt about images or videos with speculative decoding; text is printed as it is accepted.

Imports torch after the command line is checked.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from sage.commands import cli
from sage.decoding.settings import Sampling
from sage.drafts.pruning import Pruning
from sage.inputs.media import check_media
from sage.io.files import check_writable
from sage.trees import AUTOREGRESSIVE, FIRST_ANSWER_POLICY, POLICIES, with_options

DESCRIPTION = "Answers a prompt about images or videos with speculative decoding; text is printed as it is accepted."
GREEN, RESET, DIM = "\x1b[32m", "\x1b[0m", "\x1b[2m"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = cli.new_parser("sage-generate", description=DESCRIPTION)
    add = parser.add_argument
    cli.add_model_options(parser)
    add("--image", action="append", default=[], help="path or URL of an image; can be repeated")
    add("--video", action="append", default=[], help="video file or folder of frames; can be repeated")
    add("--prompt", help="text of the prompt")
    text = f"one of {', '.join(POLICIES)}, or one with options: chain:depth=2; cost_aware is the fastest for many answers of "
    text += "one process"
    add("--policy", default=FIRST_ANSWER_POLICY, help=f"{text}, %(default)s (the default) for the first one")
    cli.add_settings(parser, Sampling)
    add("--prune", type=float, default=0.0, help="share of visual tokens removed from the draft's input (default: %(default)s)")
    add(
        "--prune-method",
        default="attention",
        help="how visual tokens are selected: attention, uniform or random (default: %(default)s)",
    )
    cli.add_load_options(parser, cli.FAST_DTYPE)
    add(
        "--check-device",
        action="store_true",
        help="print attention kernels, bandwidth, time of a pass and synchronizations on this device instead of an answer",
    )
    add(
        "--explain",
        action="store_true",
        help="draw the tree of every round, mark (*) what was accepted, and print the policy's decision",
    )
    add(
        "--trace",
        metavar="FILE.html",
        help="write a page that shows every round: trees, probabilities, times, and the time without the draft",
    )
    add("--show-drafted", action="store_true", help="print accepted draft tokens in green")
    return parser.parse_args(argv)


def main() -> None:
    """Console entry point."""

    def run() -> None:
        args = parse_args()
        check(args)
        (_check_device if args.check_device else _generate)(args)

    sys.exit(cli.run(run))


def check(args: argparse.Namespace) -> None:
    """Refuses mistakes of the command line before anything is loaded; imports no torch.

    Raises:
        ValueError: an unknown policy, a number out of range, no prompt, or an image, video, draft or target that is missing.
    """
    policy, _ = with_options(args.policy)
    Sampling.from_attributes(args)
    Pruning(args.prune, args.prune_method, args.seed)
    if args.trace:
        _check_trace(args)
    if not args.check_device:
        _content(args)
        for path in (path for path in args.image if not path.startswith(("http://", "https://"))):
            check_media(path)
        for path in args.video:
            check_media(path, "video")
        if policy != AUTOREGRESSIVE and not args.draft:
            raise ValueError(
                f"--draft: missing, and the policy {policy!r} needs one; give a draft folder or --policy autoregressive"
            )
    cli.named_models(args)


def _check_trace(args: argparse.Namespace) -> None:
    """Refuses a page that cannot be written; CannotWrite names the path."""
    if args.check_device:
        raise ValueError("--trace: has no effect with --check-device, which decodes no answer; remove one")
    if Path(args.trace).suffix != ".html" or Path(args.trace).is_dir():
        raise ValueError(f"--trace {args.trace}: is no name of a page; give FILE.html")
    check_writable(Path(args.trace))


def _check_device(args: argparse.Namespace) -> None:
    from sage.commands.device_check import check_device

    target, draft = _load(args)
    for name, value in check_device(target, draft, with_options(args.policy)[0]):
        print(f"{name:<20}{value}", flush=True)


def _generate(args: argparse.Namespace) -> None:
    import sage
    from sage.commands.explain import explanation
    from sage.decoding.generation import pieces, start
    from sage.replay.trace import TraceRecorder, decode_race

    messages = [{"role": "user", "content": _content(args)}]
    name, options = with_options(args.policy)
    policy, sampling = sage.policy(name, **options), Sampling.from_attributes(args)
    target, draft = _load(args)
    inputs = target.prepare(messages)
    pruning = Pruning(args.prune, args.prune_method, args.seed)
    generation = start(target, draft, inputs, policy=policy, sampling=sampling, pruning=pruning)
    recorder = TraceRecorder(generation) if args.trace else None
    is_green = args.show_drafted and cli.has_colors(sys.stdout)
    rounds: list[Any] = []

    def finish() -> None:
        """Ends the line of the answer, complete or interrupted, and reports what was decoded."""
        print(flush=True)
        if args.explain:
            for line in explanation(rounds, generation.stats, policy, target.processor.tokenizer):
                _print_dim(line)
        if generation.stats.new_tokens:
            _report(generation.stats, is_green and cli.has_colors(sys.stderr))

    def keep(round_: Any) -> None:
        if args.explain:
            rounds.append(round_)
        if recorder is not None:
            recorder.add(round_)

    try:
        for piece in pieces(generation, keep):
            print(f"{GREEN}{piece.text}{RESET}" if is_green and piece.is_drafted else piece.text, end="", flush=True)
    except KeyboardInterrupt:
        finish()
        raise
    finish()
    if recorder is not None:
        race = decode_race(target, inputs, sampling)
        recorder.trace({"draft": args.draft or "none"}, messages, race).save(args.trace)
        _print_dim(f"trace: {args.trace}")


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


def _report(stats: Any, show_drafted: bool) -> None:
    rest, passes = stats.new_tokens - 1, stats.target_passes
    text = f"{stats.new_tokens} token{'s' if rest else ''}: 1 from the prefill"
    if passes:
        rate = rest / stats.decode_s if stats.decode_s else 0.0
        noun = "passes" if passes > 1 else "pass"
        text += f", {rest} from {passes} target {noun} ({rest / passes:.2f} per pass), {rate:.0f} tokens/s"
    _print_dim(f"{text}; {GREEN}green{RESET}{DIM} = drafted and accepted" if show_drafted else text)


def _print_dim(line: str) -> None:
    print(f"{DIM}{line}{RESET}" if cli.has_colors(sys.stderr) else line, file=sys.stderr)
