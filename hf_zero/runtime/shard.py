"""`shard(model, optimizer, config) -> Engine`: puts layout, units, schedule and optimizer together; no algorithm here."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn

from ..comm import agree
from ..comm.codec import CODECS
from ..comm.hybrid import in_replicas, open_node
from ..config import ZeroConfig
from ..core.precision import Precision, gathered_as
from ..errors import ConfigError, RankMismatchError
from ..plan.machine import Machine
from ..plan.plan import Drafter, keeps
from ..tiers.fingerprint import fingerprint
from ..tiers.host import freeing_at_once, keep_freed
from ..tiers.tier import Tier
from . import FIRST_FORWARD
from . import instance_methods as overrides
from .arguments import check_shard_arguments, device_from
from .build import Assembly, device_of
from .engine import Engine, engine_of
from .offload import Offload
from .optimizers.clipping import may_overflow
from .passes.compiling import Compile, refuse_compiled, stay_out_of_graphs, take_wrapper_off
from .registrations import Registrations
from .training import Training
from .transports import Roads
from .values.ownership import refuse_owned
from .values.sharded import Sharded


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    config: ZeroConfig | None = None,
    *,
    mixed_precision: str | None = "no",
    machine: Machine | None = None,
    device: torch.device | str | int | None = None,
    roads: Roads | None = None,
) -> Engine:
    """Shard `model` and `optimizer` in place over the default process group (or on this rank alone, without one).

    The training loop stays as it was: `model(x).loss.backward()`, `optimizer.step()`, `optimizer.zero_grad()`. Gradients
    are averaged over ranks. A collective: every rank calls it with the same model, optimizer and config; rank 0's
    parameter values are sent around when ranks differ.

    Args:
        model: on its final device (see `device`), in its final type. `torch.compile(model)`, too: then its blocks are compiled.
        optimizer: any element-wise `torch.optim.Optimizer` over this model's parameters, with or without state; one over
            whole matrices (Adafactor, Muon), too. Several in a list, each over parameters of its own:
            `[torch.optim.Muon(matrices), torch.optim.AdamW(rest)]`. None to evaluate only, or to `Engine.bind` one later.
        mixed_precision: `no`, `bf16` or `fp16`; the model's forward then runs under autocast.
        device: where to compute, for a model that is still in host memory: it comes unit by unit, and what is offloaded never
            does. None: where the model is.
        machine: measured speeds, for `auto`; `hf-zero probe` makes one. Without, typical ones order the choices.
        roads: what bytes move with, in place of the process group's own wire and the device's own link, and what else an engine
            has from outside.

    Raises:
        ConfigError: settings; a model that is sharded already.
        LayoutError: a model on several devices or on the meta device, an optimizer over other parameters.
        UnsupportedOptimizerError: an optimizer that mixes parameters, or keeps them besides its groups.
        RankMismatchError: ranks that differ in structure; names the first difference, on every rank.
    """
    check_shard_arguments(model, optimizer, config)
    device = device_from(device)
    model, compile_ = take_wrapper_off(model)
    registrations = Registrations(model)
    try:
        return _shard(model, optimizer, config, mixed_precision, machine, device, roads, registrations, compile_)
    except BaseException:
        registrations.remove()
        raise


def _shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    config: ZeroConfig | None,
    mixed_precision: str | None,
    machine: Machine | None,
    device: torch.device | None,
    roads: Roads | None,
    registrations: Registrations,
    compile_: Compile | None,
) -> Engine:
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        optimizers = [] if optimizer is None else [optimizer]
    else:
        optimizers = list(optimizer)
    config, roads, machine = config or ZeroConfig(), roads or Roads(), machine or Machine()
    if config.keep_gathered is not None:
        raise ConfigError(
            f"keep_gathered={config.keep_gathered!r} is a setting of hf_zero.engine alone, so far. With zero.shard, set "
            "device_memory: stage 3 keeps units gathered where it has room to spare"
        )
    precision = Precision.of(mixed_precision, config.reduce_dtype, config.full_precision, config.wire)
    wire = roads.wire(device or next((p.device for p in model.parameters()), torch.device("cpu")))
    patches = overrides.Patches()
    patches.hooks(registrations)

    with wire.watch.doing("zero.shard"):  # called on one rank alone, it waits in the first exchange
        wire.start(config.stall_s)
    # What this rank would refuse, all ranks refuse, before anything has changed; then, what they must have alike.
    with agree.on_all_ranks(wire, "zero.shard", kind=RankMismatchError):
        if engine_of(model) is not None:
            raise ConfigError(f"this {type(model).__name__} is sharded already; call detach() on its engine first")
        refuse_compiled(model)
        _refuse_inference_mode(model)
        stay_out_of_graphs()
        config.check_world_size(wire.size)
        wire.codec = CODECS.get(config.wire)
        wire = in_replicas(wire, config.replicas)
        policy = config.policy_for(wire.size)
        # First: it refuses models that have nothing to shard.
        drafter = Drafter(model, precision, roads.limits, config.units)
        where = device_of(model, device)
        sharded = Sharded(model, config, policy, precision, wire, where, dict(drafter.names))
        assembly = Assembly(sharded, drafter, roads.plan, machine, mixed_precision)
        refuse_owned(sharded.names)
        in_half = may_overflow(model, precision)
        originals = assembly.originals(optimizers, ())
        kinds = assembly.kinds_of_binding(optimizers)
        specs = assembly.specs(originals)
    assembly.agree(specs, originals)
    wire.open_groups()
    if keeps(config, wire.size):
        open_node(wire, roads.node_names(wire))
    agree.same_values(wire, assembly.local_values(), fingerprint)

    # The plan needs to know what the tiers have room for, and may be refused as well.
    offload = Offload(sharded, roads)
    sharded.storage = offload.storage
    offload.storage.wide = in_half
    with agree.on_all_ranks(wire, "zero.shard", kind=RankMismatchError):
        sharded.plan = assembly.plan(specs, optimizers, offload.ranks_here)
        offload.settle(sharded.plan.placements, sharded.plan.memory.at_rest(Tier.DISK))
        if config.step_in_backward and in_half:
            raise ConfigError(
                "step_in_backward does not go with fp16: whether a gradient overflowed is known after backward only. Use "
                "bf16, or turn it off"
            )

    in_memory = config.offload_optimizer == config.offload_params == "none"
    if where.type == "cpu" and wire.size > 1 and policy.keep_full and in_memory:
        keep_freed()  # not where memory counts most: the heap's holes are a sixth of stage 3's peak

    # From here on the model changes.
    with freeing_at_once():
        assembly.build(specs, sharded.plan.placements)
    overrides.end_birth(model)
    overrides.move_buffers(model, lambda buffer: buffer.to(where))
    training = Training(sharded, assembly, offload, patches)
    training.adopt(optimizers, originals, kinds)
    engine = Engine(training, assembly, patches)
    _check_first_forward(model, wire.size, patches)
    offload.storage.explain = sharded.advice
    if wire.rank == 0:
        _print_summary(training)
    if compile_ is not None:
        engine.compile(using=compile_)
    return engine


def _check_first_forward(model: nn.Module, ranks: int, patches: overrides.Patches) -> None:
    """Register checks that run until a forward builds a graph, and never again."""

    def check(*_: object) -> None:
        for each in FIRST_FORWARD:
            each(ranks)
        if torch.is_grad_enabled():
            handle.remove()

    handle = model.register_forward_pre_hook(check)
    patches.hooks(handle)


def _refuse_inference_mode(model: nn.Module) -> None:
    """
    Raises:
        ConfigError: parameters are inference tensors, or the engine's own would be.
    """
    if torch.is_inference_mode_enabled():
        raise ConfigError(
            "zero.shard was called inside torch.inference_mode(), whose tensors cannot be trained. Call it outside"
        )
    for name, param in model.named_parameters():
        if not torch.nn.parameter.is_lazy(param) and param.is_inference():
            raise ConfigError(
                f"parameter {name!r} was made inside torch.inference_mode(), whose tensors cannot be trained. Build the model "
                "outside of it, under torch.no_grad() where no graph is wanted"
            )


def _print_summary(training: Training) -> None:
    sharded, config, size = training.sharded, training.config, training.sharded.wire.size
    ranks = f"{size} rank{'s' if size > 1 else ''}"
    if config.replicas > 1:
        ranks += f" in {config.replicas} replicas"
    print(f"hf_zero: stage {config.stage} on {ranks}; {sharded.precision}", file=sys.stderr)
    if training.autocast is not None and sharded.precision.autocast_dtype is not None:
        cast = gathered_as([*training.autocast.cast.values()], len(sharded.names), sharded.precision.autocast_dtype)
        print(f"hf_zero: gathered {cast}; ZeroConfig.full_precision names others", file=sys.stderr)
