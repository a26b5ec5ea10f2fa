"""One sharded model as data: what is in it, by which settings, and where each parameter's values are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...comm.agree import read
from ...comm.wire import SoloWire
from ...config import StagePolicy, ZeroConfig
from ...core.layout import Extent, Layout, Slot
from ...core.precision import Precision
from ...errors import StateError
from ...plan.machine import device_bytes_in_use
from ...plan.plan import Plan, advice
from ...tiers.array import Values
from ...tiers.pool import Storage
from ...tiers.tier import Tier
from .flat_param import Flat, sent
from .pieces import is_sliced
from .reads import AsTheyAre, plain_class
from .state_shard import Shard, assembled, extents
from .unit import State, Unit

Of = Callable[[Shard], Values | None]
"""What of a shard is meant: master, gradient, a state."""


def master_of(shard: Shard) -> Values:
    return shard.values


def gradient_of(shard: Shard) -> Values | None:
    return shard.whole_grad()


def state_of(optimizer: torch.optim.Optimizer | None, name: str) -> Of:
    return lambda shard: None if optimizer is None else shard.entries(optimizer).get(name)


class Place(NamedTuple):
    """Where a sharded model has one parameter: its unit, its span, and which of the span's parameters it is."""

    unit: Unit
    flat: Flat
    at: int

    @property
    def slot(self) -> Slot:
        return self.flat.span.slots[self.at]

    @property
    def own(self) -> Extent[Slot] | None:
        """The stretch of the parameter that this rank has, if any."""
        return self.flat.span.part_of(self.slot, self.flat.rank)

    @property
    def own_numel(self) -> int:
        return 0 if (own := self.own) is None else own.numel

    @property
    def is_owned(self) -> bool:
        """One rank has all of it, and of the optimizer's state."""
        return self.flat.wholes is not None and bool(self.flat.span.cuts)

    def owners(self, value: Any) -> Any:
        """Of the owner's value, which other ranks pass as None, a copy on every rank. A collective."""
        wire, owner = self.unit.wire, self.flat.span.owner(self.slot)
        is_array = isinstance(value, Tensor) and value.dim() > 0
        told = wire.exchange((tuple(value.shape), value.dtype) if is_array else value)[owner]
        if not isinstance(told, tuple):
            return told
        shape, dtype = told
        return sent(wire, value if wire.rank == owner else None, shape, dtype, self.flat.device, owner)

    def own_part(self, value: Tensor) -> Tensor:
        """Of a whole value, what this rank has, 1-D."""
        own, flat = self.own, value.detach().reshape(-1)
        return flat[:0] if own is None else flat[own.there]

    def whole(self, of: Of) -> Tensor:
        """What the ranks' shards hold of the parameter, as a new tensor of its shape. A collective."""
        flat, wire = self.flat, self.unit.wire
        mine = read(wire, lambda: self.local(of), may_fail=flat.storage.uses_disk)
        whole = torch.empty(self.slot.spec.numel, dtype=mine.dtype, device=flat.device)
        for rank, part in flat.span.owners(self.slot):
            piece = whole[part.there]
            if rank == flat.rank:
                piece.copy_(mine)
            if flat.span.shards > 1:
                wire.broadcast(piece.view(torch.uint8), rank)
        return whole.view(self.slot.spec.shape)

    def local(self, of: Of) -> Tensor:
        """This rank's elements of the parameter, on the span's device; maybe a view. A gap is zeros."""
        flat, own = self.flat, self.own
        if own is not None:
            found = assembled(flat.shards, of, own.start, own.numel, flat.device)
            return torch.zeros(own.numel, dtype=flat.master_dtype, device=flat.device) if found is None else found
        sample = next((value for shard in flat.shards if (value := of(shard)) is not None), None)
        return torch.empty(0, dtype=flat.master_dtype if sample is None else sample.dtype, device=flat.device)

    def write(self, of: Of, value: Tensor) -> None:
        """This rank's elements of the parameter get the values of `value`, 1-D."""
        own = self.own
        if own is None:
            return
        for shard, piece in extents([own], self.flat.shards):
            target = of(shard)
            if target is not None:
                done = piece.source_start - own.source_start
                target[piece.here].copy_(value[done : done + piece.numel])

    def written(self) -> None:
        """The master is new: whole parameters follow, where the stage keeps them. A collective there."""
        self.unit.release()
        self.unit.updated()
        self.unit.gather_if_kept()

    def state(self, optimizer: torch.optim.Optimizer | None, name: str) -> tuple[Any, bool]:
        """One shard's value of an optimizer state (None: there is none), and whether `state_of` gives it by element."""
        if optimizer is None:
            return None, False
        if self.flat.wholes is not None:
            return self.flat.whole_entries(optimizer).get(self.at, {}).get(name), False
        for shard in self.flat.shards:
            value = shard.entries(optimizer).get(name)
            if value is not None:
                return value, is_sliced(self.flat, shard, name, value)
        return None, False


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
        optimizers: those that are bound, in the order that `ParamSpec.optimizer` counts.
        plan: what the units were built by.
        is_unsharded: inside `zero.unsharded`.
        shows_masters: there, and parameters have the masters' values, in their own types.
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
    places: dict[nn.Parameter, Place] = field(default_factory=dict)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    plan: Plan = field(init=False)
    storage: Storage = field(init=False)
    is_unsharded: bool = False
    shows_masters: bool = False

    def __post_init__(self) -> None:
        self.layout = Layout((), self.config.shards(self.wire.size))

    @property
    def flats(self) -> list[Flat]:
        return [flat for unit in self.units for flat in unit.flats]

    @property
    def trained(self) -> list[Flat]:
        """Those whose parameters require a gradient."""
        return [flat for unit in self.units for flat in unit.trained]

    def optimizer_of(self, flat: Flat) -> torch.optim.Optimizer | None:
        """The one whose groups have this span."""
        spec = flat.span.spec
        return self.optimizers[spec.optimizer] if spec.group >= 0 and spec.optimizer < len(self.optimizers) else None

    def advice(self) -> str:
        """What of the settings would have made this model fit on the device as it is now. Without communication."""
        held = device_bytes_in_use(self.device) or self.plan.memory.at_rest(Tier.DEVICE)
        return advice(self.plan, held)

    def refuse_unsharded(self, what: str) -> None:
        """Raises:
        StateError: inside `zero.unsharded`, whose values `what` would leave behind.
        """
        if self.is_unsharded:
            raise StateError(
                f"{what} inside zero.unsharded: the weights that it shows would be old. End the context first"
            )

    # A copy or a file of a released parameter would be one of NaN: both are refused while it is released.

    def copied(self, param: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        """As `ownership.Owner`."""
        self._refuse_released(param)
        with AsTheyAre():
            copied: nn.Parameter = nn.Parameter.__deepcopy__(param, memo)
        copied.__class__ = plain_class(param)
        return copied

    def pickled(self, param: nn.Parameter) -> Any:
        """As `ownership.Owner`: like nn.Parameter's own, without the attributes that are ours."""
        self._refuse_released(param)
        with AsTheyAre():
            return torch._utils._rebuild_parameter, (param.data, param.requires_grad, OrderedDict())

    def _refuse_released(self, param: nn.Parameter) -> None:
        unit, flat, index = place = self.places[param]
        if unit.state is not State.GATHERED and index not in flat.pinned:
            raise StateError(
                f"parameter {place.slot.spec.name!r} is released: its values are with the ranks' shards, and a copy or a file "
                "of it would hold NaN. Use model.state_dict() on every rank, or zero.full_parameter, or copy it inside "
                "zero.GatheredParameters"
            )
