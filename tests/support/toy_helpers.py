"""Table models for exact proofs: a target and a draft that are tables of next-token probabilities by context.

They run with the real decoder, policies and acceptance. The target's draws are looked up instead of sampled, so that a test can
enumerate them.

Also trees grown and pruned one operation at a time, the slow reference of `sage.planning.tree`.

Shapes: F frontier nodes, K candidates, M new nodes, N tree nodes, V vocabulary, X nodes to expand.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

import sage
from sage.costs.tables import Costs, Curve
from sage.decoding.answer import StopCriterion
from sage.decoding.decoder import Request, decode, grow, selected_tree
from sage.decoding.settings import Sampling
from sage.decoding.verify import TargetSampler, Verifier
from sage.drafts.draft import DraftSession
from sage.planning.base import Policy
from sage.planning.tree import Frontier, NextLevel, TopK, Tree
from sage.runtime.host_tensors import Tokens
from sage.runtime.modes import PassMode
from sage.runtime.timing import RoundTimes
from sage.targets import Features, Prompt
from sage.targets.tree_passes import TreeOutput


@dataclass
class SlowTree(Tree):
    """A `Tree` that grows; `path_probs` [N] are the products of probabilities from the root to each node."""

    draft_topk: list[TopK | None] = field(default_factory=list)
    path_probs: Tensor = field(default_factory=lambda: torch.ones(1))

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def of_token(cls, token: int) -> SlowTree:
        return cls(torch.tensor([token]), torch.tensor([-1]), torch.tensor([0]), draft_topk=[None])

    def note_candidates(self, nodes: Tensor, probs: Tensor, tokens: Tensor) -> None:
        """Stores the draft's candidates below `nodes` [F]: probabilities and tokens [F, K]."""
        draft_topk = list(self.draft_topk)
        for node, row, row_tokens in zip(nodes.tolist(), probs, tokens, strict=True):
            draft_topk[node] = (row.tolist(), row_tokens.tolist())
        self.draft_topk = draft_topk

    def add_level(self, parents: Tensor, tokens: Tensor, probs: Tensor) -> Tensor:
        """Appends nodes [M] below existing ones; returns their indices [M]."""
        old, new = len(self.tokens), len(tokens)
        self.tokens = torch.cat((self.tokens, tokens))
        self.depths = torch.cat((self.depths, self.depths[parents] + 1))
        self.path_probs = torch.cat((self.path_probs, self.path_probs[parents] * probs))
        self.parents = torch.cat((self.parents, parents))
        self.draft_topk = [*self.draft_topk, *[None] * new]
        return torch.arange(old, old + new)

    def subtree(self, keep: Tensor) -> SlowTree:
        """The tree of the nodes `keep`, the root first and every parent somewhere before its children."""
        kept = keep.tolist()
        parents = self.parents[keep].tolist()
        there = all(parent in kept[:place] for place, parent in enumerate(parents) if place > 0)
        assert kept[0] == 0 and there, "the root or a kept node's parent was dropped"
        return SlowTree(
            tokens=self.tokens[keep],
            parents=torch.tensor([kept.index(parent) if parent >= 0 else -1 for parent in parents]),
            depths=self.depths[keep],
            draft_topk=[self.draft_topk[node] for node in kept],
            path_probs=self.path_probs[keep],
        )


def add_next_level(tree: SlowTree, frontier: Tensor, next_level: NextLevel, probs: Tensor, tokens: Tensor) -> Tensor:
    """Adds a level below `frontier` [F] with candidates `probs` and `tokens` [F, K]; returns the next frontier [X]."""
    picks, expand = next_level
    rows, ranks = torch.tensor([divmod(pick, probs.shape[1]) for pick in picks], dtype=torch.long).view(-1, 2).unbind(1)
    nodes = tree.add_level(frontier[rows], tokens[rows, ranks], probs[rows, ranks])
    return torch.tensor([int(nodes[picks.index(pick)]) for pick in expand], dtype=torch.long)


Draft = Callable[[tuple[int, ...]], list[float]]  # the largest probabilities below a path, in descending order


def draft_with(policy: Policy, draft: Draft, levels: int = 20) -> tuple[SlowTree, int]:
    """Runs one round; the candidate of rank r is token r. Returns the tree and the number of expanded nodes."""
    policy.reset()
    policy.begin()
    tree, paths, frontier, expanded = SlowTree.of_token(-1), [()], torch.tensor([0]), 0
    for level in range(1, levels + 1):
        candidates = torch.tensor([draft(paths[node])[: policy.num_candidates_at(level)] for node in frontier.tolist()])
        tokens = torch.arange(candidates.shape[1]).expand_as(candidates)
        tree.note_candidates(frontier, candidates, tokens)
        next_level = policy.next_level(Frontier(level, candidates.tolist()))
        if next_level is None:
            break
        frontier = add_next_level(tree, frontier, next_level, candidates, tokens)
        paths, expanded = paths_of(tree), expanded + len(frontier)
        if len(frontier) == 0:
            break
    keep = policy.select()
    return (tree if keep is None else tree.subtree(torch.tensor(keep))), expanded


def tree_of(paths: list[tuple[int, ...]]) -> Tree:
    """A tree of token paths below a root with token 0."""
    tree = SlowTree.of_token(0)
    index: dict[tuple[int, ...], int] = {(): 0}
    for path in sorted(paths, key=len):
        new = tree.add_level(torch.tensor([index[path[:-1]]]), torch.tensor([path[-1]]), torch.tensor([0.5]))
        index[path] = int(new)
    return tree


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    """Token paths of all nodes below the root, whose own is empty and the first."""
    paths: list[tuple[int, ...]] = [()]
    for parent, token in zip(tree.parents.tolist()[1:], tree.tokens.tolist()[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


Context = tuple[int, ...]
Distribution = dict[Context, float]
NextTokenProbs = Callable[[Context], torch.Tensor]
VOCABULARY, EOS = 4, 3
PROMPT = [2]
UNDECIDED = -2
PLAIN = Sampling(temperature=1.0, couple=False)  # draws are looked up: no noise to share


# At most seven nodes per round, so that all draws can be enumerated; covers every kind of pruning.
SMALL: list[tuple[str, dict[str, Any]]] = [
    ("autoregressive", {}),
    ("chain", {"depth": 3}),
    ("static", {"paths": [(0,), (2,), (0, 0), (0, 1), (0, 1, 0)]}),
    ("eagle2", {"total": 6, "depth": 3, "top_k": 2}),
    ("eagle2", {"total": 3, "depth": 2, "top_k": 4}),
    ("spec_llava", {"budget": 4, "branch": 3, "steps": 2}),
    ("spec_llava", {"budget": 4, "branch": 2, "steps": 2, "min_confidence": 0.25}),
    ("talon", {"total": 6, "top_k": 3, "ratio": 0.4}),
    ("ddd", {"total": 6, "depth": 3, "top_k": 2, "threshold": 0.7, "check_every": 1}),
    ("sage", {"top_k": 4, "max_nodes": 5, "alpha_from": "current"}),
    ("cost_aware", {"max_depth": 3, "max_nodes": 5, "max_width": 3, "top_k": 3}),
]


def name_of(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(f"{key}={option}" for key, option in value.items())


def make_policy(name: str, options: Mapping[str, Any] = MappingProxyType({})) -> Policy:
    """A configured policy; one that needs costs gets tables for which drafting pays off, whatever the machine."""
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


def processed_by(processors: Sequence[Any]) -> NextTokenProbs:
    """p(next | context) after Hugging Face's processors, one context at a time."""

    def probs(context: Context) -> torch.Tensor:
        scores = target_probs(context).log()[None]
        for processor in processors:
            scores = processor(torch.tensor([[*PROMPT, *context]]), scores)
        return scores[0].softmax(0)

    return probs


class TableSession(DraftSession):
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
    def __init__(self) -> None:
        self.rows: list[int] = []

    @property
    def length(self) -> int:
        return len(self.rows)

    def keep_path(self, start: int, path: Sequence[int]) -> None:
        self.rows = self.rows[:start] + [self.rows[start + node] for node in path]


class TableTarget:
    """A target, with its passes, that reads a table. Features index contexts; `evaluated` are those of the last `lm_head`."""

    passes = PassMode.eager

    def __init__(self) -> None:
        self.contexts: list[Context] = []

    def _features(self, contexts: list[Context]) -> Features:
        self.contexts = contexts
        return Features(torch.arange(len(contexts), dtype=torch.float64)[None, :, None])

    def prefill(self, prompt: Prompt, cache: TableCache, *options: Any) -> Features:
        cache.rows = prompt.input_ids[0].tolist()
        return self._features([()])

    def over(self, tokens: torch.Tensor, positions: torch.Tensor, ancestors: torch.Tensor, cache: TableCache) -> TreeOutput:
        contexts = [(*cache.rows, *tokens[seen].tolist())[len(PROMPT) :] for seen in ancestors]
        assert positions.tolist() == [len(context) for context in contexts]
        cache.rows += tokens.tolist()
        features = self._features(contexts)
        return TreeOutput(features, self.logits(features.last[0]))

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        self.evaluated = [self.contexts[int(index)] for index in features[:, 0]]
        return torch.stack([target_probs(context) for context in self.evaluated]).log()

    prompt_logits = logits


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

    def start_round(self) -> None:
        pass

    def round_times(self) -> Callable[[], RoundTimes]:
        return lambda: RoundTimes(verify_s=1.0, draft=[(1, 0.01)], total_s=1.02)


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
    stop = StopCriterion(sampling, eos)
    verifier, clock = Verifier(FixedDraws(target, fixed, sampling)), SteadyClock()
    return Request(target, session, policy, verifier, stop, prompt, cache, clock, target)  # type: ignore[arg-type]


def probability(tokens: Context, probs: NextTokenProbs = target_probs) -> float:
    return float(torch.stack([probs(tokens[:i])[token] for i, token in enumerate(tokens)]).prod())


def sequences(length: int, eos: int | None = None, probs: NextTokenProbs = target_probs) -> Distribution:
    """The target's distribution of answers: sequences of `length` tokens, or shorter ones that end with EOS."""
    found: Distribution = {}
    for tokens in itertools.product(range(VOCABULARY), repeat=length):
        end = tokens.index(eos) + 1 if eos in tokens else length
        found[tokens[:end]] = probability(tokens[:end], probs)
    return found


def distance(found: Distribution, expected: Distribution) -> float:
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
    return selected_tree(request, builder)
