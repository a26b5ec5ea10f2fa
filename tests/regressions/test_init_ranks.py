"""`zero.Init` on ranks that do not run the same code: never a model of one rank's rows and another's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import hf_zero as zero
from tests.kit.pool import RankPool, on_ranks

pytestmark = pytest.mark.gloo


class Net(nn.Module):
    """Some memory is never written before a parent, or a checkpoint, does so."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.Tensor(6, 6))
        self.experts = nn.ParameterList([torch.empty(3, 5), torch.FloatTensor(5, 2)])
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(6, 2)
        nn.init.orthogonal_(self.scale)
        for expert in self.experts:
            expert.data.normal_()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x) @ self.scale))


def dirty(rank: int) -> None:
    """Memory that is allocated next holds other numbers on each rank."""
    junk = [torch.full((size,), 3.0 + rank) for size in (6, 10, 15, 24, 36) for _ in range(20)]
    del junk


def build(rank: int, change: Callable[[nn.Module, int], object] | None = None, **options: Any) -> nn.Module:
    dirty(rank)
    torch.manual_seed(7)
    with zero.Init(**options):
        model = Net()
        if change is not None:
            with torch.no_grad():
                change(model, rank)
    return model


def fill_alone(model: Any, rank: int) -> None:
    if rank == 0:
        model.first.weight.fill_(2.0)


def by_rank(model: Any, rank: int) -> None:
    model.last.weight.fill_(float(rank))


def own_seed(model: Any, rank: int) -> None:
    torch.manual_seed(rank)
    nn.init.normal_(model.first.weight)


def through_view(model: Any, rank: int) -> None:
    model.first.weight.data[0] += rank


def load_alone(model: Any, rank: int) -> None:
    if rank == 0:
        torch.manual_seed(11)
        model.load_state_dict(Net().state_dict())


def scaled_afterwards(model: Any, rank: int) -> None:
    """The values that differ are mixed by a read, and look equal from then on."""
    nn.init.constant_(model.first.weight, rank)
    nn.init.ones_(model.last.weight)
    model.first.weight.mul_(2)


CHANGES = [fill_alone, by_rank, own_seed, through_view, load_alone, scaled_afterwards]


@pytest.mark.parametrize("number", range(len(CHANGES)), ids=[each.__name__ for each in CHANGES])
@pytest.mark.parametrize("tier", ["none", "disk"])
@on_ranks()
def test_ranks_that_compute_other_values_are_refused(
    rank: int, world: int, tmp_path: Path, number: int, tier: str
) -> None:
    options = {"offload_params": tier, "offload_dir": str(tmp_path)}
    with pytest.raises(zero.RankMismatchError, match=r"(Linear\.weight|shape|parameter).*zero\.Init"):
        build(rank, CHANGES[number], **options)
    build(rank)  # and the process is as before


@on_ranks()
def test_values_given_by_rank(rank: int, world: int) -> None:
    """Values that no function was given after the parameter was registered are compared when the model is sharded."""
    with zero.Init():
        model = nn.Sequential(nn.Linear(3, 3), nn.Module())
        model[1].shift = nn.Parameter(torch.full((3,), float(rank)))
    with pytest.raises(zero.RankMismatchError, match=r"'1\.shift' other values.*zero\.Init"):
        zero.shard(model)


@on_ranks()
def test_sharded_inside(rank: int, world: int) -> None:
    with zero.Init():
        model = nn.Linear(3, 3)
        with torch.no_grad():
            model.weight.fill_(float(rank))
        with pytest.raises(zero.RankMismatchError, match=r"'weight' other values.*zero\.Init"):
            zero.shard(model)
        with torch.no_grad():
            model.weight.fill_(2.0)
        zero.shard(model)
    assert torch.equal(zero.full_parameter(model.weight), torch.full((3, 3), 2.0))


def change_copy(model: Any, rank: int) -> None:
    model.twin = copy.deepcopy(model.first)
    nn.init.constant_(model.twin.weight, rank)


@on_ranks()
def test_copies(rank: int, world: int) -> None:
    """Copies are compared, too; where their original was changed afterwards, both are."""
    with pytest.raises(zero.RankMismatchError, match=r"shape \(6, 4\).* other values.*zero\.Init"):
        build(rank, change_copy)
    with zero.Init():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1] = copy.deepcopy(model[0])
        with torch.no_grad():
            model[1].weight.mul_(2)
    weight, doubled = (zero.full_parameter(layer.weight) for layer in model)
    assert torch.equal(2 * weight, doubled)
    zero.shard(model)


@on_ranks()
def test_state_dicts_of_each_rank(rank: int, world: int) -> None:
    model = build(rank)
    torch.manual_seed(rank)
    model.load_state_dict(Net().state_dict())
    with pytest.raises(zero.RankMismatchError, match=r"other values.*zero\.Init"):
        zero.shard(model)
    torch.manual_seed(3)
    model.load_state_dict(Net().state_dict())
    zero.shard(model)


@on_ranks()
def test_one_rank_reads_alone_inside(rank: int, world: int) -> None:
    """Never a hang, and never values of another parameter."""
    for read_later in (True, False):
        with pytest.raises((zero.RankMismatchError, zero.StallError), match=r"zero\.Init"):
            build(rank, partial(reads, read_later=read_later), stall_s=4)


def reads(model: Any, rank: int, read_later: bool) -> None:
    if rank == 0:
        print(model.first.weight.norm())
    if read_later:
        model.scale.sum()


@on_ranks()
def test_what_ranks_may_do_alone(rank: int, world: int) -> None:
    """What ranks may do alone: change own slices, look at shapes, give values by a rank."""
    model: Any = build(rank)
    with zero.Init(), torch.no_grad():
        with zero.GatheredParameters(model.first.weight, modifier_rank=0):
            if rank == 0:
                model.first.weight.fill_(2.0)
        model.more = nn.Linear(2, 2, bias=False)
        zero.set_local_parameter(model.more.weight, torch.full((2,), float(rank)))
        assert (model.first.weight.sum(), model.more.weight.sum()) == (48, 2)
    with zero.GatheredParameters(model.first.weight):
        with pytest.raises(zero.StateError, match=r"zero\.shard inside"):
            zero.shard(model)
        with pytest.raises(zero.StateError, match="called inside"):
            zero.set_local_parameter(model.first.weight, zero.local_parameter(model.first.weight))
    if rank == 0:
        zero.set_local_parameter(model.first.bias, zero.local_parameter(model.first.bias) * 0)
        assert model.first.weight.numel() == 24
    with zero.GatheredParameters(model.first.weight, modifier_rank=1), torch.no_grad():
        model.first.weight.fill_(float(rank))
    zero.set_full_parameter(model.last.weight, torch.ones(2, 6))
    assert torch.equal(zero.full_parameter(model.first.weight), torch.ones(6, 4))
    zero.shard(model)
    other = build(rank)
    torch.manual_seed(3)
    plain = Net()
    other.load_state_dict(plain.state_dict())
    engine = zero.shard(other)
    engine.detach()
    assert rank or all(torch.equal(value, plain.state_dict()[key]) for key, value in other.state_dict().items())


@on_ranks()
def test_uninitialised_memory_is_no_difference(rank: int, world: int) -> None:
    """Memory that a checkpoint fills after the `with` may differ before."""
    dirty(rank)
    with zero.Init():
        model = nn.Module()
        model.weight = nn.Parameter(torch.Tensor(6, 6))
        model.inner = nn.Linear(2, 2)
    model.load_state_dict(
        {"weight": torch.ones(6, 6), **{f"inner.{k}": v for k, v in nn.Linear(2, 2).state_dict().items()}}
    )
    zero.shard(model)


def other_files(rank: int, world: int, folder: str) -> None:
    with pytest.raises(zero.RankMismatchError, match=r"from_pretrained.*rank 1"), zero.Init():
        transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/{rank}")
    with zero.Init():
        model = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/0")
    zero.shard(model)


def test_ranks_that_load_other_files(two: RankPool, tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=2, n_positions=16)
    for rank in (0, 1):
        torch.manual_seed(rank)
        transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / str(rank))
    two.run(other_files, str(tmp_path))
