"""Find the model that an argument names: a size, a built-in name, a folder, a file, or a name on the Hub.

`look_up` loads no torch, so that wrong names are refused at once; `build` makes the layouts.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, ZeroError
from ..plan.shapes import NAMES, Architecture, Config, Shape, built_in, of_size
from .files import read_settings

if TYPE_CHECKING:
    from torch import nn

    from ..core.layout import Layout, ParamSpec
    from ..core.precision import Precision
    from ..plan.plan import Drafter

_MOST_PARAMETERS = 10**14
_LEAST_PARAMETERS = 1000
"""Least number without a unit: `8` was meant as `8B`."""
ADAPTER = "adapter_config.json"
_COUNT = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_MOST_DIGITS = 18
_FILES = (".json", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".yaml", ".yml")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")
_NO_SIZE = re.compile(r"[+]?[\d.][^/]*|[+]?(nan|inf|infinity)|[kmbt]", re.IGNORECASE)
"""Text like a number. Names on the Hub without a slash begin with a letter."""
_HUB_S = 1.5
"""Seconds that the Hub has to answer."""

What = int | Shape | Config | Path
"""A number of parameters too small for blocks, sizes, a configuration, or a folder or file."""


@dataclass(frozen=True)
class Model:
    """A model and its layouts."""

    name: str
    """Name in titles."""
    parameters: int
    """Elements, before they are quantized."""
    layout: Callable[..., Layout]
    """Layouts by precision, number of shards and patterns of units; each is built once."""
    architecture: Architecture | None = None
    """Sizes for activations; None: not known."""
    source: str = ""
    """Assumptions about its structure; empty if it is the model's own."""


# Names --------------------------------------------------------------------------------------------


def look_up(given: str | None, parameters: str | None = None) -> What:
    """Return what an existing path, a size, a built-in name, or last a name on the Hub means.

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
        return _sized(parameters or "", count)
    path = Path(given).expanduser()
    if path.exists():
        return path
    count = count_of(given)
    if count is not None:
        return _sized(given, count)
    if _NO_SIZE.fullmatch(given):
        raise ConfigError(f"{_short(given)!r} is not a size: write 7B, 1.3B, 350M or 7_000_000_000")
    if _is_path(given):
        raise ConfigError(f"no such folder or file: {_short(given)}")
    return built_in(given) or _on_hub(given)


def count_of(text: str) -> int | None:
    """Return the number of `7B`, `1.3b`, `350M` or `7_000_000`; None for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.strip().upper().replace(",", "").replace("_", ""))
    if match is None or len(match[1]) > _MOST_DIGITS:
        return None
    return round(float(match[1]) * _COUNT[match[2]]) or None


def _sized(text: str, count: int) -> Shape | int:
    if count > _MOST_PARAMETERS:
        raise ConfigError(f"{text.strip()} is more than {_MOST_PARAMETERS:,} parameters, the most that are planned")
    if count < _LEAST_PARAMETERS and not text.strip().upper().endswith(("K", "M", "B", "T")):
        raise ConfigError(f"{text.strip()} is a model of {count} parameters. Did you mean {text.strip()}B?")
    return of_size(count) or count


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:100]}…"


def _is_path(text: str) -> bool:
    """Return True for text that was meant as a path: more parts than a Hub name, or below an existing folder."""
    first = Path(text).parts[0] if text else ""
    return _HUB_NAME.fullmatch(text) is None or text.lower().endswith(_FILES) or ("/" in text and Path(first).is_dir())


def _on_hub(name: str) -> Path:
    """Return the configuration of a model on the Hub, in the local cache."""
    from huggingface_hub import hf_hub_download, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.utils import build_hf_headers, get_session

    try:
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            return Path(cached)
        url, headers = hf_hub_url(name, "config.json"), build_hf_headers()
        get_session().head(url, headers=headers, timeout=_HUB_S, follow_redirects=True).raise_for_status()
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # of the HTTP client, by version
        near = difflib.get_close_matches(name.lower().rsplit("/", 1)[-1], NAMES, n=3, cutoff=0.5)
        meant = (
            f"Did you mean {' or '.join(near)}?" if near else "Known without the Hub: gpt2-xl, llama-3-8b and others."
        )
        raise ConfigError(
            f"no model {_short(name)!r}: it is no size, folder or built-in name, and the Hub has no configuration of it "
            f"or does not answer ({_first_line(error)}). {meant}"
        ) from error


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


# Layouts ------------------------------------------------------------------------------------------


def build(name: str, what: What, lora: int = 0, dtype: str = "float32", in_4bit: bool = False) -> Model:
    """Return the model with its layouts.

    Args:
        lora: rank of adapters on every matrix of the blocks; 0: none, all parameters are trained.
        dtype: of the frozen base under adapters.
        in_4bit: the base's matrices are quantized to 4 bits.

    Raises:
        ConfigError: no model can be made of its configuration.
    """
    from ..plan.outline import add_adapters, from_files, from_number, from_shape

    model: nn.Module
    architecture, source, is_outline = None, "", True
    if isinstance(what, int):
        model, source = from_number(what), "too few parameters for the blocks of a transformer: planned as one unit"
    elif isinstance(what, Shape):
        model, architecture = from_shape(what), what.architecture
        if count_of(name) is not None:
            source = f"structure assumed: {what.layers} blocks of width {what.hidden:,}, as {what.name} ({what.source})"
    elif isinstance(what, Path) and _has_tensors_only(what):
        model = from_files(what)
    else:
        is_outline = False
        model, source = (model_of(name, what), "") if isinstance(what, Config) else _local(name, what)
        architecture = Architecture.of(model.config, (key for key, _ in model.named_parameters()))
    if lora and any("lora_" in key for key, _ in model.named_parameters()):
        raise ConfigError(f"{name} is an adapter already: plan it without --lora")
    parameters = sum(param.numel() for param in model.parameters())
    if lora:
        add_adapters(model, lora, dtype, in_4bit)
        base = "4-bit blocks (their quantization constants are not counted)" if in_4bit else dtype
        source = (
            f"{source + '; ' if source else ''}LoRA of rank {lora} on every matrix of the blocks, base frozen in {base}"
        )
    return Model(name, parameters, _layouts(model, is_outline), architecture, source)


def _has_tensors_only(path: Path) -> bool:
    """Return True for a .safetensors file, and for a folder without a configuration."""
    if path.is_dir():
        return not any((path / name).exists() for name in (ADAPTER, "config.json"))
    return path.suffix == ".safetensors" and not (path.parent / ADAPTER).is_file()


def _local(name: str, path: Path) -> tuple[Any, str]:
    folder = path if path.is_dir() else path.parent
    base = adapter_base(folder) if path.is_dir() or "adapter" in path.name else None
    if base is not None:
        return _adapter(name, folder, base), f"the adapter on its base {base}, which is frozen"
    if path.is_file() and path.suffix != ".json":
        raise ConfigError(f"{name}: expected a config.json, a .safetensors file or a folder with one of them")
    return model_of(name, path), ""


def model_of(name: str, what: Config | Path) -> Any:
    """Return the model of a configuration on the meta device.

    Raises:
        ConfigError: no model can be made of it.
    """
    from ..huggingface.models import empty_model

    if isinstance(what, Path):
        check_counts(what if what.is_file() else what / "config.json")
    try:
        with _few_modules(name):  # a folder may have the name of a built-in model
            return empty_model(str(what.absolute()) if isinstance(what, Path) else what)
    except ZeroError:
        raise
    except Exception as error:  # model classes raise anything at impossible sizes
        raise ConfigError(f"{name}: no model can be made of its configuration: {_first_line(error)}") from error


def _adapter(given: str, folder: Path, base: str) -> Any:
    """Return an adapter on its base: a local folder, a built-in name, or a name on the Hub.

    Raises:
        ConfigError: the base is missing, or the adapter does not fit it; the message names the base.
    """
    from ..huggingface.models import empty_adapter

    place = next((path for path in (Path(base).expanduser(), folder / base) if path.is_dir()), None)
    try:
        what = place or look_up(base)
        if isinstance(what, Path) and what.is_dir() and not (what / "config.json").is_file():
            raise ConfigError(f"{what} has no config.json: plan needs the base's own")
        if isinstance(what, int):
            raise ConfigError("a number is not a model")
        model = model_of(base, what.config if isinstance(what, Shape) else what)
        with _few_modules(given):
            return empty_adapter(str(folder), model)
    except Exception as error:  # from PEFT or the base's class
        kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
        raise ConfigError(
            f"{given} is an adapter of {_short(base)!r}, and cannot be planned with it: {kind}{_first_line(error)}. "
            f"Set base_model_name_or_path in {folder / ADAPTER}"
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
    from torch.nn.modules.module import register_module_module_registration_hook

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


def _layouts(model: nn.Module, is_outline: bool) -> Callable[..., Layout]:
    """Return a function of precision, shards and units. Patterns that match nothing in an outline are ignored."""
    from ..core.units import find_named
    from ..plan.plan import Drafter

    names = [key for key, _ in model.named_parameters(remove_duplicate=False)]

    def is_named(pattern: str) -> bool:
        try:
            return bool(find_named(model, (pattern,)))
        except ConfigError:
            return False

    @cache
    def drafted(precision: Precision, units: tuple[str, ...]) -> tuple[Drafter, list[list[ParamSpec]]]:
        if is_outline:
            known = tuple(pattern for pattern in precision.full_precision if fnmatch.filter(names, pattern))
            precision, units = replace(precision, full_precision=known), tuple(filter(is_named, units))
        drafter = Drafter(model, precision, units=units)
        return drafter, drafter.specs(dict.fromkeys(drafter.names, 0))

    @cache
    def layout(precision: Precision, shards: int, units: tuple[str, ...] = ()) -> Layout:
        drafter, specs = drafted(precision, units)
        return drafter.layout(specs, shards)

    return layout


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
