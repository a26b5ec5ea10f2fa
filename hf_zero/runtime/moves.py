"""Moves between tiers, between steps: what `auto` moves when memory runs short, and everything away for a while and back.

`Monitor`, under `auto`, watches memory from step to step, moves state away before it runs out, and back when there is room.

The plan is a prediction, and others use the machine too. After every step the monitor compares what is free with what the
next step will still need beyond what rests now. Where that is too little, optimizer state of some units (the last ones first,
which the next forward needs last) goes one tier down; where there has been room for a while, it comes back, never further
than the plan had it. Moves are local to a rank and bounded per step. Values are moved, not computed: results stay the same to
the bit.

Activations are not known when the plan is made. They are estimated from the shape of each batch that is larger than those
before, and room is made for them before its forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import size_text
from ..errors import ConfigError, TierError
from ..plan.machine import MARGIN, free_device_bytes, free_disk_bytes
from ..plan.outline import Batch, activation_bytes
from ..tiers.tier import Tier
from .optimizers.optimizer import state_tensors
from .values.flat_param import Flat
from .values.sharded import Sharded
from .values.unit import State, Unit


@dataclass(frozen=True, slots=True)
class Movable:
    """Master and optimizer state of one shard, or a span's parameters (`shard` None)."""

    unit: Unit
    flat: Flat
    shard: int | None = None

    @property
    def tier(self) -> Tier:
        return self.flat.rest if self.shard is None else self.flat.shards[self.shard].tier

    def nbytes(self, states: int) -> int:
        """Bytes of one shard's master and `states` optimizer states, or of parameters; none where they are other memory."""
        if self.shard is None:
            return self.flat.span.slice_numel * self.flat.compute_dtype.itemsize
        shard, span = self.flat.shards[self.shard], self.flat.span
        if span.is_whole:
            state_bytes = sum(nbytes for slot in span.wholes for nbytes in slot.spec.state_bytes)
            return state_bytes + (0 if shard.aliased else shard.numel * shard.dtype.itemsize)
        states = states if shard.master.requires_grad else 0
        return shard.numel * shard.dtype.itemsize * (states + (0 if shard.aliased else 1))

    def move(self, tier: Tier, optimizer: torch.optim.Optimizer | None) -> None:
        tiers = [shard.tier for shard in self.flat.shards]
        if self.shard is not None:
            tiers[self.shard] = tier
        rest = tier if self.shard is None else self.flat.rest
        self.flat.move(rest, tiers, optimizer, keep_full=self.unit.policy.keep_full)


MOVES_PER_STEP = 4
"""Shards or spans that are moved between two steps at most."""
CALM_STEPS = 10
"""So many steps there must have been room before something comes back."""


class Monitor:
    """One engine's monitor. `look` after every step.

    Args:
        free_host_bytes: what of the host's memory is free for this rank.

    Attributes:
        moves: what was moved, one line each.
    """

    def __init__(self, sharded: Sharded, free_host_bytes: Callable[[], int]) -> None:
        self._sharded = sharded
        self._free_host_bytes = free_host_bytes
        self._states = state_tensors(sharded.optimizers)
        self._step = 0
        self._calm = 0
        self.moves: list[str] = []
        self._refused: set[Tier] = set()
        config = sharded.config
        self._activation_bytes = 0
        spans = [(unit, flat) for unit in sharded.units for flat in unit.flats]
        shards = [Movable(u, f, index) for u, f in spans if f.span.trainable for index in range(len(f.shards))]
        params = [Movable(unit, flat) for unit, flat in spans if not flat.resident]
        self._movable = shards if config.offload_optimizer == "auto" else []
        self._movable += params if config.offload_params == "auto" else []
        self._planned = [self._planned_tier(item) for item in self._movable]

    def look(self) -> None:
        """Move what must go, or may come back."""
        self._step += 1
        device, host = self.missing_bytes(Tier.DEVICE), self.missing_bytes(Tier.HOST)
        if device > 0 or host > 0:
            self._calm = 0
            self.make_room(Tier.HOST, host)
            self.make_room(Tier.DEVICE, device)
            return
        self._calm += 1
        if self._calm > CALM_STEPS:
            self._bring_back({Tier.DEVICE: -device, Tier.HOST: -host})

    def expect(self, batch: Batch) -> None:
        """Before a forward of it that backward follows: room for what it keeps, as far as anything may move now."""
        sharded = self._sharded
        dtype = sharded.precision.autocast_dtype or next(flat for u in sharded.units for flat in u.flats).compute_dtype
        expected, _ = activation_bytes(batch, dtype.itemsize, sharded.precision.autocast_dtype is not None)
        if expected <= self._activation_bytes:
            return
        self._activation_bytes = expected
        if any(unit.state is not State.SHARDED and not unit.policy.keep_full for unit in sharded.units):
            return  # a forward before this one has not had its backward yet
        while (missing := self.missing_bytes(Tier.DEVICE)) > 0 and self.make_room(Tier.DEVICE, missing):
            pass

    def missing_bytes(self, tier: Tier) -> int:
        """What the next step needs in a tier beyond what is free there; negative where there is room."""
        sharded = self._sharded
        memory = sharded.plan.memory
        grows = max(0, memory.at_peak(tier) - memory.at_rest(tier))
        if tier is Tier.DEVICE:
            grows += self._activation_bytes
        config = sharded.config
        budget = config.device_memory if tier is Tier.DEVICE else config.host_memory
        if budget is not None:
            free = int(budget) - self.resting_bytes(tier)
        elif tier is Tier.DEVICE and sharded.device.type != "cpu":
            free = free_device_bytes(sharded.device)
        else:
            free = self._free_host_bytes()
            grows = grows + int(free * MARGIN) if tier is Tier.HOST or sharded.device.type == "cpu" else grows
        return grows - free

    def make_room(self, tier: Tier, bytes_: int, *, in_pass: bool = False) -> int:
        """Move state out of a tier until that many bytes are free, as far as one step's moves go; returns the bytes freed.

        Args:
            in_pass: a forward or a backward is under way: no parameters move. What is in use never does.
        """
        freed = moved = 0
        # Optimizer state before parameters, late units before early ones.
        late_first = [*reversed(self._movable)]
        for item in sorted(late_first, key=lambda item: item.shard is None):
            if freed >= bytes_ or moved >= MOVES_PER_STEP:
                break
            if not item.unit.is_idle or (in_pass and item.shard is None):
                continue
            size = item.nbytes(self._states)
            if item.tier is not tier or not size:
                continue
            target = self._next_below(tier, size)
            if target is None:
                break
            if self._move(item, target, f"{size_text(bytes_ - freed)} are missing on the {tier.value}"):
                freed += size
                moved += 1
        return freed

    def _next_below(self, tier: Tier, size: int) -> Tier | None:
        if tier is Tier.DEVICE and Tier.HOST not in self._refused and self.missing_bytes(Tier.HOST) + size <= 0:
            return Tier.HOST
        if Tier.DISK in self._refused:
            return None
        free = free_disk_bytes(self._sharded.config.offload_dir)
        return Tier.DISK if free > 2 * size else None

    def _bring_back(self, room: dict[Tier, int]) -> None:
        moved = 0
        for item, planned in zip(self._movable, self._planned):
            if item.tier is planned or not item.unit.is_idle:
                continue
            size = item.nbytes(self._states)
            # Twice: what comes back must not be what is missing next.
            if moved >= MOVES_PER_STEP or room.get(planned, 0) < 2 * size or planned in self._refused:
                return
            room[planned] -= size
            moved += 1
            self._move(item, planned, f"there is room on the {planned.value} again")

    def _move(self, item: Movable, tier: Tier, why: str) -> bool:
        """False: the tier refused, and is asked no more. Other ranks know nothing of it, so it must be no error here."""
        item.unit.finish_step()
        if item.shard is None:
            item.unit.close()  # the device may still be given what moves
        before = item.tier
        what = f"step {self._step}: {'parameters' if item.shard is None else 'optimizer state'} of {item.unit.name!r}"
        line = f"{what} ({size_text(item.nbytes(self._states))}) from the {before.value} to the {tier.value}: {why}"
        try:
            item.move(tier, self._sharded.optimizer_of(item.flat))
        except (TierError, ConfigError) as error:
            self._refused.add(tier)
            line = f"{what} stays on the {before.value}: {error}"
        else:
            self.moves.append(line)
        print(f"hf_zero: rank {self._sharded.wire.rank}: {line}", file=sys.stderr)
        return tier not in self._refused

    def _planned_tier(self, item: Movable) -> Tier:
        placement = self._sharded.plan.placements[item.flat.span.index]
        if item.shard is None or not placement.optimizer:
            return placement.parameters
        return placement.optimizer[item.shard][0]

    def resting_bytes(self, tier: Tier) -> int:
        """What this rank's parameters, gradients and optimizer state take in a tier between backward and step."""
        total = 0
        for unit in self._sharded.units:
            for flat in unit.flats:
                if flat.rest is tier:
                    total += flat.full_bytes if flat.resident else flat.span.slice_numel * flat.compute_dtype.itemsize
                for index, shard in enumerate(flat.shards):
                    total += Movable(unit, flat, index).nbytes(self._states) if shard.tier is tier else 0
                    if flat.span.trainable and shard.tier is tier:
                        total += shard.numel * shard.dtype.itemsize
        return total


# Away for a while ---------------------------------------------------------------------------------------------------


class Arrangement:
    """The places of all spans as they are now. Moves are made between steps, with nothing gathered or under way."""

    def __init__(self, sharded: Sharded) -> None:
        spans = [(unit, flat) for unit in sharded.units for flat in unit.flats]
        self._places = [(unit, flat, flat.rest, [shard.tier for shard in flat.shards]) for unit, flat in spans]
        self._optimizer_of = sharded.optimizer_of
        self._gradients: list[tuple[Flat, int, Tensor]] = []

    def leave(self, names: set[str]) -> None:
        """What rests on the device and is of `names` (`parameters`, `gradients`, `optimizer`) goes to host memory."""
        for unit, flat, rest, tiers in self._places:
            if "gradients" in names and "optimizer" not in names:
                for index, shard in enumerate(flat.shards):
                    if not shard.is_offloaded and (grad := shard.device_grad) is not None:
                        shard.device_grad = None
                        host = flat.storage.link.empty(grad.numel(), grad.dtype)
                        flat.storage.link.down(grad, host).close()
                        self._gradients.append((flat, index, host))
                        flat.drop_bucket()
            if "parameters" in names:
                rest = _below(rest)
            if "optimizer" in names or ("parameters" in names and not flat.span.trainable):
                tiers = [_below(tier) for tier in tiers]
            if rest is not flat.rest and unit.policy.keep_full:
                unit.state = State.SHARDED
            flat.move(rest, tiers, self._optimizer_of(flat))

    def zero_grad(self, optimizer: int | None, *, set_to_none: bool) -> None:
        """The gradients that are away by themselves are cleared with those that are not.

        Args:
            optimizer: see `Unit.drop_grads`.
        """
        kept = []
        for flat, index, grad in self._gradients:
            if optimizer is not None and flat.span.is_updated and flat.span.optimizer != optimizer:
                kept.append((flat, index, grad))
            elif not set_to_none:
                kept.append((flat, index, grad.zero_()))
        self._gradients = kept

    def restore(self) -> None:
        """Everything is where it was when this was made."""
        for unit, flat, rest, tiers in self._places:
            flat.move(rest, tiers, self._optimizer_of(flat), keep_full=unit.policy.keep_full)
        for flat, index, grad in self._gradients:
            shard = flat.shards[index]
            shard.device_grad = grad.to(shard.master.device, copy=True)
        self._gradients.clear()


def _below(tier: Tier) -> Tier:
    return Tier.HOST if tier is Tier.DEVICE else tier
