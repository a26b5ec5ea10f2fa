"""The command `hf-zero`: arguments of its commands, and one place that reports errors.

A command's implementation is imported when the command runs: help and completion load no torch.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import typer

from ..config import DTYPES, STAGES, ZeroConfig, parse_bytes
from ..errors import ConfigError, ZeroError
from ..version import __version__
from . import OK, USAGE, WRONG

_MOST_NAME = 255
"""Bytes of one name in a path on Linux."""
MOST_RANKS = 1 << 16
"""Ranks that `plan` accepts."""
app = typer.Typer(
    help="Plan memory, check and export checkpoints, report runs. Exit status: 0 all is well; "
    "1 something is wrong or failed; 2 invalid arguments.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


# Arguments ----------------------------------------------------------------------------------------


def _check_name(value: str | None) -> str | None:
    if value is not None and max(map(len, value.split("/"))) > _MOST_NAME:
        raise ConfigError(f"a name is longer than {_MOST_NAME} characters: {value[:40]!r}…")
    return value


def _check_size(value: str | None, parameter: typer.CallbackParam) -> str | None:
    if value is not None:
        parse_bytes(value, parameter.opts[0])
    return value


def _path(help: str, metavar: str) -> Any:
    return typer.Argument(help=help, metavar=metavar, callback=_check_name)


def _flag(help: str, metavar: str | None = None) -> Any:
    return typer.Option(help=help, metavar=metavar)


def _count(help: str, most: int, metavar: str | None = None, least: int = 1) -> Any:
    return typer.Option(help=help, metavar=metavar, min=least, max=most)


def _size(help: str) -> Any:
    return typer.Option(help=help, metavar="SIZE", callback=_check_size)


def _help_of(name: str) -> str:
    """Return the help of a field of `ZeroConfig`."""
    return str(ZeroConfig.__dataclass_fields__[name].metadata["help"])


def _setting(name: str, metavar: str | None = None) -> Any:
    return _flag(_help_of(name), metavar)


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Print a traceback with an error.")]
Offload = Literal["none", "cpu", "disk", "auto"]
Wire = Literal["none", "int8", "fp8"]


# Commands -----------------------------------------------------------------------------------------


def plan(
    model: Annotated[str, _path("Size, built-in name, folder, config.json or Hub id.", "MODEL")],
    world_size: Annotated[int, _count("Number of ranks.", MOST_RANKS)] = 8,
    zero_stage: Annotated[int | None, _flag("Only this stage, with all details.", "[0|1|2|3]")] = None,
    mixed_precision: Annotated[Literal["no", "bf16", "fp16"], _flag("Compute precision.")] = "bf16",
    device_memory: Annotated[str | None, _size("Device memory per rank, such as 24GiB.")] = None,
    host_memory: Annotated[str | None, _size("Host memory per rank.")] = None,
    batch: Annotated[int, _count("Sequences of a rank (or group of --zero-sp-size) per forward.", 10**6, "ROWS")] = 1,
    sequence: Annotated[int, _count("Tokens of each sequence.", 10**8, "TOKENS")] = 2048,
    accumulation: Annotated[int, _count("Micro-batches per step.", 10**6, "N")] = 1,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Keep only the blocks' inputs for backward.")
    ] = False,
    zero_offload_activations: Annotated[Literal["none", "cpu", "disk"], _setting("offload_activations")] = "none",
    zero_sp_size: Annotated[int, _count(_help_of("sp_size"), MOST_RANKS, "S")] = 1,
    zero_chunked_loss: Annotated[Literal["false", "true", "auto"], _setting("chunked_loss")] = "false",
    lora: Annotated[int, _count("Train LoRA matrices of this rank; the model is frozen.", 10**4, "RANK", 0)] = 0,
    load_in_4bit: Annotated[
        bool, typer.Option("--load-in-4bit", help="With --lora: the frozen model is quantized (QLoRA).")
    ] = False,
    zero_offload_optimizer: Annotated[Offload, _setting("offload_optimizer")] = "none",
    zero_offload_params: Annotated[Offload, _setting("offload_params")] = "none",
    zero_step_in_backward: Annotated[
        bool, typer.Option("--zero-step-in-backward", help="Update offloaded units in backward.")
    ] = False,
    zero_reduce_dtype: Annotated[str | None, _setting("reduce_dtype", "DTYPE")] = None,
    zero_full_precision: Annotated[str, _setting("full_precision", "NAMES")] = "",
    zero_units: Annotated[str, _setting("units", "NAMES")] = "",
    zero_replicas: Annotated[int, _count(_help_of("replicas"), MOST_RANKS, "R")] = 1,
    zero_wire: Annotated[Wire, _setting("wire")] = "none",
    keep_gathered: Annotated[str | None, _size("Device memory for units that stay gathered.")] = None,
    disk_space: Annotated[str | None, _size("Space per rank in the offload folder.")] = None,
    optimizer_tensors: Annotated[int, _count("State tensors per parameter; Adam has 2.", 100, least=0)] = 2,
    machine: Annotated[
        str | None, _flag("Sizes and speeds of one rank, as `hf-zero probe` writes them.", "FILE")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Predict memory per rank, and what fits which GPU, before anything runs.

    MODEL is a size (7B, 350M), a name (llama3-8b, meta-llama/Meta-Llama-3-8B, gpt2), or a local
    folder or config.json. No weights are read. Without --zero-stage: all stages side by side, and
    settings for each size of GPU.

    \b
    Examples:
      hf-zero plan meta-llama/Meta-Llama-3-8B
      hf-zero plan llama3-8b --lora 16 --world-size 1 --device-memory 24GiB
      hf-zero plan 7B --world-size 4 --device-memory 24GiB --batch 4 --sequence 4096
      hf-zero plan out/checkpoint-500 --zero-stage 3 --zero-offload-optimizer cpu

    Exit status 1: nothing fits the memory that was given.
    """
    if load_in_4bit and not lora:
        raise ConfigError("--load-in-4bit needs --lora RANK: quantized weights are frozen")
    config = ZeroConfig(
        stage=max(STAGES) if zero_stage is None else zero_stage,
        offload_optimizer=zero_offload_optimizer,
        offload_params=zero_offload_params,
        step_in_backward=zero_step_in_backward,
        reduce_dtype=zero_reduce_dtype,
        full_precision=zero_full_precision,
        units=zero_units,
        replicas=zero_replicas,
        sp_size=zero_sp_size,
        chunked_loss=zero_chunked_loss,
        offload_activations=zero_offload_activations,
        wire=zero_wire,
        device_memory=device_memory,
        keep_gathered=keep_gathered,
        host_memory=host_memory,
    )
    config.check_world_size(world_size)
    from .models import build, look_up

    what, source = look_up(model)  # before torch is imported: wrong names are refused at once
    from .plan import Asked, machine_of, run

    dtype = {"no": "float32", "fp16": "float16"}.get(mixed_precision, "bfloat16")
    found = build(model, what, source, lora, dtype, load_in_4bit)
    speeds, measured = machine_of(config, world_size, machine, disk_space)
    asked = Asked(
        model=found,
        config=config,
        world_size=world_size,
        mixed_precision=mixed_precision,
        batch=None if found.architecture is None else batch,
        sequence=sequence,
        accumulation=accumulation,
        gradient_checkpointing=gradient_checkpointing or zero_offload_activations != "none",
        optimizer_tensors=optimizer_tensors,
        machine=speeds,
        source=measured,
    )
    raise typer.Exit(run(asked, zero_stage is None, json))


def probe(
    offload_dir: Annotated[str | None, _flag("Folder on the disk to measure (default: temporary).", "DIR")] = None,
    output: Annotated[str | None, _flag("Write the result only there.", "FILE")] = None,
    json: Json = False,
    debug: Debug = False,
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

    run(offload_dir, output, json)


def simulate(
    model: Annotated[str, _path("Size, built-in name, folder, config.json or Hub id.", "MODEL")],
    world_size: Annotated[int, _count("Number of ranks.", 1 << 14)] = 8,
    nodes: Annotated[int, _count("Number of machines, with equal numbers of ranks.", 1 << 14)] = 1,
    zero_stage: Annotated[int, _setting("stage", "[0|1|2|3]")] = 2,
    mixed_precision: Annotated[Literal["no", "bf16"], _flag("Compute precision.")] = "bf16",
    accumulation: Annotated[int, _count("Micro-batches per step.", 256, "N")] = 1,
    batch: Annotated[int, _count("Sequences per rank and forward.", 10**6, "ROWS")] = 1,
    sequence: Annotated[int, _count("Tokens of each sequence.", 10**8, "TOKENS")] = 128,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Keep only the blocks' inputs for backward.")
    ] = False,
    zero_offload_activations: Annotated[Literal["none", "cpu"], _setting("offload_activations")] = "none",
    zero_sp_size: Annotated[int, _count(_help_of("sp_size"), 1 << 14, "S")] = 1,
    zero_chunked_loss: Annotated[Literal["false", "true", "auto"], _setting("chunked_loss")] = "false",
    network: Annotated[
        Literal["nvlink", "infiniband", "ethernet"], _flag("Between machines; within one it is NVLink.")
    ] = "infiniband",
    adapters: Annotated[
        int, _count("Network adapters of one machine; 0: one for each of its ranks.", 1 << 14, "N", 0)
    ] = 0,
    machine: Annotated[
        str | None, _flag("Speeds of one rank, as `hf-zero probe` writes them (default: an H100's).", "FILE")
    ] = None,
    zero_units: Annotated[str, _setting("units", "NAMES")] = "",
    zero_replicas: Annotated[int, _count(_help_of("replicas"), 1 << 14, "R")] = 1,
    zero_wire: Annotated[Wire, _setting("wire")] = "none",
    keep_gathered: Annotated[str | None, _size("Device memory per rank for units that stay gathered.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Count the collectives of one step on any number of ranks, and estimate its time.

    Nothing runs: collectives and bytes are those of the plan, and the time is hops and bytes over
    the links of the network. No weights are read.

    \b
    Examples:
      hf-zero simulate gpt2-124m --world-size 1024 --nodes 128
      hf-zero simulate gpt2-124m --world-size 2 --machine machine.json
      hf-zero simulate gpt3-13b --world-size 4096 --nodes 512 --zero-stage 3
      hf-zero simulate llama3-8b --world-size 64 --nodes 8 --zero-stage 3 --keep-gathered 4GiB
      hf-zero simulate llama3-8b --zero-stage 3 --sequence 131072 --zero-sp-size 8
    """
    if world_size % nodes:
        raise ConfigError(f"{world_size} ranks do not divide by {nodes} nodes")
    config = ZeroConfig(
        stage=zero_stage,
        replicas=zero_replicas,
        sp_size=zero_sp_size,
        chunked_loss=zero_chunked_loss,
        offload_activations=zero_offload_activations,
        wire=zero_wire,
        units=zero_units,
        keep_gathered=keep_gathered,
    )
    config.check_world_size(world_size)
    from .models import build, look_up

    what, source = look_up(model)
    from .plan import Asked
    from .simulate import hardware, run

    offloads = zero_offload_activations != "none"
    speeds, links = hardware(mixed_precision, world_size, nodes, network, adapters, machine, uses_link=offloads)
    found = build(model, what, source)
    asked = Asked(
        model=found,
        config=config,
        world_size=world_size,
        mixed_precision=mixed_precision,
        batch=None if found.architecture is None else batch,
        sequence=sequence,
        accumulation=accumulation,
        gradient_checkpointing=gradient_checkpointing or offloads,
        optimizer_tensors=2,
        machine=speeds,
        network=links,
    )
    run(asked, links, json)


def verify(
    folder: Annotated[str, _path("Checkpoint folder with zero_manifest.json.", "DIR")],
    json: Json = False,
    debug: Debug = False,
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
    folder: Annotated[str, _path("Checkpoint folder, or any folder that from_pretrained loads.", "DIR")],
    output: Annotated[str | None, _flag("Folder to write, new or empty.", "DIR")] = None,
    push_to_hub: Annotated[str | None, _flag("Upload; the repository is created if needed.", "USER/REPO")] = None,
    dtype: Annotated[str | None, _flag("Cast the weights.", "|".join(DTYPES))] = None,
    private: Annotated[bool, typer.Option("--private", help="Create the repository as private.")] = False,
    revision: Annotated[str | None, _flag("Branch to upload to; created if needed.", "BRANCH")] = None,
    commit_message: Annotated[str | None, _flag("Of the upload.", "TEXT")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write into an --output with files; replace its weights.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Make a clean model folder of a checkpoint, here or on the Hub.

    Weights, configuration, tokenizer, code and model card, without optimizer and training state.
    The checkpoint is verified first.

    \b
    Examples:
      hf-zero export out/checkpoint-500 --output model --dtype bfloat16
      hf-zero export out/checkpoint-500 --push-to-hub user/model --private
    """
    values = {name: value for name, value in locals().items() if name not in ("folder", "json", "debug")}
    from .checkpoints import export as run

    run(folder, values, json)


def report(
    folder: Annotated[str, _path("Folder with zero_steps.jsonl, or that file.", "RUN")],
    other: Annotated[str | None, _path("A second run, to compare with.", "RUN2")] = None,
    png: Annotated[str | None, _flag("Draw loss, throughput and memory.", "FILE.png")] = None,
    html: Annotated[str | None, _flag("Write one interactive page that needs no other file.", "FILE.html")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show how a recorded run went: loss, speed, memory against the plan; also of a run in progress.

    Reads the zero_steps.jsonl of all ranks, which ZeroCallback or engine.record writes. With two
    runs: what differs.

    \b
    Examples:
      hf-zero report out
      hf-zero report out --html report.html
      hf-zero report out other
    """
    from .report_page import run

    run(folder, other, png, html, json)


def migrate(
    file: Annotated[str, _path("DeepSpeed JSON, accelerate YAML or fsdp_config.", "FILE")],
    json: Json = False,
    debug: Debug = False,
) -> None:
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

    raise typer.Exit(run(file, json))


def doctor(
    offload_dir: Annotated[str | None, _flag("Folder for the disk tier (default: temporary).", "DIR")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Check this machine: GPUs, backend, versions, memory, disk, accelerate's configuration.

    \b
    Examples:
      hf-zero doctor
      hf-zero doctor --offload-dir /fast/disk

    Exit status 1: something has to be fixed first.
    """
    from .doctor import run

    raise typer.Exit(run(offload_dir, json))


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
    app.command()(_command)


# Errors -------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; an error is one line on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if bad := next((word for word in words if "\0" in word), None):
            raise ConfigError(f"an argument has a null character: {bad[:40]!r}")
        return int(app(words, prog_name="hf-zero", standalone_mode=False) or OK)
    except SystemExit as end:  # completion in a shell
        return int(end.code or 0)
    except Exception as error:
        if "--debug" in words:
            traceback.print_exc()
        # Names in files may contain control characters, which could move the terminal's cursor.
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in _words(error))
        print(f"hf-zero: {line}", file=sys.stderr)
        return USAGE if isinstance(error, ConfigError) or _is_typers(error) else WRONG


def _is_typers(error: Exception) -> bool:
    """Return True for invalid arguments. Newer versions of typer have a copy of click's classes of errors."""
    return isinstance(error, typer.BadParameter.__mro__[2])


def _words(error: Exception) -> str:
    if isinstance(error, ZeroError):
        return str(error)
    if _is_typers(error):
        typed: Any = error
        command = "hf-zero" if getattr(typed, "ctx", None) is None else typed.ctx.command_path
        return f"{typed.format_message().rstrip('.')}. See {command} --help."
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, (OSError, ValueError)):
        return str(error)
    return f"Unexpected error: {type(error).__name__}: {error}. Rerun with --debug for a traceback."


if __name__ == "__main__":
    sys.exit(main())
