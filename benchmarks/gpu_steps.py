"""Steps of benchmarks.gpu_quarter_hour, the most valuable first, with their seconds on an H100; nothing has to be installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PYTHON = sys.executable
LARGE = "qwen2_5_vl_7b"
STEP_BATCH, STEP_LENGTH = 2, 2048  # sequences and tokens of the timed step
CONTEXTS = (4096, 16384)
NODES = (1, 8, 32, 64)
# a real run at full size; benchmarks.gpu_page plans it with the same words
TRAIN_LARGE = (
    "draft=eagle3 draft.draft_vocab_size=32000 data=messages data.max_length=4096 train.global_batch_size=8 "
    "train.micro_batch_size=2 train.max_steps=8 train.log_every=1 decode.num_prompts=2 decode.max_new_tokens=48 "
    "decode.policies=[chain,cost_aware] decode.baselines=[hf_generate] decode.warmup=0 decode.traces=0"
)
TIMED_STEP = f"experiment=eagle3 train.global_batch_size={STEP_BATCH} train.micro_batch_size={STEP_BATCH}"
POCKET = (
    "target=pocket_qwen2_5_vl data=pocket data.num_examples=64 train.global_batch_size=8 train.micro_batch_size=4 "
    "decode.num_prompts=2 decode.max_new_tokens=24 decode.warmup=0 decode.traces=0 decode.policies=[chain,sage] "
    "decode.baselines=[hf_generate]"
)
TESTS = ["tests/device", "tests/passes/test_passes.py", "tests/decoding/test_gpu.py"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command; it starts if its estimate fits into the budget, and is killed at its limit.

    Attributes:
        command: keeps its files in the step's folder, `Scale.folder(name)`.
        shows: what its success proves, or what it measures.
    """

    name: str
    estimate_s: float
    limit_s: float
    command: Sequence[str]
    shows: str


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Where the steps run, and how large they are: a 7B on a GPU, pocket sizes on a CPU."""

    work: Path
    is_gpu: bool

    def folder(self, name: str) -> str:
        return str(self.work / name)

    @property
    def device(self) -> list[str]:
        return ["--device", "cuda" if self.is_gpu else "cpu"]

    @property
    def dtype(self) -> str:
        return "bf16" if self.is_gpu else "fp32"

    def train(self, name: str, *words: str) -> list[str]:
        """Returns the command of a run whose folder is that of the step."""
        device = self.device[1]
        return [PYTHON, "-m", "sage.training", "train", *words, f"launch.device={device}", f"run.dir={self.folder(name)}"]

    def pocket(self, name: str, *words: str) -> list[str]:
        dtypes = [f"target.dtype={self.dtype}", f"train.precision={self.dtype}"]
        return self.train(name, *POCKET.split(), *dtypes, *words)

    def texts(self, name: str, temperature: str) -> list[str]:
        """Compares captured decoding with Hugging Face's, and the policies with each other."""
        head = [
            PYTHON,
            "-m",
            "sage.bench",
            "--draft",
            self.folder("run"),
            "--prompts",
            f"{self.folder('prompts')}/prompts.jsonl",
        ]
        sizes = ["--num-prompts", "2", "--repeats", "1", "--max-new-tokens", "32" if self.is_gpu else "8"]
        policies = ["--policies", "chain,static,sage,cost_aware", "--baselines", "hf_generate", "--temperature", temperature]
        passes = ["--passes", "captured" if self.is_gpu else "eager", "--dtype", self.dtype]
        return [*head, *sizes, *policies, *passes, *self.device, "--out", f"{self.folder(name)}/report.json"]

    def passes(self, name: str, context: int) -> list[str]:
        """Times passes of a large target, eager and captured."""
        nodes, repeats = (",".join(map(str, NODES)), "15") if self.is_gpu else ("1", "1")
        model = ["--shape", LARGE] if self.is_gpu else ["--target", "pocket_qwen2_5_vl", "--draft", self.folder("run")]
        sizes = ["--nodes", nodes, "--widths", "1,8" if self.is_gpu else "1", "--context", str(context if self.is_gpu else 64)]
        rest = ["--dtype", "bf16", "--repeats", repeats, *self.device, "--out", f"{self.folder(name)}/table.json"]
        return [PYTHON, "-m", "benchmarks.passes", *model, *sizes, *rest]

    def step(self, name: str, *words: str) -> list[str]:
        """Times the parts of a training step of a large target."""
        size, length, measured = ("640x480", STEP_LENGTH, 8) if self.is_gpu else ("160x160", 128, 1)
        sizes = [
            "--images",
            size,
            "--length",
            str(length),
            "--measured",
            str(measured),
            "--warmup",
            "2" if self.is_gpu else "0",
        ]
        target = LARGE if self.is_gpu else "pocket_qwen2_5_vl"
        overrides = [*TIMED_STEP.split(), f"target={target}", "data.path=/no/data", *words]
        head = [PYTHON, "-m", "benchmarks.training", *sizes, *self.device]
        return [*head, "--out", f"{self.folder(name)}/table.json", *overrides]


def steps(work: Path, is_gpu: bool) -> list[Step]:
    """Returns the steps in the order of their value."""
    scale = Scale(work=work.resolve(), is_gpu=is_gpu)
    found = [*_first(scale), *_large(scale), *_rest(scale)]
    return [Step(name=name, estimate_s=s, limit_s=limit, command=words, shows=shows) for name, s, limit, words, shows in found]


Row = tuple[str, float, float, list[str], str]


def _first(scale: Scale) -> Iterator[Row]:
    """Whether training and decoding run at all: pocket sizes."""
    words = ("draft=eagle", "train.max_steps=12", "train.validate_every=6")
    yield "run", 60, 150, scale.pocket("run", *words), "a run: DeepSpeed, staging, compiled layers, captured passes, validation"
    convert = ["action=convert", "data=pocket", "split=validation", "data.num_examples=40"]
    prompts = [PYTHON, "-m", "sage.training", "data", *convert, f"out={scale.folder('prompts')}/prompts.jsonl"]
    yield "prompts", 10, 60, prompts, "prompts for the next steps"
    check = [PYTHON, "-m", "sage", "--check-device", "--draft", scale.folder("run"), "--dtype", scale.dtype, *scale.device]
    yield "check_device", 30, 90, check, "kernels, bandwidth, synchronizations per round"
    yield "texts", 45, 120, scale.texts("texts", "0"), "texts of captured passes equal Hugging Face's"


def _large(scale: Scale) -> Iterator[Row]:
    """A folder with the published sizes, and training on it."""
    target = scale.folder("build_7b")
    build = [PYTHON, "-m", "benchmarks.published", LARGE, target, "--photos", "72", *scale.device]
    yield (
        "build_7b",
        40,
        120,
        build if scale.is_gpu else [*build, "--small"],
        "a folder in the published layout, random weights",
    )
    words = (*TRAIN_LARGE.split(), f"target.path={target}/target", f"data.path={target}/photos.jsonl")
    small = (
        () if scale.is_gpu else ("train.max_steps=2", "decode.max_new_tokens=8", "train.precision=fp32", "target.dtype=fp32")
    )
    yield "train_7b", 150, 240, scale.train("train_7b", *words, *small), "a run at 7B: memory, tokens/s, data wait, validation"
    yield f"passes_{CONTEXTS[0]}", 45, 120, scale.passes(f"passes_{CONTEXTS[0]}", CONTEXTS[0]), "passes of a 7B"
    yield "step", 90, 180, scale.step("step"), "the parts of a training step at 7B, compiled layers"


def _rest(scale: Scale) -> Iterator[Row]:
    """As far as time allows."""
    yield "texts_sampled", 40, 120, scale.texts("texts_sampled", "1"), "the same with a temperature"
    rows = "1024" if scale.is_gpu else "32"
    chain = ["--rows", rows, *scale.device, "--out", f"{scale.folder('chain_attention')}/table.json"]
    command = [PYTHON, "-m", "benchmarks.chain_attention", *chain]
    yield "chain_attention", 15, 60, command, "gradients of the attention of unrolled steps, against float64"
    words = ("draft=eagle3", "draft.draft_vocab_size=200", "deepspeed=zero3", "train.max_steps=2")
    yield "zero3", 45, 120, scale.pocket("zero3", *words), "ZeRO-3"
    if not scale.is_gpu:
        return
    yield "step_eager", 40, 120, scale.step("step_eager", "train.compile=none"), "what compiled layers save"
    yield f"passes_{CONTEXTS[1]}", 45, 120, scale.passes(f"passes_{CONTEXTS[1]}", CONTEXTS[1]), "long contexts"
    words = ("draft=eagle", "optim=muon", "deepspeed=zero1", "train.max_steps=3")
    yield "zero1_muon", 45, 120, scale.pocket("zero1_muon", *words), "Muon in bf16 on tensor cores"
    yield "tests", 60, 180, [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS], "tests on the real device"
