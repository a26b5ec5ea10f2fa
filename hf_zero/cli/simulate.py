"""`hf-zero simulate`: run the real engine of one rank over tensors without values, and count and time its collectives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import flop_registry

from ..comm.recorded import absent_ranks, recorded_wire
from ..config import ZeroConfig, size_text
from ..diagnostics.usage import predicted
from ..errors import ConfigError
from ..params.engine import Engine
from ..params.shard import shard
from ..plan.machine import Machine
from ..plan.shapes import Shape
from ..plan.timeline import LINKS, Link, Network, Operation
from ..tiers.tier import Tier
from .models import What, adapter_base, model_of
from .show import print_json, ranks_text, table

WARM_UP_STEPS = 3
"""Steps after which the engine knows the order of use."""


class Record(TorchDispatchMode):
    """Collectives in order. Entered as a context it also counts the operations of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.flops = 0

    def issued(
        self, kind: str, bytes_: int, unit: str, phase: str, ranks: int, stride: int, is_all_reduce: bool
    ) -> None:
        self.operations.append(Operation(kind, bytes_, unit, phase, ranks, stride, is_all_reduce))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += int(count(*args, **(kwargs or {}), out_val=out))
        return out


def recorded_step(
    model: nn.Module,
    loss: Callable[[], torch.Tensor],
    config: ZeroConfig,
    mixed_precision: str,
    accumulation: int,
    *,
    collectives: bool = False,
) -> tuple[Record, Engine]:
    """Record one steady step of fused AdamW without clipping, over the open process group. A collective.

    Args:
        collectives: see `recorded_wire`.
    """
    record = Record()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    open_wire = partial(recorded_wire, record, collectives=collectives)
    engine = shard(model, optimizer, config, mixed_precision=mixed_precision, open_wire=open_wire)
    for _ in range(WARM_UP_STEPS):
        _step(engine, optimizer, loss, accumulation)
    record.operations, record.flops = [], 0
    with record:
        _step(engine, optimizer, loss, accumulation)
    return record, engine


def _step(
    engine: Engine, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor], accumulation: int
) -> None:
    for micro_batch in range(accumulation):
        with engine.no_sync() if micro_batch < accumulation - 1 else nullcontext():
            loss().backward()
    optimizer.step()
    optimizer.zero_grad()


@dataclass(frozen=True)
class Hardware:
    """One rank's device and the link within a machine.

    Attributes:
        flops: operations per second of matrix products.
        sends: the device copies messages itself, as a CPU does: gloo's messages, and nothing is hidden behind computation.
    """

    flops: float
    near: Link
    sends: bool = False


NOMINAL_FLOPS = 400e12


def hardware_of(mixed_precision: str, world_size: int, flops: float | None, file: str | None) -> Hardware:
    """Return nominal hardware, or that of a machine file.

    Raises:
        ConfigError: the file lacks a speed that is needed.
    """
    if file is None:
        return Hardware(flops or NOMINAL_FLOPS, LINKS["nvlink"])
    machine = Machine.load(file)
    dtype = "bfloat16" if mixed_precision == "bf16" else "float32"
    flops = flops or machine.flops.get(dtype)
    lacking = [] if flops else [f"flops[{dtype!r}]"]
    near = LINKS["nvlink"]
    if machine.latency is not None and machine.collective:
        near = Link(machine.latency, machine.collective, file, machine.all_reduce or None)
    elif world_size > 1:
        lacking += [name for name in ("latency", "collective") if not getattr(machine, name)]
    if lacking or not flops:
        raise ConfigError(
            f"{file} has no {', '.join(lacking)}: measured by `torchrun --nproc-per-node RANKS -m hf_zero probe "
            f"--output {file}`"
        )
    return Hardware(flops, near, sends=machine.shares_memory)


def run(
    name: str,
    what: What,
    config: ZeroConfig,
    hardware: Hardware,
    ranks: tuple[int, int, str, int],
    mixed_precision: str,
    batch: tuple[int, int, int],
    as_json: bool,
) -> None:
    """Print the collectives of a step on rank 0, and its time.

    Args:
        ranks: their number, machines, the network between machines, adapters per machine.
        batch: rows, tokens of each, micro-batches.
    """
    world_size, nodes, far, adapters = ranks
    rows, sequence, accumulation = batch
    if rows * sequence > _MOST_TOKENS:
        raise ConfigError(
            f"--batch {rows:,} of --sequence {sequence:,} tokens is more than {_MOST_TOKENS:,} tokens, which one "
            "process here would have to hold: choose less"
        )
    logging.getLogger("transformers").setLevel(logging.ERROR)  # no hints on a model that is not trained here
    empty = _empty(name, what)
    ids = torch.zeros(rows, sequence, dtype=torch.long, device="cpu")
    # Uninitialized memory may hold NaN: anomaly detection would raise.
    with _within_memory(), absent_ranks(world_size), Valueless(), torch.autograd.set_detect_anomaly(False):
        model = type(empty)(empty.config).train()
        record, engine = recorded_step(
            model,
            lambda: model(input_ids=ids, labels=ids).loss,
            config,
            mixed_precision,
            accumulation,
            collectives=not hardware.sends,
        )
        peak_bytes = predicted(engine, accumulation)[0].at_peak(Tier.DEVICE)
    network = Network(world_size, nodes, hardware.near, LINKS[far], adapters)
    compute_s, communication_s = record.flops / hardware.flops, sum(map(network.time_s, record.operations))
    # Where adapters send, a lower bound: all communication is hidden that computation can hide.
    total_s = compute_s + communication_s if hardware.sends else max(compute_s, communication_s)
    by_kind: dict[str, dict[str, int]] = {}
    for each in record.operations:
        count = by_kind.setdefault(each.kind, {"collectives": 0, "bytes_sent": 0})
        count["collectives"] += 1
        count["bytes_sent"] += each.bytes
    if as_json:
        print_json(
            {
                "stage": config.stage,
                "world_size": world_size,
                "nodes": nodes,
                "batch": rows,
                "by_kind": by_kind,
                "planned_peak_bytes": peak_bytes,
                "flops": record.flops,
                "total_s": total_s,
                "compute_s": compute_s,
                "communication_s": communication_s,
                "exposed_s": total_s - compute_s,
                "flops_per_s": hardware.flops,
                "network": asdict(network),
                "operations": [asdict(each) for each in record.operations],
            }
        )
        return
    table(
        Console(),
        f"{name}: one step, stage {config.stage}, {ranks_text(world_size)} on {nodes:,} node{'s' if nodes > 1 else ''}",
        ("kind", "collectives", "bytes sent by a rank"),
        [(kind, f"{n['collectives']:,}", f"{n['bytes_sent']:,}") for kind, n in by_kind.items()],
        caption=(
            f"step {'' if hardware.sends else 'at least '}{total_s * 1e3:.3f} ms: computation "
            f"{compute_s * 1e3:.3f}, communication {communication_s * 1e3:.3f}; "
            f"planned peak {size_text(peak_bytes)}"
        ),
    )


@contextmanager
def _within_memory() -> Iterator[None]:
    """Convert a failed allocation of tensors without values.

    Raises:
        ConfigError: address space is missing.
    """
    try:
        yield
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        raise ConfigError(
            "the simulated step needs more memory than this process may have: choose fewer --batch rows or --sequence tokens"
        ) from error


def _empty(name: str, what: What) -> Any:
    """Return the model on the meta device.

    Raises:
        ConfigError: no model of transformers, an adapter, or a model whose input is not text.
    """
    if isinstance(what, int):
        raise ConfigError(f"{name} is too few parameters for the blocks of a transformer")
    base = adapter_base(what) if isinstance(what, Path) else None
    if base is not None:
        raise ConfigError(f"{name} is an adapter of {base!r}, and adapters are not simulated: simulate the base")
    empty = model_of(name, what.config if isinstance(what, Shape) else what)
    if empty.main_input_name != "input_ids":
        raise ConfigError(f"{name} takes {empty.main_input_name}: only models of text are simulated")
    return empty


# Tensors without values ---------------------------------------------------------------------------------------------

LARGE_NUMEL = 4096
_MOST_TOKENS = 1 << 22
_META = torch.device("meta")


class Valueless(TorchDispatchMode):
    """Inside this context floating-point tensors of `large_numel` elements or more are neither computed nor written.

    Operations on them return uninitialized memory of the right shape. Memory that is never touched takes no pages, so models
    far larger than this machine run through the real engine. Small tensors and integers are computed, because control flow
    depends on them. Smaller results of large tensors are zero. Collectives of large tensors move nothing.
    """

    def __init__(self, large_numel: int = LARGE_NUMEL) -> None:
        super().__init__()
        self._large_numel = large_numel

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            # The fake backend copies this rank's input into other ranks' output for some collectives.
            if self._any_large(tree_flatten((args, kwargs))[0]):
                args, kwargs = tree_map(_nothing, args), tree_map(_nothing, kwargs)
            return func(*args, **kwargs)
        if func.namespace != "aten" or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        schema = func._schema.arguments
        written = [argument for argument in schema if argument.alias_info is not None and argument.alias_info.is_write]
        if written:
            places = {argument.name: at for at, argument in enumerate(schema)}
            out = [kwargs[each.name] if each.name in kwargs else args[places[each.name]] for each in written]
            if not self._any_large(tree_flatten(out)[0]):
                return func(*args, **kwargs)
            returned = len(func._schema.returns)
            return None if not returned else out[0] if returned == 1 else tuple(out)
        if any(argument.alias_info is not None for argument in schema):  # a view
            return func(*args, **kwargs)
        is_factory = any(argument.name == "device" for argument in schema)
        if not is_factory and not self._any_large(tree_flatten((args, kwargs))[0]):
            return func(*args, **kwargs)
        device = {"device": _META} if is_factory else {}
        try:
            shapes = func(*tree_map(_on_meta, args), **{**tree_map(_on_meta, kwargs), **device})
        except (NotImplementedError, RuntimeError):  # the shape depends on values
            return func(*args, **kwargs)
        leaves = tree_flatten(((args, kwargs), shapes))[0]
        if not self._any_large(leaves) or kwargs.get("device") not in (None, torch.device("cpu"), "cpu"):
            return func(*args, **kwargs)
        return tree_map(self._filled, shapes)

    def _any_large(self, leaves: Iterable[Any]) -> bool:
        return any(
            isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel() >= self._large_numel
            for leaf in leaves
        )

    def _filled(self, shape: Any) -> Any:
        if not isinstance(shape, Tensor):
            return shape
        made = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device="cpu")
        return made if self._any_large([made]) else made.zero_()


def _on_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)


def _nothing(value: Any) -> Any:
    return value.new_empty(0) if isinstance(value, Tensor) else value
