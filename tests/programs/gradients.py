"""Gradients that user code reads, edits, assigns or reduces."""

from __future__ import annotations

import contextlib
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from tests.models import Odd, mlp, sgd
from tests.oracle import Refused, Run, program
from tests.programs.usual import FP32, before_steps, is_sharded, same_on_ranks, see_gradients


@before_steps
def grad_edit(run: Run, t: int) -> None:
    for p in run.model.parameters():
        p.grad.mul_(0.5)


@before_steps
def reduced_by_hand(run: Run, t: int) -> None:
    """Averaged once more by the program itself, as loops without DDP do."""
    run.sync_gradients()
    for number, p in enumerate(run.model.parameters()):
        if run.world > 1:
            if number % 2:
                dist.all_reduce(p.grad, async_op=True).wait()
            else:
                dist.all_reduce(p.grad.data)
            p.grad /= run.world


@before_steps(only={"replicas": (1,)}, refused=(Refused(zero.StateError, "is this rank's slice", is_sharded),))
def slices_reduced_by_hand(run: Run, t: int) -> None:
    run.sync_gradients()
    for p in run.optimizer.param_groups[0]["params"]:
        if run.world > 1:
            dist.all_reduce(p.grad)
            p.grad /= run.world


class TwoSquares(nn.Module):
    """Parameters of one shape, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(16, 16) / 4), nn.Parameter(torch.randn(16, 16) / 4)
        self.c = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(x @ self.a).tanh() @ self.b


@program(reference="average")
def one_tensor_for_all_gradients(run: Run) -> None:
    """Also for two parameters at once; it is written again before the step."""
    model = run.trained_model(TwoSquares)
    gradient = torch.ones(16, 16)
    for t in range(3):
        for micro in range(3):
            waits = run.no_sync(model, defer=True) if micro == 1 else contextlib.nullcontext()
            with waits:
                out = model(run.inputs(3 * t + micro, 16, 16)) + model.a + model.b
                out.backward(gradient.fill_(0.01 * (micro + 1)))
                gradient.fill_(1)
        run.update()


@program(reference="average")
def one_tensor_for_all_coefficients(run: Run) -> None:
    """Each gradient is scaled by a number of its own, in the optimizer's groups."""
    model = run.build(mlp)
    run.shard(model, torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.05, momentum=0.9))
    coefficient = torch.ones(())
    for t in range(3):
        run.loss(t).backward()
        run.sync_gradients()
        for number, group in enumerate(run.optimizer.param_groups):
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(coefficient.fill_(0.1 * (number + 1)))
        run.update()


ORDERS = (2.0, 1.0, 3.0, float("inf"), -float("inf"))


@program(only={"ranks": (1, 2, 3), "tier": ("none", "cpu", "cpu/cpu")})
def norms_by_group(run: Run) -> None:
    """Of gradients in two orders at once, then of values computed from them. Ranks hold other numbers of a group's tensors."""
    model = run.build(mlp)
    biases, weights = ([p for p in model.parameters() if p.dim() == dims] for dims in (1, 2))
    run.shard(model, torch.optim.SGD([{"params": biases}, {"params": weights, "lr": 0.02}], lr=0.05))
    for step in range(2):
        run.loss(step).backward()
        run.sync_gradients()
        for group in run.optimizer.param_groups:
            norms = torch.tensor([[p.grad.norm(), p.grad.norm(1)] for p in group["params"]])
            run.see(norms[:, 0].norm(), "norm of a group")
            run.see(norms[:, 1].sum(), "sum of a group's magnitudes")
            for order in ORDERS[:-1]:
                run.see(torch.stack([(p.abs() * p.grad).norm(order) for p in group["params"]]).norm(order), f"{order}")
        run.update()


def _edit_alone(param: nn.Parameter, number: int) -> None:
    grad = param.grad
    grad.mul_(0.5)
    grad.data.add_(torch.full(grad.shape, 0.01 * number))
    grad.data = grad.data * 1.25
    if grad.dim():
        grad[0] = 0
        grad.view(-1)[-1:].mul_(3)
    grad.mul_((grad > -1e9).float()).mul_((torch.arange(grad.numel()) % 3 > 0).float().view(grad.shape))
    grad.copy_(grad.clone() * 1.5)


@program(more={"ranks": (1, 2, 3)})
def norms_and_edits(run: Run) -> None:
    """Norms of every order, as torch computes them and as the engine does; then what loops do with gradients."""
    model = run.trained_model(Odd)
    params = list(model.parameters())
    for step in range(3):
        run.loss(step).backward()
        see_gradients(run, model)
        for order in ORDERS if step == 0 else (2.0,):
            for foreach in (None, True, False):
                norm = nn.utils.get_total_norm([p.grad for p in params], order, foreach=foreach)
                run.see(norm, f"norm of order {order}, foreach={foreach}")
                run.see(same_on_ranks(run, norm), f"whether ranks have the same norm of order {order}")
            run.clip_grad_norm_(model, float("inf"), norm_type=order)
        nn.utils.clip_grad_norm_(params, 0.05, foreach=[None, True, False][step], error_if_nonfinite=True)
        run.clip_grad_norm_(model, float("inf"))
        if step == 1:
            nn.utils.clip_grad_value_(params, 0.01)
            nn.utils.clip_grad_norm_(model.last.parameters(), 0.01)
        run.see(params[0].grad.norm(), "norm of one gradient")
        run.see(params[1].grad.norm(1.0), "norm of another order, while others of the first are unread")
        run.see(params[1].grad.norm(), "norm of the first order")
        for number, p in enumerate(params):
            run.see((p.grad.shape, bool(p.grad.isfinite().all()), p.grad.numpy().shape), "shapes")
            run.see(p.grad.abs().max(), "largest element")
            run.see((p.grad**2).sum().sqrt(), "norm by squares")
            run.see(p.grad.detach().norm(), "norm of one gradient")
            run.see(len(repr(p.grad)) > 0 and len(p.grad.flatten().tolist()), "elements")
            with torch.no_grad():
                _edit_alone(p, number)
        grads = [p.grad for p in params]
        torch._foreach_mul_(grads, [0.5 + at for at in range(len(grads))])
        torch._foreach_add_(grads, torch._foreach_neg(grads), alpha=0.25)
        see_gradients(run, model, "edited gradient")
        run.update()
        run.see([p.grad is None for p in params], "cleared")
    other = [nn.Parameter(torch.zeros(3))]
    run.refuses(zero.LayoutError, "not of the sharded model", lambda: run.clip_grad_norm_(model, 1.0, parameters=other))


def _clear_all(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


def _clear_some(model: nn.Module) -> None:
    model.first.weight.grad = None
    model.scale.grad = None
    model.last.zero_grad()


@program(more={"ranks": (1, 2, 3)})
def cleared(run: Run) -> None:
    """After a backward, between a forward and its backward, before the step, and before a norm."""
    model = run.trained_model(Odd)
    for step, clear in enumerate((_clear_all, _clear_some, lambda m: m.zero_grad(set_to_none=False))):
        run.loss(5 * step).backward()
        clear(model)
        run.loss(5 * step + 1).backward()
        see_gradients(run, model, "gradient after a cleared one")
        run.update()
        run.loss(5 * step + 2).backward()
        loss = run.loss(5 * step + 3)
        clear(model)
        loss.backward()
        see_gradients(run, model, "gradient cleared before its backward")
        run.update()
    run.loss(20).backward()
    _clear_all(model)
    run.optimizer.step()
    run.loss(21).backward()
    _clear_some(model)
    run.see(nn.utils.clip_grad_norm_(model.parameters(), 0.02), "norm without the cleared ones")
    run.clip_grad_norm_(model, float("inf"))
    run.loss(22).backward()
    run.update()


def _assign(model: nn.Module) -> None:
    for number, param in enumerate(model.parameters()):
        if number != 1:
            param.grad = torch.linspace(-1, 1, param.numel()).view(param.shape).to(param.dtype)


@program(more={"ranks": (1, 2, 3)})
def assigned(run: Run) -> None:
    """In place of those of a backward, without one, and before one, which adds to them."""
    model = run.trained_model(Odd)
    run.loss(0).backward()
    _assign(model)
    run.see(nn.utils.clip_grad_norm_(model.parameters(), 0.5), "norm of assigned gradients")
    run.update()
    _assign(model)
    run.optimizer.step()
    _clear_all(model)
    run.loss(1).backward()
    _assign(model)
    run.loss(2).backward()
    see_gradients(run, model, "gradient added to an assigned one")
    model.first.weight.grad = (model.first.weight.grad * 0.5).to(model.first.weight.dtype)
    model.scale.grad = model.scale.grad.detach()
    run.update()


def _accumulate(run: Run, defer: bool) -> None:
    model = run.trained_model(Odd)
    for step in range(2):
        run.loss(4 * step).backward()
        with run.no_sync(model, defer=defer):
            run.loss(4 * step + 1).backward()
        run.loss(4 * step + 2).backward()
        run.see(nn.utils.clip_grad_norm_(model.parameters(), 0.05), "norm of three backwards")
        run.update()
    with run.no_sync(model, defer=defer):
        run.loss(9).backward()
    for param in model.parameters():
        param.grad.mul_(0.5)
    run.loss(10).backward()
    see_gradients(run, model, "gradient added to an edited one")
    run.update()


program(partial(_accumulate, defer=False), name="added_up", more={"ranks": (1, 2, 3)})
program(partial(_accumulate, defer=True), name="added_up_deferred", more={"ranks": (1, 2, 3)})


IN_BF16 = {"tells": lambda row: row.precision == "bf16"}
"""There the engine holds in float32 what has not travelled; in fp32 the parameters themselves have it."""


@program(**IN_BF16)
def inside_no_sync(run: Run) -> None:
    """Gradients that have not travelled are the rank's own."""
    model = run.trained_model(Odd)
    with run.no_sync(model, defer=True):
        run.loss(0).backward()
        see_gradients(run, model, "own gradient")
        run.see(nn.utils.clip_grad_norm_(model.parameters(), 0.05), "norm of the own gradients")
        see_gradients(run, model, "own clipped gradient")


@program(**IN_BF16)
def written_inside_no_sync(run: Run) -> None:
    """A rank's own gradients are replaced, cleared in part, made zeros; further backwards add to what is left."""
    model = run.build(mlp)
    opts = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (model[0], model[2:])]
    model = run.shard(model, opts)
    for step in range(4):
        with run.no_sync(model, defer=True):
            run.loss(3 * step).backward()
            first, second, *_, last = model.parameters()
            first.grad = first.grad * 0.5
            if step == 2:
                second.grad = None
            last.grad.copy_(torch.full_like(last.grad, 0.01 * (run.rank + 1)))
            see_gradients(run, model, "own gradients, written")
            for opt in opts[: 2 if step == 3 else 1] if step else ():
                opt.zero_grad(set_to_none=step == 1)
            see_gradients(run, model, "own gradients, cleared")
            run.loss(3 * step + 1).backward()
            see_gradients(run, model, "own gradients, added to")
        run.loss(3 * step + 2).backward()
        see_gradients(run, model, "mean gradients")
        for opt in opts:
            opt.step()
            opt.zero_grad()


@program(reference="average", **IN_BF16)
def reduced_after_no_sync(run: Run) -> None:
    """The engine's clipping reduces what has not travelled; it is edited, and a backward adds to it, also with a graph."""
    model = run.trained_model(Odd)
    with run.no_sync(model, defer=True):
        run.loss(0).backward()
    run.clip_grad_norm_(model, float("inf"))
    see_gradients(run, model, "gradient reduced after no_sync")
    for param in model.parameters():
        param.grad.mul_(0.5)
    run.forget_gradients()
    run.loss(1).backward(create_graph=run.setting.stage < 3)
    run.sync_gradients()
    see_gradients(run, model, "gradient added with a graph")
    run.see(nn.utils.clip_grad_norm_(model.parameters(), 0.05), "norm")
    run.update()


@program(reference="average", only={"deferred": (False,)})
def there_before_sharding(run: Run) -> None:
    """Ranks have other ones. They are clipped, stepped with, added to, and cleared."""
    for step, first in enumerate(("clip", "step", "backward", "clear")):
        model = mlp()
        optimizer = sgd(model)
        model(run.inputs(step)).square().mean().backward()
        model = run.shard(model, optimizer)
        if first == "backward":
            run.loss(step + 4).backward()
        elif first == "clear":
            optimizer.zero_grad()
            run.loss(step + 4).backward()
        elif first == "clip":
            run.clip_grad_norm_(model, 0.01)
        run.update()
        run.step(step + 8)


@program(tells=lambda row: row.optimizer_tier == "disk")
def edited_after_clipping(run: Run) -> None:
    """Some gradients change, and a backward adds to all, after clipping has scaled them."""
    model = run.trained_model(Odd)
    for step in range(2):
        run.loss(2 * step).backward()
        run.clip_grad_norm_(model, 0.05)
        model.first.weight.grad.mul_(3.0)
        model.last.weight.grad = torch.full_like(model.last.weight, 0.02)
        see_gradients(run, model, "gradients edited after clipping")
        run.forget_gradients()
        run.loss(2 * step + 1).backward()
        run.sync_gradients()
        run.see(nn.utils.clip_grad_norm_(model.parameters(), 0.05), "norm of both backwards")
        run.update()


@program(refused=(Refused(zero.StateError, "cleared since"),))
def kept_over_a_step(run: Run) -> None:
    model = run.trained_model(Odd)
    run.loss(0).backward()
    kept = model.last.weight.grad
    run.update()
    run.loss(1).backward()
    kept.norm()


@program(refused=(Refused(zero.StateError, "replaced or cleared since"),))
def exchanged(run: Run) -> None:
    """What a gradient was before `.grad` got another one: plain torch keeps it."""
    model = run.trained_model(Odd)
    run.loss(0).backward()
    one, other = model.first.bias, model.norm.weight
    one.grad, other.grad = other.grad, one.grad


@program(refused=(Refused(zero.StateError, "out="),))
def written_by_out(run: Run) -> None:
    model = run.trained_model(Odd)
    run.loss(0).backward()
    torch.mul(model.last.weight.grad, 2, out=torch.empty(3, 33))


@program(refused=(Refused(zero.StateError, "step_in_backward"),), only={"stage": (1, 2, 3)})
def clipped_after_the_update(run: Run) -> None:
    """With `step_in_backward` the weights are updated before the norm is known."""
    model = run.build(Odd)
    run.shard(model, sgd(model), step_in_backward=True)
    run.loss(0).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@program(only=FP32)
def stepped_by_hand(run: Run) -> None:
    """The loop updates the parameters itself."""
    model = run.trained_model(Odd)
    for step in range(3):
        run.loss(step).backward()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(param.grad, alpha=-0.05)
        _clear_all(model)


@program(reference="average")
def some_cleared_between_backwards(run: Run) -> None:
    """What a parameter had before is gone; what its neighbours had stays."""
    model = run.trained_model(TwoSquares)
    for t in range(3):
        model(run.inputs(2 * t, 16, 16)).square().mean().backward()
        for param in (model.a, model.c.bias)[: t + 1]:
            param.grad = None
        model(run.inputs(2 * t + 1, 16, 16)).square().mean().backward()
        run.update()


@program
def clipped_by_value(run: Run) -> None:
    """By the engine's own method: all parameters, then some, at both sides."""
    model = run.trained_model(TwoSquares)
    for t in range(3):
        model(run.inputs(t, 16, 16)).square().mean().backward()
        for bound, params in ((1e-2, [*model.parameters()]), (2e-3, [model.a, model.c.bias])):
            if (engine := run.engine_of(model)) is None:
                nn.utils.clip_grad_value_(params, bound)
            else:
                engine.clip_grad_value_(bound, None if len(params) > 2 else params)
        see_gradients(run, model)
        run.update()


@program(reference="average")
def hooks_scale_what_two_parameters_were_given(run: Run) -> None:
    """Autograd passes one tensor to both, and it is the program's own."""
    model = run.trained_model(TwoSquares)

    def halve(param: nn.Parameter) -> None:
        if param.grad is not None:
            param.grad.mul_(0.5)

    for param in (model.a, model.b):
        param.register_post_accumulate_grad_hook(halve)
    gradient = torch.ones(16, 16)
    for t in range(3):
        (model(run.inputs(t, 16, 16)) + model.a + model.b).backward(gradient)
        run.see(gradient, "the program's tensor")
        run.update()


@program(reference="average", tells=lambda row: row.stage in (1, 2) and row.precision == "bf16")
def small_gradients_after_a_large_one(run: Run) -> None:
    """What `no_sync` holds is added up in float32: bfloat16 would lose each of the small ones."""
    model = run.trained_model(lambda: nn.Linear(16, 16, bias=False))
    for _ in range(2):
        for scale in [1.0, *[0.0035] * 32]:
            with run.no_sync(model):
                (scale * model(torch.ones(1, 16)).sum()).backward()
        (0.0035 * model(torch.ones(1, 16)).sum()).backward()
        run.update()


@program(more={"ranks": (1, 2)})
def read_by_numpy(run: Run) -> None:
    """As loggers do; arrays that are kept keep their values."""
    model = run.trained_model(TwoSquares)
    kept = []
    for t in range(3):
        for micro in range(2):
            model(run.inputs(2 * t + micro, 16, 16)).square().mean().backward()
        kept.append([p.grad.numpy() for p in model.parameters()])
        run.update()
    for arrays in kept:
        run.see(torch.stack([torch.from_numpy(array).norm() for array in arrays]), "norms of kept arrays")
