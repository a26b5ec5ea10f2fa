"""Step by step: what an engine took at its highest, moved and waited for; into a file, for `hf-zero report`, and into logs.

A `Recorder` keeps counters that a unit's own verbs (`gather`, `release`, `reduce`, …) move, so that a step costs Python time
per unit, and nothing where nobody records. Its words are those of `usage`; communication has in addition fresh gradients, those
that wait within autograd included.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from .costs import ROADS, TIERS, every, tied_bytes, tied_copies
from .errors import ConfigError
from .flat import Flat
from .tiers import Tier
from .unit import State, Unit
from .usage import COLLECTIVES, LINKS, WAITS, Table, measure, predicted, process_bytes, staging_bytes
from .version import __version__

if TYPE_CHECKING:
    from .engine import Engine

FORMAT = 1
"""Of the files."""
_RECENT = 64
"""Steps whose medians a report shows."""
_STEP_THREAD = "hf_zero step"
_DEVICE, _HOST, _DISK = (tier.value for tier in TIERS)


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


class Recorder:
    """Measures every optimizer step of an engine, from now until `close`. Made by `Engine.record`.

    A step lasts from the end of the one before (the first: from its first forward) to the end of `optimizer.step()`. Updates
    that the step leaves to its thread are counted when they happen, in the next step.

    Attributes:
        steps: the number of the last step, counted on from the one given.
        recorded: how many were recorded.
        last: what is known of the last one, as it is written to the file.
        path: the file, if one is written.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, engine: Engine, folder: str | os.PathLike[str] | None, first_step: int = 0) -> None:
        self.steps = first_step
        self.recorded = 0
        self.last: dict[str, Any] = {}
        self.path: Path | None = None
        self._engine = engine
        self._file: IO[bytes] | None = None
        if folder is not None:
            self._open(Path(folder))
        self._recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self._first: dict[str, Any] | None = None
        self._since_log: list[dict[str, Any]] = []
        self._units: dict[Unit, _Sizes] = {}
        self._there: dict[Unit, _Sizes] = {}  # gathered, of those that come and go
        self._late: dict[Unit, _Sizes] = {}  # with an embedding: only the end of backward shows that theirs is over
        self._sent: set[Unit] = set()  # in this backward
        self._goes_back = self._has_ended = False  # a unit's part of this backward is over; those of embeddings, too
        self._resting: Table = {}
        self._places: tuple[object, ...] = ()  # the units, and where everything of theirs rests
        self._states = self._moves = 0
        self._blocks = self._scratch = self._scratch_peak = 0  # of the host
        self._transient = engine.config.step_in_backward
        self._gathered = self._moving = self._held = self._on_device = self._on_host = 0
        self._passed = self._settled = 0
        self._high = dict.fromkeys(("gathered", "communication", "gradients", "host gradients", "total"), 0)
        self.peak: Table = {tier.value: {} for tier in TIERS}
        self._started = time.perf_counter()
        self._ended: float | None = None
        self._began: float | None = None
        self._forwards = self._evaluations = 0
        self._waited = dict.fromkeys(LINKS, 0.0)
        meter = engine.offload.storage.meter
        self._meter_waited = meter.waited
        meter.__dict__["waited"] = self._hear
        self._counts = self._count()
        self._watch()
        host, storage = measure(engine)[_HOST], engine.offload.storage
        self._blocks = host["staging"] - storage.scratch_bytes
        self._behind = host["optimizer"], self._blocks
        storage.scratch_peak_bytes = storage.scratch_bytes

    def close(self) -> None:
        """Stop measuring. What was measured stays; safe to call again."""
        if self._engine.recorder is self:
            self._engine.recorder = None
            self._unwatch()
            self._engine.offload.storage.meter.__dict__.pop("waited", None)
        if self._file is not None:
            self._file.close()
            self._file = None

    # What the engine calls --------------------------------------------------------------------------------------------

    def forward(self) -> None:
        """A forward of the whole model begins, not a recomputation."""
        if not torch.is_grad_enabled():
            self._evaluations += 1
            return
        self._forwards += 1
        self._passed = self._settled = 0
        self._sent.clear()
        self._goes_back = self._has_ended = False
        if self._began is None:
            self._began = time.perf_counter()
            if self._ended is None:
                self._counts = self._count()
            self._watch()

    def step(self) -> None:
        """`optimizer.step()` is over, gradients are still there."""
        now = time.perf_counter()
        began = self._began if self._began is not None else now
        ended, self._ended, self._began = self._ended, now, None
        self.steps += 1
        self.recorded += 1
        self._look_at_rest()
        before, self._counts = self._counts, self._count()
        counts = {key: value - before[key] for key, value in self._counts.items()}
        kinds = self._now()
        self.last = {
            "step": self.steps,
            "at_s": now - self._started,
            "seconds": now - (began if ended is None else ended),
            "between_s": 0.0 if ended is None else began - ended,
            "forwards": self._forwards,
            "evaluations": self._evaluations,
            "bytes": {road: int(counts["bytes", road]) for road in (*COLLECTIVES, *LINKS)},
            "wait_s": {road: counts["wait", road] for road in WAITS},
            "thread_wait_s": {road: counts["thread", road] for road in LINKS},
            "memory": {tier: sum(values.values()) for tier, values in kinds.items()},
            "peak": self._peaks(kinds),
            "process": process_bytes(self._engine),
        }
        if moves := self._new_moves():
            self.last["moves"] = moves
        if self.recorded == 1:
            self._first = self.last
        self._recent.append(self.last)
        self._since_log.append(self.last)
        del self._since_log[:-_RECENT]
        if self._file is not None:
            self._write()
        self._forwards = self._evaluations = 0

    # What people ask --------------------------------------------------------------------------------------------------

    def median(self, *keys: str) -> float | None:
        """Of the recent steps: of `last[keys[0]][keys[1]]…`. Steps beside an evaluation and the first do not count, as long as
        there are others.
        """
        if not self._recent:
            return None
        usual = [record for record in self._recent if not record["evaluations"] and record is not self._first]
        values: list[float] = []
        for record in usual or self._recent:
            value: Any = record
            for key in keys:
                value = value[key]
            values.append(value)
        return statistics.median(values)

    @property
    def forwards_per_step(self) -> int:
        return int(self.median("forwards") or 1)

    def logs(self) -> dict[str, float]:
        """Of the steps since the last call, for a logger: GiB at the highest, seconds and GiB sent per step."""
        records, self._since_log = self._since_log, []
        if not records:
            return {}
        gib = 1 << 30
        out = {
            f"{tier.value}_gib": max(record["peak"][tier.value].get("all", 0) for record in records) / gib
            for tier in TIERS
        }
        process = records[-1]["process"]
        out |= {f"{name.replace(' ', '_')}_gib": value / gib for name, value in process.items()}

        def mean(of: Callable[[dict[str, Any]], float]) -> float:
            return sum(map(of, records)) / len(records)

        out["step_s"] = mean(lambda record: record["seconds"])
        out["wait_s"] = mean(lambda record: sum(record["wait_s"].values()))
        out["wait_collectives_s"] = mean(lambda record: sum(record["wait_s"][road] for road in COLLECTIVES))
        out["sent_gib"] = mean(lambda record: sum(record["bytes"][road] for road in COLLECTIVES)) / gib
        return out

    # Memory -----------------------------------------------------------------------------------------------------------

    def _new_moves(self) -> list[str]:
        """What the monitor of `auto` has moved since the last step."""
        monitor = self._engine.offload.monitor
        moves = [] if monitor is None else monitor.moves[self._moves :]
        self._moves += len(moves)
        return moves

    def _watch(self) -> None:
        """Follow the units there are now, and set right what an exception left wrong. Once per step."""
        units = self._engine.units
        places = (
            *units,
            *((flat.rest, flat.resident) for unit in units for flat in unit.flats),
            *(shard.tier for unit in units for flat in unit.flats for shard in flat.shards),
        )
        if places != self._places:
            self._places, self._resting = places, {}
            self._unwatch()
            layout = self._engine.layout
            self._units = {unit: _Sizes(unit, tied_bytes(layout, place)) for place, unit in enumerate(units)}
            embedded = {visit.unit for visit in every(layout.visits) if visit.is_embedding}
            self._late = {
                unit: self._units[unit] for place, unit in enumerate(units) if place in embedded and unit.trained
            }
            for unit in units:
                self._follow(unit, self._units[unit])
        self._gathered = self._moving = 0
        self._there.clear()
        for unit, sizes in self._units.items():
            if unit.state is not State.SHARDED and sizes.full:
                self._gathered += sizes.full
                self._there[unit] = sizes
            sizes.moving = _moving_bytes(unit)
            self._moving += sizes.moving

    def _unwatch(self) -> None:
        for unit in self._units:
            for name in ("gather", "release", "hold", "reduce", "finish_reduce", "drop_grads"):
                unit.__dict__.pop(name, None)
        self._units = {}
        self._held = self._on_device = self._on_host = 0

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
                self._gathered += sizes.full
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
                self._gathered -= sizes.full
                self._there.pop(unit, None)

        return counted

    def _counted_hold(self, unit: Unit, sizes: _Sizes, hold: Callable[[], None]) -> Callable[[], None]:
        def counted() -> None:
            fresh = _fresh_by_flat(unit, sizes)
            self._mark_before(unit, sizes)
            before = [flat._bucket_bytes if flat._held else 0 for flat in unit.trained]
            hold()
            held = sum(_held_bytes(flat, bytes_) for flat, bytes_ in zip(unit.trained, sizes.fresh))
            self._held += held - sizes.held
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
            self._held -= sizes.held
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
            self._moving += moving - sizes.moving
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
            before = self._on_device
            # Of a slice that is cut, parts of the mean are copied while it is there.
            was = sum(_device_gradient_bytes(flat) for flat in unit.trained if not flat.in_memory)
            finish()
            self._moving -= sizes.moving
            self._count_gradients(unit, sizes)
            copied = sum(_device_gradient_bytes(flat) for flat in unit.trained if not flat.in_memory) - was
            self._passed, self._settled = sizes.moving, self._on_device - before
            if copied:
                self._mark(self._passed + self._coming_bytes(unit), self._settled - copied)
            sizes.moving = 0
            self._mark()

        return counted

    def _counted_drop(self, unit: Unit, sizes: _Sizes, drop: Callable[[bool], None]) -> Callable[[bool], None]:
        def counted(shards: bool) -> None:
            drop(shards)
            self._held -= sizes.held
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
            self._goes_back = any(t.in_backward for t in self._engine._schedule.traces if t.unit not in self._late)
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
        coming = self._engine._schedule._reducing
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
                elif shard.master.grad is not None:
                    device += shard.master.grad.untyped_storage().nbytes()
        was_device, was_host = sizes.gradients
        self._on_device += device - was_device
        self._on_host += host - was_host
        sizes.gradients = device, host

    def _mark(self, extra: int = 0, settled: int = 0) -> None:
        """Remember what is higher than ever in this step.

        Args:
            extra: communication that is not in its counter; `settled` of it is in that of gradients by now.
        """
        high, moving, gradients = self._high, self._moving + extra, self._on_device + self._held
        if self._gathered > high["gathered"]:
            high["gathered"] = self._gathered
        if moving > high["communication"]:
            high["communication"] = moving
        if gradients > high["gradients"]:
            high["gradients"] = gradients
        if self._on_host > high["host gradients"]:
            high["host gradients"] = self._on_host
        total = self._gathered + moving + gradients - settled
        if total > high["total"]:
            high["total"] = total

    def _look_at_rest(self) -> None:
        """Parameters and optimizer state change seldom: when something was moved, or the optimizer has made its state."""
        engine = self._engine
        states = 0 if engine.optimizer is None else len(engine.optimizer.state)
        if not self._resting or states != self._states or self.recorded < 3:
            self._states = states
            self._resting = measure(engine)
        storage = engine.offload.storage
        self._blocks = max(self._blocks, staging_bytes(engine) - storage.scratch_bytes)
        self._scratch, self._scratch_peak = storage.scratch_bytes, storage.scratch_peak_bytes
        storage.scratch_peak_bytes = storage.scratch_bytes

    def _now(self) -> Table:
        """By tier and kind, at the end of a step."""
        table = {
            tier: {kind: self._resting[tier][kind] for kind in ("parameters", "optimizer")}
            for tier in (_DEVICE, _HOST, _DISK)
        }
        table[_DEVICE]["gradients"] = self._on_device + self._held
        table[_DEVICE]["gathered"] = self._gathered
        table[_DEVICE]["communication"] = self._moving
        table[_HOST]["gradients"] = 0 if self._transient else self._on_host
        table[_HOST]["staging"] = self._blocks + self._scratch
        return table

    def _peaks(self, kinds: Table) -> Table:
        """The highest of each kind in this step and, as `all`, of their sum in each tier. Then the next step begins."""
        self._mark()
        high = self._high
        sums = {tier: sum(values.values()) for tier, values in kinds.items()}
        sums[_DEVICE] += high["total"] - self._gathered - self._moving - self._on_device - self._held
        grown = 0 if self._transient else high["host gradients"] - self._on_host
        # The passes of the first step come before the state and the blocks that it makes.
        made = kinds[_HOST]["optimizer"] + self._blocks - self._behind[0] - self._behind[1] if self.recorded == 1 else 0
        passing = kinds[_HOST]["staging"] + self._scratch_peak - self._scratch
        passing -= self._blocks - self._behind[1] if self.recorded == 1 else 0
        sums[_HOST] = max(sums[_HOST], sums[_HOST] + grown + self._scratch_peak - self._scratch - made)
        table = {tier: {**values, "all": sums[tier]} for tier, values in kinds.items()}
        table[_DEVICE] |= {kind: high[kind] for kind in ("gathered", "communication", "gradients")}
        table[_HOST]["gradients"] += grown
        table[_HOST]["staging"] = max(table[_HOST]["staging"], passing)
        for tier, values in table.items():
            for kind, value in values.items():
                self.peak[tier][kind] = max(self.peak[tier].get(kind, 0), value)
        self._high = dict.fromkeys(high, 0)
        return {tier: {kind: value for kind, value in values.items() if value} for tier, values in table.items()}

    # Roads ------------------------------------------------------------------------------------------------------------

    def _hear(self, kind: str, wait_s: float) -> None:
        """In place of `Meter.waited`: the thread that steps waits beside training, not in its way."""
        self._meter_waited(kind, wait_s)
        if not threading.current_thread().name.startswith(_STEP_THREAD):
            self._waited[kind] += wait_s

    def _count(self) -> dict[tuple[str, str], float]:
        """All counters as they stand."""
        engine = self._engine
        out: dict[tuple[str, str], float] = {}
        for kind in COLLECTIVES:
            count = engine.traffic[kind]
            out["bytes", kind], out["wait", kind] = count.bytes, count.wait_s
        for kind in LINKS:
            moved = engine.offload.storage.meter[kind]
            out["bytes", kind], out["wait", kind] = moved.bytes, self._waited[kind]
            out["thread", kind] = moved.wait_s - self._waited[kind]
        out["wait", "optimizer"] = 0.0 if engine.offload.stepper is None else engine.offload.stepper.wait_s
        return out

    # The file ---------------------------------------------------------------------------------------------------------

    def _open(self, folder: Path) -> None:
        rank = self._engine.rank
        self.path = folder / ("zero_steps.jsonl" if rank == 0 else f"zero_steps.rank{rank}.jsonl")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab+", buffering=0)
            if self._file.tell():
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":  # a killed run left half a line
                    self._file.write(b"\n")
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be written on rank {rank}: {error.strerror or error}; record to another folder"
            ) from error

    def _write(self) -> None:
        if self._file is None:
            return
        lines = [{"kind": "step", **_rounded(self.last)}]
        if self.recorded == 1:
            lines.insert(0, facts(self._engine, self._forwards))
        try:
            self._file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        except OSError as error:  # a full disk is no reason to stop training
            warnings.warn(f"{self.path}: {error.strerror or error}; steps are no longer written", stacklevel=2)
            self._file = None


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
        fresh if (flat._held or not sizes.held) and any(p.grad is not None for p in flat.params) else 0
        for flat, fresh in zip(unit.trained, sizes.fresh)
    ]


def _device_gradient_bytes(flat: Flat) -> int:
    grads = (shard.master.grad for shard in flat.shards if shard.tier is Tier.DEVICE)
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


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Microseconds are enough."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            out[key] = _rounded(value)
        else:
            out[key] = round(value, 6) if isinstance(value, float) else value
    return out


def facts(engine: Engine, backward_per_step: int) -> dict[str, Any]:
    """The first line of a run's file: what ran where, and what was predicted."""
    memory, traffic = predicted(engine, backward_per_step)

    def table(by_tier: Mapping[Tier, Mapping[str, int]]) -> Table:
        return {tier.value: dict(kinds) for tier, kinds in by_tier.items()}

    return {
        "kind": "facts",
        "format": FORMAT,
        "version": __version__,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "rank": engine.rank,
        "world_size": engine.world_size,
        "stage": engine.config.stage,
        "precision": str(engine.precision),
        "parameters": engine.layout.numel,
        "trainable": engine.layout.trainable_numel,
        # A run's folder may be shared: no names of hosts or folders.
        "config": {name: value for name, value in engine.config.to_dict().items() if name != "offload_dir"},
        "machine": {
            "device": torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "cpu",
            "cores": os.cpu_count() or 1,
            "torch": torch.__version__,
        },
        "predicted": {
            "backward_per_step": backward_per_step,
            "rest": table(memory.rest),
            "peak": table(memory.peak),
            "peak_bytes": {tier.value: memory.at_peak(tier) for tier in TIERS},
            "traffic": {road: getattr(traffic, road) for road in ROADS},
            "step_s": engine.plan.step_s,
            "parts_s": dict(engine.plan.parts),
            "reasons": list(engine.plan.reasons),
        },
    }
