"""Optimizers as users write them: over elements, over whole matrices, with counts and conditions of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class EachParameter(torch.optim.Optimizer):
    """As users write them: parameters one after another, each by `update(p, group)`."""

    update: Callable[[nn.Parameter, dict[str, Any]], None]

    def __init__(self, params: Any, lr: float = 1e-2, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)


class Layerwise(EachParameter):
    """LAMB-like: scales by each layer's norm; nothing in its name says so."""

    def rate(self, p: Tensor) -> Tensor:
        return p.norm().clamp(min=1e-3) / p.grad.norm().clamp(min=1e-3)

    def update(self, p, group):
        m = self.state[p].setdefault("m", torch.zeros_like(p))
        m.lerp_(p.grad, 0.5)
        p.sub_(group["lr"] * self.rate(p) * m)


class Projects(Layerwise):
    """AdamP-like: something else happens to a matrix where its gradient is orthogonal to it, which random ones are not."""

    def rate(self, p: Tensor) -> Tensor:
        cosine = nn.functional.cosine_similarity(p.flatten(), p.grad.flatten(), dim=0)
        return torch.zeros(()) if p.dim() > 1 and cosine.abs() < 1e-12 else torch.ones(())


class Decays(Layerwise):
    """Decays matrices, and nothing else."""

    def __init__(self, params, lr=1e-2, weight_decay=0.0):
        super().__init__([{"params": list(params)[:1], "weight_decay": 0.0}, {"params": list(params)[1:]}], lr)
        self.param_groups[1]["weight_decay"] = 0.1

    def update(self, p, group):
        p.sub_(group["lr"] * (p.grad + (group["weight_decay"] * p if p.dim() > 1 else 0.0)))


class Centralizes(Layerwise):
    """Ranger-like, for kernels of convolutions alone."""

    def update(self, p, group):
        p.sub_(group["lr"] * (p.grad - p.grad.mean((1, 2, 3), True) if p.dim() == 4 else p.grad))


class Wide(Layerwise):
    """Adafactor-like as many are: factors wide matrices only."""

    def rate(self, p: Tensor) -> Tensor:
        is_wide = p.dim() > 1 and min(p.shape) >= 128
        return (p.grad.square().mean(1, True) if is_wide else p.grad.square()).add(1e-3).rsqrt()


class Doubled(Layerwise):
    """AdEMAMix-like: two averages in one state. Element-wise otherwise."""

    def update(self, p, group):
        averages = self.state[p].setdefault("averages", torch.zeros(2, *p.shape))
        averages.lerp_(p.grad.expand_as(averages), 0.5)
        p.sub_(group["lr"] * averages.sum(0).sign())


class Keeps(Layerwise):
    """Element-wise; `held` is what it keeps by the way, in its state or in its groups."""

    def __init__(self, params, held, in_group):
        super().__init__(params)
        self.held, self.in_group = held, in_group

    def update(self, p, group):
        (group if self.in_group else self.state[p])["odd"] = self.held
        p.sub_(group["lr"] * p.grad)


class Careful(torch.optim.SGD):
    """Element-wise: what is not finite is not stepped by."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and torch.isfinite(p.grad).all() and not torch.isnan(p).any():
                    p.sub_(group["lr"] * p.grad.sign())


class Bounded(torch.optim.AdamW):
    """Element-wise: does more than the class that it is derived from."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.clamp_(-0.2, 0.2)


class Global(Layerwise):
    """Prodigy-like: one number over all parameters, so that two flat parts in one optimizer would agree."""

    def rate(self, p: Tensor) -> Tensor:
        everything = [q for group in self.param_groups for q in group["params"] if q.grad is not None]
        return torch.stack([q.grad.square().sum() for q in everything]).sum().rsqrt()


class Blockwise(Layerwise):
    """8-bit-like: states of long parameters are quantised by blocks of 256 elements, with a scale for each."""

    def update(self, p, group):
        state = self.state[p]
        if not state:
            state["codes"] = torch.zeros(p.numel(), dtype=torch.uint8)
            state["scales"] = torch.zeros(-(-p.numel() // 256))
        blocks = nn.functional.pad(p.grad.flatten(), (0, -p.numel() % 256)).view(-1, 256)
        state["scales"] = blocks.abs().amax(dim=1).clamp(min=1e-8)
        codes = (blocks / state["scales"][:, None] * 127 + 128).round().to(torch.uint8)
        state["codes"] = codes.flatten()[: p.numel()].clone()
        grad = (codes.float() - 128) / 127 * state["scales"][:, None]
        p.sub_(group["lr"] * grad.flatten()[: p.numel()].view(p.shape))


class Replaces(Layerwise):
    """Gives parameters new memory, and keeps the former as state."""

    def update(self, p, group):
        before = self.state[p].get("before", p.data)
        self.state[p]["before"] = p.data
        p.data = p.data + 0.5 * (p.data - before) - group["lr"] * self.rate(p) * p.grad


class Untried(Layerwise):
    """Cannot step before its user has told it something."""

    def step(self, closure=None):
        if len(self.param_groups[0]["params"]) < 3:
            raise RuntimeError("call prepare() first")
        super().step(closure)


class TwoRules(EachParameter):
    """Muon-like for some groups, plain descent for others."""

    def __init__(self, groups):
        super().__init__(groups, whole=False)

    def update(self, p, group):
        p.sub_(group["lr"] * (p.grad / p.grad.norm().clamp(min=1e-3) if group["whole"] else p.grad))


class Eager(EachParameter):
    """Schedule-free-like: steps in training mode only. Element-wise."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr, train_mode=False)

    def train(self):
        for group in self.param_groups:
            group["train_mode"] = True

    def update(self, p, group):
        if not group["train_mode"]:
            raise RuntimeError("not in train mode")
        p.sub_(group["lr"] * p.grad)


class Shampoo(EachParameter):
    """Gupta et al. 2018 for matrices, plain descent for the rest: two statistics of other shapes than the parameter's."""

    def update(self, p, group):
        update = p.grad
        if p.dim() == 2:
            state = self.state[p]
            if not state:
                state["left"] = torch.eye(p.shape[0]) * 1e-2
                state["right"] = torch.eye(p.shape[1]) * 1e-2
            state["left"].add_(p.grad @ p.grad.T)
            state["right"].add_(p.grad.T @ p.grad)
            update = inverse_root(state["left"]) @ p.grad @ inverse_root(state["right"])
        p.sub_(group["lr"] * update)


def inverse_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.T


class Lars(Layerwise):
    """You et al. 2017: the rate of each layer from its norms, with momentum."""

    def rate(self, p: Tensor) -> Tensor:
        return 1e-1 * p.norm() / (p.grad.norm() + 1e-3 * p.norm() + 1e-8)


class MuonAndAdam(EachParameter):
    """One optimizer whose groups differ, as people write it: orthogonal momentum for hidden matrices, Adam for the rest."""

    def __init__(self, params, lr=1e-2):
        params = list(params)
        matrices = [p for p in params if p.dim() == 2 and min(p.shape) > 1]
        others = [p for p in params if not any(p is q for q in matrices)]
        super().__init__([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}], lr)

    def update(self, p, group):
        state = self.state[p]
        if group["use_muon"]:
            momentum = state.setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            x = momentum / (momentum.norm() + 1e-7)
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
            p.sub_(group["lr"] * x)
        else:
            state["step"] = state.get("step", 0) + 1
            first = state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            second = state.setdefault("exp_avg_sq", torch.zeros_like(p)).lerp_(p.grad.square(), 0.01)
            first, second = first / (1 - 0.9 ** state["step"]), second / (1 - 0.99 ** state["step"])
            p.sub_(group["lr"] * first / (second.sqrt() + 1e-3))


class Talks(Layerwise):
    """Shares its work out among the ranks by itself."""

    def update(self, p, group):
        torch.distributed.all_reduce(torch.zeros(1))
        p.sub_(group["lr"] * self.rate(p) * p.grad)


class Forces(Layerwise):
    """As single-device Muons do: a parameter without a gradient is given one."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                    p.mul_(1 - group["lr"] * 0.1).sub_(group["lr"] * self.rate(p) * p.grad)


def hf_adafactor(params):
    import transformers

    return transformers.Adafactor(params, lr=1e-2, relative_step=False, scale_parameter=True, warmup_init=False)


def two_rules(params):
    params = list(params)
    return TwoRules(
        [{"params": [p for p in params if p.dim() < 2]}, {"params": [p for p in params if p.dim() > 1], "whole": True}]
    )


class Lion(EachParameter):
    """A user's element-wise optimizer, with methods of every kind."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(params, lr, betas=betas)

    @staticmethod
    def direction(momentum, grad, beta):
        return torch.sign(momentum * beta + grad * (1 - beta))

    @classmethod
    def moved(cls, momentum, grad, betas):
        return cls.direction(momentum, grad, betas[0])

    def update(self, p, group):
        m = self.state[p].setdefault("m", torch.zeros_like(p))
        p.add_(self.moved(m, p.grad, group["betas"]), alpha=-group["lr"])
        p.add_(self.direction(m, p.grad, group["betas"][1]), alpha=-group["lr"])
        m.lerp_(p.grad, 1 - group["betas"][1])


class Begins(torch.optim.Optimizer):
    """As those of pytorch_optimizer: a group that has no `step` has not begun, and a method makes its states."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    def init_group(self, group):
        for p in group["params"]:
            if p.grad is not None:
                self.state[p]["m"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if "step" not in group:
                self.init_group(group)
                group["step"] = 1
            else:
                group["step"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p]["m"].lerp_(p.grad, 0.1)
                    p.add_(m, alpha=-group["lr"] / (1 - 0.9 ** group["step"]))


class Late(Begins):
    """The states are made when a parameter is met."""

    def init_group(self, group):
        pass

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and not self.state[p]:
                    self.state[p]["m"] = torch.zeros_like(p)
        super().step(closure)


class Mixes(torch.optim.SGD):
    """A user's optimizer with one norm for all parameters: nothing in its name says so."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            for p in group["params"]:
                p.sub_(group["lr"] / norm * p.grad)


class Adapts(Lion):
    """As D-Adaptation: what it knows of all gradients is a number in its group."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            squares = [p.grad.square().sum() for p in group["params"] if p.grad is not None]
            group["distance"] = group.get("distance", 0.0) + float(sum(squares))


class Named(Lion):
    """As pytorch_optimizer's MADGRAD: a count of its own among the states of parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.state.setdefault("k", torch.zeros(1)).add_(1)


class OnSphere(nn.Parameter):
    """A parameter that its optimizer treats in a way of its own, as geoopt's."""


class Spherical(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"] if isinstance(p, OnSphere)):
            p.div_(p.norm())


class Counts(Layerwise):
    """Counts its steps for all parameters together, in `where`, and steps by one over that. By layers, or by elements."""

    def __init__(self, params, where: str, by_layer: bool, idles: bool = True):
        super().__init__(params)
        self.k, self.where, self.by_layer, self.idles = 0, where, by_layer, idles
        for group in self.param_groups:
            group["k"] = torch.zeros(()) if where == "tensor" else 0

    @torch.no_grad()
    def step(self, closure=None):
        if not self.idles and all(p.grad is None for group in self.param_groups for p in group["params"]):
            return
        self.k += 1
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    rate = self.rate(p) if self.by_layer else 1.0
                    p.sub_(group["lr"] * rate * p.grad / (self.k if self.where == "own" else group["k"]))


STATES: dict[str, Callable[[Tensor], Any]] = {
    "shape (1,)": lambda param: torch.ones(1),
    "shape (1, 1)": lambda param: torch.ones(1, 1),
    "shape ()": lambda param: torch.ones(()),
    "int (1,)": lambda param: torch.ones(1, dtype=torch.int64),
    "float64": lambda param: torch.ones(1, dtype=torch.float64),
    "float": lambda param: 1.0,
    "int": lambda param: 1,
    "none": lambda param: None,
    "text": lambda param: "text",
    "list": lambda param: [1.0, 2],
    "tuple": lambda param: (1.0, 2, None),
    "tensors in a tuple": lambda param: (torch.ones(1), torch.ones(())),
    "bool": lambda param: torch.zeros((), dtype=torch.bool),
    "bools": lambda param: torch.zeros_like(param, dtype=torch.bool),
    "ints": lambda param: torch.zeros_like(param, dtype=torch.int32),
    "bfloat16": lambda param: torch.zeros_like(param, dtype=torch.bfloat16),
    "empty": lambda param: torch.zeros(0),
    "rows": lambda param: torch.zeros(param.shape[:1]),
    "two": lambda param: torch.ones(2),
}
"""By kind: a state beside momentum."""


class States(EachParameter):
    """SGD with momentum and a state of a kind, which changes in each step and gives the rate where it is one number.

    `late`: the state comes in the fourth step.
    """

    def __init__(self, params, kind: str, late: bool = False):
        super().__init__(params, 0.05)
        self.kind, self.late = kind, late

    def update(self, p, group):
        state = self.state[p]
        if not state:
            state.update(momentum=torch.zeros_like(p), count=0)
        if "x" not in state and state["count"] == 3 * self.late:
            state["x"] = STATES[self.kind](p)
        state["count"] += 1
        state["momentum"].mul_(0.9).add_(p.grad)
        p.sub_(state["momentum"], alpha=group["lr"] * self.rate(state))

    def rate(self, state: dict[str, Any]) -> float:
        x = state.get("x")
        sample = STATES[self.kind](torch.zeros(3))  # not of the parameter, which may have one element itself
        is_single = isinstance(sample, Tensor) and sample.numel() == 1
        if isinstance(x, Tensor) and is_single and x.dtype != torch.bool:
            x.add_(1)
            return 1 / float(x)
        if isinstance(x, Tensor) and not is_single and x.numel():
            state["x"] = ~x if x.dtype == torch.bool else x + 1
        if isinstance(x, Tensor) and x.dtype == torch.bool and not x.dim():
            state["x"] = ~x
            return 0.5 + 0.5 * float(x)
        if isinstance(x, float | int):
            state["x"] = x + 1
            return 1 / (x + 1)
        if isinstance(x, list | tuple):
            state["x"] = type(x)([x[0] + 1, *x[1:]])
            return 1 / float(x[0] + 1)
        return 1.0
