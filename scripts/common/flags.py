"""Command lines of the scripts: parsing, and defaults that suit the model."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import HfArgumentParser, Seq2SeqTrainingArguments

import hf_zero as zero
from hf_zero.huggingface.arguments import TRAINING_ARGUMENTS, refuse

from .arguments import DataArguments, without_help
from .console import UserError


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Description unchanged, flags with defaults."""


@dataclass
class ZeroSeq2SeqTrainingArguments(zero.ZeroTrainingArguments, Seq2SeqTrainingArguments):
    """`ZeroTrainingArguments` for models that are evaluated by what they generate."""


class Parser(HfArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help and --help-all list the flags")


def parse_flags(
    argv: Sequence[str],
    kinds: tuple[type, type],
    defaults: Callable[[Any, set[str]], Mapping[str, Any]],
    description: str | None,
) -> tuple[Any, Any]:
    """Parse a command line into the script's arguments and the Trainer's.

    Args:
        defaults: returns the Trainer's arguments from the script's own and the names that were
            given. What was typed wins.

    Raises:
        UserError: an argument is wrong.
    """
    early: Any = Parser(kinds[0], allow_abbrev=False, add_help=False)
    script, _ = early.parse_args_into_dataclasses(
        without_help(argv), return_remaining_strings=True, look_for_args_file=False
    )
    parser: Any = Parser([*kinds], allow_abbrev=False, add_help=False, description=description, formatter_class=Help)
    given = {word.split("=")[0][2:].replace("-", "_") for word in argv if word.startswith("--")}
    parser.set_defaults(**defaults(script, given))
    print_all_help(argv, parser)
    # Checked before the dataclasses are built: building TrainingArguments starts the process group.
    found, unknown = parser.parse_known_args(list(argv))
    if unknown:
        raise UserError(f"unknown argument {unknown[0]!r}; {_hint(unknown[0].split('=')[0], parser)}")
    if found.load_best_model_at_end:
        parser.set_defaults(**_saved_as_evaluated(found, given))
    script, args = parser.parse_args_into_dataclasses(list(argv), look_for_args_file=False)
    check_settings(args)
    return script, args


def check_settings(args: Any) -> None:
    """Check what ZeRO needs of the ranks and the disk, before any data is prepared.

    Raises:
        ConfigError: a setting does not suit the number of ranks or the Trainer's arguments.
        UserError: the offload folder cannot be used.
    """
    config = args.parallelism_config.config
    config.check_world_size(args.world_size)
    refuse(TRAINING_ARGUMENTS, args)
    if config.offload_dir and "disk" in (config.offload_optimizer, config.offload_params):
        folder = Path(config.offload_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"--zero-offload-dir {folder} cannot be created ({error.strerror}); choose another"
            ) from error
        if not os.access(folder, os.W_OK):
            raise UserError(f"--zero-offload-dir {folder} is not writable; choose another")


def print_all_help(argv: Sequence[str], parser: Any) -> None:
    """Print every flag on one rank and exit, if `argv` has `--help-all`."""
    if "--help-all" in argv:
        if os.environ.get("RANK", "0") in ("", "0"):
            print(parser.format_help())
        sys.exit(0)


def _hint(flag: str, parser: Any) -> str:
    if flag.lstrip("-").replace("_", "-") in ("nproc", "nproc-per-node", "num-processes", "world-size", "ranks"):
        return "the number of ranks is the launcher's to set: torchrun --nproc-per-node 2 scripts/finetune.py"
    close = difflib.get_close_matches(flag, parser._option_string_actions, 1)
    return f"did you mean {close[0]}?" if close else "--help and --help-all list the flags"


def run_defaults(
    script: DataArguments, given: Collection[str], *, name: str, scratch: bool, steps: int
) -> dict[str, Any]:
    """Return the Trainer's arguments where the user gave none.

    Args:
        name: kind of run, for the output folder.
        scratch: the model is trained from scratch.
        steps: of a tiny model on data that is made here.
    """
    on_cpu = not torch.accelerator.is_available()
    chosen: dict[str, Any] = {
        "output_dir": f"runs/{str(script.model).rstrip('/').split('/')[-1]}-{name}",
        "use_cpu": on_cpu,
        "dataloader_pin_memory": not on_cpu,
        "eval_strategy": "steps",
        "eval_steps": 0.25,
        "eval_on_start": True,
        "logging_steps": 10,
        "lr_scheduler_type": "cosine" if scratch else "linear",
        "warmup_steps": 0.1,
    }
    if script.tiny:
        chosen |= {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 16}
        if script.dataset is None and "num_train_epochs" not in given:
            chosen["max_steps"] = steps
            if not set(given) & {"save_steps", "save_total_limit", "load_best_model_at_end"}:
                chosen["save_strategy"] = "no"  # the trained model is saved at the end in any case
    return chosen


def _saved_as_evaluated(args: argparse.Namespace, given: Collection[str]) -> dict[str, Any]:
    """Return what was not given of when to save and evaluate: the best model needs a checkpoint at every evaluation."""
    chosen = {}
    for one, other in (("eval_strategy", "save_strategy"), ("eval_steps", "save_steps")):
        source, target = (other, one) if other in given else (one, other)
        value = getattr(args, source)
        if target not in given and getattr(value, "value", value) not in ("no", "best"):
            chosen[target] = value
    return chosen
