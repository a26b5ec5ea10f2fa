"""Failed steps beyond what plain training promises: undone to the bit, refused when half done, made in spite of signals."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_zero as zero
from tests.kit.pool import RankPool
from tests.models import LanguageModel, ids, token_loss
from tests.programs.failures import Bomb, Failed, throw

pytestmark = pytest.mark.gloo
PLACES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "host": {"stage": 2, "offload_optimizer": "cpu"},
    "host, parameters too": {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
    "disk": {"stage": 1, "offload_optimizer": "disk"},
    "disk, parameters too": {"stage": 3, "offload_optimizer": "disk", "offload_params": "disk"},
    "in backward": {"stage": 2, "offload_optimizer": "cpu", "step_in_backward": True},
}


class Custom(torch.optim.Optimizer):
    """Momentum with a counter, as users write it. Calls `event` once, after `first` parameters, at a place in the next."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "made": 0})
        self.seen = [0]
        self.events: list[tuple[int, str, Callable[[], object]]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["made"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                self._meet("before")
                state = self.state[p]
                if not state:
                    state.update(step=0, momentum=torch.zeros_like(p))
                state["step"] += 1
                self._meet("counted")
                state["momentum"].mul_(0.9).add_(p.grad)
                self._meet("in the middle")
                p.add_(state["momentum"], alpha=-group["lr"])
                self.seen[0] += 1

    def plan(self, after: int, where: str, event: Callable[[], object]) -> None:
        self.events.append((self.seen[0] + after, where, event))

    def _meet(self, where: str) -> None:
        for event in [each for each in self.events if each[:2] == (self.seen[0], where)]:
            self.events.remove(event)
            event[2]()


def interrupt(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Loop:
    def __init__(self, rank: int, place: str, folder: str, is_custom: bool = False) -> None:
        torch.manual_seed(0)
        self.rank, self.model = rank, LanguageModel(tied=True)
        params = self.model.parameters()
        self.optimizer: Any = Custom(params) if is_custom else torch.optim.AdamW(params, lr=1e-2)
        self.hooked: Callable[[], object] = lambda: None
        self.optimizer.register_step_post_hook(lambda *_: self.hooked())
        config = zero.ZeroConfig(offload_dir=folder if "disk" in place else None, **PLACES[place])
        self.engine = zero.shard(self.model, self.optimizer, config)

    def micro(self, step: int) -> None:
        tokens = ids(self.rank, step)
        token_loss(self.model(tokens), tokens).backward()

    def bomb(self) -> Any:
        return self.model.body.blocks[0].up.register_forward_hook(lambda module, args, out: Bomb.apply(out))

    def steps(self, *steps: int) -> None:
        for step in steps:
            with self.engine.no_sync():
                self.micro(2 * step)
            self.micro(2 * step + 1)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def values(self) -> list[Any]:
        state = self.optimizer.state_dict()
        groups = [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]]
        entries = [entry[key] for _, entry in sorted(state["state"].items()) for key in sorted(entry)]
        return [*self.model.state_dict().values(), *entries, *groups]


def equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        a.is_meta == b.is_meta and (a.is_meta or torch.equal(a, b)) if isinstance(a, Tensor) else a == b
        for a, b in zip(one, other)
    )


@contextmanager
def heard(number: signal.Signals, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


# Undone, or made ----------------------------------------------------------------------------------------------------------


def before_the_first_parameter(loop: Loop) -> None:
    loop.optimizer.plan(0, "before", throw)
    loop.steps(99)


def after_a_counter(loop: Loop) -> None:
    """State and options that are not tensors have changed already."""
    loop.optimizer.plan(0, "counted", throw)
    loop.steps(99)


def interrupted_in_forward(loop: Loop) -> None:
    with loop.model.body.blocks[1].up.register_forward_pre_hook(interrupt):
        loop.steps(99)


def interrupted_in_the_arithmetic(loop: Loop) -> None:
    loop.engine.wait_for_steps()  # the step before counts, too
    loop.optimizer.plan(1, "in the middle", interrupt)
    loop.steps(99)
    loop.engine.wait_for_steps()


def interrupted_in_a_pre_hook(loop: Loop) -> None:
    with loop.optimizer.register_step_pre_hook(interrupt):
        loop.steps(99)


def interrupted_in_a_post_hook(loop: Loop) -> None:
    loop.hooked = interrupt
    loop.steps(99)


UNDONE = (before_the_first_parameter, after_a_counter, interrupted_in_forward)
MADE = (interrupted_in_the_arithmetic, interrupted_in_a_pre_hook, interrupted_in_a_post_hook)
IN_MEMORY = (before_the_first_parameter, after_a_counter)
"""Elsewhere the step has begun by then."""


def fails(rank: int, world: int, place: str, folder: str) -> list[str]:
    wrong = []
    expected = {}
    for is_made in (False, True):
        clean = Loop(rank, place, folder, is_custom=True)
        clean.steps(0, 1, *((99,) if is_made else ()), 2)
        expected[is_made] = clean.values()
    for fail in (*UNDONE, *MADE):
        if fail in IN_MEMORY and not place.startswith("stage"):
            continue
        loop = Loop(rank, place, folder, is_custom=True)
        loop.steps(0, 1)
        with heard(signal.SIGINT, signal.default_int_handler), pytest.raises((Failed, KeyboardInterrupt)):
            fail(loop)
        loop.hooked = lambda: None
        loop.optimizer.zero_grad()
        loop.steps(2)
        if not equal(loop.values(), expected[fail in MADE]):
            wrong.append(fail.__name__)
    return wrong


@pytest.mark.parametrize("place", ["stage 0", "stage 2", "stage 3", "host", "disk, parameters too"])
def test_a_failed_step_is_undone_or_made(two: RankPool, tmp_path: Any, place: str) -> None:
    assert two.run(fails, place, str(tmp_path)) == [[], []]


def one_interrupted(rank: int, world: int, folder: str) -> None:
    """Ctrl-C in a step of one rank: the step is made on all, and that rank hears of it afterwards."""
    for place in ("stage 1", "stage 3", "host"):
        clean, loop = (Loop(rank, place, folder) for _ in range(2))
        clean.steps(*range(4))
        with heard(signal.SIGINT, signal.default_int_handler):
            for step in range(4):
                is_hit = rank == 1 and step == 2
                loop.hooked = interrupt if is_hit else lambda: None
                try:
                    loop.steps(step)
                except KeyboardInterrupt:
                    assert is_hit
                    loop.optimizer.zero_grad()
                else:
                    assert not is_hit
        assert equal(loop.values(), clean.values()), place


def test_an_interrupt_on_one_rank_leaves_all_at_the_same_step(two: RankPool, tmp_path: Any) -> None:
    two.run(one_interrupted, str(tmp_path))


# Half done ----------------------------------------------------------------------------------------------------------------


def half(rank: int, world: int, place: str, folder: str, where: str) -> None:
    loop, clean = (Loop(rank, place, folder, is_custom=where != "backward") for _ in range(2))
    clean.steps(*range(4))
    loop.steps(0, 1)
    loop.engine.save(f"{folder}/ckpt")

    def broken() -> None:
        if where == "backward":
            with loop.bomb():
                loop.micro(99)
        loop.optimizer.plan(where == "before", where, throw)
        loop.steps(99)
        loop.micro(100)  # waits for what is updated behind the step

    with pytest.raises((Failed, zero.StateError, zero.TierError)):
        broken()
    for use in (
        lambda: loop.micro(2), loop.model.state_dict, lambda: loop.engine.save(f"{folder}/other"),
        loop.optimizer.step, loop.optimizer.state_dict,
    ):  # fmt: skip
        with pytest.raises(zero.StateError, match=r"stopped half-way.*Load a checkpoint"):
            use()
    loop.engine.load(f"{folder}/ckpt")
    loop.optimizer.zero_grad()
    loop.steps(2, 3)
    assert equal(loop.values(), clean.values())


@pytest.mark.parametrize("place", ["stage 0", "stage 1", "stage 3", "host", "disk, parameters too", "in backward"])
def test_half_a_step_is_refused_until_a_checkpoint_is_loaded(two: RankPool, tmp_path: Any, place: str) -> None:
    for where in ("backward",) if place == "in backward" else ("before", "in the middle"):
        two.run(half, place, str(tmp_path), where)


def forward_with_steps_in_backward(rank: int, world: int) -> None:
    clean, loop = (Loop(rank, "in backward", "") for _ in range(2))
    clean.steps(0, 1)
    loop.steps(0)
    with loop.model.body.blocks[1].up.register_forward_pre_hook(throw), pytest.raises(Failed):
        loop.steps(99)
    loop.optimizer.zero_grad()
    loop.steps(1)
    assert equal(loop.values(), clean.values())


def test_a_failed_forward_is_no_half_step_in_backward(two: RankPool) -> None:
    two.run(forward_with_steps_in_backward)


def backward_again(rank: int, world: int, place: str, folder: str) -> None:
    """A first backward that raised leaves nothing of its own. Together with a second, earlier gradients are lost."""
    clean, loop = (Loop(rank, place, folder) for _ in range(2))
    clean.steps(0, 1, 2)
    loop.steps(0)
    with loop.engine.no_sync():
        with loop.bomb(), pytest.raises(Failed):
            loop.micro(2)
        loop.micro(2)
    loop.micro(3)
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    with loop.engine.no_sync():
        loop.micro(4)
    with loop.bomb(), pytest.raises(Failed):
        loop.micro(5)
    for use in (loop.optimizer.step, lambda: loop.engine.clip_grad_norm_(1.0)):
        with pytest.raises(zero.StateError, match=r"a backward of this step raised.*Call zero_grad\(\)"):
            use()
    loop.optimizer.zero_grad()
    loop.steps(2)
    assert equal(loop.values(), clean.values())


@pytest.mark.parametrize("place", ["stage 0", "stage 2", "stage 3", "host", "disk, parameters too"])
def test_a_failed_backward_may_be_tried_again_alone(two: RankPool, tmp_path: Any, place: str) -> None:
    two.run(backward_again, place, str(tmp_path))


def scaled(rank: int, world: int, stage: int) -> None:
    """The scaler is user code's; a step that raised before it wrote anything is made again by `scaler.step`."""
    results = []
    for does_fail in (False, True):
        torch.manual_seed(0)
        model = LanguageModel()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        zero.shard(model, optimizer, zero.ZeroConfig(stage=stage), mixed_precision="fp16")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
        for step in range(6):
            tokens = ids(rank, step)
            if does_fail and step % 2:
                hook = model.body.blocks[1].up.register_forward_hook(lambda module, args, out: Bomb.apply(out))
                with hook, pytest.raises(Failed):
                    scaler.scale(token_loss(model(tokens), tokens)).backward()
                optimizer.zero_grad()
            scaler.scale(token_loss(model(tokens), tokens)).backward()
            if does_fail:
                handle = optimizer.register_step_pre_hook(throw)
                try:
                    scaler.step(optimizer)  # a step that overflowed is not called
                except Failed:
                    handle.remove()
                    scaler.step(optimizer)
                handle.remove()
            else:
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        entries = optimizer.state_dict()["state"].values()
        results.append(
            [*model.state_dict().values(), *(v for each in entries for v in each.values()), scaler.get_scale()]
        )
    assert equal(*results), results[0][-1]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_scaler(two: RankPool, stage: int) -> None:
    two.run(scaled, stage)


# Signals ------------------------------------------------------------------------------------------------------------------


def signals(rank: int, world: int) -> None:
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


def test_signals_wait_for_the_end_of_the_step(pools: dict[int, RankPool]) -> None:
    pools[1].run(signals)


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


@pytest.mark.slow
@pytest.mark.timeout(960)
@pytest.mark.parametrize("place", [place for place in PLACES if place != "in backward"])
def test_many_interrupts_at_any_moment(pools: dict[int, RankPool], tmp_path: Any, place: str) -> None:
    seed = random.randrange(1 << 30)
    assert pools[1].run(at_any_moment, place, str(tmp_path), seed, 400, timeout_s=900) == [[]]


Line = tuple[str, int]


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
        if event == "line":
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


@pytest.mark.slow
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
