"""`hf-zero simulate`: run the real engine of one rank over tensors without values, and count and time its collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
from ..config import ZeroConfig
from ..diagnostics.usage import predicted
from ..errors import ConfigError, needs
from ..params.engine import Engine
from ..params.shard import shard
from ..plan.configs import CONFIGS
from ..plan.machine import Machine
from ..plan.timeline import LINKS, Computed, Event, Link, Network, Operation, Processor, StepTime, step_time
from ..tiers.tier import Tier
from .commands import SimulateOptions, print_json
from .files import writable
from .show import table

WARM_UP_STEPS = 3
"""Steps after which the engine knows the order of use."""


class Record(TorchDispatchMode):
    """Collectives and work, in order. Entered as a context it also counts the work."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    @property
    def operations(self) -> list[Operation]:
        return [event for event in self.events if isinstance(event, Operation)]

    def issued(
        self, kind: str, bytes_: int, unit: str, phase: str, ranks: int, stride: int, is_all_reduce: bool
    ) -> None:
        self.events.append(Operation(kind, bytes_, unit, phase, ranks, stride, is_all_reduce))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.events.append(Computed(int(count(*args, **(kwargs or {}), out_val=out))))
        elif func.namespace == "aten" and (moved := moved_bytes(func, args, kwargs or {}, out)):
            self.events.append(Computed(bytes=moved))
        return out


_FREE = ("empty", "new_empty", "_unsafe_view", "_reshape_alias", "detach", "alias", "lift")
"""Prefixes of operations that move no bytes, which their schema does not tell."""
_ROWS = ("embedding", "index", "index_select", "gather")
"""Operations that read as many bytes of their first tensor as they return."""


def moved_bytes(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes that an operation other than a matrix product reads and writes.

    Each argument and each result counts once, an argument that is written in place twice, and a view nothing.
    """
    name = func._schema.name.removeprefix("aten::")
    schema = func._schema.arguments
    # The schema of fused optimizers says that gradients are written; they are only with a gradient scaler.
    places = [argument.alias_info if argument.name != "grads" else None for argument in schema]
    if name.startswith(_FREE) or any(place is not None and not place.is_write for place in places):
        return 0
    made = _nbytes(tree_flatten(out)[0])
    if name in _ROWS:
        return 2 * made
    if any(place is not None for place in places):  # the result is what was written
        given = [kwargs.get(argument.name, args[at] if at < len(args) else None) for at, argument in enumerate(schema)]
        made = _nbytes(tree_flatten([value for value, place in zip(given, places) if place is not None])[0])
    return made + _nbytes(tree_flatten((args, kwargs))[0])


def _nbytes(leaves: Iterable[Any]) -> int:
    """Return the bytes of all tensors; expanded ones count as stored."""
    return sum(
        min(leaf.numel() * leaf.element_size(), leaf.untyped_storage().nbytes())
        for leaf in leaves
        if isinstance(leaf, Tensor)
    )


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
    record.events = []
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
class Simulated:
    """A recorded step on a number of ranks, and its time."""

    network: Network
    processor: Processor
    batch: int
    record: Record
    taken: StepTime
    peak_bytes: int

    @property
    def flops(self) -> int:
        return sum(event.flops for event in self.record.events if isinstance(event, Computed))

    @property
    def moved_bytes(self) -> int:
        """Bytes that operations other than matrix products read and write."""
        return sum(event.bytes for event in self.record.events if isinstance(event, Computed))

    @property
    def by_kind(self) -> dict[str, dict[str, int]]:
        kinds: dict[str, dict[str, int]] = {}
        for each in self.record.operations:
            count = kinds.setdefault(each.kind, {"collectives": 0, "bytes_sent": 0})
            count["collectives"] += 1
            count["bytes_sent"] += each.bytes
        return kinds

    def to_dict(self) -> dict[str, Any]:
        network = self.network
        return {
            "world_size": network.ranks,
            "nodes": network.nodes,
            "batch": self.batch,
            "by_kind": self.by_kind,
            "planned_peak_bytes": self.peak_bytes,
            "flops": self.flops,
            "moved_bytes": self.moved_bytes,
            **asdict(self.taken),
            "processor": asdict(self.processor),
            "network": {"near": asdict(network.near), "far": asdict(network.far), "adapters": network.adapters},
        }


@dataclass(frozen=True)
class Hardware:
    """One rank's processor and the link within a machine; `collectives`: NCCL's wire, else gloo's messages."""

    processor: Processor
    near: Link
    collectives: bool


NOMINAL_FLOPS = 400e12


def _hardware(options: SimulateOptions) -> Hardware:
    """Return nominal hardware, or that of a machine file.

    Raises:
        ConfigError: the file lacks a speed that is needed.
    """
    if options.machine is None:
        return Hardware(Processor(options.flops or NOMINAL_FLOPS), LINKS["nvlink"], collectives=True)
    machine = Machine.load(options.machine)
    dtype = "bfloat16" if options.mixed_precision == "bf16" else "float32"
    flops = options.flops or machine.flops.get(dtype)
    lacking = [] if flops else [f"flops[{dtype!r}]"]
    near = LINKS["nvlink"]
    if machine.latency is not None and machine.collective:
        near = Link(machine.latency, machine.collective, options.machine, machine.all_reduce or None)
    elif options.world_size > 1:
        lacking += [name for name in ("latency", "collective") if not getattr(machine, name)]
    if lacking or not flops:
        raise ConfigError(
            f"{options.machine} has no {', '.join(lacking)}: measured by `torchrun --nproc-per-node RANKS -m hf_zero probe "
            f"--output {options.machine}`"
        )
    processor = Processor(flops, machine.device_bandwidth or None, sends=machine.shares_memory)  # 0: not known
    return Hardware(processor, near, collectives=not machine.shares_memory)


def run(options: SimulateOptions) -> None:
    """Print the collectives of a step and its time, or how it scales."""
    for name in ("world_size", "nodes", "accumulation", "batch", "sequence", "flops", "zero_replicas"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, found {getattr(options, name)}")
    if options.adapters < 0:
        raise ConfigError(f"adapters must not be negative, found {options.adapters}")
    if options.world_size % options.nodes:
        raise ConfigError(f"{options.world_size} ranks do not divide by {options.nodes} nodes")
    if options.plot and options.scaling == "none":
        raise ConfigError("--plot draws how a step scales: add --scaling weak or --scaling strong")
    writable(options.plot)
    given: dict[str, Any] = {"stage": options.zero_stage, "replicas": options.zero_replicas, "wire": options.zero_wire}
    given["units"] = options.zero_units
    config = ZeroConfig(**given, keep_gathered=options.keep_gathered)
    config.check_world_size(options.world_size)
    hardware = _hardware(options)
    empty = _empty(options.model)
    if options.scaling != "none":
        rows = [_simulated(empty, options, config, hardware, *point) for point in _points(options)]
        if options.plot:
            draw(rows, options, options.plot)
        if options.json:
            values = [each.to_dict() for each in rows]
            print_json({"scaling": options.scaling, "stage": options.zero_stage, "rows": values})
        else:
            _show_scaling(rows, options)
        return
    found = _simulated(empty, options, config, hardware, options.world_size, options.nodes, options.batch)
    if options.json:
        operations = [asdict(each) for each in found.record.operations]
        print_json({"stage": options.zero_stage, **found.to_dict(), "operations": operations})
        return
    taken = found.taken
    table(
        Console(),
        f"{options.model}: one step, stage {options.zero_stage}, {options.world_size:,} ranks on {options.nodes:,} nodes",
        ("kind", "collectives", "bytes sent by a rank"),
        [(kind, f"{n['collectives']:,}", f"{n['bytes_sent']:,}") for kind, n in found.by_kind.items()],
        caption=(
            f"step {'' if hardware.processor.sends else 'at least '}{taken.total_s * 1e3:.3f} ms: computation "
            f"{taken.compute_s * 1e3:.3f}, communication {taken.communication_s * 1e3:.3f}; "
            f"planned peak {found.peak_bytes:,} bytes"
        ),
    )


def _points(options: SimulateOptions) -> Iterator[tuple[int, int, int]]:
    """Yield (ranks, nodes, rows per rank) for powers of two up to `world_size`, with a fixed number of ranks per machine.

    Weak: every rank has `batch` rows. Strong: the ranks share the rows of all `world_size` ranks.
    """
    each = options.world_size // options.nodes
    rows = options.batch * options.world_size
    for ranks in (*(2**power for power in range(options.world_size.bit_length() - 1)), options.world_size):
        if ranks % options.zero_replicas or (ranks > each and ranks % each) or rows % ranks:
            continue
        yield ranks, -(-ranks // each), options.batch if options.scaling == "weak" else rows // ranks


def _simulated(
    empty: Any, options: SimulateOptions, config: ZeroConfig, hardware: Hardware, ranks: int, nodes: int, batch: int
) -> Simulated:
    """Run the real engine as rank 0 of `ranks`, over tensors without values."""
    if batch * options.sequence > _MOST_TOKENS:
        raise ConfigError(
            f"--batch {batch:,} of --sequence {options.sequence:,} tokens is more than {_MOST_TOKENS:,} tokens, which one "
            "process here would have to hold: choose less"
        )
    ids = torch.zeros(batch, options.sequence, dtype=torch.long, device="cpu")
    # Uninitialized memory may hold NaN: anomaly detection would raise.
    with _within_memory(), absent_ranks(ranks), Valueless(), torch.autograd.set_detect_anomaly(False):
        model = type(empty)(empty.config).train()
        record, engine = recorded_step(
            model,
            lambda: model(input_ids=ids, labels=ids).loss,
            config,
            options.mixed_precision,
            options.accumulation,
            collectives=hardware.collectives,
        )
        peak_bytes = predicted(engine, options.accumulation)[0].at_peak(Tier.DEVICE)
    network = Network(ranks, nodes, hardware.near, LINKS[options.network], options.adapters)
    taken = step_time(record.events, network.time_s, hardware.processor)
    return Simulated(network, hardware.processor, batch, record, taken, peak_bytes)


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


def _efficiency(rows: Sequence[Simulated], weak: bool) -> list[float]:
    """Return each row's rate per rank as a share of the first row's."""
    first = rows[0]
    per_row = first.taken.total_s / (1 if weak else first.batch)
    return [per_row * (1 if weak else each.batch) / each.taken.total_s for each in rows]


_SCALING: dict[str, Callable[[Simulated], str]] = {
    "ranks": lambda each: f"{each.network.ranks:,}",
    "nodes": lambda each: f"{each.network.nodes:,}",
    "rows of a rank": lambda each: f"{each.batch:,}",
    "step, ms": lambda each: f"{each.taken.total_s * 1e3:,.3f}",
    "computation": lambda each: f"{each.taken.compute_s * 1e3:,.3f}",
    "communication": lambda each: f"{each.taken.communication_s * 1e3:,.3f}",
    "GB sent": lambda each: f"{sum(kind['bytes_sent'] for kind in each.by_kind.values()) / 1e9:,.3f}",
    "GB planned": lambda each: f"{each.peak_bytes / 1e9:,.3f}",
}


def _show_scaling(rows: Sequence[Simulated], options: SimulateOptions) -> None:
    shares = _efficiency(rows, options.scaling == "weak")
    table(
        Console(),
        f"{options.model}: {options.scaling} scaling, stage {options.zero_stage}, {options.network} between machines",
        (*_SCALING, "efficiency"),
        [(*(text(each) for text in _SCALING.values()), f"{share:.1%}") for each, share in zip(rows, shares)],
        fold=True,
        caption="efficiency: time per row on the smallest number of ranks, as a share of what each rank takes here",
    )


def draw(rows: Sequence[Simulated], options: SimulateOptions, path: str) -> None:
    """Draw step time and computation over ranks, with efficiency on the right axis."""
    with needs("plot"):
        from matplotlib.figure import Figure
        from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    ranks = [each.network.ranks for each in rows]
    axes.plot(ranks, [each.taken.total_s * 1e3 for each in rows], "-", marker="o", markersize=3, label="step")
    axes.plot(ranks, [each.taken.compute_s * 1e3 for each in rows], "--", marker="o", markersize=3, label="computation")
    axes.set(xlabel="ranks", ylabel="ms")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(f"{options.model}: {options.scaling} scaling, stage {options.zero_stage}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left")
    right = axes.twinx()
    right.plot(ranks, _efficiency(rows, options.scaling == "weak"), ":", color="0.4")
    right.set(ylabel="efficiency (dotted)", ylim=(0, 1.05))
    right.yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.savefig(path, dpi=150)


def _empty(name: str) -> Any:
    """Return the model on the meta device.

    Raises:
        ConfigError: no such model, an adapter, or a model whose input is not text.
    """
    from ..huggingface.models import empty_model
    from .models import adapter_base, check_counts

    path = Path(name).expanduser()
    base = adapter_base(path)
    if (path / "config.json").is_file():
        check_counts(path / "config.json")
    if base is not None:
        raise ConfigError(f"{name} is an adapter of {base!r}, and adapters are not simulated: simulate the base")
    try:
        empty: Any = empty_model(str(Path(name).expanduser()))
    except (OSError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(f"no model {name!r}: it is none of {', '.join(CONFIGS)}, and {first}") from error
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
