"""The position of a rank: where user code is, step, unit, and what the rank waits for. It is what a StallError lists."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

import psutil

_LIBRARIES = ("torch", "hf_zero", "accelerate", "transformers", "peft", "trl")
_DEBUGGERS = ("bdb", "pdb", "pydevd", "debugpy")
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_TORCH = "torch.distributed, in "
_JIFFIES_S = 0.02  # processor times of children come in steps of this length
_MOVED_BYTES = 1 << 20  # log lines and the like are no progress


@dataclass(frozen=True)
class Position:
    """Where one thread of a rank stands.

    Attributes:
        waits_for: empty if the rank waits for no other rank.
        purpose: the call of user code that needs other ranks, such as `state_dict()`; empty within a step.
        code: file, line and function of user code.
        waited_s: seconds in the current wait, torch's own collectives included.
        still_s: seconds without progress.
        engine: number of the engine that the rank is in, or was in last.
    """

    step: int
    phase: str
    waits_for: str
    purpose: str
    code: str
    waited_s: float
    still_s: float
    engine: int

    def __str__(self) -> str:
        doing = f"in {self.purpose}" if self.purpose else f"in {self.phase} of step {self.step}"
        waits = f"waits for {self.waits_for}" if self.waits_for else "waits for no other rank"
        return f"{doing}, {waits}; its program is at {self.code}"

    @property
    def is_in_wire(self) -> bool:
        """True in a wait of this package; torch's own collectives do not count."""
        return bool(self.waits_for) and not self.waits_for.startswith(_TORCH)

    def is_with(self, other: Position | None) -> bool:
        """Return True if both ranks wait for the same: a long transfer may be under way."""
        if other is None:
            return False
        mine, theirs = ((p.waits_for, p.engine, p.step, p.purpose) for p in (self, other))
        return mine == theirs


def explain(what: str, positions: Mapping[int, str], hosts: Sequence[str], advice: str) -> str:
    """Join what happened, the position of each rank, and what to do.

    Args:
        hosts: names by rank; left out where all are the same.
    """
    groups: dict[str, list[int]] = {}
    suffix = {rank: f" on {host}" for rank, host in enumerate(hosts)} if len({*hosts}) > 1 else {}
    for rank, text in positions.items():
        groups.setdefault(f"{suffix.get(rank, '')}: {text}", []).append(rank)
    lines = [f"{ranks_text(ranks)}{text}" for text, ranks in groups.items()]
    return f"{what}.\n  " + "\n  ".join(lines) + f"\n{advice}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


# The main thread ------------------------------------------------------------------------------------------------------


def _main_frames() -> Iterator[FrameType]:
    """Yield the frames of the main thread, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_users(frame: FrameType) -> bool:
    package = _module(frame).partition(".")[0]
    return package not in _LIBRARIES and not frame.f_code.co_filename.startswith((_STANDARD, "<"))


def user_code() -> str:
    """Return file, line and function of the innermost frame outside of libraries."""
    frame = next(filter(_is_users, _main_frames()), None) or next(_main_frames(), None)
    if frame is None:
        return "an unknown place"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def torch_wait() -> str:
    """Return the call of torch.distributed that the main thread is in, if user code made it."""
    frame = next(_main_frames(), None)
    inside = frame is not None and _module(frame).startswith("torch.distributed")
    return f"{_TORCH}{frame.f_code.co_name}" if frame is not None and inside else ""


def is_debugged() -> bool:
    """Return True if a debugger holds the main thread."""
    return any(_module(frame).partition(".")[0] in _DEBUGGERS for frame in _main_frames())


def last_error() -> str:
    """Return the exception that ended this process; empty: none."""
    error = getattr(sys, "last_value", None)
    return "" if error is None else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Work:
    """What this process and its children (data loaders, compilers) have done so far.

    Attributes:
        processor_s: processor time.
        moved_bytes: bytes read from files and written to them.
    """

    at_s: float
    processor_s: float
    moved_bytes: int

    @classmethod
    def now(cls) -> Work:
        # The calling thread's own time does not count: it looks more often where `stall_s` is small.
        processor_s, moved_bytes = time.process_time() - time.thread_time(), 0
        with suppress(psutil.Error, OSError):  # no descriptor left, say
            this = psutil.Process()
            for process in (this, *this.children(recursive=True)):
                with suppress(psutil.Error, OSError):
                    if process is not this:
                        times = process.cpu_times()
                        processor_s += times.user + times.system
                    if hasattr(process, "io_counters"):  # not on macOS
                        counted = process.io_counters()
                        moved_bytes += counted.read_bytes + counted.write_bytes
        return cls(time.perf_counter(), processor_s, moved_bytes)

    def has_grown(self, before: Work) -> bool:
        """Return True if the process has done something since `before`."""
        used_s, within_s = self.processor_s - before.processor_s, self.at_s - before.at_s
        return used_s > max(_JIFFIES_S, 0.05 * within_s) or self.moved_bytes - before.moved_bytes > _MOVED_BYTES
