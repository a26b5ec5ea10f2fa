"""Run a Trainer: resume, train, evaluate, save, summarise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import hf_zero as zero
from hf_zero.config import size_text

from .console import Interrupted, UserError, everywhere, highest, number, peak_bytes, print_summary

METRICS = {
    "eval_perplexity": "perplexity",
    "eval_accuracy": "accuracy",
    "eval_f1": "macro F1",
    "eval_exact_match": "exact match",
    "eval_rouge_l": "ROUGE-L",
    "eval_word_errors": "word error rate",
}
"""Labels of metrics in the summary."""


class Recording(TrainerCallback):
    """Keeps the engine's step recorder, whose throughput every summary and report shows."""

    def __init__(self) -> None:
        self.recorder: Any = None

    def on_step_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        engine = zero.engine_of(model)
        self.recorder = None if engine is None else engine.recorder or self.recorder

    def per_second(self, ranks: int) -> dict[str, float]:
        """Samples and tokens per second of all ranks."""
        samples, tokens = (0.0, 0.0) if self.recorder is None else self.recorder.throughput()
        return {name: rate * ranks for name, rate in (("tokens", tokens), ("samples", samples)) if rate}


def each_item_alike(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """For `Trainer(compute_loss_func=)`: cross-entropy with equal weight for every label of a step, on any rank.

    `num_items_in_batch` is the number of labels in the step, of all ranks and micro-batches; None: the mean of this batch.
    """
    logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
    total = cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="sum")
    return total / ((labels != -100).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)


def train_and_save(trainer: Trainer, *, title: str) -> dict[str, float]:
    """Train, evaluate, save model and tokenizer, print a summary; return the final evaluation's metrics.

    Args:
        title: of the summary, such as `gpt2-tiny · clm`.
    """
    args, recording = trainer.args, Recording()
    trainer.add_callback(recording)
    try:
        trained = trainer.train(resume_from_checkpoint=where_to_resume(args)).metrics
    except KeyboardInterrupt:
        raise Interrupted(how_to_continue(trainer)) from None
    after = final_metrics(trainer)
    everywhere(trainer.save_model, f"saving the model to {args.output_dir!r}")
    peak = highest(peak_bytes(args.device))
    if trainer.is_world_process_zero():
        trainer.save_metrics("all", {**trained, **after})
        trainer.save_state()
        summarise(trainer, {**trained, **after}, title, recording.per_second(args.world_size), peak)
    if args.push_to_hub:
        everywhere(trainer.push_to_hub, f"pushing to {args.hub_model_id or args.output_dir!r}")
    trainer.accelerator.end_training()
    return after


def how_to_continue(trainer: Trainer) -> str:
    """Return one line with the newest checkpoint and the flag that continues from it."""
    step, folder = trainer.state.global_step, trainer.args.output_dir
    newest = get_last_checkpoint(folder) if Path(folder).is_dir() else None
    if newest is None:
        return f"Interrupted after step {step}. No checkpoint in {folder}: set --save-steps to have one."
    return (
        f"Interrupted after step {step}. Newest checkpoint: {newest}. To continue, repeat the command with "
        "--resume-from-checkpoint latest"
    )


def where_to_resume(args: TrainingArguments) -> str | bool | None:
    """Return what `Trainer.train` resumes from: a folder, True, `latest`, or None for a fresh start. Collective.

    `True` requires a checkpoint. `latest` starts fresh if there is none, and keeps the batch of a
    step on other numbers of ranks: it suits a job that restarts itself.
    """
    given = args.resume_from_checkpoint
    if given is None or given.lower() in ("false", "none"):
        return None
    if given.lower() == "latest":
        return "latest"
    exists = highest(int(Path(args.output_dir).is_dir() and get_last_checkpoint(args.output_dir) is not None))
    if given.lower() != "true":
        if not Path(given).is_dir():
            raise UserError(f"--resume-from-checkpoint {given}: no such folder")
        return given
    if not exists:
        raise UserError(f"--resume-from-checkpoint {given}: no checkpoint in {args.output_dir!r}; latest starts fresh")
    return True


def final_metrics(trainer: Trainer) -> dict[str, float]:
    """Return the evaluation of the trained model, reusing the one of the last step."""
    state = trainer.state
    last = next((log for log in reversed(state.log_history) if "eval_loss" in log), None)
    if last is None or last["step"] != state.global_step or trainer.args.load_best_model_at_end:
        return trainer.evaluate()
    return {name: value for name, value in last.items() if name.startswith("eval_")}


def summarise(
    trainer: Trainer, results: Mapping[str, float], title: str, per_second: Mapping[str, float], peak: int
) -> None:
    """Print the results."""
    args, history = trainer.args, trainer.state.log_history
    before = next((log for log in history if "eval_loss" in log and log["step"] == 0), {})
    losses = [log["loss"] for log in history if "loss" in log] or [results["train_loss"]]

    def change(name: str) -> str:
        old = f"{number(before[name])} → " if name in before else ""
        return f"{old}{number(results[name])}"

    print_summary(
        f"{title} · {trainer.state.global_step} steps on {args.world_size} rank(s)",
        {
            "training loss": " → ".join(number(loss) for loss in dict.fromkeys([losses[0], losses[-1]])),
            "evaluation loss": change("eval_loss"),
            **{words: change(name) for name, words in METRICS.items() if name in results},
            **{f"{unit}/s": number(rate) for unit, rate in per_second.items()},
            "peak memory, highest rank": size_text(peak) + ("" if args.device.type == "cuda" else " resident"),
            "model and tokenizer": str(args.output_dir),
        },
    )
