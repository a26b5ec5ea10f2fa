"""One training run of a Trainer as every script makes it: resumed or not, timed, evaluated, saved, summed up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune_console import UserError, everywhere, highest, number, peak_bytes, print_summary
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from hf_zero.config import size_text

METRICS = {
    "eval_perplexity": "perplexity",
    "eval_accuracy": "accuracy",
    "eval_f1": "macro F1",
    "eval_exact_match": "exact match",
    "eval_rouge_l": "ROUGE-L",
    "eval_word_errors": "word error rate",
}
"""Of the summary, where a run has them."""


class StepClock(TrainerCallback):
    """Times the training steps, so that tokens/s counts neither evaluation nor saving."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.rows_per_step = 0
        self._started = 0.0

    def on_step_begin(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        # While it trains: a run that goes on with other ranks shares its rows among them.
        self.rows_per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._started)

    @property
    def median(self) -> float:
        """A step's usual time; the first one, which also sets things up, does not weigh in."""
        return statistics.median(self.seconds[1:] or self.seconds or [float("nan")])


def each_item_alike(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """For `Trainer(compute_loss_func=)`: cross-entropy in which every label of a step counts alike, on any rank.

    `num_items_in_batch` is the number of labels in the step, of all ranks and micro-batches; None: the mean of this batch.
    """
    logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
    total = cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="sum")
    return total / ((labels != -100).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)


def train_and_save(trainer: Trainer, *, title: str, rates: Mapping[str, float]) -> dict[str, float]:
    """Train, evaluate, save model and tokenizer, print a summary on the main process; the final evaluation's metrics.

    Args:
        title: of the summary, such as `gpt2-tiny · clm`.
        rates: what a training row has of each unit, for units per second.
    """
    args, clock = trainer.args, StepClock()
    trainer.add_callback(clock)
    trained = trainer.train(resume_from_checkpoint=where_to_resume(args)).metrics
    after = final_metrics(trainer)
    everywhere(trainer.save_model, f"saving the model to {args.output_dir!r}")
    peak = highest(peak_bytes(args.device))
    if trainer.is_world_process_zero():
        trainer.save_metrics("all", {**trained, **after})
        trainer.save_state()
        per_second = {name: rate * clock.rows_per_step / clock.median for name, rate in rates.items()}
        summarise(trainer, {**trained, **after}, title, per_second, peak)
    if args.push_to_hub:
        everywhere(trainer.push_to_hub, f"pushing to {args.hub_model_id or args.output_dir!r}")
    trainer.accelerator.end_training()
    return after


def where_to_resume(args: TrainingArguments) -> str | bool | None:
    """A folder; True or `latest` for the newest one that is whole, which the Trainer finds; None to start anew. A collective.

    `True` asks for a checkpoint; `latest` takes one if there is any, and keeps the batch on other numbers of ranks: so it
    suits a job that is restarted by itself.
    """
    given = args.resume_from_checkpoint
    if given is None or given.lower() in ("false", "none"):
        return None
    if given.lower() == "latest":
        return "latest"
    if given.lower() != "true":
        if not Path(given).is_dir():
            raise UserError(f"--resume-from-checkpoint {given}: there is no such folder")
        return given
    if not highest(int(get_last_checkpoint(args.output_dir) is not None)):
        raise UserError(f"--resume-from-checkpoint {given}: none in {args.output_dir!r}")
    return True


def final_metrics(trainer: Trainer) -> dict[str, float]:
    """The evaluation of the model as it now is: the one made at the last step, where there was one."""
    state = trainer.state
    last = next((log for log in reversed(state.log_history) if "eval_loss" in log), None)
    if last is None or last["step"] != state.global_step or trainer.args.load_best_model_at_end:
        return trainer.evaluate()
    return {name: value for name, value in last.items() if name.startswith("eval_")}


def summarise(
    trainer: Trainer, results: Mapping[str, float], title: str, per_second: Mapping[str, float], peak: int
) -> None:
    """What came of it."""
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
