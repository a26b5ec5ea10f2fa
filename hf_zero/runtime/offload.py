"""What does not rest on the device, of one engine: its memory, the steps over it, failures, leaving the device for a while."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from ..comm import agree
from ..errors import ConfigError, StateError, TierError, ZeroError
from ..plan.costs import Placement
from ..tiers.host import empty_cache
from ..tiers.tier import Tier
from .moves import Arrangement, Monitor
from .optimizers.host_step import Stepper
from .optimizers.shadow_optimizer import Counts, Twin
from .transports import Roads
from .values.reads import AsTheyAre
from .values.sharded import Sharded
from .values.unit import Step, Unit

STATES = ("parameters", "gradients", "optimizer")


class Offload:
    """See the module's text. All of it is there, and idle, where everything rests on the device.

    Attributes:
        stepper: the thread that steps, once it has been needed.
        monitor: under `auto`; `free_host_bytes` is what it asks.
        ranks_here: ranks on this machine (1 where nothing is offloaded: nobody asks).
    """

    def __init__(self, sharded: Sharded, roads: Roads) -> None:
        self._sharded, self._units = sharded, sharded.units
        self._config, self._wire, self._device = config, wire, device = sharded.config, sharded.wire, sharded.device
        self.ranks_here = wire.ranks_here() if config.offloads else 1
        self.storage = roads.storage(device, wire.rank, config.offload_dir, roads.link, roads.sizes)
        self.free_host_bytes = roads.free_host_bytes
        self.storage.transient = config.step_in_backward
        self.storage.make_room = self._make_room
        self.storage.settle_step = self.finish_before_a_look
        self.stepper: Stepper | None = None
        self.monitor: Monitor | None = None
        self.over_wholes: Mapping[int, bool] = {}
        """Which optimizers step over parameters of true shape, and whether they change those without a gradient, too."""
        self.counted: Mapping[int, Collection[str]] = {}
        """Of optimizers that a step changes, and not the states of their parameters alone: which numbers."""
        self._counts: Counts | None = None
        self._away: Arrangement | None = None
        self._stepped: set[Unit] = set()  # in this backward already
        self._before: Step | None = None  # the last of them
        self._twin: Twin | None = None
        self._under_way: dict[Unit, None] = {}
        """Units whose step was begun since the last `finish_step`, which is called for every parameter that is read."""
        self._is_due = False
        self._mark: Any = None  # before the optimizer's own step: what goes up waits for no more

    def settle(self, placements: Iterable[Placement], disk_bytes: int) -> None:
        """Take note of the plan. A folder that cannot be used, or is too small, is refused here.

        Raises:
            ConfigError: the folder.
            TierError: it has no room for `disk_bytes`.
        """
        tiers = {tier for p in placements for tier in (p.parameters, *(place for place, _ in p.optimizer))}
        self.storage.uses_disk = Tier.DISK in tiers or self._config.is_auto  # the monitor may move something there
        if Tier.DISK in tiers:
            disk = self.storage.disk
            disk.give_back(disk.take(disk_bytes))

    @property
    def reads(self) -> bool:
        """Whether parameters may have to be read from disk. The same on every rank."""
        return self.storage.uses_disk and self._config.offload_params != "none"

    # The step ---------------------------------------------------------------------------------------------------------

    def prepare_step(self, optimizer: torch.optim.Optimizer, index: int) -> None:
        """Before the optimizer's own step, which is for what rests on the device. It may raise, and be tried again: nothing
        is updated before it has succeeded.

        Raises:
            StateError: an earlier step broke off.
        """
        self.check()
        self._is_due = True
        counted = self.counted.get(index)
        self._counts = Counts(optimizer, counted) if counted else None
        offloaded = [unit for unit in self._units if not unit.in_memory] if self._config.offloads else []
        self._mark = self.storage.link.mark() if offloaded else None
        for unit in offloaded:
            self._follow_states(unit, optimizer, index)
            with AsTheyAre():
                for flat in unit.trained:
                    for shard in flat.shards:
                        shard.hide_grad()

    @staticmethod
    def _follow_states(unit: Unit, optimizer: torch.optim.Optimizer, index: int) -> None:
        # Before any step is begun: it waits for those under way, and slabs are read as the states are laid out by then.
        for flat in unit.trained:
            if flat.wholes is None and flat.span.optimizer == index:
                for shard in flat.shards:
                    shard.follow_states(optimizer)

    def begin_step(self, optimizer: torch.optim.Optimizer, index: int) -> None:
        """After it: start to update offloaded shards of its in another thread, unit by unit, in the order of the next forward.

        Once per step: where an optimizer's `step` calls that of its base class, torch runs the hooks of both.

        Raises:
            StateError: an earlier step broke off.
        """
        if not self._is_due:
            return
        self._is_due = False
        if not self._config.offloads:
            return
        left = [unit for unit in self._units if not unit.in_memory and unit not in self._stepped]
        self._stepped.clear()
        self._before = None
        mark, self._mark = self._mark, None
        if left:
            self._under_way.update(dict.fromkeys(left))
            self._stepping().begin(left, optimizer, index, self._new_twin(optimizer, index, self._counts), mark)

    def end_step(self, index: int) -> None:
        """After the optimizer's own step: what is gathered of its spans is old, and groups show their gradients again.

        Args:
            index: which of the model's optimizers it is.

        Raises:
            StateError, TierError: on every rank, where state is on disk and one of them could not update it.
        """
        failure: ZeroError | None = None
        try:
            for unit in self._units:
                unit.stepped(index)
        except ZeroError as error:  # parameters could not be written to where they rest
            failure = error
        if self._config.offloads:
            self.show_grads()
        if not self.storage.uses_disk:
            if failure is not None:
                raise failure
            return
        try:
            self.finish_step()
        except ZeroError as error:
            failure = failure or error
        if not self._on_any_rank(failure is not None):
            return
        with agree.on_all_ranks(self._wire, "an optimizer step over offloaded state", kind=TierError):
            self._stepping().fail("it failed on another rank" if failure is None else str(failure))
            if failure is not None:
                raise failure

    def show_grads(self) -> None:
        """What `prepare_step` hid is shown again."""
        for unit in self._units:
            for flat in unit.trained:
                for shard in flat.shards:
                    shard.show_grad()

    def fail(self, reason: str) -> None:
        """A step broke off half done: everything but a load is refused from now on."""
        self._stepping().fail(reason)

    def backward_broke_off(self) -> None:
        """With `step_in_backward` units may have been updated in it."""
        if self._stepped:
            self.fail("a backward raised after some units were updated in it, as step_in_backward does")
            self._stepped.clear()
            self._before = None

    def step_unit(self, unit: Unit, optimizer: torch.optim.Optimizer | None) -> None:
        """In backward, of the one optimizer there is: this unit's gradients are final.

        Raises:
            StateError: they were not, the last time.
        """
        if optimizer is None or unit.in_memory:
            return
        if unit in self._stepped:
            raise StateError(
                f"unit {unit.name!r} got more gradients after it was updated: with step_in_backward every backward but "
                "the last of a step must be inside engine.no_sync() (accelerator.accumulate), and a unit used in one pass only"
            )
        if not self._stepped or self._twin is None:
            counted = self.counted.get(0)  # its own step comes after the backward
            self._twin = self._new_twin(optimizer, 0, Counts(optimizer, counted) if counted else None)
        self._stepped.add(unit)
        unit.release()
        unit.close()
        if self._before is not None:  # two units' gradients at most are in host memory
            with contextlib.suppress(ZeroError):  # raised where the step ends
                self._before.wait()
        self._follow_states(unit, optimizer, 0)
        self._under_way[unit] = None
        self._stepping().begin([unit], optimizer, 0, self._twin, self.storage.link.mark())
        self._before = unit.stepping

    def land(self) -> None:
        """Gradients that are on their way to host memory or to disk have arrived afterwards, and are shown: user code that
        reads the groups' gradients after a backward finds all of them. The step would wait for the first forward's units
        anyway, which come last."""
        if self._config.offloads:
            for unit in self._units:
                for flat in unit.trained:
                    for shard in flat.shards:
                        shard.land()

    def refuse_clipping(self, what: str) -> None:
        """Raises:
        StateError: units are updated before the norm is known, or gradients may be away.
        """
        self.refuse_while_away(what)
        if self._config.step_in_backward:
            raise StateError(
                f"{what}: with step_in_backward parameters are updated before all gradients are there, so nothing can be "
                "clipped: turn it off, or do not clip (max_grad_norm=0 in TrainingArguments)"
            )

    def finish_step(self) -> None:
        """Updates that go on behind `optimizer.step()` are done afterwards.

        Raises:
            StateError, TierError: one broke off.
        """
        failure: ZeroError | None = None
        for unit in self._under_way:  # all of them: none may raise later, on this rank alone
            if unit.stepping is None:
                continue
            try:
                unit.finish_step()
            except ZeroError as error:
                failure = failure or error
        self._under_way.clear()  # not before: a wait that Ctrl-C ends is not over
        if failure is not None:
            raise failure
        self.check()

    def finish_before_a_look(self) -> None:
        """Somebody asks for optimizer states: as `finish_step`; at once in the thread that updates them."""
        if self._under_way and threading.get_ident() != self.storage.meter.stepper_thread:
            self.finish_step()

    def check(self) -> None:
        """Raises:
        StateError: a step broke off, here or on another rank, and nothing has been loaded since.
        """
        if self.stepper is not None:
            self.stepper.check()

    def recover(self) -> None:
        """Weights and optimizer state have been written anew: a step that broke off is forgotten."""
        if self.stepper is not None:
            self.stepper.recover()

    def agree_on_disk(self, *, reduced: bool = False) -> None:
        """Raise on every rank what one of them could not move to or from disk in a pass. A collective where parameters are
        there; and with `reduced`, after a backward that sent gradients to their owners, where gradients are.

        Raises:
            TierError: on every rank.
        """
        if not self.reads and not (reduced and self._stores_gradients):
            return
        storage = self.storage
        failed = storage.failure is not None or any(unit.failure for unit in self._units)
        if not self._on_any_rank(failed):
            return
        with agree.on_all_ranks(self._wire, "moving parameters and gradients from and to disk", kind=TierError):
            failures: list[ZeroError] = [unit.failure for unit in self._units if unit.failure is not None]
            failures += [] if storage.failure is None else [storage.failure]
            for unit in self._units:
                unit.failure = None
            storage.failure = None
            if failures:
                raise failures[0]

    @property
    def _stores_gradients(self) -> bool:
        """Whether gradients may be on disk. The same on every rank."""
        return self.storage.uses_disk and self._config.offload_optimizer != "none" and not self.storage.transient

    def _on_any_rank(self, mine: bool) -> bool:
        return bool(self._wire.max_scalar(torch.tensor(float(mine), device=self._device)))

    def _stepping(self) -> Stepper:
        if self.stepper is None:
            # This rank's share of the cores, where the model does not compute on them itself.
            share = max(1, (os.cpu_count() or 1) // self.ranks_here)
            self.stepper = Stepper(self.storage, None if self._device.type == "cpu" else share)
        return self.stepper

    def _new_twin(self, optimizer: torch.optim.Optimizer, index: int, counts: Counts | None) -> Twin:
        if index in self.over_wholes:
            forces = self.over_wholes[index]
            return Twin(optimizer, fuse=False, wholes=True, steps_without_gradient=forces, counts=counts)
        # On a CPU device the in-memory run would not take the fused kernel either, and results are to be equal.
        return Twin(optimizer, fuse=self._device.type != "cpu", counts=counts)

    # Memory -----------------------------------------------------------------------------------------------------------

    def leave(self, include: Iterable[str]) -> None:
        """See `Engine.offload_states`."""
        names = set(include)
        if not names <= set(STATES):
            raise ConfigError(
                f"offload_states: expected names of {', '.join(STATES)}, found {sorted(names - set(STATES))}"
            )
        if self._away is not None:
            raise StateError("offload_states: states are in host memory already; call reload_states() first")
        self._away = Arrangement(self._sharded)
        self._away.leave(names)
        empty_cache(self._device)

    def zero_grad(self, index: int | None, *, set_to_none: bool) -> None:
        """Of the optimizer with this number, or (None) of all: gradients that `leave` took away do not come back."""
        if self._away is not None:
            self._away.zero_grad(index, set_to_none=set_to_none)

    def come_back(self) -> None:
        """See `Engine.reload_states`."""
        away, self._away = self._away, None
        if away is None:
            raise StateError("reload_states: no states are away; offload_states() comes first")
        away.restore()
        for unit in self._units:
            unit.gather_if_kept()

    def refuse_while_away(self, what: str) -> None:
        """Raises:
        StateError: states are in host memory.
        """
        if self._away is not None:
            raise StateError(f"{what}: the model's states are in host memory; call engine.reload_states() first")

    def _make_room(self, bytes_: int) -> None:
        """In the middle of a pass: optimizer state may go, of units that are not in use."""
        empty_cache(self._device)
        if self.monitor is not None:
            self.monitor.make_room(Tier.DEVICE, bytes_, in_pass=True)
            empty_cache(self._device)

    def close(self) -> None:
        if self.stepper is not None:
            self.stepper.close()
            self.stepper = None
        self.storage.close()
