"""Steps of benchmarks.gpu_quarter_hour, the most valuable first, with their seconds on an H100; nothing has to be installed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

LARGE = "qwen2_5_vl_7b"
STEP_BATCH, STEP_LENGTH = 2, 2048  # sequences and tokens of the timed step
TIMED_STEP = f"experiment=eagle3 train.global_batch_size={STEP_BATCH} train.micro_batch_size={STEP_BATCH}"
CONTEXTS = (4096, 16384)
NODES = (1, 8, 32, 64)
# a real run at full size; benchmarks.gpu_expected plans it with the same words
TRAIN_LARGE = (
    "draft=eagle3 draft.draft_vocab_size=32000 data=messages data.max_length=4096 train.global_batch_size=8 "
    "train.micro_batch_size=2 train.max_steps=8 train.log_every=1 decode.num_prompts=2 decode.max_new_tokens=48 "
    "decode.policies=[chain,cost_aware] decode.baselines=[hf_generate] decode.warmup=0 decode.traces=0"
)
TRAIN_SMALL = (
    f"{TRAIN_LARGE} train.global_batch_size=2 train.micro_batch_size=1 train.max_steps=2 train.precision=fp32 "
    "target.dtype=fp32 draft.draft_vocab_size=2000 decode.num_prompts=1 decode.max_new_tokens=4 decode.baselines=[]"
)
POCKET = (
    "target=pocket_qwen2_5_vl data=pocket data.num_examples=64 train.global_batch_size=8 train.micro_batch_size=4 "
    "decode.num_prompts=2 decode.max_new_tokens=24 decode.warmup=0 decode.traces=0 decode.policies=[chain,sage] "
    "decode.baselines=[hf_generate]"
)
POLICIES = "chain,static,sage,cost_aware"
TESTS = "tests/device tests/passes/test_passes.py tests/decoding/test_gpu.py"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command; it starts if its estimate fits into the budget, and is killed at its limit.

    Attributes:
        command: keeps its files in a folder of the step's name.
        shows: what its success proves, or what it measures.
    """

    name: str
    estimate_s: float
    limit_s: float
    command: Sequence[str]
    shows: str


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Words of commands at the sizes of the machine: a 7B on a GPU, pocket sizes on a CPU."""

    work: Path
    is_gpu: bool

    def folder(self, name: str) -> str:
        """Returns the folder of a step, quoted."""
        return shlex.quote(str(self.work / name))

    @property
    def device(self) -> str:
        return "cuda" if self.is_gpu else "cpu"

    @property
    def dtype(self) -> str:
        return "bf16" if self.is_gpu else "fp32"

    def train(self, name: str, words: str) -> str:
        return f"sage.training train {words} launch.device={self.device} run.dir={self.folder(name)}"

    def pocket(self, name: str, words: str) -> str:
        return self.train(name, f"{POCKET} target.dtype={self.dtype} train.precision={self.dtype} {words}")

    def texts(self, name: str, temperature: int) -> str:
        """Compares decoding by captured passes with Hugging Face's."""
        tokens, passes = (32, "captured") if self.is_gpu else (8, "eager")
        return (
            f"sage.bench --draft {self.folder('run')} --prompts {self.folder('prompts')}/prompts.jsonl --num-prompts 2 "
            f"--repeats 1 --max-new-tokens {tokens} --policies {POLICIES} --baselines hf_generate --temperature {temperature} "
            f"--passes {passes} --dtype {self.dtype} --device {self.device} --out {self.folder(name)}/report.json"
        )

    def passes(self, name: str, context: int) -> str:
        """Times passes of a large target, eager and captured."""
        nodes = ",".join(map(str, NODES))
        sizes = f"--shape {LARGE} --nodes {nodes} --widths 1,8 --context {context} --repeats 15"
        if not self.is_gpu:
            sizes = f"--draft {self.folder('run')} --nodes 1 --widths 1 --context 64 --repeats 1"
        return f"benchmarks.passes {sizes} --dtype bf16 --device {self.device} --out {self.folder(name)}/table.json"

    def step(self, name: str, words: str = "") -> str:
        """Times the parts of a training step of a large target."""
        sizes = f"--images 640x480 --length {STEP_LENGTH} --measured 8 --warmup 2"
        if not self.is_gpu:
            sizes = "--images 160x160 --length 128 --measured 1 --warmup 0"
        target = LARGE if self.is_gpu else "pocket_qwen2_5_vl"
        overrides = f"{TIMED_STEP} target={target} data.path=/no/data {words}"
        return f"benchmarks.training {sizes} --device {self.device} --out {self.folder(name)}/table.json {overrides}"


def steps(work: Path, is_gpu: bool) -> list[Step]:
    """Returns the steps in the order of their value; some are for a GPU only. A CPU has twice the time."""
    scale = Scale(work=work.resolve(), is_gpu=is_gpu)
    rows = [*_first(scale), *_large(scale), *_rest(scale), *(_for_gpus(scale) if is_gpu else ())]
    return [
        Step(
            name=name,
            estimate_s=likely_s,
            limit_s=limit_s * (1 if is_gpu else 2),
            command=[sys.executable, "-m", *shlex.split(words)],
            shows=shows,
        )
        for name, likely_s, limit_s, words, shows in rows
    ]


Row = tuple[str, float, float, str, str]  # of a step: name, estimate, limit, words, what it shows


def _first(scale: Scale) -> Iterator[Row]:
    """Whether training and decoding run at all, at pocket sizes."""
    words = scale.pocket("run", "draft=eagle train.max_steps=12 train.validate_every=6")
    yield "run", 60, 150, words, "a run: DeepSpeed, staging, compiled layers, captured passes, validation"
    words = "action=convert data=pocket split=validation data.num_examples=40"
    words = f"sage.training data {words} out={scale.folder('prompts')}/prompts.jsonl"
    yield "prompts", 10, 60, words, "prompts for the next steps"
    words = f"sage --check-device --draft {scale.folder('run')} --dtype {scale.dtype} --device {scale.device}"
    yield "check_device", 30, 90, words, "kernels, bandwidth, synchronizations per round"
    yield "texts", 45, 120, scale.texts("texts", 0), "texts of captured passes equal Hugging Face's"


def _large(scale: Scale) -> Iterator[Row]:
    """A folder with published sizes, a run on it, and times."""
    built = scale.folder("build_7b")
    words = f"benchmarks.published {LARGE} {built} --photos 72 --device {scale.device}"
    yield "build_7b", 40, 120, words if scale.is_gpu else f"{words} --small", "a folder in the published layout, random weights"
    words = f"{TRAIN_LARGE if scale.is_gpu else TRAIN_SMALL} target.path={built}/target data.path={built}/photos.jsonl"
    yield "train_7b", 150, 240, scale.train("train_7b", words), "a run at 7B: memory, tokens/s, data wait, texts"
    yield f"passes_{CONTEXTS[0]}", 45, 120, scale.passes(f"passes_{CONTEXTS[0]}", CONTEXTS[0]), "passes of a 7B"
    yield "step", 90, 180, scale.step("step"), "the parts of a training step at 7B, compiled layers"


def _rest(scale: Scale) -> Iterator[Row]:
    """What is likely to hold if the steps above do."""
    yield "texts_sampled", 40, 120, scale.texts("texts_sampled", 1), "the same with a temperature"
    rows, out = 1024 if scale.is_gpu else 32, f"{scale.folder('chain_attention')}/table.json"
    words = f"benchmarks.chain_attention --rows {rows} --device {scale.device} --out {out}"
    yield "chain_attention", 15, 60, words, "gradients of the attention of unrolled steps, against float64"
    words = "draft=eagle3 draft.draft_vocab_size=200 deepspeed=zero3 train.max_steps=2"
    yield "zero3", 45, 120, scale.pocket("zero3", words), "ZeRO-3"


def _for_gpus(scale: Scale) -> Iterator[Row]:
    """As far as time allows."""
    yield "step_eager", 40, 120, scale.step("step_eager", "train.compile=none"), "what compiled layers save"
    yield f"passes_{CONTEXTS[1]}", 45, 120, scale.passes(f"passes_{CONTEXTS[1]}", CONTEXTS[1]), "long contexts"
    words = scale.pocket("zero1_muon", "draft=eagle optim=muon deepspeed=zero1 train.max_steps=3")
    yield "zero1_muon", 45, 120, words, "Muon in bf16 on tensor cores"
    yield "tests", 60, 180, f"pytest -q -p no:cacheprovider {TESTS}", "tests on the real device"
