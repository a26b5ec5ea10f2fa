"""`engine.detach()` gives back the methods that the program had put on a module itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero

pytestmark = pytest.mark.gloo


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def generate(self, x: Tensor, synced_gpus: bool = False) -> Tensor:
        return self(x)


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: 2 * function(*args, **kwargs)


def methods(rank: int, world: int, stage: int, dtype: str) -> None:
    torch.manual_seed(0)
    model = Mlp()
    block = model.blocks[1]
    calls: list[str] = []
    block.forward = doubled(block.forward)
    model.generate = doubled(model.generate)
    model.zero_grad = lambda *_, **__: calls.append("zero_grad")
    model.compile = lambda *_, **__: calls.append("compile")
    model.no_sync = "the program's own"
    own = {name: model.__dict__[name] for name in ("generate", "zero_grad", "compile", "no_sync")}
    forward = block.forward
    x = torch.randn(2, 4)
    with torch.no_grad():
        expected = model(x)
        for _ in range(2):
            engine = zero.shard(model, None, zero.ZeroConfig(stage=stage), mixed_precision=dtype)
            engine.compile(using=lambda function: function)
            atol = 0.0 if dtype == "no" else 0.1
            assert torch.allclose(model(x).float(), expected, atol=atol)
            assert torch.allclose(model.generate(x).float(), 2 * expected, atol=2 * atol)
            engine.detach()
            assert block.forward is forward
            assert all(model.__dict__[name] is method for name, method in own.items())
            assert torch.equal(model(x), expected)
    assert not {"forward", "_apply", "__deepcopy__", "__reduce_ex__", "_call_impl"} & {*model.blocks[0].__dict__}


@pytest.mark.parametrize("dtype", ["no", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_methods_of_the_programs_own_are_back(two, stage, dtype):
    two.run(methods, stage, dtype)


def wrapped_later(rank: int, world: int) -> None:
    """What the program puts on top of the engine's method is its own to take off."""
    torch.manual_seed(0)
    model = Mlp()
    x = torch.randn(2, 4)
    expected = model(x)
    engine = zero.shard(model, None, zero.ZeroConfig(stage=3))
    engine.compile(using=lambda function: function)
    model.blocks[0].forward = wrapper = doubled(model.blocks[0].forward)
    engine.detach()
    assert model.blocks[0].forward is wrapper
    del model.blocks[0].forward
    assert torch.equal(model(x), expected)


def test_a_method_put_on_later_stays(two):
    two.run(wrapped_later)
