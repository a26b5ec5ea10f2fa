"""`zero.Init`: reads and writes of a parameter that is not whole give its values or a `StateError`, never NaN."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import hf_zero as zero
from tests.kit.pool import on_ranks

pytestmark = pytest.mark.gloo
SHAPE = (6, 4)


class Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "norm": lambda p: p.norm(),
    "slice": lambda p: p[1:3, 2],
    "detach": lambda p: p.detach() + 0,
    "data": lambda p: p.data + 0,
    "transposed": lambda p: p.T + 0,
    "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "array": lambda p: torch.from_numpy(np.array(p.detach())),
    "tolist": lambda p: torch.tensor(p.tolist()),
    "item": lambda p: p[0, 0].item(),
    "iterated": lambda p: torch.stack([row + 0 for row in p]),
    "contains": lambda p: 1e9 in p,
    "cast": lambda p: p.to(torch.float64) + 0,
    "foreach": lambda p: torch._foreach_norm([p])[0],
    "aten": lambda p: torch.ops.aten.mul.Tensor(p, 2),
    "function": lambda p: Twice.apply(p),
    "parameter": lambda p: nn.Parameter(p) + 0,
    "buffer": lambda p: nn.Buffer(p) + 0,
    "as_subclass": lambda p: p.clone().as_subclass(Tensor),
    "copied": lambda p: torch.zeros(SHAPE).copy_(p),
    "embedding": lambda p: nn.Embedding.from_pretrained(p).weight + 0,
}
"""Results are compared with those of the plain parameter."""


def set_data(p: nn.Parameter) -> None:
    p.data = p.data * 0.5


def new_data(p: nn.Parameter) -> None:
    p.data = torch.full(SHAPE, 3.0)


def set_item(p: nn.Parameter) -> None:
    p[0] = 7.0


def through_view(p: nn.Parameter) -> None:
    p.data[1:3].fill_(4.0)


def through_numpy(p: nn.Parameter) -> None:
    p.detach().numpy()[:] = 5.0


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "mul_": lambda p: p.mul_(2),
    "data mul_": lambda p: p.data.mul_(2),
    "data": set_data,
    "new data": new_data,
    "set item": set_item,
    "view": through_view,
    "numpy": through_numpy,
    "copy_": lambda p: p.copy_(torch.arange(24.0).view(SHAPE)),
    "foreach": lambda p: torch._foreach_add_([p], 1.0),
    "vector": lambda p: nn.utils.vector_to_parameters(torch.arange(24.0), [p]),
    "normal_": lambda p: nn.init.normal_(p),
    "orthogonal_": lambda p: nn.init.orthogonal_(p),
    "sparse_": lambda p: nn.init.sparse_(p, 0.5),
    "out": lambda p: torch.add(torch.ones(SHAPE), 1, out=p),
}

NEITHER: dict[str, Callable[[nn.Parameter], object]] = {
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.storage(),
    "address": lambda p: p.untyped_storage().data_ptr(),
    "bytes": lambda p: bytes(p.untyped_storage()),
    "stored": lambda p: p.untyped_storage()[0],
    "storage list": lambda p: p.untyped_storage().tolist(),
    "shallow copy": lambda p: copy.copy(p),
    "deepcopy": lambda p: copy.deepcopy(p),
    "pickle": lambda p: pickle.dumps(p),
    "torch.save": lambda p: torch.save(p, io.BytesIO()),
    "shared": lambda p: p.share_memory_(),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
}
"""Refused outside of the `with`."""


def plain_layer() -> nn.Linear:
    torch.manual_seed(7)
    return nn.Linear(4, 6)


def layer(**options: Any) -> nn.Linear:
    with zero.Init(**options):
        return plain_layer()


def same(value: Any, expected: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(expected, Tensor):
        return value.dtype == expected.dtype and torch.equal(value.detach(), expected.detach())
    return bool(value == expected)


@pytest.mark.parametrize("world", [1, 2])
@on_ranks(None)
def test_reads_and_writes_outside_of_the_with_are_refused(rank: int, world: int) -> list[str]:
    wrong = []
    model = layer()
    for name, read in {**READS, **NEITHER}.items():
        if name in ("address", "bytes", "stored", "storage list"):
            continue  # a storage on the meta device
        try:
            read(model.weight)
        except zero.StateError as error:
            if "zero.Init" not in str(error):
                wrong.append(f"{name}: {error}")
            continue
        except (RuntimeError, TypeError) as error:
            wrong.append(f"{name}: {error!r}")
            continue
        wrong.append(f"{name}: no error")
    for name, write in WRITES.items():
        if name == "copy_":
            continue  # each rank takes its part, as load_state_dict needs
        with torch.no_grad():
            try:
                write(model.weight)
            except zero.StateError:
                continue
        wrong.append(f"{name}: no error")
    assert torch.equal(zero.full_parameter(model.weight), plain_layer().weight)
    return wrong


@on_ranks()
def test_one_rank_alone_is_refused_at_once(rank: int, world: int) -> None:
    model = layer()
    if rank == 0:
        with pytest.raises(zero.StateError, match=r"norm\(\) of a parameter"):
            print(model.weight.norm())
    engine = zero.shard(model)
    engine.detach()
    assert torch.equal(model.weight, plain_layer().weight)


@pytest.mark.parametrize(("world", "tier"), [(2, "none"), (2, "cpu"), (2, "disk"), (1, "none")])
@on_ranks(None)
def test_reads_and_writes_inside_are_those_of_the_plain_parameter(
    rank: int, world: int, tmp_path: Path, tier: str
) -> list[str]:
    wrong, options = [], {"offload_params": tier, "offload_dir": str(tmp_path)}
    model, plain = layer(**options), plain_layer()
    with zero.Init(**options):
        for name, read in READS.items():
            if not same(found := read(model.weight), read(plain.weight)):
                wrong.append(f"{name}: {found}")
        assert model.weight.data_ptr() != 0
        assert model.weight.untyped_storage().nbytes() >= 96
    for name, write in WRITES.items():
        model, plain = layer(**options), plain_layer()
        torch.manual_seed(3)
        with torch.no_grad():
            write(plain.weight)
        torch.manual_seed(3)
        with zero.Init(**options), torch.no_grad():
            write(model.weight)
        if not torch.equal(found := zero.full_parameter(model.weight), plain.weight):
            wrong.append(f"{name}: {found}")
    return wrong


@on_ranks()
def test_descriptions_are_answered(rank: int, world: int) -> None:
    """What needs no values is answered on any rank."""
    model = layer()
    if rank == 0:
        p = model.weight
        assert (p.shape, p.dtype, p.device, p.ndim, len(p)) == (SHAPE, torch.float32, torch.device("cpu"), 2, 6)
        assert (p.stride(), p.is_contiguous(), p.numel(), p.nbytes) == ((4, 1), True, 24, 96)
        assert torch.equal(torch.zeros_like(p), torch.zeros(SHAPE))
        assert torch.equal(torch.ones_like(p, dtype=torch.float64), torch.ones(SHAPE, dtype=torch.float64))
        assert torch.empty_like(p).device == p.device
        assert p.new_zeros(3).dtype == torch.float32
        assert p.untyped_storage().nbytes() <= 8, "what is held here is no whole parameter"
        assert isinstance(p, nn.Parameter)
        assert p.is_leaf
        assert p.requires_grad
        assert p.grad is None
        for text in (repr(p), str(p), f"{p}"):
            assert "(6, 4)" in text
            assert "nan" not in text
        assert "Linear(in_features=4" in repr(model)
        made = type(p)(torch.ones(3), requires_grad=False)
        assert torch.equal(made, torch.ones(3))
    model.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.bfloat16, torch.complex64])
@on_ranks()
def test_types(rank: int, world: int, dtype: torch.dtype) -> None:
    """Types without NaN show nothing else either."""
    value = torch.arange(1, 13).view(3, 4).to(dtype)
    with zero.Init():
        model = nn.Sequential(nn.Module(), nn.Linear(2, 2))
        model[0].table = nn.Parameter(value.clone(), requires_grad=False)
    for use in (
        lambda p: p[0],
        lambda p: p.add_(1),
        lambda p: nn.Parameter(p, requires_grad=False),
        set_item,
        lambda p: p.data,
    ):
        with torch.no_grad(), pytest.raises(zero.StateError, match=r"zero\.Init"):
            use(model[0].table)
    with zero.Init(), torch.no_grad():
        assert torch.equal(model[0].table[1], value[1])
        model[0].table[0] = 2
        same_values = nn.Parameter(model[0].table, requires_grad=False)
    value[0] = 2
    assert torch.equal(zero.full_parameter(model[0].table), value)
    assert torch.equal(same_values, value)
    zero.shard(model, None, zero.ZeroConfig(stage=3))
    assert torch.equal(zero.full_parameter(model[0].table), value)


@on_ranks()
def test_casts_and_ties(rank: int, world: int) -> None:
    """Casts, moves and ties work on slices outside, and on values inside."""
    for inside in (False, True):
        model, plain = layer(), plain_layer().half()
        with zero.Init(enabled=inside):
            model.half()
        assert model.weight.dtype == torch.float16
        assert torch.equal(zero.full_parameter(model.weight), plain.weight)
        with zero.Init(enabled=inside):
            model.to(torch.bfloat16)
        assert torch.equal(zero.full_parameter(model.weight), plain.to(torch.bfloat16).weight)
    model, first = layer(), layer()
    first.weight.data = model.weight.double()  # of another parameter: its values
    model.bias.data = first.bias.to(torch.float16)
    assert torch.equal(zero.full_parameter(first.weight), plain_layer().double().weight)
    assert torch.equal(zero.full_parameter(model.bias), plain_layer().half().bias)
    with zero.Init():
        other, image = nn.LSTM(3, 4), nn.Conv2d(2, 3, 2)
    with pytest.raises(zero.StateError, match=r"to\(\) of a parameter"):
        image.to(memory_format=torch.channels_last)
    other.double()
    with pytest.raises(zero.StateError, match=r"before running it|lstm\(\) of a parameter"):
        other(torch.ones(2, 1, 3, dtype=torch.float64))
    with zero.Init():
        both = nn.ParameterList([torch.arange(12.0).view(3, 4).t(), torch.zeros(4, 3)])
    both.half()
    both[1].data = both[0].double()
    with zero.Init():
        assert [each.stride() for each in both] == [(1, 4), (1, 4)], "as casts of plain ones"
        assert torch.empty_like(both[0]).stride() == (1, 4)
    model = layer()
    twin = nn.Linear(4, 6)
    twin.weight = model.weight
    with pytest.raises(zero.StateError, match=r"linear\(\) of a parameter"):
        twin(torch.ones(1, 4))


@pytest.mark.parametrize("world", [1, 2])
@on_ranks(None)
def test_a_view_that_outlives_the_with(rank: int, world: int) -> None:
    """A write through a tensor that the `with` gave, after it has ended, is a write to the parameter."""
    with zero.Init():
        model = plain_layer()
        view = model.weight.data[1]
    view.fill_(3.0)
    expected = plain_layer().weight.detach().clone()
    expected[1] = 3.0
    assert torch.equal(zero.full_parameter(model.weight), expected)
    view.fill_(4.0)
    expected[1] = 4.0
    engine = zero.shard(model)
    engine.detach()
    assert torch.equal(model.weight, expected)
    with zero.Init():
        pair = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
        pair[1].weight.data = pair[0].weight.data
    with pytest.raises(zero.LayoutError, match="shares memory with"):
        zero.shard(pair)


# Functions that replace a parameter by what they compute from it -----------------------------------------------------------

X = torch.linspace(-1, 1, 12).view(3, 4)
REPARAMETRISE: dict[str, Callable[[nn.Module], object]] = {
    "weight_norm": lambda m: parametrizations.weight_norm(m),
    "old weight_norm": lambda m: nn.utils.weight_norm(m),
    "spectral_norm": lambda m: parametrizations.spectral_norm(m),
    "old spectral_norm": lambda m: nn.utils.spectral_norm(m),
    "orthogonal": lambda m: parametrizations.orthogonal(m),
    "parametrize": lambda m: parametrize.register_parametrization(m, "weight", Half()),
}


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_reparametrised_layers(rank: int, world: int, stage: int) -> list[str]:
    wrong = []
    for name, change in REPARAMETRISE.items():
        plain = nn.Sequential(plain_layer(), nn.Linear(6, 2))
        torch.manual_seed(1)
        change(plain[0])
        torch.manual_seed(7)
        with zero.Init():
            model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
            torch.manual_seed(1)
            change(model[0])
        optimizer, ours = torch.optim.SGD(plain.parameters(), 0.1), torch.optim.SGD(model.parameters(), 0.1)
        zero.shard(model, ours, zero.ZeroConfig(stage=stage))
        for _ in range(2):
            for each, opt in ((plain, optimizer), (model, ours)):
                each(X).square().mean().backward()
                opt.step()
                opt.zero_grad()
        loss, expected = model(X).square().mean(), plain(X).square().mean()
        if not torch.allclose(loss, expected, rtol=1e-5):
            wrong.append(f"{name}: {loss} instead of {expected}")
        with pytest.raises(zero.StateError):
            change(layer())
    return wrong
