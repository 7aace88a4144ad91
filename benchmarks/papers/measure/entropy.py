"""Autocorrelation of the draft's entropy, and its correlation with accepted lengths. Ref: SAGE, arXiv 2602.00523, Figure 2."""

from __future__ import annotations

import statistics

from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab
from benchmarks.papers.measure.answers import depth_on_path
from benchmarks.papers.measure.calibration import nodes_on_path
from sage.replay.recording import RecordedRound, Recording
from sage.trees.sage import confidence_of

Series = list[list[float]]  # one list per answer


def measure(lab: Lab) -> None:
    """Measures `entropy` for every target."""

    def compute() -> Json:
        return {"targets": {target: _measure(lab, target) for target in lab.settings.targets}}

    lab.figures("entropy", "entropy", compute, lab.main_runs(), study=lab.settings.entropy)


def _measure(lab: Lab, target: str) -> Json:
    study = lab.settings.entropy
    recordings = lab.recordings(target, lab.test_prompts(target, study))
    tokens = [[confidence_of(one.probs) for one in nodes_on_path(recording, "", study.candidates)] for recording in recordings]
    drafted = [_drafted(recording) for recording in recordings]
    rounds = [[confidence_of(one.candidates[()][0][: study.candidates].tolist()) for one in own] for own in drafted]
    lengths = [
        [float(depth_on_path(recording, one)) for one in own] for recording, own in zip(recordings, drafted, strict=True)
    ]
    return {
        "prompts": len(recordings),
        "tokens": sum(map(len, tokens)),
        "rounds": sum(map(len, rounds)),
        "by_token": [correlation(tokens, tokens, lag) for lag in range(1, study.lags + 1)],
        "by_round": [correlation(rounds, rounds, lag) for lag in range(1, study.lags + 1)],
        "length_from_this_round": correlation(rounds, lengths, 0),
        "length_from_last_round": correlation(rounds, lengths, 1),
    }


def _drafted(recording: Recording) -> list[RecordedRound]:
    """Returns the rounds in which the draft ran; the last one of an answer may have room for one token only."""
    return [one for one in recording.rounds if () in one.candidates]


def correlation(first: Series, second: Series, lag: int) -> float | None:
    """Returns the Pearson correlation of values `lag` places apart within the same answer; None without variance."""
    pairs = [pair for a, b in zip(first, second, strict=True) for pair in zip(a, b[lag:], strict=False)]
    try:
        return statistics.correlation([x for x, _ in pairs], [y for _, y in pairs])
    except statistics.StatisticsError:
        return None
