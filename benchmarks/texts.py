"""`python -m benchmarks.texts`: compares the texts of every policy with compiled or captured passes with those of eager passes.

Both round differently, so a text can differ where two tokens are nearly tied. Every text that differs is listed with the gap of
the two best scores at its first different token: logits, or with a temperature logits / T + Gumbel noise. A gap near the
rounding error is a near-tie, a large one a bug.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import sage
from benchmarks.engines.measure import question
from benchmarks.figures import describe_machine
from data_prep.pocket import world
from sage.bench.measurement import BenchPrompt, load_prompts
from sage.bench.options import names
from sage.bench.runners import on_device
from sage.bench.summary import first_difference, next_logits
from sage.commands import cli
from sage.decoding.noise import gumbel
from sage.decoding.settings import Sampling
from sage.io.dtypes import torch_dtype
from sage.io.tables import text_table
from sage.runtime.executors import describe_passes
from sage.runtime.modes import PassMode, resolve_pass_mode

TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True)
class Difference:
    """A text that differs: at token `index`, where the two best scores are `gap` apart."""

    policy: str
    temperature: float
    prompt: str
    index: int
    gap: float

    def __str__(self) -> str:
        where = f"{self.policy}, T = {self.temperature:g}, {self.prompt}"
        return f"differs: {where}, token {self.index}: the two best scores are {self.gap:.2g} apart"


@torch.inference_mode()
def texts(target: Any, draft: Any, policy: str, prompts: Sequence[BenchPrompt], sampling: Sampling) -> list[list[int]]:
    """Returns the tokens of every prompt. One policy decodes them all and keeps what it learns."""
    chosen = sage.policy(policy)
    draft = draft if chosen.num_candidates else None
    inputs = (on_device(prompt.inputs, target.device) for prompt in prompts)
    return [sage.generate(target, draft, fields, chosen, sampling=sampling).tokens.tolist() for fields in inputs]


@torch.inference_mode()
def gap_at(target: Any, prompt: BenchPrompt, tokens: Sequence[int], index: int, sampling: Sampling) -> float:
    """Returns the gap between the two best scores of the token at `index` of an answer."""
    scores = next_logits(target, on_device(prompt.inputs, target.device), tokens[:index])
    if not sampling.is_greedy:
        positions = torch.tensor([index], device=scores.device)
        scores = scores / sampling.temperature + gumbel(sampling.seed, positions, len(scores))[0]
    best = scores.topk(2).values
    return float(best[0] - best[1])


def compare(
    target: Any, draft: Any, policies: Sequence[str], prompts: Sequence[BenchPrompt], sampling: Sampling, mode: PassMode
) -> list[Difference]:
    """Returns the texts in a pass mode that differ from those of eager passes."""
    found = []
    for policy in policies:
        target.passes = PassMode.eager
        expected = texts(target, draft, policy, prompts, sampling)
        target.passes = mode
        for prompt, own, other in zip(prompts, expected, texts(target, draft, policy, prompts, sampling), strict=True):
            index = first_difference(own, other)
            if index is not None:
                gap = gap_at(target, prompt, own, index, sampling)
                found.append(Difference(policy, sampling.temperature, prompt.name, index, gap))
    return found


def report(target: Any, draft: Any, policies: Sequence[str], prompts: Sequence[BenchPrompt], tokens: int, seed: int) -> str:
    """Compares all policies at every temperature; returns the text to print."""
    mode = resolve_pass_mode(PassMode.auto, target.device.type, sys.maxsize, target.is_plain)
    mode = PassMode.captured if mode is PassMode.auto else mode  # which never falls back to eager passes
    found: list[Difference] = []
    for temperature in TEMPERATURES:
        sampling = Sampling(max_new_tokens=tokens, temperature=temperature, seed=seed)
        found += compare(target, draft, policies, prompts, sampling, mode)
    count, flips = len(prompts), Counter((flip.policy, flip.temperature) for flip in found)
    rows = [[policy, *(f"{count - flips[policy, t]}/{count}" for t in TEMPERATURES)] for policy in policies]
    total = count * len(policies) * len(TEMPERATURES)
    lines = [
        f"{target.name}, {target.dtype}: {mode} against eager passes, at most {tokens} new tokens, seed {seed}",
        text_table(("identical texts", *(f"T = {t:g}" for t in TEMPERATURES)), rows, "<>>", ruled=False),
        *map(str, found),
        f"{total - len(found)} of {total} texts identical",
        f"passes: {describe_passes(target)}",
        describe_machine(target.device),
    ]
    return "\n".join(lines)


def main() -> int:
    parser = cli.new_parser("python -m benchmarks.texts", description=__doc__)
    cli.add_model_options(parser)
    parser.add_argument("--policies", default=",".join(sage.POLICIES), metavar="NAME,..", help="default: all")
    parser.add_argument("--prompts", metavar="FILE", help="JSONL of chat messages; default: the pocket test split")
    parser.add_argument("--per-family", type=int, default=16, metavar="N", help="prompts of each task; default %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    cli.add_dtype_option(parser, "fp32", "dtype of target and draft (default %(default)s)")
    cli.add_device_option(parser, "auto")
    args = parser.parse_args()
    if min(args.per_family, args.max_new_tokens) < 1:
        raise ValueError("--per-family, --max-new-tokens: give at least 1")
    policies = names(args.policies)
    for policy in policies:
        sage.policy(policy)
    path, folder = cli.find_models(args)
    if folder is None:
        raise ValueError("--draft: missing; give a draft to compare the policies with")
    device, dtype = cli.resolve_device(args.device), torch_dtype(args.dtype)
    target = sage.load_target(path, dtype=dtype, device=device, passes=PassMode.eager)
    draft = sage.load_draft(folder, target)
    if args.prompts is None:
        talks = [question("test", number, family) for family in world.FAMILIES for number in range(args.per_family)]
        prompts = [BenchPrompt(name=talk.id, inputs=target.prepare(talk.messages)) for talk in talks]
    else:
        prompts = load_prompts(target, args.prompts, (), None, None)
    print(report(target, draft, policies, prompts, args.max_new_tokens, args.seed))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
