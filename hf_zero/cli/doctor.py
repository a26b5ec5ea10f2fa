"""`hf-zero doctor`: check this machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from packaging.requirements import Requirement
from rich.console import Console
from rich.text import Text

from ..config import size_text
from ..errors import ConfigError
from ..plan.machine import free_device_bytes, free_disk_bytes, free_host_bytes
from ..tiers.disk import MEMORY_FILE_SYSTEMS, file_system
from ..version import __version__
from . import OK, WRONG
from .files import read_settings
from .show import print_json, table

GOOD, NOTE, BAD = "ok", "note", "wrong"
_STYLES = {GOOD: "green", NOTE: "yellow", BAD: "bold red"}
TAKEN_SHARE = 0.1
"""Share of a memory in use by others that is reported."""
LITTLE_DISK_BYTES = 10 << 30
"""Less does not hold the state of a model of a billion parameters."""
LITTLE_SHARED_BYTES = 1 << 30
_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "huggingface_hub")
_ENGINES = {"DEEPSPEED": "DeepSpeed", "FSDP": "FSDP", "MEGATRON_LM": "Megatron-LM"}
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Check:
    """One row: the checked thing, the finding, a verdict, and advice."""

    what: str
    found: str
    verdict: str
    advice: str = ""


def _noted(what: str, found: str, advice: str) -> Check:
    return Check(what, found, NOTE if advice else GOOD, advice)


def run(offload_dir: str | None, as_json: bool) -> int:
    """Print all checks; return status 1 if one is wrong."""
    found = list(checks(offload_dir))
    is_well = all(check.verdict != BAD for check in found)
    if as_json:
        print_json({"well": is_well, "checks": [asdict(check) for check in found]})
    else:
        rows = [(c.what, c.found, Text(c.verdict, style=_STYLES[c.verdict]), c.advice) for c in found]
        table(
            Console(),
            f"hf_zero {__version__} on {platform.node()}",
            ("what", "found", "", "to do"),
            rows,
            left=4,
        )
    return OK if is_well else WRONG


def checks(offload_dir: str | None) -> Iterator[Check]:
    yield from _versions()
    yield from _devices()
    yield from _memory()
    yield _disk(offload_dir)
    yield _accelerate()
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM"):
        if os.environ.get(name, "").lower() in ("1", "true"):
            yield Check("environment", f"{name}={os.environ[name]}", BAD, f"asks for another engine: unset {name}")


def _versions() -> Iterator[Check]:
    yield Check("Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}", GOOD)
    try:
        lines = importlib.metadata.requires("hf-zero") or []
    except importlib.metadata.PackageNotFoundError:  # runs from a folder that is not installed
        lines = []
    needed = {item.name: item.specifier for line in lines if (item := Requirement(line)).marker is None}
    for name in _PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Check(name, "not installed", BAD, f"pip install {name}")
            continue
        wanted = needed.get(name)
        is_old = wanted is not None and not wanted.contains(version, prereleases=True)
        found = f"{version}, supported: {wanted}" if wanted else version
        yield Check(name, found, BAD if is_old else GOOD, f"pip install '{name}{wanted}'" if is_old else "")


def _devices() -> Iterator[Check]:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        advice = "torch supports GPUs and finds none: check the driver and CUDA_VISIBLE_DEVICES" if built else ""
        cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} processors"
        yield _noted("devices", f"no GPU; CPU ranks over gloo, {cores}", advice)
        return
    version = ".".join(map(str, torch.cuda.nccl.version()))
    yield Check("backend", f"NCCL {version}, CUDA {torch.version.cuda}", GOOD)
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free = free_device_bytes(torch.device("cuda", index))
        is_taken = free < (1 - TAKEN_SHARE) * about.total_memory
        found = f"{about.name}: {size_text(free)} of {size_text(about.total_memory)} free"
        yield _noted(f"GPU {index}", found, "another program uses its memory: see nvidia-smi" if is_taken else "")


def _memory() -> Iterator[Check]:
    free, memory = free_host_bytes(), psutil.virtual_memory()
    limited = free < memory.available * (1 - TAKEN_SHARE)
    advice = "a control group or ulimit allows less than the machine has" if limited else ""
    yield _noted("host memory", f"{size_text(free)} of {size_text(memory.total)} free", advice)
    if SHARED_MEMORY.is_dir():  # NCCL and data loaders put their buffers there
        shared = shutil.disk_usage(SHARED_MEMORY)
        advice = "start the container with --shm-size=8g or --ipc=host" if shared.free < LITTLE_SHARED_BYTES else ""
        found = f"{size_text(shared.free)} of {size_text(shared.total)} free in {SHARED_MEMORY}"
        yield _noted("shared memory", found, advice)


def _disk(offload_dir: str | None) -> Check:
    folder = Path(offload_dir or tempfile.gettempdir())
    what = "disk tier" if offload_dir else "disk tier (temporary folder)"
    if not folder.is_dir():
        return Check(what, str(folder), BAD, "no such folder")
    if not os.access(folder, os.W_OK):
        return Check(what, str(folder), BAD, "not writable: choose another folder")
    kind, free = file_system(folder), free_disk_bytes(str(folder))
    found = f"{folder}: {kind or 'unknown file system'}, {size_text(free)} free"
    if kind in MEMORY_FILE_SYSTEMS:
        advice = f"{kind} is memory: offloading there saves none; set --zero-offload-dir to a folder on a disk"
        return Check(what, found, BAD if offload_dir else NOTE, advice)
    return _noted(what, found, "little space: set --zero-offload-dir" if free < LITTLE_DISK_BYTES else "")


def _accelerate() -> Check:
    """Check what `accelerate launch` does without further flags."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    folder, what = Path(os.environ.get("HF_HOME") or cache) / "accelerate", "accelerate launch"
    names = ("default_config.yaml", "default_config.json")
    path = next((folder / name for name in names if (folder / name).exists()), None)
    if path is None:
        return Check(what, "no default configuration: uses all GPUs of this machine, else one process", GOOD)
    try:
        values = read_settings(path)
    except ConfigError as error:
        return Check(what, str(path), BAD, str(error))
    kind, count = str(values.get("distributed_type", "NO")), values.get("num_processes", 1)
    if kind in _ENGINES:
        advice = f"translate it (hf-zero migrate {path}), then set distributed_type: MULTI_GPU"
        return Check(what, f"{path}: {_ENGINES[kind]}, {count} processes", BAD, advice)
    precision = values.get("mixed_precision", "no")
    return Check(what, f"{path}: {kind}, {count} processes, mixed precision {precision}", GOOD)
