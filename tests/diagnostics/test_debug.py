"""`debug=True`: wrong numbers are named on every rank."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hf_zero as zero

pytestmark = pytest.mark.gloo
STAGES = (0, 1, 2, 3)
AT = 2
"""The step that a fault is in: before it two are right."""


class Poison(torch.autograd.Function):
    """Hands its input on; what goes back is infinite where it is told so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, armed: bool) -> Tensor:
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (grad * float("inf") if ctx.armed else grad), None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.armed = self.breaks = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        if self.breaks:
            hidden = hidden / (hidden - hidden)
        return x + self.down(Poison.apply(hidden, self.armed))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 5)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass
class Run:
    """What a fault has its hands on."""

    rank: int
    model: Net
    optimizer: torch.optim.Optimizer
    engine: zero.Engine
    batch: Tensor
    loss: Callable[[Tensor], Tensor] = lambda loss: loss
    before_step: Callable[[], object] = lambda: None


def write(run: Run) -> None:
    weight = run.model.blocks[1].up.weight
    if run.rank == 1:
        if run.engine.config.stage == 3:
            weight.data = torch.full(weight.shape, 0.25, dtype=weight.dtype)
        else:
            with torch.no_grad():
                weight[3, 3] += 1.0


def lr(run: Run) -> None:
    run.optimizer.param_groups[1]["lr"] = 0.1 if run.rank == 0 else 0.2


def option(run: Run) -> None:
    run.optimizer.param_groups[1]["kept"].fill_(run.rank)


def freeze(run: Run) -> None:
    run.model.blocks[2].down.requires_grad_(run.rank == 0)


def count(run: Run) -> None:
    if run.rank == 1:
        for state in run.optimizer.state.values():
            if "step" in state:
                state["step"] += 1


def buffer(run: Run) -> None:
    if run.rank == 1:
        run.model.scale.data.mul_(1.5)


def batch(run: Run) -> None:
    if run.rank == 1:
        run.batch[0, 0] = float("nan")


def loss(run: Run) -> None:
    if run.rank == 1:
        run.loss = lambda loss: loss * float("nan")


def output(run: Run) -> None:
    run.model.blocks[1].breaks = run.rank == 0


def backward(run: Run) -> None:
    run.model.blocks[1].armed = run.rank == 1


def gradient(run: Run) -> None:
    run.before_step = lambda: run.model.head.bias.grad.mul_(float("nan"))  # in the last rank's slice


def later(run: Run) -> None:
    """After a backward of other values that are not finite, whose gradients were cleared."""
    run.model(run.batch * (float("nan") if run.rank == 1 else 1.0)).sum().backward()
    run.optimizer.zero_grad()
    gradient(run)


def update(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] = float("inf")


MISMATCH, NUMBERS = "RankMismatchError", "NumericsError"
FAULTS: dict[str, tuple[Callable[[Run], None], str, str]] = {
    "write": (
        write,
        MISMATCH,
        rf"step {AT}: parameter 'blocks.1.up.weight' (of unit 'blocks.1' )?is not",
    ),
    "lr": (lr, MISMATCH, rf"step {AT}: 'lr' of the optimizer's group 1 .* \(0.1 on rank 0, 0.2 on rank 1\)"),
    "option": (option, MISMATCH, rf"step {AT}: 'kept' of the optimizer's group 1 .* \(0.0 on rank 0, 1.0 on rank 1\)"),
    "freeze": (
        freeze,
        MISMATCH,
        rf"step {AT}: requires_grad of parameter 'blocks.2.down.\w+' .* \(True on rank 0, False on",
    ),
    "count": (
        count,
        MISMATCH,
        rf"step {AT}: the optimizer's 'step' of parameter '[\w.]+' .* \(2.0 on rank 0, 3.0 on rank 1\)",
    ),
    "buffer": (
        buffer,
        MISMATCH,
        rf"step {AT}: buffer 'scale' \(float32 \(8,\)\) is not on rank 1 .*through `.data`",
    ),
    "batch": (
        batch,
        NUMBERS,
        rf"step {AT}, on rank 0: the gradient of .*First seen on rank 1: the model's inputs \(this rank's batch\) "
        "have NaN; on rank 0 all was finite until gradients were averaged",
    ),
    "loss": (
        loss,
        NUMBERS,
        rf"step {AT}, .*First seen on rank 1: this rank's own gradient of .* is NaN; on rank 0 all was finite",
    ),
    "output": (
        output,
        NUMBERS,
        rf"step {AT}, .*First seen on rank 0: the output of unit 'blocks.1', of finite inputs, is \w+",
    ),
    "backward": (
        backward,
        NUMBERS,
        rf"step {AT}, .*First seen on rank 1: .*of unit 'blocks.1' .*on rank 0 all was",
    ),
    "gradient": (
        gradient,
        NUMBERS,
        rf"step {AT}, .*'head.bias' of unit .* is NaN. .*changed gradients after the reduction",
    ),
    "later": (later, NUMBERS, rf"step {AT}, .*changed gradients after the reduction"),
    "update": (update, NUMBERS, rf"step {AT}, .*Its gradient was finite: the step of AdamW made it"),
}
"""Name -> fault, class of the error, what it says."""


def rows(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(4, 8, generator=generator), torch.randint(0, 5, (4,), generator=generator)


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    groups = [{"params": params[:4], "lr": 0.05}, {"params": params[4:], "lr": 0.1}]
    return torch.optim.AdamW(groups)


def caught(rank: int, fault: str, config: zero.ZeroConfig, dtype: str, accumulation: int) -> tuple[str, str, int]:
    """Class and text of the error, and the step under way; of a run with one fault."""
    model = Net()
    optimizer = optimizer_for(model)
    if fault == "option":  # a tensor, which is written in place
        optimizer.param_groups[1]["kept"] = torch.zeros(())
    engine = zero.shard(model, optimizer, config, mixed_precision=dtype)
    for step in range(AT + 2):
        try:
            run = Run(rank, model, optimizer, engine, torch.empty(0))
            for micro in range(accumulation):
                run.batch, labels = rows(step, micro, rank)
                last = micro == accumulation - 1
                if step == AT and micro == 0:
                    FAULTS[fault][0](run)
                with contextlib.nullcontext() if last else engine.no_sync():
                    run.loss(cross_entropy(model(run.batch), labels)).backward()
            run.before_step()
            optimizer.step()
            optimizer.zero_grad()
        except zero.ZeroError as error:
            return type(error).__name__, str(error), step
    engine.detach()
    return "", "", -1


def catch(
    rank: int, world: int, faults: tuple[str, ...], config: zero.ZeroConfig, dtype: str, accumulation: int
) -> Any:
    return {fault: caught(rank, fault, config, dtype, accumulation) for fault in faults}


def quoted() -> dict[str, str]:
    """The messages in docs/RELIABILITY.md, by fault; the same at every stage."""
    page = (Path(__file__).parents[2] / "docs" / "RELIABILITY.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^`(\w+)` on one rank, `debug=True`:\n\n```text\n(.*?)\n```", page, re.S | re.M))


def test_messages_are_quoted():
    """The comparison below is not passed by finding none."""
    assert quoted()
    assert {*quoted()} <= {*FAULTS}


def check(answers: list[dict[str, tuple[str, str, int]]]) -> None:
    for fault, (kind, text, step) in answers[0].items():
        _, wanted, pattern = FAULTS[fault]
        assert kind == wanted, (fault, kind, text)
        assert re.search(pattern, text, re.S), (fault, text)
        page = quoted().get(fault)
        assert page is None or text == page, fault
        assert step == AT, (fault, step, text)
        assert all(other[fault] == (kind, text, step) for other in answers[1:]), fault


@pytest.mark.parametrize(
    "stage", [0, pytest.param(1, marks=pytest.mark.wide), pytest.param(2, marks=pytest.mark.wide), 3]
)
def test_faults_are_named_on_every_rank(two, stage):
    config = zero.ZeroConfig(stage=stage, debug=True)
    check(two.run(catch, tuple(FAULTS), config, "no", 1))


@pytest.mark.parametrize(
    "stage", [0, pytest.param(1, marks=pytest.mark.wide), pytest.param(2, marks=pytest.mark.wide), 3]
)
def test_faults_are_named_under_bf16_with_accumulation(two, stage):
    config = zero.ZeroConfig(stage=stage, debug=True)
    check(two.run(catch, ("write", "batch", "output", "backward", "buffer"), config, "bf16", 2))


@pytest.mark.parametrize("stage", [1, 3])
def test_faults_are_named_with_an_offloaded_optimizer(two, stage):
    config = zero.ZeroConfig(stage=stage, debug=True, offload_optimizer="cpu")
    check(two.run(catch, ("write", "count", "batch", "update"), config, "bf16", 1))


@pytest.mark.parametrize("stage", STAGES)
def test_options_are_compared_without_debug(two, stage):
    check(two.run(catch, ("lr", "option"), zero.ZeroConfig(stage=stage), "no", 1))


def test_one_process(pools):
    config = zero.ZeroConfig(stage=2, debug=True)
    check(pools[1].run(catch, ("update", "gradient"), config, "no", 2))
