"""Programs over the wire that CUDA uses, here with gloo's own collectives, and in small units, equal plain training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from tests.kit.pool import RankPool, on_ranks
from tests.kit.transports import ROADS
from tests.programs.architectures import ARCHITECTURES
from tests.settings import Setting
from tests.test_programs import check

pytestmark = pytest.mark.gloo


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.wide)])
def test_collectives(pools: dict[int, RankPool], world: int) -> None:
    rows = [
        Setting(world, stage, precision=each, roads="collectives") for stage in range(4) for each in ("fp32", "bf16")
    ]
    check(pools, "loops.gpt2_clipped_and_accumulated", rows)


@pytest.mark.wide
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blocks_that_are_split(pools: dict[int, RankPool], name: str) -> None:
    check(pools, f"architectures.{name}", [Setting(stage=stage, roads="small units") for stage in (2, 3)])


class Ordered(nn.Module):
    """Blocks of one size, which run in the order that they are told."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for number in order:
            x = self.blocks[number](x)
        return x.square().mean()


def limit(group: Any) -> Any:
    return group._get_backend(torch.device("cpu")).options._timeout


@on_ranks()
def test_collectives_of_user_code_do_not_come_between(rank: int, world: int) -> None:
    """One rank starts its own before a step, the other after it: those of the engine are in a process group of their own."""
    model = Ordered()
    engine = zero.shard(model, None, zero.ZeroConfig(stage=3), **ROADS["collectives"].given)
    assert limit(engine.wire.group) == limit(dist.group.WORLD), "the limit that init_process_group was given"
    total = torch.full((7,), float(rank))
    work = dist.all_reduce(total, async_op=True) if rank == 0 else None
    model(torch.ones(2, 16), (0, 1, 2, 3)).backward()
    (work or dist.all_reduce(total, async_op=True)).wait()
    assert total.tolist() == [1.0] * 7


@pytest.mark.parametrize("orders", [((0, 1, 2, 3), (0, 2, 1, 3)), ((0, 1, 3), (0, 2, 3))])
@on_ranks()
def test_collectives_in_another_order(rank: int, world: int, orders: tuple[tuple[int, ...], ...]) -> None:
    """They have no tags: each rank would compute with a mixture of two blocks."""
    model = Ordered()
    zero.shard(model, None, zero.ZeroConfig(stage=3), **ROADS["collectives"].given)
    with pytest.raises(zero.RankMismatchError, match="or in another order"):
        model(torch.ones(2, 16), orders[rank]).backward()
