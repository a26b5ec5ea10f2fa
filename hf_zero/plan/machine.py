"""Memory of one rank by tier, read from the system, and its speeds, from a file."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.files import parse_json, read_bounded
from ..errors import CheckpointError, ConfigError

MARGIN = 0.1
"""Share of free memory that a plan leaves to allocators, libraries and other programs if no budget is given."""
DISK_MARGIN = 0.05

_MOST_BYTES = 1 << 20
"""Largest machine file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One rank's share of a machine: bytes, bytes per second, floating-point operations per second. None: not known.

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
    """Bytes per second that a rank sends in gathers and reduces, beyond `latency`."""
    all_reduce: float | None = None
    """Bytes per second that a rank sends in all-reduces (stage 0, gradients across replicas); None: as `collective`."""
    latency: float | None = None
    """Seconds of one hop of a collective, before its first byte."""
    flops: Mapping[str, float] = field(default_factory=dict)
    """Floating-point operations per second of a matrix product, by dtype name."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def with_speeds_of(self, other: Machine) -> Machine:
        """Return a machine with these bytes and the speeds of `other`."""
        bytes_ = ("device_memory", "host_memory", "disk_free", "shares_memory")
        return replace(other, **{name: getattr(self, name) for name in bytes_})

    @staticmethod
    def of(values: Mapping[str, Any], source: str) -> Machine:
        """Build a machine from some or all values of `to_dict`; `source` names them in messages.

        Raises:
            ConfigError: a name is not a field, or a value is not a number.
        """
        names = {entry.name for entry in fields(Machine)}
        unknown = sorted(set(values) - names)
        if unknown:
            raise ConfigError(f"{source}: unknown {', '.join(unknown)}; expected some of {', '.join(sorted(names))}")
        for name, value in values.items():
            if name == "flops" and not isinstance(value, Mapping):
                raise ConfigError(f"{source}: flops must be numbers by type, found {value!r}")
            entries = list(value.values()) if name == "flops" else [value]
            for entry in entries:
                if entry is not None and (not isinstance(entry, (int, float)) or not 0 <= entry < float("inf")):
                    raise ConfigError(f"{source}: {name} must be a number that is not negative, found {entry!r}")
        return Machine(**values)

    @staticmethod
    def load(path: str | Path) -> Machine:
        """Read a machine file.

        Raises:
            ConfigError: the file is not a readable JSON object of a machine.
        """
        try:
            values = parse_json(read_bounded(path, _MOST_BYTES))
        except (OSError, ValueError, CheckpointError) as error:
            raise ConfigError(f"{path} is not a machine file: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: expected a JSON object, found {type(values).__name__}")
        return Machine.of(values, str(path))

    @staticmethod
    def least(machines: Iterable[Machine]) -> Machine:
        """Return what all machines have, so that a plan is the same on every rank."""
        every = list(machines)

        def lowest(name: str) -> Any:
            known = [value for value in (getattr(machine, name) for machine in every) if value is not None]
            least = max if name == "latency" else min
            return least(known) if len(known) == len(every) or name.endswith(("memory", "free")) and known else None

        plain = [entry.name for entry in fields(Machine) if entry.name not in ("shares_memory", "flops")]
        dtypes = set.intersection(*(set(machine.flops) for machine in every))
        return Machine(
            shares_memory=any(machine.shares_memory for machine in every),
            flops={dtype: min(machine.flops[dtype] for machine in every) for dtype in sorted(dtypes)},
            **{name: lowest(name) for name in plain},
        )


# Bytes --------------------------------------------------------------------------------------------------------------


def here(device: torch.device, *, ranks: int = 1, offload_dir: str | None = None, held_bytes: int = 0) -> Machine:
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
