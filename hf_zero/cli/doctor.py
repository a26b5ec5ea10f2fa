"""`hf-zero doctor`: what this machine has, and what would get in the way of a training. `hf-zero probe`: how fast it is."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from rich.console import Console
from rich.text import Text

from ..config import size_text
from ..errors import ConfigError
from ..plan import machine
from ..plan.machine import Machine, busy_share, free_device_bytes, free_disk_bytes, free_host_bytes, host_name, kept
from ..tiers.disk import MEMORY_FILE_SYSTEMS, file_system
from ..version import __version__
from .commands import OK, WRONG, DoctorOptions, ProbeOptions, print_json
from .files import cache_folder, read_settings, writable
from .show import ranks_text, short_size, table, text

GOOD, NOTE, BAD = "ok", "note", "wrong"
_STYLES = {GOOD: "green", NOTE: "yellow", BAD: "bold red"}
BUSY = 0.25
"""Of the processors, in use by others: times that are measured now are too long."""
TAKEN = 0.1
"""Of a device's memory, taken by others."""
LITTLE_BYTES = 10 << 30
"""Of disk: less does not hold the state of a model of a billion parameters."""
_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "huggingface_hub")
_ENGINES = {"DEEPSPEED": "DeepSpeed", "FSDP": "FSDP", "MEGATRON_LM": "Megatron-LM"}


@dataclass(frozen=True)
class Check:
    """One line of the screen."""

    what: str
    found: str
    verdict: str
    advice: str = ""


def _noted(what: str, found: str, advice: str) -> Check:
    """In order, or to be noted where there is advice."""
    return Check(what, found, NOTE if advice else GOOD, advice)


def run(options: DoctorOptions) -> int:
    """Prints all checks; status 1 where one is wrong."""
    found = list(checks(options.offload_dir))
    is_well = all(check.verdict != BAD for check in found)
    if options.json:
        print_json({"well": is_well, "checks": [asdict(check) for check in found]})
    else:
        rows = [
            (check.what, check.found, Text(check.verdict, style=_STYLES[check.verdict]), check.advice)
            for check in found
        ]
        table(Console(), f"hf_zero {__version__} on {host_name()}", ("what", "found", "", "to do"), rows, left=4)
    return OK if is_well else WRONG


def _versions() -> Iterator[Check]:
    yield Check("Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}", GOOD)
    required = _required()
    for name in _PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Check(name, "not installed", BAD, f"pip install {name}")
            continue
        wanted = required.get(canonicalize_name(name), SpecifierSet())
        is_old = not wanted.contains(version, prereleases=True)
        found = f"{version}, {wanted} is supported" if wanted else version
        yield Check(name, found, BAD if is_old else GOOD, f"pip install '{name}{wanted}'" if is_old else "")


def _required() -> dict[str, SpecifierSet]:
    """What this package requires, from its own metadata; empty where it runs from a folder that is not installed."""
    try:
        lines = importlib.metadata.requires("hf-zero") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    every = [Requirement(line) for line in lines]
    return {
        canonicalize_name(each.name): each.specifier for each in every if each.marker is None
    }  # extras have markers


def _devices() -> Iterator[Check]:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        advice = "torch is built for GPUs and sees none: driver, CUDA_VISIBLE_DEVICES" if built else ""
        cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} processors"
        yield _noted("devices", f"no GPU; CPU ranks over gloo, {cores}", advice)
        return
    version = ".".join(map(str, torch.cuda.nccl.version()))
    yield Check("backend", f"NCCL {version}, CUDA {torch.version.cuda}", GOOD)
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free = free_device_bytes(torch.device("cuda", index))
        is_taken = free < (1 - TAKEN) * about.total_memory
        advice = "another program uses its memory (nvidia-smi)" if is_taken else ""
        found = f"{about.name}: {size_text(free)} of {size_text(about.total_memory)} free"
        yield _noted(f"GPU {index}", found, advice)


def _memory() -> Check:
    free, total = free_host_bytes(), psutil.virtual_memory().total
    limited = free < psutil.virtual_memory().available * (1 - TAKEN)
    advice = "a control group or ulimit allows less than the machine has" if limited else ""
    return _noted("host memory", f"{size_text(free)} of {size_text(total)} free", advice)


def _disk(offload_dir: str | None) -> Check:
    folder = Path(offload_dir or tempfile.gettempdir())
    what = "disk tier" if offload_dir else "disk tier (temporary folder)"
    if not folder.is_dir():
        return Check(what, str(folder), BAD, "no such folder")
    if not os.access(folder, os.W_OK):
        return Check(what, str(folder), BAD, "this user may not write there")
    kind, free = file_system(folder), free_disk_bytes(str(folder))
    found = f"{folder}: {kind or 'unknown file system'}, {size_text(free)} free"
    if kind in MEMORY_FILE_SYSTEMS:
        advice = f"{kind} is memory: offloading there saves none; give --zero-offload-dir a folder on a disk"
        return Check(what, found, BAD if offload_dir else NOTE, advice)
    return _noted(what, found, "little space" if free < LITTLE_BYTES else "")


def _accelerate() -> Check:
    """What `accelerate launch` does without further flags."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    folder = Path(os.environ.get("HF_HOME") or cache) / "accelerate"
    path = next(
        (folder / name for name in ("default_config.yaml", "default_config.json") if (folder / name).exists()), None
    )
    what = "accelerate launch"
    if path is None:
        return Check(what, "no default configuration: all GPUs of this machine, else one process", GOOD)
    try:
        values = read_settings(path)
    except ConfigError as error:
        return Check(what, str(path), BAD, str(error))
    kind, count = str(values.get("distributed_type", "NO")), values.get("num_processes", 1)
    if kind in _ENGINES:
        advice = f"hf_zero takes its place: hf-zero migrate {path}, then distributed_type MULTI_GPU"
        return Check(what, f"{path}: {_ENGINES[kind]}, {count} processes", BAD, advice)
    precision = values.get("mixed_precision", "no")
    return Check(what, f"{path}: {kind}, {count} processes, mixed precision {precision}", GOOD)


def checks(offload_dir: str | None) -> Iterator[Check]:
    yield from _versions()
    yield from _devices()
    yield _memory()
    yield _disk(offload_dir)
    share, load = busy_share(), os.getloadavg()[0]
    found = f"{share:.0%} of the processors in use, load {load:.1f} on {os.cpu_count()}"
    yield _noted("other programs", found, "probe and benchmark when it is idle" if share > BUSY else "")
    yield _accelerate()
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM"):
        if os.environ.get(name, "").lower() in ("1", "true"):
            yield Check("environment", f"{name}={os.environ[name]}", BAD, "another engine is asked for: unset it")
    path = kept(cache_folder())
    advice = "" if path.exists() else "without it plans have no times: hf-zero probe"
    yield _noted("measured speeds", str(path) if path.exists() else "none kept", advice)


# probe --------------------------------------------------------------------------------------------------------------


def probe(options: ProbeOptions) -> None:
    """Measures, and prints it; on several ranks a collective."""
    import torch

    from ..comm.group_wire import open_wire
    from ..comm.watch import STALL_S
    from ..huggingface.plugin import ZeroAccelerator

    if options.offload_dir is not None and not Path(options.offload_dir).is_dir():
        raise ConfigError(
            f"no such folder: {options.offload_dir} (--offload-dir measures the disk of a folder that is there)"
        )
    writable(options.output)
    busy = busy_share()
    # Joins the ranks that torchrun started, and reports which device is this rank's.
    accelerator = ZeroAccelerator(cpu=not torch.cuda.is_available())
    try:
        wire = open_wire(accelerator.device)
        wire.start(STALL_S)  # messages as an engine's
        found = machine.probe(accelerator.device, wire, ranks=wire.ranks_here(), offload_dir=options.offload_dir)
        if wire.rank == 0:
            path = kept(cache_folder()) if options.output is None else Path(options.output)
            replaced = ", in place of the one before" if options.output is None and path.exists() else ""
            found.keep(path)
            if busy > BUSY:
                print(
                    f"hf-zero: other programs used {busy:.0%} of the processors when this began: the figures are too low; "
                    "measure again when the machine is idle",
                    file=sys.stderr,
                )
            if options.json:
                print_json(found.to_dict())
                return
            readers = "`hf-zero plan` and training where a tier is `auto` read it"
            if options.output is not None:
                readers = f"`hf-zero plan --machine {path}` reads it"
            table(console := Console(), f"{host_name()}, one of {ranks_text(wire.size)}", ("", ""), *_measured(found))
            text(console, f"written to {path}{replaced}; {readers}")
    finally:
        accelerator.end_training()


def _measured(found: Machine) -> Iterator[list[tuple[str, str]]]:
    """Sizes, speeds, messages, matrix products."""
    sizes = [
        ("device memory free", found.device_memory),
        ("host memory free", found.host_memory),
        ("disk free", found.disk_free),
    ]
    yield [(label, "" if size is None else short_size(size)) for label, size in sizes]
    speeds = [
        ("host memory, optimizer", found.host_bandwidth),
        ("device memory, optimizer", found.device_bandwidth),
        ("link, device to host", found.link_down),
        ("link, host to device", found.link_up),
        ("disk, read", found.disk_read),
        ("disk, write", found.disk_write),
        ("collectives, sent per rank", found.collective),
        ("all-reduces, sent per rank", found.all_reduce),
    ]
    yield [(label, "" if rate is None else f"{short_size(rate)}/s") for label, rate in speeds]
    messages = []
    if found.latency is not None:
        messages.append(("collectives, before the first byte", f"{found.latency * 1e6:.0f} µs"))
    if found.overlap is not None:
        messages.append(("collectives, hidden behind work", f"{found.overlap:.0%}"))
    yield messages
    products = []
    for dtype, rate in found.flops.items():
        size, unit = next((row for row in ((1e12, "TFLOP/s"), (1e9, "GFLOP/s")) if rate >= row[0]), (1e6, "MFLOP/s"))
        products.append((f"matrix product, {dtype}", f"{rate / size:.3g} {unit}"))
    yield products
