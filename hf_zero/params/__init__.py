"""Parameters created, read and written by users: `Init`, `GatheredParameters` and the accessors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

FIRST_FORWARD: list[Callable[[int], None]] = []
"""Checks of the number of ranks, called before a sharded model's first forward; `huggingface` adds one, without torch."""

EXTENSIONS: list[Callable[[Any], AbstractContextManager[object] | None]] = []
"""The libraries that take part in `zero.Init`; filled by `huggingface`, without torch, before anything asks.

Asked with the outermost Init when it is entered; what they return is entered with it and left with it.
"""
