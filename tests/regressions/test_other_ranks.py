"""A checkpoint of one number of ranks, stage and tier, loaded by others: the same values, or a named error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hf_zero as zero
from tests.models import Mixed, adamw, ids, token_loss
from tests.optimizers import Shampoo

pytestmark = pytest.mark.gloo


def groups(model: nn.Module) -> list[torch.optim.Optimizer]:
    wide = [p for p in model.parameters() if p.dim() > 1]
    return [torch.optim.AdamW([{"params": wide}, {"params": [p for p in model.parameters() if p.dim() < 2]}], lr=1e-2)]


def a_list(model: nn.Module) -> list[torch.optim.Optimizer]:
    wide = [p for p in model.parameters() if p.dim() > 1]
    return [torch.optim.Muon(wide, lr=1e-2), torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2])]


def shampoo(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [Shampoo(model.parameters())]


KINDS = {"groups": groups, "a list": a_list, "shampoo": shampoo}
PLACES: dict[str, dict[str, Any]] = {
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "0": {"stage": 0},
    "host": {"stage": 2, "offload_optimizer": "cpu"},
    "disk": {"stage": 3, "offload_optimizer": "disk", "offload_params": "disk"},
}
WAYS = [
    (2, "3", 3, "1"), (4, "1", 1, "2"), (1, "2", 4, "3"), (3, "2", 2, "0"), (2, "host", 3, "disk"), (2, "disk", 1, "host")
]  # fmt: skip
DEFAULT = (WAYS[0], WAYS[3], WAYS[4])
"""tests/conformance/test_checkpoints.py has other optimizers on every number of ranks."""


def sharded(kind: str, place: str, folder: str, is_deferred: bool = False) -> tuple[Any, Any, zero.Engine]:
    torch.manual_seed(0)
    if is_deferred:
        with zero.Init():
            model = Mixed()
    else:
        model = Mixed()
    optimizers = KINDS[kind](model)
    return model, optimizers, zero.shard(model, optimizers, zero.ZeroConfig(offload_dir=folder, **PLACES[place]))


def values(model: Any, optimizers: Any) -> Any:
    states = [optimizer.state_dict() for optimizer in optimizers]
    return model.state_dict(), [state["state"] for state in states], [state["param_groups"] for state in states]


def write(rank: int, world: int, place: str, folder: str) -> dict[str, Any]:
    found = {}
    for kind in KINDS:
        model, optimizers, engine = sharded(kind, place, folder)
        for step in range(2):
            rows = ids(rank, step)
            token_loss(model(rows), rows).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        engine.save(f"{folder}/{kind}")
        found[kind] = values(model, optimizers)
        engine.detach()
    return found if rank == 0 else {}


def read(rank: int, world: int, place: str, folder: str, wanted: dict[str, Any]) -> list[str]:
    wrong = []
    for kind, (weights, states, options) in wanted.items():
        model, optimizers, engine = sharded(kind, place, folder, is_deferred=kind == "shampoo")
        engine.load(f"{folder}/{kind}")
        mine = values(model, optimizers)
        engine.detach()
        if rank > 0:
            continue
        wrong += [f"{kind}: options"] if mine[2] != options else []
        wrong += [f"{kind}: {name}" for name, value in weights.items() if not torch.equal(mine[0][name], value)]
        for number, state in enumerate(states):
            keys = [(at, key) for at, entries in state.items() for key in entries]
            wrong += [f"{kind}: keys"] if keys != [(a, k) for a, of in mine[1][number].items() for k in of] else []
            wrong += [f"{kind}: {at} {k}" for at, k in keys if not torch.equal(mine[1][number][at][k], state[at][k])]
    return wrong


@pytest.mark.parametrize(
    ("writers", "place", "readers", "other"),
    [way if way in DEFAULT else pytest.param(*way, marks=pytest.mark.wide) for way in WAYS],
)
def test_loaded_elsewhere(pools, tmp_path, writers, place, readers, other):
    wanted = pools[writers].run(write, place, str(tmp_path))[0]
    for kind in KINDS:
        zero.verify(tmp_path / kind)
    answers = pools[readers].run(read, other, str(tmp_path), wanted)
    assert not any(answers), answers


def trained(rank: int, build: Any, **config: Any) -> tuple[Any, torch.optim.Optimizer, zero.Engine]:
    torch.manual_seed(0)
    model = Mixed()
    optimizer = build(model)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(**config))
    rows = ids(rank, 0)
    token_loss(model(rows), rows).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, engine


def other_class(rank: int, world: int, folder: str) -> None:
    """The state of AdamW is refused by every other class, also by Adam: its options would be replaced."""
    _, _, engine = trained(rank, adamw, stage=2)
    engine.save(folder)
    for build in (
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        lambda m: torch.optim.Adam(m.parameters(), lr=1e-4),
    ):
        _, wrong, engine = trained(rank, build, stage=1)
        before = {key: value for key, value in wrong.param_groups[0].items() if key != "params"}
        with pytest.raises(zero.CheckpointError, match=rf"state of AdamW.*optimizer is {type(wrong).__name__}"):
            engine.load(folder)
        assert {key: value for key, value in wrong.param_groups[0].items() if key != "params"} == before
        engine.load(folder, load_optimizer=False)


def test_the_state_of_another_class(two, tmp_path):
    two.run(other_class, str(tmp_path))
