"""Reports and pages made by hand, without a model and an engine, in which every name and text can be hostile."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.data_helpers import assistant, make_image, make_processor, user
from support.traces import HOSTILE, Words, made_trace

from data_prep.chat import build_example
from data_prep.conversation import Conversation
from data_prep.tools.stats import measure, render_html
from sage.bench.measurement import BenchPrompt
from train.report import page
from train.serve_check.acceptance import Answers, render_check
from train.validation.validate import write

PHASES = ("draft_steps", "verify", "accept", "commit", "policy", "other")
NAMED = ("draft", "export", "target", "engine")
DEPTH, LENGTH = 3, 30
OURS = [4, 1, 2, 3, 1, 4, 4, 2, 1, 3, 4]  # tokens per round
THEIRS = [4, 1, 2, 1, 2, 1, 4, 4, 2, 1, 3, 4]  # three tokens by two rounds
NUM_TOKENS = 3  # of the rounds of an answer that differ


def _policy(speedup: float, accepted: float, shares: Sequence[float]) -> dict[str, Any]:
    """Figures of a policy; `shares` of decoding time by `PHASES`, 2.4 s at a speedup of 1."""
    levels = [{"depth": d, "tried": 160 // d, "kept": round(160 // d * (0.5 + 0.1 * accepted - 0.04 * d))} for d in range(1, 9)]
    phases = {phase: share * 2.4 / speedup for phase, share in zip(PHASES, shares, strict=True)}
    return {
        "mean_accepted_draft": accepted,
        "tokens_per_target_pass": accepted + 1,
        "tokens_per_s": 150 * speedup,
        "speedup": speedup,
        "speedup_end_to_end": 1 + 0.8 * (speedup - 1),
        "speedup_ci": [speedup * 0.93, speedup * 1.06],
        "match": 16,
        "total": 16,
        "match_hf": 16,
        "first_gaps": [],
        "time_s": {"vision": 0.1, "target_prefill": 0.2, "draft_prefill": 0.02 * (accepted > 0)} | phases,
        "acceptance_by_depth": levels if accepted else [],
        "nodes_per_round": 10.0,
        "draft_steps_per_round": 5.0,
        "per_prompt": [],
    }


def example_report() -> dict[str, Any]:
    lookup = {"tokens_per_s": 163.0, "speedup": 1.09, "speedup_end_to_end": 1.05, "speedup_ci": [0.98, 1.21]}
    return {
        "schema": 1,
        "target": "pocket_qwen2_5_vl",
        "draft": "runs/demo/draft",
        "device": "cpu",
        "dtype": "float32",
        "prompts": 16,
        "max_new_tokens": 128,
        "temperature": 0.0,
        "seed": 0,
        "repeats": 3,
        "step": 400,
        "fastest_baseline": "hf_generate",
        "policies": {
            "autoregressive": _policy(0.93, 0.0, (0, 0.97, 0, 0.01, 0, 0.02)),
            "static": _policy(1.86, 2.98, (0.27, 0.67, 0.02, 0.01, 0.01, 0.02)),
            "sage": _policy(2.24, 3.87, (0.33, 0.59, 0.02, 0.01, 0.03, 0.02)),
        },
        "baselines": {
            "autoregressive": {"tokens_per_s": 139.5, "speedup": 0.93, "speedup_end_to_end": 0.94},
            "hf_generate": {"tokens_per_s": 150.0, "speedup": 1.0, "speedup_end_to_end": 1.0},
            "hf_prompt_lookup": lookup,
        },
        "failed_baselines": {},
        "margins": {"policy": "sage", "over": {"static": {"ratio": 1.2, "ci": [1.1, 1.3]}}},
        "by_family": {"caption": {"sage": {"prompts": 16, "tokens_per_target_pass": 4.9, "speedup": 2.3}}},
        "machine": {"system": "Linux x86_64", "cpu": "AMD EPYC", "cores": 2, "torch_threads": 2, "load_average": 1.1},
        "versions": {"python": "3.12.3", "torch": "2.13.0", "transformers": "5.23.0"},
        "command": "sage-validate checkpoint=runs/demo",
    }


def with_cost_aware(report: dict[str, Any]) -> dict[str, Any]:
    """Adds a learning policy."""
    report["policies"]["cost_aware"] = _policy(2.5, 4.0, (0.33, 0.59, 0.02, 0.01, 0.03, 0.02))
    return report


def made_check(texts: Sequence[str], fault: str = "engine bad: <b>") -> str:
    """The page with a prompt for every text, in which the engine emits tokens 8 to 10 by two rounds."""
    asked = []
    for text in texts:
        content = [{"type": "image", "image": make_image()}, {"type": "text", "text": text}]
        talk = [{"role": "user", "content": content}]
        asked.append(BenchPrompt(name=text, family=text, inputs={}, messages=talk))
    tokens = [list(range(LENGTH))] * len(texts)
    ours, theirs = (Answers(tokens, [rounds] * len(texts), DEPTH) for rounds in (OURS, THEIRS))
    rows = {"trained, our decoder": ours, "export, our decoder": ours, "export, vLLM": theirs}
    return render_check(rows, [fault], asked, Words(texts), dict.fromkeys(NAMED, texts[0]))


def data_page() -> str:
    processor = make_processor("llava_onevision")
    talk = Conversation(HOSTILE[0], [user(make_image(), HOSTILE[1]), assistant(HOSTILE[0])], HOSTILE[1])
    example = build_example(talk, processor)
    return render_html(HOSTILE[0], measure([(talk, example)], 1, processor), [(talk, example)], processor)


def report_page(folder: Path) -> Path:
    """The page of a validation with a plot, prompts and a trace."""
    report, prompts = example_report(), []
    for place, text in enumerate(HOSTILE):
        image = {"type": "image", "image": make_image()}
        talk = [{"role": "user", "content": [image, {"type": "text", "text": text}]}]
        prompts.append(BenchPrompt(name=f"{place} {text}", inputs={}, messages=talk))
    for number, part in enumerate(report["policies"].values()):
        part["per_prompt"] = [
            {"name": prompt.name, "family": HOSTILE[0], "tokens": 9, "tokens_per_target_pass": 1.0 + (place + number) % 4}
            for place, prompt in enumerate(prompts)
        ]
    families = {HOSTILE[1]: report["by_family"]["caption"]}
    report |= {"target": HOSTILE[0], "draft": HOSTILE[1], "command": HOSTILE[0], "by_family": families}
    shown = made_trace(8, 5, HOSTILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "PLOTS", page.PLOTS[:1])
        write(report, folder, prompts, {prompts[0].name: {"sage": shown}})
    return folder / "report.html"


def hostile_pages(folder: Path) -> dict[str, Path]:
    """Writes every page into a folder; returns their paths by kind."""
    pages = {name: folder / f"{name}.html" for name in ("trace", "check", "data")}
    made_trace(30, 9, HOSTILE).save(pages["trace"])
    pages["check"].write_text(made_check(HOSTILE), encoding="utf-8")
    pages["data"].write_text(data_page(), encoding="utf-8")
    return pages | {"report": report_page(folder / "<img src=x onerror='window.hacked = 3'>")}
