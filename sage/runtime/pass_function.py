"""A pass as a function of tensors, with a description of its arguments.

The decoder runs every pass over a tree, a draft level or accepted tokens as a `PassFunction`. What executors need besides the
function follows from the descriptions: example inputs and dynamic dimensions for compilation, static buffers, their padding and
their sizes for captured graphs. Nothing in a function depends on a number of the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from sage.runtime.buckets import key_bucket, node_bucket

MAX_NODES, MAX_KEYS = 4096, 1 << 20
JOINT = "joint"  # key of the function of several requests in `PassFunction.kept`
MIN_PARENTS = 64  # rows of the static buffer of parents: one size for all common levels
Value: TypeAlias = Tensor | Sequence[Tensor]  # of an argument; several tensors of one description


@dataclass(frozen=True)
class Dim:
    """A dimension whose size differs between calls.

    Attributes:
        name: for the compiler, unique within a function.
        example: size in the example inputs.
        maximum: largest size.
        bucket: returns the size that captured graphs pad it to.
        minimum: smallest size that occurs; 2 for a dimension with `has_variant`.
        has_variant: whether size 1 is compiled separately: compilers specialize it in any case.
        is_padded_in_front: whether padding precedes the contents, for results that belong to the last entry.
    """

    name: str
    example: int
    maximum: int
    bucket: Callable[[int], int]
    minimum: int = 2
    has_variant: bool = False
    is_padded_in_front: bool = False


NODES = Dim("nodes", 5, MAX_NODES, node_bucket, has_variant=True)
VISIBLE = Dim("visible", 7, MAX_NODES, lambda count: max(node_bucket(count), 2), has_variant=True)  # a graph masks its padding
SEEN = Dim("seen", 7, MAX_NODES, node_bucket, has_variant=True)  # a single node sees itself: nothing to mask
TOKENS = Dim("tokens", 5, MAX_NODES, node_bucket, has_variant=True, is_padded_in_front=True)
PROMPT = Dim("prompt", 9, MAX_KEYS, int)  # the tokens of one; graphs do not read prompts
PARENTS = Dim("parents", 3, MAX_NODES, lambda count: max(node_bucket(count), MIN_PARENTS), minimum=1)
ALL_NODES = Dim("all_nodes", 7, MAX_NODES, node_bucket)  # of several requests
ALL_PARENTS = Dim("all_parents", 6, MAX_NODES, lambda count: max(node_bucket(count), MIN_PARENTS))
ROWS = Dim("rows", 4, MAX_NODES, int)  # of a cache that requests share; executors choose their number
CALLS = Dim("calls", 3, MAX_NODES, node_bucket)
PER_ROW = Dim("per_row", 5, MAX_NODES, node_bucket, has_variant=True)
KEYS = Dim("keys", 24, MAX_KEYS, lambda count: key_bucket(count + 1))  # and one row that padding writes
CAPACITY = Dim("capacity", 48, MAX_KEYS, int)


class Padding(Enum):
    """Contents of the padding of an argument, in graphs with static buffers.

    Attributes:
        ignored: anything valid; no result that is read depends on it.
        spare_row: the last of the keys, a cache row that no node attends to.
        masked: excluded from attention: False, or the lowest value of an additive mask.
        counting: the argument is 0, 1, 2, .. in every call, and its padding continues it.
        cache: none; the argument is the buffers of a cache, which are used in place.
    """

    ignored = "ignored"
    spare_row = "spare_row"
    masked = "masked"
    counting = "counting"
    cache = "cache"


@dataclass(frozen=True)
class Argument:
    """Description of one argument.

    Attributes:
        dims: the size of each dimension, a number or a `Dim`.
        padding: contents of what is added to reach a bucket.
        count: number of tensors if the argument is a sequence of them; None for one tensor.
    """

    name: str
    dims: tuple[int | Dim, ...]
    dtype: torch.dtype
    padding: Padding = Padding.ignored
    count: int | None = None

    def empty(self, sizes: dict[Dim, int], device: torch.device) -> Tensor:
        """Returns a tensor of zeros of the sizes, or the numbers 0, 1, 2, .. for `Padding.counting`."""
        shape = [sizes[dim] if isinstance(dim, Dim) else dim for dim in self.dims]
        if self.padding is Padding.counting:
            return torch.arange(shape[0], dtype=self.dtype, device=device)
        return torch.zeros(shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Result:
    """Description of one result.

    Attributes:
        dims: as of an `Argument`; padding is cut off along every `Dim`.
        is_kept: whether it is still read when the function has been called again, and static results are copied.
    """

    dims: tuple[int | Dim, ...]
    is_kept: bool = True


class PassFunction(nn.Module):
    """Base class of the functions of targets and drafts; `forward` takes the described arguments, all contiguous.

    Args:
        owner: `target` or `draft`, for messages.
        names: of the pass over one entry and over several, for messages.
        arguments: descriptions in the order of `forward`.
        results: descriptions of the results.
        depends_on: JSON-serializable description of the model, without its weights.
        modules: of code that the function calls and that its own module does not import.
        timed_rows: numbers of rows for which kernels of linear layers are compared, in a pass over several entries.

    Attributes:
        kept: what executors keep for this function: compiled variants, captured graphs.
    """

    def __init__(
        self,
        owner: str,
        names: tuple[str, str],
        arguments: Sequence[Argument],
        results: Sequence[Result],
        depends_on: Any,
        modules: Sequence[str] = (),
        timed_rows: Sequence[int] = (2, 4, 8, 16, 32),
    ) -> None:
        super().__init__()
        self.timed_rows = timed_rows
        self.owner, self.names, self.depends_on = owner, names, depends_on
        self.modules = (type(self).__module__, *modules)
        self.arguments, self.results = tuple(arguments), tuple(results)
        self.kept: dict[Hashable, Any] = {}
        self._places: dict[Dim, tuple[int, int]] = {}
        for place, argument in enumerate(self.arguments):
            for axis, dim in enumerate(argument.dims):
                if isinstance(dim, Dim):
                    self._places.setdefault(dim, (place, axis))
        self._split = [place for dim, place in self._places.items() if dim.has_variant]

    def sizes(self, values: Sequence[Value]) -> dict[Dim, int]:
        """Returns the size of every dynamic dimension in arguments of `forward`."""
        return {dim: _tensor(values[place]).shape[axis] for dim, (place, axis) in self._places.items()}

    def variant(self, values: Sequence[Value]) -> tuple[bool, ...]:
        """Returns, for each dimension that is compiled separately for size 1, whether its size is 1."""
        return tuple([_tensor(values[place]).shape[axis] == 1 for place, axis in self._split])

    def example(self, variant: tuple[bool, ...], device: torch.device) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns example arguments of a variant, and their dynamic dimensions for `torch.export.export`."""
        single = {
            self.arguments[place].dims[axis] for (place, axis), is_one in zip(self._split, variant, strict=True) if is_one
        }
        sizes = {dim: 1 if dim in single else dim.example for dim in self._places}
        symbols = {
            dim: torch.export.Dim(dim.name, min=dim.minimum, max=dim.maximum) for dim in self._places if dim not in single
        }
        values, dynamic = [], []
        for argument in self.arguments:
            of_one = {axis: symbols[dim] for axis, dim in enumerate(argument.dims) if dim in symbols} or None
            num = 1 if argument.count is None else argument.count
            made = [argument.empty(sizes, device) for _ in range(num)]
            values.append(made[0] if argument.count is None else made)
            dynamic.append(of_one if argument.count is None else [of_one] * num)
        return tuple(values), tuple(dynamic)

    def joint(self) -> JointFunction | None:
        """Returns the function for several requests; None if each needs a pass of its own."""
        if JOINT not in self.kept:
            self.kept[JOINT] = self._new_joint()
        found: JointFunction | None = self.kept[JOINT]
        return found

    def _new_joint(self) -> JointFunction | None:
        return None


class JointFunction(PassFunction, ABC):
    """Base class of the functions of several requests, which compute what another function does for one of them."""

    @abstractmethod
    def join(self, calls: Sequence[Any], num_rows: int) -> Sequence[Value]:
        """Returns the arguments of `forward` for calls (`sage.runtime.joint.Call`) of the function of one request.

        Args:
            num_rows: B, the rows of the cache that the pass reads, those of the calls among them.
        """

    @abstractmethod
    def split(self, calls: Sequence[Any], results: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Returns the results of every call."""


def _tensor(value: Value) -> Tensor:
    return value if isinstance(value, Tensor) else value[0]


def flat(values: Sequence[Value]) -> list[Tensor]:
    """Returns the tensors of arguments in order."""
    return [tensor for value in values for tensor in ((value,) if isinstance(value, Tensor) else value)]
