"""Real ranks for tests: processes that stay up, each group of them one gloo world, every call under a time limit."""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import multiprocessing as mp
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait
from typing import Any

from torch.distributed import TCPStore

IMPORTED = ("torch", "accelerate", "transformers.trainer", "hf_zero.huggingface.training_arguments")
"""What the one process imports that ranks are forked from: 4 s of a core, which every rank would need for itself."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""What libraries read when they are imported, in that process and in every rank."""
ON_CPU = {
    **ENVIRONMENT,
    "ACCELERATE_USE_CPU": "true",
    "CUDA_VISIBLE_DEVICES": "",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""For programs that are started as users start them."""


def forking() -> Any:
    """The context whose processes are forked from one that has imported `IMPORTED` and has done nothing else."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED])
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


class RankFailure(AssertionError):
    """A rank raised, or did not answer in time. Carries every rank's traceback, the first to fail first."""


def _serve(rank: int, world: int, port: int, pipe: Any, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    if world > 1:  # as torchrun sets them: accelerate counts ranks by these
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    import torch.distributed as dist

    gc.freeze()  # `IMPORTED` stays: to look at half a million objects in each collection takes 0.2 s
    torch.set_num_threads(1)
    if world > 1:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=20))
    while True:
        call = pipe.recv()
        if call is None:
            return
        function, args = call
        try:
            torch.manual_seed(0)
            pipe.send(("ok", function(rank, world, *args)))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))


class RankPool:
    """`world` processes. A failure or a timeout ends them all; the next call starts new ones, at once.

    `executed`: they are not forked, but execute Python anew, so that what `environment` tells the C library and modules that
    read it when they are imported holds.
    """

    def __init__(self, world: int, executed: bool = False, environment: Mapping[str, str] = ENVIRONMENT) -> None:
        self.world = world
        self._executed = executed
        self._environment = environment
        self._ranks: list[tuple[Any, Any]] = []
        self._store: Any = None

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """`function(rank, world, *args)` on every rank; their results in rank order."""
        if not self._ranks:
            self._start()
        for _, pipe in self._ranks:
            pipe.send((function, args))
        deadline = time.monotonic() + timeout_s
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        answers: list[Any] = [("error", f"no answer within {timeout_s:.0f} s")] * self.world
        order: list[int] = []
        while waiting and (ready := wait([*waiting], max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, OSError):
                    self._ranks[rank][0].join(1)
                    answers[rank] = ("error", f"died with exit code {self._ranks[rank][0].exitcode}")
                order.append(rank)
                # Ranks that wait for one that failed never answer: after a first error the rest get a few seconds.
                if answers[rank][0] == "error":
                    deadline = min(deadline, time.monotonic() + 5.0)
        order += waiting.values()
        errors = [f"--- rank {rank}\n{answers[rank][1]}" for rank in order if answers[rank][0] == "error"]
        if errors:
            self.stop()
            raise RankFailure("\n".join(errors))
        return [value for _, value in answers]

    def _start(self) -> None:
        context = mp.get_context("spawn") if self._executed else forking()
        port = 0
        if self.world > 1:
            # The store is here, not in rank 0: its port is free, because the store itself has opened it.
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = self._store.port
        for rank in range(self.world):
            here, there = context.Pipe()
            process: Any = context.Process(
                target=_serve, args=(rank, self.world, port, there, self._environment), daemon=True
            )
            process.start()
            there.close()
            self._ranks.append((process, here))

    def stop(self) -> None:
        for process, _ in self._ranks:
            process.kill()
        for process, _ in self._ranks:
            process.join(5)
        self._ranks = []
        self._store = None


def on_ranks(world: int | None = 2, timeout_s: float = 120.0) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test of `function(rank, world, ...)`, which runs on every rank. What it returns is what is wrong.

    Args:
        world: ranks; None: the test has `world` as a parameter. All others of the function are fixtures or parameters.
    """

    def register(function: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(pools: dict[int, RankPool], **given: Any) -> None:
            ranks = given.pop("world", world)
            found = pools[ranks].run(_run, function.__module__, function.__name__, given, timeout_s=timeout_s)
            assert not any(found), found

        known = inspect.signature(function).parameters
        shown = [inspect.Parameter("pools", inspect.Parameter.KEYWORD_ONLY)]
        shown += [
            known[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in [*known][1 + (world is not None) :]
        ]
        test.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        return test

    return register


def _run(rank: int, world: int, module: str, name: str, given: dict[str, Any]) -> Any:
    """The module has the test by this name: what it is made of is pickled by neither."""
    return getattr(importlib.import_module(module), name).__wrapped__(rank, world, **given)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
