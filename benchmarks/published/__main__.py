"""`python -m benchmarks.published NAME DIR`: DIR/target with the published sizes and layout of conf/target/NAME.yaml and random
weights; with `--photos N` also conversations about N images, DIR/photos.jsonl.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.published.folder import build, write_photos
from sage.commands.cli import add_device_option, new_parser, resolve_device, run


def main() -> int:
    parser = new_parser("python -m benchmarks.published", description=__doc__)
    parser.add_argument("name", metavar="NAME", help="a target of conf/target")
    parser.add_argument("folder", metavar="DIR", type=Path)
    parser.add_argument("--photos", type=int, default=0, metavar="N", help="images; default: none")
    parser.add_argument("--small", action="store_true", help="few narrow layers; vocabulary and layout as published")
    add_device_option(parser, "cpu")
    args = parser.parse_args()
    count = build(args.name, args.folder / "target", resolve_device(args.device), args.small)
    if args.photos:
        write_photos(args.folder, args.photos)
    print(f"{args.name}: {count:,} parameters in {args.folder / 'target'}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
