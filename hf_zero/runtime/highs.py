"""What a step takes on the device at its highest, and of gradients on the host, heard from the units' own verbs.

`gather`, `release`, `reduce`, … of each unit move counters while somebody listens, so that a step costs Python time per unit,
and nothing where nobody does. Words are those of `usage`; communication has in addition fresh gradients, those that wait
within autograd included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..plan.costs import every, tied_bytes, tied_copies
from ..tiers.tier import Tier
from .flat_param import Flat
from .gradients import is_new
from .unit import State, Unit
from .usage import Measurable

_VERBS = ("gather", "release", "hold", "reduce", "finish_reduce", "drop_grads")


class _Sizes:
    """What one unit's verbs move, in bytes on the device."""

    __slots__ = ("fresh", "full", "gradients", "held", "moving", "tied")

    def __init__(self, unit: Unit, tied: int) -> None:
        self.full = sum(flat.full_bytes for flat in unit.flats if not flat.resident)
        self.fresh = [flat.span.used_numel * flat.compute_dtype.itemsize for flat in unit.trained]
        self.gradients = (0, 0)  # on the device and on the host, at rest
        self.held = 0  # local gradients between backwards
        self.moving = 0  # buckets and means on their way
        self.tied = tied  # of these fresh ones, of parameters that are an embedding's and used elsewhere


class Highs:
    """Listens to the units of an engine.

    Attributes:
        gathered: bytes that are there now: of units that come and go;
        moving: of buckets and means on their way;
        held: of local gradients between backwards;
        on_device, on_host: of gradients at rest.
        highest: of each kind since `take`, and of all of them on the device at one moment as `total`.
    """

    def __init__(self, engine: Measurable) -> None:
        self._engine = engine
        self._units: dict[Unit, _Sizes] = {}
        self._there: dict[Unit, _Sizes] = {}  # gathered, of those that come and go
        self._late: dict[Unit, _Sizes] = {}  # with an embedding: only the end of backward shows that theirs is over
        self._sent: set[Unit] = set()  # in this backward
        self._goes_back = self._has_ended = False  # a unit's part of this backward is over; those of embeddings, too
        self._places: tuple[object, ...] = ()  # the units, and where everything of theirs rests
        self._passed = self._settled = 0
        self.gathered = self.moving = self.held = self.on_device = self.on_host = 0
        self.highest = dict.fromkeys(("gathered", "communication", "gradients", "host gradients", "total"), 0)

    def begin(self) -> None:
        """A forward of the whole model begins."""
        self._passed = self._settled = 0
        self._sent.clear()
        self._goes_back = self._has_ended = False

    def take(self) -> dict[str, int]:
        """The highest until now; the next step begins."""
        self._mark()
        taken, self.highest = self.highest, dict.fromkeys(self.highest, 0)
        return taken

    def watch(self) -> bool:
        """Follow the units there are now, and set right what an exception left wrong. Once per step.

        Returns:
            whether they, or where they rest, are others than before.
        """
        units = self._engine.units
        places = (
            *units,
            *((flat.rest, flat.resident) for unit in units for flat in unit.flats),
            *(shard.tier for unit in units for flat in unit.flats for shard in flat.shards),
        )
        is_new = places != self._places
        if is_new:
            self._places = places
            self.unwatch()
            layout = self._engine.layout
            self._units = {unit: _Sizes(unit, tied) for unit, tied in zip(units, tied_bytes(layout))}
            embedded = {visit.unit for visit in every(layout.visits) if visit.is_embedding}
            self._late = {
                unit: self._units[unit] for place, unit in enumerate(units) if place in embedded and unit.trained
            }
            for unit in units:
                self._follow(unit, self._units[unit])
        self.gathered = self.moving = 0
        self._there.clear()
        for unit, sizes in self._units.items():
            if unit.state is not State.SHARDED and sizes.full:
                self.gathered += sizes.full
                self._there[unit] = sizes
            sizes.moving = _moving_bytes(unit)
            self.moving += sizes.moving
        return is_new

    def unwatch(self) -> None:
        """Units are as if nobody had listened."""
        for unit in self._units:
            for name in _VERBS:
                unit.__dict__.pop(name, None)
        self._units = {}
        self.held = self.on_device = self.on_host = 0

    # Verbs ------------------------------------------------------------------------------------------------------------

    def _follow(self, unit: Unit, sizes: _Sizes) -> None:
        """Put counters around this one unit's verbs; its class stays as it is."""
        if sizes.full:
            unit.__dict__["gather"] = self._counted_gather(unit, sizes, unit.gather)
            unit.__dict__["release"] = self._counted_release(unit, sizes, unit.release)
        if unit.trained:
            unit.__dict__["hold"] = self._counted_hold(unit, sizes, unit.hold)
            unit.__dict__["reduce"] = self._counted_reduce(unit, sizes, unit.reduce)
            unit.__dict__["finish_reduce"] = self._counted_finish(unit, sizes, unit.finish_reduce)
            unit.__dict__["drop_grads"] = self._counted_drop(unit, sizes, unit.drop_grads)
            self._count_gradients(unit, sizes)

    def _counted_gather(self, unit: Unit, sizes: _Sizes, gather: Callable[[], None]) -> Callable[[], None]:
        def counted() -> None:
            if unit.state is not State.SHARDED:
                return
            gather()
            if unit.state is not State.SHARDED:
                self.gathered += sizes.full
                self._there[unit] = sizes
                self._mark(self._fresh_bytes() if self._is_backward() else 0)

        return counted

    def _counted_release(self, unit: Unit, sizes: _Sizes, release: Callable[[], None]) -> Callable[[], None]:
        def counted() -> None:
            if unit.state is State.SHARDED:
                return
            if self._is_backward():
                self._mark(self._fresh_bytes())
            release()
            if unit.state is State.SHARDED:
                self.gathered -= sizes.full
                self._there.pop(unit, None)

        return counted

    def _counted_hold(self, unit: Unit, sizes: _Sizes, hold: Callable[[], None]) -> Callable[[], None]:
        def counted() -> None:
            fresh = _fresh_by_flat(unit, sizes)
            self._mark_before(unit, sizes)
            before = [flat._bucket_bytes if flat._held else 0 for flat in unit.trained]
            hold()
            held = sum(_held_bytes(flat, bytes_) for flat, bytes_ in zip(unit.trained, sizes.fresh))
            self.held += held - sizes.held
            sizes.held = held
            copies = [flat._bucket_bytes - was if flat._held else 0 for flat, was in zip(unit.trained, before)]
            copied = [bytes_ if flat._held else 0 for flat, bytes_ in zip(unit.trained, fresh)]
            self._mark(_most_beside(copied, copies))
            self._sent.add(unit)

        return counted

    def _counted_reduce(self, unit: Unit, sizes: _Sizes, reduce: Callable[[], None]) -> Callable[[], None]:
        def counted() -> None:
            if unit.wire.size > 1:
                unit.finish_reduce()  # of an earlier pass: as `reduce` itself begins
            fresh = _fresh_by_flat(unit, sizes)
            self._mark_before(unit, sizes)
            was_held = [flat._held for flat in unit.trained]
            stays = [bytes_ if sizes.held and not held else 0 for held, bytes_ in zip(was_held, sizes.fresh)]
            self.held -= sizes.held
            sizes.held = 0
            before = [_device_gradient_bytes(flat) for flat in unit.trained]
            reduce()
            self._sent.add(unit)
            if unit.wire.size == 1:
                self._count_gradients(unit, sizes)
                made = [_device_gradient_bytes(flat) - was for flat, was in zip(unit.trained, before)]
                passing = [0 if flat.in_memory else flat._bucket_bytes for flat in unit.trained]
                self._mark(self._fresh_bytes() + _most_beside(fresh, made, passing))
                return
            moving = _moving_bytes(unit)
            self.moving += moving - sizes.moving
            sizes.moving = moving
            # What was there as a gradient is there beside its copy, and no more once that is made.
            gone = [max(bytes_, kept) for bytes_, kept in zip(fresh, stays)]
            copies, means = _sent_bytes(unit, was_held)
            gone = [0 if not copy and not held else bytes_ for bytes_, copy, held in zip(gone, copies, was_held)]
            self._mark(self._fresh_bytes() + _most_beside(gone, copies, means=means))

        return counted

    def _counted_finish(self, unit: Unit, sizes: _Sizes, finish: Callable[[], None]) -> Callable[[], None]:
        def counted() -> None:
            if not sizes.moving and not unit._reduces:
                return
            before = self.on_device
            # Of a slice that is cut, parts of the mean are copied while it is there.
            was = sum(_device_gradient_bytes(flat) for flat in unit.trained if not flat.in_memory)
            finish()
            self.moving -= sizes.moving
            self._count_gradients(unit, sizes)
            copied = sum(_device_gradient_bytes(flat) for flat in unit.trained if not flat.in_memory) - was
            self._passed, self._settled = sizes.moving, self.on_device - before
            if copied:
                self._mark(self._passed + self._coming_bytes(unit), self._settled - copied)
            sizes.moving = 0
            self._mark()

        return counted

    def _counted_drop(self, unit: Unit, sizes: _Sizes, drop: Callable[[bool], None]) -> Callable[[bool], None]:
        def counted(shards: bool) -> None:
            drop(shards)
            self.held -= sizes.held
            sizes.held = 0
            self._count_gradients(unit, sizes)

        return counted

    # Fresh gradients --------------------------------------------------------------------------------------------------

    def _is_backward(self) -> bool:
        """Inside one; and notes whether the first unit's part of it is over."""
        if torch._C._current_graph_task_id() == -1:
            return False
        if not self._goes_back and self._late:
            # The unit that backward began with is not over while no other is in it.
            self._goes_back = any(t.in_backward for t in self._engine.schedule.traces if t.unit not in self._late)
        return True

    def _fresh_bytes(self) -> int:
        """Of units that are gathered, and of those that the end of backward sends, as far as there are any."""
        total = 0
        for unit, sizes in {**self._there, **self._late}.items():
            bytes_ = sum(_fresh_by_flat(unit, sizes))
            if not bytes_ and self._goes_back and unit not in self._sent:
                # A tied parameter's gradient from elsewhere waits within autograd for its embedding's.
                bytes_ = 0 if sizes.held else sizes.tied
            total += bytes_
        return total

    def _coming_bytes(self, unit: Unit) -> int:
        """Fresh gradients that are there while `unit` ends its reduce: of the unit that is to be sent now, too."""
        total = self._fresh_bytes()
        coming = self._engine.schedule.order.reducing
        if coming is not None and coming.unit is not unit and coming.unit not in self._late | self._there:
            total += sum(_fresh_by_flat(coming.unit, self._units[coming.unit]))
        return total

    def _mark_before(self, unit: Unit, sizes: _Sizes) -> None:
        """Before a unit's gradients leave: they were made while those of the unit before were still on their way."""
        self._goes_back = True
        fresh = self._fresh_bytes()
        if unit not in self._there and unit not in self._late:
            fresh += sum(_fresh_by_flat(unit, sizes))
        if unit in self._late and not self._has_ended:
            self._has_ended = True  # a sum was made of the embeddings' gradients and of what waited for them
            added = (each for late, each in self._late.items() if not each.held and any(_fresh_by_flat(late, each)))
            fresh += tied_copies(self._engine.layout) * sum(each.tied for each in added)
        self._mark(fresh + self._passed, self._settled)
        self._passed = self._settled = 0

    def _count_gradients(self, unit: Unit, sizes: _Sizes) -> None:
        """At rest, of this unit."""
        device = host = 0
        for flat in unit.trained:
            for shard in flat.shards:
                if shard.tier is not Tier.DEVICE:
                    host += shard.grad_bytes
                elif (grad := shard.device_grad) is not None:
                    device += grad.untyped_storage().nbytes()
        was_device, was_host = sizes.gradients
        self.on_device += device - was_device
        self.on_host += host - was_host
        sizes.gradients = device, host

    def _mark(self, extra: int = 0, settled: int = 0) -> None:
        """Remember what is higher than ever since `take`.

        Args:
            extra: communication that is not in its counter; `settled` of it is in that of gradients by now.
        """
        high, moving, gradients = self.highest, self.moving + extra, self.on_device + self.held
        if self.gathered > high["gathered"]:
            high["gathered"] = self.gathered
        if moving > high["communication"]:
            high["communication"] = moving
        if gradients > high["gradients"]:
            high["gradients"] = gradients
        if self.on_host > high["host gradients"]:
            high["host gradients"] = self.on_host
        total = self.gathered + moving + gradients - settled
        if total > high["total"]:
            high["total"] = total


def _moving_bytes(unit: Unit) -> int:
    return sum(
        mean.numel() * mean.element_size() + source.untyped_storage().nbytes() for _, _, mean, source in unit._reduces
    )


def _held_bytes(flat: Flat, fresh: int) -> int:
    """Local gradients between backwards: in the bucket, or still with the parameters."""
    return flat._bucket_bytes if flat._held else fresh if flat.has_grads() else 0


def _fresh_by_flat(unit: Unit, sizes: _Sizes) -> list[int]:
    """Fresh gradients that are there, as if every trained parameter of a span had one. What adds up in place is not fresh."""
    return [
        fresh if (flat._held or not sizes.held) and any(is_new(p.grad) for p in flat.params) else 0
        for flat, fresh in zip(unit.trained, sizes.fresh)
    ]


def _device_gradient_bytes(flat: Flat) -> int:
    grads = (shard.device_grad for shard in flat.shards if shard.tier is Tier.DEVICE)
    return sum(grad.untyped_storage().nbytes() for grad in grads if grad is not None)


def _sent_bytes(unit: Unit, was_held: Sequence[bool]) -> tuple[list[int], list[int]]:
    """By span: the copy that was made to be sent (0: none), and the mean."""
    copies, means = [], []
    for (flat, _, mean, source), held in zip(unit._reduces, was_held):
        copied = flat._bucket is not None and source.data_ptr() == flat._bucket.data_ptr()
        copies.append(source.untyped_storage().nbytes() if copied and not held else 0)
        means.append(mean.numel() * mean.element_size())
    return copies, means


def _most_beside(
    gone: Sequence[int], made: Sequence[int], passing: Sequence[int] = (), means: Sequence[int] = ()
) -> int:
    """What was there at the highest moment beside what is there now, when spans were copied one after another.

    Args:
        gone: by span: what its copy replaced, at once.
        made: the copy, which is there now.
        passing: a copy that is not any more.
        means: what was made behind each copy.
    """
    highest = 0
    for place in range(len(gone)):
        later = sum(made[place + 1 :]) + sum(means[place:]) if means else sum(made[place + 1 :])
        beside = sum(gone[place:]) + (passing[place] if passing else 0)
        highest = max(highest, beside - later)
    return highest
