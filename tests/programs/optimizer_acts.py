"""What user code does to an optimizer with two groups between two steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import hf_zero as zero
from tests.models import Mixed, token_loss
from tests.optimizers import Layerwise
from tests.oracle import Refused, Run, program

Act = Callable[[Run, Any, torch.optim.Optimizer], None]


def backward(run: Run, model: Any, step: int) -> None:
    rows = run.ids(step)
    loss = token_loss(model(rows), rows)
    loss.backward()
    run.see(loss, f"loss {step}")


def acting(act: Act) -> Act:
    @functools.wraps(act)
    def run_it(run: Run) -> None:
        model = run.build(Mixed)
        groups = [[p for p in model.parameters() if (p.dim() > 1) == is_wide] for is_wide in (True, False)]
        options = {"lr": 3e-2, "weight_decay": 0.0}
        optimizer = torch.optim.AdamW(
            [{"params": groups[0]}, {"params": groups[1], **options}], lr=1e-2, eps=1e-3, weight_decay=0.1
        )
        model = run.shard(model, optimizer)
        for step in range(4):
            if step == 2:
                act(run, model, optimizer)
            backward(run, model, step)
            optimizer.step()
            optimizer.zero_grad()
            model.zero_grad()

    program(run_it)
    return act


@acting
def merge(run: Run, model: Any, optimizer: Any) -> None:
    first, second = optimizer.param_groups
    first["params"] = first["params"] + second["params"]
    del optimizer.param_groups[1]


@acting
def extend(run: Run, model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].extend(optimizer.param_groups.pop()["params"])


@acting
def swap(run: Run, model: Any, optimizer: Any) -> None:
    optimizer.param_groups.reverse()


@acting
def move_one(run: Run, model: Any, optimizer: Any) -> None:
    first, second = optimizer.param_groups
    moved = model.blocks[0].gate
    first["params"] = [*first["params"], moved]
    second["params"] = [p for p in second["params"] if p is not moved]


@acting
def list_anew(run: Run, model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p.dim() > 1][::-1]


@acting
def remove_first(run: Run, model: Any, optimizer: Any) -> None:
    for p in optimizer.param_groups[0]["params"]:
        optimizer.state.pop(p, None)  # torch cannot give the state of a parameter that is in no group
    del optimizer.param_groups[0]


@acting
def forget_states(run: Run, model: Any, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p in optimizer.state:
                del optimizer.state[p]


@acting
def empty_states(run: Run, model: Any, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p].clear()


@acting
def set_states(run: Run, model: Any, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            for key in [key for key in optimizer.state[p] if key != "step"]:
                optimizer.state[p][key] = torch.zeros_like(p)


@acting
def clip_in_a_hook(run: Run, model: Any, optimizer: Any) -> None:
    """One that is registered after the model was sharded."""

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.clamp_(-1e-4, 1e-4)

    optimizer.register_step_pre_hook(hook)


@acting
def clear_what_is_away(run: Run, model: Any, optimizer: Any) -> None:
    backward(run, model, 9)
    engine = run.engine_of(model)
    if engine is not None:
        engine.offload_states()
    run.refuses(zero.StateError, "reload_states", lambda: engine.clip_grad_norm_(1.0))
    optimizer.zero_grad()
    if engine is not None:
        engine.reload_states()


@acting
def hook_states(run: Run, model: Any, optimizer: Any) -> None:
    seen: list[Any] = []
    optimizer.register_state_dict_pre_hook(lambda optimizer: seen.append("before"))
    optimizer.register_state_dict_post_hook(lambda optimizer, state: {**state, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: seen.append(state.pop("more")))
    optimizer.register_load_state_dict_post_hook(lambda optimizer: seen.append("after"))
    optimizer.load_state_dict(optimizer.state_dict())
    run.see(seen, "hooks that ran")


@acting
def load_other_groups(run: Run, model: Any, optimizer: Any) -> None:
    state = optimizer.state_dict()
    state = {**state, "param_groups": [{**state["param_groups"][0], "params": [0, 1]}]}
    run.refuses(zero.CheckpointError, "groups of", lambda: optimizer.load_state_dict(state))


def _thawed(run: Run, build: Callable[[Any], torch.optim.Optimizer]) -> None:
    """A block is unfrozen with `add_param_group` half way."""
    model = run.build(Mixed)
    model.blocks[1].requires_grad_(False)
    optimizer = build([p for p in model.parameters() if p.requires_grad])
    model = run.shard(model, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(5):
        if step == 2:
            model.blocks[1].requires_grad_(True)
            optimizer.add_param_group({"params": list(model.blocks[1].parameters()), "lr": 5e-3})
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        backward(run, model, step)
        run.clip_grad_norm_(model, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@program(reference="average")
def thawed_with_a_schedule(run: Run) -> None:
    _thawed(run, lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-3))


@program(reference="average", refused=(Refused(zero.LayoutError, "needs full matrices"),))
def thawed_over_matrices(run: Run) -> None:
    _thawed(run, Layerwise)
