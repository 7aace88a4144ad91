"""A pass as a function of tensors with described arguments, and the interface of executors, which run it.

The decoder runs every pass over a tree, a draft level or accepted tokens as a `PassFunction`. Its arguments are the fields of a
dataclass, described by their metadata. What executors need besides the function follows from the descriptions: example inputs
and dynamic dimensions for compilation, static buffers, their padding and their sizes for captured graphs; and how the arguments
of several requests become those of one pass (`sage.runtime.packing`). Nothing in a function depends on a number of the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from sage.runtime.cache import TreeCache

MAX_NODES, MAX_KEYS = 4096, 1 << 20
MIN_KEYS, KEY_STEP = 256, 1024
MIN_PARENTS = 64  # rows of the static buffers of parents and of columns that levels see: one size for all common levels
Value: TypeAlias = Tensor | Sequence[Tensor]  # of an argument; several tensors of one description
Dims: TypeAlias = tuple["int | Dim", ...]
Run: TypeAlias = Callable[[Any], Sequence[Tensor]]  # a pass function bound to an executor and to the present weights


def node_bucket(count: int) -> int:
    """Returns the smallest power of two that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()


def key_bucket(count: int) -> int:
    """Returns the keys of a graph for `count` keys: a power of two up to `KEY_STEP`, else a multiple of it."""
    if count <= KEY_STEP:
        return max(node_bucket(count), MIN_KEYS)
    return -(-count // KEY_STEP) * KEY_STEP


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
    """

    name: str
    example: int
    maximum: int
    bucket: Callable[[int], int]
    minimum: int = 2
    has_variant: bool = False


NODES = Dim("nodes", 6, MAX_NODES, node_bucket, has_variant=True)  # or tokens, of all requests
PER_ROW = Dim("per_row", 5, MAX_NODES, node_bucket, has_variant=True)  # the most of any request
VISIBLE = Dim("visible", 7, MAX_NODES, lambda count: max(node_bucket(count), 2), has_variant=True)  # a graph masks its padding
SEEN = Dim("seen", 7, MAX_NODES, node_bucket, has_variant=True)  # a single node sees itself: nothing to mask
NEAR = Dim("near", 7, MAX_NODES, lambda count: max(node_bucket(count), MIN_PARENTS), minimum=1)  # columns of a level's trees
PROMPT = Dim("prompt", 9, MAX_KEYS, int)  # the tokens of one; graphs do not read prompts
PARENTS = Dim("parents", 3, MAX_NODES, lambda count: max(node_bucket(count), MIN_PARENTS), minimum=1)
ROWS = Dim("rows", 4, MAX_NODES, int, has_variant=True)  # of the cache: one, or those that requests share
REQUESTS = Dim("requests", 3, MAX_NODES, node_bucket, has_variant=True)  # of a pass
KEYS = Dim("keys", 24, MAX_KEYS, lambda count: key_bucket(count + 1))  # and one column that padding writes
CAPACITY = Dim("capacity", 48, MAX_KEYS, int)
LINEAR_SLOTS = Dim("linear_slots", 16, MAX_NODES, int)  # of the states of linear layers
LINEAR_INPUTS = Dim("linear_inputs", 19, MAX_NODES + 64, int)  # and the inputs of their convolution before them


class Padding(Enum):
    """Contents of the padding of an argument, in graphs with static buffers.

    Attributes:
        ignored: anything valid; no result that is read depends on it.
        spare: the last of the keys, a column of the cache that no node attends to.
        masked: excluded from attention: False, or the lowest value of an additive mask.
        counting: the argument is 0, 1, 2, .. in every call, and its padding continues it.
        cache: none; the argument is the buffers of a cache, which are used in place.
    """

    ignored = "ignored"
    spare = "spare"
    masked = "masked"
    counting = "counting"
    cache = "cache"


@dataclass(frozen=True)
class Argument:
    """Description of one argument.

    Attributes:
        dims: the size of each dimension: a number, that of each of several tensors, the name of a size of the model (until
            `resolved`), or a `Dim`.
        dtype: None for that of the model (until `resolved`).
        padding: contents of what is added to reach a bucket.
        count: number of tensors, or the name of it, if the argument is a sequence of them; None for one tensor.
        indexes: name of the argument whose entries it numbers.
        name: of the field.
    """

    dims: tuple[int | tuple[int, ...] | str | Dim, ...]
    dtype: torch.dtype | None = torch.long
    padding: Padding = Padding.ignored
    count: int | str | None = None
    indexes: str | None = None
    name: str = ""

    def resolved(self, name: str, sizes: Mapping[str, Any], dtype: torch.dtype) -> Argument:
        """Returns the description with the sizes and the dtype of a model."""
        dims = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.dims)
        count: int | None = sizes[self.count] if isinstance(self.count, str) else self.count
        return replace(self, name=name, dims=dims, dtype=self.dtype or dtype, count=count)

    def empty(self, sizes: Mapping[Dim, int], device: torch.device, number: int = 0) -> Tensor:
        """Returns a tensor of zeros of the sizes, or the numbers 0, 1, 2, .. for `Padding.counting`; of several, one."""
        own = (dim[number] if isinstance(dim, tuple) else dim for dim in self.dims)
        shape = [sizes[dim] if isinstance(dim, Dim) else int(dim) for dim in own]
        if self.padding is Padding.counting:
            return torch.arange(shape[0], dtype=self.dtype, device=device)
        return torch.zeros(shape, dtype=self.dtype, device=device)


def argument(*dims: int | str | Dim, **options: Any) -> Any:
    """Describes a field of `PassInputs`; options are the other attributes of `Argument`."""
    return field(metadata={"argument": Argument(dims, **options)})


@dataclass(kw_only=True)
class PassInputs:
    """Base class of the arguments of a pass: a dataclass whose fields are described by `argument`. All are contiguous."""

    def flat(self) -> list[Tensor]:
        """Returns the tensors of the arguments in order."""
        tensors: list[Tensor] = []
        for value in vars(self).values():
            if isinstance(value, (list, tuple)):  # quicker than a check for a tensor, whose class overrides it
                tensors += value
            else:
                tensors.append(value)
        return tensors


class PassFunction(nn.Module, ABC):
    """Base class of the functions of targets and drafts, over the rows of one request or of several.

    Args:
        owner: `target` or `draft`, for messages.
        names: of the pass over one entry and over several, for messages.
        inputs_type: the dataclass of the arguments.
        sizes: of the model, which descriptions of arguments name.
        dtype: of the model.
        results: the dimensions of each result.
        depends_on: JSON-serializable description of the model, without its weights.

    Attributes:
        kept: what executors keep for this function: compiled variants, captured graphs.
        variant_dims: the dimensions of which size 1 is compiled separately, and an argument and axis of each.
        num_slots: queries of the pass behind the tokens of each request.
        has_token_queries: whether the tokens themselves are queries.
    """

    num_slots, has_token_queries = 0, True

    def __init__(
        self,
        owner: str,
        names: tuple[str, str],
        inputs_type: type[PassInputs],
        sizes: Mapping[str, Any],
        dtype: torch.dtype,
        results: Sequence[Dims],
        depends_on: Any,
    ) -> None:
        super().__init__()
        self.owner, self.names, self.depends_on = owner, names, depends_on
        self.inputs_type, self.results = inputs_type, tuple(results)
        self.arguments = [each.metadata["argument"].resolved(each.name, sizes, dtype) for each in fields(inputs_type)]
        self.kept: dict[Hashable, Any] = {}
        self._axis_of_dim: dict[Dim, tuple[str, int]] = {}
        for described in self.arguments:
            for axis, dim in enumerate(described.dims):
                if isinstance(dim, Dim):
                    self._axis_of_dim.setdefault(dim, (described.name, axis))
        self.variant_dims = {dim: place for dim, place in self._axis_of_dim.items() if dim.has_variant}

    @abstractmethod
    def compute(self, inputs: Any) -> tuple[Tensor, ...]:
        """Runs the function; `inputs` is an instance of `inputs_type`."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Runs the function on flat arguments, as a compiler traces it."""
        rest, values = list(tensors), {}
        for described in self.arguments:
            count = 1 if described.count is None else int(described.count)
            values[described.name] = rest[0] if described.count is None else rest[:count]
            rest = rest[count:]
        return self.compute(self.inputs_type(**values))

    def sizes(self, inputs: PassInputs) -> dict[Dim, int]:
        """Returns the size of every dynamic dimension in the arguments."""
        return {dim: _tensor(getattr(inputs, name)).shape[axis] for dim, (name, axis) in self._axis_of_dim.items()}

    def variant(self, inputs: PassInputs) -> tuple[bool, ...]:
        """Returns, for each dimension that is compiled separately for size 1, whether its size is 1."""
        values = vars(inputs)
        return tuple([_tensor(values[name]).shape[axis] == 1 for name, axis in self.variant_dims.values()])

    def label(self, variant: tuple[bool, ...]) -> str:
        """Returns the name of a variant, for messages."""
        is_one = dict(zip(self.variant_dims, variant, strict=True))
        if is_one.get(ROWS, is_one.get(REQUESTS, True)):
            return self.names[0 if True in variant[:1] else 1]
        return f"{self.names[0 if is_one.get(PER_ROW) else 1]} of several requests"

    def example(self, variant: tuple[bool, ...], device: torch.device) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns example arguments of a variant for `forward`, and their dynamic dimensions for `torch.export.export`."""
        single = {dim for dim, is_one in zip(self.variant_dims, variant, strict=True) if is_one}
        sizes = {dim: 1 if dim in single else dim.example for dim in self._axis_of_dim}
        symbols = {
            dim: torch.export.Dim(dim.name, min=dim.minimum, max=dim.maximum) for dim in self._axis_of_dim if dim not in single
        }
        values: list[Tensor] = []
        dynamic: list[Any] = []
        for described in self.arguments:
            count = 1 if described.count is None else int(described.count)
            made = [described.empty(sizes, device, number) for number in range(count)]
            values += made
            dynamic += [{axis: symbols[dim] for axis, dim in enumerate(described.dims) if dim in symbols} or None] * len(made)
        return tuple(values), (tuple(dynamic),)


def _tensor(value: Value) -> Tensor:
    return value[0] if isinstance(value, (list, tuple)) else value


class Executor(ABC):
    """Runs pass functions in one way.

    Attributes:
        max_prompt: tokens of the longest prompt that it reads; in longer ones, products take most of the time.
        has_buckets: whether sizes are padded to buckets, so that the time of a pass grows in steps.
    """

    max_prompt = 0
    has_buckets = False

    @abstractmethod
    def bind(self, function: PassFunction) -> Run:
        """Returns what runs `function`. Call it for every request: weights may have moved since the last one."""

    def splits_keys(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether a target's pass attends to its keys in two parts (see `sage.runtime.prefix_attention`)."""
        return False

    def describe(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
        """Returns how passes of a target run, for reports."""
        return type(self).__name__.lower()

    def capacity(self, num_tokens: int) -> int:
        """Returns the capacity of a cache that is to hold `num_tokens` tokens."""
        return num_tokens

    def new_cache(self, owner: Any, num_tokens: int, make: Callable[[int], TreeCache]) -> TreeCache:
        """Returns an empty cache for `num_tokens` tokens of a request.

        Args:
            owner: target or draft, whose caches all have the same layers.
            make: returns a new cache of a capacity.
        """
        return make(self.capacity(num_tokens))

    def release(self) -> None:  # noqa: B027
        """Frees the memory that is kept for further requests."""


class Eager(Executor):
    """Kernel by kernel: the reference."""

    def bind(self, function: PassFunction) -> Run:
        return function.compute


EAGER = Eager()
