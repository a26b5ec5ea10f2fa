"""What an engine takes now, measured: bytes by tier and kind, beside what the plan says; counters for `plan/record.py`.

What is counted, in the words of `costs.Memory`:
* parameters, gradients, optimizer: where they rest. Masters of a memory of their own are optimizer state.
* gathered: whole spans that come and go. communication: gradients on their way to their owners: as the engine takes them from
  backward, in buckets, and as means. staging: the blocks, slabs and landing buffers of the host.
* On disk regions count as taken, whole pages. Frozen parameters that stay in the model's own files take nothing.
* Not counted: activations, gradients before their unit's backward is over, what the transport itself takes, an optimizer's own
  temporaries.
Parameters and optimizer state are looked up where they rest; all else is in the ledger of the engine's storage.
On a CPU device both device and host are host memory, told apart by where a tensor is to rest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.precision import dtype_name
from ..plan import machine
from ..plan.costs import KINDS, TIERS, Memory, Setup
from ..plan.machine import here
from ..plan.peaks import memory_of
from ..plan.record import Counters, Recorder, Table
from ..plan.report import Limit, Report, RoadRow, States, TierRow, data_parallel, unit_rows
from ..plan.work import COLLECTIVES, LINKS, ROADS, WAITS, Traffic, work_in_total
from ..tiers.array import OnDisk
from ..tiers.tier import Tier, padded
from ..version import __version__
from .offload import Offload
from .optimizers.optimizer import state_tensors
from .passes.schedule import Schedule
from .values.flat_param import Flat
from .values.sharded import Sharded


class Measurable(Protocol):
    """A running engine, as far as it is measured. Whoever measures reads; nothing here is written."""

    sharded: Sharded
    offload: Offload
    schedule: Schedule


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


def at_rest(sharded: Sharded) -> Table:
    """Bytes of parameters and optimizer state, by tier and kind, where they rest. O(tensors)."""
    tally = _Tally()
    for unit in sharded.units:
        for flat in unit.flats:
            _tally_parameters(tally, flat)
            optimizer = sharded.optimizer_of(flat)
            for shard in flat.shards:
                values = shard.values
                if isinstance(values, Tensor):
                    tally.add(shard.tier, "optimizer", values)
                own = values.numel() * values.element_size() if shard.aliased else 0
                tally.add_bytes(Tier.DISK, "optimizer", max(0, shard.disk_bytes - own))
                tally.add_bytes(Tier.DISK, "gradients", shard.gradient_bytes)
                if optimizer is not None:
                    _tally_states(tally, shard.entries(optimizer), shard.tier, sharded.device)
            for entries in () if optimizer is None else flat.whole_entries(optimizer).values():
                _tally_states(tally, entries, flat.shards[0].tier, sharded.device)
    return tally.table


def free_device_bytes(sharded: Sharded, offload: Offload, ranks_here: int) -> int:
    """What this rank may still take of its device: of the budget where there is one, else of what is free.

    Args:
        ranks_here: that share the host's memory, where that is the device.
    """
    budget = sharded.config.device_memory
    if budget is not None:
        taken = sum(at_rest(sharded)[Tier.DEVICE.value].values())
        return int(budget) - taken - sum(sharded.storage.ledger.device.now.values())
    if sharded.device.type == "cuda":
        return machine.free_device_bytes(sharded.device)
    return offload.free_host_bytes(ranks_here)


def _tally_parameters(tally: _Tally, flat: Flat) -> None:
    if flat.resident:
        tally.add(Tier.DEVICE, "parameters", flat.full)
    if isinstance(flat.own, OnDisk):
        if not flat.in_files:
            nbytes = flat.own.numel() * flat.own.element_size()
            tally.add_bytes(Tier.DISK, "parameters", nbytes if flat.shares_array else padded(nbytes))
    else:
        tally.add(flat.rest, "parameters", flat.own)


def _tally_states(tally: _Tally, entries: Mapping[str, Any], tier: Tier, device: torch.device) -> None:
    for value in entries.values():
        if isinstance(value, Tensor):
            # Step counts of a GPU's optimizer may be in host memory, those of records on disk are.
            in_host = tier is Tier.DISK or value.device.type != device.type
            tally.add(Tier.HOST if in_host else tier, "optimizer", value)


def measure(engine: Measurable) -> Table:
    """Bytes of this rank now, by tier and kind. O(tensors)."""
    table, ledger = at_rest(engine.sharded), engine.sharded.storage.ledger
    table[Tier.DEVICE.value] |= ledger.device.now
    table[Tier.HOST.value] |= ledger.host.now
    return table


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
    if engine.sharded.storage.has_disk:
        out["disk file"] = engine.sharded.storage.disk.nbytes
    if engine.sharded.device.type == "cuda":
        found = torch.cuda.memory_stats(engine.sharded.device)
        out["device allocated"] = int(found.get("allocated_bytes.all.current", 0))
        out["device allocated peak"] = int(found.get("allocated_bytes.all.peak", 0))
        out["device reserved peak"] = int(found.get("reserved_bytes.all.peak", 0))
    return out


def limits(engine: Measurable, ranks_here: int = 1) -> tuple[Limit, ...]:
    """What this rank may take: budgets that were given, else what the machine has free beside what the engine holds.

    Args:
        ranks_here: ranks that share this machine's memory and disk.
    """
    device, config = engine.sharded.device, engine.sharded.config
    budgets = engine.sharded.plan.budgets.rows()
    found = [Limit(tuple(tier.value for tier in tiers), limit, True) for _, tiers, limit in budgets]
    known = {tier for limit in found for tier in limit.tiers}
    held = sum(sum(kinds.values()) for tier, kinds in measure(engine).items() if tier != Tier.DISK.value)
    machine = here(device, ranks=ranks_here, offload_dir=config.offload_dir, held_bytes=held)
    free = {"device": machine.device_memory, "host": machine.host_memory, "disk": machine.disk_free}
    if machine.shares_memory and not known & {"device", "host"}:
        found.append(Limit(("device", "host"), int(free["host"] or 0), False))
        known |= {"device", "host"}
    return (*found, *(Limit((tier,), size, False) for tier, size in free.items() if size and tier not in known))


class Usage:
    """An engine's counters, for a `Recorder`."""

    def __init__(self, engine: Measurable) -> None:
        self.rank = engine.sharded.wire.rank
        self._engine = engine
        self._resting: Table = {}
        self._known: tuple[int, int] | None = None
        self._looks = 0

    def counters(self) -> Counters:
        engine, meter, traffic = self._engine, self._engine.sharded.storage.meter, self._engine.sharded.wire.traffic
        links = {link: meter[link] for link in LINKS}
        stepper, monitor = engine.offload.stepper, engine.offload.monitor
        wait_s = {kind: traffic[kind].wait_s for kind in COLLECTIVES}
        wait_s |= {link: count.wait_s - meter.stepper_wait_s[link] for link, count in links.items()}
        wait_s["optimizer"] = 0.0 if stepper is None else stepper.wait_s
        sent = {kind: traffic[kind].bytes for kind in COLLECTIVES}
        sent |= {link: count.bytes for link, count in links.items()}
        if (across := traffic.kinds.get("across")) is not None:  # the same gradients, to other replicas
            sent["reduce"] += across.bytes
            wait_s["reduce"] += across.wait_s
        if (node := traffic.kinds.get("node")) is not None:  # the same parameters, from ranks of this node
            sent["gather"] += node.bytes
            wait_s["gather"] += node.wait_s
        moves = () if monitor is None else tuple(monitor.moves)
        return Counters(self._peak(), sent, wait_s, moves, process_bytes(engine))

    def _peak(self) -> Table:
        """What rests now, and with it the highest of all that came and went."""
        engine, ledger = self._engine, self._engine.sharded.storage.ledger
        known = ledger.places, sum(len(optimizer.state) for optimizer in engine.sharded.optimizers)
        self._looks += 1
        if known != self._known or self._looks <= 4:  # an optimizer makes its state in its first steps
            self._known, self._resting = known, at_rest(engine.sharded)
        table = {tier: dict(kinds) for tier, kinds in self._resting.items()}
        for kinds in table.values():
            kinds["all"] = sum(kinds.values())
        for tier, account in ((Tier.DEVICE, ledger.device), (Tier.HOST, ledger.host)):
            table[tier.value] |= account.peak
            table[tier.value]["all"] += account.peak_total
        ledger.begin_step()
        return table

    def facts(self, backward_per_step: int) -> dict[str, Any]:
        sharded = self._engine.sharded
        memory, traffic = predicted(self._engine, backward_per_step)

        def table(by_tier: Mapping[Tier, Mapping[str, int]]) -> Table:
            return {tier.value: dict(kinds) for tier, kinds in by_tier.items()}

        return {
            "version": __version__,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "rank": sharded.wire.rank,
            "world_size": sharded.wire.size,
            "stage": sharded.config.stage,
            "precision": str(sharded.precision),
            "parameters": sharded.layout.numel,
            "trainable": sharded.layout.trainable_numel,
            # A run's folder may be shared: no names of hosts or folders.
            "config": {name: value for name, value in sharded.config.to_dict().items() if name != "offload_dir"},
            "machine": {
                "device": torch.cuda.get_device_name(sharded.device) if sharded.device.type == "cuda" else "cpu",
                "cores": os.cpu_count() or 1,
                "torch": torch.__version__,
            },
            "predicted": {
                "backward_per_step": backward_per_step,
                "rest": table(memory.rest),
                "peak": table(memory.peak),
                "peak_bytes": {tier.value: memory.at_peak(tier) for tier in TIERS},
                "traffic": {road: getattr(traffic, road) for road in ROADS},
                "step_s": sharded.plan.step_s,
                "parts_s": dict(sharded.plan.parts),
                "reasons": list(sharded.plan.reasons),
            },
        }


# Predicted ----------------------------------------------------------------------------------------------------------


def predicted(engine: Measurable, backward_per_step: int = 1) -> tuple[Memory, Traffic]:
    """The plan's formulas for the optimizer that is bound now and the micro-batches that a step is seen to have."""
    sharded, backward = engine.sharded, engine.schedule.backward
    plan = sharded.plan
    setup = Setup(
        sharded.policy,
        sharded.wire.size,
        dtype_name(sharded.precision.reduce_dtype),
        state_tensors(sharded.optimizers),
        max(1, backward_per_step),
        sharded.config.step_in_backward,
        sharded.device.type == "cpu",
        frozenset(slot.spec.name for flat in sharded.flats if flat.in_files for slot in flat.span.slots),
        sharded.storage.sizes,
        sharded.config.wire,
        backward.puts_off,
        backward.kept,
        backward.parted,
        plan.inputs.setup.node_ranks,
    )
    given = plan.layout, plan.placements, setup
    return memory_of(*given), Traffic.of(work_in_total(*given), *given)


# Report -------------------------------------------------------------------------------------------------------------


def report(engine: Measurable, recorder: Recorder | None) -> Report:
    """Predicted beside measured, of this rank, now; peaks, traffic and waits where a `Recorder` is at work."""
    sharded = engine.sharded
    memory, traffic = predicted(engine, 1 if recorder is None else recorder.forwards_per_step)
    now = measure(engine)
    total = {kind: sum(memory.rest[tier][kind] for tier in TIERS) for kind in KINDS}
    measured = {kind: sum(kinds[kind] for kinds in now.values()) for kind in ("parameters", "gradients", "optimizer")}
    measured["parameters"] += sum(kinds["gathered"] for kinds in now.values())
    return Report(
        stage=sharded.config.stage,
        world_size=sharded.wire.size,
        precision=str(sharded.precision),
        parameters=sharded.layout.numel,
        trainable=sharded.layout.trainable_numel,
        predicted=States(
            total["parameters"], total["gradients"], total["optimizer"], memory.peak[Tier.DEVICE]["gathered"]
        ),
        data_parallel=data_parallel(sharded.layout, state_tensors(sharded.optimizers)),
        measured=measured,
        traffic=sharded.wire.traffic.to_dict(),
        units=unit_rows(sharded.layout),
        tiers=_tier_rows(memory, now, None if recorder is None or not recorder.recorded else recorder.peak),
        roads=_road_rows(traffic, recorder) if recorder is not None else (),
        steps=0 if recorder is None else recorder.recorded,
        step_s=None if recorder is None else recorder.median("seconds"),
        predicted_step_s=sharded.plan.step_s,
        process=process_bytes(engine),
    )


def _tier_rows(memory: Memory, now: Table, peak: Table | None) -> tuple[TierRow, ...]:
    rows = []
    for tier in TIERS:
        name = tier.value
        found = {} if peak is None else peak[name]
        kinds = [
            TierRow(
                name,
                kind,
                memory.rest[tier][kind],
                now[name][kind],
                memory.peak[tier][kind],
                None if peak is None or kind == "activations" else found.get(kind, 0),
            )
            for kind in KINDS
            if memory.peak[tier][kind] or now[name][kind] or found.get(kind)
        ]
        if kinds:
            total = sum(now[name].values())
            all_kinds = TierRow(
                name, "all", memory.at_rest(tier), total, memory.at_peak(tier), None if peak is None else found["all"]
            )
            rows += [*kinds, all_kinds]
    return tuple(rows)


def _road_rows(traffic: Traffic, recorder: Recorder) -> tuple[RoadRow, ...]:
    rows = []
    for road in WAITS:
        told: int | None = getattr(traffic, road, None)
        moved = recorder.median("bytes", road) if road != "optimizer" and recorder.recorded else None
        waited = recorder.median("wait_s", road)
        if told or moved or waited:
            rows.append(RoadRow(road, told, moved, waited))
    return tuple(rows)
