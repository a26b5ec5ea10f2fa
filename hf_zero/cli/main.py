"""The command `hf-zero`: its commands, their flags and exit statuses. What they print is in `show`.

Flags are the fields of dataclasses, so that those of settings say of themselves what `ZeroConfig` says. Exit status 2: what
was typed cannot be; of `plan` and `probe` also any other refusal. 1: any other refusal.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_type_hints

import torch
import typer

from ..checkpoint.export import DTYPES, export, verified
from ..checkpoint.export import Progress as Note
from ..comm.wire import open_wire
from ..config import STAGES, ZeroConfig, parse_bytes
from ..core.layout import Layout
from ..core.precision import Precision
from ..errors import ConfigError, ZeroError
from ..plan.activations import Architecture, Batch
from ..plan.costs import STATES, TIERS, paper_states_bytes
from ..plan.machine import Machine, here, host_name, kept, probe
from ..plan.outline import Units, from_files, from_number, visits_by_name
from ..plan.plan import Drafter, Plan, plan
from ..plan.solve import PlanInputs
from ..version import __version__

# `show` brings rich: imported where something is shown.

SWEEP_RANKS = tuple(1 << power for power in range(11))
_COUNT = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def _print_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit()


_Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)]


def _general(version: _Version = False) -> None:
    pass


def _flag(help: str | None = None, default: Any = None, **said: Any) -> Any:
    """A field that is a flag; `said`: `choices`, and keywords of `typer.Option`."""
    return field(default=default, metadata={"help": help, **said})


def _setting(name: str, **said: Any) -> Any:
    """The flag of one field of `ZeroConfig`, with its default, help and choices, but for what is `said` here."""
    origin = ZeroConfig.__dataclass_fields__[name]
    default = said.pop("default", origin.default)
    return field(default=default, metadata={**origin.metadata, **said})


def _argument(help: str, default: Any = MISSING, **said: Any) -> Any:
    """A field that is typed without a flag."""
    return field(default=default, metadata={"help": help, "is_argument": True, **said})


def _parameter(item: Any, hint: Any) -> inspect.Parameter:
    """Of a command, from a field of its options."""
    said = {key: value for key, value in item.metadata.items() if key not in ("choices", "is_argument")}
    if choices := item.metadata.get("choices"):
        hint = Literal[tuple(choices)] if item.default is not None else Literal[tuple(choices)] | None
    if item.metadata.get("is_argument"):
        info = typer.Argument(**said)
    else:
        shown = item.default not in (None, False, "")
        info = typer.Option(f"--{item.name.replace('_', '-')}", show_default=shown, **said)
    default = inspect.Parameter.empty if item.default is MISSING else item.default
    return inspect.Parameter(
        item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, info]
    )


def _add(app: typer.Typer, name: str, options: type[Any], run: Callable[[Any], None], status: int) -> None:
    """A command whose flags are the fields of `options`; a refusal is one line on stderr, and ends with this status."""

    def called(**given: Any) -> None:
        try:
            run(options(**given))
        except (ZeroError, OSError, ValueError) as error:
            print(f"hf-zero: {error}", file=sys.stderr)
            raise typer.Exit(status) from error

    hints = get_type_hints(options)
    made = [_parameter(item, hints[item.name]) for item in fields(options)]
    called.__dict__["__signature__"] = inspect.Signature(made)  # what typer reads, and the annotations again
    called.__annotations__.update({each.name: each.annotation for each in made})
    app.command(name, help=inspect.getdoc(run))(called)


def _print_json(values: Any) -> None:
    print(json.dumps(values, indent=1))


# plan ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    model: str | None = _argument("Hub id, local folder, or .safetensors file; no weights are read", default=None)
    parameters: str | None = _flag("in place of a model: a number of parameters, such as 7.5B", metavar="N")
    world_size: int = _flag("number of ranks", 8)
    zero_stage: int | None = _setting(
        "stage", default=None, help="this stage alone, with all details", metavar="[0|1|2|3]"
    )
    mixed_precision: str = _flag(default="no", choices=("no", "bf16", "fp16"))
    zero_offload_optimizer: str = _setting("offload_optimizer")
    zero_offload_params: str = _setting("offload_params")
    zero_step_in_backward: bool = _setting("step_in_backward", help="update offloaded units in backward")
    zero_reduce_dtype: str | None = _setting("reduce_dtype", metavar="DTYPE")
    zero_full_precision: str = _setting("full_precision", metavar="NAMES")
    # No --zero: they are figures of the machine here, with or without `auto`.
    device_memory: str | None = _setting(
        "device_memory", help="bytes per rank on the device, such as 24GiB", metavar="SIZE"
    )
    host_memory: str | None = _setting("host_memory", help="bytes per rank of host memory", metavar="SIZE")
    disk_space: str | None = _flag("bytes per rank in the offload folder", metavar="SIZE")
    optimizer_tensors: int = _flag("state tensors per parameter; Adam has 2", 2)
    batch: int | None = _flag("sequences per rank and forward; counts activations", metavar="ROWS")
    sequence: int = _flag("with --batch", 2048, metavar="TOKENS")
    accumulation: int = _flag("micro-batches per step", 1, metavar="N")
    gradient_checkpointing: bool = _flag(default=False)
    offload_activations: bool = _flag("checkpointed activations rest on the host", False)
    machine: str | None = _flag("sizes and speeds as `hf-zero probe --json` prints them", metavar="FILE")
    sweep: bool = _flag("1 to 1,024 ranks, all stages and tiers side by side", False)
    plot: str | None = _flag("with --sweep: a picture of it", metavar="FILE.png")
    json: bool = _flag("print JSON instead of tables", False)

    def config(self, stage: int, **changes: Any) -> ZeroConfig:
        """Of what was given for the fields of `ZeroConfig` that have a flag."""
        given = {item.name.removeprefix("zero_"): getattr(self, item.name) for item in fields(self)}
        known = {item.name: given[item.name] for item in fields(ZeroConfig) if item.name in given}
        return ZeroConfig(**{**known, "stage": stage, **changes})


class _Model:
    """A model's units, however it is known, and what it is called."""

    def __init__(self, options: PlanOptions, precision: Precision) -> None:
        self.architecture: Architecture | None = None
        self._drafter: Drafter | None = None
        self._units: Units = []
        self.is_number = options.parameters is not None
        if options.parameters is not None and options.model is None:
            self.name = f"{options.parameters} parameters"
            self._units = from_number(_count(options.parameters), precision)
        elif options.model is not None and options.parameters is None:
            self.name, path = options.model, Path(options.model)
            if path.suffix == ".safetensors" or (path.is_dir() and not (path / "config.json").exists()):
                self._units = from_files(path, precision)
            else:
                from ..huggingface.models import empty_model

                model = empty_model(options.model)
                self._drafter = Drafter(model, precision)
                self.architecture = Architecture.of(model.config, (names[0] for names in self._drafter.names.values()))
        else:
            raise ConfigError("plan needs either a model or --parameters N")

    def layout(self, shards: int) -> Layout:
        if self._drafter is None:
            return Layout.build(self._units, shards, None if self.is_number else visits_by_name(self._units))
        return self._drafter.layout(self._drafter.specs(dict.fromkeys(self._drafter.names, 0)), shards)


def _count(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.strip().upper().replace(",", ""))
    if match is None or not round(float(match[1]) * _COUNT[match[2]]):
        raise ConfigError(f"--parameters: expected a number such as 7.5B or 124M, found {text!r}")
    return round(float(match[1]) * _COUNT[match[2]])


def _plan(options: PlanOptions) -> None:
    """Memory per rank and tier, traffic and step time, from a model's configuration alone.

    What each rank will hold, where and why, before anything runs: from a configuration, from the headers of safetensors files,
    or from a number of parameters. Without --zero-stage all stages side by side.
    """
    from . import show

    if options.plot and not options.sweep:
        raise ConfigError("--plot draws a sweep: add --sweep")
    if options.world_size < 1:
        raise ConfigError(f"--world-size must be at least 1, found {options.world_size}")
    given = options.config(0)
    precision = Precision.of(options.mixed_precision, given.reduce_dtype, given.full_precision)
    model = _Model(options, precision)
    if options.sweep:
        rows = _sweep(options, model, precision)
        if options.plot:
            show.draw_sweep(rows, model.name, options.plot)
        if options.json:
            _print_json(rows)
        else:
            show.sweep(rows, model.name)
        return
    machine, source = _machine(options)
    if options.zero_stage is not None:
        made = _planned(options, model, precision, machine, options.zero_stage, options.world_size)
        if options.json:
            _print_json(_values(made, model, options))
        else:
            show.plan(made, model.name, source, model.is_number)
        return
    plans, refused = [], {}
    for stage in sorted(STAGES):
        try:
            plans.append(_planned(options, model, precision, machine, stage, options.world_size))
        except ConfigError as error:
            refused[stage] = str(error)
    if not plans:
        raise ConfigError("; ".join(dict.fromkeys(refused.values())))
    if options.json:
        _print_json([_values(made, model, options) for made in plans])
    else:
        show.stages(plans, model.name, refused)


def _planned(
    options: PlanOptions, model: _Model, precision: Precision, machine: Machine, stage: int, ranks: int, **changes: Any
) -> Plan:
    config = options.config(stage, **changes)
    batch = None
    if options.batch is not None:
        checkpointing = options.gradient_checkpointing or options.offload_activations
        batch = Batch(options.batch, options.sequence, checkpointing, options.offload_activations, model.architecture)
    layout = model.layout(ranks if config.policy.shard else 1)
    tensors, micro_batches = options.optimizer_tensors, options.accumulation
    return plan(PlanInputs(layout, machine, config, ranks, precision, tensors, batch, micro_batches))


def _machine(options: PlanOptions) -> tuple[Machine, str]:
    """Sizes and speeds, and where they are from. Sizes of this machine are used only where `auto` needs some."""

    if options.machine is not None:
        machine, source = Machine.load(options.machine), options.machine
    else:
        path = kept(_cache_folder())
        machine, source = (Machine.load(path), f"hf-zero probe on {host_name()}") if path.exists() else (Machine(), "")
        machine = replace(machine, device_memory=None, host_memory=None, disk_free=None)
        if "auto" in (options.zero_offload_optimizer, options.zero_offload_params):
            ranks = max(1, min(options.world_size, torch.cuda.device_count() or options.world_size))
            free = here(torch.device("cuda" if torch.cuda.is_available() else "cpu"), ranks=ranks)
            shares = machine.shares_memory if source else free.shares_memory
            machine = replace(machine, disk_free=free.disk_free, shares_memory=shares)
            if None in (options.device_memory, options.host_memory):
                machine = replace(machine, device_memory=free.device_memory, host_memory=free.host_memory)
                source = f"{source}{'; ' if source else ''}memory that is free on this machine"
    if options.disk_space is not None:
        machine = replace(machine, disk_free=parse_bytes(options.disk_space, "--disk-space"))
    return machine, source


def _cache_folder() -> Path:
    """Where programs keep what they can make again (XDG base directory specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_zero"


def _values(made: Plan, model: _Model, options: PlanOptions) -> dict[str, Any]:
    paper = paper_states_bytes(made.layout.numel, STAGES[made.config.stage], made.world_size)
    return {
        "model": model.name,
        "mixed_precision": options.mixed_precision,
        **made.to_dict(),
        "zero_paper_states_bytes_per_rank": round(paper),
    }


def _sweep(options: PlanOptions, model: _Model, precision: Precision) -> list[dict[str, Any]]:
    """Every number of ranks, stage and tier: model states per rank, all of them and those on the device."""

    rows: list[dict[str, Any]] = []
    for stage, policy in sorted(STAGES.items()):
        for offload in ("none", "cpu", "disk"):
            for ranks in SWEEP_RANKS:
                if offload != "none" and not policy.shard and ranks > 1:
                    continue
                changes = {
                    "offload_optimizer": offload,
                    "offload_params": "none" if policy.keep_full and ranks > 1 else offload,
                    "device_memory": None,
                    "host_memory": None,
                }
                made = _planned(options, model, precision, Machine(), stage, ranks, **changes)
                states = {tier.value: sum(made.memory.rest[tier][kind] for kind in STATES) for tier in TIERS}
                rows.append(
                    {
                        "stage": stage,
                        "offload": offload,
                        "world_size": ranks,
                        "parameters": made.layout.numel,
                        "states_bytes_per_rank": made.memory.states,
                        "states_bytes_by_tier": states,
                        "zero_paper_states_bytes_per_rank": round(paper_states_bytes(made.layout.numel, policy, ranks)),
                    }
                )
    return rows


# probe --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    offload_dir: str | None = _flag("the disk to measure (default: the temporary folder)", metavar="DIR")
    json: bool = _flag("print JSON instead of a table", False)


def _probe(options: ProbeOptions) -> None:
    """Measure memory, disk, link and collectives of this machine, for plan.

    It takes some seconds. Under torchrun also the collectives between its ranks, all of them at the same time. The result
    is kept for this machine.
    """
    from ..huggingface.plugin import ZeroAccelerator
    from . import show

    accelerator = ZeroAccelerator()  # joins the ranks that torchrun has started, and says which device is this one's
    try:
        wire = open_wire(accelerator.device)
        machine = probe(accelerator.device, wire, ranks=wire.ranks_here(), offload_dir=options.offload_dir)
        if wire.rank == 0:
            path = kept(_cache_folder())
            machine.keep(path)
            if options.json:
                _print_json(machine.to_dict())
            else:
                show.machine(machine, wire.size, path)
    finally:
        accelerator.end_training()


# verify, export -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    folder: str = _argument("checkpoint folder, with zero_manifest.json", metavar="DIR")


def _verify(options: VerifyOptions) -> None:
    """Check every byte of a checkpoint against its manifest.

    Exit status 0: it is whole; 1: stderr names the file that is missing, short or altered.
    """
    started = time.perf_counter()
    with _progress() as note:
        manifest = verified(options.folder, note)
    rate = manifest.total_bytes / 1e9 / max(time.perf_counter() - started, 1e-9)
    print(f"{options.folder}: whole; {len(manifest.files)} files, {manifest.total_bytes:,} bytes, {rate:.2f} GB/s")


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    folder: str = _argument("checkpoint folder, or any folder that from_pretrained loads", metavar="DIR")
    output: str | None = _flag("where to; one that an earlier export made is replaced", metavar="DIR")
    push_to_hub: str | None = _flag("upload; made where it is not there", metavar="USER/REPO")
    dtype: str | None = _flag("cast the weights (default: as they are)", choices=DTYPES)
    max_shard_size: str = _flag("most bytes per weight file", "50GB", metavar="SIZE")
    private: bool = _flag("a repository that is made is private", False)
    revision: str | None = _flag("branch to upload to; made where it is not there", metavar="BRANCH")
    commit_message: str | None = _flag(metavar="TEXT")
    overwrite: bool = _flag("replace whatever is at --output", False)


def _export(options: ExportOptions) -> None:
    """Make a clean model folder of a checkpoint, here or on the Hub.

    Weights, configuration, tokenizer, code and model card, without optimizer and training state. The checkpoint is verified
    first.
    """
    with _progress() as note, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        given = {item.name: getattr(options, item.name) for item in fields(options) if item.name != "folder"}
        target = export(options.folder, **{**given, "private": options.private or None}, progress=note)
    for text in dict.fromkeys(str(warning.message) for warning in said if warning.category is UserWarning):
        print(f"hf-zero: {text}", file=sys.stderr)
    if target is not None:
        print(f"{options.folder} exported to {target}")
    if options.push_to_hub is not None:
        branch = f", branch {options.revision}" if options.revision else ""
        print(f"{options.folder} uploaded to {options.push_to_hub}{branch}")


@contextmanager
def _progress() -> Iterator[Note]:
    """Bars on stderr while it lasts; none where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def note(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield note


# report -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    folder: str = _argument("folder with zero_steps.jsonl, or that file", metavar="RUN")
    other: str | None = _argument("a second run, to compare with", default=None, metavar="RUN2")
    png: str | None = _flag("memory by tier and parts of the step, over time, as a picture", metavar="FILE.png")
    html: str | None = _flag("everything on one interactive page that needs no other file", metavar="FILE.html")
    json: bool = _flag("print JSON instead of tables", False)


def _report(options: ReportOptions) -> None:
    """Planned against counted, of a run's zero_steps.jsonl: the verdict, then the figures; also of a run in progress.

    Memory by tier, throughput, traffic and waiting of a run that was recorded (ZeroCallback, or engine.record), of all ranks;
    its slowest steps; what to change. Of two runs also what differs. Exit status 1: what is there is no recorded run; 2: there
    is no such folder or file, or nothing can be written where --html or --png says.
    """
    from . import report_text
    from .report import differences, read_all, summary

    folders = [options.folder, *([options.other] if options.other else [])]
    for folder in folders:
        if not Path(folder).exists():
            _refuse(f"{folder}: no such folder or file; expected what ZeroCallback or engine.record wrote to")
    for flag, given in (("png", options.png), ("html", options.html)):
        if given and not Path(given).resolve().parent.is_dir():
            _refuse(f"--{flag} {given}: there is no folder {Path(given).parent}")
    if options.png and Path(options.png).suffix.lower() != ".png":
        _refuse(f"--png {options.png}: expected a name that ends in .png")
    runs = [read_all(Path(folder)) for folder in folders]
    outs = [summary(ranks) for ranks in runs]
    drawable = all(out["steps"] for out in outs)
    differ = differences(*outs) if len(outs) == 2 and drawable else []
    if drawable and (
        options.png or options.html
    ):  # first: what cannot be drawn or written is refused before tables are shown
        from . import report_page

        if options.png:
            Path(options.png).write_bytes(report_page.picture(runs[0]))
        if options.html:
            Path(options.html).write_text(report_page.page(runs, outs, differ), encoding="utf-8")
    if options.json:
        _print_json({"runs": outs, "differences": differ} if options.other else outs[0])
    else:
        report_text.show(outs, differ)
        if not drawable and (options.png or options.html):
            print("hf-zero: nothing to draw yet", file=sys.stderr)


def _refuse(line: str) -> NoReturn:
    """What was typed cannot be."""
    print(f"hf-zero: {line}", file=sys.stderr)
    raise typer.Exit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    app = typer.Typer(
        help="Plan what each rank will hold, check and export checkpoints, report what a run took.",
        callback=_general,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    _add(app, "plan", PlanOptions, _plan, 2)
    _add(app, "probe", ProbeOptions, _probe, 2)
    _add(app, "verify", VerifyOptions, _verify, 1)
    _add(app, "export", ExportOptions, _export, 1)
    _add(app, "report", ReportOptions, _report, 1)
    try:
        app(None if arguments is None else list(arguments), prog_name="hf-zero")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
