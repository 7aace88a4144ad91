"""A traced generation and its page: what its template and its script show, as plain values.

The script reads JSON: `texts` of tokens; per round `nodes` (indices of `texts`), `parents`, `draft`, `calibrated` or null, and
`target` (of the first `verified` nodes) in units of 0.01%, `path`, `bonus` [text, target, draft or null, rank or null] or null,
`accepted`, `figures`, `reason`, `ms` by phase, and `omitted`, the number of drafted nodes that are not drawn.

`answer_spans` are the tokens of an answer on this and other pages, which `parts.html` draws with the macro `answer`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from sage.decoding.answer import Detokenizer
from sage.decoding.generation import Output
from sage.inputs.thumbnails import Media
from sage.io.page import framed, visible, write_page
from sage.io.page import render as render_page
from sage.io.tables import counted

HTML = Path(__file__).parent / "html"
MAX_SKIPPED = 40  # drafted nodes of a round that are drawn although they were not verified, the most probable ones
SHOWN_REJECTIONS = 12
MAX_STYLES = 6  # shades of depths
CONTEXT = 48  # characters before a rejection
PHASE_NAMES = {
    "draft_steps": "draft",
    "verify": "target's pass",
    "accept": "acceptance",
    "commit": "cache",
    "policy": "policy",
    "draft_prefill": "draft's prefill",
    "other": "other",
}
FIGURE_NAMES = {  # of `Stats.rounds_log`
    "alpha": "confidence alpha",
    "planned_depth": "planned depth",
    "width": "planned width",
    "price": "price of time, tokens/s",
    "gain": "expected gain of the last level considered, tokens",
    "level_cost": "its cost, tokens",
    "expanded": "levels the draft ran for",
    "levels": "levels with nodes worth verifying",
    "drafted": "nodes drafted",
    "expected": "expected to be accepted",
}
COUNTS = ("depth", "nodes", "accepted")  # figures that the tree shows


@dataclass(frozen=True)
class Choice:
    """The target's own token after the accepted ones."""

    token: int
    target: float  # the target's probability of it
    draft: float | None  # the draft's; None if it was not among the candidates there, or nothing was drafted there
    rank: int | None  # its rank among the candidates, 0 for the best


@dataclass(frozen=True, kw_only=True)
class TracedRound:
    """One round, with M drafted nodes."""

    start: int  # answer tokens before the round; the last of them is the root
    tokens: list[int]  # emitted tokens: the accepted ones, then `bonus` unless the answer ended before it
    num_accepted: int  # accepted drafted tokens
    num_verified: int  # N; the first N of the drafted nodes were verified, the root included
    nodes: list[int]  # [M], their tokens
    parents: list[int]  # [M], -1 for the root
    depths: list[int]  # [M]
    draft: list[float]  # [M], the draft's probability of each token below its parent; 1 for the root
    calibrated: list[float] | None  # [M], acceptance probabilities of the policy's plan; None if it takes the draft's own
    target: list[float]  # [N], the target's probability of each token below its parent, before temperature; 1 for the root
    path: list[int]  # accepted nodes, the root first
    bonus: Choice | None  # the target's own token; None if the answer ended before it
    figures: dict[str, float]  # what the policy saw and decided, an entry of `Stats.rounds_log`
    reason: str  # the policy's decision in a few words
    time_s: dict[str, float]  # seconds by phase

    @property
    def seconds(self) -> float:
        return sum(self.time_s.values())

    @property
    def rejected(self) -> int | None:
        """The node of the first rejection, the draft's best proposal where the target chose another token; None without one."""
        refused = [node for node in range(1, self.num_verified) if self.parents[node] == self.path[-1]]
        return max(refused, key=self.draft.__getitem__) if refused and self.bonus is not None else None


@dataclass(kw_only=True)
class Trace:
    """One generation with everything that a page shows of it."""

    output: Output  # the answer, as of `sage.generate`
    rounds: list[TracedRound]  # those after the prefill
    settings: dict[str, str]  # target, draft, policy and sampling by name
    tokenizer: Any = field(default=None, repr=False)  # decodes tokens; None for a target without a processor
    prompt: list[tuple[str, str]] = field(default_factory=list)  # (role, text) of the messages, or the decoded prompt
    media: list[Media] = field(default_factory=list, repr=False)  # images and videos of the messages
    race: Output | None = field(default=None, repr=False)  # without a draft; None if it was not decoded
    is_coupled: bool = False  # whether the draft's numbers are scores with the noise of the target's draws

    @property
    def seconds(self) -> float:
        """Seconds after the target's prefill."""
        return self.output.stats.time_s.get("draft_prefill", 0.0) + sum(round_.seconds for round_ in self.rounds)

    @property
    def speedup(self) -> float | None:
        """Seconds without a draft over seconds with it, both after the target's prefill; None without a race or a round."""
        return self.race.stats.decode_s / self.seconds if self.race is not None and self.seconds > 0 else None

    def html(self) -> str:
        return render(self)

    def save(self, path: str | Path) -> None:
        """Writes the page. Raises CannotWrite if the disk is full or not writable."""
        write_page(Path(path), self.html())

    def _repr_html_(self) -> str:
        """Returns the page in a frame of its own, for notebooks."""
        return framed(self.html())

    def __str__(self) -> str:
        return self.output.text


def render(trace: Trace) -> str:

    @cache
    def text_of(token: int) -> str:
        return visible(trace.tokenizer.decode([token])) if trace.tokenizer is not None else f" {token}"

    stats, rounds, tokens = trace.output.stats, trace.rounds, trace.output.tokens.tolist()
    pieces = token_pieces(tokens, trace.tokenizer)
    rejections = list(_rejections(trace, text_of, pieces))
    highest = max((1, *(round_.figures.get("depth", 0) for round_ in rounds)))
    plan = next((name for name in ("planned_depth", "expected") if rounds and name in rounds[0].figures), "")
    points = [(place + 0.5, min(round_.figures[plan], highest)) for place, round_ in enumerate(rounds)] if plan else []
    line = f"; line: {FIGURE_NAMES[plan]}" if plan else ""
    kind = "score, with the noise of the target's draws" if trace.is_coupled else "probability"
    calibrated = " (calibrated)" if any(round_.calibrated for round_ in rounds) else ""
    texts: dict[str, int] = {}
    data = [_round_data(round_, lambda token: texts.setdefault(text_of(token), len(texts))) for round_ in rounds]
    note = f"The target refused no verified proposal in {counted(len(rounds), 'round')}."
    if rejections:
        note = (
            f"In {len(rejections)} of {len(rounds)} rounds the target refused what the draft proposed next: the draft's best "
            "proposal there, and the target's own token. Those of which the draft was surest come first."
        )
    return render_page(
        HTML / "trace.html",
        script=HTML / "trace.js",
        title=f"What the draft did: {trace.settings.get('policy', '')}",
        subtitle=f"{trace.settings.get('draft', 'the draft')} drafting for {trace.settings.get('target', 'its target')}",
        figures=_tiles(trace),
        settings=trace.settings,
        prompt=trace.prompt,
        media=trace.media,
        tokens=answer_spans(tokens, pieces, ((len(round_.tokens), round_.num_accepted) for round_ in rounds), trace.tokenizer),
        rounds=len(rounds),
        deepest=min(max(1, *stats.accepted), MAX_STYLES) if rounds else 0,
        strip=[(round_.figures.get("depth", 0), round_.num_accepted) for round_ in rounds],
        highest=highest,
        line=" ".join(f"{x:.1f},{highest - value:.2f}" for x, value in points),
        chart_caption=f"One bar per round: levels verified, and tokens accepted of them in color{line}",
        numbers_note=f"numbers: the draft's {kind}{calibrated} \u2192 the target's probability",
        rejections=rejections,
        shown=SHOWN_REJECTIONS,
        rejections_note=note,
        data={"texts": list(texts), "rounds": data, "phases": PHASE_NAMES, "names": FIGURE_NAMES},
    )


def _round_data(round_: TracedRound, index: Callable[[int], int]) -> dict[str, Any]:
    paths, depths = [1.0] * len(round_.nodes), round_.depths
    for node in sorted(range(1, len(round_.nodes)), key=depths.__getitem__):
        paths[node] = paths[round_.parents[node]] * round_.draft[node]
    # drawn are the verified nodes, and the most probable others with all of their ancestors
    others = sorted(range(round_.num_verified, len(round_.nodes)), key=lambda node: (-paths[node], depths[node], node))
    kept = [*range(round_.num_verified), *sorted(others[:MAX_SKIPPED], key=lambda node: (depths[node], node))]
    place = {-1: -1, **{node: index for index, node in enumerate(kept)}}
    bonus = round_.bonus
    figures = {name: value for name, value in round_.figures.items() if name not in COUNTS}
    return {
        "nodes": [index(round_.nodes[node]) for node in kept],
        "parents": [place[round_.parents[node]] for node in kept],
        "draft": [_units(round_.draft[node]) for node in kept],
        "calibrated": None if round_.calibrated is None else [_units(round_.calibrated[node]) for node in kept],
        "target": [_units(value) for value in round_.target],
        "verified": round_.num_verified,
        "accepted": round_.num_accepted,
        "path": round_.path[: round_.num_accepted + 1],
        "bonus": None if bonus is None else [index(bonus.token), _units(bonus.target), _units(bonus.draft), bonus.rank],
        "omitted": len(round_.nodes) - len(kept),
        "figures": {name: int(value) if value == int(value) else float(f"{value:.3g}") for name, value in figures.items()},
        "reason": round_.reason,
        "ms": {phase: round(1e3 * seconds, 3) for phase, seconds in round_.time_s.items()},
    }


def _units(probability: float | None) -> int | None:
    return None if probability is None else round(1e4 * probability)


def _percent(probability: float) -> str:
    return f"{100 * probability:.{1 if probability < 0.1 else 0}f}%"


def _tiles(trace: Trace) -> list[tuple[str, str, str]]:
    stats = trace.output.stats
    found = [("tokens", f"{stats.new_tokens}", f"prompt: {stats.prompt_tokens}")]
    found += [("target passes", f"{stats.target_passes}", "after the prefill")]
    if trace.rounds:
        share = f"{sum(stats.accepted)} of {stats.new_tokens - 1}"
        found += [("tokens per pass", f"{stats.tokens_per_target_pass:.2f}", ""), ("drafted", share, "tokens after the first")]
    if trace.seconds > 0:
        found += [("speed", f"{(stats.new_tokens - 1) / trace.seconds:.0f}/s", "tokens after the prefill")]
    if trace.race is not None and trace.speedup is not None:
        tokens, base = trace.output.tokens.tolist(), trace.race.tokens.tolist()  # near-ties can differ in this dtype
        same = "same text" if tokens == base else f"texts differ from token {num_equal(tokens, base) + 1} on"
        found += [("speedup", f"{trace.speedup:.2f}x", f"of this one request; {same}")]
    return found


def _rejections(trace: Trace, text_of: Callable[[int], str], pieces: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the first rejection of every round that has one, those of which the draft was surest first."""
    rejecting = [
        (number, round_, node) for number, round_ in enumerate(trace.rounds, start=1) if (node := round_.rejected) is not None
    ]
    for number, round_, node in sorted(rejecting, key=lambda item: (-item[1].draft[item[2]], item[0])):
        assert round_.bonus is not None
        before = "".join(pieces[: round_.start + round_.num_accepted])
        rank = f"the draft's candidate {round_.bonus.rank + 1}" if round_.bonus.rank is not None else "not among its candidates"
        yield {
            "round": number,
            "depth": round_.depths[node],
            "context": f"\u2026{before[-CONTEXT:]}" if len(before) > CONTEXT else before,
            "proposed": text_of(round_.nodes[node]),
            "draft": _percent(round_.draft[node]),
            "proposed_target": _percent(round_.target[node]),
            "chosen": text_of(round_.bonus.token),
            "target": _percent(round_.bonus.target),
            "rank": rank,
        }


def token_pieces(tokens: Sequence[int], tokenizer: Any) -> list[str]:
    """Returns the text that each token adds; that of a character of several tokens comes with the last of them. Without a
    tokenizer, tokens are shown as numbers.
    """
    if tokenizer is None:
        return [f" {token}" for token in tokens]
    detokenizer = Detokenizer(tokenizer)
    return [visible(detokenizer.next_piece(tokens, end, end == len(tokens))) for end in range(1, len(tokens) + 1)]


def num_equal(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Returns the number of tokens before the first that differs or is missing."""
    return len(os.path.commonprefix([tokens, others]))  # type: ignore[list-item]  # of any sequences


def answer_spans(
    tokens: Sequence[int], pieces: Sequence[str], rounds: Iterable[tuple[int, int]], tokenizer: Any
) -> list[dict[str, Any]]:
    """Returns `text`, `style`, `round` (0: the prefill), `label` and `note` of every token, from its piece, and the emitted and
    accepted tokens of every round.
    """
    origins = [("p", 0, "from the prefill")]
    for number, (emitted, accepted) in enumerate(rounds, start=1):
        for depth in range(1, emitted + 1):
            is_drafted = depth <= accepted
            what = f"drafted at depth {depth}, accepted" if is_drafted else "the target's own"
            origins.append((f"d{min(depth, MAX_STYLES)}" if is_drafted else "b", number, f"round {number}: {what}"))
    special = set(getattr(tokenizer, "all_special_ids", ()))
    spans = []
    for token, text, (style, number, note) in zip(tokens, pieces, origins, strict=True):
        is_special = not text and token in special  # skipped in the text
        label = visible(tokenizer.decode([token])) if is_special else ""
        style = f"{style} special" if is_special else style
        spans.append({"text": text, "style": style, "round": number, "label": label, "note": note})
    return spans
