"""What there is of one sharded model, as data: what is in it, where, and by which settings. The engine's verbs work on it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from ..comm.wire import SoloWire
from ..config import StagePolicy, ZeroConfig
from ..core.layout import Layout
from ..core.precision import Precision
from ..plan.machine import device_bytes_in_use
from ..plan.plan import Plan, advice
from ..tiers.pool import Storage
from ..tiers.tier import Tier
from .flat_param import Flat
from .optimizer import state_tensors
from .unit import Unit


@dataclass(eq=False)
class Sharded:
    """One sharded model. Made and held by its engine; `build.Assembly` fills `layout`, `units` and `places`.

    It refers to the model, and the model to its engine: whatever a graph of autograd can reach (parameters, gradients) holds
    this weakly, or the model and all its memory would outlive their last use.

    Attributes:
        model: the module itself; its parameters show views of flat spans, or placeholders.
        config: the user's settings. `policy`: what they make of stage and number of ranks. `precision`: types.
        wire: what this rank talks to the others through.
        device: where it computes.
        names: parameter -> all its names in the model, the first one first.
        layout: where each element lives; its `shards` is 1 where the stage shards nothing.
        units: in the order of the layout. The list stays the same object; a unit in it is replaced where it is cut anew.
        places: parameter -> its unit, its span, and which of the span's parameters it is.
        optimizer: the one that is bound, or None.
        plan: what the units were built by.
        storage: what the tiers share.
    """

    model: nn.Module
    config: ZeroConfig
    policy: StagePolicy
    precision: Precision
    wire: SoloWire
    device: torch.device
    names: dict[nn.Parameter, list[str]]
    layout: Layout = field(init=False)
    units: list[Unit] = field(default_factory=list)
    places: dict[nn.Parameter, tuple[Unit, Flat, int]] = field(default_factory=dict)
    optimizer: torch.optim.Optimizer | None = None
    plan: Plan = field(init=False)
    storage: Storage = field(init=False)

    def __post_init__(self) -> None:
        self.layout = Layout((), self.wire.size if self.policy.shard else 1)

    @property
    def flats(self) -> list[Flat]:
        """Every span's storage, unit by unit."""
        return [flat for unit in self.units for flat in unit.flats]

    @property
    def trained(self) -> list[Flat]:
        """Those whose parameters require a gradient."""
        return [flat for unit in self.units for flat in unit.trained]

    def advice(self) -> str:
        """What of the settings would have made this model fit on the device as it is now. Without communication."""
        held = device_bytes_in_use(self.device) or self.plan.memory.at_rest(Tier.DEVICE)
        return advice(self.plan, held, self.precision, state_tensors(self.optimizer))
