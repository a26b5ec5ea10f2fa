"""A command made of a dataclass: its fields are flags, its docstring is the help with examples, a refusal is one line and a
status; and these dataclasses. Nothing here imports torch: help, version and completion answer at once.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from ..config import DTYPES, ZeroConfig, setting
from ..errors import ConfigError, ZeroError

OK, WRONG, USAGE = 0, 1, 2
"""Exit statuses of every command. 1: looked, and something is wrong (a damaged file, a plan that does not fit), or the work
failed. 2: what was typed cannot be."""
_MOST_NAME = 255
"""Bytes of one name in a path, on Linux."""
MOST_RANKS = 1 << 16
"""That a plan takes: time and memory grow with them where it searches for what fits."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Of every command."""

    json: bool = field(default=False, metadata={"help": "print JSON instead of text"})
    debug: bool = field(default=False, metadata={"help": "with an error, its traceback"})


T = TypeVar("T", bound=Options)


def flag(help: str | None = None, default: Any = None, **said: Any) -> Any:
    """A field that is a flag; `said`: `choices`, `most` (of a number), and keywords of `typer.Option`."""
    return field(default=default, metadata={"help": help, **said})


def argument(help: str, default: Any = MISSING, **said: Any) -> Any:
    """A field that is typed without a flag."""
    return field(default=default, metadata={"help": help, "is_argument": True, **said})


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def as_flags(values: Mapping[str, Any]) -> str:
    """As they are typed; what is False is left out."""
    given = ((flag_of(name), value) for name, value in values.items() if value is not False)
    return " ".join(name if value is True else f"{name} {shlex.quote(str(value))}" for name, value in given)


def as_plugin(settings: Mapping[str, Any]) -> str:
    """As they are written in a program."""
    return f"zero.ZeroPlugin({', '.join(f'{name}={value!r}' for name, value in settings.items())})"


def _parameter(item: Field[Any], hint: Any) -> inspect.Parameter:
    """Of a command, from a field of its options."""
    said = {key: value for key, value in item.metadata.items() if key not in ("choices", "is_argument", "most")}
    if choices := item.metadata.get("choices"):
        hint = Literal[tuple(choices)] if item.default is not None else Literal[tuple(choices)] | None
    if item.metadata.get("is_argument"):
        info = typer.Argument(**said)
    else:
        shown = item.default not in (None, False, "")
        info = typer.Option(flag_of(item.name), show_default=shown, **said)
    default = inspect.Parameter.empty if item.default is MISSING else item.default
    return inspect.Parameter(
        item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, info]
    )


def add(app: typer.Typer, name: str, options: type[T], run: Callable[[T], int | None]) -> None:
    """A command whose flags are the fields of `options`. `run` returns the exit status; None is 0."""

    def called(**given: Any) -> None:
        try:
            _check_most(options, given)
            status = run(options(**given))
        except Exception as error:
            if given["debug"]:
                traceback.print_exc()
            # One line for people. What a file's maker has put into names cannot move the cursor.
            line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in _words(error))
            print(f"hf-zero: {typed(line, options)}", file=sys.stderr)
            status = USAGE if isinstance(error, ConfigError) else WRONG
        raise typer.Exit(status or OK)

    hints = get_type_hints(options)
    items = sorted(fields(options), key=lambda item: item.name in Options.__dataclass_fields__)  # the common ones last
    made = [_parameter(item, hints[item.name]) for item in items]
    called.__dict__["__signature__"] = inspect.Signature(made)  # what typer reads, and the annotations again
    called.__annotations__.update({each.name: each.annotation for each in made})
    app.command(name, help=inspect.getdoc(options))(called)


def _check_most(options: type[Options], given: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: a number is larger than a command can work with in time and memory, or a text cannot be a name.
    """
    for item in fields(options):
        most, value, argument = item.metadata.get("most"), given[item.name], item.metadata.get("is_argument")
        if isinstance(value, str) and "\0" in value:
            raise ConfigError(f"{item.name if argument else flag_of(item.name)} has a null character: {value[:40]!r}")
        if argument and isinstance(value, str) and max(map(len, value.split("/"))) > _MOST_NAME:
            raise ConfigError(f"{item.name} is longer than any name: {len(value)} characters, {value[:40]!r}…")
        if most is not None and value is not None and not value <= most:
            raise ConfigError(f"{flag_of(item.name)} must be at most {most:,}, found {value}")


def _words(error: Exception) -> str:
    if isinstance(error, ZeroError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, (OSError, ValueError)):
        return str(error)
    return f"{type(error).__name__}: {error} (not expected; the same with --debug shows where)"


_VALUE = r"""=(?:(True)|'([^']*)'|"([^"]*)"|([\w.]+))"""


def typed(text: str, options: type[Options]) -> str:
    """`text` with settings as the command line has them: `overwrite=True` as `--overwrite`, `stage=3` as `--zero-stage 3`.

    A name by itself becomes a flag only where it cannot be an ordinary word, and never within a path.
    """
    for item in fields(options):
        name = item.name.removeprefix("zero_")
        if item.metadata.get("is_argument") or item.name in Options.__dataclass_fields__:
            continue
        found = re.compile(rf"(?<![\w/.\-]){name}(?:{_VALUE}|{'' if '_' in name else '(?!)'}(?![\w/=]))")

        def as_flag(match: re.Match[str], wanted: str = flag_of(item.name)) -> str:
            value = next((part for part in match.groups()[1:] if part is not None), None)
            return wanted if value is None else f"{wanted} {value}"

        text = found.sub(as_flag, text)
    return text


def print_json(values: Any) -> None:
    print(json.dumps(values, indent=1))


# Of every command -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Options):
    """Memory per rank and tier, traffic and step time, before anything runs.

    MODEL is a size (7B, 350M), a built-in name (gpt2, gpt2-xl, llama-3-8b), a local folder, config.json or .safetensors file,
    or a name on the Hub. No weights are read. Without --zero-stage all stages side by side, and what to use.

    \b
    Examples:
      hf-zero plan 7B --mixed-precision bf16
      hf-zero plan llama-3-8b --world-size 4 --device-memory 24GiB --batch 4 --sequence 4096
      hf-zero plan llama-3-8b --world-size 32 --nodes 4 --zero-stage 3 --device-memory 24GiB
      hf-zero plan out/checkpoint-500 --zero-stage 3 --zero-offload-optimizer cpu
      hf-zero plan gpt2-xl --sweep --plot sweep.png

    Exit status 1: nothing fits the memory that was given.
    """

    model: str | None = argument("size, built-in name, folder, file or Hub id", default=None)
    parameters: str | None = flag("in place of MODEL: a number of parameters, such as 7.5B", metavar="N")
    world_size: int = flag("number of ranks", 8, most=MOST_RANKS)
    nodes: int = flag(
        "number of machines, with as many ranks each: what stays within them at stage 3", 1, most=MOST_RANKS
    )
    zero_stage: int | None = setting(
        "stage", default=None, help="this stage alone, with all details", metavar="[0|1|2|3]"
    )
    mixed_precision: str = flag(default="no", choices=("no", "bf16", "fp16"))
    zero_offload_optimizer: str = setting("offload_optimizer")
    zero_offload_params: str = setting("offload_params")
    zero_step_in_backward: bool = setting("step_in_backward", help="update offloaded units in backward")
    zero_reduce_dtype: str | None = setting("reduce_dtype", metavar="DTYPE")
    zero_full_precision: str = setting("full_precision", metavar="NAMES")
    zero_units: str = setting("units", metavar="NAMES")
    zero_replicas: int = setting(
        "replicas", help="copies of what the stage shards (hybrid sharding)", metavar="R", most=MOST_RANKS
    )
    zero_wire: str = setting("wire", help="format in which gradients and weights travel")
    # No --zero: they are figures of the machine here, with or without `auto`.
    device_memory: str | None = setting(
        "device_memory", help="bytes per rank on the device, such as 24GiB", metavar="SIZE"
    )
    host_memory: str | None = setting("host_memory", help="bytes per rank of host memory", metavar="SIZE")
    disk_space: str | None = flag("bytes per rank in the offload folder", metavar="SIZE")
    optimizer_tensors: int = flag("state tensors per parameter; Adam has 2", 2, most=100)
    batch: int | None = flag("sequences per rank and forward; counts activations", metavar="ROWS", most=10**6)
    sequence: int = flag("with --batch", 2048, metavar="TOKENS", most=10**8)
    accumulation: int = flag("micro-batches per step", 1, metavar="N", most=10**6)
    gradient_checkpointing: bool = flag("keep only the blocks' inputs for backward", False)
    offload_activations: bool = flag("checkpointed activations rest on the host", False)
    machine: str | None = flag("sizes and speeds as `hf-zero probe --json` prints them", metavar="FILE")
    sweep: bool = flag("1 to 1,024 ranks, all stages and tiers side by side", False)
    plot: str | None = flag("with --sweep: a picture of it", metavar="FILE.png")

    def config(self, stage: int, **changes: object) -> ZeroConfig:
        """Of what was given for the fields of `ZeroConfig` that have a flag."""
        given = {item.name.removeprefix("zero_"): getattr(self, item.name) for item in fields(self)}
        known = {item.name: given[item.name] for item in fields(ZeroConfig) if item.name in given}
        return ZeroConfig(**{**known, "stage": stage, **changes})


@dataclass(frozen=True, kw_only=True)
class ProbeOptions(Options):
    """Measure memory, disk, link and collectives of this machine.

    It takes some seconds, on an idle machine. Under torchrun also the collectives between its ranks, all of them at the same
    time. The result is kept for this machine: `hf-zero plan` reads it, and so does training where a tier is `auto`.

    \b
    Examples:
      hf-zero probe --offload-dir /fast/disk
      hf-zero probe --output machine.json
      torchrun --nproc-per-node 8 -m hf_zero probe
    """

    offload_dir: str | None = flag("a folder on the disk to measure (default: the temporary folder)", metavar="DIR")
    output: str | None = flag("write it there, and keep it nowhere else", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(Options):
    """The collectives of one step on any number of ranks, and its time on a network, without these ranks.

    One rank's real engine runs a few steps of AdamW in this process; the other ranks are not there. MODEL is a built-in name
    (gpt2-tiny, gpt2-124m), a local folder or a name on the Hub. No weights are read, and large tensors have no values: models
    far larger than this machine are simulated.

    \b
    Examples:
      hf-zero simulate gpt2-124m --world-size 1024 --nodes 128 --mixed-precision bf16
      hf-zero simulate gpt2-124m --world-size 8 --zero-stage 2 --json
      hf-zero simulate gpt2-124m --world-size 2 --machine machine.json
      hf-zero simulate gpt3-13b --world-size 4096 --nodes 512 --zero-stage 3 --scaling weak --plot weak.png
      hf-zero simulate gpt3-1.3b --world-size 64 --nodes 8 --zero-stage 3 --device-memory 16GiB
    """

    model: str = argument("built-in name, folder or Hub id")
    world_size: int = flag("number of ranks", 8, most=1 << 14)
    nodes: int = flag("number of machines, with as many ranks each", 1, most=1 << 14)
    zero_stage: int = setting("stage", metavar="[0|1|2|3]")
    mixed_precision: str = flag(default="no", choices=("no", "bf16"))
    accumulation: int = flag("micro-batches per step", 1, metavar="N", most=256)
    batch: int = flag("sequences per rank and forward", 1, metavar="ROWS", most=10**6)
    sequence: int = flag("tokens of each", 128, metavar="TOKENS", most=10**8)
    network: str = flag(
        "between machines; within one it is NVLink", "infiniband", choices=("nvlink", "infiniband", "ethernet")
    )
    adapters: int = flag(
        "to other machines, of one machine; 0: one for each of its ranks", 0, metavar="N", most=1 << 14
    )
    flops: float | None = flag(
        "floating-point operations a second of one rank (default: the machine's file, else 4e14)",
        metavar="RATE",
        most=10**21,
    )
    machine: str | None = flag(
        "speeds within a machine as `hf-zero probe` writes them on as many ranks, in place of an H100's", metavar="FILE"
    )
    zero_units: str = setting("units", metavar="NAMES")
    zero_replicas: int = setting("replicas", metavar="R", most=1 << 14)
    zero_wire: str = setting("wire")
    device_memory: str | None = setting(
        "device_memory",
        help="bytes per rank on the device: units stay for backward as long as it has room",
        metavar="SIZE",
    )
    scaling: str = flag(
        "1 to --world-size ranks; weak: --batch rows for each, strong: the rows of them all shared out",
        "none",
        choices=("none", "weak", "strong"),
    )
    plot: str | None = flag("with --scaling: a picture of it", metavar="FILE.png")


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(Options):
    """Check every byte of a checkpoint against its manifest.

    \b
    Examples:
      hf-zero verify out/checkpoint-500

    Exit status 0: it is whole; 1: stderr names the file that is missing, short or altered.
    """

    folder: str = argument("checkpoint folder, with zero_manifest.json", metavar="DIR")


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Options):
    """Make a clean model folder of a checkpoint, here or on the Hub.

    Weights, configuration, tokenizer, code and model card, without optimizer and training state. The checkpoint is verified
    first.

    \b
    Examples:
      hf-zero export out/checkpoint-500 --output model --dtype bfloat16
      hf-zero export out/checkpoint-500 --push-to-hub user/model --private
    """

    folder: str = argument("checkpoint folder, or any folder that from_pretrained loads", metavar="DIR")
    output: str | None = flag("where to; one that an earlier export made is replaced", metavar="DIR")
    push_to_hub: str | None = flag("upload; made where it is not there", metavar="USER/REPO")
    dtype: str | None = flag("cast the weights (default: as they are)", choices=(*DTYPES, "fp32", "bf16", "fp16"))
    max_shard_size: str = flag("most bytes per weight file", "50GB", metavar="SIZE")
    private: bool = flag("a repository that is made is private", False)
    revision: str | None = flag("branch to upload to; made where it is not there", metavar="BRANCH")
    commit_message: str | None = flag(metavar="TEXT")
    overwrite: bool = flag("into an --output with other files; weights of another kind go, there and on the Hub", False)


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """Planned against counted, of a run's zero_steps.jsonl: the verdict, then the figures; also of a run in progress.

    Memory by tier, throughput, traffic and waiting of a run that was recorded (ZeroCallback, or engine.record), of all ranks;
    its slowest steps; what to change. Of two runs also what differs.

    \b
    Examples:
      hf-zero report out
      hf-zero report out --html report.html
      hf-zero report out other --html both.html
    """

    folder: str = argument("folder with zero_steps.jsonl, or that file", metavar="RUN")
    other: str | None = argument("a second run, to compare with", default=None, metavar="RUN2")
    png: str | None = flag("memory by tier and parts of the step, over time, as a picture", metavar="FILE.png")
    html: str | None = flag("everything on one interactive page that needs no other file", metavar="FILE.html")


@dataclass(frozen=True, kw_only=True)
class MigrateOptions(Options):
    """Settings of DeepSpeed or FSDP as settings of hf_zero.

    FILE is a DeepSpeed JSON, an accelerate YAML (DeepSpeed or FSDP), or the Trainer's fsdp_config. Each setting is named, with
    what becomes of it.

    \b
    Examples:
      hf-zero migrate ds_config.json
      hf-zero migrate ~/.cache/huggingface/accelerate/default_config.yaml
      hf-zero migrate fsdp_config.json --json

    Exit status 1: something that mattered has no equivalent, or is not known.
    """

    file: str = argument("DeepSpeed JSON, accelerate YAML or fsdp_config", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(Options):
    """What this machine has, and what would get in the way of a training.

    Devices and backend, versions, the offload folder's disk, free memory, other programs, accelerate's configuration.

    \b
    Examples:
      hf-zero doctor
      hf-zero doctor --offload-dir /fast/disk

    Exit status 1: something has to be mended first.
    """

    offload_dir: str | None = flag(
        "the folder that the disk tier would use (default: the temporary folder)", metavar="DIR"
    )
