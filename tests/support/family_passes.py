"""Passes over a tree below a prompt, and over its paths by Hugging Face's own model, for every target family."""

from typing import Any

import pytest
import torch
from support.models import followed_by
from support.pass_helpers import tree_pass
from torch import Tensor, nn

import sage
from sage.inputs.format import Inputs
from sage.planning.tree import Tree
from sage.runtime.pass_function import EAGER, Executor, PassFunction, Run
from sage.targets.family import Prompt

TREE = Tree(*map(torch.tensor, ([70, 71, 72, 73, 74], [-1, 0, 0, 1, 3], [0, 1, 1, 2, 3])))


def hidden_states(target: sage.Target, inputs: Inputs) -> list[Tensor]:
    """Returns the inputs of all layers and the last state, after the norm, of a pass of Hugging Face's model."""
    states: list[Tensor] = []
    layers: Any = target.text_model.layers
    hooks = [layer.register_forward_pre_hook(lambda _, args: states.append(args[0])) for layer in layers]
    last = target.text_model.register_forward_hook(lambda _, __, out: states.append(out.last_hidden_state))
    with torch.no_grad():
        target.model(**inputs)
    for hook in (*hooks, last):
        hook.remove()
    return states


def between_media(prompt: Prompt) -> int:
    """Returns the first text token after the first image or video; 2 without one."""
    visual = prompt.visual_mask[0].tolist()
    return next((i for i in range(1, len(visual)) if visual[i - 1] and not visual[i]), 2)


def tree(target: sage.Target, prompt: Prompt, known: int = 0, nodes: int = len(TREE), executor: Executor = EAGER) -> Tensor:
    """Returns the features [N, D] of a tree below the prompt, of which `known` tokens were prefilled before the others."""
    cache, ancestors = executor.new_cache(target, 500, target.new_cache), TREE.ancestors[:nodes, :nodes]
    if known:
        target.prefill(prompt.at(torch.arange(known)), cache)
    target.prefill(prompt.after(known), cache)
    positions = prompt.next_position + TREE.depths[:nodes]
    return tree_pass(target, TREE.tokens[:nodes], positions, ancestors, cache, executor).last[0]


def paths(target: sage.Target, inputs: Inputs) -> Tensor:
    """Returns the features [N, D] of the same nodes, each on a path that ends a prompt of Hugging Face's model."""
    found: dict[int, Tensor] = {}
    for leaf in set(range(len(TREE))) - set(TREE.parents.tolist()):
        nodes = TREE.ancestors[leaf].nonzero()[:, 0]
        states = hidden_states(target, followed_by(target, inputs, TREE.tokens[nodes]))[-1][0, -len(nodes) :]
        found |= dict(zip(nodes.tolist(), states, strict=True))
    return torch.stack([found[node] for node in range(len(TREE))])


class Exported(Executor):
    """Runs passes as `torch.export` traces them for the compiler, without the compiler."""

    def bind(self, function: PassFunction) -> Run:
        programs: dict[Any, Any] = {}

        def run(inputs: Any) -> Any:
            variant = function.variant(inputs)
            if variant not in programs:
                with torch.inference_mode(False), torch.no_grad():
                    args, dims = function.example(variant, torch.device("cpu"))
                    options = {"strict": False, "prefer_deferred_runtime_asserts_over_guards": True}
                    programs[variant] = torch.export.export(function, args, dynamic_shapes=dims, **options).module()
            return programs[variant](*inputs.flat())

        return run


def use_cuda_layouts(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Makes attention return results in the layout of CUDA's fused kernels; returns the list of their shapes, which grows.

    These kernels allocate a result as [B, queries, heads, d] and return it transposed (torch 2.13:
    `meta__scaled_dot_product_efficient_attention` in torch/_meta_registrations.py). A `view` that merges heads and queries
    raises.
    """
    attend, shapes = nn.functional.scaled_dot_product_attention, []

    def transposed(*args: Any, **options: Any) -> Tensor:
        out = attend(*args, **options)
        shapes.append(out.shape)
        return out.transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", transposed)
    return shapes
