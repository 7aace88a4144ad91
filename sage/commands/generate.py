"""sage-generate: answers a prompt about images or videos with speculative decoding; imports torch after all checks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage.commands import cli
from sage.decoding.settings import Sampling
from sage.drafts.pruning import Pruning
from sage.inputs.media import check_media
from sage.io.files import check_writable
from sage.io.tables import counted
from sage.trees import AUTOREGRESSIVE, FIRST_ANSWER_POLICY, POLICIES, with_options

if TYPE_CHECKING:
    from sage.decoding.answer import Stats
    from sage.decoding.decoder import Round
    from sage.planning.base import Policy

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
    text = "how visual tokens are selected: attention, uniform or random (default: %(default)s)"
    add("--prune-method", default="attention", help=text)
    cli.add_load_options(parser, cli.FAST_DTYPE)
    text = "print attention kernels, bandwidth, time of a pass and synchronizations on this device instead of an answer"
    add("--check-device", action="store_true", help=text)
    text = "draw the tree of every round, mark (*) what was accepted, and print the policy's decision"
    add("--explain", action="store_true", help=text)
    text = "write a page that shows every round: trees, probabilities, times, and the time without the draft"
    add("--trace", metavar="FILE.html", help=text)
    add("--show-drafted", action="store_true", help="print accepted draft tokens in green")
    return parser.parse_args(argv)


def main() -> None:
    """Console entry point."""

    def run() -> None:
        args = parse_args()
        check(args)
        if not args.check_device:
            return _generate(args)
        from sage.commands.device_check import check_device

        for name, value in check_device(*_load(args), with_options(args.policy)[0]):
            print(f"{name:<20}{value}", flush=True)

    sys.exit(cli.run(run))


def check(args: argparse.Namespace) -> None:
    """Refuses mistakes of the command line by a ValueError before anything is loaded; imports no torch."""
    policy, _ = with_options(args.policy)
    Sampling.from_attributes(args)
    Pruning(args.prune, args.prune_method, args.seed)
    if args.trace:
        if args.check_device:
            raise ValueError("--trace: has no effect with --check-device, which decodes no answer; remove one")
        if Path(args.trace).suffix != ".html" or Path(args.trace).is_dir():
            raise ValueError(f"--trace {args.trace}: is no name of a page; give FILE.html")
        check_writable(Path(args.trace))
    if not args.check_device:
        _content(args)
        for path in args.image:
            if not path.startswith(("http://", "https://")):
                check_media(path)
        for path in args.video:
            check_media(path, "video")
        if policy != AUTOREGRESSIVE and not args.draft:
            raise ValueError(
                f"--draft: missing, and the policy {policy!r} needs one; give a draft folder or --policy autoregressive"
            )
    cli.named_models(args)


def _generate(args: argparse.Namespace) -> None:
    import sage
    from sage.decoding.generation import pieces, start
    from sage.tracing.trace import TraceRecorder, decode_race

    messages = [{"role": "user", "content": _content(args)}]
    name, options = with_options(args.policy)
    policy, sampling = sage.policy(name, **options), Sampling.from_attributes(args)
    target, draft = _load(args)
    inputs = target.prepare(messages)
    pruning = Pruning(args.prune, args.prune_method, args.seed)
    generation = start(target, draft, inputs, policy=policy, sampling=sampling, pruning=pruning)
    recorder = TraceRecorder(generation) if args.trace else None
    is_green = args.show_drafted and cli.has_colors(sys.stdout)
    rounds: list[Round] = []

    def finish() -> None:
        """Ends the line of the answer, complete or interrupted, and reports what was decoded."""
        print(flush=True)
        if args.explain:
            for line in explanation(rounds, generation.stats, policy, target.processor.tokenizer):
                _print_dim(line)
        if generation.stats.new_tokens:
            legend = f"; {GREEN}green{RESET}{DIM} = drafted and accepted" if is_green and cli.has_colors(sys.stderr) else ""
            _print_dim(_figures(generation.stats) + legend)

    def keep(round_: Round) -> None:
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


def _figures(stats: Stats) -> str:
    rest, passes = stats.new_tokens - 1, stats.target_passes
    text = f"{counted(stats.new_tokens, 'token')}: 1 from the prefill"
    if not passes:
        return text
    rate = rest / stats.decode_s if stats.decode_s else 0.0
    noun = "passes" if passes > 1 else "pass"
    return f"{text}, {rest} from {passes} target {noun} ({rest / passes:.2f} per pass), {rate:.0f} tokens/s"


def _print_dim(line: str) -> None:
    print(f"{DIM}{line}{RESET}" if cli.has_colors(sys.stderr) else line, file=sys.stderr)


def explanation(rounds: Sequence[Round], stats: Stats, policy: Policy, tokenizer: Any) -> Iterator[str]:
    """Yields the lines of `--explain` from all rounds: the prefill's token, then a summary and the tree of each round."""

    def text_of(token: int) -> str:
        return json.dumps(tokenizer.decode([token]), ensure_ascii=False)

    if rounds:
        yield f"prefill  : 1 token, {' '.join(map(text_of, rounds[0].tokens))}"
    for number, entry in enumerate(stats.rounds_log, start=1):
        size = f"{entry['nodes']:2} {'node ' if entry['nodes'] == 1 else 'nodes'} {entry['depth']:2} deep"
        yield f"round {number:3}: {size}, {entry['accepted']} accepted  {policy.explain(entry)}".rstrip()
        round_ = rounds[number] if number < len(rounds) else None  # an interrupted answer may lack its last round
        if round_ is not None and round_.tree is not None and len(round_.tree.tokens) > 1:
            accepted = set(round_.path[: round_.num_drafted + 1])
            yield from tree_lines(round_.tree.tokens, round_.tree.parents, accepted, text_of)


def tree_lines(
    tokens: Sequence[int], parents: Sequence[int], accepted: Collection[int], text_of: Callable[[int], str]
) -> Iterator[str]:
    """Draws a tree, one node a line, with a `*` before the nodes with `accepted` indices.

    `tokens`, `parents`: [N] each, the root first, parents before children; the root's parent is -1.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)

    def below(node: int, indent: str) -> Iterator[str]:
        for child in children.get(node, []):
            is_last = child == children[node][-1]
            mark = "* " if child in accepted else ""
            yield f"{indent}{'└─' if is_last else '├─'} {mark}{text_of(tokens[child])}"
            yield from below(child, indent + ("   " if is_last else "│  "))

    yield f"  {text_of(tokens[0])}"
    yield from below(0, "  ")
