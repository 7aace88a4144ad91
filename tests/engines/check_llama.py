"""Serves `gguf` exports with llama.cpp and compares them with our decoder: `make engines-llama` builds it and runs this.

Small random text targets have the tokenizer of the published model of `make real`, which the converter knows. Their drafts are
trained on their answers. Served in float32, greedy, with `DEPTH` drafted tokens per round, every prompt must have the same
token ids as under our policy `chain`, up to a tie of the target's two best tokens, and the accepted tokens differ by at most
`TOLERANCE` where the texts are equal. Controls are drafts that are damaged after training; llama.cpp must accept less of them.

    python tests/engines/check_llama.py --llama SOURCE --server llama-server
"""

from __future__ import annotations

import argparse
import copy
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
ROPES = {
    "scaled": SCALED,
    "plain": {"rope_type": "default", "rope_theta": 10000.0},
}  # by target; one-pass drafts need the second
BLOCK = {"feed": False, "feature_levels": [2, 4, 6]}
DRAFTS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {  # target -> draft -> kind, options
    "scaled": {"eagle3": ("eagle3", {"vocabulary": True})},
    "plain": {
        "dflash": ("block", BLOCK | {"conditional": "none", "block_size": DEPTH + 1}),
        "dspark": ("block", BLOCK | {"conditional": "markov", "block_size": DEPTH, "vocabulary": True}),
    },
}
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
    rows, failed = [], False
    for name, rope in ROPES.items():
        target = save_target(folder / name, rope)
        convert = [sys.executable, str(home / SCRIPT), str(folder / name), "--outtype", "f32", "--outfile"]
        subprocess.run([*convert, str(folder / f"{name}.gguf")], check=True, capture_output=True)
        prompts, _ = write_prompts(target, questions("text", "test", NUM_PROMPTS), folder)
        ids = [prompt.inputs["input_ids"][0].tolist() for prompt in prompts]
        examples = answers_to(target, questions("text", "train", TRAIN_PROMPTS), folder / f"{name}_examples")
        for label, (kind, options) in DRAFTS[name].items():
            draft = train_draft(target, kind, options, examples)
            draft.save_pretrained(folder / label)
            ours = decode_chain(target, sage.load_draft(folder / label, target), prompts, DEPTH, MAX_NEW_TOKENS)
            for damage in (None, *DAMAGES[label]):
                out = folder / f"{label}_export"
                other = copy.deepcopy(draft)
                if damage is not None:
                    damage(other)
                other.save_pretrained(folder / label)
                given = {"target": str(folder / name), "dtype": torch.float32, "converter": str(home), "overwrite": True}
                exported = export(folder / label, out, "gguf", ExportOptions(**given))
                with running(server, folder / f"{name}.gguf", out / FILE, exported.format.spec_type):
                    answers = [answer(prompt) for prompt in ids]
                pairs = zip(ids, ours.tokens, (given["tokens"] for given in answers), strict=True)
                gaps = [gap_at_difference(target, *pair) for pair in pairs]
                texts = f"{gaps.count(None)}/{len(ids)} {' '.join(f'{gap:.1e}' for gap in gaps if gap is not None)}".strip()
                equal = [place for place, gap in enumerate(gaps) if gap is None]  # after a tie, rounds differ
                counts = [answers[place]["timings"] for place in equal]
                drafted, accepted = (sum(given.get(key, 0) for given in counts) for key in ("draft_n", "draft_n_accepted"))
                expected = sum(sum((ours.counts or [])[place]) for place in equal)
                title = label if damage is None else f"{label}, {damage.__name__}"
                rows.append([title, texts, str(drafted), str(accepted), str(expected)])
                is_near = abs(accepted - expected) <= TOLERANCE * expected
                failed |= any(gap is not None and gap > TIE for gap in gaps) or is_near != (damage is None)
    print(markdown_table(list(HEAD), rows, "<"))
    print("engines-llama: FAILED" if failed else "engines-llama: all checks pass")
    return int(failed)


def lower_levels(draft: Any) -> None:
    """Names the hidden states one layer below those of training."""
    draft.config.feature_levels = [level - 1 for level in draft.config.feature_levels]


def first_levels(draft: Any) -> None:
    """Names the first hidden states."""
    draft.config.feature_levels = [1, 2, 3]


def other_mask_token(draft: Any) -> None:
    """Names another token for the slots."""
    draft.config.mask_token //= 2


def shifted_d2t(draft: Any) -> None:
    """Gives every draft token the target token of its neighbor."""
    ids = torch.arange(len(draft.d2t))
    draft.d2t.copy_((draft.d2t + ids).roll(1) - ids)


def foreign_lm_head(draft: Any) -> None:
    """Reverses the rows of the draft's lm_head."""
    draft.lm_head.weight.data.copy_(draft.lm_head.weight.flip(0))


DAMAGES = {  # of each draft
    "eagle3": (lower_levels, shifted_d2t, foreign_lm_head),
    "dflash": (other_mask_token,),
    "dspark": (first_levels, shifted_d2t),
}


def save_target(folder: Path, rope: dict[str, Any]) -> sage.Target:
    """Saves a random Llama with the published model's tokenizer, and loads it."""
    save_layout(Layout(config={"type": "LlamaConfig", **TEXT, **TOKENS, "head_dim": 64, "rope_parameters": rope}), folder)
    for file in ("chat_template.jinja", *FILES):
        shutil.copy(build_published() / file, folder)
    return sage.load_target(folder, dtype=torch.float32)


def train_draft(target: sage.Target, kind: str, options: dict[str, Any], rows: list[dict[str, Any]]) -> Any:
    """Trains a draft on the target's answers; `vocabulary` stands for their tokens."""
    chosen = {"vocabulary": torch.cat([row["input_ids"] for row in rows]).unique()} if options.get("vocabulary") else {}
    draft: Any = sage.new_draft(target, kind, seed=0, **options | chosen)
    train(target, draft, kind, rows)
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
def running(server: Path, target: Path, draft: Path, spec_type: str) -> Iterator[None]:
    """Runs llama-server until the block ends."""
    options = [*("--spec-type", spec_type, "--spec-draft-n-max", str(DEPTH), "--spec-draft-p-min", "0")]
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
