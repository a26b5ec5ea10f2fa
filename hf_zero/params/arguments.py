"""Check the types of the arguments of `zero.shard`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..config import UnknownSettingError, ZeroConfig
from ..errors import ConfigError

TRANSPORTS = ("open_wire", "open_storage", "limits")
"""Further arguments of `hf_zero.engine.shard`."""


def check_shard_arguments(model: Any, optimizer: Any, config: Any, more: Mapping[str, Any]) -> None:
    """
    Args:
        more: the other keywords.

    Raises:
        ConfigError: an argument has the wrong type, or does not exist.
    """
    if settings := {name: value for name, value in more.items() if name not in TRANSPORTS}:
        ZeroConfig(**settings)  # a name that is no setting either: its error has the closest one
        given = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        raise UnknownSettingError(
            f"zero.shard takes settings in a ZeroConfig. Call zero.shard(model, optimizer, zero.ZeroConfig({given}))"
        )
    several = optimizer if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
    for name, found, kind, wanted in (
        ("config", ZeroConfig() if config is None else config, ZeroConfig, "a ZeroConfig"),
        ("model", model, nn.Module, "a torch.nn.Module"),
        *(
            ("optimizer", each, torch.optim.Optimizer, "a torch.optim.Optimizer, or several in a list")
            for each in several
        ),
    ):
        if not isinstance(found, kind):
            shown = " ".join(repr(found).split())  # in one line
            shown = shown if len(shown) <= 80 else f"{shown[:78]} …"
            raise ConfigError(
                f"{name} must be {wanted}, found {shown}. Call zero.shard(model, optimizer, zero.ZeroConfig(stage=3))"
            )


def device_from(given: Any) -> torch.device | None:
    """Return `given` as a device: None, a `torch.device`, its text, or the index of a GPU.

    Raises:
        ConfigError: not a device, or a GPU that this process does not have.
    """
    if given is None:
        return None
    try:
        is_index = isinstance(given, int) and not isinstance(given, bool)
        device = torch.device("cuda", given) if is_index else torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"device={given!r} is not a device. Pass torch.device('cuda', local_rank) or 'cpu'"
        ) from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise ConfigError(
            f"device={str(device)!r}, but this process sees {found or 'no'} GPU{'' if found == 1 else 's'}. Install a CUDA "
            "build of torch, check CUDA_VISIBLE_DEVICES, or pass device='cpu'"
        )
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device
