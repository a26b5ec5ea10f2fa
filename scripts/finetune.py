"""Fine-tune a GPT- or BERT-class model under ZeRO with the stock `transformers.Trainer`.

    accelerate launch scripts/finetune.py                             # gpt2-tiny on Python's own library, in a minute
    accelerate launch scripts/finetune.py --zero-stage 3
    torchrun --nproc-per-node 2 scripts/finetune.py --zero-stage 3    # 2 ranks, also on CPU
    accelerate launch scripts/finetune.py --model gpt2 --lora --lora-rank 8 --lora-targets c_attn    # saves an adapter
    accelerate launch scripts/finetune.py --task classification --model bert-base-uncased --dataset imdb
    accelerate launch scripts/finetune.py --save-steps 50 --resume-from-checkpoint latest    # the newest whole one

Every flag of `transformers.TrainingArguments` works, written with dashes or underscores. What is not given gets a value
that suits the model; what is given is never changed. --resume-from-checkpoint takes a folder; True: the newest in the
output folder whose every byte is right; latest: the same, a fresh start where there is none, and on another number of ranks
the batch of a step stays (torchrun --max-restarts: docs/launch.md).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from finetune_console import UserError, check_output, check_space, examples, run
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
from finetune_flags import DataArguments, parse_flags, run_defaults
from finetune_metrics import class_metrics, span_metrics, token_metrics, token_scores
from finetune_models import BUILT_IN, DEFAULT_MODEL, load_config, load_model, max_positions
from finetune_run import each_item_alike, train_and_save
from finetune_structured import (
    check_columns,
    question_answering,
    structured_corpus,
    text_for_tokenizer,
    token_classification,
)
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, set_seed

import hf_zero as zero

with examples():
    import datasets

STRUCTURED = {"token-classification": token_classification, "question-answering": question_answering}
TINY_STEPS = 150  # of a tiny model on the embedded corpus: a minute or two on two CPU ranks


@dataclass
class ScriptArguments(DataArguments):
    """What to train on what. `None` means: chosen to suit the rest."""

    task: Literal["clm", "mlm", "classification", "token-classification", "question-answering"] = field(
        default="clm", metadata={"help": "what is learned: the next token, masked tokens, …"}
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

    lora: bool = field(default=False, metadata={"help": "train a LoRA adapter of --model, and save that alone"})
    lora_rank: int = field(default=16, metadata={"help": "of its matrices; alpha is twice that"})
    lora_targets: list[str] = field(
        default_factory=lambda: ["all-linear"],
        metadata={"help": "names of the layers that get one, such as q_proj v_proj"},
    )

    def __post_init__(self) -> None:
        self.model = self.model or DEFAULT_MODEL[self.task]
        super().__post_init__()
        if self.lora and self.model in BUILT_IN:
            raise UserError(
                f"--lora adapts a pretrained model, and {self.model} starts from random weights: pass --model with a Hub id or "
                "a folder"
            )


def parse(argv: Sequence[str]) -> tuple[ScriptArguments, zero.ZeroTrainingArguments]:
    """The command line as two dataclasses."""
    return parse_flags(argv, (ScriptArguments, zero.ZeroTrainingArguments), defaults, __doc__)


def defaults(script: ScriptArguments, given: set[str]) -> dict[str, Any]:
    """What TrainingArguments should be where the user said nothing. Only defaults: whatever was typed wins."""
    scratch = script.model in BUILT_IN
    chosen = run_defaults(script, given, name=script.task, scratch=scratch, steps=TINY_STEPS)
    if scratch:
        # BERT normalises after each block: pushed harder, from scratch, it learns the commonest answer and stays there.
        tiny = {"clm": 2e-3, "mlm": 5e-4}
        chosen["learning_rate"] = tiny.get(script.task, 1e-3) if script.tiny else 6e-4 if script.task == "clm" else 1e-4
    return chosen


def prepare(
    script: ScriptArguments, args: zero.ZeroTrainingArguments
) -> tuple[nn.Module, PreTrainedTokenizerBase, Prepared]:
    """Model, tokenizer and data. The same on every rank; what the main process has made, the others find cached."""
    task, name = script.task, str(script.model)
    config = load_config(task, name)
    structured = STRUCTURED.get(task)
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
    source = script.tokenizer or (None if name in BUILT_IN else name)
    tokenizer = load_tokenizer(source, config.model_type, texts, column, min(config.vocab_size, 16384), limit)
    block_size = min(script.block_size or (128 if script.tiny else 512), limit)
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
    language = script.task in ("clm", "mlm")
    metrics = {
        "classification": class_metrics,
        "token-classification": class_metrics,
        "question-answering": span_metrics,
    }
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data.train,
        eval_dataset=data.eval,
        data_collator=data.collator,
        processing_class=tokenizer,
        compute_metrics=token_metrics(shift) if language else metrics[script.task](),
        preprocess_logits_for_metrics=token_scores(shift) if language else None,
        compute_loss_func=each_item_alike if script.task == "token-classification" else None,
        callbacks=[zero.ZeroCallback(verbose=script.verbose)],
    )
    return train_and_save(trainer, title=f"{script.model} · {script.task}", rates={"tokens": data.tokens_per_row})


if __name__ == "__main__":
    run(main)
