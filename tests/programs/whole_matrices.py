"""Optimizers over whole matrices, each of which one rank owns: what loops do around the step, and what they do to the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.models import Mixed, adamw, token_loss
from tests.optimizers import Counts, Lars, Layerwise, MuonAndAdam, Shampoo
from tests.oracle import Run, program
from tests.programs.accessors import full_optimizer_state, full_parameter, set_full_optimizer_state
from tests.programs.usual import FP32
from tests.settings import Setting

TIERS = ("none", "cpu", "disk", "cpu/cpu", "disk/disk", "none/cpu", "cpu/disk")


def half_frozen() -> Mixed:
    model = Mixed()
    model.blocks[1].line.requires_grad_(False)
    return model


def loss_of(run: Run, model: Any, step: int) -> Tensor:
    rows = run.ids(step)
    return token_loss(model(rows), rows)


def one_step(run: Run, model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    loss = loss_of(run, model, step)
    loss.backward()
    run.see(loss, f"loss {step}")
    optimizer.step()
    optimizer.zero_grad()


@program(more={"ranks": (2, 3), "tier": TIERS, "debug": (False, True)})
def accumulated_and_clipped(run: Run) -> None:
    """Also by torch over the optimizer's groups, which hold the parameters that a rank owns."""
    model = run.build(half_frozen)
    optimizer = Lars(model.parameters())
    model = run.shard(model, optimizer)
    for step in range(3):
        with run.no_sync(model):
            loss_of(run, model, step).backward()
        loss_of(run, model, step + 7).backward()
        own = [p for group in optimizer.param_groups for p in group["params"]]
        run.see(nn.utils.clip_grad_norm_(own, 0.1), "torch's norm over the groups")
        if step:
            run.clip_grad_norm_(model, 0.05)
        else:
            run.see(nn.utils.clip_grad_norm_(model.parameters(), 0.05), "torch's norm")
        optimizer.step()
        optimizer.zero_grad()
    run.see(full_optimizer_state(run, model.head.weight, "m"), "the state of a tied parameter")
    set_full_optimizer_state(run, model.head.weight, "m", torch.ones(model.embed.weight.shape))
    run.see(full_optimizer_state(run, model.embed.weight, "m"), "the same by its other name")
    one_step(run, model, optimizer, 20)


@program(more={"precision": ("fp32", "bf16", "fp16"), "tier": TIERS})
def scaled(run: Run) -> None:
    """An overflow on one rank skips the step on all; unscaled by the loop or by the scaler; gradients are unscaled once."""
    model = run.build(half_frozen)
    optimizer = Lars(model.parameters())
    model = run.shard(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    for step, bad in enumerate([(), (1,), (), (0,), (), ()]):
        loss = loss_of(run, model, step) * (float("inf") if run.rank in bad else 1.0)
        scaler.scale(loss).backward()
        if step % 2 == 0:
            scaler.unscale_(optimizer)
            run.clip_grad_norm_(model, 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.see(scaler.get_scale(), "the scale")
        run.see(full_parameter(run, model.blocks[0].line.weight), "a weight")


@program(only=FP32)
def weights_and_gradients_written(run: Run) -> None:
    model = run.build(half_frozen)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    model = run.shard(model, optimizer)
    for step in range(3):
        with run.gathered(list(model.parameters()), modifier_rank=0), torch.no_grad():
            if run.rank == 0 or run.is_plain:
                model.embed.weight.mul_(0.5)
        loss_of(run, model, step).backward()
        run.sync_gradients()
        with torch.no_grad():
            model.embed.weight.grad.mul_(3.0)
        optimizer.step()
        optimizer.zero_grad()
        with run.unsharded(model), torch.no_grad():
            run.see(model(torch.arange(6)[None]), "looked at whole")


@program(reference="average", more={"ranks": (2, 3)})
def frozen_thawed_and_grown(run: Run, make: Callable[[], Any] = Mixed) -> None:
    """A part of two groups of other rules is frozen at first; another is frozen later."""
    model = run.build(make)
    late = list(model.blocks[1].parameters())
    for param in late:
        param.requires_grad_(False)
    optimizer = MuonAndAdam([p for p in model.parameters() if p.requires_grad])
    optimizer.add_param_group({"params": [p for p in late if p.dim() == 2], "use_muon": True})
    optimizer.add_param_group({"params": [p for p in late if p.dim() < 2], "use_muon": False})
    model = run.shard(model, optimizer)
    for step in range(6):
        if step == 2:
            for param in late:
                param.requires_grad_(True)
        if step == 4:
            model.blocks[0].requires_grad_(False)
        one_step(run, model, optimizer, step)
        for param in run.model.parameters() if make is not Mixed else ():
            run.see(zero.full_parameter(param), "a master")


@program(only=FP32, more={"ranks": (2, 3)})
def more_ranks_than_matrices(run: Run) -> None:
    """Ranks that own nothing step, are scaled down and look at the state all the same."""
    model = run.build(lambda: nn.Linear(16, 10, bias=False))
    optimizer = Lars(model.parameters())
    model = run.shard(model, optimizer)
    for step in range(3):
        model(run.inputs(step)).square().mean().backward()
        run.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.see(full_optimizer_state(run, model.weight, "m"), "its state")


@program(only=FP32, reference="average")
def bound_to_another(run: Run) -> None:
    """What was refused leaves no trace; from owners of matrices to slices, and back."""
    model = run.build(half_frozen)
    optimizer = Lars(model.parameters())
    model = run.shard(model, optimizer)
    if run.world > 1:
        classes = (torch.optim.AdamW, torch.optim.LBFGS)
        error = (zero.RankMismatchError, zero.UnsupportedOptimizerError)[min(run.rank, 1)]
        run.refuses(error, "", lambda: run.bind(classes[min(run.rank, 1)](model.parameters())))
    model.blocks[1].line.requires_grad_(True)
    optimizer.zero_grad()
    for step in range(2):
        one_step(run, model, optimizer, step)
    for first, build in ((10, adamw), (20, lambda model: Shampoo(model.parameters())), (30, adamw)):
        run.bind(optimizer := build(model))
        for step in range(first, first + 2):
            one_step(run, model, optimizer, step)


def _steps_in_backward(setting: Setting) -> bool:
    return setting.optimizer_tier != "none"


@program(accept=_steps_in_backward, more={"debug": (False, True)})
def stepped_in_backward(run: Run) -> None:
    model = run.build(half_frozen)
    optimizer = Layerwise(model.parameters())
    model = run.shard(model, optimizer, step_in_backward=True)
    for step in range(3):
        with run.no_sync(model):
            loss_of(run, model, step).backward()
        one_step(run, model, optimizer, step + 7)


@program(accept=_steps_in_backward, only={**FP32, "replicas": (1,), "kept": (False,), "deferred": (False,)})
def counted_in_backward(run: Run) -> None:
    """Every stretch of a step finds what was counted before the step."""
    for where in ("own", "group", "tensor"):
        for by_layer in (False, True):
            model = run.build(Mixed)
            optimizer = Counts(model.parameters(), where, by_layer)
            model = run.shard(model, optimizer, step_in_backward=True)
            for step in range(2):
                one_step(run, model, optimizer, step)
            run.see((optimizer.k, float(optimizer.param_groups[0]["k"])), f"counted in {where}, by layer: {by_layer}")
