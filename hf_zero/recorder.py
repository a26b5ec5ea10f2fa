"""Step by step: what an engine took at its highest, moved and waited for; into a file, for `hf-zero report`, and into logs.

A `Recorder` keeps counters that a unit's own verbs (`gather`, `release`, `reduce`, …) move, so that a step costs Python time
per unit, never per tensor, and nothing where nobody records. Its words are those of `usage`; communication has in addition the
fresh gradients of the unit that is reduced, as if every trained parameter had one.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from .costs import ROADS, TIERS
from .errors import ConfigError
from .tiers import Tier
from .unit import Flat, State, Unit
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

    __slots__ = ("fresh", "full", "gradients", "held", "moving")

    def __init__(self, unit: Unit) -> None:
        self.full = sum(flat.full_bytes for flat in unit.flats if not flat.resident)
        self.fresh = [flat.span.used_numel * flat.compute_dtype.itemsize for flat in unit.trained]
        self.gradients = (0, 0)  # on the device and on the host, at rest
        self.held = 0  # local gradients between backwards
        self.moving = 0  # buckets and means on their way


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
        self._resting: Table = {}
        self._places: tuple[object, ...] = ()  # the units, and where everything of theirs rests
        self._states = self._moves = 0
        self._staging = 0
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
            self._units = {unit: _Sizes(unit) for unit in units}
            for unit in units:
                self._follow(unit, self._units[unit])
        self._gathered = self._moving = 0
        for unit, sizes in self._units.items():
            if unit.state is not State.SHARDED:
                self._gathered += sizes.full
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
                self._mark()

        return counted

    def _counted_release(self, unit: Unit, sizes: _Sizes, release: Callable[[], None]) -> Callable[[], None]:
        def counted() -> None:
            if unit.state is State.SHARDED:
                return
            release()
            if unit.state is State.SHARDED:
                self._gathered -= sizes.full

        return counted

    def _counted_hold(self, unit: Unit, sizes: _Sizes, hold: Callable[[], None]) -> Callable[[], None]:
        def counted() -> None:
            hold()
            held = sum(_held_bytes(flat, fresh) for flat, fresh in zip(unit.trained, sizes.fresh))
            self._held += held - sizes.held
            sizes.held = held
            self._mark()

        return counted

    def _counted_reduce(self, unit: Unit, sizes: _Sizes, reduce: Callable[[], None]) -> Callable[[], None]:
        def counted() -> None:
            # Its fresh gradients were made while those of the unit before were still on their way.
            fresh = 0 if sizes.held else sum(sizes.fresh)
            self._mark(fresh + self._passed, self._settled)
            self._passed = self._settled = 0
            self._held -= sizes.held
            sizes.held = 0
            reduce()
            moving = _moving_bytes(unit)
            self._moving += moving - sizes.moving
            sizes.moving = moving
            self._mark(_overlap_bytes(unit, sizes))
            if unit.wire.size == 1:
                self._count_gradients(unit, sizes)

        return counted

    def _counted_finish(self, unit: Unit, sizes: _Sizes, finish: Callable[[], None]) -> Callable[[], None]:
        def counted() -> None:
            if not sizes.moving and not unit._reduces:
                return
            before = self._on_device
            finish()
            self._moving -= sizes.moving
            self._count_gradients(unit, sizes)
            self._passed, self._settled = sizes.moving, self._on_device - before
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
        self._staging = max(self._staging, staging_bytes(engine))

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
        table[_HOST]["staging"] = self._staging + (self._on_host if self._transient else 0)
        return table

    def _peaks(self, kinds: Table) -> Table:
        """The highest of each kind in this step and, as `all`, of their sum in each tier. Then the next step begins."""
        self._mark()
        high = self._high
        sums = {tier: sum(values.values()) for tier, values in kinds.items()}
        sums[_DEVICE] += high["total"] - self._gathered - self._moving - self._on_device - self._held
        sums[_HOST] += high["host gradients"] - self._on_host
        table = {tier: {**values, "all": sums[tier]} for tier, values in kinds.items()}
        table[_DEVICE] |= {kind: high[kind] for kind in ("gathered", "communication", "gradients")}
        table[_HOST]["staging" if self._transient else "gradients"] += high["host gradients"] - self._on_host
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


def _overlap_bytes(unit: Unit, sizes: _Sizes) -> int:
    """Fresh gradients that were there beside the last bucket they were copied to: those of the last span."""
    if not unit._reduces:
        return 0
    flat, _, mean, source = unit._reduces[-1]
    copied = flat._bucket is not None and source.data_ptr() == flat._bucket.data_ptr()
    return max(0, sizes.fresh[-1] - mean.numel() * mean.element_size()) if copied else 0


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
            "traffic": {road: getattr(traffic, road) for road in ROADS},
            "step_s": engine.plan.step_s,
            "parts_s": dict(engine.plan.parts),
            "reasons": list(engine.plan.reasons),
        },
    }
