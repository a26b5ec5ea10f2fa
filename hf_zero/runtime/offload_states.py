"""Which tier everything of an engine rests in, to leave it for a while and come back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tiers.tier import Tier
from .flat_param import Flat
from .state_shard import Shard
from .unit import State, Unit


@dataclass(frozen=True, slots=True)
class Place:
    """Of one span: where `own` rests, and each shard."""

    unit: Unit
    flat: Flat
    rest: Tier
    tiers: tuple[Tier, ...]


class Arrangement:
    """The places of all spans at one time. Moves are made between steps, with nothing gathered or under way."""

    def __init__(self, places: list[Place]) -> None:
        self._places = places
        self._gradients: list[tuple[Shard, Tensor]] = []

    @staticmethod
    def of(units: Iterable[Unit]) -> Arrangement:
        return Arrangement(
            [
                Place(unit, flat, flat.rest, tuple(shard.tier for shard in flat.shards))
                for unit in units
                for flat in unit.flats
            ]
        )

    def leave(self, names: set[str], optimizer: torch.optim.Optimizer | None) -> None:
        """What rests on the device and is of `names` (`parameters`, `gradients`, `optimizer`) goes to host memory."""
        for place in self._places:
            flat = place.flat
            if "gradients" in names and "optimizer" not in names:
                for shard in flat.shards:
                    if shard.tier is Tier.DEVICE and (grad := shard.device_grad) is not None:
                        shard.device_grad = None
                        host = flat.storage.link.empty(grad.numel(), grad.dtype)
                        flat.storage.link.down(grad, host).close()
                        self._gradients.append((shard, host))
                        flat.drop_bucket()
            rest, tiers = place.rest, list(place.tiers)
            if "parameters" in names:
                rest = _below(rest)
            if "optimizer" in names or ("parameters" in names and not flat.span.trainable):
                tiers = [_below(tier) for tier in tiers]
            if rest is not flat.rest and place.unit.policy.keep_full:
                place.unit.state = State.SHARDED
            flat.move(rest, tiers, optimizer)

    def restore(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Everything is where it was when this was made."""
        for place in self._places:
            place.flat.move(place.rest, place.tiers, optimizer, keep_full=place.unit.policy.keep_full)
        for shard, grad in self._gradients:
            shard.device_grad = grad.to(shard.master.device, copy=True)
        self._gradients.clear()


def _below(tier: Tier) -> Tier:
    return Tier.HOST if tier is Tier.DEVICE else tier
