"""Tables of figures, printed and written as JSON for `benchmarks.gpu_page`; ratios of times, peak memory, the machine."""

from __future__ import annotations

import ctypes
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from sage.bench.report import machine
from sage.io.files import write_json
from sage.io.tables import text_table

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
GIB = 2**30
RESET_PEAK = "5"  # see proc(5)


@dataclass(frozen=True)
class Figures:
    """A table as printed: a line above it, its cells, lines of notes below it, and the machine."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]
    machine: str

    def text(self) -> str:
        """Returns the lines of a terminal. Columns are aligned on the right if their first cell is a number."""
        cells = self.rows[0] if self.rows else self.head
        align = "".join(">" if cell[:1].isdigit() else "<" for cell in cells)
        return "\n".join((self.title, text_table(self.head, self.rows, align, ruled=False), *self.notes, self.machine))

    def write(self, path: str | Path | None) -> None:
        """Writes the table with the command of this process as JSON; nothing without a path."""
        if path is not None:
            write_json(Path(path), {"command": command(), **asdict(self)})

    @classmethod
    def of(cls, content: dict[str, Any]) -> Figures:
        return cls(**{key: value for key, value in content.items() if key != "command"})


def command() -> str:
    """Returns the arguments of this process, as one types them."""
    spec: Any = sys.modules["__main__"].__spec__
    name = sys.argv[0] if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"
    return " ".join((name, *map(shlex.quote, sys.argv[1:])))


def fill_blocks(text: str, kind: str, content: Callable[[str], str | None]) -> str:
    """Returns a page whose blocks `<!-- KIND: NAME -->` to `<!-- end -->` hold `content(NAME)`; unchanged where it is None."""

    def filled(found: re.Match[str]) -> str:
        new = content(found[2])
        return found[0] if new is None else f"{found[1]}\n{new}\n{found[3]}"

    return re.sub(rf"(<!-- {kind}: ([\w ]+) -->\n).*?(\n<!-- end -->)", filled, text, flags=re.DOTALL)


def counts(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise ValueError(f"{text!r}: not a list of counts; give positive integers separated by commas")
    return found


def ratio_spread(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median of the ratios of paired times, and the bounds of all but the lowest and highest tenth."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return median(ratios), ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]


def reset_peak(device: torch.device) -> int:
    """Resets the peak and returns the bytes allocated now; raises ValueError on systems that do not report a peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return allocated(device)
    ctypes.CDLL(None).malloc_trim(0)  # freed blocks kept by the allocator would hide later allocations
    try:
        CLEAR.write_text(RESET_PEAK)
    except OSError as error:
        raise ValueError(f"{CLEAR}: cannot be written ({error}); peak memory on a CPU is measured on Linux only") from error
    return allocated(device)


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _resident("VmRSS")


def peak(device: torch.device) -> int:
    """Returns the largest number of bytes allocated since `reset_peak`."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident("VmHWM")


def _resident(name: str) -> int:
    line = next(line for line in STATUS.read_text(encoding="ascii").splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def describe_machine(device: torch.device) -> str:
    """Returns `2 CPU cores, 1 thread(s), load 0.5, torch 2.13.0`, or the name and memory of the GPU."""
    facts = machine(device)
    where = f"{facts['cores']} CPU cores, {torch.get_num_threads()} thread(s)"
    if device.type == "cuda":
        where = "{gpu}, {reserved_gib} GiB reserved at most, {free_gib} of {total_gib} GiB free".format(**facts)
    return f"{where}, load {facts['load_average']:.1f}, torch {torch.__version__}"
