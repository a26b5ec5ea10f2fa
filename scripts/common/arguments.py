"""Arguments that the scripts share, and a help that needs neither torch nor transformers."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields

from hf_zero.config import ZeroConfig

from .console import UserError

MAIN_FLAGS = {
    "output_dir": "folder of the trained model and of checkpoints (default: runs/MODEL-TASK)",
    "max_steps": "optimizer steps; overrides --num-train-epochs",
    "num_train_epochs": "passes over the data",
    "per_device_train_batch_size": "rows per rank and micro-batch",
    "gradient_accumulation_steps": "micro-batches per optimizer step",
    "gradient_checkpointing": "recompute activations in backward: less memory, more time",
    "learning_rate": "highest learning rate (default: suits the model, and LoRA)",
    "bf16": "compute in bfloat16, with float32 master weights",
    "save_steps": "optimizer steps between checkpoints",
    "resume_from_checkpoint": "a checkpoint folder, True (the newest), or latest (the newest; starts fresh if none)",
    "seed": "random seed",
}
"""Arguments of the Trainer in `--help`; `--help-all` shows every one."""
DEFAULT_MODEL = {
    "clm": "gpt2-tiny",
    "mlm": "bert-tiny",
    "classification": "bert-tiny",
    "token-classification": "bert-tiny",
    "question-answering": "bert-tiny",
    "summarization": "t5-tiny",
    "transcription": "speech-tiny",
}
"""By task."""
CORPUS_SIZE = 4 << 20  # characters of the standard library's sources
_HELP = ("-h", "--help", "--help-all")
_WIDTH, _LABEL = 118, 34


@dataclass
class DataArguments:
    """Arguments of every script about model and data. `None`: chosen to suit the others."""

    model: str | None = field(
        default=None, metadata={"help": "a built-in model trained from scratch, Hub id or folder"}
    )
    dataset: str | None = field(default=None, metadata={"help": "local files; without it, data that is made here"})
    max_train_samples: int | None = field(default=None, metadata={"help": "use only so many training rows"})
    max_eval_samples: int | None = field(default=None, metadata={"help": "use only so many evaluation rows"})
    verbose: bool = field(default=False, metadata={"help": "print the engine's tables before and after training"})

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise UserError(f"--{item.name.replace('_', '-')} must be at least 1, found {value}")

    @property
    def tiny(self) -> bool:
        return str(self.model).endswith("-tiny")


def answer_help(
    argv: Sequence[str], arguments: type, description: str | None, main: Iterable[str] = MAIN_FLAGS
) -> None:
    """Print the short help on one rank and exit, if `argv` asks for it."""
    if not set(argv) & {"-h", "--help"}:
        return
    if os.environ.get("RANK", "0") in ("", "0"):
        print("\n".join(_short_help(arguments, str(description), main)))
    sys.exit(0)


def without_help(argv: Sequence[str]) -> list[str]:
    return [word for word in argv if word not in _HELP]


def _short_help(arguments: type, description: str, main: Iterable[str]) -> Iterator[str]:
    yield from description.strip().split("\n\n")[:2]
    yield "\nflags:"
    for item in fields(arguments):
        yield from _entry(item.name, _text(item))
    yield "\ntraining:"
    for name in main:
        yield from _entry(name, MAIN_FLAGS[name])
    yield "\nZeRO:"
    for item in fields(ZeroConfig):
        yield from _entry(f"zero_{item.name}", _text(item))
    yield "\n--help-all: every flag, with all arguments of the Trainer"


def _text(item: Field) -> str:
    help_, default = str(item.metadata.get("help", "")).removesuffix("."), item.default
    shown = default not in (None, MISSING, "", False, "none") and not isinstance(default, bool)
    return f"{help_} (default: {default})" if shown else help_


def _entry(name: str, text: str) -> Iterator[str]:
    label = f"  --{name.replace('_', '-')}"
    lines = textwrap.wrap(text, _WIDTH - _LABEL) or [""]
    yield f"{label:<{_LABEL}}{lines[0]}"
    for line in lines[1:]:
        yield " " * _LABEL + line
