"""What a checkpoint sees of a run: elements of named parameters, and the arrays they are read from and written into.

`Parameters` and `OptimizerState` are implemented where units and shards are known. Nothing here holds more than views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ..core.layout import Extent, ParamSpec
from ..tiers.array import Values

MASTER = "master"
"""The state that a master finer than its parameter is stored as."""


Held = tuple[str, Extent[Values]]
"""A parameter's first name, and elements of it: 1-D views of this rank's memory, or of its disk. "Here" is the parameter."""


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

    def written(self, rank: int, size: int) -> Iterable[Held]:
        """The pieces of each master that this rank writes: over all ranks, every element once."""
        ...

    def held(self) -> Iterable[Held]:
        """The pieces of each master that this rank has, to be filled."""
        ...

    def shares(self, name: str) -> Iterable[tuple[int, Extent[Callable[[], Tensor]]]]:
        """Which rank has which elements of one parameter, the same on every rank. Only the rank itself may call the source.

        It answers with a 1-D tensor of the master's type, and raises a ZeroError where the values cannot be read.
        """
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

    def refusal(self, group: int, options: Mapping[str, Any]) -> str | None:
        """Why the optimizer would not have been built with such options; None where it would, or cannot say."""
        ...

    def parameters(self) -> Iterator[tuple[ParamSpec, bool]]:
        """The parameters that are trained; whether the arrays of their states have shapes of their own."""
        ...

    def written(self, rank: int, size: int) -> Mapping[str, Iterable[Held]]:
        """State -> the pieces that this rank writes. Every state is named, also where this rank writes nothing.

        Raises:
            CheckpointError: a state that cannot be stored by parameter.
        """
        ...

    def described(self) -> Mapping[str, ParameterState]:
        """By parameter, the state there is."""
        ...

    def room(self, saved: Mapping[str, ParameterState]) -> Iterable[tuple[str, Held]]:
        """Memory for a saved state: the state, and a piece to be filled. The optimizer keeps its own until `put`."""
        ...

    def put(self, options: Sequence[Mapping[str, Any]]) -> None:
        """What `room` gave becomes the optimizer's state, `options` those of its groups."""
        ...
