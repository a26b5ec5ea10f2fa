"""The closed set of exceptions. A message says what was expected, what was found, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ZeroError(Exception):
    """Base of every exception that hf_zero raises on purpose."""


class ConfigError(ZeroError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class LayoutError(ZeroError, ValueError):
    """A model that cannot be cut into spans, or that no longer fits the spans it was cut into."""


class StateError(ZeroError, RuntimeError):
    """A verb used in a state that does not allow it, or a released parameter that was written to."""


class RankMismatchError(ZeroError, RuntimeError):
    """Ranks that hold different models, settings or programs. Raised on every rank."""


class NumericsError(ZeroError, ArithmeticError):
    """A value that is not finite, found by `debug=True`. Raised on every rank."""


class StallError(ZeroError, RuntimeError):
    """Ranks that wait for each other and will not meet, or for one that has ended. Raised on every rank that lives."""


class UnsupportedOptimizerError(ZeroError, TypeError):
    """An optimizer that needs whole tensors, where each rank holds only flat slices of them."""


class CheckpointError(ZeroError, RuntimeError):
    """A checkpoint that is missing, incomplete, or belongs to another model."""


class TierError(ZeroError, RuntimeError):
    """Bytes that could not be moved: a disk that is full, fails, or was cut short."""


class OutOfMemoryError(ZeroError, MemoryError):
    """Memory that the engine could not have. Says what was needed and which setting would have fit."""


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Around imports of what only an extra of this package installs.

    Raises:
        ConfigError: a package is missing; the message says what to install.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise ConfigError(f"{package} is not installed: pip install 'hf-zero[{extra}]'") from error
