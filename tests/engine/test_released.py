"""Units are released as soon as the backward is done with them, whatever container a block returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.kit.pool import on_ranks


@dataclass
class Output:
    hidden: Tensor


CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda x: (x, None), lambda found: found[0]),
    "list": (lambda x: [x], lambda found: found[0]),
    "dict": (lambda x: {"x": x}, lambda found: found["x"]),
    "nested": (lambda x: {"x": [(x,)]}, lambda found: found["x"][0][0]),
    "dataclass": (Output, lambda found: found.hidden),
}


class Block(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.wrap = nn.Linear(32, 32), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.inner(x).tanh())


class Blocks(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.blocks, self.unwrap = nn.ModuleList(Block(wrap) for _ in range(8)), unwrap

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.unwrap(block(x))
        return x


def gathered(wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]) -> int:
    """The most bytes of full parameters in the third step."""
    torch.manual_seed(0)
    model = Blocks(wrap, unwrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3, units=("Block",)))
    recorder = engine.record()
    for _ in range(3):
        model(torch.ones(2, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.detach()
    return int(recorder.last["peak"]["device"]["gathered"])


@pytest.mark.gloo
@on_ranks()
def test_blocks_that_return_containers_take_no_more_memory(rank: int, world: int) -> None:
    plain = gathered(lambda x: x, lambda found: found)
    assert plain < 8 * 32 * 33 * 4 / 2  # of the model's full parameters
    assert {name: gathered(*each) for name, each in CONTAINERS.items()} == dict.fromkeys(CONTAINERS, plain)
