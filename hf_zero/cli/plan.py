"""hf-zero plan and hf-zero probe: what a model will take on each rank, where, why and how long; how fast this machine is."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..comm.wire import open_wire
from ..config import STAGES, ZeroConfig, parse_bytes
from ..core.layout import Layout
from ..core.precision import Precision
from ..errors import ConfigError, needs
from ..plan.activations import Architecture, Batch
from ..plan.costs import KINDS, TIERS, paper_states_bytes
from ..plan.machine import Machine, here, host_name, kept, probe
from ..plan.outline import Units, from_files, from_number, visits_by_name
from ..plan.plan import Drafter, Plan, plan, size_text
from ..plan.work import ROADS

SWEEP_RANKS = tuple(1 << power for power in range(11))
_COUNT = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def add_commands(commands: Any, cache: Path) -> None:
    """`cache`: the folder that keeps what `probe` measured."""
    out = commands.add_parser(
        "plan",
        help="memory per rank and tier, traffic and step time, from a model's configuration alone",
        description="What each rank will hold, where and why, before anything runs: from a configuration, from the headers of "
        "safetensors files, or from a number of parameters. Without --zero-stage all stages side by side.",
    )
    out.add_argument("model", nargs="?", help="Hub id, local folder, or .safetensors file; no weights are read")
    out.add_argument("--parameters", metavar="N", help="in place of a model: a number of parameters, such as 7.5B")
    out.add_argument("--world-size", type=int, default=8, help="number of ranks (default 8)")
    _add_setting(
        out, "stage", help="this stage alone, with all details", type=int, choices=sorted(STAGES), default=None
    )
    out.add_argument("--mixed-precision", choices=("no", "bf16", "fp16"), default="no")
    _add_setting(out, "offload_optimizer")
    _add_setting(out, "offload_params")
    _add_setting(out, "step_in_backward", help="update offloaded units in backward", action="store_true")
    _add_setting(out, "reduce_dtype", help="type in which gradients travel (default float32)", metavar="DTYPE")
    _add_setting(out, "full_precision", help="weights that stay in float32: '*.gate.*'", metavar="NAMES")
    # No --zero: they are figures of the machine here, with or without `auto`.
    _add_setting(out, "device_memory", "", help="bytes per rank on the device, such as 24GiB", metavar="SIZE")
    _add_setting(out, "host_memory", "", help="bytes per rank of host memory", metavar="SIZE")
    out.add_argument("--disk-space", metavar="SIZE", help="bytes per rank in the offload folder")
    out.add_argument("--optimizer-tensors", type=int, default=2, help="state tensors per parameter (default 2: Adam)")
    out.add_argument("--batch", type=int, metavar="ROWS", help="sequences per rank and forward; counts activations")
    out.add_argument("--sequence", type=int, default=2048, metavar="TOKENS", help="with --batch (default 2048)")
    out.add_argument("--accumulation", type=int, default=1, metavar="N", help="micro-batches per step (default 1)")
    out.add_argument("--gradient-checkpointing", action="store_true")
    out.add_argument("--offload-activations", action="store_true", help="checkpointed activations rest on the host")
    out.add_argument("--machine", metavar="FILE", help="sizes and speeds as `hf-zero probe --json` prints them")
    out.add_argument("--sweep", action="store_true", help="1 to 1,024 ranks, all stages and tiers side by side")
    out.add_argument("--plot", metavar="FILE.png", help="with --sweep: a picture of it")
    out.add_argument("--json", action="store_true", help="print JSON instead of tables")
    out.set_defaults(run=_plan, cache=cache)
    measure = commands.add_parser(
        "probe",
        help="measure memory, disk, link and collectives of this machine, for plan",
        description="Measure what plan predicts step times from: some seconds. Under torchrun also the collectives between its "
        "ranks, all of them at the same time. The result is kept for this machine.",
    )
    measure.add_argument("--offload-dir", metavar="DIR", help="the disk to measure (default: the temporary folder)")
    measure.add_argument("--json", action="store_true", help="print JSON instead of a table")
    measure.set_defaults(run=_probe, cache=cache)


def _add_setting(out: argparse.ArgumentParser, name: str, prefix: str = "zero-", **said: Any) -> None:
    """The flag of one field of `ZeroConfig`, with its default and choices; `said` is what plan says in its own way."""
    origin = ZeroConfig.__dataclass_fields__[name]
    own = {"default": origin.default, **origin.metadata, "help": None, **said}
    out.add_argument(f"--{prefix}{name.replace('_', '-')}", dest=f"zero_{name}", **own)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """What was given for the fields of `ZeroConfig` that have a flag."""
    given = vars(options)
    return {item.name: given[f"zero_{item.name}"] for item in fields(ZeroConfig) if f"zero_{item.name}" in given}


# plan ---------------------------------------------------------------------------------------------------------------


class _Model:
    """A model's units, however it is known, and what it is called."""

    def __init__(self, options: argparse.Namespace, precision: Precision) -> None:
        if (options.model is None) == (options.parameters is None):
            raise ConfigError("plan needs either a model or --parameters N")
        self.architecture: Architecture | None = None
        self._drafter: Drafter | None = None
        self._units: Units = []
        self.is_number = options.parameters is not None
        if options.parameters is not None:
            self.name = f"{options.parameters} parameters"
            self._units = from_number(_count(options.parameters), precision)
            return
        self.name = options.model
        path = Path(options.model)
        if path.suffix == ".safetensors" or (path.is_dir() and not (path / "config.json").exists()):
            self._units = from_files(path, precision)
            return
        from ..huggingface.models import empty_model

        model = empty_model(options.model)
        self._drafter = Drafter(model, precision)
        self.architecture = Architecture.of(model.config, (names[0] for names in self._drafter.names.values()))

    def layout(self, shards: int) -> Layout:
        if self._drafter is None:
            return Layout.build(self._units, shards, None if self.is_number else visits_by_name(self._units))
        return self._drafter.layout(self._drafter.specs(dict.fromkeys(self._drafter.names, 0)), shards)


def _count(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.strip().upper().replace(",", ""))
    if match is None or not round(float(match[1]) * _COUNT[match[2]]):
        raise ConfigError(f"--parameters: expected a number such as 7.5B or 124M, found {text!r}")
    return round(float(match[1]) * _COUNT[match[2]])


def _plan(options: argparse.Namespace) -> int:
    if options.plot and not options.sweep:
        raise ConfigError("--plot draws a sweep: add --sweep")
    given = ZeroConfig(reduce_dtype=options.zero_reduce_dtype, full_precision=options.zero_full_precision)
    precision = Precision.of(options.mixed_precision, given.reduce_dtype, given.full_precision)
    model = _Model(options, precision)
    if options.sweep:
        return _sweep(options, model, precision)
    machine, source = _machine(options)

    def make(stage: int) -> Plan:
        return _make(options, model, precision, machine, stage, options.world_size)

    if options.zero_stage is not None:
        made = make(options.zero_stage)
        if options.json:
            print(json.dumps(_values(made, model, options), indent=1))
        else:
            _print(made, model, source)
        return 0
    plans, refused = _each(sorted(STAGES), make)
    if options.json:
        print(json.dumps([_values(made, model, options) for made in plans], indent=1))
        return 0
    console = Console()
    console.print(_side_by_side(plans, model))
    for stage, text in refused.items():
        console.print(f"stage {stage}: {text}", markup=False, highlight=False)
    return 0


def _each(stages: Sequence[int], make: Callable[[int], Plan]) -> tuple[list[Plan], dict[int, str]]:
    """The plans there are, and why there are no others."""
    plans, refused = [], {}
    for stage in stages:
        try:
            plans.append(make(stage))
        except ConfigError as error:
            refused[stage] = str(error)
    if not plans:
        raise ConfigError("; ".join(dict.fromkeys(refused.values())))
    return plans, refused


def _make(
    options: argparse.Namespace, model: _Model, precision: Precision, machine: Machine, stage: int, ranks: int,
    **changes: Any,
) -> Plan:  # fmt: skip
    if ranks < 1:
        raise ConfigError(f"--world-size must be at least 1, found {ranks}")
    config = ZeroConfig(**{**_settings(options), "stage": stage, **changes})
    batch = None
    if options.batch is not None:
        checkpointing = options.gradient_checkpointing or options.offload_activations
        batch = Batch(options.batch, options.sequence, checkpointing, options.offload_activations, model.architecture)
    return plan(
        model.layout(ranks if config.policy.shard else 1),
        machine,
        config,
        world_size=ranks,
        precision=precision,
        optimizer_tensors=options.optimizer_tensors,
        batch=batch,
        backward_per_step=options.accumulation,
    )


def _machine(options: argparse.Namespace) -> tuple[Machine, str]:
    """Sizes and speeds, and where they are from. Sizes of this machine are used only where `auto` needs some."""
    if options.machine is not None:
        machine, source = Machine.load(options.machine), options.machine
    else:
        path = kept(options.cache)
        machine, source = (Machine.load(path), f"hf-zero probe on {host_name()}") if path.exists() else (Machine(), "")
        device = _device()
        wants = "auto" in (options.zero_offload_optimizer, options.zero_offload_params)
        present = here(device, ranks=max(1, min(options.world_size, torch.cuda.device_count() or options.world_size)))
        if wants and None in (options.zero_device_memory, options.zero_host_memory):
            sizes = {"device_memory": present.device_memory, "host_memory": present.host_memory}
            source = f"{source}; " if source else ""
            source += "memory that is free on this machine"
        else:
            sizes = {"device_memory": None, "host_memory": None}
        shares = machine.shares_memory if path.exists() else present.shares_memory and wants
        machine = Machine(
            **{**machine.to_dict(), **sizes, "shares_memory": shares, "disk_free": present.disk_free if wants else None}
        )
    if options.disk_space is not None:
        machine = Machine(**{**machine.to_dict(), "disk_free": parse_bytes(options.disk_space, "--disk-space")})
    return machine, source


def _values(made: Plan, model: _Model, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": model.name,
        "mixed_precision": options.mixed_precision,
        **made.to_dict(),
        "zero_paper_states_bytes_per_rank": _paper(made.layout.numel, made.config.stage, made.world_size),
    }


def _paper(parameters: int, stage: int, ranks: int) -> int:
    return round(paper_states_bytes(parameters, STAGES[stage], ranks))


def _ranks_text(count: int) -> str:
    return f"{count:,} rank{'s' if count > 1 else ''}"


def _print(made: Plan, model: _Model, source: str) -> None:
    console = Console()
    config = made.config
    title = (
        f"{model.name}: {made.layout.numel:,} parameters, ZeRO stage {config.stage} on {_ranks_text(made.world_size)}"
    )
    table = Table(title=title, caption="GiB per rank: at rest → at peak", caption_justify="left")
    table.add_column("")
    for tier in TIERS:
        table.add_column(tier.value, justify="right")
    for kind in KINDS:
        cells = [(made.memory.rest[tier][kind], made.memory.peak[tier][kind]) for tier in TIERS]
        if any(peak for _, peak in cells):
            table.add_row(kind + (" (estimate)" if kind == "activations" else ""), *(_pair(*cell) for cell in cells))
    table.add_section()
    table.add_row("sum", *(_pair(made.memory.at_rest(tier), made.memory.at_peak(tier)) for tier in TIERS))
    limits = {name: limit for name, _, limit in made.budgets.rows()}
    if limits:
        table.add_row("budget", *(_gib(limits[tier.value]) if tier.value in limits else "" for tier in TIERS))
    console.print(table)

    costs = Table(title="one step", caption_justify="left")
    for column in ("", "bytes per rank", "seconds alone"):
        costs.add_column(column, justify="right")
    alone: dict[str, float | None] = {}
    for name, value in made.parts.items():
        road = name.split()[1]
        before = alone.get(road, 0.0)
        alone[road] = None if value is None or before is None else before + value
    for road in ("compute", *ROADS, "device", "host"):
        if road in alone:
            moved = size_text(getattr(made.traffic, road)) if road in ROADS else ""
            label = {"device": "device optimizer", "host": "host optimizer"}.get(road, road)
            value = alone[road]
            costs.add_row(label, moved, "" if value is None else f"{value:.4f}")
    if made.step_s is not None and made.parts:
        costs.add_section()
        costs.add_row("step, overlapped", "", f"{made.step_s:.4f}")
    if alone:
        console.print(costs)
    for line in made.reasons:
        console.print(f"· {line}", markup=False, highlight=False)
    if model.is_number:
        console.print("· units are not known: gathers and communication are those of a model that is one unit")
    if source:
        console.print(f"· sizes and speeds: {source}", markup=False, highlight=False)
    if made.shortfall:
        console.print(f"does not fit: {made.shortfall}", style="bold red", markup=False, highlight=False)


def _gib(value: float) -> str:
    return f"{value / (1 << 30):.3f}"


def _pair(rest: int, peak: int) -> str:
    if not peak:
        return ""
    return _gib(peak) if rest == peak else f"{_gib(rest)} → {_gib(peak)}"


def _side_by_side(plans: Sequence[Plan], model: _Model) -> Table:
    first = plans[0]
    title = f"{model.name}: {first.layout.numel:,} parameters on {_ranks_text(first.world_size)}, GiB per rank"
    table = Table(title=title, caption="params to sum: at rest, over all tiers; device, host and disk: at peak")
    for column in ("stage", "params", "grads", "optim", "sum", "device", "host", "disk", "fits"):
        table.add_column(column, justify="right")
    for made in plans:
        states = [sum(made.memory.rest[tier][kind] for tier in TIERS) for kind in KINDS[:3]]
        peaks = [made.memory.at_peak(tier) for tier in TIERS]
        fits = "yes" if made.fits else "no"
        row = [*states, sum(states), *peaks]
        table.add_row(str(made.config.stage), *(_gib(value) for value in row), fits if any(made.budgets.rows()) else "")
    return table


# sweep --------------------------------------------------------------------------------------------------------------


def _sweep(options: argparse.Namespace, model: _Model, precision: Precision) -> int:
    """Every number of ranks, stage and tier: model states per rank, all of them and those on the device."""
    rows: list[dict[str, Any]] = []
    for stage in sorted(STAGES):
        for offload in ("none", "cpu", "disk"):
            for ranks in SWEEP_RANKS:
                policy = STAGES[stage]
                if offload != "none" and not policy.shard and ranks > 1:
                    continue
                changes = {
                    "offload_optimizer": offload,
                    "offload_params": "none" if policy.keep_full and ranks > 1 else offload,
                    "device_memory": None,
                    "host_memory": None,
                }
                made = _make(options, model, precision, Machine(), stage, ranks, **changes)
                states = {tier.value: sum(made.memory.rest[tier][kind] for kind in KINDS[:3]) for tier in TIERS}
                rows.append(
                    {
                        "stage": stage,
                        "offload": offload,
                        "world_size": ranks,
                        "parameters": made.layout.numel,
                        "states_bytes_per_rank": made.memory.states,
                        "states_bytes_by_tier": states,
                        "zero_paper_states_bytes_per_rank": _paper(made.layout.numel, stage, ranks),
                    }
                )
    if options.plot:
        _draw(rows, model, options.plot)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        table = _sweep_table(rows, model)
        # As wide as its figures are: cut off they are wrong, broken over lines by a narrow terminal they are not.
        width = Console(width=1000).measure(table).maximum
        Console(width=max(Console().width, width)).print(table)
    return 0


def _series(rows: Sequence[dict[str, Any]]) -> dict[tuple[int, str], dict[int, dict[str, Any]]]:
    out: dict[tuple[int, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        out.setdefault((row["stage"], row["offload"]), {})[row["world_size"]] = row
    return out


def _sweep_table(rows: Sequence[dict[str, Any]], model: _Model) -> Table:
    table = Table(
        title=f"{model.name}: {rows[0]['parameters']:,} parameters, model states in GB (10^9 bytes) per rank, on the device",
        caption="paper: all states as arXiv 1910.02054, figure 1, counts them (fp16, K = 12), without offload",
    )
    table.add_column("stage")
    table.add_column("offload")
    for ranks in SWEEP_RANKS:
        table.add_column(f"{ranks:,}", justify="right")
    for (stage, offload), by_ranks in _series(rows).items():
        cells = [by_ranks[r]["states_bytes_by_tier"]["device"] if r in by_ranks else None for r in SWEEP_RANKS]
        table.add_row(str(stage), offload, *("" if cell is None else _gb(cell) for cell in cells))
        if offload == "disk":
            paper = [_paper(rows[0]["parameters"], stage, ranks) for ranks in SWEEP_RANKS]
            table.add_row(str(stage), "paper", *(_gb(cell) for cell in paper), style="dim", end_section=True)
    return table


def _gb(value: float) -> str:
    size = value / 1e9
    return f"{size:.0f}" if size >= 100 else f"{size:.1f}" if size >= 1 else f"{size:.3f}"


def _draw(rows: Sequence[dict[str, Any]], model: _Model, path: str) -> None:
    with needs("plot"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    names: dict[tuple[tuple[int, float], ...], list[tuple[int, str]]] = {}
    for key, by_ranks in _series(rows).items():
        points = [(ranks, row["states_bytes_by_tier"]["device"] / 1e9) for ranks, row in by_ranks.items()]
        shown = tuple(point for point in points if point[1] > 0)  # the axis is logarithmic
        if shown:
            names.setdefault(shown, []).append(key)
    for line, keys in names.items():  # what coincides is one line
        label = "; ".join(f"stage {stage}" + (f", {offload}" if offload != "none" else "") for stage, offload in keys)
        style = "-" if any(offload == "none" for _, offload in keys) else "--"
        axes.plot(*zip(*line), style, marker="o", markersize=3, label=label)
    axes.set(yscale="log", xlabel="ranks", ylabel="model states per rank on the device, GB")
    axes.set_xscale("log", base=2)
    axes.set_title(f"{model.name} ({rows[0]['parameters']:,})")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


# probe --------------------------------------------------------------------------------------------------------------


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _probe(options: argparse.Namespace) -> int:
    from ..huggingface.plugin import ZeroAccelerator

    accelerator = ZeroAccelerator()  # joins the ranks that torchrun has started, and says which device is this one's
    try:
        wire = open_wire(accelerator.device)
        machine = probe(accelerator.device, wire, ranks=wire.ranks_here(), offload_dir=options.offload_dir)
        if wire.rank == 0:
            path = _keep(machine, options.cache)
            if options.json:
                print(json.dumps(machine.to_dict(), indent=1))
            else:
                _print_machine(machine, wire.size, path)
    finally:
        accelerator.end_training()
    return 0


def _keep(machine: Machine, cache: Path) -> Path:
    """Into the cache, at once or not at all. A probe of one rank does not forget what several measured."""
    path = kept(cache)
    values = machine.to_dict()
    if machine.collective is None and path.exists():
        values["collective"] = Machine.load(path).collective
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)
    return path


def _print_machine(machine: Machine, ranks: int, path: Path) -> None:
    table = Table(title=f"{host_name()}, one of {_ranks_text(ranks)}")
    table.add_column("")
    table.add_column("", justify="right")
    for label, size in (
        ("device memory free", machine.device_memory),
        ("host memory free", machine.host_memory),
        ("disk free", machine.disk_free),
    ):
        table.add_row(label, "" if size is None else size_text(size))
    table.add_section()
    for label, rate in (
        ("host memory, copy", machine.copy_bandwidth),
        ("host memory, optimizer", machine.host_bandwidth),
        ("device memory, optimizer", machine.device_bandwidth),
        ("link, device to host", machine.link_down),
        ("link, host to device", machine.link_up),
        ("disk, read", machine.disk_read),
        ("disk, write", machine.disk_write),
        ("collectives, sent per rank", machine.collective),
    ):
        table.add_row(label, "" if rate is None else f"{rate / 1e9:.2f} GB/s")
    table.add_section()
    for dtype, rate in machine.flops.items():
        table.add_row(f"matrix product, {dtype}", f"{rate / 1e12:.3f} TFLOP/s")
    console = Console()
    console.print(table)
    console.print(f"kept in {path}", markup=False, highlight=False)
