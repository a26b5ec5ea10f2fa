"""Failed steps beyond what plain training promises: undone to the bit, refused when half done, made in spite of signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero as zero
from tests.kit.bits import equal
from tests.kit.pool import RankPool, on_ranks
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


class Events:
    """What copies of an optimizer share with it: an object of user code."""

    def __init__(self) -> None:
        self.seen = 0
        self.planned: list[tuple[int, str, Callable[[], object]]] = []


class Custom(torch.optim.Optimizer):
    """Momentum with a counter, as users write it. Calls `event` once, after `first` parameters, at a place in the next."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "made": 0})
        self.events = Events()

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
                self.events.seen += 1

    def plan(self, after: int, where: str, event: Callable[[], object]) -> None:
        self.events.planned.append((self.events.seen + after, where, event))

    def _meet(self, where: str) -> None:
        for event in [each for each in self.events.planned if each[:2] == (self.events.seen, where)]:
            self.events.planned.remove(event)
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
    loop.engine.wait_for_host_steps()  # the step before counts, too
    loop.optimizer.plan(1, "in the middle", interrupt)
    loop.steps(99)
    loop.engine.wait_for_host_steps()


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


@pytest.mark.parametrize("place", ["stage 0", "stage 2", "stage 3", "host", "disk, parameters too"])
@on_ranks()
def test_a_failed_step_is_undone_or_made(rank: int, world: int, place: str, tmp_path: Path) -> list[str]:
    wrong = []
    expected = {}
    for is_made in (False, True):
        clean = Loop(rank, place, tmp_path, is_custom=True)
        clean.steps(0, 1, *((99,) if is_made else ()), 2)
        expected[is_made] = clean.values()
    for fail in (*UNDONE, *MADE):
        if fail in IN_MEMORY and not place.startswith("stage"):
            continue
        loop = Loop(rank, place, tmp_path, is_custom=True)
        loop.steps(0, 1)
        with heard(signal.SIGINT, signal.default_int_handler), pytest.raises((Failed, KeyboardInterrupt)):
            fail(loop)
        loop.hooked = lambda: None
        loop.optimizer.zero_grad()
        loop.steps(2)
        if not equal(loop.values(), expected[fail in MADE]):
            wrong.append(fail.__name__)
    return wrong


@on_ranks()
def test_an_interrupt_on_one_rank_leaves_all_at_the_same_step(rank: int, world: int, tmp_path: Path) -> None:
    """Ctrl-C in a step of one rank: the step is made on all, and that rank hears of it afterwards."""
    for place in ("stage 1", "stage 3", "host"):
        clean, loop = (Loop(rank, place, tmp_path) for _ in range(2))
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


@on_ranks()
def test_gradients_are_clipped_after_a_step_that_raised(rank: int, world: int, tmp_path: Path) -> None:
    """After a step that raised, the groups' gradients have the norm over all ranks, as before it."""
    for place in ("stage 2", "stage 3"):
        clean, loop = (Loop(rank, place, tmp_path, is_custom=True) for _ in range(2))
        norms = []
        for each in (clean, loop):
            each.micro(0)
            if each is loop:
                each.optimizer.plan(0, "before", throw)
                with pytest.raises(Failed):
                    each.optimizer.step()
            params = [param for group in each.optimizer.param_groups for param in group["params"]]
            norms.append(torch.nn.utils.clip_grad_norm_(params, 1e9))
        assert torch.equal(*norms), (place, norms)


# Half done ----------------------------------------------------------------------------------------------------------------


def half(rank: int, world: int, place: str, folder: str, where: str, is_used: bool) -> None:
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
        if is_used:
            loop.micro(100)  # waits for what is updated behind the step

    with pytest.raises((Failed, zero.StateError, zero.TierError)) if is_used else suppress(Failed):
        broken()
    uses = (
        lambda: loop.micro(2), loop.model.state_dict, lambda: loop.engine.save(f"{folder}/other"),
        loop.optimizer.step, loop.optimizer.state_dict,
    )  # fmt: skip
    for use in uses if is_used else ():
        with pytest.raises(zero.StateError, match=r"stopped half-way.*Load a checkpoint"):
            use()
    loop.engine.load(f"{folder}/ckpt")
    loop.optimizer.zero_grad()
    loop.steps(2, 3)
    assert equal(loop.values(), clean.values())


@pytest.mark.parametrize("place", ["stage 0", "stage 1", "stage 3", "host", "disk, parameters too", "in backward"])
def test_half_a_step_is_refused_until_a_checkpoint_is_loaded(two: RankPool, tmp_path: Any, place: str) -> None:
    wheres = {"in backward": ["backward"], "disk, parameters too": ["in the middle"]}
    for where in wheres.get(place, ["before", "in the middle"]):
        two.run(half, place, str(tmp_path), where, True)


@pytest.mark.parametrize("place", ["stage 1", "host", "host, parameters too", "disk, parameters too"])
def test_a_checkpoint_is_loaded_at_once_after_half_a_step(two: RankPool, tmp_path: Any, place: str) -> None:
    two.run(half, place, str(tmp_path), "before", False)


class Walks(torch.optim.SGD):
    """Steps over the model instead of its groups."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.model = model

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.model.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)


def test_a_step_over_offloaded_state_that_reads_the_model() -> None:
    """The thread that steps waited for itself."""
    model = torch.nn.Linear(2, 2)
    optimizer = Walks(model)
    zero.shard(model, optimizer, zero.ZeroConfig(stage=2, offload_optimizer="cpu"))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(zero.StateError, match="the optimizer reads the model in its step"):
        optimizer.step()
