"""Faults at a chosen system call: what a disk, a kernel or a `kill -9` can do to a process that writes files.

The calls are counted by wrapping the functions of `os` in one process, so that every point between two of them can be hit.
"""

from __future__ import annotations

import builtins
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

KINDS = ("open", "pwrite", "fsync", "rename", "replace", "unlink", "mkdir", "rmdir")
Call = tuple[str, str]
"""(kind, path); `create` is the built-in `open` for writing."""


@contextmanager
def calls(before: Callable[[int, Call, Any], Any] = lambda *_: None) -> Iterator[list[Call]]:
    """The calls made, in order. `before(index, call, arguments)` runs before each; it may raise, kill, or return what the
    call is to answer instead of being made."""
    log: list[Call] = []
    real = {kind: getattr(os, kind) for kind in KINDS}
    real_open = builtins.open

    def wrap(kind: str) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else str(args[-1])
            path = str(args[0]) if kind in ("open", "mkdir") else path
            log.append((kind, path))
            answer = before(len(log) - 1, log[-1], args)
            return real[kind](*args, **options) if answer is None else answer

        return wrapped

    def create(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if "w" in mode and not isinstance(file, int):
            log.append(("create", str(file)))
            before(len(log) - 1, log[-1], (file,))
        return real_open(file, mode, *args, **options)

    try:
        for kind in KINDS:
            setattr(os, kind, wrap(kind))
        builtins.open = create  # type: ignore[assignment]
        yield log
    finally:
        builtins.open = real_open
        for kind, function in real.items():
            setattr(os, kind, function)


Answer = Callable[..., Any]
"""What is called instead of a function of the system: gets the real one before its arguments."""


@contextmanager
def instead(of: ModuleType, **answers: Answer) -> Iterator[None]:
    """In this process, functions of `os` or another module of the system give these answers: `instead(os, fsync=...)`."""
    real = {name: getattr(of, name) for name in answers}
    try:
        for name, answer in answers.items():
            setattr(of, name, partial(answer, real[name]))
        yield
    finally:
        for name, function in real.items():
            setattr(of, name, function)


def fails(errno: int) -> Answer:
    def answer(real: Any, *args: Any, **options: Any) -> Any:
        raise OSError(errno, os.strerror(errno))

    return answer


def kill_at(index: int) -> Callable[[int, Call, Any], None]:
    """`kill -9` this process before call `index`; a write is first done by half."""
    pwrite = os.pwrite

    def before(now: int, call: Call, args: Any) -> None:
        if now == index:
            if call[0] == "pwrite":
                pwrite(args[0], args[1][: len(args[1]) // 2], args[2])
            os.kill(os.getpid(), signal.SIGKILL)

    return before


def fail_at(index: int, errno: int) -> Callable[[int, Call, Any], None]:
    """Call `index` fails."""

    def before(now: int, call: Call, args: Any) -> None:
        if now == index:
            raise OSError(errno, os.strerror(errno), call[1])

    return before


class Forked:
    """A function in a copy of this process, for two minutes at most. The process must not have threads that hold locks."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._read, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                signal.alarm(120)
                os.close(self._read)
                answer = pickle.dumps(function(*args))
                os.write(write, answer)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(write)

    def wait(self) -> tuple[int, Any]:
        """(exit status as of `subprocess`, what the function returned or None)."""
        parts = []
        while part := os.read(self._read, 1 << 16):
            parts.append(part)
        os.close(self._read)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return status, pickle.loads(b"".join(parts)) if status == 0 else None
