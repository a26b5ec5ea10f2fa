"""Find the model that an argument names: a size, a built-in name, a folder, or a name on the Hub.

`look_up` loads no torch, so that wrong names are refused at once; `build` makes the layouts.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, ZeroError
from ..plan.shapes import NAMES, Architecture, Config, built_in, of_size
from .files import read_settings

if TYPE_CHECKING:
    from torch import nn

    from ..core.layout import Layout
    from ..core.precision import Precision

_MAX_PARAMETERS = 10**14
_MIN_PARAMETERS = 10**6
ADAPTER = "adapter_config.json"
_COUNT = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_MAX_DIGITS = 18
_FILES = (".json", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".yaml", ".yml")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")
_NO_SIZE = re.compile(r"[+]?[\d.][^/]*|[+]?(nan|inf|infinity)|[kmbt]", re.IGNORECASE)
"""Text like a number. Names on the Hub without a slash begin with a letter."""
_SIZE_IN_NAME = re.compile(r"(?<![\w.])\d+(\.\d+)?[mb](?![a-z\d])", re.IGNORECASE)
_HUB_S = 1.5
"""Seconds that the Hub has to answer."""

ModelSource = Config | Path
"""A configuration, or the folder or file that has one."""


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


def look_up(given: str) -> tuple[ModelSource, str]:
    """Resolve an existing path, a size, a built-in name, or else a name on the Hub; also return the assumptions made.

    Raises:
        ConfigError: none of these.
    """
    path = Path(os.path.expanduser(given))  # unlike Path.expanduser, leaves unknown users as they are
    if path.exists():
        return path, ""
    count = count_of(given)
    if count is not None:
        return _sized(given, count)
    if _NO_SIZE.fullmatch(given):
        raise ConfigError(f"{given!r} is not a size: write 7B, 1.3B, 350M or 7_000_000_000")
    if _is_path(given):
        raise ConfigError(f"no such folder or file: {given}")
    return built_in(given) or _on_hub(given), ""


def count_of(text: str) -> int | None:
    """Return the number of `7B`, `1.3b`, `350M` or `7_000_000`; None for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.strip().upper().replace(",", "").replace("_", ""))
    if match is None or len(match[1]) > _MAX_DIGITS:
        return None
    return round(float(match[1]) * _COUNT[match[2]]) or None


def _sized(text: str, count: int) -> tuple[Config, str]:
    if count > _MAX_PARAMETERS:
        raise ConfigError(f"{text.strip()} is more than {_MAX_PARAMETERS:,} parameters, the most that are planned")
    if count < 1000 and not text.strip().upper().endswith(("K", "M", "B", "T")):
        raise ConfigError(f"{text.strip()} is a model of {count} parameters. Did you mean {text.strip()}B?")
    if count < _MIN_PARAMETERS:
        raise ConfigError(f"{text.strip()} is too few parameters for a transformer: at least {_MIN_PARAMETERS:,}")
    name, config = of_size(count)
    sizes = Architecture.of(SimpleNamespace(**config.settings))
    blocks = "" if sizes is None else f"{sizes.layers} blocks of width {sizes.hidden:,}, "
    source = f" ({config.source})" if config.source else ""
    return config, f"structure assumed: {blocks}as {name}{source}"


def _is_path(text: str) -> bool:
    """Return True for text that looks like a path: more parts than a Hub name, or below an existing folder."""
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
        near = difflib.get_close_matches(name.lower().rsplit("/", 1)[-1], NAMES, n=3, cutoff=0.7)
        size = _SIZE_IN_NAME.search(name)
        meant = f"Without the Hub, plan its size: hf-zero plan {size[0]}" if size else ""
        if near or not size:
            meant = (
                f"Did you mean {' or '.join(near)}?" if near else "Known without it: gpt2-xl, llama-3-8b and others."
            )
        raise ConfigError(
            f"no model {name!r}: it is not a size, a folder or a built-in name, and the Hub has no configuration of it "
            f"or does not answer ({_first_line(error)}). {meant}"
        ) from error


# Layouts ------------------------------------------------------------------------------------------


def build(
    name: str, what: ModelSource, source: str = "", lora: int = 0, dtype: str = "float32", in_4bit: bool = False
) -> Model:
    """Return the model with its layouts.

    Args:
        source: assumptions about its structure.
        lora: rank of adapters on every matrix of the blocks; 0: none, all parameters are trained.
        dtype: of the frozen base under adapters.
        in_4bit: the base's matrices are quantized to 4 bits.

    Raises:
        ConfigError: no model can be made of its configuration.
    """
    from ..plan.activations import add_adapters

    adapter = what if isinstance(what, Path) and (what / ADAPTER).is_file() else None
    if adapter is not None and lora:
        raise ConfigError(f"{name} is an adapter already: plan it without --lora")
    model = model_of(name, what) if adapter is None else _adapter(name, adapter)
    notes = [source if adapter is None else "the adapter on its base, which is frozen"]
    if getattr(model.config, "quantization_config", None) is not None:
        notes.append("its quantization is not counted")
    architecture = Architecture.of(model.config, (key for key, _ in model.named_parameters()))
    parameters = sum(param.numel() for param in model.parameters())
    if lora:
        add_adapters(model, lora, dtype, in_4bit)
        base = "4-bit blocks (their quantization constants are not counted)" if in_4bit else dtype
        notes.append(f"LoRA of rank {lora} on every matrix of the blocks, base frozen in {base}")
    return Model(name, parameters, _layouts(model), architecture, "; ".join(filter(None, notes)))


def model_of(name: str, what: ModelSource) -> Any:
    """Return the model of a configuration on the meta device.

    Raises:
        ConfigError: no model can be made of it.
    """
    from ..huggingface.models import empty_model

    if isinstance(what, Path):
        if what.is_file() and what.suffix != ".json":
            raise ConfigError(f"{name}: expected a folder with a config.json, or that file")
        _check_counts(what if what.is_file() else what / "config.json")
    try:
        return empty_model(what)
    except ZeroError:
        raise
    except Exception as error:  # model classes raise anything at impossible sizes
        raise ConfigError(f"{name}: no model can be made of its configuration: {_first_line(error)}") from error


def _adapter(name: str, folder: Path) -> Any:
    """Return an adapter on its base: a folder, a size or a name.

    Raises:
        ConfigError: the base is missing, or the adapter does not fit it; the message names the base.
    """
    from ..huggingface.models import empty_adapter

    base = read_settings(folder / ADAPTER).get("base_model_name_or_path")
    if not isinstance(base, str) or not base.strip():
        raise ConfigError(f"{folder / ADAPTER} names no base model: set base_model_name_or_path, or plan the base")
    try:
        beside = folder / base
        what = beside if beside.is_dir() else look_up(base)[0]
        return empty_adapter(str(folder), model_of(base, what))
    except Exception as error:  # from PEFT or the base's class
        kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
        raise ConfigError(
            f"{name} is an adapter of {base!r}, and cannot be planned with it: {kind}{_first_line(error)}. "
            f"Set base_model_name_or_path in {folder / ADAPTER}"
        ) from error


_COUNTED = re.compile(r"layer|block|expert|depth|head")
_MAX_COUNTED = 10_000


def _check_counts(path: Path) -> None:
    """Bound the counts of a configuration: model classes create lists of that length before any module.

    Raises:
        ConfigError: a count is too large; the message names the key.
    """
    waiting: list[Any] = [read_settings(path)]
    while waiting:
        value = waiting.pop()
        for key, each in value.items() if isinstance(value, dict) else ():
            if _COUNTED.search(key) and isinstance(each, (int, float)) and each > _MAX_COUNTED:
                raise ConfigError(f"{path}: {key} is {each}, more than the {_MAX_COUNTED} that is believed")
        waiting += [
            each for each in (value.values() if isinstance(value, dict) else value) if isinstance(each, (dict, list))
        ]


def _layouts(model: nn.Module) -> Callable[..., Layout]:
    """Return a function of precision, shards and units."""
    from ..plan.plan import LayoutBuilder

    @cache
    def layout(precision: Precision, shards: int, units: tuple[str, ...] = ()) -> Layout:
        builder = LayoutBuilder(model, precision, units=units)
        return builder.layout(builder.specs(dict.fromkeys(builder.names, 0)), shards)

    return layout


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
