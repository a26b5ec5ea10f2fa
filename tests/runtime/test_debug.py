"""`debug=True`: wrong numbers are named on every rank."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hf_zero as zero
from hf_zero.comm.group_wire import PairWire
from hf_zero.comm.inflight import Inflight
from hf_zero.runtime.transports import Roads

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


class Averaging(torch.optim.SGD):
    """Averages gradients by itself, as programs without DDP do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    dist.all_reduce(param.grad)
                    param.grad /= dist.get_world_size()
        return super().step(closure)


class Faulty(PairWire):
    """Once, one element of what arrives is another."""

    armed = False

    def reduce(self, source: Tensor, out: Tensor, tag: int, cuts: Sequence[int] = ()) -> Inflight:
        return self._spoilt(super().reduce(source, out, tag, cuts), out)

    def average(self, source: Tensor, out: Tensor, tag: int) -> Inflight:
        return self._spoilt(super().average(source, out, tag), out)

    def _spoilt(self, move: Inflight, out: Tensor) -> Inflight:
        if not self.armed:
            return move

        def finish() -> None:
            move.close()
            out[: out.numel() // 2].mul_(1.5)

        return Inflight((), (), finish)


@dataclass
class Run:
    """What a fault has its hands on."""

    rank: int
    model: Net
    optimizer: torch.optim.Optimizer
    engine: zero.Engine
    wire: list[Faulty]
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


def write_after_backward(run: Run) -> None:
    run.before_step = lambda: write(run)


def lr(run: Run) -> None:
    run.optimizer.param_groups[1]["lr"] = 0.1 if run.rank == 0 else 0.2


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
    run.before_step = lambda: run.model.head.weight.grad.mul_(float("nan"))


def update(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] = float("inf")


def spoil(run: Run) -> None:
    for wire in run.wire:
        wire.armed = run.rank == 0


def nothing(run: Run) -> None:
    """The optimizer itself is at fault."""


MISMATCH, NUMBERS = "RankMismatchError", "NumericsError"
FAULTS: dict[str, tuple[Callable[[Run], None], str, str]] = {
    "write": (
        write,
        MISMATCH,
        rf"step {AT}: parameter 'blocks.1.up.weight' of unit 'blocks.1' is not on rank 1 what it is on rank 0. It was "
        rf"written on rank 1 since the last step|step {AT}: parameter 'blocks.1.up.weight' (of unit 'blocks.1' )?is not",
    ),
    "lr": (lr, MISMATCH, rf"step {AT}: 'lr' of the optimizer's group 1 .* \(0.1 on rank 0, 0.2 on rank 1\)"),
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
        rf"step {AT}: buffer 'scale' \(float32 \(8,\)\) is not on rank 1 .*written through `.data`",
    ),
    "batch": (
        batch,
        NUMBERS,
        rf"step {AT}, on rank 0: the gradient of .*First seen on rank 1 in forward: the model's inputs \(this rank's batch\) "
        "have NaN; on rank 0 all was finite until gradients were averaged",
    ),
    "loss": (
        loss,
        NUMBERS,
        rf"step {AT}, .*First seen on rank 1 in backward: the gradient that backward begins with, at the model's output, is "
        "NaN; on rank 0 all was finite",
    ),
    "output": (
        output,
        NUMBERS,
        rf"step {AT}, .*First seen on rank 0 in forward: the output of unit 'blocks.1' is \w+, of finite inputs and parameters",
    ),
    "backward": (
        backward,
        NUMBERS,
        rf"step {AT}, .*First seen on rank 1 in backward: .*of unit 'blocks.1' .*on rank 0 all was",
    ),
    "gradient": (gradient, NUMBERS, rf"step {AT}, .*'head.weight' of unit .* is NaN. .*finite after the reduction"),
    "update": (update, NUMBERS, rf"step {AT}, .*Its gradient was finite: the step of AdamW made it"),
    "spoil": (
        spoil,
        NUMBERS,
        "the gradient of parameter '[\\w.]+' of unit .* is not the mean of the ranks' own gradients",
    ),
    "optimizer": (
        nothing,
        NUMBERS,
        "the update of parameter '[\\w.]+' .* is not what plain training makes of the same gradient",
    ),
}
"""Name -> fault, class of the error, what it says."""


def rows(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(4, 8, generator=generator), torch.randint(0, 5, (4,), generator=generator)


def optimizer_for(model: nn.Module, kind: Any = torch.optim.AdamW) -> torch.optim.Optimizer:
    params = list(model.parameters())
    groups = [{"params": params[:4], "lr": 0.05}, {"params": params[4:], "lr": 0.1}]
    return kind(groups)


def caught(rank: int, fault: str, config: zero.ZeroConfig, dtype: str, accumulation: int) -> tuple[str, str, int]:
    """Class and text of the error, and the step under way; of a run with one fault."""
    wires: list[Faulty] = []

    def open_wire(device: torch.device) -> PairWire:
        wires.append(Faulty(device))
        return wires[-1]

    roads = Roads(wire=open_wire) if dist.is_initialized() else None
    model = Net()
    optimizer = optimizer_for(model, Averaging if fault == "optimizer" else torch.optim.AdamW)
    engine = zero.shard(model, optimizer, config, mixed_precision=dtype, roads=roads)
    for step in range(AT + 2):
        try:
            run = Run(rank, model, optimizer, engine, wires, torch.empty(0))
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
    assert len(quoted()) >= 4
    assert {*quoted()} <= {*FAULTS}


def check(answers: list[dict[str, tuple[str, str, int]]], silent: tuple[str, ...] = ()) -> None:
    for fault, (kind, text, step) in answers[0].items():
        if fault in silent:
            assert kind == "", (fault, text)
            continue
        _, wanted, pattern = FAULTS[fault]
        assert kind == wanted, (fault, kind, text)
        assert re.search(pattern, text, re.S), (fault, text)
        page = quoted().get(fault)
        assert page is None or text == page, fault
        assert step == (0 if fault == "optimizer" else AT), (fault, step, text)
        assert all(other[fault] == (kind, text, step) for other in answers[1:]), fault


@pytest.mark.parametrize(
    "stage", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]
)
def test_faults_are_named_on_every_rank(two, stage):
    config = zero.ZeroConfig(stage=stage, debug=True)
    # At stage 0 an optimizer that averages what is averaged already changes nothing.
    check(two.run(catch, tuple(FAULTS), config, "no", 1), silent=("optimizer",) if stage == 0 else ())


@pytest.mark.parametrize(
    "stage", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]
)
def test_faults_are_named_under_bf16_with_accumulation(two, stage):
    config = zero.ZeroConfig(stage=stage, debug=True)
    check(two.run(catch, ("write", "batch", "output", "backward", "spoil", "buffer"), config, "bf16", 2))


@pytest.mark.parametrize("stage", [1, 3])
def test_faults_are_named_with_an_offloaded_optimizer(two, stage):
    config = zero.ZeroConfig(stage=stage, debug=True, offload_optimizer="cpu")
    check(two.run(catch, ("write", "count", "batch", "update", "spoil"), config, "bf16", 1))


@pytest.mark.parametrize("stage", STAGES)
def test_options_are_compared_without_debug(two, stage):
    check(two.run(catch, ("lr",), zero.ZeroConfig(stage=stage), "no", 1))


def adafactor(rank: int, world: int) -> str:
    """Its updates are not compared, as it steps over full matrices; standard error says so."""
    model = Net()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
    written = io.StringIO()
    with contextlib.redirect_stderr(written):
        engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=0, debug=True))
        for step in range(4):
            x, labels = rows(step, 0, rank)
            cross_entropy(model(x), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.detach()
    return written.getvalue()


def test_updates_that_are_not_compared(two):
    text = two.run(adafactor)[0]
    assert text.count("not compared") == 1
    assert "steps over whole parameters" in text


def test_one_process(pools):
    config = zero.ZeroConfig(stage=2, debug=True)
    check(pools[1].run(catch, ("update", "gradient"), config, "no", 2))
