"""Calls in an order that few loops have: between a backward and its step, inside `no_sync`, on parts, on one rank."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.models import WIDTH, mlp, sgd
from tests.oracle import Run, program
from tests.settings import is_sharded

TIERS = {"tier": ("none", "cpu", "cpu/cpu")}


@program(reference="average")
def frozen_and_cleared_after_a_forward(run: Run) -> None:
    model = run.mlp()
    run.loss(0).backward()
    run.optimizer.step()
    model[0].requires_grad_(False)
    loss = run.loss(1)
    for param in model.parameters():
        if param is model[2].weight:
            del param.grad
        else:
            param.grad = None
    run.forget_gradients()
    loss.backward()
    run.update()


class Extra(nn.Module):
    """One more parameter that takes part in the loss, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.unused, self.used = nn.Parameter(torch.ones(32)), nn.Parameter(torch.ones(160))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.used.mean()


@program(reference="average", only={"deferred": (False,)})
def parameters_join_between_backward_and_step(run: Run) -> None:
    def decaying(model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.layer.parameters(), lr=0.1, weight_decay=0.5, eps=1e-3)

    model = run.trained_model(Extra, decaying)
    run.loss(0).backward()
    run.optimizer.add_param_group({"params": [model.unused, model.used]})
    run.update()
    run.step(1)


@program(reference="average", tells=lambda row: row.stage < 2)
def groups_cleared_inside_no_sync(run: Run) -> None:
    model = run.mlp()
    with run.no_sync(model):
        run.loss(0).backward()
    for param in run.optimizer.param_groups[0]["params"]:
        param.grad = None
    run.forget_gradients()
    run.loss(1).backward()
    run.update()


class Skipping(nn.Module):
    """A part that evaluation uses in place of another, and one that a batch may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.more = mlp(depth=2), nn.Linear(WIDTH, WIDTH)
        self.head, self.other = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.register_buffer("note", torch.zeros(3))

    def forward(self, x: Tensor, skips: bool = False) -> Tensor:
        x = self.body(x)
        x = x if skips else self.more(x)
        return self.head(x) if self.training else self.other(x)


@program(reference="average", tells=lambda row: row.stage == 3)
def one_rank_evaluates_another_part(run: Run) -> None:
    model = run.trained_model(Skipping)
    for step in range(4):
        if step == 2:
            with run.unsharded(model):
                if run.rank == 0:
                    model.eval()
                    with torch.no_grad():
                        model(run.inputs(step))
                    model.train()
        run.step(step)


@program(reference="average")
def one_rank_writes_a_buffer_with_its_own_values(run: Run) -> None:
    model = run.trained_model(Skipping)
    for step in range(4):
        run.step(step)
        if run.rank == 0:
            model.note.zero_()


@program(reference="average", tells=lambda row: row.stage == 1)
def zeros_where_one_rank_has_no_gradient(run: Run) -> None:
    model = run.trained_model(Skipping)
    with run.no_sync(model):
        model(run.inputs(0), run.rank == 1).square().mean().backward()
    for param in model.parameters():
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    run.loss(1).backward()
    run.update()


@program(reference="average", only={"deferred": (False,)}, accept=lambda row: row.tier.partition("/")[0] != "disk")
def frozen_by_the_model_and_thawed_by_the_group(run: Run) -> None:
    model = run.build(lambda: mlp(depth=1))
    bias = model[0].bias
    rest = [param for param in model.parameters() if param is not bias]
    model = run.shard(model, torch.optim.SGD([{"params": rest}, {"params": [bias]}], lr=0.1))
    bias.requires_grad_(False)
    run.step(0)
    for param in run.optimizer.param_groups[1]["params"]:
        param.requires_grad_(True)
    run.step(1)


@program(reference="average", only={"tier": ("none", "cpu")}, tells=lambda row: row.stage in (1, 2))
def clamped_between_calls_of_a_part(run: Run) -> None:
    model = run.trained_model(lambda: nn.ModuleList([mlp()]))
    for step in range(3):
        loss = model[0](run.inputs(step)).square().mean()
        run.see(loss, "loss")
        loss.backward()
        run.update()
        with torch.no_grad():
            for param in run.optimizer.param_groups[0]["params"]:
                param.clamp_(-0.05, 0.05)


def _raise(_: Tensor) -> Tensor:
    raise ValueError("a hook of user code")


@program(reference="average")
def one_of_two_optimizers_is_cleared_after_a_backward_raised(run: Run) -> None:
    model = run.trained_model(Skipping, lambda m: [sgd(m.body), torch.optim.SGD(m.head.parameters(), lr=0.1)])
    first, second = run.trained[0].optimizers
    run.loss(0).backward()
    first.step()
    first.zero_grad()
    with model.more.register_forward_hook(lambda module, args, out: out.register_hook(_raise) and None):
        loss = run.loss(1)
    with contextlib.suppress(ValueError):
        loss.backward()
    first.zero_grad()
    run.refuses(zero.StateError, "those of earlier backwards", second.step)
    second.zero_grad()
    run.forget_gradients()
    run.loss(2).backward()
    first.step()
    second.step()


@program(reference="average", only={"stage": (1, 2)}, accept=is_sharded)
def loaded_after_ranks_wrote_other_values(run: Run) -> None:
    model = run.mlp()
    run.step(0)
    run.save(model)
    if not run.is_plain and run.rank == 0:
        with torch.no_grad():
            model[0].weight.mul_(2)
    run.refuses(zero.RankMismatchError, "is not on rank", lambda: run.loss(1).backward())
    model.zero_grad()
    run.forget_gradients()
    run.load(model)
    run.step(2)


@program(reference="average", only={"deferred": (False,)}, tells=lambda row: row.stage in (1, 2))
def parts_set_while_views_are_held(run: Run) -> None:
    model = run.mlp()
    held = [param.data for param in model.parameters()] if run.setting.stage < 3 else []
    for param in (model[0].weight, model[2].weight):
        if run.is_plain:
            param.data.mul_(0.5)
        else:
            zero.set_local_parameter(param, zero.local_parameter(param) * 0.5)
    if not run.is_plain:
        run.engine_of(model).refresh()
    run.loop(steps=2)
    del held
