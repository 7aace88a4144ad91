"""sage-export: exports a trained draft for vLLM or SGLang and checks it before it is served.

sage-export RUN --format eagle3 --out DIR                 write an export
sage-export --check DIR [--target DIR]                    list the errors of a draft and their effect in an engine
sage-export --inspect DIR                                 describe a folder and verify its checksums
sage-export --import DIR --target DIR --out DIR           convert a third-party draft for our decoder
sage-export RUN --serve-check DIR --engine-python PYTHON  serve an export with vLLM and compare it with our decoder
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from checkpoints.export.registry import FORMATS, check_format, flavoured, imported_drafts
from sage.commands import cli
from sage.drafts.location import DRAFT_HELP, find_draft
from sage.io.dtypes import torch_dtype
from sage.io.ranges import from_attributes
from sage.io.tables import counted
from sage.io.target_paths import path_of_target

SERVE_NUMBERS = {"num_prompts": 1, "max_new_tokens": 2, "depth": 1}  # option of a serve check -> its smallest value
ONLY = {  # modes -> options that have no effect in others
    ("export",): (
        *("format", "flavour", "report", "target_name", "license", "license_link", "push_to_hub"),
        *("allow_unserved", "allow_uncompressed", "converter"),
    ),
    ("import",): ("levels", "image_inputs", "use_target_rope"),
    ("serve_check",): ("engine_python", "page", *SERVE_NUMBERS),
    ("check", "inspect"): ("json",),
}
NEEDED = {  # an option and the modes that need it -> what to say without it
    ("source", "serve_check"): "--serve-check {serve_check}: RUN is missing; give the run or draft that it was exported from",
    ("source", "export"): "give the folder of a run or draft with --format and --out, or --check, --inspect or --import DIR",
    ("out", "export", "import"): "--out: missing; give the folder to write",
    ("format", "export"): f"--format: missing; choose one of {', '.join(FORMATS)}",
    ("target", "import"): "--target: missing; a draft is imported for one target: give its folder, hub id or name",
    ("engine_python", "serve_check"): "--engine-python: missing; give the interpreter of an environment with vLLM",
}
JSON_FIELDS = ("where", "found", "effect", "is_warning")  # of a finding


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = cli.new_parser("sage-export", description=__doc__)
    parser.add_argument("source", nargs="?", metavar="RUN", help=DRAFT_HELP)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", metavar="DIR", help="check the folder of a draft, of this project or third-party")
    mode.add_argument("--inspect", metavar="DIR", help="describe a folder and verify its checksums")
    mode.add_argument("--import", metavar="DIR", help=f"convert a third-party {imported_drafts()} draft")
    mode.add_argument("--serve-check", metavar="DIR", help="serve an export of RUN with vLLM and name the part at fault")
    add = parser.add_argument
    add("--out", metavar="DIR", help="folder to write")
    add("--overwrite", action="store_true", help="replace an existing export in --out")
    add("--target", metavar="TARGET", help="folder, hub id or name of the target; default: the one the draft was trained with")
    _add_export(parser.add_argument_group("export"))
    add = parser.add_argument_group("import").add_argument
    add("--levels", metavar="A,B,C", help="feature levels (k of hidden_states[k]), if the draft's config is ambiguous")
    add("--image-inputs", choices=("embed", "token"), help="draft inputs at image positions in training; default: embed")
    add("--use-target-rope", action="store_true", help="use the target's rope even if the draft's config specifies another")
    add = parser.add_argument_group("serve check").add_argument
    add("--engine-python", metavar="PYTHON", help="interpreter of an environment with vLLM")
    add("--num-prompts", type=int, metavar="N", help="prompts of the run's data.validation; default: 16")
    add("--max-new-tokens", type=int, metavar="N", help="maximum length of an answer, in tokens; default: 64")
    add("--depth", type=int, metavar="N", help="drafted tokens per round; default: 3")
    add("--page", metavar="FILE.html", help="page to write; default: EXPORT_serve_check.html beside the export")
    parser.add_argument("--json", action="store_true", help="with --check or --inspect: print JSON instead of text")
    return parser.parse_args(argv)


def _add_export(group: argparse._ArgumentGroup) -> None:
    *formats, last = (row.summary for row in FORMATS.values())
    flavours = dict.fromkeys(flavour for row in FORMATS.values() for flavour in row.flavours)
    add = group.add_argument
    add("--format", help=f"{', '.join(formats)}, or {last}")
    add("--flavour", choices=flavours, help=f"the engine or layout, for the formats {flavoured()}")
    cli.add_dtype_option(group, "bfloat16", "dtype of the weights (default: %(default)s)")
    add("--target-name", metavar="ID", help="name of the target in configs and serve commands; default: as it was loaded")
    add("--report", metavar="DIR", help="measurements of the model card, such as RUN/checks/NAME; default: the run's own")
    text = "write the target's token embedding too; default: if the format has it"
    add("--embedding", action=argparse.BooleanOptionalAction, help=text)
    add("--allow-unserved", action="store_true", help="export although no engine serves drafts for the target's family")
    add("--allow-uncompressed", action="store_true", help="export a draft without its visual compressor")
    add("--converter", metavar="DIR", help="source folder of llama.cpp, whose converter is called")
    add("--license", help="SPDX identifier for the model card; default: not stated")
    add("--license-link", metavar="URL", help="URL of the license text")
    add("--push-to-hub", metavar="OWNER/NAME", help="upload the finished export")
    add("--private", action="store_true", help="with --push-to-hub: create a private repository")


def main() -> None:
    """Console entry point."""
    sys.exit(cli.run(lambda: _run(parse_args())))


def _run(args: argparse.Namespace) -> int:
    mode = next((name for name in ("inspect", *MODES) if getattr(args, name, None)), "export")
    _check_args(args, mode)
    if mode == "inspect":
        return _inspect(args)
    target = _check_values(args, mode)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # transformers imports DeepSpeed if installed, which would probe for devices
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    return MODES[mode](args, target)


def _check_args(args: argparse.Namespace, mode: str) -> None:
    """Refuses missing or contradictory options, and options without effect."""
    if args.source and mode in ("check", "inspect", "import"):
        raise ValueError(f"{args.source}: --check, --inspect and --import already give a folder; give one folder only")
    for (name, *modes), problem in NEEDED.items():
        if mode in modes and not getattr(args, name):
            raise ValueError(problem.format_map(vars(args)))
    for owners, names in ONLY.items():
        if mode not in owners and (given := [name for name in names if getattr(args, name) not in (None, False)]):
            with_or_without = f"without {' or '.join(map(_option, owners))}" if mode == "export" else f"with {_option(mode)}"
            raise ValueError(f"{_option(given[0])}: has no effect {with_or_without}")
    if args.private and not args.push_to_hub:
        raise ValueError("--private: has no effect without --push-to-hub")
    if args.out and mode == "serve_check":
        raise ValueError("--out: has no effect with --serve-check; --page names the page that it writes")


def _check_values(args: argparse.Namespace, mode: str) -> str | None:
    """Refuses an unknown format, a missing draft or target, or a wrong number before torch is imported; returns the target."""
    target = args.target and path_of_target(args.target)
    if mode in ("check", "import") and not Path(folder := getattr(args, mode)).is_dir():
        raise ValueError(f"{folder}: no such folder")
    if args.page and (Path(args.page).suffix != ".html" or Path(args.page).is_dir()):
        raise ValueError(f"--page {args.page}: is no name of a page; give FILE.html")
    for name, least in SERVE_NUMBERS.items():
        if (value := getattr(args, name)) is not None and value < least:
            raise ValueError(f"{_option(name)}: {value} is too small; give at least {least}")
    if args.source:
        find_draft(args.source)
    if mode == "export":
        check_format(args.format)
        needs_converter = FORMATS[args.format].needs_converter
        if needs_converter and not args.converter:
            remedy = "give its source folder"
            raise ValueError(f"--converter: missing; --format {args.format} calls llama.cpp's converter: {remedy}")
        if args.converter and not needs_converter:
            raise ValueError(f"--converter: has no effect with --format {args.format}")
    return target


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _inspect(args: argparse.Namespace) -> int:
    from checkpoints.inspect import inspect_folder

    description = inspect_folder(Path(args.inspect))
    print(json.dumps(description.to_dict(), indent=2) if args.json else description.text())
    return cli.EXIT_DONE if description.is_intact else cli.EXIT_USER


def _check(args: argparse.Namespace, target: str | None) -> int:
    from checkpoints.export.importer import check_folder
    from checkpoints.export.target import TargetFacts
    from sage.io.folders import restore_interrupted

    folder = Path(args.check)
    restore_interrupted(folder)
    result = check_folder(folder, TargetFacts.of_folder(target) if target else None)
    found: dict[str, list[Any]] = {"errors": result.errors, "warnings": result.warnings, "notes": result.notes}
    format_ = result.format
    if args.json:
        content: dict[str, Any] = {"format": format_ and format_.name, "flavour": format_ and format_.flavour}
        for key, findings in found.items():
            content[key] = [
                each if key == "notes" else {name: getattr(each, name) for name in JSON_FIELDS} for each in findings
            ]
        print(json.dumps(content, indent=2))
    else:
        verdict = f"{counted(len(result.errors), 'error')}: do not serve this" if result.errors else "valid"
        lines = [f"{key.removesuffix('s')}: {finding}" for key, findings in found.items() for finding in findings]
        print("\n".join([*lines, f"{folder}: {format_.label if format_ else 'unknown format'}; {verdict}"]))
    return cli.EXIT_USER if result.errors else cli.EXIT_DONE


def _export(args: argparse.Namespace, target: str | None) -> int:
    from checkpoints.export.exporter import ExportOptions, export, serve_commands
    from checkpoints.export.folder import push_to_hub
    from checkpoints.export.serving import IncompatibleDraft

    options = from_attributes(ExportOptions, args, target=target, dtype=torch_dtype(args.dtype), name=args.push_to_hub)
    try:
        result = export(args.source, args.out, args.format, options)
    except IncompatibleDraft as error:
        print("\n".join(f"error: {line}" for line in error.lines), file=sys.stderr)
        return cli.EXIT_USER
    print(f"draft: {result.source.draft}{f', {result.source.step} steps' if result.source.step is not None else ''}")
    for warning in [*result.warnings, *map(str, result.check.warnings)]:
        print(f"warning: {warning}")
    change = f"rounding to {result.dtype} changes outputs by up to {result.max_abs_difference:.3g}"
    print(f"{result.folder}: valid, bit-identical after reloading; {change}")
    if args.converter:
        print("\n".join(serve_commands(result.format, result.facts, str(result.folder)).values()))
    if args.push_to_hub:
        print(push_to_hub(result.folder, args.push_to_hub, args.private))
    return cli.EXIT_DONE


def _serve_check(args: argparse.Namespace, target: str | None) -> int:
    from sage.io.page import write_page
    from train.serve_check.check import ServeCheck, serve_check

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    numbers: dict[str, Any] = {name: getattr(args, name) for name in SERVE_NUMBERS if getattr(args, name) is not None}
    source, folder, python = Path(args.source), Path(args.serve_check), Path(args.engine_python)
    page = Path(args.page) if args.page else None
    options = ServeCheck(source=source, export=folder, python=python, target=target, page=page, **numbers)
    result = serve_check(options)
    print(result.text(), flush=True)
    if result.page:
        write_page(options.page_path, result.page)
        print(f"page: {options.page_path}", file=sys.stderr)
    return cli.EXIT_USER if result.faults else cli.EXIT_DONE


def _import(args: argparse.Namespace, target: str | None) -> int:
    from checkpoints.export.formats.base import ImportOptions
    from checkpoints.export.importer import convert

    try:
        levels = tuple(int(level) for level in args.levels.split(",")) if args.levels else None
    except ValueError as error:
        raise ValueError(f"--levels {args.levels}: give three integers like 2,14,25") from error
    assert target is not None
    options = from_attributes(ImportOptions, args, levels=levels)
    out = convert(getattr(args, "import"), target, args.out, options, args.overwrite)
    words = shlex.join(["sage-validate", f"draft={out}", f"target.path={target}"])
    print(f"{out}: imported; measure it with {words}")
    return cli.EXIT_DONE


MODES = {"check": _check, "import": _import, "serve_check": _serve_check, "export": _export}

if __name__ == "__main__":
    main()
