"""`python -m data_prep.real`: builds the target and the prompts of `experiment=real`, unless they exist."""

from __future__ import annotations

import json
import sys

from data_prep.real.prompts import conversations
from data_prep.real.target import build_target
from sage.commands.cli import run
from sage.io.files import write_text


def main() -> None:
    """Console entry point."""
    sys.exit(run(_build))


def _build() -> None:
    target = build_target()
    print(f"target: {target}")
    files = [target.with_name(f"prompts_{split}.jsonl") for split in ("train", "validation")]
    if not all(file.is_file() for file in files):
        for file, rows in zip(files, conversations(), strict=True):
            write_text(file, "".join(json.dumps(row) + "\n" for row in rows))
    for file in files:
        print(f"prompts: {file}: {len(file.read_text().splitlines())}")


if __name__ == "__main__":
    main()
