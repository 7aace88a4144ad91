"""sage-generate: an answer about your own picture, drafted and verified, streamed as it is accepted."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from sage import cli
from sage.dtypes import SHORT_NAMES, torch_dtype

DRAFTED, PLAIN, DIM = "\x1b[32m", "\x1b[0m", "\x1b[2m"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="sage-generate", description=__doc__)
    parser.add_argument("--target", help="target folder or hub id; default: the one the draft was trained for")
    parser.add_argument("--draft", help="draft folder, for example runs/demo/draft; not needed for autoregressive")
    parser.add_argument("--image", action="append", default=[], help="a picture (path or URL); repeat for several")
    parser.add_argument("--video", action="append", default=[], help="a folder of frames or a video file; repeat for several")
    parser.add_argument("--prompt", required=True, help="what to ask")
    parser.add_argument("--policy", default="sage", help="tree policy, see sage.POLICIES")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--min-new-tokens", type=int, default=0)
    parser.add_argument("--stop", action="append", default=[], help="a text that ends the answer; repeat for several")
    parser.add_argument("--bad-words", action="append", default=[], help="a text never to emit; repeat for several")
    parser.add_argument("--prune", type=float, default=0.0, help="share of the visual tokens the draft does not read")
    parser.add_argument("--prune-method", default="attention", help="attention, uniform or random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="float32", choices=tuple(SHORT_NAMES))
    parser.add_argument("--explain", action="store_true", help="say for every round why its tree was shaped as it was")
    parser.add_argument("--show-drafted", action="store_true", help="colour what the draft guessed and the target kept")
    return parser.parse_args(argv)


def main() -> None:
    """Console entry."""
    sys.exit(cli.run(lambda: _generate(parse_args())))


def _generate(args: argparse.Namespace) -> None:
    from transformers.utils import logging

    import sage
    from sage.generation import pieces, start

    logging.disable_progress_bar()
    messages = [{"role": "user", "content": _content(args)}]
    policy = sage.policy(args.policy)
    path = _target_path(args)
    if policy.num_candidates and not args.draft:
        raise ValueError(
            f"--draft: missing, and the policy {args.policy!r} needs one; give a draft folder or --policy autoregressive"
        )
    target = sage.load_target(path, dtype=torch_dtype(args.dtype), device=cli.resolve_device(args.device))
    draft = sage.load_draft(args.draft, target) if args.draft else None
    generation = start(
        target,
        draft,
        target.prepare(messages),
        policy=policy,
        sampling=sage.Sampling.from_attributes(args),
        pruning=sage.Pruning(args.prune, args.prune_method, args.seed),
    )
    for piece in pieces(generation):
        text = f"{DRAFTED}{piece.text}{PLAIN}" if args.show_drafted and piece.is_drafted else piece.text
        print(text, end="", flush=True)
    print()
    if args.explain:
        _explain(policy, generation.stats)
    _report(generation.stats, args.show_drafted)


def _content(args: argparse.Namespace) -> list[dict[str, Any]]:
    if not args.prompt.strip():
        raise ValueError("--prompt: empty; say what the target should do, for example 'Describe the image.'")
    media = [{"type": kind, kind: source} for kind in ("image", "video") for source in getattr(args, kind)]
    return [*media, {"type": "text", "text": args.prompt}]


def _target_path(args: argparse.Namespace) -> str:
    from sage.model_files import read_config

    if args.target:
        return args.target
    if not args.draft:
        raise ValueError("--target: missing; give a target folder or hub id, or a --draft that remembers its target")
    path = read_config(args.draft).get("target_path")
    if not path:
        raise ValueError(f"--draft: {args.draft}: it does not say its target; give --target as well")
    return str(path)


def _explain(policy: Any, stats: Any) -> None:
    for number, entry in enumerate(stats.rounds_log, start=1):
        tree = f"{entry['nodes']:2} nodes {entry['depth']:2} deep, {entry['accepted']} accepted"
        line = f"round {number:3}: {tree}  {policy.explain(entry)}".rstrip()
        print(f"{DIM}{line}{PLAIN}" if sys.stderr.isatty() else line, file=sys.stderr)


def _report(stats: Any, show_drafted: bool) -> None:
    legend = f"; {DRAFTED}coloured{PLAIN}{DIM} = guessed by the draft and kept by the target" if show_drafted else ""
    rate = (stats.new_tokens - 1) / stats.decode_s if stats.decode_s else 0.0
    line = (
        f"{stats.new_tokens} tokens in {stats.target_passes} target passes "
        f"({stats.tokens_per_target_pass:.2f} tokens per pass), {rate:.0f} tokens/s{legend}"
    )
    if not stats.target_passes:
        line = f"1 token, from the prefill{legend}"
    print(f"{DIM}{line}{PLAIN}" if sys.stderr.isatty() or show_drafted else line, file=sys.stderr)


if __name__ == "__main__":
    main()
