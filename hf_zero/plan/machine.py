"""Memory of one rank by tier, and its speeds: given in a file, read from the system, or measured."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.files import read_json, replace_file
from ..comm.inflight import Inflight
from ..comm.wire import Wire
from ..errors import CheckpointError, ConfigError
from ..tiers.disk import Disk
from ..tiers.host import Link
from ..tiers.tier import Meter

_LOG = logging.getLogger(__name__)

MARGIN = 0.1
"""Share of free memory that a plan leaves to allocators, libraries and other programs if no budget is given."""
DISK_MARGIN = 0.05

_TURN_BYTES = 256 << 20
"""Bytes copied, written or read in one repetition of a probe."""
_REPEATS = 3
_MIN_GEMM, _MAX_GEMM, _GEMM_S = 256, 8192, 0.02


_SIZES = ("device_memory", "host_memory", "disk_free", "shares_memory")
"""Fields of a machine that are not speeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One rank's share of a machine: bytes, bytes per second, floating-point operations per second. None: unknown.

    A tier of unknown size counts as large enough. A step with a part of unknown speed has no predicted time.
    """

    device_memory: int | None = None
    """Bytes of device memory that training may use."""
    host_memory: int | None = None
    """Bytes of host memory that training may use."""
    disk_free: int | None = None
    """Bytes in `offload_dir` that training may use."""
    shares_memory: bool = False
    """The device is a CPU: both tiers are the same memory."""
    device_bandwidth: float | None = None
    """Bytes per second, read and written, of the optimizer on the device."""
    host_bandwidth: float | None = None
    """Bytes per second, read and written, of the optimizer on the host."""
    link_down: float | None = None
    link_up: float | None = None
    disk_read: float | None = None
    disk_write: float | None = None
    collective: float | None = None
    """Bytes per second that a rank sends in collectives, beyond `latency`."""
    latency: float | None = None
    """Seconds of one hop of a collective, before its first byte."""
    flops: Mapping[str, float] = field(default_factory=dict)
    """Floating-point operations per second of a matrix product, by dtype name."""

    def with_speeds_of(self, other: Machine) -> Machine:
        """Return a machine with these bytes and the speeds of `other`."""
        return replace(other, **{name: getattr(self, name) for name in _SIZES})

    @staticmethod
    def load(path: str | Path) -> Machine:
        """Read a machine file: some or all fields.

        Raises:
            ConfigError: the file is not a readable JSON object of a machine; the message has the name and the value.
        """
        try:
            values = read_json(path)
        except CheckpointError as error:
            raise ConfigError(f"{path} is not a machine file: {error}; hf-zero probe --output writes one") from error
        names = {entry.name for entry in fields(Machine)}
        if unknown := sorted(set(values) - names):
            raise ConfigError(f"{path}: unknown {', '.join(unknown)}; expected some of {', '.join(sorted(names))}")
        for name, value in values.items():
            if name == "flops" and not isinstance(value, dict):
                raise ConfigError(f"{path}: flops must be numbers by type, found {value!r}")
            for entry in value.values() if name == "flops" else [value]:
                if entry is not None and (not isinstance(entry, (int, float)) or not 0 <= entry < float("inf")):
                    raise ConfigError(f"{path}: {name} must be a number that is not negative, found {entry!r}")
                if entry == 0 and name not in (*_SIZES, "latency"):
                    raise ConfigError(f"{path}: {name} is 0: leave it out if it is not known")
        return Machine(**values)

    def save(self, path: Path) -> None:
        """Write a machine file, atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, (json.dumps(asdict(self), indent=1) + "\n").encode())

    @staticmethod
    def minimum(machines: Iterable[Machine]) -> Machine:
        """Return the lowest size and speed of each kind, so that all ranks make the same plan."""
        every = list(machines)

        def lowest(name: str) -> Any:
            values = [getattr(machine, name) for machine in every]
            return None if None in values else max(values) if name == "latency" else min(values)

        plain = [entry.name for entry in fields(Machine) if entry.name not in ("shares_memory", "flops")]
        dtypes = set.intersection(*(set(machine.flops) for machine in every))
        return Machine(
            shares_memory=any(machine.shares_memory for machine in every),
            flops={dtype: min(machine.flops[dtype] for machine in every) for dtype in sorted(dtypes)},
            **{name: lowest(name) for name in plain},
        )


def measurements_path() -> Path:
    """Return the file with the measurements of this host, in the user's cache (XDG base directory specification)."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "hf_zero", f"machine-{re.sub(r'[^A-Za-z0-9_.-]', '_', host_name())}.json")


def measured() -> Machine | None:
    """Return what `hf-zero probe` measured on this host; None if it has not run, or its file cannot be used."""
    path = measurements_path()
    try:
        return Machine.load(path) if path.exists() else None
    except ConfigError as error:
        _LOG.warning("no measured speeds: %s. Run `hf-zero probe` again", error)
        return None


# Bytes --------------------------------------------------------------------------------------------------------------


def free_memory(
    device: torch.device, *, ranks: int = 1, offload_dir: str | None = None, held_bytes: int = 0
) -> Machine:
    """Return the free memory of this host, less a margin, divided by its `ranks`.

    Args:
        held_bytes: device memory in use that the plan itself counts, such as the model's.
    """
    disk = int(free_disk_bytes(offload_dir) * (1 - DISK_MARGIN)) // ranks
    host = int(free_host_bytes(ranks) * (1 - MARGIN))
    if device.type != "cuda":
        host += held_bytes
        return Machine(device_memory=host, host_memory=host, disk_free=disk, shares_memory=True)
    free = int(free_device_bytes(device) * (1 - MARGIN))
    return Machine(device_memory=free + held_bytes, host_memory=host, disk_free=disk)


def free_device_bytes(device: torch.device) -> int:
    """Return the bytes of a CUDA device that are free, or that torch's allocator keeps unused."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + int(torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def free_disk_bytes(folder: str | None) -> int:
    """Return the free bytes of the disk of `folder`, which may not exist yet. None: the temporary folder."""
    path = Path(folder or tempfile.gettempdir())
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def free_host_bytes(ranks: int = 1) -> int:
    """Return the least of this rank's share of the system's and the control group's memory, and this process's limits."""
    import psutil  # a slow import that few processes need

    limits = [min(psutil.virtual_memory().available, group_bytes()) // ranks]
    process = psutil.Process()
    used = process.memory_info()
    for kind, taken in (("RLIMIT_AS", used.vms), ("RLIMIT_DATA", getattr(used, "data", 0))):
        if hasattr(psutil, kind):  # Linux and FreeBSD
            soft, _ = process.rlimit(getattr(psutil, kind))
            if soft != psutil.RLIM_INFINITY:
                limits.append(soft - taken)
    return max(0, min(limits))


def group_bytes(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return the bytes that the control group (version 2 or 1) may still allocate; page cache counts as free."""
    least = 1 << 62
    lines = membership.read_text(encoding="utf-8").splitlines() if membership.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = base / path.lstrip("/")
        for place in (group, *(above for above in group.parents if above.is_relative_to(base))):
            with contextlib.suppress(OSError, ValueError):  # the group does not exist, or has no limit ("max")
                free = int((place / names[0]).read_text()) - int((place / names[1]).read_text())
                stats = dict(entry.split() for entry in (place / "memory.stat").read_text().splitlines())
                least = min(least, max(0, free + int(stats.get(names[2], 0))))
    return least


# Speeds -------------------------------------------------------------------------------------------------------------


def probe(device: torch.device, wire: Wire, *, ranks: int = 1, offload_dir: str | None = None) -> Machine:
    """Measure this machine on all ranks at the same time, in some seconds. On several ranks a collective.

    Every speed is the best of a few turns. The disk is measured last, with O_DIRECT where the file system allows it, on a
    temporary file in `offload_dir`.

    Raises:
        ConfigError, TierError: the folder cannot be used.
    """
    host = _optimizer_bandwidth(torch.device("cpu"))
    down, up = _link_bandwidth(device)
    collectives: dict[str, Any] = dict(measure_collectives(device, wire))
    found = replace(
        free_memory(device, ranks=ranks, offload_dir=offload_dir),
        host_bandwidth=host,
        device_bandwidth=_optimizer_bandwidth(device) if device.type == "cuda" else host,
        link_down=down,
        link_up=up,
        flops={name: _gemm_flops(device, getattr(torch, name)) for name in ("float32", "bfloat16", "float16")},
        **collectives,
    )
    read, write = _disk_bandwidth(offload_dir, wire)
    everyone: list[Machine] = wire.exchange(replace(found, disk_read=read, disk_write=write))
    return Machine.minimum(everyone)


def busy_share() -> float:
    """Return the share of this machine's processors, 0 to 1, that other processes use."""
    import psutil

    return float(psutil.cpu_percent(interval=0.2)) / 100


def host_name() -> str:
    """Return the host name, the key of measurements."""
    return platform.node() or "unknown"


def _turns(device: torch.device, action: Callable[[], object], turns: int, wire: Wire | None = None) -> list[float]:
    """Return the seconds of each repetition after one warm-up. All ranks of `wire` start them together."""
    taken = []
    for _ in range(turns + 1):
        synchronize(device)
        if wire is not None:
            wire.barrier()
        started = time.perf_counter()
        begun = action()
        if isinstance(begun, Inflight):
            begun.close()
        synchronize(device)
        taken.append(max(time.perf_counter() - started, 1e-9))
    return taken[1:]


def _best_s(device: torch.device, action: Callable[[], object]) -> float:
    return min(_turns(device, action, _REPEATS))


def _optimizer_bandwidth(device: torch.device) -> float:
    """Time a fused AdamW step: it reads master, gradient and two moments, and writes all but the gradient (28 bytes each)."""
    param = torch.nn.Parameter(torch.ones(_TURN_BYTES // 32, device=device))
    param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW([param], lr=1e-4, fused=True)
    return 28 * param.numel() / _best_s(device, optimizer.step)


def _gemm_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Time square products of growing size until one takes long enough; some processors are slow at some dtypes."""
    size = _MIN_GEMM
    while True:
        a, b = (torch.full((size, size), 0.5, dtype=dtype, device=device) for _ in range(2))
        taken_s = _best_s(device, partial(torch.mm, a, b))
        if size >= _MAX_GEMM or taken_s > _GEMM_S:
            return 2.0 * size**3 / taken_s
        size *= 2


def _link_bandwidth(device: torch.device) -> tuple[float, float]:
    """Return bytes per second down and up; on a CPU device both are copies within host memory."""
    link, nbytes = Link(device, Meter()), _TURN_BYTES
    on_host, on_device = link.empty(nbytes, torch.uint8).fill_(1), torch.ones(nbytes, dtype=torch.uint8, device=device)
    down = _best_s(device, lambda: link.copy_to_host(on_device, on_host))
    return nbytes / down, nbytes / _best_s(device, lambda: link.copy_to_device(on_host, on_device))


def _disk_bandwidth(offload_dir: str | None, wire: Wire) -> tuple[float, float]:
    """Return bytes per second of reads and writes, in pieces that move at the same time, as in the disk tier."""
    disk, cpu, nbytes = Disk(offload_dir, wire.rank, Meter()), torch.device("cpu"), _TURN_BYTES
    try:
        region, buffer = disk.allocate(nbytes), Link(cpu, disk.meter).empty(nbytes, torch.uint8).fill_(7)
        wire.barrier()
        write = _best_s(cpu, lambda: disk.write(region.offset, buffer))
        return nbytes / _best_s(cpu, lambda: disk.read(region.offset, buffer)), nbytes / write
    finally:
        disk.close()


# Messages -------------------------------------------------------------------------------------------------------------


_TURNS, _SMALL_TURNS = 7, 21
"""Small messages take about as long as a thread needs to wake up, which varies from turn to turn."""
_SMALL_BYTES, _LARGE_BYTES = 1 << 10, 64 << 20


def measure_collectives(device: torch.device, wire: Wire) -> dict[str, float]:
    """Time a small and a large gather, as the engine issues them; medians, in some seconds.

    A collective with the same result on every rank. Empty on one rank.

    Returns:
        `latency`: seconds of one hop of a gather, which has `ranks - 1` hops. `collective`: bytes per second that a rank sends.
    """
    if wire.size == 1:
        return {}

    def gather(size: int, turns: int) -> tuple[int, float]:
        numel = max(32, size // 4 // (wire.size - 1))
        full, own = torch.ones(numel * wire.size, device=device), torch.ones(numel, device=device)
        taken_s = statistics.median(_turns(device, lambda: wire.gather(full, own, 0), turns, wire))
        return 4 * numel * (wire.size - 1), max(wire.exchange(taken_s))

    (small, small_s), (large, large_s) = gather(_SMALL_BYTES, _SMALL_TURNS), gather(_LARGE_BYTES, _TURNS)
    if large_s <= small_s:
        raise ConfigError(f"{large} bytes took no longer than {small} bytes; measure again on an idle machine")
    bandwidth = (large - small) / (large_s - small_s)
    return {"latency": max(0.0, small_s - small / bandwidth) / (wire.size - 1), "collective": bandwidth}


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
