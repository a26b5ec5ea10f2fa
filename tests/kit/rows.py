"""Products of parameters of which the default run takes rows with each value."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def each_value(*axes: Iterable[Any]) -> list[Any]:
    """Return the product of `axes`; outside rows that together hold each value of each axis, cases are marked `wide`."""
    listed = [[*axis] for axis in axes]
    longest = max(len(axis) for axis in listed)
    chosen = {tuple(at % len(axis) for axis in listed) for at in range(longest)}
    return [
        pytest.param(
            *(axis[at] for axis, at in zip(listed, places)),
            marks=() if places in chosen else pytest.mark.wide,
        )
        for places in itertools.product(*(range(len(axis)) for axis in listed))
    ]
