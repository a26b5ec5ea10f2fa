"""A plain accelerate loop on two ranks: every stage against plain data parallel, and what surrounds the loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, Subset
from transformers import GPT2LMHeadModel

import hf_zero as zero
from tests.huggingface.accelerate_runs import (
    Run,
    accelerator_at,
    complete,
    descent,
    equals_data_parallel,
    rank_0_distance,
    start,
    train,
    weights,
)
from tests.kit.jobs.harness import (
    RANK,
    Tokens,
    files_under,
    gpt2,
    optimizer_distance,
    raised,
)

# ---- what surrounds the loop -----------------------------------------------------------------------------------------


def prepare_in_any_order() -> None:
    reference = complete(3)

    def run_with(prepare: Callable[[Accelerator, nn.Module, Any, Any, Any], Run]) -> float:
        accelerator, model = accelerator_at(3), gpt2()
        optimizer, scheduler = descent(model)
        before = list(optimizer.param_groups)
        run = prepare(accelerator, model, optimizer, DataLoader(Tokens(), batch_size=2), scheduler)
        if not (
            run.model is model
            and type(run.model) is GPT2LMHeadModel
            and (
                prepare is optimizer_of_a_sharded_model
                or run.optimizer.optimizer is optimizer
                and all(now is then for now, then in zip(optimizer.param_groups, before))
            )
        ):
            raise RuntimeError("the model, the optimizer or its groups are not the same objects")
        if accelerator.unwrap_model(run.model) is not model:
            raise RuntimeError("unwrap_model gave another model")
        train(run)
        return rank_0_distance(weights(run), reference["weights"])

    def optimizer_first(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, scheduler: Any) -> Run:
        scheduler, optimizer, loader, model = accelerator.prepare(scheduler, optimizer, loader, model)
        return Run(accelerator, model, optimizer, loader, scheduler)

    def one_by_one(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, scheduler: Any) -> Run:
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
        return Run(accelerator, model, optimizer, accelerator.prepare(loader), accelerator.prepare(scheduler))

    def twice(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, scheduler: Any) -> Run:
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.free_memory()
        again_model, again_optimizer = accelerator.prepare(model, optimizer)
        if again_model is not model or again_optimizer is not optimizer:
            raise RuntimeError("preparing again gave other objects")
        return Run(accelerator, model, optimizer, *accelerator.prepare(loader, scheduler))

    def optimizer_of_a_sharded_model(accelerator: Accelerator, model: Any, _: Any, loader: Any, __: Any) -> Run:
        model = accelerator.prepare(model)
        optimizer, scheduler = descent(model)
        return Run(accelerator, model, *accelerator.prepare(optimizer, loader, scheduler))

    def evaluated_first(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, scheduler: Any) -> Run:
        model = accelerator.prepare_model(model, evaluation_mode=True)
        with torch.no_grad():
            model(input_ids=Tokens()[0]["input_ids"][None])
        accelerator.free_memory()
        return Run(accelerator, *accelerator.prepare(model, optimizer, loader, scheduler))

    for work in (optimizer_first, one_by_one, twice, optimizer_of_a_sharded_model, evaluated_first):
        assert run_with(work) == 0.0, work.__name__


def clip_choices() -> None:
    """Parts of the parameters, values, the optimizer's own slices, and a mixture with a parameter that is not sharded."""
    out: dict[str, Any] = {}
    batch = {name: value[None] for name, value in Tokens()[RANK].items()}
    for name, stage in (("ddp", None), ("zero", 3)):
        run = start(stage)
        core = run.accelerator.unwrap_model(run.model)
        run.accelerator.backward(run.model(**batch).loss)
        clip = run.accelerator.clip_grad_norm_
        every = list(run.model.parameters())
        out[name] = {
            "all": float(clip(iter(every), float("inf"))),
            "one": float(clip([core.transformer.wte.weight], float("inf"))),
            "part": float(clip(core.transformer.h[0].parameters(), float("inf"))),
            "max": float(clip(every, float("inf"), norm_type=float("inf"))),
            "l1": float(clip(every, float("inf"), norm_type=1)),
        }
        if stage is not None:
            slices = [p for group in run.optimizer.param_groups for p in group["params"]]
            assert float(clip(slices, float("inf"))) == out[name]["all"]
        stranger = nn.Parameter(torch.zeros(3))
        stranger.grad = torch.full((3,), 0.2)
        out[name]["mixed"] = float(clip([*every, stranger], 0.3))
        run.accelerator.clip_grad_value_([*every, stranger], 1e-3)
        out[name]["stranger"] = float(stranger.grad.norm())
        out[name]["after clip_grad_value_"] = float(clip(run.model.parameters(), float("inf")))
        clip(run.model.parameters(), 1e-4)
        out[name]["after clip_grad_norm_"] = float(clip(run.model.parameters(), float("inf")))
    assert out["zero"] == pytest.approx(out["ddp"], rel=1e-5), out


def sync_triggers() -> None:
    """`trigger_sync_in_backward` after forwards under `no_sync`: the same gradients as data parallel's."""
    out = {}
    rows = Tokens()
    for name, stage in (("ddp", None), ("1", 1), ("3", 3)):
        run = start(stage)
        with run.accelerator.no_sync(run.model):
            losses = [run.model(**{k: v[None] for k, v in rows[2 * i + RANK].items()}).loss for i in range(2)]
            run.accelerator.backward(losses[0])
        with run.accelerator.trigger_sync_in_backward(run.model):
            run.accelerator.backward(losses[1])
        out[name] = float(run.accelerator.clip_grad_norm_(run.model.parameters(), float("inf")))
        run.optimizer.zero_grad()
    assert out == pytest.approx(dict.fromkeys(out, out["ddp"]), rel=1e-6), out


def no_sync_of_the_model() -> None:
    """As DDP has it; steps inside, by which ranks go apart, are refused."""
    losses = {}
    for name, stage in (("ddp", None), ("1", 1), ("3", 3)):
        run = start(stage)
        for number, batch in zip(range(4), run.loader):
            with contextlib.nullcontext() if number % 2 else run.model.no_sync():
                loss = run.model(**batch).loss
                run.accelerator.backward(loss)
            if number % 2:
                run.optimizer.step()
                run.optimizer.zero_grad()
        losses[name] = loss.item()
    assert losses == pytest.approx(dict.fromkeys(losses, losses["ddp"]), rel=1e-6), losses
    with LocalSGD(accelerator=run.accelerator, model=run.model, local_sgd_steps=2):
        run.accelerator.backward(run.model(**batch).loss)
        message = raised(run.optimizer.step)
    assert message.startswith("StateError: optimizer.step() inside model.no_sync()"), message
    run.optimizer.zero_grad()
    assert train(run)["losses"]


def uneven_run(stage: int | None, rows: int, **data: Any) -> Run:
    """Plain descent over `rows` rows in batches of 2 (4 where they are split), dealt to the ranks."""
    accelerator, model = accelerator_at(stage, dataloader_config=DataLoaderConfiguration(**data)), gpt2()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = DataLoader(Subset(Tokens(), range(rows)), batch_size=4 if data.get("split_batches") else 2)
    return Run(accelerator, *accelerator.prepare(model, optimizer, loader, scheduler))


def refused(work: Callable[[], Any], *words: str) -> None:
    message = raised(work)
    assert message.startswith("ConfigError: "), message
    assert all(word in message for word in (*words, "drop_last=True")), message
    assert "\n" not in message


def uneven_inputs(stage: int) -> None:
    """Where ranks would have different numbers of batches, every rank is told so at the call; elsewhere, as data parallel."""

    def joined(run: Run, *asked: bool) -> list[float]:
        with run.accelerator.join_uneven_inputs([run.model], *asked):
            return train(run, clip=None)["losses"]

    for data, rows, words in (
        ({}, 9, ("rank 0 would have 3 batches", "rank 1 2")),  # five batches
        ({}, 2, ("rank 0 would have 1 batches", "rank 1 0")),
        (
            {"split_batches": True},
            9,
            ("rank 0 would have 3 batches", "rank 1 2"),
        ),  # of the last batch, rank 1 gets nothing
    ):
        refused(partial(uneven_run, stage, rows, even_batches=False, **data), "even_batches=False", *words)
        run = uneven_run(stage, rows, **data)
        refused(partial(joined, run, False), "join_uneven_inputs(even_batches=False)", *words)
        assert len(joined(run, True)) == len(joined(run)) == -(-rows // 4), "accelerate fills up"
    for data, rows in (({}, 8), ({}, 7), ({"split_batches": True}, 8), ({"split_batches": True}, 11)):
        reference = uneven_run(None, rows, even_batches=False, **data)
        expected = train_only(reference)
        run = uneven_run(stage, rows, even_batches=False, **data)
        with run.accelerator.join_uneven_inputs([run.model], even_batches=False):
            assert train_only(run) == pytest.approx(expected, rel=1e-6)
        assert run.loader.batch_sampler.even_batches is False, "as it was"
        assert rank_0_distance(weights(run), weights(reference)) < 1e-6
    run = uneven_run(stage, 9)
    run.accelerator._dataloaders.clear()
    refused(partial(joined, run, False), "prepare the loader")


def train_only(run: Run) -> list[float]:
    """This rank's losses: of batches of different size, which `gather` does not take."""
    found = []
    for batch in run.loader:
        loss = run.model(**batch).loss
        run.accelerator.backward(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def overflow(stage: int) -> None:
    """fp16's scaler is torch's own. Rank 1 alone overflows: every rank must skip that step, and only that one."""
    accelerator = accelerator_at(stage, mixed_precision="fp16")
    # accelerate gives CPU ranks neither scaler nor autocast for fp16; these two lines give them what CUDA ranks get.
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    accelerator.native_amp = True
    model = gpt2()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    batch = {name: value[None] for name, value in Tokens()[RANK].items()}
    skipped, scales, moved, norms = [], [], [], []
    before = {name: t.clone() for name, t in model.state_dict().items()}
    for step in range(3):
        loss = model(**batch).loss
        if step == 1 and RANK == 1:
            loss = loss * float("inf")
        accelerator.backward(loss)
        if step < 2:
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        else:
            accelerator.clip_grad_value_(model.parameters(), 0.05)
            clipped = zero.full_gradient(next(model.parameters())).abs()
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(bool(accelerator.optimizer_step_was_skipped))
        scales.append(accelerator.scaler.get_scale())
        after = {name: t.clone() for name, t in model.state_dict().items()}
        moved.append(rank_0_distance(after, before))
        before = after
    assert skipped == [False, True, False]
    assert scales == [1024.0, 512.0, 512.0]
    assert moved[1] == 0.0
    assert RANK or min(moved[0], moved[2]) > 0.0
    assert norms[0] < 100  # of unscaled gradients, as are those clipped by value
    assert clipped.mean() < 0.025 < clipped.max() <= 0.05


def two_models() -> None:
    """Two models, two optimizers, one accelerator."""
    out: dict[str, Any] = {}
    for name, stage in (("ddp", None), ("zero", 3)):
        accelerator = accelerator_at(stage)
        one, two = gpt2(0), gpt2(1)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, two)]
        a, b, x, y = accelerator.prepare(one, two, *optimizers)
        batch = {k: v[None] for k, v in Tokens()[RANK].items()}
        for _ in range(2):
            accelerator.backward(a(**batch).loss + b(**batch).loss)
            norms = [float(accelerator.clip_grad_norm_(m.parameters(), 1.0)) for m in (a, b)]
            norms.append(float(accelerator.clip_grad_norm_([*a.parameters(), *b.parameters()], 0.5)))
            accelerator.clip_grad_value_([*a.parameters(), *b.parameters()], 1e-2)
            for optimizer in (x, y):
                optimizer.step()
                optimizer.zero_grad()
        out[name] = norms
    assert out["zero"] == pytest.approx(out["ddp"], rel=1e-6)
    accelerator.save_state("two")
    files = set(files_under(Path("two")))
    assert {"model_1/config.json", "model_1/model.safetensors", "optimizer_1/optimizer.json"} <= files
    pair: list[tuple[Any, Any]] = [(a, x), (b, y)]
    before = [({k: v.clone() for k, v in m.state_dict().items()}, o.state_dict()) for m, o in pair]
    accelerator.backward(a(**batch).loss + b(**batch).loss)
    for optimizer in (x, y):
        optimizer.step()
        optimizer.zero_grad()
    accelerator.load_state("two")
    after = [(dict(m.state_dict()), o.state_dict()) for m, o in pair]
    for now, then in zip(after, before):
        assert rank_0_distance(now[0], then[0]) == 0.0
        assert RANK or optimizer_distance(now[1], then[1]) == 0.0


WORK: dict[str, Callable[[], None]] = {
    # two micro-steps, clipping, two groups, a schedule, evaluation before and after
    **{f"stage {stage}": partial(equals_data_parallel, stage, 1e-6, 5e-6, 1e-7, accumulation=2) for stage in range(4)},
    **{f"unclipped {stage}": partial(equals_data_parallel, stage, 0.0, 0.0, 0.0, clip=None) for stage in (1, 3)},
    **{f"bf16 {stage}": partial(equals_data_parallel, stage, 1e-4, 1e-4, precision="bf16") for stage in (0, 2, 3)},
    "any order": prepare_in_any_order,
    "clip": clip_choices,
    "sync": sync_triggers,
    "no_sync of the model": no_sync_of_the_model,
    **{f"uneven {stage}": partial(uneven_inputs, stage) for stage in (0, 1, 3)},
    **{f"overflow {stage}": partial(overflow, stage) for stage in (1, 3)},
    "two models": two_models,
}


@pytest.mark.gloo
@pytest.mark.parametrize("name", WORK)
def test_on_two_ranks(on_two: Callable[..., Any], name: str) -> None:
    on_two(WORK[name])
