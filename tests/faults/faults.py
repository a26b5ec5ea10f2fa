"""Faults at a system call on files below a folder: it fails, ends early, or the process is killed or stopped there."""

from __future__ import annotations

import builtins
import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from tests.kit.injection import Answer, instead

CALLS: Mapping[str, tuple[str, ...]] = {
    "read": ("preadv", "pread"),
    "write": ("pwrite", "pwritev"),
    "allocate": ("posix_fallocate",),
    "fsync": ("fsync",),
    "rename": ("rename", "replace"),
    "open": ("open", "create"),
    "mkdir": ("mkdir",),
    "remove": ("unlink", "rmdir"),
}
"""By class; `create` is the built-in `open` for writing."""
ANY = tuple(name for names in CALLS.values() for name in names)
CHANGES = tuple(name for name in ANY if name not in CALLS["read"])


def _path(name: str, args: Any, options: Any) -> str:
    target = args[0] if name in ("open", "mkdir") or isinstance(args[0], int) else args[-1]
    if isinstance(target, int):
        return os.readlink(f"/proc/self/fd/{target}")
    at = options.get("dir_fd")
    return os.path.join(os.readlink(f"/proc/self/fd/{at}") if at is not None else "", os.fspath(target))


@contextmanager
def faults(
    folder: Path, names: tuple[str, ...], at: int | None = None, kind: str = ""
) -> Iterator[list[tuple[str, str]]]:
    """Count calls of this process, in any thread; yield their names and files, in order.

    Args:
        at: the number of the call that meets `kind`; None: every one does.
        kind: `error`, `nameless` (an error that lacks the file), `ends` (nothing moved), `short` (half moved), `kill` (after
            half of a write), `stop`; empty: none.
    """
    seen: list[tuple[str, str]] = []
    lock = threading.Lock()

    def meet(call: Callable[..., Any], name: str, path: str, args: Any, options: Any) -> Any:
        if not path.startswith(f"{folder}/"):
            return call(*args, **options)
        with lock:
            number = len(seen)
            seen.append((name, path))
        if not kind or at not in (None, number):
            return call(*args, **options)
        if kind in ("error", "nameless"):
            code = (errno.ENOSPC, errno.EIO)[number % 2]
            raise OSError(code, os.strerror(code), *([path] if kind == "error" else []))
        if kind == "ends":
            return 0
        if kind in ("short", "kill") and name in ("pwrite", "pwritev", "preadv"):
            is_list = name != "pwrite"
            view = memoryview(args[1][0] if is_list else args[1]).cast("B")
            half = view[: max(len(view) // 2 // 4096 * 4096, min(len(view), 4096))]
            moved = call(args[0], [half] if is_list else half, args[2])
            if kind == "short":
                return moved
        if kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        return call(*args, **options)

    def answer(name: str) -> Answer:
        return lambda real, *args, **options: meet(real, name, _path(name, args, options), args, options)

    def create(real: Any, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if "w" not in mode or isinstance(file, int):
            return real(file, mode, *args, **options)
        return meet(real, "create", os.fspath(file), (file, mode, *args), options)

    with instead(os, **{name: answer(name) for name in names if name != "create"}):
        with instead(builtins, open=create) if "create" in names else nullcontext():
            yield seen
