"""What a process holds: memory, descriptors, threads, files it has made, keys in the process group's store."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

import torch.distributed as dist


@dataclass(frozen=True)
class Health:
    """One look.

    Attributes:
        resident_bytes: of the process (VmRSS).
        threads: of the operating system; python_threads: those that Python knows.
        store_keys: of the default process group; 0 where there is none.
        files: in the given folders and in the system's temporary folder, folders counted, but no checkpoint's own.
        ledger_bytes: what the engine says that it holds.
    """

    step: int
    resident_bytes: int
    descriptors: int
    threads: int
    python_threads: int
    store_keys: int
    files: int
    ledger_bytes: int

    @staticmethod
    def look(step: int, folders: Sequence[Path], ledger_bytes: int) -> Health:
        gc.collect()
        keys = dist.distributed_c10d._get_default_store().num_keys() if dist.is_initialized() else 0
        found = [path for folder in (*folders, Path(tempfile.gettempdir())) for path in folder.glob("*")]
        return Health(
            step,
            memory("VmRSS"),
            len(os.listdir("/proc/self/fd")),
            _threads(),
            threading.active_count(),
            keys,
            sum("checkpoint" not in path.name for path in found),
            ledger_bytes,
        )


def memory(field: str) -> int:
    """Bytes of this process, by a name of /proc/self/status."""
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) << 10


def peak_growth_bytes(work: Callable[[], object]) -> int:
    """By how much resident memory rises above where it was."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = memory("VmRSS")
    work()
    return memory("VmHWM") - before


def _threads(looks: int = 5, pause_s: float = 0.01) -> int:
    """The fewest of some looks: a thread that has been joined is the system's for a moment more."""
    counts = []
    for _ in range(looks):
        counts.append(len(os.listdir("/proc/self/task")))
        time.sleep(pause_s)
    return min(counts)


def growth(looks: Sequence[Health], after: int) -> dict[str, int]:
    """By name, how far the median of the second half lies over that of the first, from step `after` on.

    Medians: what is held or let go for a moment (a save under way, a connection that is made anew) is no growth.
    """
    seen = [look for look in looks if look.step >= after]
    half = len(seen) // 2
    names = [name for name in Health.__dataclass_fields__ if name != "step"]
    first, second = (
        {name: median_low(getattr(look, name) for look in part) for name in names}
        for part in (seen[:half], seen[half:])
    )
    return {name: second[name] - first[name] for name in names}
