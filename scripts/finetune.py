"""Fine-tune a GPT- or BERT-class model under ZeRO with the stock `transformers.Trainer`.

    torchrun --nproc-per-node 2 scripts/finetune.py --zero-stage 3    # gpt2-tiny on Python's own library, also on CPU
    accelerate launch scripts/finetune.py --model gpt2 --dataset my.txt --bf16 --zero-stage 3
    accelerate launch scripts/finetune.py --model gpt2 --lora --lora-rank 8 --lora-targets c_attn    # saves an adapter
    accelerate launch scripts/finetune.py --task classification --model bert-base-uncased --dataset imdb
    accelerate launch scripts/finetune.py --save-steps 50 --resume-from-checkpoint latest    # the newest whole one

Every flag of `transformers.TrainingArguments` works, written with dashes or underscores. What is not given gets a value
that suits the model; what is given is never changed. --resume-from-checkpoint takes a folder; True: the newest one that is
whole; latest: the same, with a fresh start if there is none, and with the same batch per step on another number of ranks
(torchrun --max-restarts: docs/launch.md).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from common.arguments import CORPUS_SIZE, DEFAULT_MODEL, DataArguments, answer_help
from common.console import UserError, check_output, check_space, examples, run

from hf_zero.plan.shapes import CONFIGS

if TYPE_CHECKING:
    from common.data import Prepared
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    import hf_zero as zero

TINY_STEPS = 150  # of a tiny model on the embedded corpus: a minute or two on two CPU ranks
LORA_LEARNING_RATE = 2e-4  # few parameters, starting from zero: about ten times that of full training
ADAPTED = {
    "clm": "CAUSAL_LM", "classification": "SEQ_CLS", "token-classification": "TOKEN_CLS",
    "question-answering": "QUESTION_ANS",
}  # fmt: skip
"""PEFT's name by task: with it, a new head is trained and saved, too."""


@dataclass
class ScriptArguments(DataArguments):
    """Arguments of this script. `None`: chosen to suit the others."""

    task: Literal["clm", "mlm", "classification", "token-classification", "question-answering"] = field(
        default="clm",
        metadata={"help": "clm (next token), mlm, classification, token-classification or question-answering"},
    )
    model: str | None = field(
        default=None, metadata={"help": f"Hub id, local folder, or a model from scratch: {', '.join(CONFIGS)}"}
    )
    tokenizer: str | None = field(default=None, metadata={"help": "Hub id or local folder, if not the model's own"})
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = field(
        default="float32", metadata={"help": "float32, bfloat16, float16 or auto: type of the loaded parameters"}
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

    lora: bool = field(default=False, metadata={"help": "train a LoRA adapter of --model, and save that alone"})
    lora_rank: int = field(default=16, metadata={"help": "rank of the adapter's matrices; alpha is twice that"})
    lora_targets: list[str] = field(
        default_factory=lambda: ["all-linear"],
        metadata={"help": "names of the layers that get an adapter, such as q_proj v_proj (default: all-linear)"},
    )

    def __post_init__(self) -> None:
        self.model = self.model or DEFAULT_MODEL[self.task]
        super().__post_init__()
        if self.lora and self.model in CONFIGS:
            raise UserError(
                f"--lora adapts a pretrained model, and {self.model} starts from random weights: pass --model with "
                "a Hub id or a folder"
            )


def parse(argv: Sequence[str]) -> tuple[ScriptArguments, zero.ZeroTrainingArguments]:
    """Parse the command line into two dataclasses."""
    from common.flags import parse_flags

    import hf_zero as zero

    return parse_flags(argv, (ScriptArguments, zero.ZeroTrainingArguments), defaults, __doc__)


def defaults(script: ScriptArguments, given: set[str]) -> dict[str, Any]:
    """Return the Trainer's arguments where the user gave none."""
    from common.flags import run_defaults

    scratch = script.model in CONFIGS
    chosen = run_defaults(script, given, name=script.task, scratch=scratch, steps=TINY_STEPS)
    if scratch:
        # BERT normalises after each block: with a higher rate, from scratch, it gets stuck at the most frequent answer.
        tiny = {"clm": 2e-3, "mlm": 5e-4}
        chosen["learning_rate"] = tiny.get(script.task, 1e-3) if script.tiny else 6e-4 if script.task == "clm" else 1e-4
    if script.lora:
        chosen["learning_rate"] = LORA_LEARNING_RATE
    return chosen


def prepare(
    script: ScriptArguments, args: zero.ZeroTrainingArguments
) -> tuple[nn.Module, PreTrainedTokenizerBase, Prepared]:
    """Return model, tokenizer and data, equal on every rank; other ranks find what the main process cached."""
    from common.data import (
        LABEL_COLUMNS,
        TEXT_COLUMNS,
        classification,
        embedded_corpus,
        language_modeling,
        load_text,
        load_tokenizer,
        pick_column,
    )  # fmt: skip
    from common.models import load_config, load_model, max_positions
    from common.structured import (
        check_columns,
        question_answering,
        structured_corpus,
        text_for_tokenizer,
        token_classification,
    )  # fmt: skip
    from transformers import set_seed

    task, name = script.task, str(script.model)
    config = load_config(task, name)
    structured = {"token-classification": token_classification, "question-answering": question_answering}.get(task)
    if script.dataset:
        data = load_text(script.dataset, script.dataset_config)
    else:
        data = (structured_corpus if structured else embedded_corpus)(task, script.corpus_size)
    if structured:
        check_columns(task, data)
        texts, column = text_for_tokenizer(task, data["train"])
    else:
        texts, column = data["train"], pick_column(data["train"], script.text_column, TEXT_COLUMNS, "--text-column")
    if not len(data["train"]):
        raise UserError(f"the dataset {script.dataset!r} is empty: its training split has no rows")
    limit = max_positions(config)
    source = script.tokenizer or (None if name in CONFIGS else name)
    tokenizer = load_tokenizer(source, config.model_type, texts, column, min(config.vocab_size, 16384), limit)
    block_size = min(script.block_size or (128 if script.tiny else 512), limit, tokenizer.model_max_length)
    limits = (script.max_train_samples, script.max_eval_samples or (128 if script.tiny else None))
    if structured:
        prepared = structured(data, tokenizer, block_size, limits)
    elif task == "classification":
        label = pick_column(data["train"], script.label_column, LABEL_COLUMNS, "--label-column")
        prepared = classification(data, column, label, tokenizer, block_size, limits=limits)
    else:
        prepared = language_modeling(task, data, column, tokenizer, block_size, limits=limits)
    set_seed(args.seed)
    model = load_model(task, name, config, tokenizer, prepared.labels, script.dtype)
    return adapted(model, script) if script.lora else model, tokenizer, prepared


def adapted(model: PreTrainedModel, script: ScriptArguments) -> nn.Module:
    """Freeze the model and add a trainable LoRA adapter; PEFT loads it over the same `--model`."""
    with examples():
        from peft import LoraConfig, get_peft_model
    targets = script.lora_targets
    every = targets == ["all-linear"]
    # PEFT trains the new head itself, and keeps all-linear off that of sequence classification alone.
    heads = [name for name in ("classifier", "score", "qa_outputs") if hasattr(model, name)]
    config = LoraConfig(
        r=script.lora_rank,
        lora_alpha=2 * script.lora_rank,
        target_modules="all-linear" if every else targets,
        exclude_modules=heads if every and script.task in ("token-classification", "question-answering") else None,
        task_type=ADAPTED.get(script.task),
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:  # PEFT finds no such targets
        raise UserError(f"--lora-targets {' '.join(targets)}: {error}") from error


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, evaluate, save; return the final evaluation metrics."""
    words = sys.argv[1:] if argv is None else argv
    answer_help(words, ScriptArguments, __doc__)
    with examples():
        import datasets
    from common.metrics import class_metrics, span_metrics, token_metrics, token_scores
    from common.run import each_item_alike, train_and_save
    from transformers import Trainer

    import hf_zero as zero

    script, args = parse(words)
    check_output(args.output_dir)
    if args.process_index:
        datasets.disable_progress_bars()
    with args.main_process_first(desc="preparing model and data"):
        model, tokenizer, data = prepare(script, args)
    check_space(args.output_dir, model)

    shift = 1 if script.task == "clm" else 0
    language = script.task in ("clm", "mlm")
    metrics = span_metrics if script.task == "question-answering" else class_metrics
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data.train,
        eval_dataset=data.eval,
        data_collator=data.collator,
        processing_class=tokenizer,
        compute_metrics=token_metrics(shift) if language else metrics(),
        preprocess_logits_for_metrics=token_scores(shift) if language else None,
        compute_loss_func=each_item_alike if script.task == "token-classification" else None,
        callbacks=[zero.ZeroCallback(verbose=script.verbose)],
    )
    return train_and_save(trainer, title=f"{script.model} · {script.task}")


if __name__ == "__main__":
    run(main)
