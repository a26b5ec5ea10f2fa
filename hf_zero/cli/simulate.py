"""`hf-zero simulate`: one rank's real engine steps alone in this process; its collectives and their time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..comm.recorded import absent_ranks, recorded_wire
from ..config import ZeroConfig
from ..errors import ConfigError
from ..plan.configs import CONFIGS
from ..plan.machine import free_host_bytes
from ..plan.timeline import LINKS, Computed, Event, Network, Operation, Waited, replay
from ..runtime.engine import Engine, shard
from ..runtime.transports import Roads
from ..tiers.tier import Tier
from .commands import print_json
from .options import SimulateOptions
from .show import table

WARM_UP_STEPS = 3
"""The order of use is known by then."""


class Record(TorchDispatchMode):
    """Collectives, waits and work in the order in which they come. As a context it also counts the work."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._numbers = 0

    @property
    def operations(self) -> list[Operation]:
        return [event for event in self.events if isinstance(event, Operation)]

    def clear(self) -> None:
        """Forget the events; numbers go on, for what is under way."""
        self.events = []

    def issued(self, kind: str, bytes_: int, unit: str, phase: str) -> int:
        self.events.append(Operation(self._numbers, kind, bytes_, unit, phase))
        self._numbers += 1
        return self._numbers - 1

    def waited(self, number: int) -> None:
        self.events.append(Waited(number))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.events.append(Computed(int(count(*args, **(kwargs or {}), out_val=out))))
        return out


def recorded_step(
    model: nn.Module, loss: Callable[[], torch.Tensor], config: ZeroConfig, mixed_precision: str, accumulation: int
) -> tuple[Record, Engine]:
    """One steady step of AdamW without clipping, over the process group that is open. A collective, like its steps."""
    record = Record()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = shard(
        model, optimizer, config, mixed_precision=mixed_precision, roads=Roads(wire=partial(recorded_wire, record))
    )
    for _ in range(WARM_UP_STEPS):
        _step(engine, optimizer, loss, accumulation)
    record.clear()
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


def run(options: SimulateOptions) -> None:
    """Prints what was recorded and what it takes."""
    for name in ("world_size", "nodes", "accumulation", "batch", "sequence", "flops"):
        if getattr(options, name) < 1:
            raise ConfigError(f"{name} must be at least 1, found {getattr(options, name)}")
    if options.world_size % options.nodes:
        raise ConfigError(f"{options.world_size} ranks do not divide by {options.nodes} nodes")
    config = ZeroConfig(stage=options.zero_stage)
    model = _model(options.model)
    ids = torch.zeros(options.batch, options.sequence, dtype=torch.long)
    with absent_ranks(options.world_size):
        record, engine = recorded_step(
            model, lambda: model(input_ids=ids, labels=ids).loss, config, options.mixed_precision, options.accumulation
        )
        peak_bytes = engine.plan.memory.at_peak(Tier.DEVICE)
    network = Network(options.world_size, options.nodes, LINKS["nvlink"], LINKS[options.network])
    taken = replay(record.events, network.time_s, options.flops)
    kinds: dict[str, dict[str, int]] = {}
    for each in record.operations:
        count = kinds.setdefault(each.kind, {"collectives": 0, "bytes_sent": 0})
        count["collectives"] += 1
        count["bytes_sent"] += each.bytes
    if options.json:
        print_json(
            {
                "world_size": options.world_size,
                "stage": options.zero_stage,
                "by_kind": kinds,
                "planned_peak_bytes": peak_bytes,
                "flops": sum(event.flops for event in record.events if isinstance(event, Computed)),
                **asdict(taken),
                "network": {"near": asdict(network.near), "far": asdict(network.far)},
                "operations": [asdict(each) for each in record.operations],
            }
        )
        return
    rows = [(kind, f"{n['collectives']:,}", f"{n['bytes_sent']:,}") for kind, n in kinds.items()]
    table(
        Console(),
        f"{options.model}: one step, stage {options.zero_stage}, {options.world_size:,} ranks on {options.nodes:,} nodes",
        ("kind", "collectives", "bytes sent by a rank"),
        rows,
        caption=(
            f"step {taken.total_s * 1e3:.3f} ms: computing {taken.compute_s * 1e3:.3f}, communication "
            f"{taken.communication_s * 1e3:.3f}, of which not hidden {taken.exposed_s * 1e3:.3f}; "
            f"planned peak {peak_bytes:,} bytes"
        ),
    )


def _model(name: str) -> Any:
    """With parameters in memory, whose values are of no account.

    Raises:
        ConfigError: no such model; it takes no text; it does not fit.
    """
    from ..huggingface.models import empty_model, model_of_name

    try:
        empty: Any = (
            model_of_name(name.lower()) if name.lower() in CONFIGS else empty_model(str(Path(name).expanduser()))
        )
    except (OSError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(f"no model {name!r}: it is none of {', '.join(CONFIGS)}, and {first}") from error
    if empty.main_input_name != "input_ids":
        raise ConfigError(f"{name} takes {empty.main_input_name}: only models of text are simulated")
    needed, free = 2 * sum(p.numel() * p.element_size() for p in empty.parameters()), free_host_bytes()
    if needed > free:
        raise ConfigError(f"{name} needs about {needed:,} bytes of host memory to be simulated, {free:,} are free")
    return type(empty)(empty.config).train()
