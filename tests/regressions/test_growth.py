"""Costs of a model with more blocks: counted lines of the engine must not grow with the square of blocks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero as zero

WIDTH = 4
FEW, MANY = 10, 40
LINEAR = 4.4
"""For four times as many blocks."""
SOURCES = str(Path(zero.__file__).parent)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.linear(self.norm(hidden))


class Blocks(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def lines_of(call: Callable[[], Any]) -> int:
    """Lines of this library that run in `call`, and calls of other code. Each turn of a loop counts."""
    count = 0

    def line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    def entered(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += 1
        return line if frame.f_code.co_filename.startswith(SOURCES) else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def costs(blocks: int, config: zero.ZeroConfig, folder: Path) -> dict[str, int]:
    """Lines by what was done, of a model of so many blocks on one rank."""
    model = Blocks(blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found: dict[str, int] = {}

    def cost_of(what: str, call: Callable[[], Any]) -> None:
        found[what] = lines_of(call)

    engines: list[zero.Engine] = []
    cost_of("shard", lambda: engines.append(zero.shard(model, optimizer, config)))
    (engine,) = engines
    batch = torch.ones(2, WIDTH)

    def backward() -> None:
        model(batch).square().mean().backward()

    for step in ("first", "second"):
        cost_of(f"{step} forward and backward", backward)
        cost_of(f"{step} clipping", partial(engine.clip_grad_norm_, 1.0))
        cost_of(f"{step} step", optimizer.step)
        cost_of(f"{step} zero_grad", optimizer.zero_grad)
    backward()
    params = list(model.parameters())
    for name, each in {
        "a norm of each gradient": lambda p: p.grad.norm(),
        "an edit of each gradient": lambda p: p.grad.mul_(0.5),
        "full_gradient": zero.full_gradient,
        "local_gradient": zero.local_gradient,
        "full_parameter": zero.full_parameter,
        "local_parameter": zero.local_parameter,
        "full_optimizer_state": lambda p: zero.full_optimizer_state(p, "exp_avg"),
        "set_full_parameter": lambda p: zero.set_full_parameter(p, torch.zeros(p.shape)),
    }.items():
        cost_of(f"{name}, one after another", lambda each=each: [each(param) for param in params])
    optimizer.zero_grad()

    def gather_each() -> None:
        for param in params:
            with zero.GatheredParameters(param):
                pass

    def whole_state_dict() -> None:
        with zero.unsharded(model):
            model.state_dict()

    cost_of("GatheredParameters, one after another", gather_each)
    cost_of("state_dict", model.state_dict)
    cost_of("state_dict of each block", lambda: [block.state_dict() for block in model.blocks])
    cost_of("state_dict in zero.unsharded", whole_state_dict)
    state = optimizer.state_dict()
    cost_of("optimizer.load_state_dict", lambda: optimizer.load_state_dict(state))
    cost_of("save", lambda: engine.save(folder / str(blocks)))
    cost_of("load", lambda: engine.load(folder / str(blocks)))
    for param in params[::3]:
        param.requires_grad_(False)
    backward()
    cost_of("a step that parts spans", optimizer.step)
    cost_of("detach", engine.detach)
    return found


@pytest.mark.parametrize(
    "settings", [{"stage": 2}, {"stage": 3}, {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"}]
)
def test_nothing_grows_with_the_square_of_blocks(settings: dict[str, Any], tmp_path: Path) -> None:
    config = zero.ZeroConfig(**settings)
    costs(1, config, tmp_path)  # what is imported and compiled on the way is no part of it
    few, many = costs(FEW, config, tmp_path), costs(MANY, config, tmp_path)
    grown = {what: many[what] / few[what] for what in few}
    assert {what: ratio for what, ratio in grown.items() if ratio > LINEAR} == {}
