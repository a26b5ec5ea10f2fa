"""State dicts of optimizers, also after `detach`; what checkpoints refuse. Checkpoints: tests/conformance."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from hf_zero import CheckpointError, StateError, ZeroConfig
from hf_zero.engine import shard

pytestmark = pytest.mark.gloo
States = dict[str, dict[str, Any]]
OFFLOADS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 3},
    {"stage": 2, "offload_optimizer": "cpu"},
    {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
    {"stage": 3, "offload_optimizer": "disk", "offload_params": "disk"},
    {"stage": 1, "offload_optimizer": "disk"},
]


class Uneven(nn.Module):
    """Parts that have gradients in different steps: their parameters count steps apart. One weight is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(5, 7) for _ in range(3))
        self.scale, self.frozen = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, used: int) -> Tensor:
        total = sum((part(x) * self.frozen.sum()).pow(2).mean() for part in self.parts[:used])
        return total * self.scale


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Uneven()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 2]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 2e-2},
    ]
    return model, torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        model(x, 1 + step % 3).backward()
        optimizer.step()
        optimizer.zero_grad()


def same(ours: Any, theirs: Any, what: str = "") -> None:
    if isinstance(theirs, dict):
        assert sorted(ours) == sorted(theirs), what
        for key, value in theirs.items():
            same(ours[key], value, f"{what}.{key}")
    elif isinstance(theirs, Tensor):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), what
        assert torch.equal(ours, theirs), what
    else:
        assert ours == theirs, what


def plain_run(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = build(0)
    train(model, optimizer, range(steps))
    return model, optimizer


def settings_of(config: dict[str, Any], folder: Path) -> ZeroConfig:
    return ZeroConfig(**config, offload_dir=str(folder) if "disk" in config.values() else None)


def dictionaries(rank: int, world: int, place: Path) -> None:
    """State dicts are torch's; a state that is loaded stays, also where parameters have made other numbers of steps."""
    reference, other = plain_run(5)
    wanted = copy.deepcopy(other.state_dict())
    for config in OFFLOADS:
        model, optimizer = build(0)
        model.load_state_dict(reference.state_dict())
        engine = shard(model, optimizer, settings_of(config, place))
        for alone in (False, True):  # from every rank, or from rank 0
            given = copy.deepcopy(wanted)
            if alone and rank > 0:
                for entries in given["state"].values():
                    entries.update({name: each.to("meta") for name, each in entries.items() if each.dim()})
            train(model, optimizer, range(1))
            optimizer.load_state_dict(given)
            got = optimizer.state_dict()
            if rank == 0:
                same(got, wanted, str(config))
        engine.detach()
        same(optimizer.state_dict(), wanted, f"{config}, detached")
        assert all(type(param) is nn.Parameter for group in optimizer.param_groups for param in group["params"])


@pytest.mark.parametrize("world", [1, 2])
def test_state_dicts_have_torchs_form(pools, world, tmp_path):
    pools[world].run(dictionaries, tmp_path)


def refusals(rank: int, world: int, place: Path) -> None:
    model, optimizer = build(0)
    engine = shard(model, optimizer, ZeroConfig(stage=3))
    train(model, optimizer, range(3))
    with pytest.raises(StateError, match=r"'parts\.0\.weight'.*full_optimizer_state"):
        optimizer.state[model.parts[0].weight]
    state = copy.deepcopy(optimizer.state_dict())
    fewer = {**state, "param_groups": state["param_groups"][:1]}
    with pytest.raises(CheckpointError, match="groups of"):
        optimizer.load_state_dict(fewer)
    engine.save(place, async_save=True)
    if rank == 1:
        optimizer.state.clear()
    with pytest.raises(CheckpointError, match="not every rank has made the same steps"):
        engine.save(place)
    engine.wait_for_save()
    if rank == 0:  # which removes what was staged
        assert not [*place.parent.glob(".*"), *place.glob(".*")]
    engine.load(place)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.save(place)
    assert zero.verify(place).facts["world_size"] == 2
    engine.detach()


def test_what_is_refused_names_the_reason(pools, tmp_path):
    pools[2].run(refusals, tmp_path / "out")
