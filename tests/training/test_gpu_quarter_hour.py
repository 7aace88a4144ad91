"""benchmarks.gpu_quarter_hour keeps results whatever its steps do; benchmarks.gpu_page writes them beside what is expected."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_quarter_hour
from benchmarks.gpu_quarter_hour import Step, run_steps
from sage.io.files import read_json

DEAF = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('hangs', flush=True); time.sleep(600)"


def step(name: str, code: str, limit_s: float = 600.0, estimate_s: float = 0.0) -> Step:
    return Step(name=name, estimate_s=estimate_s, limit_s=limit_s, command=[sys.executable, "-c", code], shows="")


def test_steps_that_fail_hang_and_do_not_fit_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grace_s = {signal.SIGINT: 0.1}  # which the step ignores; it ends as soon as the next signal has printed its stack
    monkeypatch.setattr(
        gpu_quarter_hour, "SIGNALS", [(number, grace_s.get(number, 60)) for number, _ in gpu_quarter_hour.SIGNALS]
    )
    writes = f"open(r'{tmp_path}/work/works/table.json', 'w').write('{{\"rows\": [NaN]}}')"
    todo = [step("fails", "print('why'); exit(3)"), step("hangs", DEAF, limit_s=5), step("works", writes)]
    (tmp_path / "work" / "works").mkdir(parents=True)
    assert run_steps([*todo, step("large", "", estimate_s=9999)], tmp_path, tmp_path / "work", budget_s=999) == 1
    rows = read_json(tmp_path / "results.json")["steps"]
    outcomes = [row["outcome"] for row in rows]
    assert outcomes[:3] == ["failed, exit code 3", "killed at 5 s", "ran"] and re.fullmatch(r"skipped, \d+ s left", outcomes[3])
    figures = read_json(tmp_path / "figures.json")
    assert figures["fails"]["output"] == "why" and "Fatal Python error: Aborted" in figures["hangs"]["output"]
    assert figures["works"]["files"] == {"table.json": {"rows": ["NaN"]}}
