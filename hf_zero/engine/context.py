"""What all parts of one engine share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..comm.wire import SoloWire
from ..config import StagePolicy, ZeroConfig
from ..core.layout import Layout
from ..core.precision import Precision
from ..errors import StateError, ZeroError
from ..tiers.pool import Storage
from .observer import Events

if TYPE_CHECKING:
    from .unit import Unit


@dataclass
class Context:
    """One sharded model: its settings, its transports, and what was built.

    Attributes:
        names: all names of each parameter, the first one first.
        device: where the model computes.
        layout: of all units; integers only.
        units: in registration order.
        failure: set while a step writes; stays set where one was left half done. See `check`.
    """

    model: nn.Module
    config: ZeroConfig
    policy: StagePolicy
    precision: Precision
    wire: SoloWire
    storage: Storage
    device: torch.device
    names: dict[nn.Parameter, list[str]]
    events: Events
    layout: Layout
    units: list[Unit] = field(default_factory=list)
    failure: str | None = None

    @property
    def shard_rank(self) -> int:
        """Which slice of every span this rank owns."""
        return (self.wire.shard_group or self.wire).rank if self.layout.shards > 1 else 0

    def __post_init__(self) -> None:
        self.frees = not self.policy.keep_full
        """Full parameters are released between their uses."""

    def check(self) -> None:
        """
        Raises:
            StateError: an optimizer's step was left half done; the values are neither the old ones nor the new ones.
        """
        if self.failure is not None:
            raise StateError(
                f"an optimizer's step stopped half-way ({self.failure}): some values are of the step before, some of this "
                "one. Load a checkpoint (engine.load), or stop"
            )

    def raise_on_all_ranks(self, error: ZeroError | None, what: str) -> None:
        """Raise where any rank has an error. A collective, where ranks may differ in that: only disks can fail alone."""
        from ..comm.agree import on_all_ranks

        with on_all_ranks(self.wire, what, kind=type(error) if error is not None else StateError):
            if error is not None:
                raise error
