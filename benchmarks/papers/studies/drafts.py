"""Drafts of every kind side by side, at equal training time and at equal steps.

Ref: EAGLE, arXiv 2401.15077; EAGLE-3, arXiv 2503.01840; P-EAGLE, arXiv 2602.01469; DFlash, arXiv 2602.06036; DSpark, arXiv
2607.05147; claims of GLANCE, arXiv 2609.00355.

`drafts_PART`: the figures of one entry of `drafts.parts`, a target with a seed and a budget of training, and with longer
training its runs by draft. Parts are also timed, except at equal steps; those with `megabytes`, `threads` or `passes` are
timed only: on the widened target, whose texts and drafts are the same, with so many threads, or with passes of that mode.
`prompts` is the number of prompts of each task family in a part, by default that of the study.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from statistics import mean
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from benchmarks.papers import runs
from benchmarks.papers.figures import Json
from benchmarks.papers.lab import Lab, matching_texts, mean_tokens, of_family, summary, time_runs, tokens_over
from benchmarks.papers.markdown import times_with_interval
from benchmarks.papers.plots import Curve, plot_curves
from benchmarks.papers.study import OURS, TARGET_TITLES, Expectation, Study
from benchmarks.papers.wide_lab import WideLab, using_threads
from sage.bench.measurement import BenchPrompt, Measurement
from sage.bench.summary import speed_ratio
from sage.costs.measure import measure_costs

REFERENCE, RIVAL = "eagle", "eagle3"
ONE_PASS = ("peagle", "dflash", "dspark", "block")
TIME, STEPS = "time", "steps"
BUDGETS = {
    TIME: "equal training time",
    "muon": "steps as at equal time, trained with Muon",
    "long": "equal time, longer training",
    "own": "equal time, longer training on own answers",
    "own_muon": "equal time, longer training on own answers with Muon",
    STEPS: "equal steps",
}
TIMED_ONLY = {"megabytes", "threads", "passes"}  # parts with one of them emit the texts of the part without
DEFAULT_DEPTH = 5  # of `chain`
FASTER = 1.15  # goal: of a one-pass head over `REFERENCE` under `cost_aware`
COLORS = ("#2f6fa7", "#b23a6b", "#6f9e74", "#c97b4a", "#7a6fb0", "#5a5a5a")


def _measure(lab: Lab) -> None:
    """Measures every part, in the order of the settings."""
    sizes = {key: value for key, value in lab.sizes["drafts"].items() if key != "parts"}
    for part in lab.sizes["drafts"]["parts"]:
        names = list(_runs(lab, part).values())
        lab.figures("drafts", part_name(part), partial(_part, lab, part), names, study=sizes, part=part)


def part_name(part: Mapping[str, Any]) -> str:
    """Returns the name of the figures of a part, such as `drafts_qwen_time_0`, `drafts_qwen62_threads2_time_0` or
    `drafts_qwen_eager_time_0`.
    """
    threads = f"_threads{part['threads']}" if "threads" in part else ""
    passes = f"_{part['passes']}" if "passes" in part else ""
    return f"drafts_{part['target']}{part.get('megabytes', '')}{threads}{passes}_{part['budget']}_{part['seed']}"


def _runs(lab: Lab, part: Json) -> dict[str, str]:
    """Returns the run of every draft in a part."""
    if "runs" in part:
        return dict(part["runs"])
    return {head: runs.matched_run(lab.settings, head, part) for head in runs.matched_heads(lab.settings, part)}


def _part(lab: Lab, part: Json) -> Json:
    target, found, own = part["target"], _runs(lab, part), _lab_of(lab, part)
    prompts = own.test_prompts(target, "drafts", part.get("prompts"))
    with using_threads(part.get("threads", lab.settings.threads)):
        heads = {head: _head(own, target, run, prompts[0]) for head, run in found.items()}
        tokens = {} if TIMED_ONLY & set(part) else _tokens(own, target, found, prompts)
        timed = _speed(own, target, found, prompts) if part["budget"] != STEPS else {}
    return {**part, "heads": heads, "tokens": tokens, **timed}


def _lab_of(lab: Lab, part: Json) -> Lab:
    """Returns the lab that a part is measured in."""
    if "passes" in part:
        lab = Lab(replace(lab.settings, passes=part["passes"]), lab.store)
    return WideLab(lab, part["target"], part["megabytes"], ()) if "megabytes" in part else lab


def _head(lab: Lab, target: str, run: str, prompt: BenchPrompt) -> Json:
    """Returns the size of a draft, how long it was trained, and what its passes cost."""
    draft, model, limit = lab.draft(run), lab.target(target), lab.settings.max_new_tokens
    context = int(prompt.inputs["input_ids"].shape[1]) + limit // 4
    costs = measure_costs(model, draft, context, context + limit)
    return {
        **runs.training_of(lab.settings, run),
        "parameters": sum(weight.numel() for weight in draft.network.parameters()),
        "start_ms": 1e3 * costs.first_level_s,
        "level_ms": 1e3 * costs.draft(1),
        "pass_ms": 1e3 * costs.verify(1),
    }


def _tokens(lab: Lab, target: str, found: Mapping[str, str], prompts: Sequence[BenchPrompt]) -> Json:
    """Returns tokens per target pass of each draft: chains by depth, and trees by number of verified nodes."""
    sizes = lab.sizes["drafts"]
    policies = {("chain", depth): {"depth": depth} for depth in sizes["depths"]}
    policies |= {("eagle2", nodes): {**sizes["tree"], "total": nodes} for nodes in sizes["nodes"]}
    runners = [
        lab.runner(target, f"{head} {name} {size}", name, options, run)
        for head, run in found.items()
        for (name, size), options in policies.items()
    ]
    measured = time_runs(lab, target, runners, prompts, 1)
    kept = {
        head: {
            name: {
                str(size): _counted(measured, f"{head} {name} {size}", f"{REFERENCE} {name} {size}")
                for other, size in policies
                if other == name
            }
            for name in ("chain", "eagle2")
        }
        for head in found
    }
    return {**matching_texts(measured, [one.name for one in runners]), "heads": kept}


def _counted(measured: Measurement, label: str, base: str) -> Json:
    """Returns the tokens per target pass of a runner over all prompts, over those of another, and by task family."""
    families = dict.fromkeys(prompt.family for prompt in measured.prompts)
    by_family = {family: mean_tokens(of_family(measured, family), label) for family in families}
    return {**tokens_over(measured, label, base), "by_family": by_family}


def _speed(lab: Lab, target: str, found: Mapping[str, str], prompts: Sequence[BenchPrompt]) -> Json:
    """Returns the speed of each draft under our policy, and its ratio to that of the reference."""
    runners = [lab.runner(target, head, OURS, {}, run) for head, run in found.items()]
    measured = time_runs(lab, target, runners, prompts, lab.sizes["drafts"]["repeats"])
    speed = summary(measured, lab.target(target), list(found))["policies"]
    over = {head: speed_ratio(measured.runs[head], measured.runs[REFERENCE]) for head in found}
    by_family = {}
    for family in dict.fromkeys(prompt.family for prompt in prompts):
        own = of_family(measured, family)
        by_family[family] = {head: speed_ratio(own.runs[head], own.runs[REFERENCE])["ratio"] for head in found}
    return {"speed": {head: {**speed[head], "over": over[head]} for head in found}, "speed_by_family": by_family}


# -- the section -----------------------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """What the parts of several seeds have in common; the last three are empty where a part has none."""

    target: str
    budget: str
    megabytes: int = 0
    threads: int = 0
    passes: str = ""

    @classmethod
    def of(cls, part: Json) -> Group:
        """Returns the group of a part."""
        return cls(**{key: part[key] for key in cls._fields if key in part})

    @property
    def title(self) -> str:
        """The group's heading."""
        size = f"{self.megabytes} MB, " if self.megabytes else ""
        threads = f", {self.threads} threads" if self.threads else ""
        passes = f", {self.passes} passes" if self.passes else ""
        return f"{self.target}, {size}{BUDGETS[self.budget]}{threads}{passes}"

    @property
    def place(self) -> tuple[int, int, str, int, int]:
        """What groups are ordered by: the targets themselves first, then as in `BUDGETS`."""
        targets = list(TARGET_TITLES.values())
        return self.megabytes, self.threads, self.passes, list(BUDGETS).index(self.budget), targets.index(self.target)


def _groups(found: Mapping[str, Json]) -> dict[Group, list[Json]]:
    """Returns the parts by group, one for each seed."""
    groups: dict[Group, list[Json]] = {}
    for part in found.values():
        groups.setdefault(Group.of(part), []).append(part)
    return {group: sorted(groups[group], key=itemgetter("seed")) for group in sorted(groups, key=lambda one: one.place)}


def _over_seeds(values: Iterable[float]) -> Json:
    """Returns the mean of one figure over seeds, and its range if there are several."""
    known = list(values)
    return {"mean": mean(known), "range": [min(known), max(known)] if len(known) > 1 else None}


def _ratio(over: Sequence[Json]) -> Json:
    """Returns the mean and the range of a ratio over seeds, and its interval with the first seed."""
    found = _over_seeds(one["ratio"] for one in over)
    return {"ratio": found["mean"], "ratio_range": found["range"], "ratio_ci": over[0].get("ci")}


def _token_rows(parts: Sequence[Json]) -> list[Json]:
    """Returns tokens per target pass of every draft, over the seeds."""
    rows = []
    for head, first in parts[0]["tokens"]["heads"].items():
        kept = [part["tokens"]["heads"][head] for part in parts]
        sizes = {name: {size: _over_seeds(one[name][size]["tokens"] for one in kept) for size in first[name]} for name in first}
        families = {
            family: _over_seeds(_default_chain(one)["by_family"][family] for one in kept)
            for family in _default_chain(first)["by_family"]
        }
        own = [part["heads"][head] for part in parts]
        ratio = _ratio([_default_chain(one)["over"] for one in kept])
        minutes = _over_seeds(one["training_s"] / 60 for one in own)
        shared = {"head": head, "step": own[0]["step"], "parameters": own[0]["parameters"] / 1e6, "minutes": minutes}
        rows.append({**shared, **sizes, "families": families, **ratio})
    return rows


def _default_chain(kept: Json) -> Json:
    """Returns the figures of the chain of the default depth, or of the deepest that was measured."""
    chains: Json = kept["chain"]
    return dict(chains.get(str(DEFAULT_DEPTH)) or chains[max(chains, key=int)])


def _speed_rows(parts: Sequence[Json]) -> list[Json]:
    """Returns the speed of every draft under our policy: means over seeds; intervals are those of the first seed."""
    rows = []
    for head, first in parts[0]["speed"].items():
        kept, own = [part["speed"][head] for part in parts], [part["heads"][head] for part in parts]
        row = {
            key: mean(one[key] for one in kept)
            for key in ("tokens_per_s", "speedup", "tokens_per_target_pass", "nodes_per_round")
        }
        row |= {key: mean(one[key] for one in own) for key in ("start_ms", "level_ms", "pass_ms")}
        rounds = max(first["rounds"], 1)
        draft = 1e3 * (first["time_s"]["draft_prefill"] + first["time_s"]["draft_steps"]) / rounds
        target = 1e3 * first["time_s"]["verify"] / rounds
        row |= {"head": head, "draft_ms": draft, "target_ms": target, "speedup_ci": first.get("speedup_ci")}
        row |= _ratio([one["over"] for one in kept])
        counts = {key: sum(one[key] for one in kept) for key in ("match", "total")}
        families = {
            family: mean(part["speed_by_family"][family][head] for part in parts) for family in parts[0]["speed_by_family"]
        }
        rows.append({**row, **counts, "families": families})
    return rows


def _values(found: Mapping[str, Json]) -> Json:
    groups = {group.title: parts for group, parts in _groups(found).items()}
    first = next(iter(groups.values()))
    return {
        "tokens": {title: _token_rows(parts) for title, parts in groups.items() if parts[0]["tokens"]},
        "speeds": {title: _speed_rows(parts) for title, parts in groups.items() if "speed" in parts[0]},
        "seeds": {title: [part["seed"] for part in parts] for title, parts in groups.items()},
        "depth": DEFAULT_DEPTH,
        "reference": REFERENCE,
        "prompts": first[0]["tokens"]["prompts"],
        "commands": [one["command"] for one in first[0]["heads"].values()],
        "scope": "; ".join(f"{title} with {len(parts)} seed{'s' * (len(parts) > 1)}" for title, parts in groups.items()),
    }


def _expectations(found: Mapping[str, Json]) -> Iterator[Expectation]:
    for group, parts in _groups(found).items():
        where = group.title
        if parts[0]["tokens"]:
            yield _level(where, _token_rows(parts))
        if "speed" in parts[0]:
            yield _faster(where, _speed_rows(parts))
        if parts[0]["tokens"] and group.budget == TIME:
            yield from _glance(where, _token_rows(parts))


def _level(where: str, rows: Sequence[Json]) -> Expectation:
    by_head = {row["head"]: row for row in rows}
    best = max((row for row in rows if _is_one_pass(row["head"])), key=_chain_tokens)
    claim = f"{where}: the best one-pass head at least level with `{REFERENCE}` in tokens per pass of a chain"
    tokens = {row["head"]: _chain_tokens(row) for row in (best, by_head[REFERENCE])}
    evidence = f"`{best['head']}` {tokens[best['head']]:.2f}, `{REFERENCE}` {tokens[REFERENCE]:.2f}: {_ratio_text(best)}"
    return Expectation(claim, tokens[best["head"]] >= tokens[REFERENCE], evidence)


def _is_one_pass(head: str) -> bool:
    """Whether a draft predicts all levels in one pass; a variant is named after its kind, such as `block_12`."""
    return head.partition("_")[0] in ONE_PASS


def _chain_tokens(row: Json) -> float:
    chains = row["chain"]
    return float((chains.get(str(DEFAULT_DEPTH)) or chains[max(chains, key=int)])["mean"])


def _faster(where: str, rows: Sequence[Json]) -> Expectation:
    best = max((row for row in rows if _is_one_pass(row["head"])), key=lambda row: float(row["ratio"]))
    claim = f"{where}: the fastest one-pass head at least {FASTER} times as fast as `{REFERENCE}` under `{OURS}`"
    return Expectation(claim, best["ratio"] >= FASTER, f"`{best['head']}`: {_ratio_text(best)}")


def _ratio_text(row: Json) -> str:
    """Returns the ratio of a draft over the reference, `1.16x (1.11-1.20), range over seeds`."""
    kind = "range over seeds" if row["ratio_range"] else "95% interval"
    return f"{times_with_interval(row['ratio'], row['ratio_range'] or row['ratio_ci'])}, {kind}"


def _glance(where: str, rows: Sequence[Json]) -> Iterator[Expectation]:
    """GLANCE: a block head beats EAGLE-3 on charts and documents, and loses on captions."""
    by_head = {row["head"]: row["families"] for row in rows}
    for family, is_better in (("chart", True), ("caption", False)):
        if family in by_head.get("dflash", {}):
            ours, theirs = (by_head[head][family]["mean"] for head in ("dflash", RIVAL))
            word = "more" if is_better else "fewer"
            claim = f"GLANCE: DFlash accepts {word} tokens than EAGLE-3 on `{family}`, {where}"
            yield Expectation(claim, (ours > theirs) is is_better, f"{ours:.2f} and {theirs:.2f} tokens per pass of a chain")


def _draw(found: Mapping[str, Json]) -> Figure:
    groups = {group.title: parts for group, parts in _groups(found).items() if parts[0]["tokens"]}
    rows = _token_rows(next(iter(groups.values())))

    def curves(name: str) -> list[Curve]:
        return [
            Curve(row["head"], [int(size) for size in row[name]], [one["mean"] for one in row[name].values()], color)
            for row, color in zip(rows, COLORS, strict=False)
        ]

    panels = {"chain, by depth": curves("chain"), "best-first tree, by verified nodes": curves("eagle2")}
    figure = plot_curves(
        "Tokens per target pass by draft", next(iter(groups)), panels, height=3.6, from_zero=False, legend=len(rows)
    )
    figure.axes[1].set_xscale("log", base=2)
    nodes = [int(size) for size in rows[0]["eagle2"]]
    figure.axes[1].set_xticks(nodes, [str(count) for count in nodes])
    figure.axes[1].minorticks_off()
    return figure


STUDY = Study(
    name="drafts",
    measure=_measure,
    expectations=_expectations,
    values=_values,
    plots={"drafts.png": _draw},
    is_per_target=True,
)
