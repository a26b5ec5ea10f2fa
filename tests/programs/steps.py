"""What loops do around a step: keep gradients, clip in several ways, use closures, loss scalers and whole values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.models import LanguageModel, adamw, token_loss
from tests.oracle import Run, program
from tests.programs.accessors import (
    full_gradient,
    full_optimizer_state,
    full_parameter,
    set_full_gradient,
    set_full_optimizer_state,
    set_full_parameter,
)
from tests.programs.usual import FP32


def tokens(run: Run, model: Any, step: int) -> Tensor:
    rows = run.ids(step)
    return token_loss(model(rows), rows)


@program
def gradients_kept_over_steps(run: Run) -> None:
    """Clipped gradients are added to, and stepped with again."""
    model = run.build(LanguageModel)
    optimizer = adamw(model)
    model = run.shard(model, optimizer)
    for step in range(4):
        tokens(run, model, step).backward()
        if step != 1:
            run.clip_grad_norm_(model, 0.2)
            run.clip_grad_norm_(model, 0.1)
        optimizer.step()
        if step == 2:
            optimizer.step()
    run.clip_grad_norm_(model, float("inf"))


@program(only=FP32, loose=100.0)  # computed in float16
def scaled_under_its_own_autocast(run: Run) -> None:
    """User code's own autocast and scaler, which the engine was not told of."""
    model = run.build(LanguageModel)
    optimizer = adamw(model)
    model = run.shard(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for step in range(3):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = tokens(run, model, step)
        scaler.scale(loss * (float("inf") if step == 0 and run.rank == run.world - 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.see(scaler.get_scale(), "the scale")


class ByKeyword(torch.optim.SGD):
    """Its closure has no position."""

    def step(self, *, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


@program
def closures_by_keyword(run: Run) -> None:
    model = run.trained_model(LanguageModel, lambda model: ByKeyword(model.parameters(), lr=1e-1))
    for step in range(3):

        def closure(step: int = step) -> float:
            run.optimizer.zero_grad()
            loss = tokens(run, model, step)
            loss.backward()
            return loss.item()

        run.see(run.optimizer.step(closure=closure), "the closure's loss")


@program(only=FP32)
def whole_values(run: Run) -> None:
    """Read and written between backward and step, and behind steps."""
    model = run.build(LanguageModel)
    optimizer = adamw(model)
    model = run.shard(model, optimizer)
    some = list(model.parameters())[1::3]
    for step in range(3):
        tokens(run, model, step).backward()
        if step == 1:
            run.clip_grad_norm_(model, 0.1)
        for number, p in enumerate(some):
            gradient = full_gradient(run, p)
            run.see(gradient, "a gradient")
            if number % 2 and step != 2:
                set_full_gradient(run, p, gradient * 0.5)
        optimizer.step()
        for number, p in enumerate(some):
            for name in ("exp_avg", "exp_avg_sq"):
                run.see(full_optimizer_state(run, p, name), name)
            if number % 2 == step % 2:
                set_full_optimizer_state(run, p, "exp_avg_sq", torch.full(p.shape, 0.25))
                set_full_parameter(run, p, full_parameter(run, p) * 1.125)
        with run.gathered(some, modifier_rank=run.world - 1), torch.no_grad():
            run.see(some[0], "a gathered weight")
            if run.rank == run.world - 1 or run.is_plain:
                some[-1].add_(0.01)
        optimizer.zero_grad()
        run.see(full_gradient(run, some[0]), "a cleared gradient")


@program
def evaluated_around_steps(run: Run) -> None:
    """A look at the weights in the middle of a step, and right behind it."""
    model = run.build(LanguageModel)
    optimizer = adamw(model)
    model = run.shard(model, optimizer)
    rows = torch.arange(12).view(2, 6)
    for step in range(3):
        tokens(run, model, step).backward()
        with torch.no_grad():
            run.see(model(rows), "in the middle")
        run.clip_grad_norm_(model, 0.1)
        optimizer.step()
        model.eval()
        with torch.no_grad():
            run.see(model(rows), "behind")
        model.train()
        optimizer.zero_grad()


@program(reference="average", only={"deferred": (False,)})
def state_loaded_into_another_optimizer(run: Run) -> None:
    """A parameter joins in a group of its own; another optimizer with these groups takes the state over, on every rank."""
    model = run.build(LanguageModel)
    *most, last = model.parameters()
    optimizer = torch.optim.AdamW(most, lr=1e-2, eps=1e-3)
    model = run.shard(model, optimizer)
    for step in range(3):
        tokens(run, model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        if step == 0:
            optimizer.add_param_group({"params": [last], "lr": 2e-2})
    box = [optimizer.state_dict()]
    if run.world > 1:
        torch.distributed.broadcast_object_list(box)
    other = torch.optim.AdamW([{"params": most}, {"params": [last]}], lr=5e-3)
    run.bind(other)
    other.load_state_dict(box[0])
    for step in range(3, 5):
        tokens(run, model, step).backward()
        other.step()
        other.zero_grad()
