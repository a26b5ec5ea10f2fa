"""Command lines of the scripts: shared flags, defaults that suit the model, a help of one screen."""

from __future__ import annotations

import difflib
import os
import sys
import textwrap
from argparse import Action
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

import torch
from finetune_console import Help, UserError
from transformers import HfArgumentParser, Seq2SeqTrainingArguments

import hf_zero as zero
from hf_zero.huggingface.arguments import ZeroFlags

MAIN_FLAGS = (
    "output_dir",
    "max_steps",
    "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "learning_rate",
    "bf16",
    "save_steps",
    "resume_from_checkpoint",
    "seed",
)
"""What `--help` shows of the hundred arguments of the Trainer."""


@dataclass
class DataArguments:
    """What every script asks of model and data. `None` means: chosen to suit the rest."""

    model: str | None = field(
        default=None, metadata={"help": "a model from scratch by its name, Hub id or local folder"}
    )
    dataset: str | None = field(default=None, metadata={"help": "local files; without it, data that is made here"})
    max_train_samples: int | None = field(default=None, metadata={"help": "use only so many training rows"})
    max_eval_samples: int | None = field(default=None, metadata={"help": "use only so many evaluation rows"})
    verbose: bool = field(default=False, metadata={"help": "the engine's tables before and after training"})

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise UserError(f"--{item.name.replace('_', '-')} must be at least 1, found {value}")

    @property
    def tiny(self) -> bool:
        return str(self.model).endswith("-tiny")


@dataclass
class ZeroSeq2SeqTrainingArguments(zero.ZeroTrainingArguments, Seq2SeqTrainingArguments):
    """`ZeroTrainingArguments` for models that are evaluated by what they generate."""


class Parser(HfArgumentParser):
    """Says what is wrong with a command line in one line, not after five screens of usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help and --help-all list the flags")


def parse_flags(
    argv: Sequence[str],
    kinds: tuple[type, type],
    defaults: Callable[[Any, set[str]], Mapping[str, Any]],
    description: str | None,
) -> tuple[Any, Any]:
    """The command line as two dataclasses: the script's arguments and the Trainer's.

    Args:
        defaults: of the Trainer's arguments, from the script's own and the names that were given. What was typed wins.

    Raises:
        UserError: what is wrong, in one line.
    """
    early: Any = Parser(kinds[0], allow_abbrev=False, add_help=False)
    words = [word for word in argv if word not in ("-h", "--help", "--help-all")]
    script, _ = early.parse_args_into_dataclasses(words, return_remaining_strings=True, look_for_args_file=False)
    parser: Any = Parser([*kinds], allow_abbrev=False, add_help=False, description=description, formatter_class=Help)
    given = {word.split("=")[0][2:].replace("-", "_") for word in argv if word.startswith("--")}
    parser.set_defaults(**defaults(script, given))
    answer_help(argv, parser, [*(item.name for item in fields(kinds[0])), *MAIN_FLAGS])
    # Found before the dataclasses are built: building TrainingArguments already starts the process group.
    _, unknown = parser.parse_known_args(list(argv))
    if unknown:
        raise UserError(f"unknown argument {unknown[0]!r}; {_hint(unknown[0].split('=')[0], parser)}")
    return parser.parse_args_into_dataclasses(list(argv), look_for_args_file=False)


def _hint(flag: str, parser: Any) -> str:
    if flag.lstrip("-").replace("_", "-") in ("nproc", "nproc-per-node", "num-processes", "world-size", "ranks"):
        return "the number of ranks is the launcher's to set: accelerate launch --num_processes 2 scripts/finetune.py"
    close = difflib.get_close_matches(flag, parser._option_string_actions, 1)
    return f"did you mean {close[0]}?" if close else "--help and --help-all list the flags"


def answer_help(argv: Sequence[str], parser: Any, shown: Collection[str]) -> None:
    """Where help is asked for, print it on one rank and end: `--help` one screen, `--help-all` everything.

    Args:
        parser: made without a help of its own.
        shown: destinations that the short help has besides the settings of ZeRO.
    """
    if not {"-h", "--help", "--help-all"} & set(argv):
        return
    if os.environ.get("RANK", "0") in ("", "0"):
        print(parser.format_help() if "--help-all" in argv else short_help(parser, shown))
    sys.exit(0)


def short_help(parser: Any, shown: Collection[str], width: int = 118) -> str:
    """One line for each flag of `shown` and of ZeRO, under the first paragraphs of the description."""
    actions = {action.dest: action for action in reversed(parser._actions)}
    settings = [item.name for item in fields(ZeroFlags)]
    lines = [*str(parser.description or "").strip().split("\n\n")[:2], ""]
    own = [name for name in dict.fromkeys(shown) if name not in settings]
    for title, names in (("flags", own), ("ZeRO", settings)):
        lines.append(f"{title}:")
        lines += [_line(actions[name], width) for name in names if name in actions]
    return "\n".join([*lines, "", "--help-all: everything, with all arguments of the Trainer where the script has one"])


def _line(action: Action, width: int) -> str:
    flag = next(name for name in action.option_strings if name.startswith("--")).replace("_", "-")
    default = "" if action.default in (None, "", [], "none") else f" ({action.default})"
    text = " ".join(str(action.help or "").replace("%%", "%").split()).removesuffix(".")
    if action.choices and str(next(iter(action.choices))) not in text:
        text = ", ".join(map(str, action.choices)) + (f": {text}" if text else "")
    room = width - 34 - len(default)
    return f"  {flag:<31} {textwrap.shorten(text, room, placeholder=' …')}{default}".rstrip()


def run_defaults(
    script: DataArguments, given: Collection[str], *, name: str, scratch: bool, steps: int
) -> dict[str, Any]:
    """What TrainingArguments should be where the user said nothing.

    Args:
        name: of the kind of run, for the output folder.
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
    if "load_best_model_at_end" in given:  # which needs to save whenever it evaluates
        if set(given) & {"eval_strategy", "eval_steps", "save_strategy", "save_steps"}:
            del chosen["eval_steps"]  # the user's to say
        else:
            chosen["save_steps"] = chosen["eval_steps"]
    return chosen
