"""Views of released weights that outlive the use of their unit keep the values that they showed.

In plain training a view follows later steps: there programs keep copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import WIDTH
from tests.oracle import Run, program
from tests.programs.usual import FP32, is_released

STEPS = 7
"""More than those in which an engine looks at every saved tensor."""
RELEASED: dict[str, Any] = {
    "reference": "average", "only": {"stage": (3,)}, "more": {"ranks": (1, 2)}, "accept": is_released
}  # fmt: skip
EXACT = {**RELEASED, "only": {"stage": (3,), **FP32}}


# Modules that give a view of their weight away ---------------------------------------------------------------------------


@dataclass
class Output:
    weight: Tensor
    extra: Any = None


class Pair(NamedTuple):
    weight: Tensor
    other: Tensor


Give = Callable[[Tensor], Any]
GIVES: dict[str, tuple[Give, Callable[[Any], Tensor]]] = {
    "itself": (lambda w: w, lambda out: out),
    "view": (lambda w: w.view(-1), lambda out: out.view(WIDTH, WIDTH)),
    "detach": (lambda w: w.detach(), lambda out: out),
    "data": (lambda w: w.data, lambda out: out),
    "rows": (lambda w: w[0], lambda out: out.expand(WIDTH, WIDTH)),
    "transposed": (lambda w: w.T, lambda out: out.T),
    "expand": (lambda w: w.expand(2, WIDTH, WIDTH), lambda out: out[1]),
    "tuple": (lambda w: (w.t(), 3), lambda out: out[0].t()),
    "dict": (lambda w: {"a": {"b": [w[:]]}}, lambda out: out["a"]["b"][0]),
    "dataclass": (lambda w: Output(w.detach()), lambda out: out.weight),
    "named_tuple": (lambda w: Pair(w[:], w.detach()), lambda out: out.weight + out.other),
    "object": (lambda w: Output(w.data, [w[1]]), lambda out: out.weight + out.extra[0]),
    "lambda": (lambda w: functools.partial(torch.Tensor.clone, w.detach()), lambda out: out()),
    "numpy": (lambda w: w.detach().numpy(), torch.from_numpy),
}


class Weight(nn.Module):
    def __init__(self, give: Give) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.give = give

    def forward(self) -> Any:
        return self.give(self.weight)


class Giver(nn.Module):
    """What modules have given away is used after other units."""

    def __init__(self, give: Give, take: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.weights = nn.ModuleList([nn.Sequential(Weight(give)) for _ in range(3)])
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])
        self.take = take

    def forward(self, x: Tensor) -> Tensor:
        given = [weight[0]() for weight in self.weights]
        for block, each in zip(self.blocks, given):
            x = block(x) + torch.tanh(x @ self.take(each))
        return x


def gives(name: str, give: Give, take: Callable[[Any], Tensor]) -> None:
    def run_it(run: Run) -> None:
        run.trained_model(lambda: Giver(give, take))
        run.loop(steps=STEPS)

    program(run_it, name=f"{name}_is_given", **(EXACT if name == "numpy" else RELEASED))


for _name, (_give, _take) in GIVES.items():
    gives(_name, _give, _take)


# Modules that keep a view of their weight --------------------------------------------------------------------------------


class Stash(nn.Module):
    """A block that keeps a view of its weight, `at` some calls, and reads it in all."""

    def __init__(self, keep: Callable[[Stash], Tensor], at: Callable[[int], bool], is_used: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.keep, self.at, self.is_used = keep, at, is_used
        self.seen: Tensor | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.at(self.calls):
            self.seen = self.keep(self)
        self.calls += 1
        product = x @ self.seen if self.is_used and self.seen is not None else 0
        return torch.tanh(self.linear(x)) + product


class Stashes(nn.Module):
    """Reads in the end, when units are released, what its blocks have kept."""

    def __init__(self, *args: Any, recompute: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Stash(*args) for _ in range(3)])
        self.recompute = recompute
        """Whether its checkpoints are reentrant; None: it has none."""

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.recompute is None else x.clone().requires_grad_()
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        kept = [block.seen for block in self.blocks if block.seen is not None]
        return x * (1 + 1e-3 * sum(each.detach().square().sum() for each in kept))


KEEPS: dict[str, tuple[Callable[[Stash], Tensor], bool]] = {
    "detach": (lambda block: block.linear.weight.detach(), False),
    "data": (lambda block: block.linear.weight.data, False),
    "row": (lambda block: block.linear.weight[0], False),
    "transposed": (lambda block: block.linear.weight.T, False),
    "used": (lambda block: block.linear.weight.T, True),
    "used_detached": (lambda block: block.linear.weight.detach().T, True),
    "bias": (lambda block: block.linear.bias.detach()[None], False),
}
WHEN: dict[str, Callable[[int], bool]] = {
    "always": lambda step: True,
    "once": lambda step: step == 0,
    "every_other_step": lambda step: step % 2 == 1,
    "late": lambda step: step == 5,
}


def stashes(run: Run, name: str, at: Callable[[int], bool] = WHEN["always"], recompute: bool | None = None) -> Any:
    keep, is_used = KEEPS[name]
    kept = (lambda block: keep(block).clone()) if run.is_plain else keep
    return run.trained_model(lambda: Stashes(kept, at, is_used, recompute=recompute))


def keeps(name: str) -> None:
    def run_it(run: Run) -> None:
        for when in WHEN if name in ("detach", "used") else ("once", "late"):
            stashes(run, name, WHEN[when])
            run.loop(steps=STEPS)

    program(run_it, name=f"{name}_is_kept", **RELEASED)


for _name in KEEPS:
    keeps(_name)


@program(**RELEASED)
def kept_in_checkpointed_blocks(run: Run) -> None:
    for name in ("detach", "used"):
        for is_reentrant in (False, True):
            stashes(run, name, recompute=is_reentrant)
            run.loop(steps=STEPS)


# How long a view keeps its values ----------------------------------------------------------------------------------------


class Taken:
    """Views with what they showed when they were taken."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.views: list[tuple[Tensor, Tensor]] = []

    def take(self, view: Tensor) -> None:
        view = view.detach().clone() if self.run.is_plain else view
        self.views.append((view, view.detach().clone()))

    def see(self) -> None:
        self.run.see([torch.equal(view, values) for view, values in self.views], "whether views keep their values")


@program(**{**RELEASED, "more": {"ranks": (1, 2), "wire": ("none", "int8")}})
def kept_over_steps(run: Run) -> None:
    """Over backwards, steps, evaluations and further forwards."""
    for name in ("detach", "used"):
        model, taken = stashes(run, name), Taken(run)
        for block in model.blocks:
            block.register_forward_hook(lambda block, *_, taken=taken: taken.take(block.seen))
        for step in range(STEPS):
            run.loss(step).backward()
            taken.see()
            run.update()
            if step == 3:
                with torch.no_grad():
                    run.see(run.loss(step), "evaluation")
                with torch.inference_mode():
                    run.see(run.loss(step), "evaluation in inference mode")
            taken.see()


@program(**RELEASED)
def taken_inside_unsharded(run: Run) -> None:
    model, taken = run.mlp(), Taken(run)
    with run.unsharded(model):
        for param in model.parameters():
            taken.take(param.detach())
    for step in range(3):
        run.see(all(view.untyped_storage().nbytes() for view, _ in taken.views), "memory")  # else reads end the process
        taken.see()
        run.step(step)


class Product(torch.autograd.Function):
    """Takes a view in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, taken: Taken) -> Tensor:
        ctx.save_for_backward(x, weight.t())
        ctx.taken = taken
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, transposed = ctx.saved_tensors
        ctx.taken.take(transposed[1:])
        return grad @ transposed.t(), grad.t() @ x, None


class Layer(nn.Linear):
    def __init__(self, taken: Taken) -> None:
        super().__init__(WIDTH, WIDTH)
        self.taken = taken

    def forward(self, x: Tensor) -> Tensor:
        x = Product.apply(x, self.weight, self.taken)
        x.register_hook(lambda grad: self.taken.take(self.weight.detach()[0]))
        return torch.tanh(x + self.bias)


@program(**EXACT)
def taken_in_a_backward(run: Run) -> None:
    taken = Taken(run)
    run.trained_model(lambda: nn.Sequential(*(Layer(taken) for _ in range(3))))
    for step in range(STEPS):
        run.step(step)
        run.see(run.loss(step), "a forward without a backward")
        taken.see()


@program(**RELEASED)
def given_in_functional_calls(run: Run) -> None:
    model = run.trained_model(lambda: Giver(*GIVES["transposed"]))
    x = run.inputs(0)
    with torch.no_grad():
        for _ in range(2):
            run.see(torch.func.functional_call(model, {}, (x,)), "functional call")
            run.see(torch.vmap(model)(x[None])[0], "batched call")
