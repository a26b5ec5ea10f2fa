"""The engine while it trains."""

from __future__ import annotations

from collections.abc import Callable

FIRST_FORWARD: list[Callable[[int], None]] = []
"""Checks of the number of ranks, called before a sharded model's first forward; `huggingface` adds one, without torch."""
