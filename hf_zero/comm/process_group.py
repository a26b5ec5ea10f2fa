"""The default process group: its ranks, its device, and the threads that all wires over it share."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from ..errors import ConfigError
from .direct import Reader
from .inflight import Call
from .watch import Watch
from .watcher import Watcher

_LAUNCHED = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables in which torchrun, accelerate and the MPI launchers pass the number of processes that they start."""
_INTERRUPT_TAG = (1 << 31) - 1

# One thread per process group: a rank may wait in one wire for another rank that is in a call of another wire.
_WATCHERS: WeakKeyDictionary[dist.ProcessGroup, Watcher] = WeakKeyDictionary()
_READERS: WeakKeyDictionary[dist.ProcessGroup, Reader] = WeakKeyDictionary()


def default_group() -> dist.ProcessGroup:
    """Return the default process group."""
    return dist.distributed_c10d._get_default_group()


def rank_count() -> tuple[int, str]:
    """Return the number of ranks, and the launcher's variable if no process group is open."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), ""
    for name in _LAUNCHED:
        value = os.environ.get(name, "")
        if value.isdecimal() and int(value) > 1:
            return int(value), name
    return 1, ""


def check_ranks() -> int:
    """Return the number of ranks.

    Raises:
        ConfigError: a launcher started several processes, and this one has no process group.
    """
    ranks, variable = rank_count()
    if variable:
        raise ConfigError(
            f"{variable} is {ranks}, but no process group is open: every rank would train a model of its own. Call "
            "torch.distributed.init_process_group() first, or build the Accelerator or TrainingArguments first (on CPU ranks "
            f"with cpu=True or use_cpu=True). To run each process alone, unset {variable}"
        )
    return ranks


def home_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device of buffers that a process group (None: the default one) can send: CPU if its backend can."""
    if (
        dist.is_available()
        and dist.is_initialized()
        and torch.device("cpu") not in (group or default_group())._device_types
    ):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return the time limit of a process group's collectives; None if its backend does not know it."""
    backend: Any = group._get_backend(group._device_types[0])
    return getattr(getattr(backend, "options", None), "_timeout", None)


def watcher_of(group: dist.ProcessGroup, stall_s: float | None = None) -> Watcher:
    """Return the stall watch of a process group. `stall_s`: its limit from now on; None: unchanged."""
    found = _WATCHERS.get(group)
    if found is None:
        store: Any = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):  # under the prefixes
            store = store.underlying_store
        endpoint = (store.host, store.port) if isinstance(store, dist.TCPStore) else None
        found = Watcher(group, endpoint, dist.get_rank(), dist.get_world_size(), stall_s)
        _WATCHERS[group] = found
    elif stall_s is not None:
        found.stall_s = stall_s
    return found


def reader_of() -> Reader:
    """Return the thread of the default process group that reads other ranks' memory."""
    group = default_group()
    found = _READERS.get(group)
    if found is None:
        found = _READERS[group] = Reader(group)
    return found


def open_in_thread(
    group: dist.ProcessGroup, watch: Watch, wait: Callable[[Callable[[], None]], None], call: Callable[..., Any]
) -> Any:
    """Open process groups in another thread: torch waits there for other ranks, and no call breaks that wait.

    Args:
        group: its time limit, which user code has set, is theirs.
        watch: its interrupts end the wait.
        wait: waits for a blocking function.
        call: opens the groups, with a `timeout`.

    Raises:
        StallError: the wait was interrupted, or another rank is lost.
    """
    opening = Call(partial(call, timeout=timeout_of(group)))
    Thread(target=opening.run, name="hf_zero opens a group", daemon=True).start()

    def finish() -> None:  # must raise inside `wait`: it translates the errors of lost connections
        opening.ended.wait()
        if opening.error is not None:
            raise opening.error

    watch.interrupts.append(opening.ended.set)
    try:
        wait(finish)
    finally:
        watch.interrupts.remove(opening.ended.set)
    if opening.result is None:  # interrupted
        raise watch.error()
    return opening.result


def interrupt(of: ref[dist.ProcessGroup], device: torch.device) -> None:
    """Break all waits over a group, in any thread."""
    group = of()
    if group is None:
        return
    if device.type != "cpu":
        group.abort()
        return
    # gloo has no abort, but a receive that times out closes all connections of its group. If its own connection is closed
    # already it fails at once and closes no other, so every peer is tried.
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([torch.empty(1, device="cpu")], peer, _INTERRUPT_TAG).wait(timedelta(milliseconds=1))
