"""sage-export: a trained draft for vLLM or SGLang, checked before anyone serves it.

sage-export RUN_OR_DRAFT --format eagle3 --out DIR        write an export (also: speculators, eagle --flavour vllm|sglang)
sage-export --check DIR [--target DIR]                    examine anybody's draft: what is wrong, what an engine would do
sage-export --inspect DIR                                 what a folder is, and whether it is whole
sage-export --import DIR --target DIR --out DIR           an EAGLE-3 draft made elsewhere, for our decoder
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sage import cli
from sage.dtypes import SHORT_NAMES, torch_dtype

if TYPE_CHECKING:
    from checkpoints.export.exporting import Options


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="sage-export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", nargs="?", help="a run's folder or a draft's")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", metavar="DIR", help="examine a draft's folder, ours or anybody's")
    mode.add_argument("--inspect", metavar="DIR", help="say what a folder is")
    mode.add_argument("--import", metavar="DIR", dest="foreign", help="turn a foreign EAGLE-3 draft into one of ours")
    parser.add_argument("--out", metavar="DIR", help="the folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace what sage-export wrote to --out before")
    parser.add_argument(
        "--target", metavar="DIR", help="the target's folder or hub id; default: where the draft remembers it from"
    )
    _add_export(parser.add_argument_group("export"))
    _add_import(parser.add_argument_group("import"))
    parser.add_argument("--json", action="store_true", help="for --check and --inspect: JSON instead of text")
    return parser.parse_args(argv)


def _add_export(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--format", help="eagle3 (vLLM and SGLang), speculators (vLLM), or eagle (with --flavour)")
    group.add_argument("--flavour", choices=("vllm", "sglang"), help="the engine, for --format eagle")
    group.add_argument("--dtype", default="bfloat16", choices=tuple(SHORT_NAMES))
    group.add_argument(
        "--target-name", metavar="ID", help="how configs and commands call the target; default: as it was loaded"
    )
    group.add_argument("--draft", choices=("draft", "draft_best"), help="which draft of a run; default: the best one")
    group.add_argument(
        "--embedding",
        action=argparse.BooleanOptionalAction,
        help="write the target's token embedding too; default: only for speculators",
    )
    group.add_argument("--allow-unserved", action="store_true", help="export although no engine serves the target's family")
    group.add_argument("--allow-uncompressed", action="store_true", help="export a draft without its visual compressor")
    group.add_argument("--license", help="SPDX name for the card; default: said to be not stated")
    group.add_argument("--license-link", metavar="URL")
    group.add_argument("--push-to-hub", metavar="OWNER/NAME", help="upload the finished export")
    group.add_argument("--private", action="store_true", help="with --push-to-hub: a private repository")


def _add_import(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--levels", metavar="A,B,C", help="the k of hidden_states[k] it was trained on, where its config is unclear"
    )
    group.add_argument("--image-inputs", choices=("embed", "token"), help="what it saw at picture positions; default: embed")
    group.add_argument(
        "--use-target-rope", action="store_true", help="read its positions as the target's, whatever its config says"
    )


def main() -> None:
    """Console entry."""
    sys.exit(cli.run(lambda: _run(parse_args())))


def _run(args: argparse.Namespace) -> int:
    _check_modes(args)
    if args.inspect:
        return _inspect(args)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # transformers touches DeepSpeed where it is installed; it would look around
    from transformers.utils import logging

    logging.disable_progress_bar()
    if args.check:
        return _check(args)
    return _import(args) if args.foreign else _export(args)


def _check_modes(args: argparse.Namespace) -> None:
    """A setting that has no effect is a mistake."""
    asked = args.check or args.inspect or args.foreign
    if args.source and asked:
        raise ValueError(f"{args.source}: --check, --inspect and --import name their folder themselves; give one folder only")
    if not args.source and not asked:
        raise ValueError("give a run's or a draft's folder with --format and --out, or --check, --inspect or --import DIR")
    if not (args.check or args.inspect) and not args.out:
        raise ValueError("--out: missing; give the folder to write")
    if args.json and not (args.check or args.inspect):
        raise ValueError("--json: only --check and --inspect answer in JSON")
    if (args.levels or args.image_inputs or args.use_target_rope) and not args.foreign:
        raise ValueError("--levels, --image-inputs and --use-target-rope say how to read a foreign draft: they need --import")
    if args.private and not args.push_to_hub:
        raise ValueError("--private: has no effect without --push-to-hub")
    exporting = (
        "format",
        "flavour",
        "draft",
        "target_name",
        "license",
        "license_link",
        "push_to_hub",
        "allow_unserved",
        "allow_uncompressed",
    )
    given = [name for name in exporting if getattr(args, name)]
    if asked and given:
        raise ValueError(f"--{given[0].replace('_', '-')}: is for exporting, not for --check, --inspect or --import")


def _inspect(args: argparse.Namespace) -> int:
    from checkpoints.inspect import describe

    found = describe(Path(args.inspect))
    print(json.dumps(found.to_dict(), indent=2) if args.json else found.text())
    return 0 if found.is_whole else cli.EXIT_USER


def _check(args: argparse.Namespace) -> int:
    from checkpoints.export import TargetFacts, check_folder
    from checkpoints.export.writing import settle

    folder = Path(args.check)
    settle(folder)
    check = check_folder(folder, TargetFacts.of_folder(args.target) if args.target else None)
    if args.json:
        lists = {"errors": check.errors, "warnings": check.warnings}
        content = {"format": check.format, "flavour": check.flavour, "notes": check.notes}
        print(json.dumps({**content, **{key: [vars(f) for f in found] for key, found in lists.items()}}, indent=2))
        return cli.EXIT_USER if check.errors else 0
    for kind, found in (("error", check.errors), ("warning", check.warnings)):
        for finding in found:
            print(f"{kind}: {finding}")
    for note in check.notes:
        print(f"note: {note}")
    what = f"{check.format or 'unknown format'}{f' for {check.flavour}' if check.flavour else ''}"
    verdict = f"{len(check.errors)} errors: do not serve this" if check.errors else "whole, and what its engines expect"
    print(f"{folder}: {what}; {verdict}")
    return cli.EXIT_USER if check.errors else 0


def _export(args: argparse.Namespace) -> int:
    from checkpoints.export import export
    from checkpoints.export.formats.layout import Format

    if not args.format:
        raise ValueError(f"--format: missing; choose one of {', '.join(Format)}")
    done = export(args.source, args.out, args.format, _options(args))
    print(f"draft: {done.source.draft}{f', {done.source.step} steps' if done.source.step is not None else ''}")
    for warning in [*done.warnings, *map(str, done.check.warnings)]:
        print(f"warning: {warning}")
    moved = f"rounding to {args.dtype} moves outputs by up to {done.reload.largest:.3g}"
    print(f"{done.folder}: checked, reloaded bit for bit; {moved}")
    if args.push_to_hub:
        from checkpoints.export.hub import push

        print(push(done.folder, args.push_to_hub, args.private))
    return 0


def _options(args: argparse.Namespace) -> Options:

    from checkpoints.export import Allowed, Flavour
    from checkpoints.export.exporting import Options

    return Options(
        flavour=Flavour(args.flavour) if args.flavour else None,
        dtype=torch_dtype(args.dtype),
        target=args.target,
        target_name=args.target_name,
        embedding=args.embedding,
        overwrite=args.overwrite,
        name=args.push_to_hub,
        draft=args.draft,
        licence=args.license,
        licence_link=args.license_link,
        allowed=Allowed(unserved=args.allow_unserved, uncompressed=args.allow_uncompressed),
    )


def _import(args: argparse.Namespace) -> int:
    from checkpoints.export import Reading, convert

    if not args.target:
        raise ValueError("--target: missing; a draft is imported for one target: give its folder or hub id")
    levels = None
    if args.levels:
        try:
            levels = tuple(int(part) for part in args.levels.split(","))
        except ValueError as error:
            raise ValueError(f"--levels {args.levels}: give three whole numbers like 2,14,25") from error
    reading = Reading(levels=levels, image_inputs=args.image_inputs, use_target_rope=args.use_target_rope)
    out = convert(args.foreign, args.target, args.out, reading, args.overwrite)
    print(f"{out}: imported; measure it with sage-validate draft={out} target.path={args.target}")
    return 0


if __name__ == "__main__":
    main()
