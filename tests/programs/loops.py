"""Training loops: the plain one, accumulation, clipping, several forwards or backwards in a step."""

from __future__ import annotations

import torch
from torch import nn

import hf_zero as zero
from tests.models import adamw, bert, gpt2, ids, inputs, llama, mlp, sgd, t5
from tests.oracle import Run, program

EVERY_RANK = {"ranks": (1, 2, 3, 4)}


@program(more={**EVERY_RANK, "wire": ("none", "int8")}, exact=True)
def plain(run: Run) -> None:
    """Three layers of 15 features: spans that need padding on any number of ranks."""
    model = run.build(lambda: mlp(15))
    optimizer = sgd(model)
    model = run.shard(model, optimizer)
    for step in range(4):
        loss = model(inputs(run.rank, step, 4, 15)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.see(loss, "loss")


@program(more=EVERY_RANK)
def gpt2_clipped_and_accumulated(run: Run) -> None:
    model = run.build(gpt2)
    optimizer = adamw(model)
    model = run.shard(model, optimizer)
    for step in range(3):
        with run.no_sync(model):
            batch = ids(run.rank, 2 * step)
            (model(input_ids=batch, labels=batch).loss / 2).backward()
        batch = ids(run.rank, 2 * step + 1)
        (model(input_ids=batch, labels=batch).loss / 2).backward()
        run.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()


def _labelled(run: Run, model: nn.Module) -> None:
    optimizer = sgd(model)
    model = run.shard(model, optimizer)
    for step in range(3):
        batch = ids(run.rank, step)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        run.see(loss, "loss")
        run.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()


@program
def bert_with_a_frozen_layer(run: Run) -> None:
    _labelled(run, run.build(bert))


@program
def t5_shared_embedding(run: Run) -> None:
    _labelled(run, run.build(t5))


@program
def llama_grouped_heads(run: Run) -> None:
    _labelled(run, run.build(llama))


@program(more={"ranks": (1, 2), "wire": ("none", "int8"), "debug": (False, True)})
def default_device_elsewhere(run: Run) -> None:
    """The program has told torch to create tensors on another device (`torch.set_default_device`) than the model's."""
    layers = run.build(mlp)
    optimizer = sgd(layers)
    with torch.device("meta"):
        model = run.shard(layers, optimizer)
    for step in range(5):
        batch = inputs(run.rank, step)
        with torch.device("meta"):
            with run.no_sync(model):
                model(batch).square().mean().backward()
            model(batch).square().mean().backward()
            norm = run.clip_grad_norm_(model, 0.5)
            run.update()
            with torch.no_grad():
                layers[0].weight.data.mul_(0.75)
                layers[2].weight.mul_(0.75)
            if step == 1:
                run.save(model)
            if step == 3:
                run.load(model)
            if not run.is_plain and step == 2:
                for name, param in model.named_parameters():
                    whole = zero.full_parameter(param)
                    state = zero.full_optimizer_state(param, "momentum_buffer")
                    if whole.device != param.device or state is None or state.device != param.device:
                        raise AssertionError(f"{name} is on another device than the model")
                zero.verify(str(run.folder / "saved"))
        run.see(norm, "norm")
