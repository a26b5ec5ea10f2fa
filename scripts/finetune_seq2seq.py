"""Fine-tune an encoder-decoder under ZeRO with the stock `Seq2SeqTrainer`, evaluated on its generated text.

    torchrun --nproc-per-node 2 scripts/finetune_seq2seq.py --zero-stage 3                        # t5-tiny, on functions
    torchrun --nproc-per-node 2 scripts/finetune_seq2seq.py --zero-stage 3 --task transcription    # Whisper-like, made audio

Every label token of a step counts alike, on any number of ranks.
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
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TINY_STEPS = 100
SPOKEN = (768, 96)  # utterances that are made, for training and evaluation


@dataclass
class Seq2SeqArguments(DataArguments):
    """Arguments of this script."""

    task: Literal["summarization", "transcription"] = field(
        default="summarization",
        metadata={"help": "summarization (text to short text) or transcription (speech to text)"},
    )
    model: str | None = field(
        default=None,
        metadata={"help": "Hub id, local folder, or from scratch: t5-tiny, t5-220m, speech-tiny, whisper-74m"},
    )
    dataset: str | None = field(
        default=None,
        metadata={
            "help": "file with columns text and summary, or folder of WAV files with metadata.csv; else made here"
        },
    )
    block_size: int = field(default=192, metadata={"help": "tokens of a text; summaries have a quarter"})
    corpus_size: int = field(default=CORPUS_SIZE, metadata={"help": "characters to take of Python's standard library"})

    def __post_init__(self) -> None:
        self.model = self.model or DEFAULT_MODEL[self.task]
        super().__post_init__()


def defaults(script: Seq2SeqArguments, given: set[str]) -> dict[str, Any]:
    """Return the Trainer's arguments where the user gave none."""
    from common.flags import run_defaults

    scratch = script.model in CONFIGS
    chosen = run_defaults(script, given, name=script.task, scratch=scratch, steps=TINY_STEPS)
    chosen |= {"predict_with_generate": True, "generation_max_length": 32}
    return chosen | ({"learning_rate": 3e-3 if script.tiny else 3e-4} if scratch else {})


def summaries(script: Seq2SeqArguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Any, Prepared]:
    """Return model, tokenizer, what is saved with the model, and texts."""
    from common.data import load_text, load_tokenizer
    from common.models import load_config, load_model
    from common.structured import check_columns, structured_corpus, summarization, text_for_tokenizer
    from transformers import DataCollatorForSeq2Seq

    name = str(script.model)
    config = load_config(script.task, name)
    data = load_text(script.dataset) if script.dataset else structured_corpus(script.task, script.corpus_size)
    check_columns(script.task, data)
    texts, column = text_for_tokenizer(script.task, data["train"])
    source = None if name in CONFIGS else name
    tokenizer = load_tokenizer(source, "t5", texts, column, min(config.vocab_size, 16384), 1 << 20)
    limits = (script.max_train_samples, script.max_eval_samples or (64 if script.tiny else None))
    prepared = summarization(data, tokenizer, script.block_size, limits)
    model = load_model(script.task, name, config, tokenizer)
    prepared.collator = DataCollatorForSeq2Seq(tokenizer, model)
    return model, tokenizer, tokenizer, prepared


def speech(script: Seq2SeqArguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Any, Prepared]:
    """Return model, tokenizer, what is saved with the model, and sounds."""
    import datasets
    from common.data import Prepared, load_tokenizer
    from common.models import load_config, load_model
    from common.speech import RATE, SpeechCollator, features_of, recordings, spoken_digits
    from transformers import WhisperFeatureExtractor

    name = str(script.model)
    config = load_config(script.task, name)
    if script.dataset:
        spoken = recordings(script.dataset)
        parts = [[sound for row, sound in enumerate(spoken) if bool(row % 8) is train] for train in (True, False)]
        if not all(parts):
            raise UserError(f"--dataset {script.dataset!r} has {len(spoken)} recordings: expected at least 2")
    else:
        parts = [spoken_digits(count, seed) for seed, count in enumerate(SPOKEN)]
    limits = (script.max_train_samples, script.max_eval_samples)
    parts = [part[: limit or len(part)] for part, limit in zip(parts, limits)]
    texts = datasets.Dataset.from_dict({"text": [sound.text for sound in parts[0]]})
    source = None if name in CONFIGS else name
    tokenizer = load_tokenizer(source, "t5", texts, "text", min(config.vocab_size, 16384), 1 << 20)
    frames = 2 * config.max_source_positions  # of 10 ms; the encoder takes every second
    extractor = WhisperFeatureExtractor(
        feature_size=config.num_mel_bins, sampling_rate=RATE, hop_length=RATE // 100, chunk_length=frames // 100
    )
    length = config.max_target_positions
    rows = [features_of(part, extractor, tokenizer, length) for part in parts]
    model = load_model(script.task, name, config, tokenizer)
    return model, tokenizer, extractor, Prepared(*rows, SpeechCollator(model))


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, evaluate, save; return the final evaluation metrics."""
    words = sys.argv[1:] if argv is None else argv
    answer_help(words, Seq2SeqArguments, __doc__)
    with examples():
        import datasets
    from common.flags import ZeroSeq2SeqTrainingArguments, parse_flags
    from common.metrics import RougeL, WordErrors, text_metrics
    from common.run import each_item_alike, train_and_save
    from transformers import Seq2SeqTrainer, set_seed

    import hf_zero as zero

    script, args = parse_flags(words, (Seq2SeqArguments, ZeroSeq2SeqTrainingArguments), defaults, __doc__)
    check_output(args.output_dir)
    if args.process_index:
        datasets.disable_progress_bars()
    set_seed(args.seed)
    with args.main_process_first(desc="preparing model and data"):
        model, tokenizer, processor, data = (summaries if script.task == "summarization" else speech)(script)
    check_space(args.output_dir, model)
    metric = RougeL(keep_in_memory=True) if script.task == "summarization" else WordErrors(keep_in_memory=True)
    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=data.train,
        eval_dataset=data.eval,
        data_collator=data.collator,
        processing_class=tokenizer,
        compute_metrics=text_metrics(metric, tokenizer),
        compute_loss_func=each_item_alike,
        callbacks=[zero.ZeroCallback(verbose=script.verbose)],
    )
    after = train_and_save(trainer, title=f"{script.model} · {script.task}")
    if trainer.is_world_process_zero() and processor is not tokenizer:
        processor.save_pretrained(args.output_dir)
    return after


if __name__ == "__main__":
    run(main)
