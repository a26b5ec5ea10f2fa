"""The command `hf-zero`: arguments of its commands, and one place that reports errors.

A command's implementation is imported when the command runs: help and completion load no torch.
"""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..config import DTYPES, STAGES, ZeroConfig, parse_bytes
from ..errors import ConfigError, ZeroError
from ..version import __version__
from . import OK, USAGE, WRONG

MAX_RANKS = 1 << 16
MAX_ROWS = 10**6
app = typer.Typer(
    help="Plan memory, check and export checkpoints, report runs. Exit status: 0 all is well; "
    "1 something is wrong or failed; 2 invalid arguments.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


# Arguments ----------------------------------------------------------------------------------------


def _check_size(value: str | None, parameter: typer.CallbackParam) -> str | None:
    if value is not None:
        parse_bytes(value, parameter.opts[0])
    return value


def _folder(help: str) -> Any:
    return typer.Argument(help=help, metavar="DIR", exists=True, file_okay=False)


def _flag(help: str, metavar: str | None = None) -> Any:
    return typer.Option(help=help, metavar=metavar)


def _switch(name: str, help: str) -> Any:
    """Return a flag without a value, and without its negation."""
    return typer.Option(f"--{name}", help=help)


def _count(help: str, most: int, metavar: str | None = None, least: int = 1) -> Any:
    return typer.Option(help=help, metavar=metavar, min=least, max=most)


def _size(help: str) -> Any:
    return typer.Option(help=help, metavar="SIZE", callback=_check_size)


def _help_of(name: str) -> str:
    """Return the help of a field of `ZeroConfig`."""
    return str(ZeroConfig.__dataclass_fields__[name].metadata["help"])


def _setting(name: str, metavar: str | None = None) -> Any:
    return _flag(_help_of(name), metavar)


Json = Annotated[bool, _switch("json", "Print JSON.")]

# Of `plan` and `simulate`.
Model = Annotated[str, typer.Argument(help="Size, built-in name, folder, config.json or Hub id.", metavar="MODEL")]
Ranks = Annotated[int, _count("Number of ranks.", MAX_RANKS)]
Precision = Annotated[Literal["no", "bf16", "fp16"], _flag("Compute precision.")]
Batch = Annotated[int, _count("Sequences of a rank (or group of --zero-sp-size) per forward.", MAX_ROWS, "ROWS")]
Tokens = Annotated[int, _count("Tokens of each sequence.", 10**8, "TOKENS")]
Accumulation = Annotated[int, _count("Micro-batches per step.", MAX_ROWS, "N")]
Checkpointing = Annotated[bool, _switch("gradient-checkpointing", "Keep only the blocks' inputs for backward.")]
Machine = Annotated[str | None, _flag("Sizes and speeds of one rank, as `hf-zero probe` writes them.", "FILE")]
Keep = Annotated[str | None, _size("Device memory for units that stay gathered.")]
Offload = Literal["none", "cpu", "disk", "auto"]
Activations = Annotated[Literal["none", "cpu", "disk"], _setting("offload_activations")]
Sharing = Annotated[int, _count(_help_of("sp_size"), MAX_RANKS, "S")]
Chunked = Annotated[Literal["false", "true", "auto"], _setting("chunked_loss")]
Units = Annotated[str, _setting("units", "NAMES")]
Replicas = Annotated[int, _count(_help_of("replicas"), MAX_RANKS, "R")]
Wire = Annotated[Literal["none", "int8", "fp8"], _setting("wire")]


def _config(given: Mapping[str, Any], stage: int) -> ZeroConfig:
    """Return the settings that flags of their names give."""
    flags = ((name, flag) for name in ZeroConfig.__dataclass_fields__ for flag in (name, f"zero_{name}"))
    settings = {name: given[flag] for name, flag in flags if flag in given}
    config = ZeroConfig(**{**settings, "stage": stage})
    config.check_world_size(given["world_size"])
    return config


# Commands -----------------------------------------------------------------------------------------


def plan(
    model: Model,
    world_size: Ranks = 8,
    zero_stage: Annotated[int | None, _flag("Only this stage, with all details.", "[0|1|2|3]")] = None,
    mixed_precision: Precision = "bf16",
    device_memory: Annotated[str | None, _size("Device memory per rank, such as 24GiB.")] = None,
    host_memory: Annotated[str | None, _size("Host memory per rank.")] = None,
    batch: Batch = 1,
    sequence: Tokens = 2048,
    accumulation: Accumulation = 1,
    gradient_checkpointing: Checkpointing = False,
    zero_offload_activations: Activations = "none",
    zero_sp_size: Sharing = 1,
    zero_chunked_loss: Chunked = "false",
    lora: Annotated[int, _count("Train LoRA matrices of this rank; the model is frozen.", 10**4, "RANK", 0)] = 0,
    load_in_4bit: Annotated[
        bool, _switch("load-in-4bit", "With --lora: the frozen model is quantized (QLoRA).")
    ] = False,
    zero_offload_optimizer: Annotated[Offload, _setting("offload_optimizer")] = "none",
    zero_offload_params: Annotated[Offload, _setting("offload_params")] = "none",
    zero_step_in_backward: Annotated[
        bool, _switch("zero-step-in-backward", "Update offloaded units in backward.")
    ] = False,
    zero_reduce_dtype: Annotated[str | None, _setting("reduce_dtype", "DTYPE")] = None,
    zero_full_precision: Annotated[str, _setting("full_precision", "NAMES")] = "",
    zero_units: Units = "",
    zero_replicas: Replicas = 1,
    zero_wire: Wire = "none",
    keep_gathered: Keep = None,
    disk_space: Annotated[str | None, _size("Space per rank in the offload folder.")] = None,
    optimizer_tensors: Annotated[int, _count("State tensors per parameter; Adam has 2.", 100, least=0)] = 2,
    machine: Machine = None,
    json: Json = False,
) -> int:
    """Predict memory per rank, and what fits which GPU.

    MODEL is a size (7B, 350M), a name (llama3-8b, meta-llama/Meta-Llama-3-8B, gpt2), or a local
    folder or config.json. Nothing runs, and no weights are read. Without --zero-stage: all stages
    side by side, and settings for each size of GPU.

    \b
    Examples:
      hf-zero plan meta-llama/Meta-Llama-3-8B
      hf-zero plan llama3-8b --lora 16 --world-size 1 --device-memory 24GiB
      hf-zero plan 7B --world-size 4 --device-memory 24GiB --batch 4 --sequence 4096
      hf-zero plan out/checkpoint-500 --zero-stage 3 --zero-offload-optimizer cpu

    Exit status 1: nothing fits the memory that was given.
    """
    given = locals()
    if load_in_4bit and not lora:
        raise ConfigError("--load-in-4bit needs --lora RANK: quantized weights are frozen")
    if zero_step_in_backward and mixed_precision == "fp16":
        raise ConfigError("--zero-step-in-backward does not go with fp16: use bf16")
    config = _config(given, max(STAGES) if zero_stage is None else zero_stage)
    from .models import look_up

    found = look_up(model)  # before torch is imported: wrong names are refused at once
    from .plan import PlanRequest, machine_of, run

    speeds, source = machine_of(config, world_size, machine, disk_space)
    return run(PlanRequest.of(given, config, found, speeds, source=source), zero_stage is None, json)


def probe(
    offload_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder on the disk to measure (default: temporary).", metavar="DIR", exists=True, file_okay=False
        ),
    ] = None,
    output: Annotated[str | None, _flag("Write the result only there.", "FILE")] = None,
    json: Json = False,
) -> None:
    """Measure memory, disk, link and collectives of this machine.

    Takes some seconds on an idle machine. Under torchrun it also measures the collectives between
    the ranks. The result is kept for this machine: `hf-zero plan` uses it, and so does training
    with a tier of `auto`.

    \b
    Examples:
      hf-zero probe --offload-dir /fast/disk
      hf-zero probe --output machine.json
      torchrun --nproc-per-node 8 -m hf_zero probe
    """
    from .doctor import probe as run

    run(None if offload_dir is None else str(offload_dir), output, json)


def simulate(
    model: Model,
    world_size: Ranks = 8,
    nodes: Annotated[int, _count("Number of machines, with equal numbers of ranks.", MAX_RANKS)] = 1,
    zero_stage: Annotated[int, _setting("stage", "[0|1|2|3]")] = 2,
    mixed_precision: Precision = "bf16",
    accumulation: Accumulation = 1,
    batch: Batch = 1,
    sequence: Tokens = 128,
    gradient_checkpointing: Checkpointing = False,
    zero_offload_activations: Activations = "none",
    zero_sp_size: Sharing = 1,
    zero_chunked_loss: Chunked = "false",
    network: Annotated[
        Literal["nvlink", "infiniband", "ethernet"], _flag("Between machines; within one it is NVLink.")
    ] = "infiniband",
    machine: Machine = None,
    zero_units: Units = "",
    zero_replicas: Replicas = 1,
    zero_wire: Wire = "none",
    keep_gathered: Keep = None,
    json: Json = False,
) -> None:
    """Count the collectives of a step on any number of ranks.

    Nothing runs: collectives and bytes are those of the plan, and the time is hops and bytes over
    the links of the network, with the speeds of an H100 or of --machine. No weights are read.

    \b
    Examples:
      hf-zero simulate gpt2-124m --world-size 1024 --nodes 128
      hf-zero simulate gpt2-124m --world-size 2 --machine machine.json
      hf-zero simulate gpt3-13b --world-size 4096 --nodes 512 --zero-stage 3
      hf-zero simulate llama3-8b --world-size 64 --nodes 8 --zero-stage 3 --keep-gathered 4GiB
      hf-zero simulate llama3-8b --zero-stage 3 --sequence 131072 --zero-sp-size 8
    """
    given = locals()
    if world_size % nodes:
        raise ConfigError(f"{world_size} ranks do not divide by {nodes} nodes")
    config = _config(given, zero_stage)
    from .models import look_up

    found = look_up(model)
    from .plan import PlanRequest
    from .simulate import hardware, run

    speeds, links = hardware(given)
    run(PlanRequest.of(given, config, found, speeds, network=links), links, json)


def verify(
    folder: Annotated[Path, _folder("Checkpoint folder with zero_manifest.json.")],
    json: Json = False,
) -> None:
    """Check every byte of a checkpoint against its manifest.

    \b
    Examples:
      hf-zero verify out/checkpoint-500

    Exit status 1: stderr names the file that is missing, too short or changed.
    """
    from .checkpoints import verify as run

    run(folder, json)


def export(
    folder: Annotated[Path, _folder("Checkpoint folder, or any folder that from_pretrained loads.")],
    output: Annotated[str | None, _flag("Folder to write, new or empty.", "DIR")] = None,
    push_to_hub: Annotated[str | None, _flag("Upload; the repository is created if needed.", "USER/REPO")] = None,
    dtype: Annotated[str | None, _flag("Cast the weights.", "|".join(DTYPES))] = None,
    private: Annotated[bool, _switch("private", "Create the repository as private.")] = False,
    revision: Annotated[str | None, _flag("Branch to upload to; created if needed.", "BRANCH")] = None,
    commit_message: Annotated[str | None, _flag("Of the upload.", "TEXT")] = None,
    overwrite: Annotated[bool, _switch("overwrite", "Write into an --output with files; replace its weights.")] = False,
    json: Json = False,
) -> None:
    """Make a clean model folder of a checkpoint, here or on the Hub.

    Weights, configuration, tokenizer, code and model card, without optimizer and training state.
    The checkpoint is verified first.

    \b
    Examples:
      hf-zero export out/checkpoint-500 --output model --dtype bfloat16
      hf-zero export out/checkpoint-500 --push-to-hub user/model --private
    """
    values = {name: value for name, value in locals().items() if name not in ("folder", "json")}
    from .checkpoints import export as run

    run(folder, values, json)


def report(
    folder: Annotated[str, typer.Argument(help="Folder with zero_steps.jsonl, or that file.", metavar="RUN")],
    other: Annotated[str | None, typer.Argument(help="A second run, to compare with.", metavar="RUN2")] = None,
    png: Annotated[str | None, _flag("Draw loss, throughput and memory.", "FILE.png")] = None,
    html: Annotated[str | None, _flag("Write one interactive page that needs no other file.", "FILE.html")] = None,
    json: Json = False,
) -> None:
    """Show how a run went: loss, speed, memory against the plan.

    Also of a run in progress. Reads the zero_steps.jsonl of all ranks, which ZeroCallback or
    engine.record writes. With two runs: what differs.

    \b
    Examples:
      hf-zero report out
      hf-zero report out --html report.html
      hf-zero report out other
    """
    from .report_page import run

    run(folder, other, png, html, json)


def migrate(
    file: Annotated[str, typer.Argument(help="DeepSpeed JSON, accelerate YAML or fsdp_config.", metavar="FILE")],
    json: Json = False,
) -> int:
    """Translate settings of DeepSpeed or FSDP.

    FILE is a DeepSpeed JSON, an accelerate YAML (DeepSpeed or FSDP), or the Trainer's fsdp_config.
    Every setting of the file is listed with its replacement.

    \b
    Examples:
      hf-zero migrate ds_config.json
      hf-zero migrate ~/.cache/huggingface/accelerate/default_config.yaml
      hf-zero migrate fsdp_config.json --json

    Exit status 1: a setting that mattered has no equivalent, or is unknown.
    """
    from .migrate import run

    return run(file, json)


def doctor(
    offload_dir: Annotated[str | None, _flag("Folder for the disk tier (default: temporary).", "DIR")] = None,
    json: Json = False,
) -> int:
    """Check this machine: GPUs, versions, memory, disk, speeds.

    \b
    Examples:
      hf-zero doctor
      hf-zero doctor --offload-dir /fast/disk

    Exit status 1: something has to be fixed first.
    """
    from .doctor import run

    return run(offload_dir, json)


def _print_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit()


def _general(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.callback()(_general)
for _command in (plan, probe, simulate, verify, export, report, migrate, doctor):
    app.command(epilog="--debug, anywhere: print a traceback with an error.")(_command)


# Errors -------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; an error is one line on stderr."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    words = [word for word in given if word != "--debug"]
    try:
        if bad := next((word for word in words if "\0" in word), None):
            raise ConfigError(f"an argument has a null character: {bad!r}")
        return int(app(words, prog_name="hf-zero", standalone_mode=False) or OK)
    except SystemExit as end:  # completion in a shell
        return int(end.code or 0)
    except Exception as error:
        if words != given:
            traceback.print_exc()
        status, text = _described(error)
        # Names in files may contain control characters, which could move the terminal's cursor.
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
        print(f"hf-zero: {line if len(line) < 900 else f'{line[:300]} … {line[-300:]}'}", file=sys.stderr)
        return status


def _described(error: Exception) -> tuple[int, str]:
    """Return the exit status and the message for an error."""
    if isinstance(error, ZeroError):
        return USAGE if isinstance(error, ConfigError) else WRONG, str(error)
    if isinstance(error, typer.BadParameter.__mro__[2]):  # newer versions of typer have a copy of click's classes
        typed: Any = error
        command = "hf-zero" if getattr(typed, "ctx", None) is None else typed.ctx.command_path
        return USAGE, f"{typed.format_message().rstrip('.')}. See {command} --help."
    if isinstance(error, OSError) and error.strerror:
        status = USAGE if error.errno == errno.ENAMETOOLONG else WRONG
        return status, f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, (OSError, ValueError)):
        return WRONG, str(error)
    return WRONG, f"Unexpected error: {type(error).__name__}: {error}. Rerun with --debug for a traceback."


if __name__ == "__main__":
    sys.exit(main())
