"""Long runs with saves and evaluations: what a process holds does not grow.

`HF_ZERO_STEPS`: steps of the long ones.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.kit.health import Health, growth
from tests.kit.launch import launch

pytestmark = pytest.mark.gloo
STEPS = int(os.environ.get("HF_ZERO_STEPS", "2000"))


def looks_of(folder: Path, way: str, tier: str, steps: int, every: int, ranks: int) -> list[list[Health]]:
    """Of each rank, one every `every` steps."""
    words = (way, tier, str(steps), str(every), str(folder / "run"))
    launch("endurance_job", folder, *words, ranks=ranks, timeout=60 + 2 * steps)("run")
    lines = [(folder / f"looks{rank}.jsonl").read_text().splitlines() for rank in range(ranks)]
    return [[Health(**json.loads(line)) for line in mine] for mine in lines]


def nothing_grew(looks: list[list[Health]], warm: int, most_bytes: int) -> None:
    """
    Args:
        warm: steps after which all is there that stays.
        most_bytes: by which resident memory may grow: an allocator's, an interpreter's, a log's.
    """
    for rank, mine in enumerate(looks):
        grown = growth(mine, warm)
        print(f"rank {rank}: {mine[-1]}, grown by {grown}")
        resident = grown.pop("resident_bytes")
        assert not any(value > 0 for value in grown.values()), f"rank {rank}: {grown}"
        assert resident <= most_bytes, f"rank {rank}: {resident} bytes"
        assert mine[-1].files <= mine[0].files, f"rank {rank}"


@pytest.mark.wide
@pytest.mark.parametrize(("way", "tier"), [("trainer", "disk"), ("plain", "device")])
def test_a_run_with_saves_and_evaluations_keeps_nothing(way: str, tier: str, tmp_path: Path) -> None:
    """Descriptors, threads, keys, files, the ledger: 60 steps with 12 saves and evaluations."""
    nothing_grew(looks_of(tmp_path, way, tier, 60, 5, 2), 20, 8 << 20)


@pytest.mark.torture
@pytest.mark.timeout(2 * STEPS + 300)
@pytest.mark.parametrize(
    ("way", "tier", "ranks"),
    [
        ("trainer", "device", 2),
        ("trainer", "disk", 4),
        ("trainer", "auto", 2),
        ("accelerate", "disk", 2),
        ("accelerate", "born", 4),
        ("plain", "device", 2),
        ("plain", "disk", 2),
        ("plain", "born", 4),
    ],
)
def test_a_long_run_keeps_nothing(way: str, tier: str, ranks: int, tmp_path: Path) -> None:
    """Resident memory, too: at most 4 MiB for each 1,000 steps, with a save and an evaluation every 10."""
    nothing_grew(looks_of(tmp_path, way, tier, STEPS, 10, ranks), STEPS // 4, (4 << 20) * max(1, STEPS // 1000))
