"""Expectations of the papers and of this project, and whether the figures meet them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.papers.page.markdown import fill
from sage.bench.tables import markdown_table


@dataclass(frozen=True)
class Expectation:
    """One expectation.

    Attributes:
        claim: what is expected, and by whom.
        is_met: whether the figures confirm the claim.
        evidence: the figures that decide it, and, if it is not met, the cause that they suggest.
    """

    claim: str
    is_met: bool
    evidence: str


def expectations_section(expectations: Sequence[Expectation]) -> str:
    """Returns the section that lists all expectations, unmet ones first; empty without any."""
    if not expectations:
        return ""
    ordered = sorted(expectations, key=lambda one: one.is_met)
    rows = [[one.claim, "yes" if one.is_met else "**no**", one.evidence] for one in ordered]
    num_met = sum(one.is_met for one in expectations)
    table = markdown_table(["expectation", "met", "measured"], rows, "<")
    return fill("expectations", num_met=num_met, num_total=len(expectations), table=table)
