"""Optimizers with a way of their own, and state that user code changes."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

import hf_zero as zero
from tests.models import adamw, sgd
from tests.oracle import Refused, Run, program
from tests.programs.architectures import Stack, on_tokens
from tests.programs.usual import FP32, after_steps, of_groups, trained_on


class AssigningSGD(torch.optim.Optimizer):
    """As optimizers are written by hand: parameters get other memory in each step, and one keeps the former."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    before = self.state[p].get("before", p.data)
                    self.state[p]["before"] = p.data
                    p.data = p.data - group["lr"] * p.grad.data + 0.5 * (p.data - before)


class Lookahead(torch.optim.Optimizer):
    """Around another optimizer, whose groups it shares."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.param_groups = base, base.param_groups
        for group in self.param_groups:
            group.setdefault("calls", 0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        for group in self.base.param_groups:
            group["calls"] += 1
            for p in group["params"] if group["calls"] % 2 == 0 else ():
                slow = self.state[p].setdefault("slow", p.clone())
                p.copy_(slow.lerp_(p, 0.5))


@after_steps(6, adamw)
def states_cleared(run: Run, t: int) -> None:
    if t == 1:
        run.optimizer.state.clear()
    if t == 3:
        run.optimizer.state = defaultdict(dict)


@after_steps(3, refused=(Refused(zero.StateError, "optimizer.state was asked for parameter '0.weight'"),))
def state_by_parameter(run: Run, t: int) -> None:
    """A mask over momentum, found by the model's own parameter."""
    state = run.optimizer.state[run.model[0].weight]
    if "momentum_buffer" in state:
        state["momentum_buffer"][::2] = 0


@program(reference="average", only=FP32)
def sam(run: Run) -> None:
    """Sharpness-aware: weights move along the gradient, and back before the step."""
    model = run.mlp()
    for step in range(3):
        run.loss(step).backward()
        run.sync_gradients()
        run.forget_gradients()
        with torch.no_grad():
            norm = torch.stack([param.grad.norm() for param in model.parameters()]).norm()
            moves = [param.grad * (0.05 / norm) for param in model.parameters()]
            for param, move in zip(model.parameters(), moves):
                param.add_(move)
        model.zero_grad()
        run.loss(step).backward()
        with torch.no_grad():
            for param, move in zip(model.parameters(), moves):
                param.sub_(move)
        run.update()


@trained_on(
    optimizer=lambda model: AssigningSGD(model.parameters()),
    loose=3.0,
    tells=lambda setting: setting.optimizer_tier == "none" and setting.precision == "fp32",
)
def assigning(run: Run, t: int) -> Tensor:
    return run.loss(t)


@trained_on(
    optimizer=lambda model: Lookahead(sgd(model)),
    refused=(
        Refused(
            zero.UnsupportedOptimizerError,
            "it steps by another optimizer \\(its 'base'\\)",
            lambda setting: setting.optimizer_tier != "none",
        ),
    ),
)
def lookahead(run: Run, t: int) -> Tensor:
    run.see(run.optimizer.param_groups[0]["calls"], "steps that the groups count")
    return run.loss(t)


@trained_on(optimizer=lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2), only={"replicas": (2,), **FP32})
def whole_matrices_in_replicas_of_one_rank(run: Run, t: int) -> Tensor:
    """Nothing is sharded: an optimizer that needs unsliced matrices runs at every stage."""
    return run.loss(t)


@program(more={"ranks": (1, 2)}, only=FP32, exact=True)
def given_back(run: Run) -> None:
    """After `detach` an optimizer and its schedule continue in plain training, and start again sharded, with their state."""
    model = run.build(functools.partial(Stack, tied=True))
    model.blocks[1].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    mine, names = list(optimizer.param_groups), {param: name for name, param in model.named_parameters()}
    sharded = run.shard(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(2):
        on_tokens(sharded, run.rank, step).backward()
        run.update()
        scheduler.step()
    run.refuses(zero.StateError, "is frozen", lambda: zero.full_gradient(model.blocks[1].up.weight))
    run.detach(sharded)
    run.detach(sharded)  # nothing more to undo
    run.see(
        all(a is b for a, b in zip(mine, optimizer.param_groups, strict=True)), "whether groups are the same objects"
    )
    run.see([[names[p] for p in group["params"]] for group in optimizer.param_groups], "parameters of groups")
    run.see([*optimizer.state_dict()["state"]], "order of states")
    for step in (2, 3):
        on_tokens(model, 0, step).backward()
        run.update()
        scheduler.step()
    model = run.shard(model, optimizer)
    on_tokens(model, run.rank, 4).backward()
    run.update()


@program(reference="average", only={"tier": ("none", "cpu", "cpu/cpu")})  # on disk groups have no values
def bound_after_evaluations(run: Run) -> None:
    """The model is evaluated without an optimizer, and between a forward and its backward."""
    model = run.build(functools.partial(Stack, tied=True))
    run.shard(model)

    def evaluate() -> None:
        with torch.no_grad():
            run.see(on_tokens(model, 0, 0), "evaluation")

    evaluate()
    run.bind(sgd(model))
    with torch.no_grad():
        torch._foreach_mul_(of_groups(run), 0.5)
    loss = on_tokens(model, run.rank, 0)
    evaluate()
    loss.backward()
    run.sync_gradients()
    run.see(torch.nn.utils.clip_grad_norm_(of_groups(run), 1e-3), "gradient norm")
    run.update()
    evaluate()
