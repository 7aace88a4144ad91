"""Serves a `gguf` export with llama.cpp and compares it with our decoder: `make engines-llama` builds the server and runs this.

A small random text target with the tokenizer of the published model of `make real`, which llama.cpp's converter knows, has an
`eagle3` draft trained on its own answers. Served by llama.cpp in float32, greedy, with `DEPTH` drafted tokens per round, every
prompt must have the same token ids as under our policy `chain`, up to a tie of the target's two best tokens, and the accepted
tokens differ by at most `TOLERANCE`. The control, a draft with wrong layer ids, must be accepted less.

    python tests/engines/check_llama.py --llama SOURCE --server llama-server
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from engine_checks import DEPTH, MAX_NEW_TOKENS, answers_to, questions, train
from layouts import FILES, SCALED, TEXT, Layout, save_layout

import sage
from checkpoints.export.exporter import ExportOptions, export
from checkpoints.export.formats.gguf import FILE, SCRIPT
from data_prep.real import build_target as build_published
from sage.io.tables import markdown_table
from train.serve_check.acceptance import decode_chain
from train.serve_check.vllm_process import write_prompts

PORT, WAIT_S = 18471, 120
TRAIN_PROMPTS, NUM_PROMPTS = 32, 8
TOLERANCE = 0.02  # of the accepted tokens
TIE = 1e-3  # difference of the two best logits: which one is chosen depends on the order of sums
TOKENS = {"vocab_size": 49152, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}  # of the published tokenizer
HEAD = ("draft", "texts equal, gap of others", "drafted", "accepted by llama.cpp", "by our decoder")


def main() -> int:
    """Builds, trains, exports, serves and compares; returns 0 if all checks pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, required=True, help="source folder of llama.cpp")
    parser.add_argument("--server", type=Path, required=True, help="its llama-server")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        return check(Path(scratch), args.llama, args.server)


def check(folder: Path, home: Path, server: Path) -> int:
    """Runs the check in `folder`; returns the exit code."""
    target = save_target(folder / "target")
    draft = train_draft(target, folder)
    draft.save_pretrained(folder / "draft")
    options = {"target": str(folder / "target"), "dtype": torch.float32, "converter": str(home)}
    export(folder / "draft", folder / "export", "gguf", ExportOptions(**options))
    draft.config.feature_levels = [level - 1 for level in draft.config.feature_levels]
    draft.save_pretrained(folder / "wrong_draft")
    export(folder / "wrong_draft", folder / "wrong", "gguf", ExportOptions(**options))
    convert = [sys.executable, str(home / SCRIPT), str(folder / "target"), "--outtype", "f32", "--outfile"]
    subprocess.run([*convert, str(folder / "target.gguf")], check=True, capture_output=True)
    prompts, _ = write_prompts(target, questions("text", "test", NUM_PROMPTS), folder)
    ours = decode_chain(target, sage.load_draft(folder / "draft", target), prompts, DEPTH, MAX_NEW_TOKENS)
    ids = [prompt.inputs["input_ids"][0].tolist() for prompt in prompts]
    expected, rows, failed = sum(map(sum, ours.counts or [])), [], False
    for name in ("export", "wrong"):
        with running(server, folder / "target.gguf", folder / name / FILE):
            answers = [answer(prompt) for prompt in ids]
        gaps = [gap_at_difference(target, *one) for one in zip(ids, ours.tokens, (x["tokens"] for x in answers), strict=True)]
        same = gaps.count(None)
        drafted, accepted = (sum(one["timings"].get(key, 0) for one in answers) for key in ("draft_n", "draft_n_accepted"))
        rows.append(
            [
                name,
                f"{same}/{len(ids)} {' '.join(f'{gap:.1e}' for gap in gaps if gap is not None)}".strip(),
                str(drafted),
                str(accepted),
                str(expected),
            ]
        )
        is_near = abs(accepted - expected) <= TOLERANCE * expected
        failed |= any(gap is not None and gap > TIE for gap in gaps) or is_near != (name == "export")
    print(markdown_table(list(HEAD), rows, "<"))
    print("engines-llama: FAILED" if failed else "engines-llama: all checks pass")
    return int(failed)


def save_target(folder: Path) -> sage.Target:
    """Saves a random Llama 3 with the published model's tokenizer, and loads it."""
    save_layout(Layout(config={"type": "LlamaConfig", **TEXT, **TOKENS, "head_dim": 64, "rope_parameters": SCALED}), folder)
    for file in ("chat_template.jinja", *FILES):
        shutil.copy(build_published() / file, folder)
    return sage.load_target(folder, dtype=torch.float32)


def train_draft(target: sage.Target, folder: Path) -> Any:
    """Trains a draft on the target's answers, with their tokens as its vocabulary."""
    rows = answers_to(target, questions("text", "train", TRAIN_PROMPTS), folder / "training")
    vocabulary = torch.cat([row["input_ids"] for row in rows]).unique()
    draft: Any = sage.new_draft(target, "eagle3", seed=0, vocabulary=vocabulary)
    train(target, draft, "eagle3", rows)
    return draft


@torch.no_grad()
def gap_at_difference(target: sage.Target, prompt: list[int], ours: list[int], theirs: list[int]) -> float | None:
    """Returns by how much the target prefers its best token to the next one where two answers first differ; None if equal."""
    if ours == theirs:
        return None
    place = next(place for place, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other)
    logits = target.model(input_ids=torch.tensor([prompt + ours[:place]])).logits[0, -1]
    first, second = logits.topk(2).values.tolist()
    return float(first - second)


@contextmanager
def running(server: Path, target: Path, draft: Path) -> Iterator[None]:
    """Runs llama-server until the block ends."""
    options = [*("--spec-type", "draft-eagle3", "--spec-draft-n-max", str(DEPTH), "--spec-draft-p-min", "0")]
    options += [*("--port", str(PORT), "-t", "1", "-np", "1", "-c", "1024", "--no-warmup")]
    log = draft.with_suffix(".log")
    with log.open("w") as out:
        process = subprocess.Popen([server, "-m", target, "-md", draft, *options], stdout=out, stderr=out)
        try:
            wait_for(process, log)
            yield
        finally:
            process.terminate()
            process.wait()


def wait_for(process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until the server answers; RuntimeError with the end of its log if it ends before, or does not start."""
    begin = time.monotonic()
    while process.poll() is None and time.monotonic() - begin < WAIT_S:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=1)
            return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"llama-server does not answer: {log.read_text()[-800:]}")


def answer(prompt: list[int]) -> dict[str, Any]:
    """Returns the server's greedy answer to token ids."""
    body = {"prompt": prompt, "n_predict": MAX_NEW_TOKENS, "temperature": 0, "return_tokens": True, "cache_prompt": False}
    address, kind = f"http://127.0.0.1:{PORT}/completion", {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(address, json.dumps(body).encode(), kind), timeout=WAIT_S) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


if __name__ == "__main__":
    sys.exit(main())
