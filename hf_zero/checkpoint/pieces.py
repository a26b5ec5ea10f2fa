"""What a checkpoint sees of a run: elements of named parameters, and the arrays they are read from and written into.

`Parameters` and `OptimizerState` are implemented where units and shards are known. Nothing here holds more than views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ..core.layout import ParamSpec
from ..tiers.array import Values

MASTER = "master"
"""The state that a master finer than its parameter is stored as."""


@dataclass(frozen=True, slots=True)
class Held:
    """Elements of one parameter, from `param_start`: a 1-D view of this rank's memory, or of its disk."""

    param_start: int
    values: Values


@dataclass(frozen=True, slots=True)
class Share:
    """Elements of one parameter that `rank` has. Every rank lists the same shares; only `rank` may call `read`."""

    rank: int
    param_start: int
    numel: int
    read: Callable[[], Tensor]
    """1-D, of the master's type. Raises a ZeroError where the values cannot be read."""


@dataclass(frozen=True, slots=True)
class ParameterState:
    """The optimizer's state of one parameter: the arrays by type and shape only, the rest by value."""

    shape: tuple[int, ...]
    """The parameter's."""
    arrays: Mapping[str, tuple[str, tuple[int, ...]]]
    scalars: Mapping[str, Any]


class Parameters(Protocol):
    """The parameters of one model, by their first names."""

    def spec(self, name: str) -> ParamSpec: ...

    def written(self, rank: int, size: int) -> Mapping[str, Sequence[Held]]:
        """The pieces of each master that this rank writes: over all ranks, every element once."""
        ...

    def held(self) -> Iterator[tuple[str, Held]]:
        """The pieces of each master that this rank has, to be filled."""
        ...

    def shares(self, name: str) -> Iterator[Share]:
        """Who has what of one parameter, by rank."""
        ...


class OptimizerState(Protocol):
    """An optimizer's state by parameter, and its groups' options."""

    @property
    def kind(self) -> str:
        """The name of the optimizer's class."""
        ...

    @property
    def groups(self) -> Sequence[Mapping[str, Any]]:
        """The options of each group, and under `params` the parameters' names."""
        ...

    def names(self) -> set[str] | None:
        """The states that a parameter has after a step; None where that cannot be known."""
        ...

    def parameters(self) -> Iterator[tuple[ParamSpec, bool]]:
        """The parameters that are trained; whether the arrays of their states have shapes of their own."""
        ...

    def written(self, rank: int, size: int) -> Mapping[str, Mapping[str, Sequence[Held]]]:
        """State -> parameter -> the pieces that this rank writes. Every state is named, also where this rank writes nothing.

        Raises:
            CheckpointError: a state that cannot be stored by parameter.
        """
        ...

    def described(self) -> Mapping[str, ParameterState]:
        """By parameter, the state there is."""
        ...

    def room(self, saved: Mapping[str, ParameterState]) -> Sequence[tuple[str, str, Held]]:
        """Memory for a saved state: parameter, state, and a piece to be filled. The optimizer keeps its own until `put`."""
        ...

    def put(self, options: Sequence[Mapping[str, Any]]) -> None:
        """What `room` gave becomes the optimizer's state, `options` those of its groups."""
        ...
