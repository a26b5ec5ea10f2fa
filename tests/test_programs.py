"""Every program under rows of settings equals plain data parallel training, or ends in the error that it names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kit.pool import RankFailure, RankPool
from tests.oracle import WORLD_LIMIT_S, default_rows, fresh_folder, on_rank
from tests.programs import PROGRAMS
from tests.settings import EVERYDAY, Setting, product

pytestmark = pytest.mark.gloo


def check(pools: dict[int, RankPool], name: str, chosen: Sequence[Setting]) -> None:
    wrong = []
    for world, pool in pools.items():
        rows = [row for row in chosen if row.ranks == world]
        if not rows:
            continue
        with fresh_folder() as folder:
            try:
                answers = pool.run(on_rank, name, rows, folder, timeout_s=WORLD_LIMIT_S + len(rows))
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
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(pools: dict[int, RankPool], name: str) -> None:
    check(pools, name, default_rows()[name])


def test_default_rows_hold_every_stage_with_every_tier_and_precision() -> None:
    def held(rows: Iterable[Setting]) -> set[Any]:
        return {(row.stage, value) for row in rows for value in (row.tier, row.precision)}

    trained = [row for name, rows in default_rows().items() for row in rows if PROGRAMS[name].refusal(row) is None]
    assert held(product(EVERYDAY, lambda row: True)) <= held(trained)


@pytest.mark.wide
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_under_pairs(pools: dict[int, RankPool], name: str) -> None:
    """Rows with every pair of values that the program goes with."""
    check(pools, name, PROGRAMS[name].paired_rows)
