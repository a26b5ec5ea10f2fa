"""A three-layer network small enough to work out on paper, whose layers return their output in any structure."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero

pytestmark = pytest.mark.gloo
Pair = namedtuple("Pair", ["hidden", "out"])


@dataclass
class Output:
    hidden: Tensor
    out: Tensor


PACK: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda hidden, out: out, lambda found: found),
    "tuple": (lambda hidden, out: (hidden, out), lambda found: found[1]),
    "list": (lambda hidden, out: [hidden, out], lambda found: found[1]),
    "dict": (lambda hidden, out: {"hidden": hidden, "out": out}, lambda found: found["out"]),
    "namedtuple": (Pair, lambda found: found.out),
    "dataclass": (Output, lambda found: found.out),
    "view": (lambda hidden, out: out.view(1, 5)[0], lambda found: found),
    "nested": (lambda hidden, out: {"a": [(hidden, {"out": out})]}, lambda found: found["a"][0][1]["out"]),
}


class Layer(nn.Module):
    """Multiplies by a weight of 3 x 5 element-wise and sums over the rows."""

    def __init__(self, value: float, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 5), value))
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        hidden = x * self.weight
        return PACK[self.kind][0](hidden, hidden.sum(0))


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList([Layer(float(number + 1), kind) for number in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = PACK[self.kind][1](layer(x))
        return x.sum()


def closed_form(rank: int, world: int, stage: int) -> None:
    for kind in PACK:
        model = Net(kind)
        zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.0), zero.ZeroConfig(stage=stage))
        for times in (1, 2, 3):
            # Each layer sums three rows: y = 3·1 · 3·2 · 3·3 · x = 162 x per column, 810 x in all; x is 1.5 on average.
            loss = model(torch.full((5,), float(rank + 1)))
            assert loss.item() == 810.0 * (rank + 1), kind
            loss.backward()
            for value, layer in enumerate(model.layers, start=1):
                expected = torch.full((3, 5), times * 810.0 * 1.5 / 5 / 3 / value)
                assert torch.equal(zero.full_gradient(layer.weight), expected), (kind, times)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_closed_form(two, stage):
    two.run(closed_form, stage)
