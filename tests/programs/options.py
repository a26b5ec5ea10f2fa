"""Options of `ZeroConfig` that no factor holds."""

from __future__ import annotations

import functools

import torch

from tests.models import LanguageModel, adamw, mlp, sgd, token_loss
from tests.oracle import Run, program
from tests.programs.accessors import full_gradient
from tests.programs.branches import Rare
from tests.programs.usual import FP32

RANKS = {"ranks": (2, 4)}


@program(more=RANKS, only=FP32, loose=100.0)
def gradients_reduced_in_bfloat16(run: Run) -> None:
    """Off by bfloat16's rounding, half a percent, hence `loose`."""
    model = run.build(functools.partial(LanguageModel, tied=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model = run.shard(model, optimizer, reduce_dtype="bfloat16")
    for step in range(3):
        tokens = run.ids(step)
        token_loss(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


@program(more=RANKS, accept=lambda setting: setting.optimizer_tier in ("cpu", "disk"))
def steps_in_backward(run: Run) -> None:
    """Offloaded units are updated in backward. All backwards of a step but the last are inside `no_sync`."""
    model = run.build(functools.partial(LanguageModel, tied=True, root=True))
    optimizer = adamw(model)
    model = run.shard(model, optimizer, step_in_backward=True)
    for step in range(4):
        with run.no_sync(model):
            tokens = run.ids(2 * step)
            token_loss(model(tokens), tokens).backward()
        tokens = run.ids(2 * step + 1)
        loss = token_loss(model(tokens), tokens)
        loss.backward()
        run.see(loss, "loss")
        optimizer.step()
        optimizer.zero_grad()


@program(reference="average", only={"stage": (1, 2, 3), "tier": ("cpu", "disk", "cpu/cpu")})
def steps_in_backward_what_one_rank_uses(run: Run) -> None:
    model = run.build(Rare)
    run.shard(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), step_in_backward=True)
    for step in range(3):
        model(run.inputs(step, 3, 32), rare=step == 0, shift=run.rank == step % run.world).square().mean().backward()
        run.update()


@program(only={"precision": ("fp32",)}, reference="average", loose=50.0)
def float16_holds_the_mean(run: Run) -> None:
    """And not the sum of the ranks' gradients."""
    model = run.build(mlp)
    run.shard(model, sgd(model), reduce_dtype="float16")
    (model[:-1](run.inputs(0, 1, 16)) * 50_000.0).sum().backward()
    run.see(full_gradient(run, model[-2].bias), "a gradient")
    model.zero_grad()
    run.forget_gradients()
