"""Where a rank stands, as it tells the others.

What is said of user code comes from the stack of the main thread: the innermost frame outside of this package, PyTorch, and
what is built on them.
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

NO_GRAD = "a forward without gradients"
AFTER_STEP = "what follows the step"
SAME_STEPS = "Every rank needs the same number of batches, and an exception on one rank ends all"
DIVERGED = (
    "Every rank makes the same calls in the same order. Look for a collective inside `if rank == 0`, and for a batch, a step "
    "or a layer that one rank left out"
)
SILENT = (
    "The process with the store is stopped or overloaded. Find out why, then start all ranks again from the last "
    "checkpoint"
)
NETWORK = (
    "The network between the hosts is cut, or a host is down. Restore it, then start all ranks again from the last "
    "checkpoint"
)


@dataclass(frozen=True)
class Place:
    """Where a rank stands, as it publishes it."""

    rank: int
    step: int
    phase: str
    waits_for: str
    """Empty: it waits for no rank."""
    purpose: str
    """What it has called: `state_dict()`, `saving to …`; empty within a step."""
    code: str
    """File, line and function of the user's program; once it has ended, the error that ended it."""
    progress: int
    """Counts looks between which the rank got further."""
    ended: bool = False
    """Its process is about to end, or it let go of what the others wait for."""
    answers: int = 0
    """The number of the question that this answers: a rank that does not answer is stopped, or holds the GIL."""
    silent_s: float = 0.0
    """Since when it has not answered; filled in by who asks."""
    engine: int = 0
    """The number of the engine whose model it is in, or was in last."""
    newest: int = 0
    """The highest number of an engine that this rank has had."""
    engines: tuple[int, ...] = ()
    """Numbers of the engines that it still has."""
    among: str = ""
    """Which part of the ranks takes part in what it waits for. Ranks of two such parts may wait for the same."""

    def __str__(self) -> str:
        if self.ended:
            return f"has ended, or let go of the model, after {self.step} steps" + (
                f": {self.code}" if self.code else ""
            )
        doing = f"in {self.purpose}" if self.purpose else f"in {self.phase} of step {self.step}"
        waits = f"waits for {self.waits_for}{self.among}" if self.waits_for else "waits for no other rank"
        silent = (
            f"; no answer for {self.silent_s:.0f} s: its process is stopped, or in a call that lets no other thread run"
            if self.silent_s
            else ""
        )
        return f"{doing}, {waits}; its program is at {self.code}{silent}"

    def has_let_go(self, engine: int) -> bool:
        """Nobody will answer here for engine `engine` (0: for what is of no engine)."""
        return self.ended or (0 < engine <= self.newest and engine not in self.engines)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: bytes) -> Place:
        found: dict[str, Any] = json.loads(text)
        found["engines"] = tuple(found["engines"])
        return cls(**found)


def explain(
    what: str,
    places: Sequence[Place | None],
    advice: str,
    hosts: Sequence[str] = (),
    silent: Mapping[int, float] | None = None,
) -> str:
    """Join what happened, where each rank stands, and what to do.

    Args:
        places: by rank; None: nothing was ever heard of it.
        hosts: names by rank; left out where all are the same.
        silent: seconds since ranks could be reached, of those that cannot be.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(places):
        host = f" on {hosts[rank]}" if len({*hosts}) > 1 else ""
        text = "nothing heard of it" if place is None else str(place)
        if silent and rank in silent:
            text = f"cannot be reached for {silent[rank]:.0f} s" + (
                f"; last known: {text}" if place is not None else ""
            )
        groups.setdefault((host, text), []).append(rank)
    lines = [f"{ranks_text(ranks)}{host}: {text}" for (host, text), ranks in groups.items()]
    return f"{what}.\n  " + "\n  ".join(lines) + f"\n{advice}"


def _main_frames() -> Iterator[FrameType]:
    """Of the main thread, the innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def user_code() -> str:
    """File, line and function of the main thread's innermost frame that is the user's."""
    frame = next(filter(_is_users, _main_frames()), None) or next(_main_frames(), None)
    if frame is None:
        return "an unknown place"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def torch_wait() -> str:
    """The call of torch.distributed that the main thread is in, if it is the program's own."""
    frame = next(_main_frames(), None)
    inside = frame is not None and _module(frame).startswith("torch.distributed")
    return f"torch.distributed, in {frame.f_code.co_name}" if frame is not None and inside else ""


def last_error() -> str:
    """What ended this program, where an exception did."""
    error = getattr(sys, "last_value", None)
    return "" if error is None else f"{type(error).__name__}: {error}"


def _is_users(frame: FrameType) -> bool:
    package = _module(frame).partition(".")[0]
    return package not in _LIBRARIES and not frame.f_code.co_filename.startswith((_STANDARD, "<"))


_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep


def is_debugged() -> bool:
    """Whether a debugger holds the main thread."""
    return any(_module(frame).partition(".")[0] in _DEBUGGERS for frame in _main_frames())


@dataclass(frozen=True)
class Work:
    """What this process and its children have done so far: data loaders and compilers work there."""

    processor_s: float
    moved_bytes: int
    """Read from files and written to them."""
    in_disk_wait: bool
    """A thread waits for a disk: an fsync, a page that is not in memory."""

    @classmethod
    def now(cls) -> Work:
        # Not counted: what the thread that calls this has used, for it looks more often where `stall_s` is small.
        processor_s, moved_bytes, in_disk_wait = time.process_time() - time.thread_time(), 0, False
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
                    in_disk_wait |= process.status() == psutil.STATUS_DISK_SLEEP
        return cls(processor_s, moved_bytes, in_disk_wait)

    def goes_on(self, before: Work, within_s: float) -> bool:
        return (
            self.processor_s - before.processor_s > max(_JIFFIES_S, 0.05 * within_s)
            or self.moved_bytes - before.moved_bytes > _MOVED_BYTES
            or self.in_disk_wait
        )


_JIFFIES_S = 0.02  # times of children come in steps of this length
_MOVED_BYTES = 1 << 20  # log lines and the like are no progress


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
