"""Arrays to folders and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FORMATS: list[Callable[[Any], Any]] = []
"""Functions from a model to its `weights.WeightFormat`, or None; asked in order before the generic format.

`huggingface` adds its own at import, before a model can be saved, and without importing torch.
"""
