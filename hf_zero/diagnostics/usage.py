"""Measure what an engine takes, moves and waits for, and compare it with the plan.

What each kind of bytes counts (`plan.costs.KINDS`):
* parameters: what gathers read, and full parameters that stay. optimizer: masters that are other memory, and states.
* gradients: reduced ones. gathered: full parameters that come and go. communication: gradients on their way to their owners.
* staging: blocks, slabs and landing buffers of the host.
* On disk, regions count as they are allocated, in whole pages.
* Not counted: activations, local gradients of a unit whose backward still runs, the transport's and the optimizer's own memory.
On a CPU device both device and host are host memory, told apart by the tier.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..engine.engine import Engine
from ..engine.span import Span
from ..optimizers.kinds import state_tensors
from ..plan.costs import KINDS, STATES, TIERS, Memory
from ..plan.machine import here
from ..plan.peaks import memory_of
from ..plan.record import Counters, Recorder, Table
from ..plan.report import Report, RoadRow, TierRow, data_parallel
from ..plan.solve import LIMITED
from ..plan.work import COLLECTIVES, LINKS, ROADS, WAITS, collectives_in, traffic_of, work_in_total
from ..tiers.array import OnDisk
from ..tiers.tier import Tier, padded
from ..version import __version__

# Bytes now ------------------------------------------------------------------------------------------------------------


class _Tally:
    """Bytes of memory and of arrays on disk, each counted once, under the first kind that it is added as."""

    def __init__(self, device: torch.device) -> None:
        self.table: Table = {tier.value: dict.fromkeys(KINDS, 0) for tier in TIERS}
        self._device = device
        self._seen: set[int] = set()

    def add(self, values: Any, tier: Tier, kind: str, *, padding: str = "") -> None:
        """Count a tensor or values on disk. Tensors that are not on the device count as the host's.

        Args:
            padding: kind of the padding on disk; empty: `kind`.
        """
        if isinstance(values, OnDisk):
            source = values.source
            if id(source) not in self._seen:
                self._seen.add(id(source))
                nbytes = source.numel * source.dtype.itemsize
                self.table[Tier.DISK.value][kind] += nbytes
                self.table[Tier.DISK.value][padding or kind] += padded(nbytes) - nbytes
            return
        if not isinstance(values, Tensor):
            return
        storage = values.untyped_storage()
        if not storage.nbytes() or storage.data_ptr() in self._seen:
            return
        self._seen.add(storage.data_ptr())
        is_away = tier is not Tier.DEVICE or values.device.type != self._device.type
        self.table[(Tier.HOST if is_away else Tier.DEVICE).value][kind] += storage.nbytes()


def at_rest(engine: Engine) -> Table:
    """Return the bytes of parameters, optimizer state and reduced gradients, by tier and kind. O(spans + states)."""
    tally = _Tally(engine.context.device)
    for unit in engine.units:
        for span in unit.spans:
            _add_parameters(tally, span)
            if isinstance(span.bucket.grad, OnDisk):  # in memory the ledger has them
                tally.add(span.bucket.grad, Tier.DISK, "gradients")
    for binding in engine.bindings:
        for group in binding.segments:
            for segment in group:
                for value in binding.state_of(segment).values():
                    tally.add(value, segment.span.tier, "optimizer")
    return tally.table


def _add_parameters(tally: _Tally, span: Span) -> None:
    if span.stays:
        tally.add(span.full, Tier.DEVICE, "parameters")
    elif span.copy is not None:
        padding = "optimizer" if span.copy is span.master else ""
        tally.add(span.copy, span.copy_tier, "parameters", padding=padding)
    reads_master = not span.stays and span.copy is None and span.compute_dtype == span.master_dtype
    tally.add(span.master, span.tier, "parameters" if reads_master else "optimizer")


def measure(engine: Engine) -> Table:
    """Return this rank's bytes now, by tier and kind."""
    table, ledger = at_rest(engine), engine.context.storage.ledger
    for tier, account in ((Tier.DEVICE, ledger.device), (Tier.HOST, ledger.host)):
        for kind, nbytes in account.now.items():
            table[tier.value][kind] += nbytes
    return table


def process_bytes(engine: Engine) -> dict[str, int]:
    """Return what the system counts: `rss` now, `rss peak`, `disk file`; on CUDA what torch has allocated."""
    out = {}
    try:
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            name, _, rest = line.partition(":")
            if name in ("VmHWM", "VmRSS"):
                out["rss" if name == "VmRSS" else "rss peak"] = int(rest.split()[0]) * 1024
    except OSError:
        pass  # not Linux
    context = engine.context
    if context.storage.has_disk:
        out["disk file"] = context.storage.disk.nbytes
    if context.device.type == "cuda":
        found = torch.cuda.memory_stats(context.device)
        out["device allocated"] = int(found.get("allocated_bytes.all.current", 0))
        out["device allocated peak"] = int(found.get("allocated_bytes.all.peak", 0))
        out["device reserved peak"] = int(found.get("reserved_bytes.all.peak", 0))
    return out


def limits(engine: Engine, ranks_here: int = 1) -> dict[str, tuple[int, str]]:
    """Return what this rank may take of each tier: a given budget, else what the machine has free and what the engine holds.

    Args:
        ranks_here: ranks that share this machine's memory and disk.
    """
    context = engine.context
    held = sum(sum(kinds.values()) for tier, kinds in measure(engine).items() if tier != Tier.DISK.value)
    machine = here(context.device, ranks=ranks_here, offload_dir=context.config.offload_dir, held_bytes=held)
    free = zip(TIERS, (machine.device_memory, machine.host_memory, machine.disk_free))
    found = {tier.value: (size, "free") for tier, size in free if size}
    budgets = context.plan.inputs.budgets.items()
    return found | {tier.value: (limit, "budget") for name, limit in budgets for tier in LIMITED[name]}


# Counters of a run ----------------------------------------------------------------------------------------------------


class Usage:
    """An engine's counters, for a `Recorder`."""

    def __init__(self, engine: Engine) -> None:
        self.rank = engine.rank
        self._engine = engine

    def counters(self) -> Counters:
        context = self._engine.context
        meter, traffic = context.storage.meter, context.wire.traffic
        links = {link: meter[link] for link in LINKS}
        wait_s = {kind: traffic[kind].wait_s for kind in COLLECTIVES}
        wait_s |= {link: count.wait_s - meter.stepper_wait_s[link] for link, count in links.items()}
        wait_s["optimizer"] = context.step_wait_s
        sent = {kind: traffic[kind].bytes for kind in COLLECTIVES}
        sent |= {link: count.bytes for link, count in links.items()}
        if (across := traffic.kinds.get("across")) is not None:  # the same gradients, to other replicas
            sent["reduce"] += across.bytes
            wait_s["reduce"] += across.wait_s
        return Counters(self._peak(), sent, wait_s, process_bytes(self._engine))

    def _peak(self) -> Table:
        """The bytes stored now, and with them the highest of all that came and went."""
        table, ledger = at_rest(self._engine), self._engine.context.storage.ledger
        for kinds in table.values():
            kinds["all"] = sum(kinds.values())
        for tier, account in ((Tier.DEVICE, ledger.device), (Tier.HOST, ledger.host)):
            for kind, nbytes in account.peak.items():
                table[tier.value][kind] += nbytes
            table[tier.value]["all"] += account.peak_total
        ledger.begin_step()
        return table

    def facts(self, backward_per_step: int) -> dict[str, Any]:
        """Return what is known of the run, as plain values: the first line of its file."""
        context, plan = self._engine.context, self._engine.context.plan
        memory, traffic = predicted(self._engine, backward_per_step)
        return {
            "version": __version__,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "rank": context.wire.rank,
            "world_size": context.wire.size,
            "stage": context.config.stage,
            "precision": str(context.precision),
            "parameters": context.layout.numel,
            "trainable": context.layout.trainable_numel,
            # A run's folder may be shared: no names of hosts or folders.
            "config": {name: value for name, value in context.config.to_dict().items() if name != "offload_dir"},
            "machine": {
                "device": torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else "cpu",
                "cores": os.cpu_count() or 1,
                "torch": torch.__version__,
            },
            "predicted": {
                "backward_per_step": backward_per_step,
                "stored": _plain(memory.stored),
                "peak": _plain(memory.peak),
                "peak_bytes": {tier.value: memory.at_peak(tier) for tier in TIERS},
                "traffic": {road: traffic[road] for road in ROADS},
                "step_s": plan.step.seconds,
                "parts_s": plan.parts,
                "reasons": list(plan.reasons),
            },
        }


def _plain(by_tier: Mapping[Tier, Mapping[str, int]]) -> Table:
    return {tier.value: dict(kinds) for tier, kinds in by_tier.items()}


# Predicted and measured -----------------------------------------------------------------------------------------------


def predicted(engine: Engine, backward_per_step: int = 1) -> tuple[Memory, dict[str, int]]:
    """Return the plan's memory and traffic for the optimizers bound now.

    Args:
        backward_per_step: micro-batches that a step is seen to have.
    """
    context = engine.context
    setup = replace(
        context.plan.inputs.setup,
        policy=context.policy,
        is_cpu=context.device.type == "cpu",
        optimizer_tensors=state_tensors(engine.optimizers),
        backward_per_step=max(1, backward_per_step),
        defers=engine.schedule.puts_off,
        kept=context.kept,
    )
    given, collectives = (context.layout, context.plan.placements, setup), collectives_in(context.layout, setup)
    return memory_of(*given), traffic_of(work_in_total(*given, collectives), collectives)


def report(engine: Engine, recorder: Recorder | None = None) -> Report:
    """Return what this rank takes now, and what was predicted.

    Args:
        recorder: adds peaks, traffic and waits of the steps that it measured.
    """
    context = engine.context
    memory, traffic = predicted(engine, 1 if recorder is None else recorder.forwards_per_step)
    now = measure(engine)
    measured = {kind: sum(kinds[kind] for kinds in now.values()) for kind in STATES}
    measured["parameters"] += sum(kinds["gathered"] for kinds in now.values())
    return Report(
        stage=context.config.stage,
        world_size=context.wire.size,
        precision=str(context.precision),
        parameters=context.layout.numel,
        trainable=context.layout.trainable_numel,
        predicted={kind: sum(memory.stored[tier][kind] for tier in TIERS) for kind in STATES},
        data_parallel=data_parallel(context.layout, state_tensors(engine.optimizers)),
        measured=measured,
        traffic=context.wire.traffic.to_dict(),
        units=len(context.layout.units),
        tiers=_tier_rows(memory, now, None if recorder is None or not recorder.recorded else recorder.peak),
        roads=_road_rows(traffic, recorder) if recorder is not None else (),
        steps=0 if recorder is None else recorder.recorded,
        step_s=None if recorder is None else recorder.median("seconds"),
        predicted_step_s=context.plan.step.seconds,
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
                memory.stored[tier][kind],
                now[name][kind],
                memory.peak[tier][kind],
                None if peak is None or (kind == "activations" and tier is not Tier.HOST) else found.get(kind, 0),
            )
            for kind in KINDS
            if memory.peak[tier][kind] or now[name][kind] or found.get(kind)
        ]
        if kinds:
            total = sum(now[name].values())
            highest = None if peak is None else found["all"]
            rows += [*kinds, TierRow(name, "all", memory.at_rest(tier), total, memory.at_peak(tier), highest)]
    return tuple(rows)


def _road_rows(traffic: Mapping[str, int], recorder: Recorder) -> tuple[RoadRow, ...]:
    rows = []
    for road in WAITS:
        told = traffic.get(road)
        moved = recorder.median("bytes", road) if road != "optimizer" and recorder.recorded else None
        waited = recorder.median("wait_s", road)
        if told or moved or waited:
            rows.append(RoadRow(road, told, moved, waited))
    return tuple(rows)
