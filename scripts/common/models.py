"""Models for the scripts: built-in configurations, trained from scratch, and anything `from_pretrained` takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_zero.plan.shapes import CONFIGS

from .arguments import DEFAULT_MODEL
from .console import UserError

AUTO_MODELS: dict[str, Any] = {
    "clm": AutoModelForCausalLM,
    "mlm": AutoModelForMaskedLM,
    "classification": AutoModelForSequenceClassification,
    "token-classification": AutoModelForTokenClassification,
    "question-answering": AutoModelForQuestionAnswering,
    "summarization": AutoModelForSeq2SeqLM,
    "transcription": AutoModelForSpeechSeq2Seq,
}
BUILT_IN: dict[str, Callable[[], PreTrainedConfig]] = {
    name: partial(AutoConfig.for_model, config.kind, **config.settings) for name, config in CONFIGS.items()
}
"""`hf-zero plan` accepts the same names."""


def load_config(task: str, name: str) -> PreTrainedConfig:
    """Return the configuration of a built-in, Hub or local model; raise `UserError` for any other name."""
    if name in BUILT_IN:
        config = BUILT_IN[name]()
        # BERT's family has causal heads too, which are not what its name stands for.
        causal_only = task == "clm" and type(config) in AUTO_MODELS["mlm"]._model_mapping
        if type(config) not in AUTO_MODELS[task]._model_mapping or causal_only:
            family = DEFAULT_MODEL[task].partition("-")[0]
            raise UserError(
                f"--task {task} needs a {family} model or one like it, found --model {name}; leave --model out or give "
                f"{DEFAULT_MODEL[task]}"
            )
        return config
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise UserError(
            f"no model {name!r}: expected one of {', '.join(BUILT_IN)}, a local folder with a config.json, or a Hub id "
            f"that can be reached from here"
        ) from error


def max_positions(config: PreTrainedConfig) -> int:
    """Return the longest sequence that the model accepts."""
    return int(getattr(config, "max_position_embeddings", None) or 1 << 20)


def load_model(
    task: str,
    name: str,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    labels: Sequence[str] = (),
    dtype: str = "float32",
) -> PreTrainedModel:
    """Build the model for `task`: from scratch for a built-in configuration, else with its pretrained weights.

    A built-in model is drawn from the current random state: set the same seed on every rank first.
    """
    model = _load(task, name, config, tokenizer, labels, dtype)
    if task == "clm":
        # GPT-2's own is None: transformers then takes this loss, with a warning, but the Trainer does not know that it
        # shifts the labels, counts one token too many per row, and makes every loss smaller by 1 / block_size.
        model.loss_type = model.loss_type or "ForCausalLM"
    else:
        # These heads accept `num_items_in_batch` and ignore it. Without this flag the Trainer multiplies a mean loss by the
        # number of ranks (and does not divide it by the accumulation steps), for it takes it for a part of a sum.
        model.accepts_loss_kwargs = False
    return model


def _load(
    task: str,
    name: str,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    labels: Sequence[str],
    dtype: str,
) -> PreTrainedModel:
    if labels:
        config.num_labels = len(labels)
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: number for number, label in enumerate(labels)}
    auto = AUTO_MODELS[task]
    if name in BUILT_IN:
        # A vocabulary may be smaller than the embedding, so that the full-size models keep their published size.
        config.vocab_size = max(config.vocab_size, len(tokenizer))
        config.pad_token_id = tokenizer.pad_token_id
        config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        if config.is_encoder_decoder:
            config.decoder_start_token_id = tokenizer.pad_token_id
        return auto.from_config(config, dtype=dtype if dtype != "auto" else None)
    if config.__class__ not in auto._model_mapping:
        raise UserError(f"--task {task} has no head for the {config.model_type!r} model {name!r}; choose another model")
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = tokenizer.pad_token_id
    try:
        model: PreTrainedModel = auto.from_pretrained(name, config=config, dtype=dtype)
    except OSError as error:
        raise UserError(f"the weights of {name!r} could not be read: {error}") from error
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer))
    return model
