"""Units that stay gathered from a forward to its backward: within a budget some whole, some in parts among a node's ranks.

Four ranks are two nodes of two, by the names of their hosts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.models import gpt2, sgd
from tests.oracle import Run, program
from tests.programs.accessors import full_parameter, set_full_parameter
from tests.programs.usual import FP32

BUDGET = {
    "ranks": (2, 4),
    "stage": (3,),
    "tier": ("none", "cpu/cpu", "disk/disk"),
    "replicas": (1,),
    "kept": (False,),
    "deferred": (False,),
}
ROOM = 400_000
"""Bytes for parts of some units, and for some whole."""


def deep() -> nn.Module:
    return gpt2(n_layer=4, n_embd=64)


@contextlib.contextmanager
def within_budget(
    run: Run, make: Callable[[], nn.Module] = deep, optimize: Any = sgd, room: int = ROOM, **config: Any
) -> Iterator[tuple[Any, torch.optim.Optimizer]]:
    """Units of `room` bytes stay gathered. At the end none is."""
    model = run.build(make)
    optimizer = optimize(model)
    if run.is_plain:
        yield run.shard(model, optimizer), optimizer
        return
    room //= 1 if run.setting.precision == "fp32" else 2
    engine = run.engine_of(run.shard(model, optimizer, keep_gathered=room, **config))
    assert engine.context.kept, "no units are kept"
    yield model, optimizer
    assert all(unit.state.value == "SHARDED" for unit in engine.units), "something is still gathered"


def loss_of(run: Run, model: Any, step: int) -> Tensor:
    rows = run.ids(step)
    loss = model(input_ids=rows, labels=rows).loss
    run.see(loss, f"loss {step}")
    return loss


def update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def one_step(run: Run, model: Any, optimizer: torch.optim.Optimizer, *steps: int) -> None:
    for step in steps:
        loss_of(run, model, step).backward()
        update(optimizer)


@program(only=BUDGET, reference="average")
def between_forward_and_backward(run: Run) -> None:
    """Other forwards, evaluations, a second backward, none at all."""
    with within_budget(run) as (model, optimizer):
        one_step(run, model, optimizer, 0, 1)
        for step in (2, 3, 4):  # accumulation
            loss_of(run, model, step).backward()
        update(optimizer)
        for defer in (False, True):
            with run.no_sync(model, defer=defer):
                loss_of(run, model, 5).backward()
            one_step(run, model, optimizer, 6)
        (loss_of(run, model, 7) + loss_of(run, model, 8)).backward()
        update(optimizer)
        loss = loss_of(run, model, 9)
        with torch.no_grad():
            loss_of(run, model, 10)
        model.state_dict()
        loss.backward(retain_graph=True)
        loss.backward()
        update(optimizer)
        loss_of(run, model, 11)  # without a backward
        one_step(run, model, optimizer, 12)
        loss_of(run, model, 13)  # nor this one: what it has gathered is old after the next step
        optimizer.step()
        with torch.no_grad():
            loss_of(run, model, 14)
        for reentrant in (True, False):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            one_step(run, model, optimizer, 15)
        model.gradient_checkpointing_disable()
        with contextlib.suppress(IndexError):
            model(input_ids=torch.full((1, 4), 10**6), labels=torch.zeros(1, 4, dtype=torch.long))
        loss_of(run, model, 16)
        model.load_state_dict({name: value.clone() * 0.5 for name, value in model.state_dict().items()})
        one_step(run, model, optimizer, 17)


@program(only={**BUDGET, **FP32, "wire": ("int8",)}, reference="average", loose=5.0)  # biases that hardly move
def by_codes(run: Run) -> None:
    with within_budget(run) as (model, optimizer):
        one_step(run, model, optimizer, 0, 1)
        loss = loss_of(run, model, 4)
        with torch.no_grad():
            loss_of(run, model, 5)
        loss.backward()
        update(optimizer)
        loss_of(run, model, 6)
        model.load_state_dict({name: value.clone() * 0.5 for name, value in model.state_dict().items()})
        one_step(run, model, optimizer, 7)


@program(only={**BUDGET, **FP32}, reference="average", loose=10.0)  # weights that jump amplify rounding
def written_between_forward_and_backward(run: Run) -> None:
    """Backward computes with the values that are there by then."""
    with within_budget(run) as (model, optimizer):
        weight = model.transformer.h[1].mlp.c_fc.weight  # read here: later it would be gathered

        def step(number: int, act: Callable[[], Any]) -> None:
            loss = loss_of(run, model, number)
            act()
            loss.backward()
            update(optimizer)

        def values(most: float) -> Tensor:
            return torch.linspace(-most, most, weight.numel()).view(weight.shape)

        def assign(most: float) -> None:
            weight.data = values(most)

        def assign_and_read() -> None:
            assign(0.04)
            run.see(full_parameter(run, weight), "what was assigned")

        def halve_as_one() -> None:
            with run.gathered([weight], modifier_rank=0):
                if run.rank == 0 or run.is_plain:
                    weight.data.mul_(0.5)

        def offload_and_reload() -> None:
            if run.engine_of(model) is not None:
                run.engine_of(model).offload_states()
                run.engine_of(model).reload_states()

        def speak() -> None:
            run.see(model.generate(torch.zeros(1, 2, dtype=torch.long), max_new_tokens=3, do_sample=False), "words")

        def fail() -> None:
            with contextlib.suppress(IndexError):
                model(input_ids=torch.full((1, 4), 10**6), labels=torch.zeros(1, 4, dtype=torch.long))

        one_step(run, model, optimizer, 0, 1)

        def halve() -> None:
            weight.data.mul_(0.5)

        acts = [
            halve, halve,
            lambda: assign(0.02), assign_and_read,
            lambda: set_full_parameter(run, weight, values(0.03)), halve_as_one,
            lambda: run.save(model), halve, offload_and_reload, halve, speak, halve, fail,
        ]  # fmt: skip
        for number, act in enumerate(acts, start=2):
            step(number, act)
        speak()
        loss_of(run, model, 20)
        run.load(model)
        one_step(run, model, optimizer, 21, 22)


@program(only=BUDGET, reference="average")
def frozen_in_between(run: Run) -> None:
    """A block is frozen and trained again: spans of the model change."""
    with within_budget(run) as (model, optimizer):
        block = model.transformer.h[1]
        one_step(run, model, optimizer, 0, 1)
        for trains in (False, True):
            loss_of(run, model, 2)  # what its parts are of is no more
            block.requires_grad_(trains)
            one_step(run, model, optimizer, 3, 4)
        first, second = loss_of(run, model, 9), loss_of(run, model, 10)  # two backwards
        first.backward()
        second.backward()
        update(optimizer)
        for number in (11, 12):  # a block by itself
            out = model.transformer.h[3](run.inputs(number, 2, 4, 64))
            (out[0] if isinstance(out, tuple) else out).sum().backward()
            update(optimizer)
            one_step(run, model, optimizer, number)


@program(only={**BUDGET, "tier": ("cpu", "disk", "cpu/cpu")})
def stepped_in_backward(run: Run) -> None:
    with within_budget(run, step_in_backward=True) as (model, optimizer):
        one_step(run, model, optimizer, *range(5))


@program(only={**BUDGET, "tier": ("none",)}, reference="average")
def backward_that_raises(run: Run) -> None:
    """On every rank; and is made again."""
    with within_budget(run) as (model, optimizer):
        one_step(run, model, optimizer, 0, 1)

        def refuse(grad: Tensor) -> None:
            raise ArithmeticError

        handle = model.transformer.h[1].mlp.register_forward_hook(
            lambda _, args, out: (out.register_hook(refuse), None)[1]
        )
        with contextlib.suppress(ArithmeticError):
            loss_of(run, model, 2).backward()
        handle.remove()
        optimizer.zero_grad()
        run.forget_gradients()
        one_step(run, model, optimizer, 3, 4)


# Blocks -----------------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Blocks, one of which runs without a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6))
        self.without: int | None = None

    def forward(self, rows: Tensor) -> Tensor:
        for place, block in enumerate(self.blocks):
            with torch.set_grad_enabled(place != self.without):
                more = block(rows)
            rows = rows + more
        return rows


class Shrinks(nn.Module):
    """Writes its weight in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            self.inner.weight.mul_(0.9)
        return rows + torch.tanh(self.inner(rows))


class Odd(nn.Module):
    """Blocks of an odd number of elements, which no node divides where one rank owns each matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(65, 65, bias=False) for _ in range(6))

    def forward(self, rows: Tensor) -> Tensor:
        for block in self.blocks:
            rows = torch.tanh(block(rows))
        return rows


def on_features(run: Run, model: Any, optimizer: torch.optim.Optimizer, step: int, width: int = 64) -> None:
    loss = model(run.inputs(step, 3, width)).square().mean()
    loss.backward()
    run.see(loss, f"loss {step}")
    update(optimizer)


@program(only=BUDGET, reference="average")
def without_a_graph_on_one_rank(run: Run) -> None:
    """In each step another rank keeps other parts than the rest."""
    with within_budget(run, Residual, room=40_000) as (model, optimizer):
        for step in range(6):
            model.without = 2 + step % 3 if step > 1 and run.rank == step % run.world else None
            on_features(run, model, optimizer, step)


@program(only=BUDGET, reference="average")
def evaluated_without_a_graph_on_one_rank(run: Run) -> None:
    """Between a forward and its backward; the other ranks drop what they computed."""
    with within_budget(run, Residual, room=40_000) as (model, optimizer):
        for step in range(4):
            loss = model(run.inputs(step, 3, 64)).square().mean()
            with torch.set_grad_enabled(run.rank != step % run.world):
                model(run.inputs(step, 2, 64))
            loss.backward()
            run.see(loss, f"loss {step}")
            update(optimizer)


@program(only={**BUDGET, **FP32}, reference="average")
def weights_that_a_forward_writes(run: Run) -> None:
    make = lambda: nn.Sequential(*(Shrinks() for _ in range(6)))  # noqa: E731
    with within_budget(run, make, room=40_000) as (model, optimizer):
        for step in range(4):
            on_features(run, model, optimizer, step)


@program(only={**BUDGET, **FP32})
def spans_that_no_node_divides(run: Run) -> None:
    adafactor = lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2)  # noqa: E731
    with within_budget(run, Odd, adafactor, room=40_000) as (model, optimizer):
        for step in range(4):
            on_features(run, model, optimizer, step, 65)
