"""What a model is called on the command line, and its units: a size, a built-in name, a folder, a file, a name on the Hub."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..core.layout import Layout, ParamSpec
from ..core.precision import Precision
from ..core.units import find_named
from ..errors import ConfigError, ZeroError
from ..plan.configs import CONFIGS
from ..plan.outline import BUILT_IN, Architecture, from_files, from_number, from_shape, of_size
from ..plan.plan import Drafter
from .files import read_settings

_COUNT = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_MOST_DIGITS = 18
_FILES = (".json", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".yaml", ".yml")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")


@dataclass(frozen=True)
class Model:
    """A model's layouts, however it is known."""

    name: str
    """What it is called in titles."""
    layout: Callable[..., Layout]
    """For a precision, a number of shards and patterns of units (default: none); each is made once."""
    architecture: Architecture | None = None
    """For activations; None where it is not known."""
    source: str = ""
    """What was assumed of its structure; empty where it is the model's own."""


def find_model(given: str | None, parameters: str | None) -> Model:
    """What `given` stands for: a path that is there, a size, a built-in name, at last a name on the Hub, which is never asked
    for what looks like a path.

    Raises:
        ConfigError: none of these, or both or neither are given.
    """
    if (given is None) == (parameters is None):
        raise ConfigError(
            "plan needs either a model or --parameters N: hf-zero plan 7B, hf-zero plan out/checkpoint-500"
        )
    if given is None:
        count = count_of(parameters or "")
        if count is None:
            raise ConfigError(f"--parameters: expected a number such as 7.5B or 124M, found {parameters!r}")
        return _sized(f"{parameters} parameters", count)
    path = Path(given).expanduser()
    if path.exists():
        return _local(given, path)
    count = count_of(given)
    if count is not None:
        return _sized(given, count)
    if given.lower() in BUILT_IN:
        shape = BUILT_IN[given.lower()]
        return _of_outline(given, from_shape(shape), shape.architecture)
    if given.lower() in CONFIGS:
        return _of_config(given, given)
    if _is_path(given):
        raise ConfigError(f"no such folder or file: {given}")
    return _of_hub(given)


def count_of(text: str) -> int | None:
    """`7B`, `1.3b`, `350M`, `7_000_000`; None for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.strip().upper().replace(",", "").replace("_", ""))
    if match is None or len(match[1]) > _MOST_DIGITS:
        return None
    return round(float(match[1]) * _COUNT[match[2]]) or None


def _is_path(text: str) -> bool:
    """Whether somebody who typed it meant a path: more than a name on the Hub has, or below a folder that is here."""
    first = Path(text).parts[0] if text else ""
    return _HUB_NAME.fullmatch(text) is None or text.lower().endswith(_FILES) or ("/" in text and Path(first).is_dir())


def _sized(name: str, parameters: int) -> Model:
    shape = of_size(parameters)
    if shape is None:
        source = "too few parameters for the blocks of a transformer: planned as one unit"
        return _of_outline(name, from_number(parameters), source=source)
    source = (
        f"structure assumed: {shape.layers} blocks of width {shape.hidden:,}, as {shape.name} ({shape.source}); a config.json "
        "gives the model's own"
    )
    return _of_outline(name, from_shape(shape), shape.architecture, source)


def _local(given: str, path: Path) -> Model:
    if path.is_file() and path.suffix == ".safetensors":
        return _of_outline(given, from_files(path))
    if path.is_dir() and not (path / "config.json").exists():
        return _of_outline(given, from_files(path))
    if path.is_file() and path.suffix != ".json":
        raise ConfigError(f"{given}: expected a config.json, a .safetensors file or a folder with one of them")
    _check_counts(path if path.is_file() else path / "config.json")
    try:
        return _of_config(given, str(path.absolute()))  # not a built-in name, whatever the folder is called
    except ZeroError:
        raise
    except Exception as error:  # whatever a model's class raises at sizes that it was not made for
        raise ConfigError(f"{given}: no model can be made of its configuration: {_first_line(error)}") from error


def _of_hub(name: str) -> Model:
    try:
        return _of_config(name, name)
    except (OSError, ValueError) as error:
        names = sorted({*BUILT_IN, *CONFIGS})
        near = difflib.get_close_matches(name.lower(), names, n=2)
        meant = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(
            f"no model {name!r}: it is no size (7B, 350M), no built-in name ({', '.join(names)}), nothing here has that "
            f"name, and the Hub has not answered for it: {_first_line(error)}.{meant}"
        ) from error


_COUNTED = re.compile(r"layer|block|expert|depth|head")
_MOST_COUNTED, _MOST_MODULES = 100_000, 500_000


def _check_counts(path: Path) -> None:
    """Classes make lists as long as a configuration says, before the first module.

    Raises:
        ConfigError: naming the key.
    """
    waiting: list[Any] = [read_settings(path)]
    while waiting:
        value = waiting.pop()
        for key, each in value.items() if isinstance(value, dict) else ():
            if _COUNTED.search(key) and isinstance(each, (int, float)) and each > _MOST_COUNTED:
                raise ConfigError(f"{path}: {key} is {each}, more than the {_MOST_COUNTED} that is believed")
        waiting += [
            each for each in (value.values() if isinstance(value, dict) else value) if isinstance(each, (dict, list))
        ]


@contextmanager
def _few_modules(name: str) -> Iterator[None]:
    """Raises:
    ConfigError: a model of more modules than memory has room for is being made inside.
    """
    count = 0

    def counted(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > _MOST_MODULES:
            raise ConfigError(f"{name}: its configuration asks for more than {_MOST_MODULES} modules")

    handle = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        handle.remove()


def _of_config(name: str, place: str) -> Model:
    """Built in, or of a folder, a file or the Hub."""
    from ..huggingface.models import empty_model

    with _few_modules(name):
        model: Any = empty_model(place)

    architecture = Architecture.of(model.config, (key for key, _ in model.named_parameters()))
    return _of_modules(name, model, architecture)


def _of_outline(name: str, model: nn.Module, architecture: Architecture | None = None, source: str = "") -> Model:
    """Of modules that were made for names: patterns that none of these have are passed over."""
    names = [key for key, _ in model.named_parameters(remove_duplicate=False)]
    made = _of_modules(name, model, architecture, source)

    def layout(precision: Precision, shards: int, units: tuple[str, ...] = ()) -> Layout:
        known = tuple(pattern for pattern in precision.full_precision if fnmatch.filter(names, pattern))
        found = tuple(pattern for pattern in units if _is_named(model, pattern))
        return made.layout(replace(precision, full_precision=known), shards, found)

    return replace(made, layout=layout)


def _is_named(model: nn.Module, pattern: str) -> bool:
    try:
        return bool(find_named(model, (pattern,)))
    except ConfigError:
        return False


def _of_modules(name: str, model: nn.Module, architecture: Architecture | None, source: str = "") -> Model:
    @cache
    def drafted(precision: Precision, units: tuple[str, ...]) -> tuple[Drafter, list[list[ParamSpec]]]:
        drafter = Drafter(model, precision, units=units)
        return drafter, drafter.specs(dict.fromkeys(drafter.names, 0))

    @cache
    def layout(precision: Precision, shards: int, units: tuple[str, ...] = ()) -> Layout:
        drafter, specs = drafted(precision, units)
        return drafter.layout(specs, shards)

    return Model(name, layout, architecture, source)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
