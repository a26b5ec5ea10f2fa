"""`shard(model, optimizer, config) -> Engine`: builds layout, units, schedule and optimizer bindings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import nn

from ..comm import agreement
from ..comm.codec import CODECS
from ..comm.group_wire import open_wire
from ..comm.hybrid import in_replicas
from ..comm.wire import Wire
from ..config import ZeroConfig
from ..core.precision import Precision
from ..core.units import LIMITS, Limits
from ..errors import ConfigError, RankMismatchError, TierError
from ..optimizers.kinds import optimizer_kind
from ..optimizers.step_probe import state_tensors
from ..plan.costs import Placement
from ..plan.machine import Machine, free_memory
from ..plan.plan import LayoutBuilder, plan
from ..plan.solve import PlanInputs
from ..tiers.fingerprint import fingerprint
from ..tiers.host import keep_freed_memory, returning_freed_memory
from ..tiers.storage import Storage
from ..tiers.tier import Tier
from .build import build_units, device_of, move_buffers, specs_of
from .context import Context
from .engine import Engine, engine_of
from .observer import Events, Observer
from .param_groups import bind, originals_of
from .parameter import original_class, place_of, source_of

Made = TypeVar("Made", bound=Engine)
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def shard(
    model: nn.Module,
    optimizer: Optimizers = None,
    config: ZeroConfig | None = None,
    observers: Sequence[Observer] = (),
    *,
    mixed_precision: str | None = "no",
    device: torch.device | None = None,
    machine: Machine | None = None,
    open_wire: Callable[[torch.device], Wire] = open_wire,
    open_storage: Callable[[torch.device, int, str | None], Storage] = Storage,
    limits: Limits = LIMITS,
    kind: type[Made] = Engine,  # type: ignore[assignment]
) -> Made:
    """Shard `model` and `optimizer` in place over the default process group. A collective.

    The training loop stays as it was: `model(x).loss.backward()`, `optimizer.step()`, `optimizer.zero_grad()`.

    Args:
        model: on its final device, in its final dtype.
        optimizer: over this model's parameters, with or without state; several in a list; None to evaluate only.
        config: the settings.
        observers: attached to the engine's events. Ordinary training loops work without any.
        mixed_precision: `no`, `bf16` or `fp16`: the forward runs under autocast.
        device: where to compute, for a model that is in host memory.
        machine: measured speeds, for `auto`.
        open_wire: opens the transport between ranks for tensors on a device. Pass another to observe or simulate it.
        open_storage: creates the storage that the tiers share, from the device, the rank and `offload_dir`. Pass another for
            other block sizes, or another link to the device.
        limits: of the sizes of units.
        kind: the engine's class.

    Returns:
        The engine.

    Raises:
        ConfigError: settings, or a model that is sharded already.
        LayoutError: a model on several devices, an optimizer over other parameters.
        RankMismatchError: ranks with different models, optimizers or settings; on every rank.

    Example:
        >>> engine = shard(model, torch.optim.AdamW(model.parameters()), ZeroConfig(stage=3))
    """
    config = config or ZeroConfig()
    optimizers = (
        [] if optimizer is None else [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else [*optimizer]
    )
    precision = Precision.of(mixed_precision, config.reduce_dtype, config.full_precision, config.wire)
    wire = open_wire(device or next((p.device for p in model.parameters()), torch.device("cpu")))
    with wire.watch.operation("zero.shard"):
        wire.start(config.stall_s)
    # If one rank raises, every rank raises, before anything has changed.
    with agreement.on_all_ranks(wire, "zero.shard", kind=RankMismatchError):
        _check_free(model)
        for observer in observers:
            observer.check(model, optimizers)
        config.check_world_size(wire.size)
        wire.codec = CODECS.get(config.wire)
        wire = in_replicas(wire, config.replicas)
        builder = LayoutBuilder(model, precision, limits, config.units)
        where = device_of(model, device)
        originals = originals_of(optimizers, builder.names)
        is_sharded = config.shards(wire.size) > 1
        kinds = [
            optimizer_kind(each, builder.names, sharded=is_sharded, offloaded=config.offloads, class_of=original_class)
            for each in optimizers
        ]
        specs = specs_of(builder, originals, optimizers, kinds)
    agreement.check_same_structure(wire, config, mixed_precision, specs, optimizers, builder.names)
    wire.open_groups()
    created = {param: names[0] for param, names in builder.names.items() if source_of(param) is None}
    agreement.broadcast_differing_values(wire, ((name, param.detach()) for param, name in created.items()), fingerprint)

    shards = config.shards(wire.size)
    policy = config.policy_for(wire.size)
    layout = builder.layout(specs, shards).for_rank((wire.shard_group or wire).rank)
    storage = open_storage(where, wire.rank, config.offload_dir)
    events = Events(observers)
    found = _memory_free_now(wire, where, config, machine or Machine(), builder.names)
    tensors = state_tensors(optimizers)
    in_files = _in_files(builder, wire)
    made = plan(
        PlanInputs(layout, found, config, wire.size, precision, tensors, sizes=storage.sizes, in_files=in_files)
    )
    if config.is_auto and not made.fits:
        raise ConfigError(made.shortfall)
    context = Context(model, config, policy, precision, wire, storage, where, dict(builder.names), events, layout, made)
    context.kept = frozenset(made.kept)
    storage.uses_disk = config.offload_activations == "disk" or any(map(_on_disk, made.placements))
    storage.transient = config.step_in_backward
    with agreement.on_all_ranks(wire, "zero.shard", kind=TierError):
        _check_offload(config, precision, storage, len(optimizers), shows_grads=bool(events.segment_grad_read))
        if storage.uses_disk and (needed := made.memory.stored_bytes(Tier.DISK)):
            storage.disk.free(storage.disk.allocate(needed))  # refuses a disk without room
        if where.type == "cpu" and wire.size > 1 and policy.keep_full and not config.offloads:
            keep_freed_memory()  # not where memory counts most: the holes of the heap are a sixth of stage 3's peak
        with returning_freed_memory():
            build_units(context, builder, specs, made.placements)
    move_buffers(model, where)
    return kind(context, bind(optimizers, context, originals, kinds))


def _check_free(model: nn.Module) -> None:
    """
    Raises:
        ConfigError: an engine has the model or a part of it; parameters are inference tensors, or masters would be.
    """
    if engine_of(model) is not None:
        raise ConfigError(f"this {type(model).__name__} is sharded already. Call detach() on its engine first")
    if torch.is_inference_mode_enabled():
        raise ConfigError(
            "zero.shard was called inside torch.inference_mode(), whose tensors cannot train. Call it outside"
        )
    for name, param in model.named_parameters():
        place = place_of(param)
        if place is not None:
            raise ConfigError(
                f"parameter {name!r} belongs to a sharded {type(place.unit.context.model).__name__} already. Shard one module "
                "that holds everything, copy the part first (copy.deepcopy), or call detach() on that engine"
            )
        if not torch.nn.parameter.is_lazy(param) and param.is_inference():
            raise ConfigError(
                f"parameter {name!r} was created inside torch.inference_mode(), whose tensors cannot train. Build the model "
                "outside of it, under torch.no_grad() where no graph is wanted"
            )


def _memory_free_now(
    wire: Wire, device: torch.device, config: ZeroConfig, machine: Machine, params: Iterable[nn.Parameter]
) -> Machine:
    """Return the memory that the plan may use: under `auto`, the least that any rank has free now. A collective then."""
    if not config.is_auto:
        return Machine()
    held = sum(param.untyped_storage().nbytes() for param in params if param.device == device)
    free = free_memory(device, ranks=wire.local_world_size(), offload_dir=config.offload_dir, held_bytes=held)
    everyone: list[Machine] = wire.exchange(free.with_speeds_of(machine))
    return Machine.minimum(everyone)


def _in_files(builder: LayoutBuilder, wire: Wire) -> frozenset[str]:
    """Return the parameters whose values are in files on every rank. A collective if some were created without values."""
    sources = {names[0]: each for param, names in builder.names.items() if (each := source_of(param)) is not None}
    mine = frozenset(name for name, source in sources.items() if source.files is not None)
    return mine.intersection(*wire.exchange(mine)) if sources else mine


def _on_disk(placement: Placement) -> bool:
    return Tier.DISK in (placement.parameters, placement.optimizer)


def _check_offload(
    config: ZeroConfig, precision: Precision, storage: Storage, optimizers: int, *, shows_grads: bool
) -> None:
    """
    Args:
        shows_grads: an observer shows the optimizer's groups gradients that are on disk.

    Raises:
        ConfigError: the folder of the disk tier cannot be used; fp16 with gradients that a loss scaler cannot see;
            `step_in_backward` with several optimizers.
    """
    if storage.uses_disk:
        _ = storage.disk.where  # opens the file
    if config.step_in_backward and optimizers > 1:
        raise ConfigError(
            f"step_in_backward updates parameters before user code says which of {optimizers} optimizers steps. Set it to "
            "False, or build one optimizer with several groups"
        )
    if precision.autocast_dtype != torch.float16 or config.offload_optimizer == "none":
        return
    if config.step_in_backward:
        raise ConfigError(
            "step_in_backward does not go with fp16: whether a gradient overflowed is known only after the backward. Use bf16, "
            "or set step_in_backward to False"
        )
    if config.offload_optimizer != "cpu" and not shows_grads:
        raise ConfigError(
            f"mixed_precision='fp16' needs gradients that the loss scaler can check, and the core alone shows none of "
            f"offload_optimizer={config.offload_optimizer!r}. Use zero.shard, bf16, or offload_optimizer='cpu'"
        )
