"""What is typed as a path."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ConfigError


def writable(path: str | None) -> None:
    """Whether a file can be written there, before the work that makes it.

    Raises:
        ConfigError: it is a folder, its folder is missing, or neither may be written to.
    """
    if path is None:
        return
    target = Path(path)
    parent = target.parent
    if target.is_dir():
        raise ConfigError(f"{path} is a folder: expected a file to write")
    if not parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {parent}")
    if not os.access(target if target.exists() else parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: no permission")
