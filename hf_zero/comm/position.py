"""The position of a rank: step, phase, what it waits for, and where user code is.

User code is read from the stack of the main thread: the innermost frame outside of this package, PyTorch, and libraries built
on them.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import psutil

_LIBRARIES = ("torch", "hf_zero", "accelerate", "transformers", "peft", "trl")
_DEBUGGERS = ("bdb", "pdb", "pydevd", "debugpy")

SAME_STEPS = "Every rank needs the same number of batches, and an exception on one rank ends all"
DIVERGED = (
    "Every rank makes the same calls in the same order. Look for a collective inside `if rank == 0`, and for a batch, a step "
    "or a layer that one rank left out"
)
SILENT = "Find out why that process does not answer, then start all ranks again from the last checkpoint"
NETWORK = "Restore the network or that host, then start all ranks again from the last checkpoint"


@dataclass(frozen=True)
class Position:
    """A rank's position, as it publishes it.

    Attributes:
        waits_for: empty if it waits for no rank.
        purpose: the call of user code that needs other ranks: `state_dict()`, `saving to …`; empty within a step.
        code: file, line and function of user code; after its end, the error that ended it.
        progress: number of checks at which the rank had made progress.
        ended: its process is about to end, or has released what the other ranks wait for.
        answers: number of the question that this answers.
        silent_s: seconds since its last answer; set by the rank that asks.
        engine: number of the engine that it is in, or was in last.
        newest: highest number of an engine that it has had.
        engines: numbers of the engines that it still has.
        among: the ranks that take part in what it waits for, if these are not all.
    """

    rank: int
    step: int
    phase: str
    waits_for: str
    purpose: str
    code: str
    progress: int
    ended: bool = False
    answers: int = 0
    silent_s: float = 0.0
    engine: int = 0
    newest: int = 0
    engines: tuple[int, ...] = ()
    among: str = ""

    def __str__(self) -> str:
        if self.ended:
            error = f": {self.code}" if self.code else ""
            return f"has ended, or released the model, after {self.step} steps{error}"
        doing = f"in {self.purpose}" if self.purpose else f"in {self.phase} of step {self.step}"
        waits = f"waits for {self.waits_for}{self.among}" if self.waits_for else "waits for no other rank"
        silent = f"; no answer for {self.silent_s:.0f} s" if self.silent_s else ""
        return f"{doing}, {waits}; user code is at {self.code}{silent}"

    def has_released(self, engine: int) -> bool:
        """Return True if this rank will not answer for an engine any more. 0: for no engine in particular."""
        return self.ended or (0 < engine <= self.newest and engine not in self.engines)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: bytes) -> Position:
        found: dict[str, Any] = json.loads(text)
        found["engines"] = tuple(found["engines"])
        return cls(**found)


def explain(
    what: str,
    positions: Sequence[Position | None],
    advice: str,
    hosts: Sequence[str] = (),
    silent: Mapping[int, float] | None = None,
) -> str:
    """Join what happened, the position of each rank, and what to do.

    Args:
        what: what happened.
        positions: by rank; None: unknown.
        advice: what to do.
        hosts: names by rank; omitted if all are the same.
        silent: rank -> seconds since it could be reached, of ranks that cannot be.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, position in enumerate(positions):
        host = f" on {hosts[rank]}" if len({*hosts}) > 1 else ""
        text = "no answer so far" if position is None else str(position)
        if silent and rank in silent:
            text = f"cannot be reached for {silent[rank]:.0f} s" + (
                f"; last known: {text}" if position is not None else ""
            )
        groups.setdefault((host, text), []).append(rank)
    lines = [f"{ranks_text(ranks)}{host}: {text}" for (host, text), ranks in groups.items()]
    return f"{what}.\n  " + "\n  ".join(lines) + f"\n{advice}"


def _main_frames() -> Iterator[FrameType]:
    """Yield the frames of the main thread, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def user_code() -> str:
    """Return file, line and function of the innermost frame of user code in the main thread."""
    frame = next(filter(_is_users, _main_frames()), None) or next(_main_frames(), None)
    if frame is None:
        return "an unknown place"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def torch_wait() -> str:
    """Return the call of torch.distributed that the main thread is in, if user code made it."""
    frame = next(_main_frames(), None)
    inside = frame is not None and _module(frame).startswith("torch.distributed")
    return f"torch.distributed, in {frame.f_code.co_name}" if frame is not None and inside else ""


def last_error() -> str:
    """Return the exception that ended this process; empty: none."""
    error = getattr(sys, "last_value", None)
    return "" if error is None else f"{type(error).__name__}: {error}"


def _is_users(frame: FrameType) -> bool:
    package = _module(frame).partition(".")[0]
    return package not in _LIBRARIES and not frame.f_code.co_filename.startswith((_STANDARD, "<"))


_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep


def is_debugged() -> bool:
    """Return True if a debugger holds the main thread."""
    return any(_module(frame).partition(".")[0] in _DEBUGGERS for frame in _main_frames())


@dataclass(frozen=True)
class Work:
    """Work of this process and its children (data loaders, compilers) so far.

    Attributes:
        processor_s: processor time.
        moved_bytes: bytes read from files and written to them.
        in_disk_wait: a thread waits for a disk: an fsync, a page that is not in memory.
    """

    processor_s: float
    moved_bytes: int
    in_disk_wait: bool

    @classmethod
    def now(cls) -> Work:
        # Without the calling thread: it checks more often if `stall_s` is small.
        processor_s, moved_bytes, in_disk_wait = time.process_time() - time.thread_time(), 0, False
        with suppress(psutil.Error, OSError):  # for example, no descriptor left
            this = psutil.Process()
            for process in (this, *this.children(recursive=True)):
                with suppress(psutil.Error, OSError):
                    if process is not this:
                        times = process.cpu_times()
                        processor_s += times.user + times.system
                    if hasattr(process, "io_counters"):  # not on macOS
                        counted = process.io_counters()
                        moved_bytes += counted.read_bytes + counted.write_bytes
                    in_disk_wait |= process.status() == psutil.STATUS_DISK_SLEEP
        return cls(processor_s, moved_bytes, in_disk_wait)

    def has_grown(self, before: Work, within_s: float) -> bool:
        """Return True if the process has done something since `before`, `within_s` earlier."""
        return (
            self.processor_s - before.processor_s > max(_JIFFIES_S, 0.05 * within_s)
            or self.moved_bytes - before.moved_bytes > _MOVED_BYTES
            or self.in_disk_wait
        )


_JIFFIES_S = 0.02  # times of children come in steps of this length
_MOVED_BYTES = 1 << 20  # fewer, such as log lines, are no progress


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
