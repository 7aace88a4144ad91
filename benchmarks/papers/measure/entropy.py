"""Autocorrelation of the draft's entropy, and its correlation with accepted lengths. Ref: SAGE, arXiv 2602.00523, Figure 2."""

from __future__ import annotations

import statistics

from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab
from benchmarks.papers.measure.calibration import nodes_on_path
from sage.replay.recording import Recording
from sage.trees.sage import confidence_of

Series = list[list[float]]  # one list per answer


def measure(lab: Lab) -> None:
    """Measures `entropy` for every target."""
    study, targets = lab.settings.entropy, list(lab.settings.targets)
    inputs = lab.run_inputs(*(lab.settings.main_runs[target] for target in targets), study=study)
    lab.figures("entropy", "entropy", inputs, lambda: {"targets": {target: _measure(lab, target) for target in targets}})


def _measure(lab: Lab, target: str) -> Json:
    study = lab.settings.entropy
    recordings = lab.recordings(target, lab.test_prompts(target, study))
    tokens = [[confidence_of(one.probs) for one in nodes_on_path(recording, "", study.candidates)] for recording in recordings]
    rounds = [_root_alphas(recording, study.candidates) for recording in recordings]
    lengths = [_lengths(recording) for recording in recordings]
    return {
        "prompts": len(recordings),
        "tokens": sum(map(len, tokens)),
        "rounds": sum(map(len, rounds)),
        "by_token": [correlation(tokens, tokens, lag) for lag in range(1, study.lags + 1)],
        "by_round": [correlation(rounds, rounds, lag) for lag in range(1, study.lags + 1)],
        "length_from_this_round": correlation(rounds, lengths, 0),
        "length_from_last_round": correlation(rounds, lengths, 1),
    }


def _root_alphas(recording: Recording, candidates: int) -> list[float]:
    return [confidence_of(recorded.candidates[()][0][:candidates].tolist()) for recorded in recording.rounds]


def _lengths(recording: Recording) -> list[float]:
    """Returns, per round, the number of tokens of the answer that the recorded drafts contain."""
    lengths = []
    for recorded in recording.rounds:
        answer, depth = tuple(recording.tokens[recorded.position :]), 0
        while (
            depth < len(answer)
            and answer[:depth] in recorded.candidates
            and answer[depth] in recorded.candidates[answer[:depth]][1]
        ):
            depth += 1
        lengths.append(float(depth))
    return lengths


def correlation(first: Series, second: Series, lag: int) -> float | None:
    """Returns the Pearson correlation of values `lag` places apart within the same answer; None without variance."""
    pairs = [pair for a, b in zip(first, second, strict=True) for pair in zip(a, b[lag:], strict=False)]
    try:
        return statistics.correlation([x for x, _ in pairs], [y for _, y in pairs])
    except statistics.StatisticsError:
        return None
