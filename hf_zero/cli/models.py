"""Find the model that an argument names: a size, a built-in name, a folder, a file, or a name on the Hub."""

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

_MOST_PARAMETERS = 10**14
_LEAST_PARAMETERS = 1000
"""Least number without a unit: `8` was meant as `8B`."""
ADAPTER = "adapter_config.json"
_COUNT = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_MOST_DIGITS = 18
_FILES = (".json", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".yaml", ".yml")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")


@dataclass(frozen=True)
class Model:
    """A model and its layouts."""

    name: str
    """Name in titles."""
    layout: Callable[..., Layout]
    """Layouts by precision, number of shards and patterns of units; each is built once."""
    architecture: Architecture | None = None
    """Sizes for activations; None: not known."""
    source: str = ""
    """Assumptions about its structure; empty if it is the model's own."""


def find_model(given: str | None, parameters: str | None) -> Model:
    """Return the model of an existing path, a size, a built-in name, or last a name on the Hub, never for a path.

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
            raise ConfigError(
                f"--parameters: expected a number such as 7.5B or 124M, found {_short(parameters or '')!r}"
            )
        _check_count(parameters or "", count)
        return _sized(f"{parameters} parameters", count)
    path = Path(given).expanduser()
    if path.exists():
        return _local(given, path)
    count = count_of(given)
    if count is not None:
        _check_count(given, count)
        return _sized(given, count)
    if given.lower() in BUILT_IN:
        shape = BUILT_IN[given.lower()]
        return _of_outline(given, from_shape(shape), shape.architecture)
    if given.lower() in CONFIGS:
        return _of_config(given, given)
    if _NO_SIZE.fullmatch(given):
        raise ConfigError(f"{_short(given)!r} is not a size: write 7B, 1.3B, 350M or 7_000_000_000")
    if _is_path(given):
        raise ConfigError(f"no such folder or file: {_short(given)}")
    return _of_hub(given)


def count_of(text: str) -> int | None:
    """Return the number of `7B`, `1.3b`, `350M` or `7_000_000`; None for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.strip().upper().replace(",", "").replace("_", ""))
    if match is None or len(match[1]) > _MOST_DIGITS:
        return None
    return round(float(match[1]) * _COUNT[match[2]]) or None


_NO_SIZE = re.compile(r"[+]?[\d.][^/]*|[+]?(nan|inf|infinity)|[kmbt]", re.IGNORECASE)
"""Return True for text like a number. Names on the Hub without a slash begin with a letter."""


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:100]}…"


def _check_count(text: str, count: int) -> None:
    """Check a number of parameters.

    Raises:
        ConfigError: the number cannot be meant.
    """
    if count > _MOST_PARAMETERS:
        raise ConfigError(f"{text.strip()} is more than {_MOST_PARAMETERS:,} parameters, the most that are planned")
    if count < _LEAST_PARAMETERS and not text.strip().upper().endswith(("K", "M", "B", "T")):
        raise ConfigError(f"{text.strip()} is a model of {count} parameters. Did you mean {text.strip()}B?")


def _is_path(text: str) -> bool:
    """Return True for text that was meant as a path: more parts than a Hub name, or below an existing folder."""
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


def adapter_base(folder: Path) -> str | None:
    """Return the base model that an adapter's folder names; None where the folder has no adapter.

    Raises:
        ConfigError: the adapter's configuration names no base.
    """
    path = folder / ADAPTER
    if not path.is_file():
        return None
    base = read_settings(path).get("base_model_name_or_path")
    if not isinstance(base, str) or not base.strip():
        raise ConfigError(f"{path} names no base model: set base_model_name_or_path, or plan the base itself")
    return base


def _adapter(given: str, folder: Path, base: str) -> Model:
    """Return an adapter on its base: a local folder, a built-in name, or a name on the Hub.

    Raises:
        ConfigError: the base is missing, or the adapter does not fit it; the message names the base.
    """
    from ..huggingface.models import empty_adapter, empty_model

    said = f"{given} is an adapter of {_short(base)!r}"
    places = [path for path in (Path(base).expanduser(), folder / base) if path.is_dir()]
    known = BUILT_IN.get(base.rsplit("/", 1)[-1].lower())
    if base.lower() not in CONFIGS and not places and known is None and _is_path(base):
        raise ConfigError(f"{said}, and that folder is missing: set base_model_name_or_path in {folder / ADAPTER}")
    if places:
        if not (places[0] / "config.json").is_file():
            raise ConfigError(f"{said}, and {places[0]} has no config.json: plan needs the base's own")
        check_counts(places[0] / "config.json")
    source: Any = (
        str(places[0].absolute()) if places else base if base.lower() in CONFIGS or known is None else known.config
    )
    try:
        with _few_modules(given):
            model: Any = empty_adapter(str(folder), empty_model(source))
    except ZeroError:
        raise
    except Exception as error:  # from PEFT or the base's class
        kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
        raise ConfigError(f"{said}, and cannot be planned with it: {kind}{_first_line(error)}") from error
    architecture = Architecture.of(model.config, (key for key, _ in model.named_parameters()))
    return _of_modules(given, model, architecture, f"the adapter on its base {base}, which is frozen")


def _local(given: str, path: Path) -> Model:
    folder = path.parent if path.name in (ADAPTER, "adapter_model.safetensors") else path
    base = adapter_base(folder)
    if base is not None:
        return _adapter(given, folder, base)
    if path.is_file() and path.suffix == ".safetensors":
        return _of_outline(given, from_files(path))
    if path.is_dir() and not (path / "config.json").exists():
        return _of_outline(given, from_files(path))
    if path.is_file() and path.suffix != ".json":
        raise ConfigError(f"{given}: expected a config.json, a .safetensors file or a folder with one of them")
    check_counts(path if path.is_file() else path / "config.json")
    try:
        return _of_config(given, str(path.absolute()))  # a folder may have the name of a built-in model
    except ZeroError:
        raise
    except Exception as error:  # model classes raise anything at impossible sizes
        raise ConfigError(f"{given}: no model can be made of its configuration: {_first_line(error)}") from error


def _of_hub(name: str) -> Model:
    try:
        return _of_config(name, name)
    except (OSError, ValueError) as error:
        names = sorted({*BUILT_IN, *CONFIGS})
        near = difflib.get_close_matches(name.lower(), names, n=2)
        meant = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(
            f"no model {_short(name)!r}: it is no size (7B, 350M), no built-in name ({', '.join(names)}), nothing here has "
            f"that name, and the Hub has not answered for it: {_first_line(error)}.{meant}"
        ) from error


_COUNTED = re.compile(r"layer|block|expert|depth|head")
_MOST_COUNTED, _MOST_MODULES = 100_000, 500_000


def check_counts(path: Path) -> None:
    """Bound the counts of a configuration: model classes create lists of that length before any module.

    Raises:
        ConfigError: a count is too large; the message names the key.
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
    """Bound the number of modules created inside.

    Raises:
        ConfigError: a model with more modules than memory has room for.
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
    """Return the model of a built-in name, a folder, a file or the Hub."""
    from ..huggingface.models import empty_model

    with _few_modules(name):
        model: Any = empty_model(place)

    architecture = Architecture.of(model.config, (key for key, _ in model.named_parameters()))
    return _of_modules(name, model, architecture)


def _of_outline(name: str, model: nn.Module, architecture: Architecture | None = None, source: str = "") -> Model:
    """Return the layout of modules built from names; patterns that match none of them are ignored."""
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
