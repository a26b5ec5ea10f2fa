"""Worlds of real ranks, started once per session."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HOME = tempfile.TemporaryDirectory(prefix="hf_home_")
"""Caches of this session's own, empty at its start."""
gc.disable()
"""Until all is imported: of what imports make nothing is garbage."""
# Libraries read these when they are imported, here and in all children. Several processes share the cores: a thread each.
os.environ.update(HF_HOME=HOME.name, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from xdist.scheduler import LoadScopeScheduling  # noqa: E402

from tests.kit.pool import RankPool  # noqa: E402

torch.set_num_threads(1)
hypothesis.settings.load_profile("ci")
"""The same examples in every run. Others each time: `--hypothesis-profile=default`, and in the long tests."""
WIDE = tuple(Path(__file__).with_name("ci.txt").read_text(encoding="utf-8").splitlines())
"""Files, tests, and cases of tests that `make test` leaves out and CI runs after it: arguments of pytest."""
LONG = ("test_programs.py", "torture", "scripts", "huggingface", "engine", "random", "checkpoint")
"""Folders and files that take longest. They come first, so that several pytest processes end at about the same time."""


class Scheduling(LoadScopeScheduling):
    """One process runs a file, or one theme of the programs: what a file prepares, it prepares once."""

    def _split_scope(self, nodeid: str) -> str:
        path, _, name = nodeid.partition("::")
        return name.partition(".")[0] if path == "tests/test_programs.py" else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before markers deselect
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(WIDE):
            item.add_marker(pytest.mark.wide)
    places = {folder: place for place, folder in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.relative_to(Path(__file__).parent).parts[0], len(LONG)))


def pytest_collection_finish() -> None:
    """What was imported stays: a collection of garbage, of which tests make many, need not look at it."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    HOME.cleanup()


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, RankPool]]:
    worlds = {world: RankPool(world) for world in (1, 2, 3, 4)}
    yield worlds
    for pool in worlds.values():
        pool.stop()


@pytest.fixture
def two(pools: dict[int, RankPool]) -> RankPool:
    return pools[2]
