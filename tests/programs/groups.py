"""Gradients and weights of the optimizer's own parameters: `optimizer.param_groups`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.models import Odd, sgd
from tests.oracle import Refused, Run, program
from tests.programs.usual import (
    is_released,
    is_sharded,
    of_groups,
    same_on_ranks,
    see_gradients,
    see_weights,
)

clip = nn.utils.clip_grad_norm_


def norm_by_hand(run: Run, order: float = 2.0) -> Tensor:
    """As loops and optimizers compute it that know nothing of `torch.nn.utils`."""
    return torch.stack([p.grad.detach().data.norm(order) for p in of_groups(run)]).norm(order)


@program(more={"ranks": (1, 2, 3)})
def clipped_groups(run: Run) -> None:
    run.trained_model(Odd)
    _clipped_groups(run)


@program(more={"ranks": (1, 2, 3)})
def clipped_groups_of_one_parameter(run: Run) -> None:
    """Ranks have elements of different ones."""
    run.trained_model(Odd, lambda model: torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1))
    _clipped_groups(run)


@program(more={"ranks": (1, 2, 3)})
def clipped_groups_that_leave_a_parameter_out(run: Run) -> None:
    """It trains, and has a gradient that counts in no norm of the groups."""
    model = run.build(Odd)
    first, *others = model.parameters()
    run.shard(model, optimizer := torch.optim.SGD(others, lr=0.1))
    for step in range(3):
        run.loss(step).backward()
        for order in (2.0, float("inf")):
            run.clip_grad_norm_(model, float("inf"), norm_type=order, parameters=of_groups(run))
        run.clip_grad_norm_(model, 0.05, parameters=of_groups(run))
        run.clip_grad_norm_(model, float("inf"), parameters=[first])
        optimizer.step()
        model.zero_grad()


def _clipped_groups(run: Run) -> None:
    model = run.model
    for step in range(4):
        run.loss(step).backward()
        for order in (2.0, 1.0, 3.0, float("inf")):
            run.see(norm_by_hand(run, order), f"norm of order {order} by hand")
            run.clip_grad_norm_(model, float("inf"), norm_type=order)
            run.clip_grad_norm_(model, float("inf"), norm_type=order, parameters=of_groups(run))
            flat = [p.grad.view(-1) for p in of_groups(run) if p.grad is not None]
            run.see(nn.utils.get_total_norm(flat, order), f"norm of order {order} of flat gradients")
            norm = nn.utils.get_total_norm([p.grad for p in of_groups(run)], order, foreach=True)
            run.see(norm, f"norm of order {order}")
            run.see(same_on_ranks(run, norm), f"whether ranks have the same norm of order {order}")
        run.see(torch.stack([(1.0 * p.grad).norm(p=2) for p in of_groups(run)]).norm(p=2), "norm of products")
        run.see(clip(of_groups(run), 0.05, foreach=[None, True, False, None][step]), "norm")
        run.see(norm_by_hand(run), "clipped norm")
        run.clip_grad_norm_(model, 0.02)
        run.see(norm_by_hand(run), "norm clipped twice")
        if step == 1:
            nn.utils.clip_grad_value_(of_groups(run), 2e-3)
        if step == 2:
            run.loss(10).backward()
        if step == 3:
            torch._foreach_mul_([p.grad for p in of_groups(run)], 0.5)
            for p in of_groups(run):
                p.grad.add_(p.grad.clone(), alpha=0.25)
            sums = [(float(p.grad.sum()), sum(p.grad.reshape(-1).tolist())) for p in of_groups(run)]
            run.see(all(abs(one - other) < 1e-4 for one, other in sums), "whether sums agree")
            run.see(all(p.grad.numpy().shape == p.shape for p in of_groups(run)), "whether shapes agree")
        see_gradients(run, model, "clipped gradient")
        run.update()
        run.see(all(p.grad is None for p in of_groups(run)), "whether all are cleared")


@torch.no_grad()
def _scale_data(param: nn.Parameter) -> None:
    param.grad.data = param.grad.data * 0.25


@torch.no_grad()
def _clamp_a_copy(param: nn.Parameter) -> None:
    param.grad = param.grad.clone().clamp_(-0.01, 0.01)


def _clear(param: nn.Parameter) -> None:
    param.grad = None


@program
def replaced_gradients_of_groups(run: Run) -> None:
    """Assigned or cleared before a step, or before another backward."""
    model = run.trained_model(Odd)
    changes: tuple[Callable[[nn.Parameter], None], ...] = (_scale_data, _clamp_a_copy, _clear)
    for number, change in enumerate(changes):
        for again in (False, True):
            run.loss(4 * number + 2 * again).backward()
            for param in of_groups(run):
                change(param)
            if change is not _clear:
                see_gradients(run, model, f"gradient after {change.__name__}")
                run.see(norm_by_hand(run), f"norm after {change.__name__}")
            if again:
                run.loss(4 * number + 3).backward()
            run.update()


class Watched(torch.optim.SGD):
    """Its step is given plain gradients, and may fail."""

    fails = False

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        if any(grad is not None and type(grad) is not Tensor for grad in grads):
            raise TypeError("a gradient inside the step is of a class of its own")
        if self.fails:
            raise ValueError("this step fails")
        super().step()
        return loss


@program
def watched_steps(run: Run) -> None:
    """With a closure that clips; without; and once more after a step that failed."""
    run.trained_model(Odd, lambda m: Watched(m.parameters(), lr=0.1, momentum=0.9))
    for step in range(3):

        def closure(step: int = step) -> float:
            run.optimizer.zero_grad()
            run.loss(step).backward()
            run.see(clip(of_groups(run), 0.05), "norm")
            return 1.0

        if step == 1:
            run.see(run.optimizer.step(closure), "closure's loss")
            continue
        closure()
        if step == 2:
            run.optimizer.fails = True
            try:
                run.optimizer.step()
            except ValueError as error:
                run.see(str(error), "error")
            run.optimizer.fails = False
        run.optimizer.step()
        run.see(norm_by_hand(run), "norm after the step")
    run.optimizer.zero_grad()
    run.loss(4).backward()
    with run.no_sync(run.model):
        run.loss(5).backward()
    run.optimizer.zero_grad()


# Not at stages 0 and 1: there the groups have no gradients until a backward outside of `no_sync` or the step reduces them,
# and clipping them has no effect, silently.
@program(reference="average", only={"stage": (2, 3)})
def clipped_groups_after_no_sync(run: Run) -> None:
    run.trained_model(Odd)
    for step in range(2):
        with run.no_sync(run.model):
            run.loss(step).backward()
        run.sync_gradients()
        run.see(clip(of_groups(run), 0.05), "norm")
        run.update()


def _kept_over_a_step(run: Run, use: Callable[[Tensor], Tensor]) -> None:
    run.trained_model(Odd)
    run.loss(0).backward()
    run.optimizer.step()
    kept = of_groups(run)[0].grad
    run.optimizer.zero_grad()
    run.see(use(kept), "a kept gradient")


CLEARED = Refused(zero.StateError, "cleared since", lambda s: is_sharded(s) or s.tier != "none")


program(partial(_kept_over_a_step, use=Tensor.norm), name="gradient_of_a_group_kept_over_a_step", refused=(CLEARED,))
program(
    partial(_kept_over_a_step, use=Tensor.sum), name="sum_of_a_gradient_of_a_group_kept_over_a_step", refused=(CLEARED,)
)


@program
def loss_scaler_and_clipped_groups(run: Run) -> None:
    run.trained_model(Odd)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step in range(2):
        scaler.scale(run.loss(step)).backward()
        run.see(norm_by_hand(run), "norm of scaled gradients")
        scaler.unscale_(run.optimizer)
        run.see(clip(of_groups(run), 1e-3), "norm")
        run.clip_grad_norm_(run.model, float("inf"))
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()


# Not with an offloaded optimizer: there the groups have no gradients any more, and clipping them has no effect, silently.
@program(
    only={"stage": (1, 2, 3), "tier": ("none",)},
    refused=(Refused(zero.StateError, "step_in_backward", is_sharded),),
)
def clipped_groups_after_the_update(run: Run) -> None:
    """With `step_in_backward` the weights are updated before the norm is known."""
    model = run.build(Odd)
    run.shard(model, sgd(model), step_in_backward=True)
    run.loss(0).backward()
    clip(of_groups(run), 0.01)
    run.update()
    run.step(1)


# Weights of the groups --------------------------------------------------------------------------------------------------

IN_MEMORY = {"tier": ("none", "none/cpu")}
"""`only=IN_MEMORY`: the optimizer's tensors are read and written between steps."""


class Averaging(torch.optim.SGD):
    """As a schedule-free optimizer: its tensors are other points in training and in evaluation."""

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.mul_(0.5)

    @torch.no_grad()
    def train(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.mul_(2.0)


def averaging(model: nn.Module) -> torch.optim.Optimizer:
    return Averaging(model.parameters(), lr=0.05)


@program(only=IN_MEMORY)
def schedule_free(run: Run) -> None:
    model = run.trained_model(Odd, averaging)
    for step in range(2):
        run.step(step)
        run.optimizer.eval()
        with torch.no_grad():
            run.see(run.loss(9), "evaluation")
        see_weights(run, model, "averaged weight")
        run.optimizer.train()


@program(only=IN_MEMORY, tells=is_released)
def schedule_free_inside_unsharded(run: Run) -> None:
    """No forward comes between the optimizer's `eval()` and a read, or between `eval()` and `train()`."""
    model = run.trained_model(Odd, averaging)
    for step in range(2):
        run.step(step)
        run.optimizer.eval()
        with run.unsharded(model):
            see_weights(run, model, "averaged weight")
            if is_released(run.setting) and is_sharded(run.setting):  # else both are one memory
                weight = next(model.parameters())
                before = weight.detach().clone()
                with torch.no_grad():
                    weight.zero_()
                    run.refuses(zero.StateError, "neither write can count alone", run.optimizer.train)
                    weight.copy_(before)
            run.optimizer.train()
            with torch.no_grad():
                run.see(run.loss(9), "evaluation in training")
            run.optimizer.eval()
        run.optimizer.train()
        see_weights(run, model)


@program(only={**IN_MEMORY, "stage": (3,)})
def schedule_free_read_at_once(run: Run) -> None:
    """Where parameters are released, a read gathers what `eval()` wrote. Other stages show it in the next forward."""
    model = run.trained_model(Odd, averaging)
    for step in range(2):
        run.step(step)
        run.optimizer.eval()
        for param in model.parameters():
            run.see(param, "averaged weight")
        run.optimizer.train()


def _on_both_sides(run: Run, write: Callable[[nn.Parameter], object]) -> None:
    """Parameters that are copies, and the optimizer's tensors: neither write can count alone."""
    model = run.trained_model(Odd)
    run.step(0)
    with run.unsharded(model), torch.no_grad():
        model.last.weight.fill_(0.5)
        for param in of_groups(run):
            write(param)


def _doubled_elsewhere(param: nn.Parameter) -> None:
    param.data = param * 2.0


for _name, _write in {
    "written_on_both_sides": lambda param: param.mul_(2.0),
    "moved_on_both_sides": _doubled_elsewhere,
}.items():
    program(
        partial(_on_both_sides, write=_write),
        name=_name,
        only={**IN_MEMORY, "stage": (3,), "replicas": (1,)},
        refused=(Refused(zero.StateError, "neither write can count alone", is_released),),
    )


@program(only=IN_MEMORY)
def perturbed_groups(run: Run) -> None:
    """The optimizer's tensors are moved, and moved back before the step, as SAM does."""
    run.trained_model(Odd)
    for step in range(2):
        run.loss(step).backward()
        with torch.no_grad():
            for param in of_groups(run):
                param.mul_(1.5)
        run.optimizer.zero_grad()
        run.loss(step).backward()
        with torch.no_grad():
            for param in of_groups(run):
                param.div_(1.5)
        run.update()


@program(
    only={"stage": (1, 2), "tier": ("none",), "precision": ("bf16",)},
    refused=(Refused(zero.StateError, "through `.data`", is_sharded),),
)
def groups_scaled_through_data(run: Run) -> None:
    """Torch counts no such write, and the parameters are copies in another type."""
    run.trained_model(Odd)
    run.step(0)
    for param in of_groups(run):
        param.data.mul_(2)
    run.step(1)
