"""User programs, one file per theme. Importing the package collects them in `PROGRAMS`.

A program is a plain function `def clip_by_value(run: Run) -> None` that trains a small model in a way a user could have
written. It runs under many settings and, as its reference, under plain data parallel training: see `tests/oracle.py`.
"""

from __future__ import annotations

import importlib
import pkgutil

from tests.oracle import PROGRAMS

for found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{found.name}")

__all__ = ["PROGRAMS"]
