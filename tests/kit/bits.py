"""Values that are equal to the bit; rows under which a function on `tests.oracle.Run` ends in the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.kit.pool import RankPool
from tests.oracle import Program, Run, train
from tests.settings import Setting


def same(mine: Any, theirs: Any) -> bool:
    """Equal values, and of tensors equal types and shapes; on the meta device there are no values."""
    if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return bool(mine == theirs)
    if (mine.dtype, mine.shape, mine.device) != (theirs.dtype, theirs.shape, theirs.device):
        return False
    return mine.is_meta or torch.equal(mine, theirs)


def values(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """What a run ends with: weights, and the optimizer's state in the order of its keys."""
    state = optimizer.state_dict()["state"]
    return [
        *(value.clone() for value in model.state_dict().values()),
        *(state[i][key] for i in state for key in sorted(state[i])),
    ]


def equal(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(same(a, b) for a, b in zip(ours, theirs))


def _values(outcome: dict[str, Any]) -> list[Any]:
    parts = (found.items() for part, found in outcome.items() if part != "seen")
    return [*(value for _, value in outcome["seen"]), *(value for part in parts for _, value in part)]


def _differing(
    rank: int, world: int, function: Callable[[Run], None], rows: Sequence[Setting], folder: str
) -> list[str]:
    program = Program(function.__name__, function)
    outcomes = (train(program, row, rank, world, f"{folder}/{at}", False) for at, row in enumerate(rows))
    first, *others = map(_values, outcomes)
    return [f"{program.name}: {row}" for row, found in zip(rows[1:], others) if not equal(found, first)]


def check_bits(pool: RankPool, function: Callable[[Run], None], rows: Sequence[Setting], folder: Path) -> None:
    """What it looked at, weights and optimizer state are those of the first row."""
    assert pool.run(_differing, function, rows, str(folder / function.__name__)) == [[]] * pool.world
