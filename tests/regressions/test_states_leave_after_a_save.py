"""A save has looked at the memory of the parameters; `offload_states` frees it all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hf_zero as zero
from tests.kit.pool import RankPool
from tests.models import Odd, sgd

pytestmark = pytest.mark.gloo


def saved_then_away(rank: int, world: int, folder: Path) -> None:
    torch.manual_seed(0)
    model = Odd()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = zero.shard(model, sgd(model), zero.ZeroConfig(stage=1))
    engine.save(folder / "saved")
    engine.load(folder / "saved")
    engine.offload_states()
    with torch._C.DisableTorchFunctionSubclass():  # else asking for the storage reads the values, which are away
        assert all(param.untyped_storage().nbytes() == 0 for param in model.parameters())
    engine.reload_states()
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name]), name
    engine.detach()


def test_states_leave_after_a_save(two: RankPool, tmp_path: Path) -> None:
    two.run(saved_then_away, tmp_path)
