"""Fine-tune a GPT- or BERT-class model under ZeRO with the stock `transformers.Trainer`.

    accelerate launch scripts/finetune.py                             # gpt2-tiny on Python's own library, in a minute
    accelerate launch scripts/finetune.py --zero-stage 3
    torchrun --nproc-per-node 2 scripts/finetune.py --zero-stage 3    # 2 ranks, also on CPU
    accelerate launch scripts/finetune.py --model gpt2 --lora --lora-rank 8 --lora-targets c_attn    # saves the adapter alone
    accelerate launch scripts/finetune.py --task classification --model bert-base-uncased --dataset imdb
    accelerate launch scripts/finetune.py --save-steps 50 --resume-from-checkpoint latest    # from the newest whole one, if any

Every flag of `transformers.TrainingArguments` works, written with dashes or underscores. What is not given gets a value
that suits the model; what is given is never changed. --resume-from-checkpoint takes a folder; True: the newest in the
output folder whose every byte is right; latest: the same, and a fresh start where there is none.
"""

from __future__ import annotations

import difflib
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from finetune_console import (
    Help,
    UserError,
    check_output,
    check_space,
    everywhere,
    examples,
    highest,
    human,
    number,
    peak_bytes,
    print_summary,
    run,
)
from finetune_data import (
    CORPUS_SIZE,
    LABEL_COLUMNS,
    TEXT_COLUMNS,
    Prepared,
    classification,
    embedded_corpus,
    language_modeling,
    load_text,
    load_tokenizer,
    pick_column,
)
from finetune_metrics import class_metrics, token_metrics, token_scores
from finetune_models import BUILT_IN, DEFAULT_MODEL, load_config, load_model, max_positions
from transformers import (
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

import hf_zero as zero

with examples():
    import datasets

TINY_STEPS = 150  # of a tiny model on the embedded corpus: a minute or two on two CPU ranks


@dataclass
class ScriptArguments:
    """What to train on what. `None` means: chosen to suit the rest."""

    task: Literal["clm", "mlm", "classification"] = field(
        default="clm", metadata={"help": "next-token prediction, masked-token prediction, or classification of texts"}
    )
    model: str | None = field(
        default=None, metadata={"help": f"Hub id, local folder, or a model from scratch: {', '.join(BUILT_IN)}"}
    )
    tokenizer: str | None = field(default=None, metadata={"help": "Hub id or local folder, if not the model's own"})
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = field(
        default="float32", metadata={"help": "what the parameters are loaded as (computing: see --bf16 and --fp16)"}
    )
    dataset: str | None = field(
        default=None,
        metadata={"help": "Hub id, or local text, json, csv or parquet; without it, Python's standard library"},
    )
    corpus_size: int = field(default=CORPUS_SIZE, metadata={"help": "characters to take of Python's standard library"})
    dataset_config: str | None = field(default=None, metadata={"help": "configuration of a Hub dataset"})
    text_column: str | None = field(default=None, metadata={"help": "by default 'text', 'sentence' or 'content'"})
    label_column: str | None = field(default=None, metadata={"help": "by default 'label' or 'labels'"})
    block_size: int | None = field(default=None, metadata={"help": "tokens per training row"})
    max_train_samples: int | None = field(default=None, metadata={"help": "use only so many training rows"})
    max_eval_samples: int | None = field(default=None, metadata={"help": "use only so many evaluation rows"})

    lora: bool = field(default=False, metadata={"help": "train a LoRA adapter of --model, and save that alone"})
    lora_rank: int = field(default=16, metadata={"help": "of its matrices; alpha is twice that"})
    lora_targets: list[str] = field(
        default_factory=lambda: ["all-linear"],
        metadata={"help": "names of the layers that get one, such as q_proj v_proj"},
    )

    def __post_init__(self) -> None:
        self.model = self.model or DEFAULT_MODEL[self.task]
        if self.lora and self.model in BUILT_IN:
            raise UserError(
                f"--lora adapts a pretrained model, and {self.model} starts from random weights: pass --model with a Hub id or "
                "a folder"
            )
        for name in ("corpus_size", "block_size", "max_train_samples", "max_eval_samples", "lora_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, found {value}")

    @property
    def tiny(self) -> bool:
        return str(self.model).endswith("-tiny")


class Parser(HfArgumentParser):
    """Says what is wrong with a command line in one line, not after five screens of usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists all flags")


def parse(argv: Sequence[str]) -> tuple[ScriptArguments, zero.ZeroTrainingArguments]:
    """The command line as two dataclasses."""
    early: Any = Parser(ScriptArguments, allow_abbrev=False, add_help=False)
    script, _ = early.parse_args_into_dataclasses(list(argv), return_remaining_strings=True, look_for_args_file=False)
    parser: Any = Parser(
        [ScriptArguments, zero.ZeroTrainingArguments], allow_abbrev=False, description=__doc__, formatter_class=Help
    )
    flags = {word.split("=")[0][2:].replace("-", "_") for word in argv if word.startswith("--")}
    parser.set_defaults(**defaults(script, flags))
    # Found before the dataclasses are built: building TrainingArguments already starts the process group.
    _, unknown = parser.parse_known_args(list(argv))
    if unknown:
        flag = unknown[0].split("=")[0]
        close = difflib.get_close_matches(flag, parser._option_string_actions, 1)
        hint = f"did you mean {close[0]}?" if close else "--help lists all flags"
        if flag.lstrip("-").replace("_", "-") in ("nproc", "nproc-per-node", "num-processes", "world-size", "ranks"):
            hint = (
                "the number of ranks is the launcher's to set: accelerate launch --num_processes 2 scripts/finetune.py"
            )
        raise UserError(f"unknown argument {unknown[0]!r}; {hint}")
    script, args = parser.parse_args_into_dataclasses(list(argv), look_for_args_file=False)
    return script, args


def defaults(script: ScriptArguments, given: set[str]) -> dict[str, Any]:
    """What TrainingArguments should be where the user said nothing. Only defaults: whatever was typed wins."""
    scratch = script.model in BUILT_IN
    on_cpu = not torch.accelerator.is_available()
    chosen: dict[str, Any] = {
        "output_dir": f"runs/{str(script.model).rstrip('/').split('/')[-1]}-{script.task}",
        "use_cpu": on_cpu,
        "dataloader_pin_memory": not on_cpu,
        "eval_strategy": "steps",
        "eval_steps": 0.25,
        "eval_on_start": True,
        "logging_steps": 10,
        "lr_scheduler_type": "cosine" if scratch else "linear",
        "warmup_steps": 0.1,
    }
    if scratch:
        # BERT normalises after each block: pushed harder, from scratch, it learns the commonest answer and stays there.
        tiny = {"clm": 2e-3, "mlm": 5e-4, "classification": 1e-3}
        chosen["learning_rate"] = tiny[script.task] if script.tiny else 6e-4 if script.task == "clm" else 1e-4
    if script.tiny:
        chosen |= {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 16}
        if script.dataset is None and "num_train_epochs" not in given:
            chosen["max_steps"] = TINY_STEPS
            if not given & {"save_steps", "save_total_limit", "load_best_model_at_end"}:
                chosen["save_strategy"] = "no"  # the trained model is saved at the end in any case
    if "load_best_model_at_end" in given:  # which needs to save whenever it evaluates
        if given & {"eval_strategy", "eval_steps", "save_strategy", "save_steps"}:
            del chosen["eval_steps"]  # the user's to say
        else:
            chosen["save_steps"] = chosen["eval_steps"]
    return chosen


class StepClock(TrainerCallback):
    """Times the training steps, so that tokens/s counts neither evaluation nor saving."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._started)

    @property
    def median(self) -> float:
        """A step's usual time; the first one, which also sets things up, does not weigh in."""
        return statistics.median(self.seconds[1:] or self.seconds or [float("nan")])


def prepare(
    script: ScriptArguments, args: zero.ZeroTrainingArguments
) -> tuple[torch.nn.Module, PreTrainedTokenizerBase, Prepared]:
    """Model, tokenizer and data. The same on every rank; what the main process has made, the others find cached."""
    task, name = script.task, str(script.model)
    config = load_config(task, name)
    data = (
        load_text(script.dataset, script.dataset_config)
        if script.dataset
        else embedded_corpus(task, script.corpus_size)
    )
    column = pick_column(data["train"], script.text_column, TEXT_COLUMNS, "--text-column")
    if not len(data["train"]):
        raise UserError(f"the dataset {script.dataset!r} is empty: its training split has no rows")
    limit = max_positions(config)
    source = script.tokenizer or (None if name in BUILT_IN else name)
    vocabulary = min(config.vocab_size, 16384)
    tokenizer = load_tokenizer(source, config.model_type, data["train"], column, vocabulary, limit)
    block_size = min(script.block_size or (128 if script.tiny else 512), limit)
    limits = (script.max_train_samples, script.max_eval_samples or (128 if script.tiny else None))
    if task == "classification":
        label = pick_column(data["train"], script.label_column, LABEL_COLUMNS, "--label-column")
        prepared = classification(data, column, label, tokenizer, block_size, limits=limits)
    else:
        prepared = language_modeling(task, data, column, tokenizer, block_size, limits=limits)
    set_seed(args.seed)
    model = load_model(task, name, config, tokenizer, prepared.labels, script.dtype)
    return adapted(model, script) if script.lora else model, tokenizer, prepared


def adapted(model: PreTrainedModel, script: ScriptArguments) -> torch.nn.Module:
    """The model frozen, with a LoRA adapter that is trained; PEFT loads what is saved over the same `--model`."""
    with examples():
        from peft import LoraConfig, get_peft_model
    targets = script.lora_targets
    config = LoraConfig(
        r=script.lora_rank,
        lora_alpha=2 * script.lora_rank,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        task_type={"clm": "CAUSAL_LM", "classification": "SEQ_CLS"}.get(script.task),
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:  # PEFT's, of targets that are not there
        raise UserError(f"--lora-targets {' '.join(targets)}: {error}") from error


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, evaluate, save; returns the final evaluation metrics."""
    script, args = parse(sys.argv[1:] if argv is None else argv)
    check_output(args.output_dir)
    if args.process_index:
        datasets.disable_progress_bars()
    with args.main_process_first(desc="preparing model and data"):
        model, tokenizer, data = prepare(script, args)
    check_space(args.output_dir, model)

    shift = 1 if script.task == "clm" else 0
    language = script.task != "classification"
    clock = StepClock()
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data.train,
        eval_dataset=data.eval,
        data_collator=data.collator,
        processing_class=tokenizer,
        compute_metrics=token_metrics(shift) if language else class_metrics(),
        preprocess_logits_for_metrics=token_scores(shift) if language else None,
        callbacks=[zero.ZeroCallback(), clock],
    )
    trained = trainer.train(resume_from_checkpoint=where_to_resume(args)).metrics
    after = final_metrics(trainer)
    everywhere(trainer.save_model, f"saving the model to {args.output_dir!r}")
    peak = highest(peak_bytes(args.device))
    if trainer.is_world_process_zero():
        trainer.save_metrics("all", {**trained, **after})
        trainer.save_state()
        summarise(script, args, trainer, {**trained, **after}, data.tokens_per_row / clock.median, peak)
    if args.push_to_hub:
        everywhere(trainer.push_to_hub, f"pushing to {args.hub_model_id or args.output_dir!r}")
    trainer.accelerator.end_training()
    return after


def where_to_resume(args: zero.ZeroTrainingArguments) -> str | bool | None:
    """A folder; True for the newest one that is whole, which the Trainer finds; None to start anew. A collective.

    `True` asks for a checkpoint; `latest` takes one if there is any, and so suits a job that is restarted by itself.
    """
    given = args.resume_from_checkpoint
    if given is None or given.lower() in ("false", "none"):
        return None
    if given.lower() not in ("true", "latest"):
        if not Path(given).is_dir():
            raise UserError(f"--resume-from-checkpoint {given}: there is no such folder")
        return given
    found = highest(int(get_last_checkpoint(args.output_dir) is not None))
    if not found and given.lower() == "true":
        raise UserError(f"--resume-from-checkpoint {given}: none in {args.output_dir!r}")
    return True if found else None


def final_metrics(trainer: Trainer) -> dict[str, float]:
    """The evaluation of the model as it now is: the one made at the last step, where there was one."""
    state = trainer.state
    last = next((log for log in reversed(state.log_history) if "eval_loss" in log), None)
    if last is None or last["step"] != state.global_step or trainer.args.load_best_model_at_end:
        return trainer.evaluate()
    return {name: value for name, value in last.items() if name.startswith("eval_")}


def summarise(
    script: ScriptArguments,
    args: zero.ZeroTrainingArguments,
    trainer: Trainer,
    results: dict[str, float],
    rows_rate: float,
    peak: int,
) -> None:
    """What came of it."""
    history = trainer.state.log_history
    before = next((log for log in history if "eval_loss" in log and log["step"] == 0), {})
    losses = [log["loss"] for log in history if "loss" in log] or [results["train_loss"]]
    rows_per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size

    def change(name: str) -> str:
        old = f"{number(before[name])} → " if name in before else ""
        return f"{old}{number(results[name])}"

    names = {"eval_perplexity": "perplexity", "eval_accuracy": "accuracy", "eval_f1": "macro F1"}
    print_summary(
        f"{script.model} · {script.task} · {trainer.state.global_step} steps on {args.world_size} rank(s)",
        {
            "training loss": " → ".join(number(loss) for loss in dict.fromkeys([losses[0], losses[-1]])),
            "evaluation loss": change("eval_loss"),
            **{title: change(name) for name, title in names.items() if name in results},
            "tokens/s": number(rows_rate * rows_per_step),
            "peak memory, highest rank": human(peak) + ("" if args.device.type == "cuda" else " resident"),
            "model and tokenizer": str(args.output_dir),
        },
    )


if __name__ == "__main__":
    run(main)
