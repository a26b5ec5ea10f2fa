"""A three-layer network small enough to work out by hand: values, gradients, and which rank holds what."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

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


class Layer(nn.Module):
    """Multiplies by a weight of 3 x 5 element-wise and sums over the rows."""

    def __init__(self, value: float, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 5), value))
        self.kind = kind

    def forward(self, x: Tensor):
        hidden = x * self.weight
        out = hidden.sum(0)
        return {
            "tensor": out,
            "tuple": (hidden, out),
            "list": [hidden, out],
            "dict": {"hidden": hidden, "out": out},
            "namedtuple": Pair(hidden, out),
            "dataclass": Output(hidden, out),
            "view": out.view(1, 5)[0],
            "nested": {"a": [(hidden, {"out": out})]},
        }[self.kind]


def pick(kind: str, value) -> Tensor:
    if kind in ("tensor", "view"):
        return value
    if kind == "dict":
        return value["out"]
    if kind == "nested":
        return value["a"][0][1]["out"]
    return value.out if kind in ("namedtuple", "dataclass") else value[1]


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList([Layer(float(i + 1), kind) for i in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = pick(self.kind, layer(x))
        return x.sum()


def closed_form(rank: int, world: int, stage: int, kind: str) -> None:
    model = Net(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=stage))
    x = torch.full((5,), float(rank + 1))
    # Each layer sums three rows: y = 3·1 · 3·2 · 3·3 · x = 162 x per column, 810 x in all.
    expected_grads = [810.0 * 1.5 / 5 / 3 / value for value in (1.0, 2.0, 3.0)]  # mean over ranks of x is 1.5
    for times in (1, 2, 3):
        loss = model(x)
        assert loss.item() == 810.0 * (rank + 1)
        if stage == 3:  # the last one's unit stays for the backward
            assert not any(span.full.untyped_storage().nbytes() for unit in engine.units[:-1] for span in unit.spans)
            assert all(weight.shape == (3, 5) for weight in model.parameters())
        loss.backward()
        for unit, expected in zip(engine.units, expected_grads):
            (span,) = unit.spans
            local = span.bucket.read(slice(0, span.local_numel))
            valid = max(0, min(span.local_numel, 15 - rank * span.layout.slice_numel))
            assert torch.equal(local[:valid], torch.full((valid,), expected * times)), (local, expected, times)
            assert not local[valid:].any()  # padding
            if stage == 3:
                assert span.full.untyped_storage().nbytes() == 0
                assert all(p.shape == (3, 5) and p.numel() == 15 for p in span.params)
    optimizer.zero_grad()
    assert all(span.bucket.grad is None for unit in engine.units for span in unit.spans)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", ["tensor", "tuple", "list", "dict", "namedtuple", "dataclass", "view", "nested"])
def test_closed_form(two, stage, kind):
    two.run(closed_form, stage, kind)
