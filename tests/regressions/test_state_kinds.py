"""Optimizer state of any kind: saved, resumed on other numbers of ranks, stages and tiers, with equal further training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.kit.pool import RankPool

pytestmark = pytest.mark.gloo

STATES: dict[str, Callable[[Tensor], Any]] = {
    "shape (1,)": lambda param: torch.ones(1),
    "shape (1, 1)": lambda param: torch.ones(1, 1),
    "shape ()": lambda param: torch.ones(()),
    "int (1,)": lambda param: torch.ones(1, dtype=torch.int64),
    "float64": lambda param: torch.ones(1, dtype=torch.float64),
    "float": lambda param: 1.0,
    "int": lambda param: 1,
    "none": lambda param: None,
    "text": lambda param: "text",
    "list": lambda param: [1.0, 2],
    "tuple": lambda param: (1.0, 2, None),
    "tensors in a tuple": lambda param: (torch.ones(1), torch.ones(())),
    "bool": lambda param: torch.zeros((), dtype=torch.bool),
    "bools": lambda param: torch.zeros_like(param, dtype=torch.bool),
    "ints": lambda param: torch.zeros_like(param, dtype=torch.int32),
    "bfloat16": lambda param: torch.zeros_like(param, dtype=torch.bfloat16),
    "empty": lambda param: torch.zeros(0),
    "rows": lambda param: torch.zeros(param.shape[:1]),
    "two": lambda param: torch.ones(2),
}
LATE = 3


class Own(torch.optim.Optimizer):
    """SGD with momentum, a rate that follows its state, and a count in its groups."""

    def __init__(self, params: Any, kind: str, late: bool = False, lr: float = 0.05) -> None:
        self.kind, self.late = kind, late
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"], state["count"] = torch.zeros_like(param), 0
                if "x" not in state and state["count"] == LATE * self.late:
                    state["x"] = STATES[self.kind](param)
                state["count"] += 1
                state["momentum"].mul_(0.9).add_(param.grad)
                param.sub_(state["momentum"], alpha=group["lr"] * self.rate(state))
            group["steps"] = group.get("steps", 0) + 1

    def rate(self, state: dict[str, Any]) -> float:
        x = state.get("x")
        sample = STATES[self.kind](torch.zeros(3))  # not of the parameter, which may have one element itself
        is_single = isinstance(sample, Tensor) and sample.numel() == 1
        if isinstance(x, Tensor) and is_single and x.dtype != torch.bool:
            x.add_(1)
            return 1 / float(x)
        if isinstance(x, Tensor) and not is_single and x.numel():
            state["x"] = ~x if x.dtype == torch.bool else x + 1
        if isinstance(x, Tensor) and x.dtype == torch.bool and not x.dim():
            state["x"] = ~x
            return 0.5 + 0.5 * float(x)
        if isinstance(x, float | int) and not isinstance(x, bool):
            state["x"] = x + 1
            return 1 / (x + 1)
        if isinstance(x, list | tuple):
            state["x"] = type(x)([x[0] + 1, *x[1:]])
            return 1 / float(x[0] + 1)
        return 1.0


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1), nn.Linear(1, 1))


def batch(step: int, number: int) -> Tensor:
    return torch.randn(2, 5, generator=torch.Generator().manual_seed(100 * step + number))


ROWS = 6  # batches of a step, shared by 1, 2 or 3 ranks


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int, world: int) -> None:
    for step in steps:
        batches = [batch(step, number) for number in range(rank, ROWS, world)]
        torch.stack([model(x).square().mean() for x in batches]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def plain(kind: str, late: bool, steps: int) -> tuple[nn.Module, Own]:
    model = net()
    optimizer = Own(model.parameters(), kind, late)
    train(model, optimizer, range(steps), 0, 1)
    return model, optimizer


def check(model: nn.Module, reference: nn.Module) -> None:
    for mine, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(zero.full_parameter(mine), wanted.detach(), rtol=1e-5, atol=1e-6)


def check_state(found: Any, wanted: Any, dtypes: bool = True) -> None:
    assert type(found) is type(wanted), (found, wanted)
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            check_state(found[key], value, dtypes)
    elif isinstance(wanted, list | tuple):
        for one, other in zip(found, wanted, strict=True):
            check_state(one, other, dtypes)
    elif isinstance(wanted, Tensor):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6, check_dtype=dtypes)
    else:
        assert found == pytest.approx(wanted) if isinstance(wanted, float) else found == wanted


CASES = [(kind, False) for kind in STATES] + [("shape (1,)", True), ("ints", True), ("tuple", True)]


def saved(rank: int, world: int, folder: Path, settings: dict[str, Any], turn: int) -> None:
    for number, (kind, late) in enumerate(CASES[turn::7]):
        model = net()
        optimizer = Own(model.parameters(), kind, late)
        engine = zero.shard(model, optimizer, zero.ZeroConfig(offload_dir=str(folder.parent), **settings))
        train(model, optimizer, range(5), rank, world)
        reference, known = plain(kind, late, 5)
        check(model, reference)
        engine.save(folder / str(number))
        state = optimizer.state_dict()
        if rank == 0:
            check_state(state, known.state_dict())
        engine.detach()


def resumed(rank: int, world: int, folder: Path, settings: dict[str, Any], turn: int) -> None:
    for number, (kind, late) in enumerate(CASES[turn::7]):
        model = net()
        optimizer = Own(model.parameters(), kind, late)
        engine = zero.shard(model, optimizer, zero.ZeroConfig(offload_dir=str(folder.parent), **settings))
        engine.load(folder / str(number))
        train(model, optimizer, range(5, 8), rank, world)
        reference, known = plain(kind, late, 8)
        check(model, reference)
        state = optimizer.state_dict()
        if rank == 0:
            check_state(state, known.state_dict())
        engine.detach()


WAYS: list[tuple[dict[str, Any], int, dict[str, Any]]] = [
    ({"stage": 0}, 1, {"stage": 2}),
    ({"stage": 1}, 3, {"stage": 3}),
    ({"stage": 2}, 1, {"stage": 2, "offload_optimizer": "cpu"}),
    ({"stage": 3}, 2, {"stage": 1}),
    ({"stage": 2, "offload_optimizer": "cpu"}, 3, {"stage": 2}),
    ({"stage": 2, "offload_optimizer": "disk"}, 1, {"stage": 2, "offload_optimizer": "disk"}),
    ({"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"}, 3, {"stage": 0}),
]


@pytest.mark.parametrize(("first", "world", "then"), WAYS, ids=str)
def test_state_of_every_kind_is_resumed(
    pools: dict[int, RankPool], tmp_path: Path, first: dict[str, Any], world: int, then: dict[str, Any]
) -> None:
    turn = WAYS.index((first, world, then))  # every kind goes one of these ways
    pools[2].run(saved, tmp_path / "saves", first, turn, timeout_s=110)
    pools[world].run(resumed, tmp_path / "saves", then, turn, timeout_s=110)


CAST = ("bfloat16", "float64")
"""When a model is detached, too."""


def taken_over(rank: int, world: int, stage: int) -> None:
    """Plain training goes on sharded, by way of `load_state_dict` and of an optimizer that has state already."""
    for kind, late in CASES[stage::4]:
        for how in ("bound", "loaded"):
            reference, known = plain(kind, late, 3)
            model, optimizer = plain(kind, late, 3)
            if how == "loaded":
                state = optimizer.state_dict()
                optimizer = Own(model.parameters(), kind, late)
            engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=stage))
            if how == "loaded":
                optimizer.load_state_dict(state)
            train(model, optimizer, range(3, 6), rank, world)
            train(reference, known, range(3, 6), 0, 1)
            check(model, reference)
            engine.detach()
            # torch's own load_state_dict casts states to the parameters' type.
            check_state(optimizer.state_dict(), known.state_dict(), dtypes=how == "bound" and kind not in CAST)


@pytest.mark.parametrize("stage", range(4))
def test_state_of_every_kind_is_taken_over(two: RankPool, stage: int) -> None:
    two.run(taken_over, stage, timeout_s=110)


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "dict": lambda param: {"a": 1.0},
    "list of tensors": lambda param: [torch.zeros_like(param)],
    "dict of tensors": lambda param: {"a": torch.zeros_like(param)},
    "complex": lambda param: 1 + 2j,
    "complex (1,)": lambda param: torch.ones(1, dtype=torch.complex64),
    "object": lambda param: object(),
}


class Odd(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for state in self.state.values():
            state.setdefault("y", REFUSED[self.odd](state["momentum"]))

    odd = ""


def refused(rank: int, world: int) -> None:
    for odd in REFUSED:
        model = net()
        optimizer = Odd(model.parameters(), "int")
        optimizer.odd = odd
        with pytest.raises(zero.UnsupportedOptimizerError, match="'y'"):
            zero.shard(model, optimizer, zero.ZeroConfig(stage=2))


def test_state_that_has_no_place_is_refused_at_shard(two: RankPool) -> None:
    two.run(refused)
