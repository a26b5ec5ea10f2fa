"""What an engine takes now, measured: bytes by tier and kind, beside what the plan says. `record` follows the steps.

What is counted, in the words of `costs.Memory`:
* parameters, gradients, optimizer: where they rest. Masters of a memory of their own are optimizer state.
* gathered: whole spans that come and go. communication: gradients on their way to their owners, in buckets and means.
  staging: the blocks, slabs and landing buffers of the host.
* On disk regions count as taken, whole pages. Frozen parameters that stay in the model's own files take nothing.
* Not counted: activations, what the transport itself takes, an optimizer's own temporaries.
On a CPU device both device and host are host memory, told apart by where a tensor is to rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..comm.wire import Traffic as Counts
from ..config import StagePolicy, ZeroConfig
from ..core.layout import Layout
from ..core.precision import Precision, dtype_name
from ..plan.costs import KINDS, TIERS, Memory, Setup, memory_of
from ..plan.plan import Plan
from ..plan.report import Report, RoadRow, States, TierRow, data_parallel, unit_rows
from ..plan.work import Traffic, work_in_total
from ..tiers.array import OnDisk
from ..tiers.tier import Tier, padded
from .flat_param import Flat
from .gradients import Gradient
from .offload import Offload
from .optimizer import state_tensors
from .schedule import Schedule
from .unit import Unit

Table = dict[str, dict[str, int]]
"""Tier -> kind -> bytes."""
COLLECTIVES = ("gather", "reduce", "scalar", "agree")
LINKS = ("down", "up", "read", "write")
WAITS = (*COLLECTIVES, *LINKS, "optimizer")
"""What training stands still for; `optimizer`: the thread that steps over offloaded state."""


class Measurable(Protocol):
    """A running engine, as far as it is measured. Whoever measures reads; nothing here is written."""

    @property
    def config(self) -> ZeroConfig: ...
    @property
    def policy(self) -> StagePolicy: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def units(self) -> Sequence[Unit]: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer | None: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def offload(self) -> Offload: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def traffic(self) -> Counts: ...


# Bytes now ----------------------------------------------------------------------------------------------------------


class _Tally:
    """Bytes of storages, each counted once, under the first name that asks for it."""

    def __init__(self) -> None:
        self.table: Table = {tier.value: dict.fromkeys(KINDS, 0) for tier in TIERS}
        self._seen: set[int] = set()

    def add(self, tier: Tier, kind: str, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.table[tier.value][kind] += storage.nbytes()

    def add_bytes(self, tier: Tier, kind: str, nbytes: int) -> None:
        self.table[tier.value][kind] += nbytes


def measure(engine: Measurable) -> Table:
    """Bytes of this rank now, by tier and kind; see the module's text for what counts as what. O(tensors)."""
    tally = _Tally()
    transient = engine.config.step_in_backward
    for unit in engine.units:
        for _, _, mean, source in unit._reduces:
            tally.add(Tier.DEVICE, "communication", mean)
            tally.add(Tier.DEVICE, "communication", source)
        for flat in unit.flats:
            _tally_parameters(tally, flat)
            for shard in flat.shards:
                values = shard.values
                if isinstance(values, Tensor):
                    tally.add(shard.tier, "optimizer", values)
                own = values.numel() * values.element_size() if shard.aliased else 0
                tally.add_bytes(Tier.DISK, "optimizer", max(0, shard.disk_bytes - own))
                if shard.tier is Tier.DEVICE:
                    if (reduced := shard.device_grad) is not None:
                        tally.add(Tier.DEVICE, "gradients", reduced)
                elif not transient:  # else it is of the scratch memory
                    tally.add_bytes(Tier.HOST, "gradients", shard.grad_bytes)
                for value in () if engine.optimizer is None else shard.entries(engine.optimizer).values():
                    if isinstance(value, Tensor):
                        tally.add(_tier_of(value, shard.tier, engine.device), "optimizer", value)
            for entries in () if engine.optimizer is None else flat.whole_entries(engine.optimizer):
                for value in entries.values():
                    if isinstance(value, Tensor):
                        tally.add(_tier_of(value, Tier.DEVICE, engine.device), "optimizer", value)
            for grad in (param.grad for param in flat.params):
                if isinstance(grad, Gradient):
                    grad = grad.local
                if grad is not None:
                    tally.add(Tier.DEVICE, "gradients", grad)
            if flat._bucket is not None:
                tally.add(Tier.DEVICE, "gradients" if flat._held else "communication", flat._bucket)
    tally.add_bytes(Tier.HOST, "staging", staging_bytes(engine))
    return tally.table


def _tally_parameters(tally: _Tally, flat: Flat) -> None:
    tally.add(Tier.DEVICE, "parameters" if flat.resident else "gathered", flat.full)
    if isinstance(flat.own, OnDisk):
        if not flat.in_files:
            nbytes = flat.own.numel() * flat.own.element_size()
            tally.add_bytes(Tier.DISK, "parameters", nbytes if flat.shares_array else padded(nbytes))
    else:
        tally.add(flat.rest, "parameters", flat.own)


def _tier_of(value: Tensor, tier: Tier, device: torch.device) -> Tier:
    """Step counts of a GPU's optimizer may be in host memory, those of records on disk are."""
    return Tier.HOST if tier is Tier.DISK or value.device.type != device.type else tier


def staging_bytes(engine: Measurable) -> int:
    stepper = engine.offload.stepper
    return engine.offload.storage.scratch_bytes + (0 if stepper is None else stepper.memory_bytes)


def process_bytes(engine: Measurable) -> dict[str, int]:
    """The whole process, as the system counts it: `rss` now and `rss peak`; `disk file`; on CUDA what torch has allocated."""
    out = {}
    try:
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            name, _, rest = line.partition(":")
            if name in ("VmHWM", "VmRSS"):
                out["rss" if name == "VmRSS" else "rss peak"] = int(rest.split()[0]) * 1024
    except OSError:
        pass  # not Linux
    if engine.offload.storage.has_disk:
        out["disk file"] = engine.offload.storage.disk.nbytes
    if engine.device.type == "cuda":
        out["device allocated"] = torch.cuda.memory_allocated(engine.device)
        out["device allocated peak"] = torch.cuda.max_memory_allocated(engine.device)
    return out


# Predicted ----------------------------------------------------------------------------------------------------------


def predicted(engine: Measurable, backward_per_step: int = 1) -> tuple[Memory, Traffic]:
    """The plan's formulas for the optimizer that is bound now and the micro-batches that a step is seen to have."""
    plan = engine.plan
    setup = Setup(
        engine.policy,
        engine.world_size,
        dtype_name(engine.precision.reduce_dtype),
        state_tensors(engine.optimizer),
        max(1, backward_per_step),
        engine.config.step_in_backward,
        engine.device.type == "cpu",
        frozenset(_names_in_files(engine)),
        engine.offload.storage.sizes,
    )
    work = work_in_total(plan.layout, plan.placements, setup)
    return memory_of(plan.layout, plan.placements, setup), Traffic.of(work)


def _names_in_files(engine: Measurable) -> Iterator[str]:
    for unit in engine.units:
        for flat in unit.flats:
            if flat.in_files:
                yield from (slot.spec.name for slot in flat.span.slots)


# Report -------------------------------------------------------------------------------------------------------------


def report(engine: Measurable, recorder: Measured | None) -> Report:
    """Predicted beside measured, of this rank, now; peaks, traffic and waits where a `Recorder` is at work."""
    memory, traffic = predicted(engine, 1 if recorder is None else recorder.forwards_per_step)
    now = measure(engine)
    total = {kind: sum(memory.rest[tier][kind] for tier in TIERS) for kind in KINDS}
    return Report(
        stage=engine.config.stage,
        world_size=engine.world_size,
        precision=str(engine.precision),
        parameters=engine.layout.numel,
        trainable=engine.layout.trainable_numel,
        predicted=States(
            total["parameters"], total["gradients"], total["optimizer"], memory.peak[Tier.DEVICE]["gathered"]
        ),
        data_parallel=data_parallel(engine.layout, state_tensors(engine.optimizer)),
        measured=in_sum(now),
        traffic=engine.traffic.to_dict(),
        units=unit_rows(engine.layout),
        tiers=_tier_rows(memory, now, None if recorder is None or not recorder.recorded else recorder.peak),
        roads=_road_rows(traffic, recorder) if recorder is not None else (),
        steps=0 if recorder is None else recorder.recorded,
        step_s=None if recorder is None else recorder.median("seconds"),
        predicted_step_s=engine.plan.step_s,
        process=process_bytes(engine),
    )


def in_sum(table: Table) -> dict[str, int]:
    """Parameters (gathered ones too), gradients and optimizer state over all tiers."""
    sums = {kind: sum(kinds[kind] for kinds in table.values()) for kind in KINDS}
    return {
        "parameters": sums["parameters"] + sums["gathered"],
        "gradients": sums["gradients"],
        "optimizer": sums["optimizer"],
    }


def _tier_rows(memory: Memory, now: Table, peak: Table | None) -> tuple[TierRow, ...]:
    rows = []
    for tier in TIERS:
        name = tier.value
        kinds = [
            TierRow(
                name,
                kind,
                memory.rest[tier][kind],
                now[name][kind],
                memory.peak[tier][kind],
                None if peak is None or kind == "activations" else peak[name].get(kind, 0),
            )
            for kind in KINDS
            if memory.peak[tier][kind] or now[name][kind] or (peak is not None and peak[name].get(kind))
        ]
        if kinds:
            rows += kinds
            rows.append(
                TierRow(
                    name,
                    "all",
                    memory.at_rest(tier),
                    sum(now[name].values()),
                    memory.at_peak(tier),
                    None if peak is None else peak[name]["all"],
                )
            )
    return tuple(rows)


class Measured(Protocol):
    """What a recorder answers."""

    recorded: int
    peak: Table

    @property
    def forwards_per_step(self) -> int: ...

    def median(self, *keys: str) -> float | None: ...


def _road_rows(traffic: Traffic, recorder: Measured) -> tuple[RoadRow, ...]:
    rows = []
    for road in WAITS:
        told: int | None = getattr(traffic, road, None)
        moved = recorder.median("bytes", road) if road in (*COLLECTIVES, *LINKS) and recorder.recorded else None
        waited = recorder.median("wait_s", road)
        if told or moved or waited:
            rows.append(RoadRow(road, told, moved, waited))
    return tuple(rows)
