"""`zero.shard`: build the engine and attach its observers."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from .. import compat, diagnostics, sequence
from ..compat.compiling import Compile
from ..config import ZeroConfig, ranks_text
from ..core.lazy_import import LazyFunction
from ..engine.shard import Optimizers
from ..engine.shard import shard as shard_core
from ..plan.machine import Machine
from .arguments import check_shard_arguments, device_from
from .engine import Engine
from .rank_equality import check_deferred_equal

_LOG = logging.getLogger(__name__)
_CHECK_LOADER = LazyFunction("accelerate.state", "huggingface.arguments", "check_loader")


def shard(
    model: nn.Module,
    optimizer: Optimizers = None,
    config: ZeroConfig | None = None,
    *,
    mixed_precision: str | None = "no",
    device: torch.device | str | int | None = None,
    machine: Machine | None = None,
    **transports: Any,
) -> Engine:
    """Shard `model` and `optimizer` in place over the default process group. A collective.

    The training loop does not change: `model(x).loss.backward()`, `optimizer.step()`, `optimizer.zero_grad()`.

    Args:
        model: on its final device, in its final dtype; or made under `zero.Init`.
        optimizer: over this model's parameters, with or without state; a list of several; None to evaluate only.
        config: the settings; stage 2 by default.
        mixed_precision: `no`, `bf16` or `fp16`: the forward runs under autocast.
        device: the device to compute on, for a model in host memory: units move there one by one, which takes no more device
            memory than training. None: the model's device.
        machine: measured speeds, for `auto`. Default: typical speeds.
        transports: the transports of bytes; see `hf_zero.engine.shard`.

    Returns:
        The engine.

    Raises:
        ConfigError: invalid settings; a model that is already sharded.
        LayoutError: a model on several devices or on the meta device, an optimizer over other parameters.
        UnsupportedOptimizerError: an optimizer that cannot step over a sharded model.
        RankMismatchError: ranks differ in structure or values; names the first difference, on every rank.

    Example:
        >>> engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3), mixed_precision="bf16")
    """
    check_shard_arguments(model, optimizer, config, transports)
    model, compile_ = unwrap_compiled(model)
    check_deferred_equal(model)
    config = config or ZeroConfig()
    observers = [*compat.observers(), *diagnostics.observers(config), *sequence.observers(config)]
    try:
        engine = shard_core(
            model,
            optimizer,
            config,
            observers,
            mixed_precision=mixed_precision,
            device=device_from(device),
            machine=machine or Machine(),
            kind=Engine,
            **transports,
        )
    except BaseException:
        for observer in observers:
            observer.refused()
        raise
    _check_first_forward(engine)
    _log(engine)
    if compile_ is not None:
        engine.compile(using=compile_)
    return engine


def unwrap_compiled(model: nn.Module) -> tuple[nn.Module, Compile | None]:
    """Return the module inside `torch.compile(model)`, which the wrapper then calls, and a function that compiles as it did."""
    inner, compile_ = getattr(model, "_orig_mod", None), getattr(model, "dynamo_ctx", None)
    if not isinstance(inner, nn.Module) or compile_ is None:
        return model, None
    model.__dict__["forward"] = inner.__call__
    return inner, compile_


def _check_first_forward(engine: Engine) -> None:
    """Check the data loader at each forward, up to the first that builds a graph."""

    def check(*_: object) -> None:
        if (check_loader := _CHECK_LOADER.if_loaded()) is not None:
            check_loader(engine.world_size)
        if torch.is_grad_enabled():
            handle.remove()

    handle = engine.model.register_forward_pre_hook(check)
    engine.on_detach(handle.remove)


def _log(engine: Engine) -> None:
    if engine.rank:
        return
    config = engine.config
    ranks = ranks_text(engine.world_size)
    if config.replicas > 1:
        ranks += f" in {config.replicas} replicas"
    _LOG.info("stage %d on %s; %s", config.stage, ranks, engine.precision)
