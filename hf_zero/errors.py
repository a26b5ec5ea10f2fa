"""The closed set of exceptions. A message says what happened, the value found, and what to do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class ZeroError(Exception):
    """Base class of all exceptions of hf_zero."""

    known_at: int = sys.maxsize
    """Depth of the outermost `on_all_ranks` block that some rank has left with this error."""


class ConfigError(ZeroError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class LayoutError(ZeroError, ValueError):
    """A model that cannot be partitioned into spans, or that no longer matches its spans."""


class StateError(ZeroError, RuntimeError):
    """A call in a state that does not allow it, or a write to a released parameter."""


class RankMismatchError(ZeroError, RuntimeError):
    """Ranks that hold different models, settings or programs. Raised on every rank."""


class NumericsError(ZeroError, ArithmeticError):
    """A value that is not finite, found by `debug=True`. Raised on every rank."""


class StallError(ZeroError, RuntimeError):
    """Ranks that wait for each other without progress, or for a rank that has ended. Raised on every live rank."""


class UnsupportedOptimizerError(ZeroError, TypeError):
    """An optimizer that needs full tensors or communicates by itself, where each rank holds flat slices."""


class CheckpointError(ZeroError, RuntimeError):
    """A checkpoint that is missing, incomplete, or belongs to another model."""


class TierError(ZeroError, RuntimeError):
    """A read or write of a tier that failed: the disk is full, fails, or its file was truncated."""


class OutOfMemoryError(ZeroError, MemoryError):
    """A failed allocation. The message says what was needed and which settings need less."""


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Guard imports of packages that only an extra of this package installs.

    Raises:
        ConfigError: a package is missing; the message says what to install.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise ConfigError(f"{package} is not installed: pip install 'hf-zero[{extra}]'") from error
