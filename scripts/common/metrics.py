"""Metrics as `evaluate.Metric` classes that compute here: `evaluate.load` would fetch a script from the Hub."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import EvalPrediction, PreTrainedTokenizerBase

from .console import examples

with examples():
    import datasets
    import evaluate

IGNORED = -100  # the label value that transformers' losses leave out


class _Computed(evaluate.Metric):
    """A metric whose description is its docstring; `columns` has the type of each of its inputs."""

    columns = {"predictions": "int64", "references": "int64"}  # predicted and true class numbers

    def _info(self) -> evaluate.EvaluationModuleInfo:
        return evaluate.EvaluationModuleInfo(
            description=str(self.__doc__),
            citation="",
            inputs_description=", ".join(self.columns),
            features=datasets.Features({name: datasets.Value(kind) for name, kind in self.columns.items()}),
        )


class Perplexity(_Computed):
    """exp of the mean of `predictions`, the negative log-likelihood (natural logarithm) of each token."""

    columns = {"predictions": "float32"}

    def _compute(self, predictions: Any) -> dict[str, float]:
        mean = float(np.mean(np.asarray(predictions, dtype=np.float64)))
        # Past e^709 a float overflows; an untrained or diverged model is reported as infinite, not as an error.
        return {"perplexity": math.exp(mean) if mean < 709 else math.inf}


class Accuracy(_Computed):
    """Share of correct predictions."""

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}


class MacroF1(_Computed):
    """Unweighted mean of each class's F1, over the classes that occur in predictions or references."""

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        classes, numbers = np.unique(np.concatenate([predictions, references]), return_inverse=True)
        predicted, true = np.split(numbers, 2)
        size = len(classes)
        hits = np.bincount(true[predicted == true], minlength=size)
        found, present = np.bincount(predicted, minlength=size), np.bincount(true, minlength=size)
        # 2·TP / (predicted + present) is F1; the denominator is never 0 for a class that occurs at all.
        return {"f1": float(np.mean(2 * hits / (found + present)))}


class RougeL(_Computed):
    """Mean F1 of the longest common subsequence of words (Lin, "ROUGE", 2004), without stemming."""

    columns = {"predictions": "string", "references": "string"}

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        scores = []
        for found, true in zip(predictions, references):
            one, other = found.lower().split(), true.lower().split()
            words = len(one) + len(other)
            scores.append((words - _edits(one, other, replacing=2)) / max(1, words))  # what is left is common, in both
        return {"rouge_l": float(np.mean(scores))}


class WordErrors(_Computed):
    """Word error rate: words to insert, delete or replace, per word of the references."""

    columns = {"predictions": "string", "references": "string"}

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        pairs = [(found.split(), true.split()) for found, true in zip(predictions, references)]
        words = sum(len(true) for _, true in pairs)
        return {"word_errors": sum(_edits(found, true) for found, true in pairs) / max(1, words)}


class ExactMatch(_Computed):
    """Share of predictions equal to their reference."""

    columns = {"predictions": "string", "references": "string"}

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"exact_match": float(np.mean([found == true for found, true in zip(predictions, references)]))}


def _edits(one: list[str], other: list[str], replacing: int = 1) -> int:
    """Return the Levenshtein distance; a replaced word counts as `replacing` edits (2: a deletion and an insertion)."""
    before = list(range(len(other) + 1))
    for number, word in enumerate(one, start=1):
        row = [number]
        for column, second in enumerate(other):
            row.append(min(row[-1] + 1, before[column + 1] + 1, before[column] + replacing * (word != second)))
        before = row
    return before[-1]


def token_scores(shift: int) -> Callable[[Any, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """For `Trainer(preprocess_logits_for_metrics=)`: each token's loss and best guess instead of its whole vocabulary.

    `shift` is 1 where position t predicts token t + 1 (causal models), 0 where it predicts itself (masked models).
    """

    def scores(logits: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits[0] if isinstance(logits, tuple) else logits
        logits = logits[:, : logits.shape[1] - shift].float()
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), labels[:, shift:], ignore_index=IGNORED, reduction="none"
        )
        return losses, logits.argmax(-1)

    return scores


def token_metrics(shift: int) -> Callable[[EvalPrediction], dict[str, float]]:
    """For `Trainer(compute_metrics=)`, over what `token_scores(shift)` kept: exact means over all predicted tokens."""
    perplexity, accuracy = Perplexity(keep_in_memory=True), Accuracy(keep_in_memory=True)

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        losses, guesses = prediction.predictions
        labels = prediction.label_ids[:, shift:]
        counted = labels != IGNORED
        return {
            **perplexity.compute(predictions=losses[counted]),
            **accuracy.compute(predictions=guesses[counted], references=labels[counted]),
        }

    return compute


def class_metrics() -> Callable[[EvalPrediction], dict[str, float]]:
    """For `Trainer(compute_metrics=)`: accuracy and macro F1 of the likeliest class, of all rows or tokens that have one."""
    metrics = (Accuracy(keep_in_memory=True), MacroF1(keep_in_memory=True))

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        scores = prediction.predictions
        scores = scores[0] if isinstance(scores, tuple) else scores
        counted = prediction.label_ids != IGNORED
        guesses, labels = scores.argmax(-1)[counted], prediction.label_ids[counted]
        results: dict[str, float] = {}
        for metric in metrics:
            results.update(metric.compute(predictions=guesses, references=labels))
        return results

    return compute


def span_metrics() -> Callable[[EvalPrediction], dict[str, float]]:
    """For `Trainer(compute_metrics=)`: how often first and last token of the answer are both right."""
    metric = ExactMatch(keep_in_memory=True)

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        guesses = [scores.argmax(-1) for scores in prediction.predictions[:2]]
        spans = ([f"{first}-{last}" for first, last in zip(*ends)] for ends in (guesses, prediction.label_ids[:2]))
        found, true = spans
        return dict(metric.compute(predictions=found, references=true))

    return compute


def text_metrics(
    metric: evaluate.Metric, tokenizer: PreTrainedTokenizerBase
) -> Callable[[EvalPrediction], dict[str, float]]:
    """For `Seq2SeqTrainer(compute_metrics=)` with `predict_with_generate`: `metric` over texts."""

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        ids = (prediction.predictions, prediction.label_ids)
        rows = (np.where(part < 0, tokenizer.pad_token_id, part) for part in ids)
        found, true = (tokenizer.batch_decode(part, skip_special_tokens=True) for part in rows)
        return dict(metric.compute(predictions=found, references=true))

    return compute
