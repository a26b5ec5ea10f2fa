"""Each deliberate bug of `tests/mutants.py` can be planted: its passage occurs exactly once."""

from __future__ import annotations

from tests.mutants import misfits


def test_every_mutant_applies() -> None:
    assert not misfits()
