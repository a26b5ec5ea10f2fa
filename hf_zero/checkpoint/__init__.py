"""Arrays to folders and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FORMATS: list[Callable[[Any], Any]] = []
"""Who may know the names of a model's weights; filled by `huggingface`, without torch, before anything asks.

From a model to its `weights.WeightFormat`, or None; asked in order before the generic one.
"""
