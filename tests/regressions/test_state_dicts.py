"""State dicts of sharded models: entries, loading, and values that other ranks than 0 have on request alone."""

from __future__ import annotations

import copy
import pickle
import resource

import psutil
import pytest
import torch
from torch import nn

import hf_zero as zero
from tests.kit.pool import on_ranks

pytestmark = pytest.mark.gloo


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_values_that_are_elsewhere(rank: int, world: int, stage: int, room: bool) -> None:
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048))
    zero.shard(model, None, zero.ZeroConfig(stage=stage))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if rank == 1 and not room:  # an eighth of 128 free MiB is not enough
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (128 << 20), limits[1]))
    try:
        state = model.state_dict()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    name = "1.bias"
    value = state[name]
    other = torch.ones(2048)
    if rank == 0:
        assert isinstance(value, torch.Tensor)
        assert not value.is_meta
        return
    assert value.is_meta or room
    assert (value.dtype, value.shape) == (torch.float32, other.shape)
    assert torch.empty_like(value).shape == other.shape
    twin = copy.deepcopy(state)[name]
    assert twin.is_meta or room
    plain = pickle.loads(pickle.dumps(value))
    assert type(plain) is torch.Tensor
    assert plain.is_meta is not room
    computed = (
        lambda: other.lerp_(value.detach(), 0.5),
        lambda: other.copy_(twin),
        lambda: torch._foreach_lerp_([other, other], [value, value], 0.5),
        lambda: value.float() + other,
        lambda: value.sum().item(),
        lambda: bool((value > 0).all()),
        value.cpu,
        value.numpy,
        value.tolist,
    )
    for what in computed:
        if room:
            assert not getattr(what(), "is_meta", False)
            continue
        with pytest.raises(zero.StateError, match=r"every rank but 0 has its shape and type alone .*zero.unsharded"):
            what()
    if room:
        return
    assert (value.half() * 2).is_meta
    with pytest.raises(RuntimeError, match=r"zero\.unsharded"):
        nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)).load_state_dict(state)
    assert torch.equal(other, torch.ones(2048))
