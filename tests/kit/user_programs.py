"""Small programs as people write them, each right under data parallel training.

A program builds a model and an optimizer, wraps them (`Run.wrap`) and trains a few steps in a way of its own. `seen` is what it
looked at. As the reference it runs without hf_zero: `Run` averages its gradients over the ranks before they are used.

Most are the usual loop with one thing of their own: the model (`MODELS`), the loss (`trained_on`), what is done with gradients
before a step (`before_steps`) or with the model after it (`after_steps`, `after_two_steps`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import hf_zero as zero

Build = Callable[[], nn.Module]
Optimize = Callable[[nn.Module], torch.optim.Optimizer]
Loss = Callable[["Run", int], Tensor]
Act = Callable[["Run", int], Any]

PROGRAMS: dict[str, Callable[[Run], None]] = {}


class Run:
    """One program's run.

    Args:
        settings: of `ZeroConfig`; None: the reference.
    """

    def __init__(self, settings: dict[str, Any] | None) -> None:
        self.settings = settings
        self.engine: zero.Engine | None = None
        self.seen: Any = None
        self._averaged = False

    def wrap(self, model: Any, optimizer: torch.optim.Optimizer) -> Any:
        self.model: Any = model
        self.optimizer = optimizer
        if self.settings is not None:
            self.engine = zero.shard(model, optimizer, zero.ZeroConfig(**self.settings))
            return model
        optimizer.register_step_pre_hook(lambda *_: self.sync())
        optimizer.register_step_post_hook(lambda *_: setattr(self, "_averaged", False))
        return model

    def mlp(self, optimizer: Optimize | None = None, depth: int = 3) -> Any:
        model = mlp(depth=depth)
        return self.wrap(model, (optimizer or sgd)(model))

    def sync(self) -> None:
        """Before gradients are looked at or used: those of the reference are averaged."""
        if self.settings is not None or self._averaged or not dist.is_initialized():
            return
        self._averaged = True
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
                    dist.all_reduce(grad)
                    param.grad = grad / dist.get_world_size()

    def forget_sync(self) -> None:
        """Other gradients are next."""
        self._averaged = False

    def clip(self, norm: float) -> Tensor:
        self.sync()
        if self.engine is not None:
            return self.engine.clip_grad_norm_(norm)
        return nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def see(self, value: Any, digits: int = 4) -> None:
        self.seen = [*(self.seen or ()), round(float(value), digits)]

    def plain(self, step: int) -> Tensor:
        return self.model(inputs(step, 4, 16)).square().mean()

    def update(self, set_to_none: bool = True) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none)

    def step(self, step: int) -> None:
        self.plain(step).backward()
        self.update()

    def loop(self, loss: Callable[[int], Tensor] | None = None, steps: int = 4) -> None:
        for step in range(steps):
            (loss or self.plain)(step).backward()
            self.update()


def program(function: Callable[[Run], None]) -> Callable[[Run], None]:
    PROGRAMS[function.__name__] = function
    return function


def looped(run: Run, build: Build, optimizer: Optimize, loss: Loss, steps: int) -> None:
    model = build()
    run.wrap(model, optimizer(model))
    run.loop(lambda t: loss(run, t), steps)


def trained_on(build: Build | None = None, optimizer: Optimize | None = None, steps: int = 4) -> Callable[[Loss], None]:
    """The usual loop with this loss; with `mlp` and `sgd` where nothing else is said."""

    def register(loss: Loss) -> None:
        PROGRAMS[loss.__name__] = functools.partial(
            looped, build=build or mlp, optimizer=optimizer or sgd, loss=loss, steps=steps
        )

    return register


def before_steps(act: Act) -> None:
    def run(run: Run) -> None:
        run.mlp()
        for t in range(3):
            run.plain(t).backward()
            act(run, t)
            run.update()

    PROGRAMS[act.__name__] = run


def after_steps(steps: int, optimizer: Optimize | None = None) -> Callable[[Act], None]:
    def register(act: Act) -> None:
        def run(run: Run) -> None:
            run.mlp(optimizer)
            for t in range(steps):
                run.step(t)
                act(run, t)

        PROGRAMS[act.__name__] = run

    return register


def after_two_steps(act: Callable[[Any], None]) -> None:
    """What is done with the model then, before a third."""

    @after_steps(3)
    @functools.wraps(act)
    def run(run: Run, t: int) -> None:
        if t == 1:
            act(run.model)


def rank_here() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(step: int, *shape: int) -> Tensor:
    """Other ones on each rank."""
    return torch.randn(*shape, generator=generator(1000 * step + rank_here()))


def bags(step: int) -> Tensor:
    return torch.randint(0, 20, (4, 5), generator=generator(step * 7 + rank_here()))


def mlp(width: int = 16, depth: int = 3) -> nn.Sequential:
    return nn.Sequential(*[module for _ in range(depth) for module in (nn.Linear(width, width), nn.Tanh())])


def deep() -> nn.Sequential:
    return mlp(depth=4)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


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
                    p.data = p.data - group["lr"] * p.grad.data + 0.1 * (p.data - before)


class Lookahead(torch.optim.Optimizer):
    """Around another optimizer, whose groups it shares."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.param_groups, self.calls = base, base.param_groups, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.calls += 1
        for group in self.param_groups if self.calls % 2 == 0 else ():
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                p.copy_(slow.lerp_(p, 0.5))


# Models -----------------------------------------------------------------------------------------------------------------


class LayersLeftOut(nn.Module):
    """Lists with None where a layer is optional, as x-transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([None if n else nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 16), nn.Tanh()), None])
            for n in range(3)
        )
        self.heads = nn.ModuleDict({"one": nn.Linear(16, 4), "other": None})

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer, _ in self.layers:
            x = x + layer(x if norm is None else norm(x))
        return self.heads["one"](x)


class TransposedTie(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 8, bias=False)
        self.b = mlp(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.b(self.a(x)), self.a.weight.t())


class Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m = mlp()
        self.m[0].double()

    def forward(self, x: Tensor) -> Tensor:
        return self.m[1:](self.m[0](x.double()).float())


class KeepsInContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.w = w
        ctx.x = x
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        return g @ ctx.w, g.t() @ ctx.x


class CustomFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(KeepsInContext.apply(x, part.weight))
        return x


class CompiledInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = mlp()
        self.f = None
        self.b = mlp()

    def forward(self, x: Tensor) -> Tensor:
        if self.f is None:
            self.f = torch.compile(lambda y: torch.tanh(self.b(y)) * 2, backend="eager")
        return self.f(self.a(x))


def with_views_of_one_tensor() -> nn.Module:
    base = torch.randn(2, 16, 16) * 0.1
    model = mlp()
    model[0].weight = nn.Parameter(base[0])
    model[2].weight = nn.Parameter(base[1])
    return model


def pruned() -> nn.Module:
    model = mlp()
    torch.manual_seed(1)
    prune.l1_unstructured(model[0], "weight", 0.5)
    return model


def between(first: nn.Module, last: nn.Module) -> nn.Module:
    return nn.Sequential(first, nn.Tanh(), last)


MODELS: dict[str, tuple[Build, Optimize]] = {
    "layers_left_out": (LayersLeftOut, adam),
    "transposed_tie": (TransposedTie, adam),
    "mixed_dtypes": (Doubles, adam),
    "custom_fn_ctx_attr": (CustomFunctions, sgd),
    "compile_in_module": (CompiledInside, sgd),
    "view_param": (with_views_of_one_tensor, sgd),
    "share_memory": (lambda: mlp().share_memory(), sgd),
    "pruned": (pruned, sgd),
    "jit_script_sub": (lambda: between(torch.jit.script(nn.Linear(16, 16)), nn.Linear(16, 16)), sgd),
    "weightnorm": (lambda: between(*(parametrizations.weight_norm(nn.Linear(16, 16)) for _ in range(2))), sgd),
    "weightnorm_old": (lambda: between(*(nn.utils.weight_norm(nn.Linear(16, 16)) for _ in range(2))), sgd),
    "orthogonal": (lambda: between(parametrizations.orthogonal(nn.Linear(16, 16)), nn.Linear(16, 4)), sgd),
}
PROGRAMS.update(
    (name, functools.partial(looped, build=build, optimizer=optimizer, loss=Run.plain, steps=4))
    for name, (build, optimizer) in MODELS.items()
)

PROGRAMS["assigning_optimizer"] = functools.partial(
    looped, build=mlp, optimizer=lambda model: AssigningSGD(model.parameters()), loss=Run.plain, steps=4
)
PROGRAMS["lookahead"] = functools.partial(
    looped, build=mlp, optimizer=lambda model: Lookahead(sgd(model)), loss=Run.plain, steps=4
)

# Losses -----------------------------------------------------------------------------------------------------------------


@trained_on(
    lambda: nn.ModuleDict({"r": nn.LSTM(8, 16, 2, batch_first=True, bidirectional=True), "h": nn.Linear(32, 3)}), adam
)
def lstm(run: Run, t: int) -> Tensor:
    return run.model.h(run.model.r(inputs(t, 2, 5, 8))[0]).square().mean()


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.LSTMCell(8, 16)
        self.h = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = None
        for _ in range(4):
            h = self.c(x, h)
            x = self.h(h[0])
        return x


@trained_on(Cells, adam)
def lstm_cell(run: Run, t: int) -> Tensor:
    return run.model(inputs(t, 3, 8)).square().mean()


@trained_on(lambda: between(*(parametrizations.spectral_norm(nn.Linear(16, 16)) for _ in range(2))))
def spectral(run: Run, t: int) -> Tensor:
    return run.model(torch.ones(4, 16)).square().mean()


@trained_on(lambda: between(nn.utils.spectral_norm(nn.Linear(16, 16)), nn.Linear(16, 16)))
def spectral_old(run: Run, t: int) -> Tensor:
    return run.model(torch.ones(4, 16)).square().mean()


@trained_on()
def functional_call(run: Run, t: int) -> Tensor:
    params = dict(run.model.named_parameters())
    return torch.func.functional_call(run.model, params, (inputs(t, 4, 16),)).square().mean()


@trained_on()
def functional_scaled(run: Run, t: int) -> Tensor:
    params = {k: v * 1.5 for k, v in run.model.named_parameters()}
    return torch.func.functional_call(run.model, params, (inputs(t, 4, 16),)).square().mean()


@trained_on()
def vmap_forward(run: Run, t: int) -> Tensor:
    return torch.vmap(run.model)(inputs(t, 4, 3, 16)).square().mean()


@trained_on()
def func_grad(run: Run, t: int) -> Tensor:
    x = inputs(t, 4, 16)
    g = torch.func.grad(lambda y: run.model(y).square().sum())(x)
    return (g**2).mean() + run.model(x).square().mean()


@trained_on()
def jvp(run: Run, t: int) -> Tensor:
    x = inputs(t, 4, 16)
    o, j = torch.func.jvp(run.model, (x,), (torch.ones_like(x),))
    return o.square().mean() + j.square().mean()


@trained_on()
def jacrev(run: Run, t: int) -> Tensor:
    jacobian = torch.autograd.functional.jacobian(lambda x: run.model(x).sum(0), inputs(t, 4, 16), create_graph=True)
    return jacobian.square().mean()


@trained_on()
def gradient_penalty(run: Run, t: int) -> Tensor:
    x = inputs(t, 4, 16).requires_grad_()
    loss = run.model(x).square().mean()
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + g.square().sum()


@trained_on()
def forward_mode(run: Run, t: int) -> Tensor:
    x = inputs(t, 4, 16)
    with forward_ad.dual_level():
        o = run.model(forward_ad.make_dual(x, torch.ones_like(x)))
        v, tg = forward_ad.unpack_dual(o)
        return v.square().mean() + (0 if tg is None else tg.square().mean())


@trained_on(lambda: nn.Sequential(nn.EmbeddingBag(20, 16), nn.Linear(16, 4)), adam)
def embedding_bag(run: Run, t: int) -> Tensor:
    return run.model(bags(t)).square().mean()


@trained_on(lambda: nn.Sequential(nn.Embedding(20, 16, sparse=True), nn.Linear(16, 4)), plain_sgd)
def embedding_sparse(run: Run, t: int) -> Tensor:
    return run.model(bags(t)).square().mean()


@trained_on(lambda: nn.Sequential(nn.Embedding(20, 16, max_norm=1.0), nn.Linear(16, 4)), plain_sgd)
def embedding_maxnorm(run: Run, t: int) -> Tensor:
    return run.model(torch.arange(20)).square().mean()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8, dtype=torch.cfloat) * 0.1)
        self.parts = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.parts((x.to(torch.cfloat) @ self.w).abs())


@trained_on(Complex, adam)
def complex_params(run: Run, t: int) -> Tensor:
    return run.model(inputs(t, 4, 8)).square().mean()


def with_empty_ones() -> nn.Module:
    model = mlp()
    model.register_parameter("e", nn.Parameter(torch.zeros(0, 4)))
    model.register_parameter("none", None)
    return model


@trained_on(with_empty_ones)
def zero_size(run: Run, t: int) -> Tensor:
    return nn.Sequential.forward(run.model, inputs(t, 4, 16)).square().mean()


@trained_on()
def save_on_cpu(run: Run, t: int) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return run.plain(t)


@trained_on(deep)
def sub_call(run: Run, t: int) -> Tensor:
    return run.model[:2](inputs(t, 4, 16)).square().mean() + run.model[4](inputs(t + 1, 4, 16)).square().mean()


@trained_on(deep)
def a_part_after_a_look(run: Run, t: int) -> Tensor:
    with torch.no_grad():
        run.model[0].weight.mul_(0.99)
    return run.model[:2](inputs(t, 4, 16)).square().mean() + run.model[2](inputs(t + 1, 4, 16)).square().mean()


@trained_on(deep)
def weight_reads(run: Run, t: int) -> Tensor:
    return run.plain(t) + 0.1 * sum(p.square().sum() for p in run.model.parameters())


@trained_on(deep)
def weight_reads_before(run: Run, t: int) -> Tensor:
    return 0.1 * sum(p.abs().sum() for p in run.model.parameters()) + run.plain(t)


@trained_on(deep)
def loss_weights_only(run: Run, t: int) -> Tensor:
    return 0.1 * sum(p.abs().sum() for p in run.model.parameters())


@trained_on()
def views_in_a_graph(run: Run, t: int) -> Tensor:
    return run.plain(t) + sum((p.view(-1) * p.detach().view(-1)).sum() for p in run.model.parameters())


@trained_on()
def attributes_in_a_graph(run: Run, t: int) -> Tensor:
    return 0.1 * sum((p.T @ p).sum() for p in run.model.parameters() if p.dim() == 2) + run.plain(t)


@trained_on()
def looks_then_graphs(run: Run, t: int) -> Tensor:
    """What was gathered for a look is there for the graph that is made next, before the forward that comes between."""
    with torch.no_grad():
        for p in run.model.parameters():
            run.see(p.norm(), 3)
    last = list(run.model.parameters())[-2]
    penalty = last.square().sum() + (last.T @ last).sum()
    return run.plain(t) + 0.1 * penalty


class PenaltyInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = deep()

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).square().mean() + 0.01 * sum(p.abs().sum() for p in self.parameters())


@trained_on(PenaltyInForward)
def l1_in_forward(run: Run, t: int) -> Tensor:
    return run.model(inputs(t, 4, 16))


class ReadAfterUse(nn.Module):
    """A forward that reads the weights of a module just after that has run; whether others run before it, or after it."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.read, self.others, self.is_last = nn.Linear(16, 16), mlp(), is_last

    def forward(self, x: Tensor) -> Tensor:
        h = self.read(self.others(x) if self.is_last else x)
        penalty = self.read.weight.square().sum() + sum(p.abs().sum() for p in self.read.parameters())
        return (h if self.is_last else self.others(h)).square().mean() + 0.1 * penalty


PAST_LEARNING = 8
"""Steps of programs that are to be right, too, when saved tensors are not looked at any more."""


@trained_on(lambda: ReadAfterUse(False), steps=PAST_LEARNING)
def read_in_mid_forward(run: Run, t: int) -> Tensor:
    return run.model(inputs(t, 4, 16))


@trained_on(lambda: ReadAfterUse(True), steps=PAST_LEARNING)
def read_before_an_evaluation(run: Run, t: int) -> Tensor:
    loss = run.model(inputs(t, 4, 16))
    with torch.no_grad():
        run.see(run.model(inputs(t + 20, 4, 16)), 3)
    return loss


@trained_on(deep, steps=PAST_LEARNING)
def penalty_between_forwards(run: Run, t: int) -> Tensor:
    loss = run.plain(t) + 0.1 * sum(p.square().sum() for p in run.model.parameters())
    return loss + run.plain(t + 20)


@trained_on(deep)
def last_forward_without_graph(run: Run, t: int) -> Tensor:
    """On one of the ranks: the others' last forward has one."""
    loss = run.plain(t)
    with torch.set_grad_enabled(rank_here() == 0):
        run.see(run.plain(t + 20), 3)
    return loss


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
    return run.model.head(Adjoint.apply(field, inputs(t, 4, 16), *field.parameters())).square().mean()


# Gradients --------------------------------------------------------------------------------------------------------------


@before_steps
def grad_edit(run: Run, t: int) -> None:
    for p in run.model.parameters():
        p.grad.mul_(0.5)


@before_steps
def grad_assign(run: Run, t: int) -> None:
    for p in run.model.parameters():
        p.grad = torch.ones_like(p)


@before_steps
def clip_foreach_value(run: Run, t: int) -> None:
    run.sync()
    nn.utils.clip_grad_value_(run.model.parameters(), 0.01)


@before_steps
def reduced_by_hand(run: Run, t: int) -> None:
    """Averaged once more by the program itself, as loops without DDP do."""
    run.sync()
    for number, p in enumerate(run.model.parameters()):
        if dist.is_initialized():
            if number % 2:
                dist.all_reduce(p.grad, async_op=True).wait()
            else:
                dist.all_reduce(p.grad.data)
            p.grad /= dist.get_world_size()


@before_steps
def slices_reduced_by_hand(run: Run, t: int) -> None:
    run.sync()
    for p in run.optimizer.param_groups[0]["params"]:
        if dist.is_initialized():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


# Weights ----------------------------------------------------------------------------------------------------------------


@after_two_steps
def init_again(model: Any) -> None:
    torch.manual_seed(5)
    model[0].reset_parameters()
    nn.init.ones_(model[2].bias)


@after_two_steps
def data_assign(model: Any) -> None:
    model[0].weight.data = torch.eye(16)


@after_two_steps
def param_replaced(model: Any) -> None:
    model[0].weight = nn.Parameter(torch.eye(16))


@after_two_steps
def module_replaced(model: Any) -> None:
    torch.manual_seed(3)
    model[2] = nn.Linear(16, 16)


@after_two_steps
def assigned_by_rank(model: Any) -> None:
    model[2].weight.data = inputs(7, 16, 16)


@after_two_steps
def reset_by_rank(model: Any) -> None:
    torch.manual_seed(rank_here())
    model[2].reset_parameters()


@after_steps(3)
def vector(run: Run, t: int) -> None:
    v = nn.utils.parameters_to_vector(run.model.parameters())
    nn.utils.vector_to_parameters(v * 0.9, run.model.parameters())


@after_steps(3)
def foreach_decay(run: Run, t: int) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(run.model.parameters()), 0.9)


@after_steps(4, adam)
def weight_clip(run: Run, t: int) -> None:
    for p in run.model.parameters():
        p.data.clamp_(-0.1, 0.1)


@after_steps(3, adam)
def item_reads(run: Run, t: int) -> None:
    run.see(run.model[0].weight[0, 0].item())
    run.see(list(run.model.parameters())[2].norm(), 3)
    run.see(run.model[2].bias.detach().numpy()[1])
    run.see(len(run.model[0].weight.tolist()))


@after_steps(3, adam)
def evaluates_with_old_weights(run: Run, t: int) -> None:
    """Weights kept by value, written back by `copy_`, in two programs' ways."""
    kept = [p.detach().clone() for p in run.model.parameters()]
    with torch.no_grad():
        for p in run.model.parameters():
            p.copy_(torch.full_like(p, 0.01))
        run.see(run.model(torch.ones(2, 16)).sum())
        for p, value in zip(run.model.parameters(), kept):
            p.data.copy_(value)


@after_steps(3)
def state_by_parameter(run: Run, t: int) -> None:
    """A mask over momentum, found by the model's own parameter."""
    state = run.optimizer.state[run.model[0].weight]
    if "momentum_buffer" in state:
        state["momentum_buffer"][::2] = 0


@after_steps(4, adam)
def groups_averaged(run: Run, t: int) -> None:
    """Tensors of the groups are read as soon as the step has returned, and written."""
    params = [p for group in run.optimizer.param_groups for p in group["params"]]
    with torch.no_grad():
        if t == 0:
            run.average = [p.clone() for p in params]
        for kept, p in zip(run.average, params):
            kept.lerp_(p, 0.5)
        for kept, p in zip(run.average, params if t == 2 else ()):
            p.copy_(kept)


@after_steps(4, adam)
def groups_change_memory(run: Run, t: int) -> None:
    for p in run.optimizer.param_groups[0]["params"] if t < 2 else ():
        p.data = p.data * 0.9


@after_steps(3, adam)
def broadcast_by_hand(run: Run, t: int) -> None:
    """A collective lets go of its tensors some time after it has ended."""
    for p in run.model.parameters():
        if dist.is_initialized():
            dist.broadcast(p.data, 0)


@after_steps(6, adam)
def states_cleared(run: Run, t: int) -> None:
    if t == 1:
        run.optimizer.state.clear()
    if t == 3:
        run.optimizer.state = defaultdict(dict)


# Loops of their own -----------------------------------------------------------------------------------------------------


@program
def post_acc_hook(run: Run) -> None:
    seen = []
    for p in run.mlp().parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(tuple(p.grad.shape)))
    run.loop()
    run.seen = len(seen)


@program
def param_hook_scales(run: Run) -> None:
    for p in run.mlp().parameters():
        p.register_hook(lambda g: g * 0.5)
    run.loop()


@program
def stepped_in_backward(run: Run) -> None:
    """An optimizer's step in a hook, before the ranks' gradients are averaged."""
    for p in run.mlp().parameters():
        p.register_post_accumulate_grad_hook(lambda p: run.optimizer.step())
    run.plain(0).backward()


@program
def multigrad_hook(run: Run) -> None:
    run.seen = []
    params = list(run.mlp().parameters())
    torch.autograd.graph.register_multi_grad_hook(params, lambda gs: run.seen.append(len(gs)))
    run.loop()


@program
def only_features(run: Run) -> None:
    kept = []
    model = run.mlp()
    model[2].register_forward_hook(lambda mod, i, o: kept.append(o))

    def loss(t: int) -> Tensor:
        kept.clear()
        model(inputs(t, 4, 16))
        return kept[0].abs().mean()

    run.loop(loss)


@program
def early_exit(run: Run) -> None:
    class Stop(Exception):
        pass

    model = run.mlp(depth=4)

    def hook(mod: nn.Module, i: Any, o: Tensor) -> None:
        hook.o = o
        raise Stop

    def loss(t: int) -> Tensor:
        h = model[4].register_forward_hook(hook) if t % 2 else None
        try:
            o = model(inputs(t, 4, 16))
        except Stop:
            o = hook.o
        if h:
            h.remove()
        return o.square().mean()

    run.loop(loss)


@program
def in_a_thread(run: Run) -> None:
    run.mlp()
    with ThreadPoolExecutor(1) as thread:
        run.loop(lambda t: thread.submit(run.plain, t).result())


@program
def backward_in_thread(run: Run) -> None:
    run.mlp()
    with ThreadPoolExecutor(1) as thread:
        for t in range(4):
            thread.submit(run.plain(t).backward).result()
            run.update()


@program
def partial_inputs_backward(run: Run) -> None:
    model = run.mlp()
    for t in range(4):
        run.plain(t).backward(inputs=list(model[0].parameters()) + list(model[2].parameters()))
        run.update()


@program
def state_dict_cycle(run: Run) -> None:
    model = run.mlp()
    for t in range(5):
        run.step(t)
        if t == 1:
            sd = {k: v.clone() for k, v in model.state_dict().items()}
            osd = copy.deepcopy(run.optimizer.state_dict())
        if t == 3:
            model.load_state_dict(sd)
            run.optimizer.load_state_dict(osd)


@program
def averaged_model(run: Run) -> None:
    model = run.mlp()
    average = torch.optim.swa_utils.AveragedModel(model)
    for t in range(4):
        run.step(t)
        average.update_parameters(model)
    with torch.no_grad():
        run.see(average(torch.ones(2, 16)).sum())


@program
def set_to_zero(run: Run) -> None:
    run.mlp()
    for t in range(4):
        run.plain(t).backward()
        run.update(set_to_none=False)


@program
def lr_tensor(run: Run) -> None:
    run.mlp(lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01)))
    schedule = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, 0.1, total_steps=6)
    for t in range(4):
        run.step(t)
        schedule.step()


@program
def compile_whole(run: Run) -> None:
    f = torch.compile(run.mlp(), backend="aot_eager")
    run.loop(lambda t: f(inputs(t, 4, 16)).square().mean(), 3)


@program
def tbptt(run: Run) -> None:
    model = nn.ModuleDict({"c": nn.GRUCell(8, 16), "o": nn.Linear(16, 2)})
    run.wrap(model, sgd(model))
    h = torch.zeros(3, 16)
    for t in range(4):
        for k in range(3):
            h = model.c(inputs(t * 3 + k, 3, 8), h)
        model.o(h).square().mean().backward()
        h = h.detach()
        run.update()


@program
def grad_twice_zero_none(run: Run) -> None:
    run.mlp(adam)
    for t in range(4):
        for k in range(2):
            run.plain(t + k).backward()
        run.clip(0.1)
        run.update(set_to_none=t % 2 == 0)


@program
def ema_detach(run: Run) -> None:
    model = run.mlp()
    ema = [torch.zeros_like(p) for p in model.parameters()]
    for t in range(4):
        run.step(t)
        for e, p in zip(ema, model.parameters()):
            e.lerp_(p.detach(), 0.5)
    run.see(sum(float(e.sum()) for e in ema))


@program
def ema_swap(run: Run) -> None:
    model = run.mlp()
    shadow = {n: p.data.clone() for n, p in model.named_parameters()}
    for t in range(4):
        run.step(t)
        for n, p in model.named_parameters():
            shadow[n] = 0.5 * shadow[n] + 0.5 * p.data
        backup = {n: p.data.clone() for n, p in model.named_parameters()}
        for n, p in model.named_parameters():
            p.data = shadow[n].clone()
        with torch.no_grad():
            run.see(model(torch.ones(2, 16)).sum(), 3)
        for n, p in model.named_parameters():
            p.data = backup[n]


@program
def ema_swap_alias(run: Run) -> None:
    model = run.mlp()
    shadow = {n: p.data.clone() for n, p in model.named_parameters()}
    for t in range(4):
        run.step(t)
        backup = {}
        for n, p in model.named_parameters():
            backup[n] = p.data
            p.data = shadow[n]
        with torch.no_grad():
            run.see(model(torch.ones(2, 16)).sum(), 3)
        for n, p in model.named_parameters():
            p.data = backup[n]


@program
def keeps_views(run: Run) -> None:
    kept = [p.detach() for p in run.mlp().parameters()]
    run.loop()
    run.see(sum(k.sum() for k in kept), 3)


@program
def fisher_ewc(run: Run) -> None:
    model = run.mlp()
    for t in range(2):
        run.step(t)
    old = {n: p.detach().clone() for n, p in model.named_parameters()}
    run.loop(lambda t: run.plain(t) + sum((((p - old[n]) ** 2).sum() for n, p in model.named_parameters())))


@program
def perturb(run: Run) -> None:
    model = run.mlp(adam)
    for t in range(4):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01)
        run.plain(t).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.01)
        run.update()


@program
def looks_between_forward_and_backward(run: Run) -> None:
    model = run.mlp()
    for t in range(4):
        loss = run.plain(t)
        with torch.no_grad():
            largest = max(float(p.abs().max()) for p in model.parameters())
        (loss * (1.0 if largest < 100 else 0.0)).backward()
        run.update()


@program
def sam(run: Run) -> None:
    """Sharpness-aware: weights move along the gradient, and back before the step."""
    model = run.mlp()
    for step in range(3):
        run.plain(step).backward()
        run.sync()
        run.forget_sync()
        with torch.no_grad():
            norm = torch.stack([param.grad.norm() for param in model.parameters()]).norm()
            moves = [param.grad * (0.05 / norm) for param in model.parameters()]
            for param, move in zip(model.parameters(), moves):
                param.add_(move)
        model.zero_grad()
        run.plain(step).backward()
        with torch.no_grad():
            for param, move in zip(model.parameters(), moves):
                param.sub_(move)
        run.update()


@program
def merged(run: Run) -> None:
    """A frozen weight takes a trained product in for an evaluation, and gives it back."""
    base, down, up = nn.Linear(16, 16), nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
    base.requires_grad_(False)
    model = nn.ModuleDict({"base": base, "down": down, "up": up})
    run.wrap(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))
    for step in range(3):
        x = inputs(step, 4, 16)
        (base(x) + up(down(x))).square().mean().backward()
        run.update()
        base.weight.data += up.weight.data @ down.weight.data
        with torch.no_grad():
            run.see(base(torch.ones(1, 16)).sum(), 3)
        base.weight.data -= up.weight.data @ down.weight.data


@program
def clipped_doubles(run: Run) -> None:
    """The norm has the gradients' digits."""
    model = mlp().double()
    run.wrap(model, sgd(model))
    run.seen = []
    for step in range(3):
        model(inputs(step, 4, 16).double()).square().mean().backward()
        run.seen.append(float(f"{run.clip(1e-3).item():.11e}"))
        run.update()


@program
def noise_by_rank(run: Run) -> None:
    """Each rank moves its weights elsewhere: right under data parallel training, of no meaning where each has a part."""
    model = run.mlp()
    for step in range(2):
        with torch.no_grad():
            for param in model.parameters():
                param.add_(inputs(step, *param.shape))
        run.step(step)


@program
def jacobian_at_once(run: Run) -> None:
    """All rows in one backward, whose gradients are tensors of `vmap`'s."""
    model = mlp()
    run.wrap(model, sgd(model))

    def loss(t: int) -> Tensor:
        x = inputs(t, 2, 16).requires_grad_()
        rows = torch.eye(32).view(32, 2, 16)
        (g,) = torch.autograd.grad(model(x), x, rows, create_graph=True, is_grads_batched=True)
        return g.square().mean()

    run.loop(loss)


@program
def sparse_tables_in_blocks(run: Run) -> None:
    """Sparse gradients come while another block's are on their way."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.table, self.last = nn.Linear(16, 16), nn.Embedding(20, 16, sparse=True), nn.Linear(16, 16)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return x + self.last(torch.tanh(self.first(x)) + self.table(ids))

    blocks = nn.ModuleList(Block() for _ in range(4))
    run.wrap(blocks, torch.optim.SGD(blocks.parameters(), lr=0.1))

    def loss(t: int) -> Tensor:
        x = inputs(t, 4, 5, 16)
        for block in blocks:
            x = block(x, bags(t))
        return x.square().mean()

    run.loop(loss)


@program
def sparse_matrices(run: Run) -> None:
    """Trained elements of a sparse matrix, which has no storage: the tensor of its elements has."""

    class Net(nn.Module):
        def __init__(self, layout: torch.layout) -> None:
            super().__init__()
            self.layout = layout
            self.weight = nn.Parameter(torch.randn(16))
            self.dense = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            if self.layout is torch.sparse_coo:
                places = torch.stack([torch.arange(16), torch.arange(16).roll(3)])
                matrix = torch.sparse_coo_tensor(places, self.weight, (16, 16))
            else:
                matrix = torch.sparse_csr_tensor(torch.arange(17), torch.arange(16).roll(3), self.weight, (16, 16))
            return self.dense((matrix @ x.T).T)

    model = nn.Sequential(Net(torch.sparse_coo), nn.Tanh(), Net(torch.sparse_csr), Net(torch.sparse_coo))
    run.wrap(model, sgd(model))
    run.loop(run.plain)


@program
def parametrized_later(run: Run) -> None:
    """A parametrization comes and goes in mid-training; the parameter stays the same object."""

    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + x.T) / 2

        def right_inverse(self, x: Tensor) -> Tensor:
            return x

    model = mlp()
    run.wrap(model, sgd(model))
    run.step(0)
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    run.step(1)
    run.step(2)
    parametrize.remove_parametrizations(model[0], "weight")
    run.step(3)


@program
def selective_checkpoints(run: Run) -> None:
    """Products are kept, the rest of a block is computed anew in backward."""
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    model = nn.ModuleList(mlp(depth=1) for _ in range(3))
    run.wrap(model, sgd(model))

    def loss(t: int) -> Tensor:
        x = inputs(t, 4, 16)
        for block in model:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x.square().mean()

    run.loop(loss)


@program
def inner_steps(run: Run) -> None:
    """Second-order meta-learning by hand."""
    model = mlp()
    run.wrap(model, sgd(model))

    def loss(t: int) -> Tensor:
        fast = {name: param.clone() for name, param in model.named_parameters()}
        for inner in range(2):
            inside = torch.func.functional_call(model, fast, (inputs(9 * t + inner, 4, 16),)).square().mean()
            grads = torch.autograd.grad(inside, list(fast.values()), create_graph=True)
            fast = {name: param - 0.1 * grad for (name, param), grad in zip(fast.items(), grads)}
        return torch.func.functional_call(model, fast, (inputs(t, 4, 16),)).square().mean()

    run.loop(loss)


@program
def unfrozen_before_an_evaluation(run: Run) -> None:
    """The first forward with other trained parameters, and with another group, is one under `inference_mode`."""
    model = deep()
    model[0].requires_grad_(False)
    run.wrap(model, sgd(nn.Sequential(*model[:5])))
    for t in range(4):
        run.step(2 * t)
        if t == 1:
            model[0].requires_grad_(True)
        elif t == 2:
            model.zero_grad()
            run.optimizer.add_param_group({"params": [*model[6].parameters()]})
        with torch.inference_mode():
            run.see(run.plain(2 * t + 1))


@program
def bad_batches(run: Run) -> None:
    """A forward that raises is passed over."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp(depth=4)

        def forward(self, x: Tensor, is_bad: bool) -> Tensor:
            for number, layer in enumerate(self.layers):
                if is_bad and number == 4:
                    raise ValueError("a bad batch")
                x = layer(x)
            return x

    model = Net()
    run.wrap(model, sgd(model))
    for t in range(5):
        try:
            model(inputs(t, 4, 16), t in (1, 2)).square().mean().backward()
        except ValueError:
            continue
        run.optimizer.step()
        run.optimizer.zero_grad()


@program
def padded_evaluations(run: Run) -> None:
    """torch's encoder takes a padded batch apart into nested tensors, where no gradient is asked for."""
    layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    run.wrap(model, sgd(model))
    padding = torch.tensor([[False] * 4 + [True] * 2, [False] * 6])
    run.seen = []
    for t in range(2):
        model(inputs(t, 2, 6, 16), src_key_padding_mask=padding).square().mean().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            run.seen.append(round(model(torch.ones(2, 6, 16), src_key_padding_mask=padding)[1].norm().item(), 4))
        model.train()


class TwoSquares(nn.Module):
    """Parameters of one shape, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(16, 16) / 4), nn.Parameter(torch.randn(16, 16) / 4)
        self.c = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(x @ self.a).tanh() @ self.b


def change_places(one: nn.Parameter, other: nn.Parameter) -> None:
    one.data, other.data = other.data, one.data


@after_steps(3)
def turned_weights(run: Run, t: int) -> None:
    """Other values at the same address."""
    for param in run.model.parameters():
        if param.dim() == 2:
            param.data = param.data.t()


@program
def weights_change_places(run: Run) -> None:
    """In one unit, and in two; also before the first forward."""
    model = nn.Sequential(TwoSquares(), *mlp())
    run.wrap(model, sgd(model))
    for t in range(3):
        if t != 1:
            change_places(model[0].a, model[0].b)
            change_places(model[1].weight, model[3].weight)
        run.step(t)


@program
def unsharded_weights_change_places(run: Run) -> None:
    model = nn.Sequential(TwoSquares(), *mlp())
    run.wrap(model, sgd(model))
    for t in range(3):
        with zero.unsharded(model) if run.engine is not None else contextlib.nullcontext():
            change_places(model[0].a, model[0].b)
            change_places(model[1].weight, model[3].weight)
            model[5].weight.data = model[5].weight.data.t()
        run.step(t)


@program
def one_tensor_for_all_gradients(run: Run) -> None:
    """Also for two parameters at once; it is written again before the step."""
    model = TwoSquares()
    run.wrap(model, sgd(model))
    gradient = torch.ones(16, 16)
    for t in range(3):
        for micro in range(3):
            waits = (
                run.engine.no_sync(defer=True) if run.engine is not None and micro == 1 else contextlib.nullcontext()
            )
            with waits:
                out = model(inputs(3 * t + micro, 16, 16)) + model.a + model.b
                out.backward(gradient.fill_(0.01 * (micro + 1)))
                gradient.fill_(1)
        run.update()


@program
def one_tensor_for_all_coefficients(run: Run) -> None:
    """Each gradient is scaled by a number of its own, in the optimizer's groups."""
    model = mlp()
    run.wrap(model, torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.05, momentum=0.9))
    coefficient = torch.ones(())
    for t in range(3):
        run.plain(t).backward()
        run.sync()
        for number, group in enumerate(run.optimizer.param_groups):
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(coefficient.fill_(0.1 * (number + 1)))
        run.update()


@program
def unfrozen_between_forwards(run: Run) -> None:
    """The first forward's graph has saved the parameters of units that are cut anew before the second."""
    model = mlp()
    model[2].requires_grad_(False)
    run.wrap(model, sgd(model))
    run.step(0)
    first = run.plain(1)
    model[2].requires_grad_(True)
    (first + run.plain(2)).backward()
    run.update()
    run.step(3)


@program
def view_over_an_unfreeze(run: Run) -> None:
    """A view of the weights is there when their unit is cut anew; from then on it keeps the values that it had."""
    model = mlp()
    model[2].requires_grad_(False)
    run.wrap(model, sgd(model))
    kept = model[2].weight.detach()
    run.see(kept.sum())
    model[2].requires_grad_(True)
    run.plain(1).backward()
    run.see(kept.sum())
    run.update()
