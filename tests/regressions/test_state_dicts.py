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
from tests.kit.pool import RankPool
from tests.models import bert

pytestmark = pytest.mark.gloo


def state_dicts(rank: int, world: int, stage: int, dtype: str) -> None:
    torch.manual_seed(0)
    plain = bert()
    torch.manual_seed(0)
    model = bert()
    zero.shard(model, None, zero.ZeroConfig(stage=stage), mixed_precision=dtype)
    for part in ("", "bert.encoder.layer.0.", "cls."):
        whole = plain.get_submodule(part.rstrip(".")).state_dict()
        ours = model.get_submodule(part.rstrip(".")).state_dict()
        assert list(whole) == list(ours)
        for name, value in whole.items():
            assert ours[name].shape == value.shape
            assert ours[name].dtype == value.dtype
            if rank == 0:
                assert torch.equal(ours[name], value), name
    names = ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight")
    tied = model.state_dict()
    assert tied[names[0]] is tied[names[1]]
    # Loaded from full values on every rank, and on rank 0 alone.
    changed = {name: value + 1 if value.is_floating_point() else value for name, value in plain.state_dict().items()}
    model.load_state_dict(changed)
    again = model.state_dict()
    assert rank != 0 or all(torch.equal(again[name], changed[name]) for name in changed)
    only_first = {name: value if rank == 0 else value.to("meta") for name, value in plain.state_dict().items()}
    model.load_state_dict(only_first)
    again = model.state_dict()
    assert rank != 0 or all(torch.equal(again[name], value) for name, value in plain.state_dict().items())
    report = model.load_state_dict({"nonsense": torch.zeros(1)}, strict=False)
    assert report.unexpected_keys == ["nonsense"]
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**changed, "cls.predictions.bias": torch.zeros(3)})
    with pytest.raises(zero.StateError, match="assign"):
        model.load_state_dict(changed, assign=True)
    model.load_state_dict(plain.state_dict())
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
        assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)


@pytest.mark.parametrize("dtype", ["no", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_state_dict_and_back(two: RankPool, stage: int, dtype: str) -> None:
    two.run(state_dicts, stage, dtype)


def values_elsewhere(rank: int, world: int, stage: int, room: bool) -> None:
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


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("stage", [1, 3])
def test_values_that_are_elsewhere(two: RankPool, stage: int, room: bool) -> None:
    two.run(values_elsewhere, stage, room)


def values_of_deferred(rank: int, world: int) -> None:
    """Before `zero.shard`, only code inside `zero.Init` sees values; every rank gets them there."""
    torch.manual_seed(0)
    plain = nn.Linear(64, 64).state_dict()
    torch.manual_seed(0)
    with zero.Init():
        model = nn.Linear(64, 64)
    with pytest.raises(zero.StateError, match=r"created under zero\.Init\(\)"):
        model.state_dict()
    with zero.Init():
        state = {name: value.clone() for name, value in model.state_dict().items()}
    assert state.keys() == plain.keys()
    assert all(torch.equal(value, plain[name]) for name, value in state.items())


def test_values_of_a_deferred_model(two: RankPool) -> None:
    two.run(values_of_deferred)
