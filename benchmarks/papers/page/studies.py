"""Sections of the page that look inside: calibration, ablations, overhead and projection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.papers.figures import Json
from benchmarks.papers.measure.ablations import GUESSED_COSTS, GUESSED_LEVEL
from benchmarks.papers.page.parts import Finding, Found, of_targets, paragraphs, title_of
from benchmarks.papers.page.tables import interval, plain_options, table, times
from sage.bench.runners import AUTOREGRESSIVE

OURS = "cost_aware"
MOST_MEASURED, MOST_PROJECTED = 0.05, 0.01  # of decoding time, for what is no model compute
SMALL_SHAPE = "qwen2_5_vl_7b"

# -- calibration -----------------------------------------------------------------------------------------------------------


def calibration(found: Found) -> str:
    """Predictors of acceptance, errors by depth, the lemma."""
    return paragraphs(
        "How well is it known in advance whether the target takes the draft's best token? At every node that the answer "
        "passes through: `alpha` (SAGE's confidence), the draft's own probability, and what `cost_aware` makes of it after "
        "learning on the validation split. *Error* is the mean distance between prediction and outcome over ten bins; *AUC* "
        "the chance that an accepted token was given more than a refused one, which no rescaling changes.",
        *(_confidence(target, figures) for target, figures in of_targets(found, "calibration").items()),
        "It shows which number a rule may take for a chance on these drafts. It does not show how soon a calibrator adapts "
        "when the prompts change; it goes on learning, and the errors above are those of predictions made before their "
        "outcome.",
    )


def _confidence(target: str, figures: Json) -> str:
    predictors, lemma = figures["predictors"], figures["lemma"]
    by_name = table(
        [f"{predictors['nodes']} nodes, {predictors['accepted']:.0%} accepted", "error", "AUC"],
        [[f"`{name}`", f"{one['error']:.3f}", f"{one['auc']:.3f}"] for name, one in predictors["by_name"].items()],
    )
    by_depth = table(
        ["depth", "labels", "error, draft probability", "calibrated"],
        [[str(row["depth"]), str(row["labels"]), f"{row['before']:.3f}", f"{row['after']:.3f}"] for row in figures["by_depth"]],
    )
    return paragraphs(
        f"### {title_of(target)}",
        by_name,
        f"All drafted candidates of all verified nodes, by depth, after learning from {figures['rounds_learned_on']} rounds "
        "of other prompts:",
        by_depth,
        f"**Lemma 4.3** says p1 >= 1/k + alpha (k - 1)/k. Of {lemma['nodes']} real nodes (k = {lemma['k']}) "
        f"{lemma['below_bound']} have a smaller p1; the furthest:",
        _examples(lemma),
        f"**Theorem 4.4** says a token is accepted for sure above alpha {lemma['sure_alpha']:g}: "
        f"{lemma['sure_accepted']} of {lemma['sure']} were.",
    )


def _examples(lemma: Json) -> str:
    rows = [
        [
            one["prompt"],
            str(one["depth"]),
            f"{one['alpha']:.3f}",
            ", ".join(f"{prob:.3f}" for prob in one["probs"]),
            f"{one['bound']:.3f}",
            "accepted" if one["accepted"] else "refused",
        ]
        for one in lemma["examples"]
    ]
    return table(["prompt", "depth", "alpha", "largest p, renormalised", "the bound on p1", "its best token was"], rows)


def calibration_findings(found: Found) -> list[Finding]:
    """Calibration helps; alpha is no chance; the lemma."""
    return [
        one for target, figures in of_targets(found, "calibration").items() for one in _calibration_findings(target, figures)
    ]


def _calibration_findings(target: str, figures: Json) -> list[Finding]:
    rows, by_name, lemma = figures["by_depth"], figures["predictors"]["by_name"], figures["lemma"]
    better = [row["depth"] for row in rows if row["after"] < row["before"]]
    means = {key: _weighted(rows, key) for key in ("before", "after")}
    worse = [str(row["depth"]) for row in rows if row["after"] >= row["before"]]
    said = f"{means['before']:.3f} before, {means['after']:.3f} after, over all depths; better at {len(better)} of {len(rows)}"
    said += f", not at {', '.join(worse)}" if worse else ""
    alpha, own = by_name["alpha"], by_name["draft probability"]
    sure = lemma["sure_accepted"] / max(lemma["sure"], 1)
    name = title_of(target)
    return [
        Finding(f"Ours: learning lowers the calibration error, {name}", means["after"] < means["before"], said),
        Finding(
            f"SAGE: alpha tells which tokens are accepted as well as the draft's probability, {name}",
            alpha["auc"] >= own["auc"] and alpha["error"] <= own["error"],
            f"AUC {alpha['auc']:.3f} against {own['auc']:.3f}, error {alpha['error']:.3f} against {own['error']:.3f}",
        ),
        Finding(
            f"SAGE's Lemma 4.3 on real nodes, {name}",
            lemma["below_bound"] == 0,
            _lemma_said(lemma),
        ),
        Finding(
            f"SAGE's Theorem 4.4, accepted for sure above alpha {lemma['sure_alpha']:g}, {name}",
            lemma["sure_accepted"] == lemma["sure"],
            f"{sure:.1%} of {lemma['sure']} nodes",
        ),
    ]


def _lemma_said(lemma: Json) -> str:
    said = f"fails at {lemma['below_bound']} of {lemma['nodes']} nodes"
    return said + (": it bounds p1 from the wrong side, two equal candidates have a high alpha" if lemma["below_bound"] else "")


def _weighted(rows: list[Json], key: str) -> float:
    return sum(row[key] * row["labels"] for row in rows) / max(sum(row["labels"] for row in rows), 1)


# -- ablations -------------------------------------------------------------------------------------------------------------


def ablations(found: Found) -> str:
    """Variants, timed and replayed."""
    figures = found["ablations"]
    head = ["variant", "tokens/pass", "nodes", "speedup", "95%", "replayed: tokens/pass", "tokens/s", "identical"]
    rows = [_ablation_row(row) for row in figures["rows"]]
    best = figures["oracle"]
    rows.append(
        [
            "oracle, replayed",
            "",
            f"{best['nodes_per_round']:.1f}",
            "",
            "",
            f"{best['tokens_per_target_pass']:.2f}",
            f"{best['tokens_per_s']:.0f}",
            "",
        ]
    )
    return paragraphs(
        f"{title_of(figures['target'])}, {figures['prompts']} prompts; `sage` as tuned "
        f"({plain_options(figures['options']) or 'defaults'}). Timed side by side, and replayed on the same recorded drafts "
        "at the cost tables of this machine, where a policy's own time is left out and noise cannot tell variants apart.",
        table(head, rows),
        f"*{GUESSED_COSTS}* measures nothing: a pass is taken to cost the same whatever its tree, a level "
        f"{GUESSED_LEVEL:.0%} of one, as on a large GPU. The *oracle* knows the answer: it drafts along it as far as the "
        "recorded candidates hold it and as it pays, and verifies nothing else; no rule can be faster on these drafts. It "
        "exists in replay only.",
        "It shows what each part is worth on this machine and these drafts. It does not show their worth where costs change "
        "during a request, as they do with long contexts or a shared machine.",
    )


def _ablation_row(row: Json) -> list[str]:
    replayed = row["replayed"]
    return [
        row["label"],
        f"{row['tokens_per_target_pass']:.2f}",
        f"{row['nodes_per_round']:.1f}",
        times(row["speedup"]),
        interval(row.get("speedup_ci")),
        f"{replayed['tokens_per_target_pass']:.2f}",
        f"{replayed['tokens_per_s']:.0f}",
        f"{row['match']}/{row['total']}",
    ]


def ablation_findings(found: Found) -> list[Finding]:
    """Each part of cost_aware and of sage helps."""
    if "ablations" not in found:
        return []
    rows = {row["label"]: row for row in found["ablations"]["rows"]}
    made = [_part(rows, name, label) for name in (OURS, "sage") for label in rows if label.startswith(f"{name}, ")]
    own, best = rows[OURS]["replayed"]["tokens_per_s"], found["ablations"]["oracle"]["tokens_per_s"]
    made.append(Finding("Ours: within 25% of the oracle's speed, replayed", own >= 0.75 * best, f"{own / best:.0%} of it"))
    return made


def _part(rows: Mapping[str, Json], name: str, label: str) -> Finding:
    """The replay decides, because its runs share every draft; the timing stands beside it."""
    whole, without = (rows[one]["replayed"]["tokens_per_s"] for one in (name, label))
    who = "Ours" if name == OURS else "SAGE"
    said = f"replayed {without / whole - 1:+.1%}, timed {rows[label]['speedup'] / rows[name]['speedup'] - 1:+.1%}"
    change = label.removeprefix(f"{name}, ")
    return Finding(f"{who}: `{name}` at least as fast as with *{change}*", without <= whole * 1.001, said)


# -- overhead and projection -----------------------------------------------------------------------------------------------


def projection(found: Found) -> str:
    """Shares of decoding time, and projected speedups."""
    return paragraphs(_overhead(found["overhead"], found["costs"]) if "overhead" in found else "", _projected(found))


def _overhead(figures: Json, costs: Json) -> str:
    shapes = next(iter(next(iter(figures.values())).values()))["projected"]
    columns = [(shape, context) for shape, contexts in shapes.items() for context in contexts]
    head = ["of decoding time", "target", "draft", "accept", "commit", "policy", "other", "**no model**", "host per round"]
    head += [f"{_short(costs['shape']['name'])}, here"]
    head += [f"{_short(shape)}, L {context}" for shape, context in columns]
    parts = []
    for target, policies in figures.items():
        rows = [_overhead_row(name, row, columns) for name, row in policies.items()]
        parts += [f"### {title_of(target)}", table(head, rows)]
    return paragraphs(
        "Where decoding time goes, and what share of it is no model compute: policy and tree, acceptance, cache commit and "
        "the rest. The columns on the right set the same host work beside passes of a large target. *Here*: passes of that "
        f"shape as this machine makes them, {costs['layers_measured']} of {costs['layers']} layers measured, the rest "
        "extrapolated, bf16. The last ones are a **projection**: the least that a pass can take at a GPU's memory bandwidth, "
        "with this machine's host.",
        *parts,
    )


def _overhead_row(name: str, row: Json, columns: list[tuple[str, str]]) -> list[str]:
    projected = [row["projected"].get(shape, {}).get(context) for shape, context in columns]
    cells = [f"{share:.3%}" if share is not None else "" for share in (row["here"], *projected)]
    return [f"`{name}`", *(f"{share:.1%}" for share in row["shares"].values()), f"{row['host_ms_per_round']:.3f} ms", *cells]


def _short(shape: str) -> str:
    return shape.rpartition("_")[2].upper()


def _projected(found: Found) -> str:
    if "projection" not in found:
        return ""
    rows = found["projection"]["rows"]
    names = list(rows[0]["policies"])
    head = ["target", "shape", "device", "L", *(f"`{name}`" for name in names)]
    cells = [
        [
            title_of(row["target"]),
            _short(row["shape"]),
            row["device"],
            str(row["context"]),
            *(
                f"{times(row['policies'][name]['speedup'])} ({row['policies'][name]['tokens_per_target_pass']:.2f})"
                for name in names
            ),
        ]
        for row in rows
    ]
    return paragraphs(
        "### A projection, not a measurement: the pocket's drafts at the costs of large targets",
        "The drafts recorded here, replayed under every policy as published, at the least times that passes of that shape "
        "can take: the bytes of weights and cache over the device's memory bandwidth, bf16, and this machine's bookkeeping. "
        "`cost_aware` plans by those costs. Speedup over one token per pass, and tokens per pass in brackets.",
        table(head, cells, left=3),
        "It shows how the rules would rank where a pass costs the same whatever its tree. It does not show what a 7B draft "
        "accepts: the acceptance is that of pocket answers, and no kernel reaches the bandwidth bound.",
    )


def overhead_findings(found: Found) -> list[Finding]:
    """Bookkeeping small beside pocket passes, negligible beside large ones; the projected order of policies."""
    made = []
    for target, policies in found.get("overhead", {}).items():
        drafting = {name: row for name, row in policies.items() if name != AUTOREGRESSIVE}
        made += _measured(target, drafting)
        made.append(_beside(target, drafting, found["costs"]))
        made.append(_at_7b(target, drafting))
    for row in found.get("projection", {}).get("rows", []):
        made.append(_order(row))
    return made


def _measured(target: str, policies: Mapping[str, Any]) -> list[Finding]:
    """Of what the decoder is for, and of everything that it is compared with."""
    shares = {name: row["shares"]["host overhead"] for name, row in policies.items()}
    over = {name: share for name, share in shares.items() if share > MOST_MEASURED}
    said = f"{len(shares) - len(over)} of {len(shares)} within"
    if over:
        worst = max(over, key=lambda name: over[name])
        parts = policies[worst]["shares"]
        part = max(("acceptance", "cache commit", "policy and tree", "other"), key=lambda stage: parts[stage])
        said += f", most `{worst}` with {over[worst]:.1%}, of which {part} {parts[part]:.1%}"
    claim = f"{title_of(target)}: what is no model compute at most {MOST_MEASURED:.0%} of decoding time"
    both = ", ".join(f"`{name}` {shares[name]:.1%}" for name in ("sage", OURS))
    return [
        Finding(f"{claim}, `sage` and `{OURS}`", not {"sage", OURS} & over.keys(), both),
        Finding(f"{claim}, every policy", not over, said),
    ]


def _beside(target: str, policies: Mapping[str, Any], costs: Json) -> Finding:
    shares = {name: row["here"] for name, row in policies.items()}
    return _negligible(target, f"beside {_short(costs['shape']['name'])} passes on this machine", shares, digits=3)


def _at_7b(target: str, policies: Mapping[str, Any]) -> Finding:
    shares = {name: max(row["projected"].get(SMALL_SHAPE, {}).values(), default=0.0) for name, row in policies.items()}
    how = ", at the bandwidth bound with this machine's host"
    return _negligible(target, "projected to a 7B target on a GPU", shares, how)


def _negligible(target: str, where: str, shares: Mapping[str, float], how: str = "", digits: int = 2) -> Finding:
    worst = max(shares, key=lambda name: shares[name])
    said = f"`{OURS}` {shares[OURS]:.{digits}%}, most `{worst}` {shares[worst]:.{digits}%}{how}"
    claim = f"{title_of(target)}: at most {MOST_PROJECTED:.0%} of it {where}"
    return Finding(claim, shares[worst] <= MOST_PROJECTED, said)


def _order(row: Json) -> Finding:
    speeds = {name: part["speedup"] for name, part in row["policies"].items()}
    best = max(speeds, key=lambda name: speeds[name])
    place = f"{_short(row['shape'])} costs, L {row['context']}"
    claim = f"Ours: `{OURS}` ahead at {place}, drafts of the {title_of(row['target'])} (projection)"
    return Finding(claim, best == OURS, f"{times(speeds[OURS])}; best is `{best}` with {times(speeds[best])}")
