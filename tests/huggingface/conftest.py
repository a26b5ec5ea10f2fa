"""What accelerate keeps for the whole process does not outlive a test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("tests.kit.same")

from tests.kit.jobs.harness import fresh  # noqa: E402


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    fresh()
    yield
    fresh()
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # accelerate sets it when it is given an FSDP plugin
