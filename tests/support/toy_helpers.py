"""Table models for exact proofs: a target and a draft that are tables of next-token probabilities by context.

They run with the real decoder, policies and acceptance. The target's draws are looked up instead of sampled, so that a test can
enumerate them.

Shapes: N tree nodes, V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from support.slow_trees import paths_of

import sage
from sage.costs.tables import Costs, Curve
from sage.decoding.answer import StopCriterion
from sage.decoding.decoder import Request, decode, grow, selected_tree
from sage.decoding.sampling import Sampling, TargetSampler
from sage.decoding.verify import Verifier
from sage.drafts.session import DraftSession
from sage.planning.base import Policy
from sage.planning.tree import Tree
from sage.runtime.host_tensors import Tokens
from sage.runtime.pass_modes import PassMode
from sage.runtime.timing import RoundTimes
from sage.targets import Features, Prompt
from sage.targets.tree_passes import TreeOutput

Context = tuple[int, ...]
Distribution = dict[Context, float]
NextTokenProbs = Callable[[Context], torch.Tensor]
VOCABULARY, EOS = 4, 3
PROMPT = [2]
UNDECIDED = -2
PLAIN = Sampling(temperature=1.0, couple=False)  # draws are looked up: no noise to share


def make_policy(name: str, options: dict[str, Any]) -> Policy:
    """A configured policy; one that needs costs gets tables for which drafting pays off."""
    policy = sage.policy(name, **options)
    if policy.needs_costs:
        policy.costs = Costs(Curve([1, 64], [1.0, 1.1]), Curve([1, 64], [0.01, 0.02]), context=0)
    return policy


@functools.cache
def target_probs(context: Context) -> torch.Tensor:
    """p(next | context), float64 [V]."""
    generator = torch.Generator().manual_seed(sum((token + 2) * 31**i for i, token in enumerate(context)) + len(context))
    return torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).mul(1.5).softmax(0)


@functools.cache
def draft_probs(context: Context) -> torch.Tensor:
    """q(next | context), the target's probabilities with noise."""
    generator = torch.Generator().manual_seed(7 + sum((token + 2) * 37**i for i, token in enumerate(context)))
    noise = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
    return (target_probs(context).log() + 0.7 * noise).softmax(0)


class TableSession(DraftSession):
    """A draft session that reads a table."""

    context = 0  # of rows for the prompt; this draft keeps none

    def __init__(self, probs: NextTokenProbs, context: Context = ()) -> None:
        self.probs, self.context = probs, context

    def prefill(self, prompt: object, features: object, root: torch.Tensor) -> torch.Tensor:
        self.context = tuple(root.tolist())
        return self.start()

    def expand_pass(self, rows: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        self.paths = [(*self.paths[row], token) for row, token in zip(rows.tolist(), map(int, tokens), strict=True)]
        return torch.stack([self.probs(path) for path in self.paths]).log()

    def commit_pass(self, features: object, tokens: Tokens) -> torch.Tensor:
        self.context += tuple(map(int, tokens))
        return self.start()

    def start(self) -> torch.Tensor:
        self.paths = [self.context]
        return self.probs(self.context)[None].log()


class TableCache:
    """A cache of token ids."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    @property
    def length(self) -> int:
        return len(self.rows)

    def keep_path(self, start: int, path: Sequence[int]) -> None:
        self.rows = self.rows[:start] + [self.rows[start + node] for node in path]


class TableTarget:
    """A target that reads a table. Features are indices of contexts; `evaluated` holds the contexts of the last `lm_head`."""

    passes = PassMode.eager

    def __init__(self) -> None:
        self.contexts: list[Context] = []

    def _features(self, contexts: list[Context]) -> Features:
        self.contexts = contexts
        return Features(torch.arange(len(contexts), dtype=torch.float64)[None, :, None])

    def prefill(self, prompt: Prompt, cache: TableCache, *options: Any) -> Features:
        cache.rows = prompt.input_ids[0].tolist()
        return self._features([()])

    def tree_pass(
        self, tokens: torch.Tensor, positions: torch.Tensor, ancestors: torch.Tensor, cache: TableCache
    ) -> TreeOutput:
        contexts = [(*cache.rows, *tokens[seen].tolist())[len(PROMPT) :] for seen in ancestors]
        assert positions.tolist() == [len(context) for context in contexts]
        cache.rows += tokens.tolist()
        features = self._features(contexts)
        return TreeOutput(features, self.lm_head(features.last[0]))

    def lm_head(self, features: torch.Tensor) -> torch.Tensor:
        self.evaluated = [self.contexts[int(index)] for index in features[:, 0]]
        return torch.stack([target_probs(context) for context in self.evaluated]).log()


class FixedDraws(TargetSampler):
    """A sampler with draws fixed by context, UNDECIDED for others; `probs` collects the probabilities of all contexts."""

    def __init__(self, target: TableTarget, fixed: dict[Context, int], sampling: Sampling) -> None:
        super().__init__(sampling, torch.tensor(PROMPT), eos=[EOS])
        self.target, self.fixed = target, fixed
        self.probs: dict[Context, torch.Tensor] = {}
        self.emitted: list[int] = []

    def extend(self, tokens: list[int]) -> None:
        super().extend(tokens)
        self.emitted += tokens

    def __call__(self, logits: torch.Tensor, tree: Tree, greedy_N: torch.Tensor | None = None) -> torch.Tensor:
        super().__call__(logits, tree)
        contexts = [(*self.emitted[:-1], *tree.tokens[seen].tolist()) for seen in tree.ancestors]
        contexts = contexts if self.emitted else [()]
        assert contexts == self.target.evaluated
        self.probs |= dict(zip(contexts, self._scores.softmax(-1), strict=True))
        return torch.tensor([self.fixed.get(context, UNDECIDED) for context in contexts])


class SteadyClock:
    """A clock with constant times, which makes cost-aware policies deterministic."""

    is_shared = False

    def lap(self, phase: str, count: int = 0) -> None:
        pass

    resume = pause = lambda self: None

    def start_round(self) -> None:
        pass

    def round_times(self) -> Callable[[], RoundTimes]:
        return lambda: RoundTimes(verify_s=1.0, draft=[(1, 0.01)], total_s=1.02)


class TablePasses:
    """Tree passes of a table target."""

    def __init__(self, target: TableTarget) -> None:
        self.target = target

    def over(self, *args: Any) -> TreeOutput:
        return self.target.tree_pass(*args)


def toy_request(
    policy: Policy, fixed: dict[Context, int], max_new_tokens: int, eos: list[int], sampling: Sampling = PLAIN
) -> Request:
    """A request to the table models with a prompt of one token."""
    ids = torch.tensor([PROMPT])
    prompt = Prompt(
        ids, ids[..., None].double(), ids, torch.tensor([len(PROMPT)]), torch.ones_like(ids), torch.zeros_like(ids) > 0
    )
    target: Any = TableTarget()
    cache: Any = TableCache()
    session = TableSession(draft_probs) if policy.num_candidates else None
    sampling = replace(sampling, max_new_tokens=max_new_tokens)
    stop, passes = StopCriterion(sampling, eos), TablePasses(target)
    verifier, clock = Verifier(FixedDraws(target, fixed, sampling)), SteadyClock()
    return Request(target, session, policy, verifier, stop, prompt, cache, clock, passes)  # type: ignore[arg-type]


def probability(tokens: Context, probs: NextTokenProbs = target_probs) -> float:
    """p(tokens) = product of p(token | preceding tokens), float64."""
    return float(torch.stack([probs(tokens[:i])[token] for i, token in enumerate(tokens)]).prod())


def sequences(length: int, eos: int | None = None, probs: NextTokenProbs = target_probs) -> Distribution:
    """The target's distribution of answers: sequences of `length` tokens, or shorter ones that end with EOS."""
    found: Distribution = {}
    for tokens in itertools.product(range(VOCABULARY), repeat=length):
        end = tokens.index(eos) + 1 if eos in tokens else length
        found[tokens[:end]] = probability(tokens[:end], probs)
    return found


def distance(found: Distribution, expected: Distribution) -> float:
    """Largest difference between two distributions."""
    return max(abs(found.get(key, 0.0) - expected.get(key, 0.0)) for key in found.keys() | expected.keys())


def toy_tree(policy: Policy, root: Context = (0,), levels: int = 3) -> tuple[Tree, list[Context]]:
    """Result of `draft_tree` below `root`, and the context of each node."""
    request = toy_request(policy, {}, levels + 1, [])
    request.root = root[-1]
    if request.session:
        request.session.context = root  # type: ignore[attr-defined]
        request.draft_logits = request.session.start()  # type: ignore[attr-defined]
    policy.reset()
    policy.begin()
    request.stop.append([root[-1]])
    tree = drafted_tree(request)
    return tree, [(*root, *path) for path in paths_of(tree)]


def toy_answer(policy: Policy, sampling: Sampling, session: DraftSession | None = None) -> Request:
    """A decoded request to the table models, with the sampler's own draws; `session` replaces that of `draft_probs`."""
    request = toy_request(policy, {}, sampling.max_new_tokens, [])
    request.session = session or request.session
    request.verifier = Verifier(TargetSampler(sampling, torch.tensor(PROMPT)))
    for _ in decode(request):
        pass
    return request


def drafted_tree(request: Request) -> Tree:
    """Grows the tree of one round of a request; returns the part that the policy selects."""
    (builder,) = grow([request], [True])
    if request.error is not None:
        raise request.error
    return selected_tree(request, builder, None if builder is None else request.policy.select())
