"""Whether a run under the plugin was the plain one: what it logged, the weights it ended with, the files it wrote."""

from __future__ import annotations

from typing import Any

import pytest

from .launch import Results

REL = 2e-5
SMALL = 1e-6
"""Of what is logged, differences of larger numbers (a divergence, a margin, a loss of centred advantages) have no more."""


def assert_same_run(found: Results, case: str, stage: int) -> None:
    mine, plain = found(f"{case} {stage}"), found(f"{case} plain")
    assert_same_logs(mine, plain, REL)
    assert plain["moved"], "something was trained"
    assert mine["moved"] == plain["moved"]
    assert {name: gap for name, gap in mine["apart"].items() if gap > REL} == {}
    assert mine["files"] == plain["files"]
    assert {name: gap for name, gap in mine["files apart"].items() if gap > REL} == {}


def assert_same_logs(mine: dict[str, Any], plain: dict[str, Any], rel: float) -> None:
    assert mine["class"] == f"Zero{plain['class']}"
    assert len(mine["logs"]) == len(plain["logs"])
    for ours, theirs in zip(mine["logs"], plain["logs"]):
        assert ours == pytest.approx(theirs, rel=rel, abs=SMALL)


def assert_same_or_named(found: Results, case: str, stage: int) -> None:
    """What a stage cannot do is refused by name, on every rank."""
    errors = [ranks.get(f"{case} {stage}", {}).get("error") for ranks in found.ranks]
    if None in errors:
        assert_same_run(found, case, stage)
    else:
        assert all("hf_zero.errors." in error for error in errors), "\n".join(errors)
