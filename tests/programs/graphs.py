"""Unusual graphs: functional calls, second derivatives, batched gradients, custom functions, hooks, threads."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import hf_zero as zero
from tests.models import mlp
from tests.oracle import Refused, Run, program
from tests.programs.usual import FP32, trained_on


@trained_on()
def functional_call(run: Run, t: int) -> Tensor:
    params = dict(run.model.named_parameters())
    return torch.func.functional_call(run.model, params, (run.inputs(t, 4, 16),)).square().mean()


@trained_on()
def functional_scaled(run: Run, t: int) -> Tensor:
    params = {k: v * 1.5 for k, v in run.model.named_parameters()}
    return torch.func.functional_call(run.model, params, (run.inputs(t, 4, 16),)).square().mean()


@trained_on(more={"debug": (False, True)})
def vmap_forward(run: Run, t: int) -> Tensor:
    return torch.vmap(run.model)(run.inputs(t, 4, 3, 16)).square().mean()


@trained_on(refused=(Refused(zero.StateError, "inside torch.func.grad"),))
def func_grad(run: Run, t: int) -> Tensor:
    x = run.inputs(t, 4, 16)
    g = torch.func.grad(lambda y: run.model(y).square().sum())(x)
    return (g**2).mean() + run.model(x).square().mean()


@trained_on(refused=(Refused(zero.StateError, "inside torch.func.jvp"),))
def jvp(run: Run, t: int) -> Tensor:
    x = run.inputs(t, 4, 16)
    o, j = torch.func.jvp(run.model, (x,), (torch.ones_like(x),))
    return o.square().mean() + j.square().mean()


@trained_on()
def jacrev(run: Run, t: int) -> Tensor:
    jacobian = torch.autograd.functional.jacobian(
        lambda x: run.model(x).sum(0), run.inputs(t, 4, 16), create_graph=True
    )
    return jacobian.square().mean()


@trained_on()
def forward_mode(run: Run, t: int) -> Tensor:
    x = run.inputs(t, 4, 16)
    with forward_ad.dual_level():
        o = run.model(forward_ad.make_dual(x, torch.ones_like(x)))
        v, tg = forward_ad.unpack_dual(o)
        return v.square().mean() + (0 if tg is None else tg.square().mean())


@trained_on()
def save_on_cpu(run: Run, t: int) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return run.loss(t)


class Adjoint(torch.autograd.Function):
    """Backward runs the model again and differentiates it, as solvers of differential equations do."""

    @staticmethod
    def forward(ctx: Any, field: nn.Module, x: Tensor, *params: Tensor) -> Tensor:
        ctx.field = field
        with torch.no_grad():
            x = x + 0.1 * field(x)
        ctx.save_for_backward(x, *params)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, *params = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            mine, *others = torch.autograd.grad(ctx.field(x), [x, *params], 0.1 * grad)
        return None, grad + mine, *others


@trained_on(lambda: nn.ModuleDict({"field": mlp(depth=2), "head": nn.Linear(16, 2)}))
def adjoint(run: Run, t: int) -> Tensor:
    field = run.model.field
    return run.model.head(Adjoint.apply(field, run.inputs(t, 4, 16), *field.parameters())).square().mean()


@program(reference="average", more={"debug": (False, True)})
def jacobian_at_once(run: Run) -> None:
    """All rows in one backward, whose gradients are tensors of `vmap`'s."""
    model = run.mlp()

    def loss(t: int) -> Tensor:
        x = run.inputs(t, 2, 16).requires_grad_()
        rows = torch.eye(32).view(32, 2, 16)
        (g,) = torch.autograd.grad(model(x), x, rows, create_graph=True, is_grads_batched=True)
        return g.square().mean()

    run.loop(loss)


@program(reference="average")
def selective_checkpoints(run: Run) -> None:
    """Products are kept, the rest of a block is computed anew in backward."""
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    model = run.trained_model(lambda: nn.ModuleList(mlp(depth=1) for _ in range(3)))

    def loss(t: int) -> Tensor:
        x = run.inputs(t, 4, 16)
        for block in model:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x.square().mean()

    run.loop(loss)


@program(reference="average")
def inner_steps(run: Run) -> None:
    """Second-order meta-learning by hand."""
    model = run.mlp()

    def loss(t: int) -> Tensor:
        fast = {name: param.clone() for name, param in model.named_parameters()}
        for inner in range(2):
            inside = torch.func.functional_call(model, fast, (run.inputs(9 * t + inner, 4, 16),)).square().mean()
            grads = torch.autograd.grad(inside, list(fast.values()), create_graph=True)
            fast = {name: param - 0.1 * grad for (name, param), grad in zip(fast.items(), grads)}
        return torch.func.functional_call(model, fast, (run.inputs(t, 4, 16),)).square().mean()

    run.loop(loss)


@program(reference="average")
def partial_inputs_backward(run: Run) -> None:
    model = run.mlp()
    for t in range(4):
        run.loss(t).backward(inputs=list(model[0].parameters()) + list(model[2].parameters()))
        run.update()


@program(reference="average")
def post_acc_hook(run: Run) -> None:
    seen = []
    for p in run.mlp().parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(tuple(p.grad.shape)))
    run.loop()
    run.see(len(seen))


@program(reference="average", only=FP32, tells=lambda setting: setting.stage == 3)  # autocast would save copies
def written_after_it_was_saved(run: Run) -> None:
    """Refused as in plain PyTorch: the gradient needs the values from before."""
    model, x = run.mlp(), run.inputs(0)
    loss = model(x).square().mean()
    x.zero_()  # the next batch is read into the same memory
    run.refuses(RuntimeError, "modified by an inplace operation", loss.backward)
    run.optimizer.zero_grad()
    run.loop()


@program(reference="average")
def param_hook_scales(run: Run) -> None:
    for p in run.mlp().parameters():
        p.register_hook(lambda g: g * 0.5)
    run.loop()


@program(
    reference="average",
    refused=(Refused(zero.StateError, "optimizer.step\\(\\) was called inside a backward"),),
)
def stepped_in_backward(run: Run) -> None:
    """An optimizer's step in a hook, before the ranks' gradients are averaged."""
    for p in run.mlp().parameters():
        p.register_post_accumulate_grad_hook(lambda p: run.optimizer.step())
    run.loss(0).backward()


@program(reference="average")
def multigrad_hook(run: Run) -> None:
    params = list(run.mlp().parameters())
    torch.autograd.graph.register_multi_grad_hook(params, lambda gs: run.see(len(gs)))
    run.loop()


@program(reference="average")
def in_a_thread(run: Run) -> None:
    run.mlp()
    with ThreadPoolExecutor(1) as thread:
        run.loop(lambda t: thread.submit(run.loss, t).result())


@program(reference="average")
def backward_in_thread(run: Run) -> None:
    run.mlp()
    with ThreadPoolExecutor(1) as thread:
        for t in range(4):
            thread.submit(run.loss(t).backward).result()
            run.update()
