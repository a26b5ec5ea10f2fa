"""Settings in files of other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from ..checkpoint.files import read_bounded, read_json
from ..errors import CheckpointError, ConfigError

MAX_YAML_BYTES = 256 << 10
"""YAML is read at some 100 kB a second."""


def read_settings(path: Path) -> dict[str, Any]:
    """Read a JSON or YAML file that maps names to settings: text, numbers, lists and objects.

    Raises:
        ConfigError: the file is missing, too large, invalid, or YAML with aliases (which can expand beyond memory).
    """
    try:
        if path.suffix == ".json":
            return read_json(path)
        text = read_bounded(path, MAX_YAML_BYTES).decode()
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise ValueError("it has aliases (*name): replace them by their values")
        values = json.loads(json.dumps(yaml.safe_load(text), default=str))  # dates as text
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    except (RecursionError, TypeError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected names with settings, found {type(values).__name__}")
    return values
