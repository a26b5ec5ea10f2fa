"""Every program under its rows of settings equals plain data parallel training, or ends in the error that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.pool import RankFailure, RankPool
from tests.oracle import WORLD_LIMIT_S, fresh_folder, on_rank
from tests.programs import PROGRAMS

pytestmark = pytest.mark.gloo


def check(pools: dict[int, RankPool], name: str, strength: int | None = None) -> list[str]:
    wrong = []
    for world, rows in PROGRAMS[name].rows(strength).items():
        with fresh_folder() as folder:
            limit_s = WORLD_LIMIT_S + len(rows)
            try:
                answers = pools[world].run(on_rank, name, rows, folder, timeout_s=limit_s)
            except RankFailure as failure:
                at = [f"rank {path.name[4:]} was at: {path.read_text()}" for path in sorted(Path(folder).glob("rank*"))]
                wrong.append("\n".join([f"{world} ranks", *at, str(failure)]))
                continue
        wrong += [
            f"rank {rank} of {world}, {row}: {line}"
            for rank, found in enumerate(answers)
            for row, lines in found.items()
            for line in lines[:5]
        ]
    return wrong


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(pools: dict[int, RankPool], name: str, pytestconfig: pytest.Config) -> None:
    """Rows that hold every pair of values in a theme; with `--pairs`, in each program."""
    if wrong := check(pools, name, 2 if pytestconfig.getoption("--pairs") else None):
        pytest.fail("\n".join(wrong), pytrace=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_under_every_row(pools: dict[int, RankPool], name: str) -> None:
    if wrong := check(pools, name, 0):
        pytest.fail("\n".join(wrong), pytrace=False)
