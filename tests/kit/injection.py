"""Functions of the system that answer otherwise; copies of this process. Faults at a chosen call: tests/faults/faults.py."""

from __future__ import annotations

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
