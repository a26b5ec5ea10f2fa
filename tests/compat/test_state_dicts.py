"""State dicts: what hooks of user code see, and ranks that load other values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_zero import RankMismatchError, StateError, ZeroConfig, shard
from tests.kit.pool import RankPool

pytestmark = pytest.mark.gloo


class Scaled(nn.Linear):
    """Saves its weight in another unit, by overriding what torch calls for each module."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight * 2

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        state = {**state, prefix + "weight": state[prefix + "weight"] / 2}
        super()._load_from_state_dict(state, prefix, *args)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), Scaled(6, 3))


def user_code(rank: int, world: int, stage: int, precision: str) -> None:
    plain, model = build(), build()
    sums: list[float] = []
    for each in (plain, model):
        each[0].register_state_dict_post_hook(
            lambda _, state, prefix, __: sums.append(float(state[prefix + "weight"].sum()))
        )
    shard(model, None, ZeroConfig(stage=stage, stall_s=20), mixed_precision=precision)
    expected, found = plain.state_dict(), model.state_dict()
    assert list(expected) == list(found)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert sums[0] == sums[1]
    changed = {name: value + 1 for name, value in expected.items()}
    plain.load_state_dict(changed)
    model.load_state_dict(changed)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in plain.state_dict().items())
    model[0].load_state_dict({"weight": torch.ones(6, 4)}, strict=False)
    assert bool((model.state_dict()["0.weight"] == 1).all())
    with pytest.raises(RuntimeError, match="size mismatch for 0.bias"):
        model.load_state_dict({**changed, "0.bias": torch.zeros(1)})
    with pytest.raises(StateError, match="assign"):
        model.load_state_dict(changed, assign=True)


@pytest.mark.parametrize(("stage", "precision"), [(0, "no"), (1, "bf16"), (3, "no"), (3, "bf16")])
def test_user_code_sees_values(two: RankPool, stage: int, precision: str) -> None:
    two.run(user_code, stage, precision)


def other_values(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard(model, optimizer, ZeroConfig(stage=3, stall_s=20))
    model.load_state_dict({"0.bias": torch.full((6,), float(rank))}, strict=False)
    with pytest.raises(RankMismatchError, match=r"'0\.bias' is not on rank 1 what it is on rank 0"):
        model(torch.ones(2, 4)).sum().backward()


def test_ranks_load_other_values(two: RankPool) -> None:
    two.run(other_values)
