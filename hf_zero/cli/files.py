"""Paths from the command line: files to write, and settings to read, which may be hostile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from ..checkpoint.files import read_bounded, read_json
from ..errors import CheckpointError, ConfigError

MAX_YAML_BYTES = 256 << 10
"""YAML is read at some 100 kB a second."""
_MAX_DEEP = 50


def writable(path: str | None) -> None:
    """Check that a file can be written, before the work that makes it.

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
        raise ConfigError(f"{path} cannot be written: no folder {parent}")
    if not os.access(target if target.exists() else parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: no permission")


def read_settings(path: Path) -> dict[str, Any]:
    """Read a JSON or YAML file that maps names to settings: text, numbers, lists and objects.

    Raises:
        ConfigError: the file is missing, too large, invalid, or YAML with aliases (which can expand beyond memory).
    """
    try:
        if path.suffix == ".json":
            return read_json(path)
        values = _plain(_yaml(read_bounded(path, MAX_YAML_BYTES)))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected names with settings, found {type(values).__name__}")
    return values


def _yaml(raw: bytes) -> Any:
    text, depth = raw.decode(), 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has aliases (*name): replace them by their values")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEEP:  # the scanner's time grows with the square
            raise ValueError("nested too deeply")
    return yaml.safe_load(text)


def _plain(value: Any) -> Any:
    """Convert names to text, and dates, sets and bytes of YAML to plain values."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
