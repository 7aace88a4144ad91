"""The command that serves an export, for each engine that can."""

from __future__ import annotations

import json

from checkpoints.export.expressible import SERVED_FAMILIES
from checkpoints.export.facts import TargetFacts
from checkpoints.export.formats.layout import Flavour, Format
from checkpoints.export.formats.speculators import SPECULATIVE_TOKENS

SGLANG_TOPK, SGLANG_NODES = 4, 16


def serve_commands(format_: Format, flavour: Flavour | None, facts: TargetFacts, draft: str) -> dict[str, str]:
    """Engine -> command line; empty where no engine serves the target's family.

    Args:
        draft: folder or hub id of the export, as it is to stand in the command.
    """
    if facts.model_type not in SERVED_FAMILIES:
        return {}
    target = facts.name or "TARGET"
    if format_ == Format.speculators:
        return {"vLLM": f"vllm serve {draft}"}
    method = "eagle3" if format_ == Format.eagle3 else "eagle"
    commands = {"vLLM": _vllm(target, draft, method), "SGLang": _sglang(target, draft, method)}
    if format_ == Format.eagle:
        name = "vLLM" if flavour == Flavour.vllm else "SGLang"
        return {name: commands[name]}
    return commands


def _vllm(target: str, draft: str, method: str) -> str:
    options = {"method": method, "model": draft, "num_speculative_tokens": SPECULATIVE_TOKENS}
    return f"vllm serve {target} \\\n  --speculative-config '{json.dumps(options)}'"


def _sglang(target: str, draft: str, method: str) -> str:
    return (
        f"python -m sglang.launch_server --model-path {target} \\\n"
        f"  --speculative-algorithm {method.upper()} --speculative-draft-model-path {draft} \\\n"
        f"  --speculative-num-steps {SPECULATIVE_TOKENS} --speculative-eagle-topk {SGLANG_TOPK} "
        f"--speculative-num-draft-tokens {SGLANG_NODES}"
    )
