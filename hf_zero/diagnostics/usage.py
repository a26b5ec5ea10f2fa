"""Measure the memory, traffic and waits of an engine, and compare them with the plan.

What each kind of bytes counts (`plan.costs.KINDS`):
* parameters: copies that gathers read, and full parameters that stay. optimizer: masters in separate memory, and states.
* gradients: reduced ones. gathered: temporary full parameters. communication: gradients that are being reduced.
* staging: blocks, slabs and transfer buffers of the host.
* On disk, regions count as they are allocated, in whole pages.
* Not counted: activations, local gradients of a unit whose backward still runs, the transport's and the optimizer's own memory.
On a CPU device both device and host are host memory, told apart by the tier.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..engine.engine import Engine
from ..optimizers.step_probe import state_tensors
from ..plan.costs import KINDS, TIERS
from ..plan.plan import Plan
from ..plan.traffic import COLLECTIVES, LINKS
from ..tiers.array import OnDisk
from ..tiers.tier import Tier, padded
from ..version import __version__

Table = dict[str, dict[str, int]]
"""Tier -> kind -> bytes."""

# Bytes now ------------------------------------------------------------------------------------------------------------


class _Tally:
    """Bytes of memory and of arrays on disk, each counted once, under the first kind that it is added as."""

    def __init__(self, device: torch.device) -> None:
        self.table: Table = {tier.value: dict.fromkeys(KINDS, 0) for tier in TIERS}
        self._device = device
        self._seen: set[int] = set()

    def add(self, values: Any, tier: Tier, kind: str) -> None:
        """Count a tensor or values on disk. Tensors that are not on the device count as the host's."""
        if isinstance(values, OnDisk):
            source = values.source
            if id(source) not in self._seen:
                self._seen.add(id(source))
                self.table[Tier.DISK.value][kind] += padded(source.numel * source.dtype.itemsize)
            return
        if not isinstance(values, Tensor):
            return
        storage = values.untyped_storage()
        if not storage.nbytes() or storage.data_ptr() in self._seen:
            return
        self._seen.add(storage.data_ptr())
        is_away = tier is not Tier.DEVICE or values.device.type != self._device.type
        self.table[(Tier.HOST if is_away else Tier.DEVICE).value][kind] += storage.nbytes()


def stored_bytes(engine: Engine) -> Table:
    """Return the bytes of parameters, optimizer state and reduced gradients, by tier and kind. O(spans + states)."""
    tally = _Tally(engine.context.device)
    for span in (span for unit in engine.units for span in unit.spans):
        if span.is_persistent:
            tally.add(span.full, Tier.DEVICE, "parameters")
        elif span.copy is not None:
            tally.add(span.copy, span.copy_tier, "parameters")
        reads_master = not span.is_persistent and span.copy is None and span.compute_dtype == span.master_dtype
        tally.add(span.master, span.tier, "parameters" if reads_master else "optimizer")
        if isinstance(span.bucket.grad, OnDisk):  # in memory the ledger has them
            tally.add(span.bucket.grad, Tier.DISK, "gradients")
    for binding in engine.bindings:
        for segment in (each for group in binding.segments for each in group):
            for value in binding.state_of(segment).values():
                tally.add(value, segment.span.tier, "optimizer")
    return tally.table


def measure(engine: Engine) -> Table:
    """Return this rank's bytes now, by tier and kind."""
    table, ledger = stored_bytes(engine), engine.context.storage.ledger
    for tier, account in ((Tier.DEVICE, ledger.device), (Tier.HOST, ledger.host)):
        for kind, nbytes in account.now.items():
            table[tier.value][kind] += nbytes
    return table


def process_bytes(engine: Engine) -> dict[str, int]:
    """Return bytes as the system counts them: `rss` now, `rss peak`, `disk file`; on CUDA also what torch has allocated."""
    out = {}
    with suppress(OSError):  # not Linux
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            name, _, rest = line.partition(":")
            if name in ("VmHWM", "VmRSS"):
                out["rss" if name == "VmRSS" else "rss peak"] = int(rest.split()[0]) * 1024
    context = engine.context
    if context.storage.has_disk:
        out["disk file"] = context.storage.disk.nbytes
    if context.device.type == "cuda":
        found = torch.cuda.memory_stats(context.device)
        out["device allocated"] = int(found.get("allocated_bytes.all.current", 0))
        out["device allocated peak"] = int(found.get("allocated_bytes.all.peak", 0))
        out["device reserved peak"] = int(found.get("reserved_bytes.all.peak", 0))
    return out


# Counters of a run ----------------------------------------------------------------------------------------------------


def counters(engine: Engine) -> dict[str, Any]:
    """Return the counters of an engine, and restart the peaks.

    Returns:
        `peak`: highest bytes by tier and kind since the last call; `all` of a tier: its sum at one moment. `bytes` by channel
        and `wait_s`, seconds that training waited, since the start. `process`: bytes of the whole process.
    """
    context = engine.context
    meter, traffic = context.storage.meter, context.wire.traffic
    links = {link: meter[link] for link in LINKS}
    wait_s = {kind: traffic[kind].wait_s for kind in COLLECTIVES}
    wait_s |= {link: count.wait_s - meter.stepper_wait_s[link] for link, count in links.items()}
    wait_s["optimizer"] = context.step_wait_s
    sent = {kind: traffic[kind].bytes for kind in COLLECTIVES} | {link: count.bytes for link, count in links.items()}
    if (across := traffic.kinds.get("across")) is not None:  # the same gradients, to other replicas
        sent["reduce"] += across.bytes
        wait_s["reduce"] += across.wait_s
    peak, ledger = stored_bytes(engine), context.storage.ledger
    for kinds in peak.values():
        kinds["all"] = sum(kinds.values())
    for tier, account in ((Tier.DEVICE, ledger.device), (Tier.HOST, ledger.host)):
        for kind, nbytes in account.peak.items():
            peak[tier.value][kind] += nbytes
        peak[tier.value]["all"] += account.peak_total
    ledger.begin_step()
    return {"peak": peak, "bytes": sent, "wait_s": wait_s, "process": process_bytes(engine)}


def facts(engine: Engine, backward_per_step: int) -> dict[str, Any]:
    """Return facts of the run as plain values, for the first line of its file."""
    context = engine.context
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
        "predicted": {"backward_per_step": backward_per_step, **predicted(engine, backward_per_step).to_dict()},
    }


# Predicted and measured -----------------------------------------------------------------------------------------------


def predicted(engine: Engine, backward_per_step: int = 1) -> Plan:
    """Return the engine's plan for the optimizers bound now.

    Args:
        backward_per_step: micro-batches of a step, as observed.
    """
    context = engine.context
    inputs = replace(
        context.plan.inputs,
        layout=context.layout,
        machine=replace(context.plan.inputs.machine, shares_memory=context.device.type == "cpu"),
        optimizer_tensors=state_tensors(engine.optimizers),
        backward_per_step=max(1, backward_per_step),
        defers=engine.schedule.deferred_last,
        kept=context.kept,
    )
    return Plan(inputs, context.plan.placements)
