"""Signals in a step: they wait for its end, and a handler that raises leaves the step undone or made, at any line."""

from __future__ import annotations

import dis
import gc
import itertools
import linecache
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import hf_zero as zero
from tests.kit.bits import equal
from tests.kit.pool import RankPool, on_ranks
from tests.models import LanguageModel, ids
from tests.regressions.test_failed_steps import PLACES, Loop, heard

pytestmark = pytest.mark.gloo


@on_ranks(1)
def test_signals_wait_for_the_end_of_the_step(rank: int, world: int) -> None:
    """They wait for the end of the step, but for a second one of a kind; handlers stay user code's, new ones too."""
    calls: list[str] = []
    loop = Loop(rank, "stage 3", "")

    def note(number: int, _: object) -> None:
        calls.append(signal.Signals(number).name)

    def late(number: int, frame: object) -> None:
        calls.append("set in the step")

    def hook() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGALRM)
        calls.append("hook")
        signal.signal(signal.SIGALRM, late)

    loop.hooked = hook
    with heard(signal.SIGTERM, note), heard(signal.SIGALRM, note):
        loop.steps(0)
        assert calls == ["SIGTERM", "hook", "SIGTERM", "set in the step"]
        assert signal.getsignal(signal.SIGALRM) is late


def at_any_moment(rank: int, world: int, place: str, folder: str, seed: int, rounds: int) -> list[str]:
    """A handler that raises comes at a random moment of a step; the loop checks whether the step was made.

    Continues until a third of the rounds were hit. The time of a step is measured in each round, and a step that was hit
    gets more at the next try: a slow machine would never let it end.
    """
    generator = random.Random(seed)
    clean, loop = (Loop(rank, place, folder) for _ in range(2))
    clean.steps(0, 1, 2)
    loop.steps(0, 1, 2)
    hit = 0
    with heard(signal.SIGALRM, signal.default_int_handler):
        for step in itertools.count(3):
            if step >= 3 + rounds and hit >= rounds // 3:
                return []
            started = time.perf_counter()
            clean.steps(step)
            step_s = time.perf_counter() - started
            while int(loop.optimizer.state_dict()["state"][0]["step"]) == step:
                try:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, generator.uniform(0.02, 1.3) * step_s)
                        loop.steps(step)
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    hit += 1
                    step_s *= 1.2
                loop.optimizer.zero_grad()
            if not equal(loop.values(), clean.values()):
                return [f"{place}, seed {seed}: step {step} differs after {hit} interrupts"]
    return []


@pytest.mark.parametrize("place", ["stage 2", "stage 3", "host, parameters too", "disk, parameters too"])
def test_interrupts_at_any_moment(pools: dict[int, RankPool], tmp_path: Any, place: str) -> None:
    assert pools[1].run(at_any_moment, place, str(tmp_path), random.randrange(1 << 30), 12) == [[]]


@on_ranks(1)
def test_interrupts_while_a_disk_reads(rank: int, world: int, tmp_path: Path) -> list[int]:
    """A unit that an interrupt left half read was used as it was; a late read wrote into memory that had been freed.

    A handler that raises comes while a forward waits for a slow read; the next forward begins while the disk still reads.

    Returns:
        The reads after which the next forward had other values.
    """
    clean, loop = (Loop(rank, "disk, parameters too", tmp_path) for _ in range(2))
    tokens, preadv, left, wrong = ids(rank, 9), os.preadv, [0], []

    def slow(*args: Any) -> int:
        read = preadv(*args)
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGALRM)
            time.sleep(0.2)
        return read

    with pytest.MonkeyPatch.context() as patch, heard(signal.SIGALRM, signal.default_int_handler):
        patch.setattr(os, "preadv", slow)
        for count in range(1, 7):
            for each in (clean, loop):
                each.steps(count)
            expected = clean.model(tokens)
            left[0] = count
            with suppress(KeyboardInterrupt):
                loop.model(tokens)
            left[0] = 0
            if not torch.equal(loop.model(tokens), expected):
                wrong.append(count)
    return wrong


Line = tuple[str, int]
UNHEARD = {dis.opmap[name] for name in ("NOP", "JUMP_FORWARD")}
LEAVES = {dis.opmap[name] for name in ("LOAD_CONST", "SWAP", "PUSH_EXC_INFO")}
"""What the end of a `with` begins with, which is on its first line."""


def hears_signals(frame: FrameType) -> bool:
    """Whether a signal may come before this instruction: Python hears none between the body of a `with` and `__exit__`."""
    operation = frame.f_code.co_code[frame.f_lasti]
    if operation in LEAVES:
        return not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")
    return operation not in UNHEARD


class Tracer:
    """Counts how often each line of the package is executed, and sends a signal before one of these times.

    Attributes:
        seen: times by line.
        was_sent: the line was come to.
    """

    def __init__(self, line: Line = ("", 0), time: int = 0) -> None:
        self.seen: Counter[Line] = Counter()
        self.was_sent, self._line, self._time = False, line, time

    def __enter__(self) -> Tracer:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._step if frame.f_globals.get("__name__", "").startswith("hf_zero.") else None

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and hears_signals(frame):
            line = frame.f_code.co_filename, frame.f_lineno
            self.seen[line] += 1
            if line == self._line and self.seen[line] == self._time:
                self.was_sent = True
                os.kill(os.getpid(), signal.SIGALRM)
        return self._step


def before_each_line(rank: int, world: int, place: str, folder: str, seed: int, stride: int) -> list[str]:
    """As `at_any_moment`: a handler that raises comes once before each line that a step of the package executes.

    Args:
        stride: only before every so many of these lines, in a random order.
    """
    generator = random.Random(seed)
    clean, loop = (Loop(rank, place, folder) for _ in range(2))
    for each in (clean, loop):
        each.steps(0, 1)
        with Tracer() as tracer:
            each.steps(2)
    lines = generator.sample(sorted(tracer.seen), len(tracer.seen))[::stride]
    sent = 0
    with heard(signal.SIGALRM, signal.default_int_handler):
        for step, line in enumerate(lines, 3):
            clean.steps(step)
            time = generator.randint(1, tracer.seen[line])
            while int(loop.optimizer.state_dict()["state"][0]["step"]) == step:
                try:
                    with Tracer(line, time) as found:
                        loop.steps(step)
                except KeyboardInterrupt:
                    time = 0  # the step is repeated without a signal
                sent += found.was_sent
                loop.optimizer.zero_grad()
            if not equal(loop.values(), clean.values()):
                return [f"{place}, seed {seed}: differs after an interrupt before {line}, time {time}"]
    return [] if sent > len(lines) // 2 else [f"{sent} interrupts before {len(lines)} lines"]


@pytest.mark.parametrize("place", ["stage 2", "stage 3", "host, parameters too", "disk, parameters too"])
def test_interrupts_before_lines(pools: dict[int, RankPool], tmp_path: Any, place: str) -> None:
    """A signal between the release of a unit's memory and the count of it ended the process in the next gather."""
    assert pools[1].run(before_each_line, place, str(tmp_path), random.randrange(1 << 30), 25) == [[]]


@pytest.mark.wide
@pytest.mark.timeout(960)
@pytest.mark.parametrize("place", [place for place in PLACES if place != "in backward"])
def test_interrupts_before_each_line(pools: dict[int, RankPool], tmp_path: Any, place: str) -> None:
    assert pools[1].run(before_each_line, place, str(tmp_path), random.randrange(1 << 30), 1, timeout_s=900) == [[]]


def test_hooks_that_an_interrupt_left_on_go_with_the_model() -> None:
    """torch calls no hook of a forward that Ctrl-C ends: saved tensors pass through its hooks until the next forward."""
    tokens = torch.arange(6).view(2, 3)

    def sharded() -> LanguageModel:
        model = LanguageModel()
        config = zero.ZeroConfig(stage=3, offload_params="cpu", offload_optimizer="cpu")  # releases on one rank, too
        zero.shard(model, torch.optim.AdamW(model.parameters()), config)
        return model

    def raise_interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def top() -> object:
        return torch._C._autograd._top_saved_tensors_default_hooks(True)

    before, gone = top(), sharded()
    gone.body.blocks[1].up.register_forward_pre_hook(raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        gone(tokens)
    assert top() is not None
    del gone
    gc.collect()
    for _ in range(3):  # their memory may lie where that of the first was
        sharded()(tokens).sum().backward()
        assert top() == before


@on_ranks()
def test_no_finalizer_of_a_step_is_python_code(rank: int, world: int) -> list[str]:
    """Saved tensors were in a `WeakSet`, whose callbacks were often the first code to run after a signal in a backward.

    Python code that runs in steps because an object is gone. Python drops what a handler raises there: Ctrl-C is lost.
    """
    found: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        caller = frame.f_back
        is_callback = "weakref" in code.co_filename and code.co_name in ("_remove", "remove", "__call__")
        if event == "call" and (is_callback or code.co_name == "__del__"):
            found.append(f"{code.co_filename}:{code.co_name}, in {caller and caller.f_code.co_name}")

    loop = Loop(rank, "stage 3", "")
    gc.collect()  # engines of tests before this one are not of its steps
    sys.setprofile(note)
    try:
        loop.steps(0, 1, 2)
    finally:
        sys.setprofile(None)
    return found[:3]


class Interrupted:
    """An object whose state is asked for when Ctrl-C comes, on rank 1 alone."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def state_dict(self) -> dict[str, Any]:
        if self._rank == 1:
            raise KeyboardInterrupt
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


@on_ranks()
def test_an_interrupt_of_one_rank_ends_a_save_on_all(rank: int, world: int, tmp_path: Path) -> None:
    engine = zero.shard(LanguageModel(), config=zero.ZeroConfig(stage=3))
    with pytest.raises(KeyboardInterrupt if rank == 1 else zero.CheckpointError, match="" if rank else "rank 1"):
        engine.save(tmp_path / "out", objects={"interrupted": Interrupted(rank)})
    assert not (tmp_path / "out").exists()
    engine.detach()
