"""What a process holds: memory, descriptors, threads, files it has made, keys in the process group's store."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist


@dataclass(frozen=True)
class Health:
    """One look.

    Attributes:
        resident_bytes: of the process (VmRSS).
        threads: of the operating system; python_threads: those that Python knows.
        store_keys: of the default process group; 0 where there is none.
        files: in the run's folder and in the system's temporary folder, folders counted, but no checkpoint's own.
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
    def look(step: int, folder: Path, ledger_bytes: int) -> Health:
        gc.collect()
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        keys = dist.distributed_c10d._get_default_store().num_keys() if dist.is_initialized() else 0
        found = [*folder.glob("*"), *folder.glob("checkpoints/*"), *Path(tempfile.gettempdir()).glob("*")]
        return Health(
            step,
            int(status["VmRSS"].split()[0]) * 1024,
            len(os.listdir("/proc/self/fd")),
            int(status["Threads"]),
            threading.active_count(),
            keys,
            sum("checkpoint" not in path.name for path in found),
            ledger_bytes,
        )


def growth(looks: Sequence[Health], after: int) -> dict[str, int]:
    """By name, how far the lowest of the second half lies over the lowest of the first, from step `after` on.

    The lowest: what is held for a while (a save under way) goes again, and only what is never given back stays under it.
    """
    seen = [look for look in looks if look.step >= after]
    half = len(seen) // 2
    names = [name for name in Health.__dataclass_fields__ if name != "step"]
    lowest = [
        {name: min(getattr(look, name) for look in part) for name in names} for part in (seen[:half], seen[half:])
    ]
    return {name: lowest[1][name] - lowest[0][name] for name in names}
