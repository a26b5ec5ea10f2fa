"""`sp_size` in the stock Trainer and in a stock accelerate loop: data, losses, evaluation and counts of whole samples."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import hf_zero as zero
from tests.kit.pool import RankPool
from tests.models import VOCAB, generator, llama

pytestmark = pytest.mark.gloo


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Fill rows up at their ends."""
    length = max(len(row["input_ids"]) for row in rows)

    def filled(name: str, value: int) -> Tensor:
        return torch.tensor([row[name] + [value] * (length - len(row[name])) for row in rows])

    mask = [[1] * len(row["input_ids"]) + [0] * (length - len(row["input_ids"])) for row in rows]
    return {"input_ids": filled("input_ids", 0), "labels": filled("labels", -100), "attention_mask": torch.tensor(mask)}


def rows(count: int, seed: int, *, even: bool = False) -> list[dict[str, list[int]]]:
    """Rows of 5 to 16 tokens; the first third of each has no labels. `even`: all have 11, and every batch as many labels."""
    found = []
    for number in range(count):
        length = 11 if even else 5 + number * 7 % 12
        ids = torch.randint(3, VOCAB, (length,), generator=generator(seed, number)).tolist()
        found.append({"input_ids": ids, "labels": [-100] * (length // 3) + ids[length // 3 :]})
    return found


def trainer(
    folder: str,
    size: int,
    steps: int = 3,
    rank_world: int = 1,
    cls: type[Trainer] = Trainer,
    debug: bool = False,
    **more: Any,
) -> Trainer:
    """A stock Trainer with 8 rows per step, of one process or of groups of `size` ranks."""
    AcceleratorState._reset_state(True)
    torch.manual_seed(5)
    plugin = {"parallelism_config": zero.ZeroPlugin(stage=3, sp_size=size, debug=debug)} if rank_world > 1 else {}
    args = TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=2, per_device_eval_batch_size=2, max_steps=steps,
        gradient_accumulation_steps=4 * size // rank_world, learning_rate=0.5, optim="sgd",
        logging_steps=1, save_steps=2, report_to=[],
        disable_tqdm=True, include_num_input_tokens_seen="non_padding", **plugin, **more,
    )  # fmt: skip
    return cls(llama(), args, data_collator=collate, train_dataset=rows(28, 1), eval_dataset=rows(8, 2, even=True))  # type: ignore[arg-type]


def trained(rank: int, world: int, folder: str, size: int) -> dict[str, Any]:
    it = trainer(f"{folder}/{world}", size, rank_world=world)
    it.train()
    model: Any = it.model
    found: dict[str, Any] = {
        "loss": [each["loss"] for each in it.state.log_history if "loss" in each],
        "grad_norm": [each["grad_norm"] for each in it.state.log_history if "grad_norm" in each],
        "tokens": it.state.num_input_tokens_seen,
        "operations": it.state.total_flos,
        "eval_loss": it.evaluate()["eval_loss"],
        "epoch": it.state.epoch,
    }
    predicted = it.predict(rows(7, 2, even=True))  # type: ignore[arg-type]
    found["predicted"] = torch.tensor(predicted.predictions[:, :, :8])
    with zero.unsharded(model) if world > 1 else torch.no_grad():
        found["weights"] = torch.cat([param.detach().flatten() for param in model.parameters()])
    return found


def resumed(rank: int, world: int, folder: str, size: int, of: int) -> Tensor:
    """From the checkpoint of another `sp_size`, with the same rows in a step."""
    it = trainer(f"{folder}/resumed", size, rank_world=world)
    it.train(resume_from_checkpoint=f"{folder}/{of}/checkpoint-2")
    model: Any = it.model
    with zero.unsharded(model):
        return torch.cat([param.detach().flatten() for param in model.parameters()])


def test_the_trainer(pools: dict[int, RankPool], tmp_path: Path) -> None:
    (wanted,) = pools[1].run(trained, str(tmp_path), 1)
    for found in pools[4].run(trained, str(tmp_path), 2):
        for name, value in wanted.items():
            torch.testing.assert_close(
                found[name], value, rtol=2e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
    lines = map(json.loads, Path(tmp_path, "4", "zero_steps.jsonl").read_text().splitlines())
    assert [4 * line["samples"] for line in lines if line["kind"] == "step"] == [8] * 3, "rows of a step over all ranks"
    for weights in pools[2].run(resumed, str(tmp_path), 2, 4):
        torch.testing.assert_close(weights, wanted["weights"], rtol=2e-5, atol=2e-6)


def drawn(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Choose words by chance, as for masked language modelling."""
    made = collate(rows)
    made["labels"][torch.rand(made["labels"].shape) < 0.5] = -100
    return made


def drawing(rank: int, world: int, folder: str, start: str | None) -> list[float]:
    """Evaluate after each step. Batches of a group are compared in every step."""
    it = trainer(folder, world, 4, world, debug=True, eval_strategy="steps", eval_steps=1)
    it.data_collator, it.eval_dataset = drawn, rows(7, 2)
    it.train(resume_from_checkpoint=start)
    return [each["loss"] for each in it.state.log_history if "loss" in each]


def test_collators_that_draw(pools: dict[int, RankPool], tmp_path: Path) -> None:
    """Each rank evaluates other samples, and a checkpoint of 2 ranks has random states for 2."""
    for world, start in ((2, None), (4, f"{tmp_path}/2/checkpoint-2")):
        first, *others = pools[world].run(drawing, f"{tmp_path}/{world}", start)
        assert len(first) == 4
        assert others == [first] * (world - 1)


def looped(rank: int, world: int, size: int, even: bool) -> dict[str, Any]:
    """The same loop with and without ranks: accumulation by accelerate, evaluation with `gather_for_metrics`."""
    AcceleratorState._reset_state(True)
    torch.manual_seed(5)
    plugin = zero.ZeroPlugin(stage=2, sp_size=size) if world > 1 else None
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4 * size // world, parallelism_config=plugin)
    model: Any = llama()
    train: Any = DataLoader(rows(8, 1, even=even), batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    test: Any = DataLoader(rows(7, 2, even=True), batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    model, optimizer, train, test, schedule = accelerator.prepare(model, optimizer, train, test, schedule)
    losses = []
    for batch in train:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            losses.append(loss.detach())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()
    words, firsts = [], []
    for batch in test:
        firsts.append(accelerator.gather_for_metrics(batch["input_ids"][:, 0]))  # before the first whole forward, too
        with torch.no_grad():
            logits = model(**batch).logits
        last = logits[torch.arange(len(logits)), batch["attention_mask"].sum(1) - 1]
        words.append(accelerator.gather_for_metrics(last.argmax(-1)))
    torch.manual_seed(rank)
    mixed: Any = accelerator.prepare(DataLoader(torch.arange(16), batch_size=2, shuffle=True))
    return {
        "loss": torch.stack(losses), "words": torch.cat(words), "firsts": torch.cat(firsts),
        "rate": schedule.get_last_lr(), "order": torch.cat([*mixed, *mixed]).tolist(),
    }  # fmt: skip


def test_an_accelerate_loop(pools: dict[int, RankPool]) -> None:
    """Of batches with different numbers of tokens, two groups weigh each token alike, and one process each batch."""
    for world, even in ((2, False), (4, True)):
        (wanted,) = pools[1].run(looped, 1, even)
        everyone = pools[world].run(looped, 2, even)
        for rank, found in enumerate(everyone):
            assert found["order"] == everyone[rank - rank % 2]["order"], "of ranks that share samples"
            for name in ("words", "firsts"):
                assert found[name].tolist() == wanted[name].tolist()
            assert found["rate"] == [0.5 / (1 + world // 2)], "of a schedule over a batch of each group"
            loss = wanted["loss"].view(len(found["loss"]), -1).mean(1)
            torch.testing.assert_close(found["loss"], loss, rtol=2e-5, atol=0)


class OwnLoss(Trainer):
    """As transformers' documentation has it."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


class Penalized(Trainer):
    """The model's loss and a term over weights."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss: Any = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return loss + 0.01 * model.lm_head.weight.square().mean()


def without_labels(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    return {name: each for name, each in collate(rows).items() if name != "labels"}


def refused(rank: int, world: int, folder: str) -> dict[str, str]:
    """The named error of each Trainer, and of a loop."""
    found = {}
    for name, cls, options in (
        ("own", OwnLoss, {}),
        ("penalized", Penalized, {}),
        ("smoothing", Trainer, {"label_smoothing_factor": 0.1}),
        ("noise", Trainer, {"neftune_noise_alpha": 5.0}),
        ("labels", Trainer, {"data_collator": without_labels}),
    ):
        collator = options.pop("data_collator", collate)
        it = trainer(f"{folder}/{name}", world, 1, world, cls, **options)
        it.data_collator = collator
        try:
            it.train()
            found[name] = ""
        except zero.ConfigError as error:
            found[name] = str(error)
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, parallelism_config=zero.ZeroPlugin(stage=2, sp_size=world))
    model: Any = llama()
    loader: Any = DataLoader(rows(2, 1), batch_size=2, collate_fn=without_labels)  # type: ignore[arg-type]
    model, loader = accelerator.prepare(model, loader)
    for batch in loader:
        try:
            model(**batch)
        except zero.ConfigError as error:
            found["loop"] = str(error)
    return found


def test_losses_outside_of_the_model(two: RankPool, tmp_path: Path) -> None:
    first, second = two.run(refused, str(tmp_path))
    assert first == second
    assert first.pop("penalized") == ""
    assert first.pop("noise").startswith("neftune_noise_alpha")
    for name in ("own", "smoothing", "labels", "loop"):
        assert re.match("a forward without labels.*outside of the model", first[name]), name
