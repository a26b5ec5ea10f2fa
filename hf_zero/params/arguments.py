"""Check the types of the arguments of `zero.shard`, and name the likely mistake."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..config import ZeroConfig
from ..errors import ConfigError


def check_shard_arguments(model: Any, optimizer: Any, config: Any) -> None:
    """
    Raises:
        ConfigError: an argument has another type; the message shows the call that was meant.
    """
    call = "zero.shard(model, optimizer, zero.ZeroConfig(stage=3))"
    if config is not None and not isinstance(config, ZeroConfig):
        if isinstance(config, dict):
            meant = f"zero.ZeroConfig({', '.join(f'{key}={value!r}' for key, value in config.items())})"
        elif isinstance(config, int) and not isinstance(config, bool):
            meant = f"zero.ZeroConfig(stage={config})"
        elif hasattr(config, "config"):
            meant = "plugin.config"
        else:
            meant = "zero.ZeroConfig(stage=3)"
        raise ConfigError(f"config must be a ZeroConfig, found {type(config).__name__} {config!r}. Pass {meant}")
    if isinstance(model, torch.optim.Optimizer) and isinstance(optimizer, nn.Module):
        raise ConfigError(f"model and optimizer are in the wrong order. Call {call}")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, found {type(model).__name__}. Call {call}")
    if isinstance(optimizer, ZeroConfig):
        raise ConfigError(
            "the second argument is the optimizer, found a ZeroConfig. Without an optimizer call zero.shard(model, config=…)"
        )
    if isinstance(optimizer, type):
        raise ConfigError(
            f"optimizer must be an instance, found the class {optimizer.__name__}. Pass {optimizer.__name__}"
            "(model.parameters(), …)"
        )
    several = optimizer if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
    for each in several:
        if not isinstance(each, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer must be a torch.optim.Optimizer or a list of them, found {type(each).__name__}. Call {call}"
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
