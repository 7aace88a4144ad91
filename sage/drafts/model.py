"""A smaller target as the draft, the setting of SAGE and Spec-LLaVA.

Any model of the same family and vocabulary can draft for a larger one, also one built from a few layers of the larger one. It
encodes the same inputs with its own vision tower, has its own KV cache, and reads the visual tokens of `Prompt.kept`.

Shapes: F frontier nodes of one level, E nodes drafted so far this round, M tokens committed, V the target's vocabulary.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from sage.drafts.draft import DraftSession
from sage.drafts.registry import DraftKind
from sage.runtime.cache import TreeCache
from sage.runtime.executors import executor_of
from sage.runtime.host_tensors import Tokens, TokenStagingBuffer
from sage.runtime.packing import Pass, run_passes
from sage.runtime.pass_function import EAGER
from sage.targets import Features, Prompt, Target, load_target
from sage.targets.loading import meta_target
from sage.targets.tree_passes import TreePasses, describe_target, read_prompt


class ModelDraft:
    """A smaller target `model` as a draft; ValueError for another family, or a vocabulary that differs in more than padding."""

    kind = "model"
    levels: tuple[int, ...] = ()  # of the target's hidden states: it reads none
    reads_features = False
    has_own_lm_head = True
    compressor_kind = None

    def __init__(self, model: Target, target: Target) -> None:
        check_pair(model, target)
        self.model, self.target = model, target

    @property
    def network(self) -> Any:
        return self.model.model

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def assistant(self) -> Any:
        return self.model.model

    def options(self) -> dict[str, Any]:
        return {}

    def describe(self) -> dict[str, Any]:
        return {**describe_target(self.model), "dtype": self.dtype}

    @classmethod
    def new(
        cls, target: Target, kind: DraftKind, vocabulary: Tensor | None, num_layers: int | None = None, **config: Any
    ) -> ModelDraft:
        """Copies `num_layers` text layers of the target (see `shallow_model`)."""
        if config:
            raise ValueError(f"draft.{next(iter(config))}: unknown; choose from {', '.join(kind.keys)}")
        if num_layers is None:
            raise ValueError(f"draft.num_layers: missing; give 1 to {target.num_layers - 1}")
        return shallow_model(target, num_layers)

    @classmethod
    def load(cls, folder: Path, target: Target, dtype: torch.dtype) -> ModelDraft:
        if target.is_meta:
            return cls(meta_target(AutoConfig.from_pretrained(folder)), target)
        return cls(load_target(folder, dtype, target.device), target)

    def check(self, target: Target) -> None:
        if self.target is not target:  # comparing vocabularies takes as long as a dozen passes
            check_pair(self.model, target)


@torch.no_grad()
def shallow_model(target: Target, num_layers: int) -> ModelDraft:
    """Builds a smaller target from `num_layers` evenly spaced text layers of a target and copies of all its other modules.

    The family's leading layers are included first, and with more layers the last one. Such a model starts closer to its target
    than one with fresh layers, and shares its vocabulary, template and image processing. ValueError if it is not smaller, or
    the layers of the target differ.
    """
    if not 1 <= num_layers < target.num_layers:
        raise ValueError(
            f"draft.num_layers: {num_layers}; allowed: 1 to {target.num_layers - 1}, fewer than {target.name} has itself"
        )
    if target.quantization:
        raise ValueError(f"draft.num_layers: quantized layers ({target.quantization}) are not copied; give draft.path=DIR")
    if len(set(target.layer_sizes)) > 1:
        raise ValueError(
            f"draft.num_layers: {num_layers}; layers of a {target.family.model_type} differ, and some alone are no model; "
            f"give a smaller model of the family as draft.path"
        )
    first = min(target.family.leading_layers, num_layers) - 1
    spaced = torch.linspace(first, target.num_layers - 1, num_layers - first, device="cpu").round().long().tolist()
    picked = [*range(first), *spaced]
    config = copy.deepcopy(target.model.config)
    text = config.get_text_config()
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[k] for k in picked]
    vision = getattr(config, "vision_config", None)
    attention = getattr(vision, "_attn_implementation", None)
    if vision is not None:
        vision._attn_implementation = "sdpa"  # transformers would look for a package named after `VARLEN`
    with torch.device(target.device):
        model = type(target.model)(config)
    if vision is not None:
        model.config.vision_config._attn_implementation = attention
    for parameter in model.parameters():  # not `model.to`: the rope frequencies are buffers, and stay in float32
        parameter.data = parameter.data.to(target.dtype)
    layers = next(name for name, module in target.model.named_modules() if module is target.text_model) + ".layers."
    source = target.model.state_dict()
    kept = {name: value for name, value in source.items() if not name.startswith(layers)}
    for new, old in enumerate(picked):
        prefix = f"{layers}{old}."
        kept |= {f"{layers}{new}.{name[len(prefix) :]}": value for name, value in source.items() if name.startswith(prefix)}
    model.load_state_dict(kept)
    model.generation_config = copy.deepcopy(target.model.generation_config)
    return ModelDraft(Target(model, target.processor), target)


class ModelSession(DraftSession):
    """Session of a smaller target; its logits have the vocabulary size of the target. A draft in training runs eagerly."""

    cache: TreeCache

    def __init__(self, draft: ModelDraft, target: Target, capacity: int) -> None:
        self.model, self.vocab_size = draft.model, target.vocab_size
        executor = EAGER if draft.network.training else executor_of(target.passes)
        self._passes = TreePasses(draft.model, (), executor)
        self.cache = self._passes.new_cache(capacity)
        self.committed = 0
        self._staging = TokenStagingBuffer(self.model.device)
        self.position = self._root_position = torch.zeros(1, dtype=torch.long, device=self.model.device)
        self.ancestors = torch.zeros(1, 0, dtype=torch.bool, device=self.model.device)

    @property
    def context(self) -> int:
        return self.committed

    @torch.no_grad()
    def prefill(self, prompt: Prompt, features: Features, root: Tensor) -> Tensor:
        embedded = self.model.embed(prompt.inputs)
        if prompt.kept is not None:
            embedded = embedded.at(prompt.kept)
        read_prompt(self.model, embedded, self.cache)
        self.position = embedded.next_position
        logits: Tensor = run_passes([self._read(root)])[0]
        return logits

    def expand_pass(self, rows: Tensor, tokens: Tokens) -> Pass:
        itself = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
        self.ancestors = torch.cat((self.ancestors[rows], itself), 1)
        positions = self.position.repeat(len(rows))  # compiled passes do not look at strides
        self.position = self.position + 1
        needed = self._passes.over(self._staging.stage(tokens), positions, self.ancestors, self.cache)
        return needed.then(lambda output: self._fitted(output.logits))

    def commit_pass(self, features: Features, tokens: Tokens) -> Pass:
        self.cache.crop_to(self.committed)
        self.position = self._root_position + 1
        return self._read(self._staging.stage(tokens))

    def set_synthetic_state(self, context: int, width: int) -> None:
        self.cache.zero_to(context)
        self.committed = context
        self.position = torch.full((1,), context, device=self.model.device)
        self._root_position = self.position - 1
        self.ancestors = torch.zeros(width, 0, dtype=torch.bool, device=self.model.device)

    def _read(self, tokens: Tensor) -> Pass:
        """Returns the pass that appends accepted tokens [M], starts a tree at the last one and gives the logits below it."""
        steps = torch.arange(len(tokens), device=tokens.device)
        needed = self._passes.over(tokens, self.position + steps, steps <= steps[:, None], self.cache)
        self._root_position = self.position + len(tokens) - 1
        self.position = self._root_position + 1
        self.committed = self.cache.length
        self.ancestors = torch.zeros(1, 0, dtype=torch.bool, device=tokens.device)
        return needed.then(lambda output: self._fitted(output.logits[-1:]))

    def _fitted(self, logits: Tensor) -> Tensor:
        """Returns logits [F, V]; entries that only pad one of the two vocabularies are dropped or have probability 0."""
        missing = self.vocab_size - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[..., : self.vocab_size]


def check_pair(model: Target, target: Target) -> None:
    """Raises ValueError, naming both sides, if `model` cannot draft for `target`."""
    if model.family.model_type != target.family.model_type:
        raise ValueError(
            f"draft: {model.name} is a {model.family.model_type}, the target a {target.family.model_type}; "
            f"give a draft model of the target's family"
        )
    if model.processor and target.processor:
        ours, theirs = (t.processor.tokenizer.get_vocab() for t in (model, target) if t.processor)
        if ours != theirs:
            raise ValueError(
                f"draft: {model.name} and the target have different vocabularies ({len(ours)} and {len(theirs)} tokens); "
                f"only padding may differ"
            )
    elif model.vocab_size != target.vocab_size:
        raise ValueError(
            f"draft: {model.name} has {model.vocab_size} tokens, the target {target.vocab_size}, and without tokenizers "
            f"padding cannot be told from tokens; load both with sage.load_target"
        )
