"""Rows under which a function on `tests.oracle.Run` ends in the same bits, where plain training has others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.kit.offloading import equal
from tests.kit.pool import RankPool
from tests.oracle import Program, Run, train
from tests.settings import Setting


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
