"""`hf-zero doctor`: check this machine. `hf-zero probe`: measure its speeds."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from packaging.requirements import Requirement
from rich.console import Console
from rich.text import Text

from ..config import ranks_text, size_text
from ..errors import ConfigError
from ..plan import machine
from ..plan.machine import Machine, busy_share, free_device_bytes, free_disk_bytes, free_host_bytes, host_name
from ..tiers.disk import MEMORY_FILE_SYSTEMS, file_system
from ..version import __version__
from . import OK, WRONG
from .files import writable
from .show import print_json, short_size, table, text

_STYLES = {"ok": "green", "note": "yellow", "wrong": "bold red"}
BUSY_SHARE = 0.25
"""Share of the processors in use by other programs that makes measured times too long."""
TAKEN_SHARE = 0.1
"""Share of a memory in use by others that is reported."""
LITTLE_DISK_BYTES = 10 << 30
"""Less does not hold the state of a model of a billion parameters."""
LITTLE_SHARED_BYTES = 1 << 30
_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "huggingface_hub")
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Check:
    """One row: the checked thing, the finding, and advice; `is_wrong`: training would fail, or take another engine."""

    what: str
    found: str
    advice: str = ""
    is_wrong: bool = False

    @property
    def verdict(self) -> str:
        return "wrong" if self.is_wrong else "note" if self.advice else "ok"


def run(offload_dir: str | None, as_json: bool) -> int:
    """Print all checks; return status 1 if one is wrong."""
    found = list(checks(offload_dir))
    is_well = not any(check.is_wrong for check in found)
    if as_json:
        rows = [{"what": c.what, "found": c.found, "verdict": c.verdict, "advice": c.advice} for c in found]
        print_json({"well": is_well, "checks": rows})
    else:
        cells = [(c.what, c.found, Text(c.verdict, style=_STYLES[c.verdict]), c.advice) for c in found]
        table(Console(), f"hf_zero {__version__} on {host_name()}", ("what", "found", "", "to do"), cells, left=4)
    return OK if is_well else WRONG


def checks(offload_dir: str | None) -> Iterator[Check]:
    yield from _versions()
    yield from _devices()
    yield from _memory()
    yield _disk(offload_dir)
    share, load = busy_share(), os.getloadavg()[0]
    found = f"{share:.0%} of the processors in use, load {load:.1f} on {os.cpu_count()}"
    yield Check("other programs", found, "measure and benchmark when idle" if share > BUSY_SHARE else "")
    yield _speeds()


def _versions() -> Iterator[Check]:
    yield Check("Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    lines: list[str] = []
    with suppress(importlib.metadata.PackageNotFoundError):  # runs from a folder that is not installed
        lines = importlib.metadata.requires("hf-zero") or []
    needed = {item.name: item.specifier for line in lines if (item := Requirement(line)).marker is None}
    for name in _PACKAGES:
        wanted = needed.get(name)
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Check(name, "not installed", f"pip install {name}", True)
            continue
        is_old = wanted is not None and not wanted.contains(version, prereleases=True)
        found = f"{version}, supported: {wanted}" if wanted else version
        yield Check(name, found, f"pip install '{name}{wanted}'" if is_old else "", is_old)


def _devices() -> Iterator[Check]:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        advice = "torch supports GPUs and finds none: check the driver and CUDA_VISIBLE_DEVICES" if built else ""
        cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} processors"
        yield Check("devices", f"no GPU; CPU ranks over gloo, {cores}", advice)
        return
    yield Check("backend", f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, CUDA {torch.version.cuda}")
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free = free_device_bytes(torch.device("cuda", index))
        is_taken = free < (1 - TAKEN_SHARE) * about.total_memory
        found = f"{about.name}: {size_text(free)} of {size_text(about.total_memory)} free"
        yield Check(f"GPU {index}", found, "another program uses its memory: see nvidia-smi" if is_taken else "")


def _memory() -> Iterator[Check]:
    free, memory = free_host_bytes(), psutil.virtual_memory()
    is_limited = free < memory.available * (1 - TAKEN_SHARE)
    advice = "a control group or ulimit allows less than the machine has" if is_limited else ""
    yield Check("host memory", f"{size_text(free)} of {size_text(memory.total)} free", advice)
    if SHARED_MEMORY.is_dir():  # NCCL and data loaders put their buffers there
        shared = shutil.disk_usage(SHARED_MEMORY)
        advice = "start the container with --shm-size=8g or --ipc=host" if shared.free < LITTLE_SHARED_BYTES else ""
        found = f"{size_text(shared.free)} of {size_text(shared.total)} free in {SHARED_MEMORY}"
        yield Check("shared memory", found, advice)


def _disk(offload_dir: str | None) -> Check:
    folder = Path(offload_dir or tempfile.gettempdir())
    what = "disk tier" if offload_dir else "disk tier (temporary folder)"
    if not folder.is_dir():
        return Check(what, str(folder), "no such folder", True)
    if not os.access(folder, os.W_OK):
        return Check(what, str(folder), "not writable: choose another folder", True)
    kind, free = file_system(folder), free_disk_bytes(str(folder))
    found = f"{folder}: {kind or 'unknown file system'}, {size_text(free)} free"
    if kind in MEMORY_FILE_SYSTEMS:
        advice = f"{kind} is memory: offloading there saves none; set --zero-offload-dir to a folder on a disk"
        return Check(what, found, advice, bool(offload_dir))
    return Check(what, found, "little space: set --zero-offload-dir" if free < LITTLE_DISK_BYTES else "")


def _speeds() -> Check:
    """Check for the speeds that `plan` needs to predict times; those of collectives need several ranks."""
    path, what = machine.measurements_path(), "measured speeds"
    command = f"torchrun --nproc-per-node {torch.cuda.device_count() or 2} -m hf_zero probe"
    if not path.exists():
        return Check(what, "none", f"for step times in hf-zero plan: {command}")
    try:
        measured = Machine.load(path)
    except ConfigError as error:
        return Check(what, str(path), f"{error} Measure again: {command}")
    if measured.collective is None:
        return Check(what, f"{path}: one process", f"for collectives between ranks: {command}")
    return Check(what, f"{path}, with collectives; hf-zero plan reads it")


# probe --------------------------------------------------------------------------------------------------------------


def probe(offload_dir: str | None, output: str | None, as_json: bool) -> None:
    """Measure and print the speeds of this machine; a collective on several ranks."""
    from ..comm.group_wire import open_wire
    from ..comm.watch import STALL_S
    from ..huggingface.plugin import ZeroAccelerator

    writable(output)
    busy = busy_share()
    # Joins the ranks that torchrun started, and reports which device is this rank's.
    accelerator = ZeroAccelerator(cpu=not torch.cuda.is_available())
    try:
        wire = open_wire(accelerator.device)
        wire.start(STALL_S)  # messages as an engine's
        found = machine.probe(accelerator.device, wire, ranks=wire.local_world_size(), offload_dir=offload_dir)
        if wire.rank == 0:
            path = machine.measurements_path() if output is None else Path(output)
            replaced = ", replaces the previous one" if output is None and path.exists() else ""
            found.save(path)
            if busy > BUSY_SHARE:
                print(
                    f"hf-zero: other programs used {busy:.0%} of the processors: the speeds are too low. "
                    "Measure again when the machine is idle.",
                    file=sys.stderr,
                )
            if as_json:
                print_json(asdict(found))
                return
            readers = "`hf-zero plan` and training with a tier of `auto` read it"
            if output is not None:
                readers = f"`hf-zero plan --machine {path}` reads it"
            table(console := Console(), f"{host_name()}, one of {ranks_text(wire.size)}", ("", ""), _measured(found))
            text(console, f"written to {path}{replaced}; {readers}")
    finally:
        accelerator.end_training()


def _measured(found: Machine) -> Iterator[tuple[str, str]]:
    """Yield sizes, speeds, seconds of a message, and operations per second of matrix products."""
    for name, value in asdict(found).items():
        label = name.replace("_", " ")
        if name == "flops":
            for dtype, rate in value.items():
                yield f"matrix product, {dtype}", f"{rate / 1e9:,.3g} GFLOP/s"
        elif name == "latency" and value is not None:
            yield "latency of a collective's hop", f"{value * 1e6:.0f} µs"
        elif value is not None and not isinstance(value, bool):
            yield label, short_size(value) if isinstance(value, int) else f"{short_size(value)}/s"
