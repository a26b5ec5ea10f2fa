"""`zero.Init`: extensions, and parameters that loaders make from slices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hf_zero as zero
from hf_zero.params import EXTENSIONS
from hf_zero.params.deferred import born, slice_bounds
from hf_zero.params.deferred import deferred_of as birth_of
from hf_zero.params.init import entered
from tests.kit.pool import RankPool

pytestmark = pytest.mark.gloo


def whole(param: nn.Parameter) -> torch.Tensor:
    return zero.full_parameter(param)


def test_extensions_are_entered_once_and_left() -> None:
    seen: list[str] = []

    class Extension:
        def __enter__(self) -> None:
            seen.append("in")

        def __exit__(self, *error: Any) -> None:
            seen.append("out")

    EXTENSIONS.append(lambda init: Extension())
    try:
        with zero.Init() as outer:
            with zero.Init(init="fast"), zero.Init(enabled=False):
                pass
            assert seen == ["in"]
            assert entered() is outer
        assert seen == ["in", "out"]
    finally:
        EXTENSIONS.pop()
    assert entered() is None


def planted(rank: int, world: int) -> None:
    """What loaders of weights use: parameters made from slices."""
    value = torch.arange(10.0).view(5, 2)
    with zero.Init() as init:
        with torch.device("meta"):
            layer = nn.Linear(2, 5, bias=False)
        assert birth_of(layer.weight) is None
        low, high = slice_bounds(10, init.wire.rank, init.wire.size)
        own = value.flatten()[low:high].clone()
        layer.weight = born((5, 2), torch.float32, own, init.wire, device="cpu", requires_grad=True)
        with pytest.raises(zero.StateError, match="expected a 1-D"):
            born((5, 2), torch.float32, torch.zeros(11), init.wire, device="cpu", requires_grad=True)
    assert torch.equal(whole(layer.weight), value)
    engine = zero.shard(layer)
    assert torch.equal(layer(torch.eye(2)), value.t())
    engine.detach()
    assert torch.equal(layer.weight, value)


def test_planted_parameters(pools: dict[int, RankPool]) -> None:
    for world in (1, 3):
        pools[world].run(planted)
