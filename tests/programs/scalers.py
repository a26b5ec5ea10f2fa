"""Loss scalers that the engine was not told of, where a single element overflows on one rank: no rank makes that step."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.oracle import Run, program
from tests.programs.clearing import Spectral
from tests.programs.usual import of_groups

Optimizers = list[torch.optim.Optimizer]
CULPRITS = {0: ("blocks.0.0.weight", 0, math.inf), 3: ("head.bias", 1, math.nan), 4: ("blocks.1.0.bias", 1, math.inf)}
"""By step: the parameter of which one element overflows, on which rank."""
PRECISIONS = {"precision": ("fp32", "bf16", "fp16")}


class Net(nn.Module):
    """Blocks that are units at stage 3; with `half`, torch's own example of autocast inside `forward`."""

    def __init__(self, half: bool = False) -> None:
        super().__init__()
        self.half_inside = half
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        if not self.half_inside:
            return self.body(x)
        with torch.autocast("cpu", torch.float16):
            return self.body(x)


def broken(value: float) -> Callable[[Tensor], Tensor]:
    """A hook that replaces one element of a gradient."""

    def hook(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[-1] = value
        return grad

    return hook


def one(params: list[nn.Parameter]) -> Optimizers:
    return [torch.optim.AdamW(params, lr=1e-2, eps=1e-3)]


def fused(params: list[nn.Parameter]) -> Optimizers:
    return [torch.optim.AdamW(params, lr=1e-2, eps=1e-3, fused=True)]


def two(params: list[nn.Parameter]) -> Optimizers:
    return [
        torch.optim.AdamW(params[:2], lr=1e-2, eps=1e-3),
        torch.optim.SGD(params[2:], lr=1e-2, momentum=0.9),
    ]


def full_matrices(params: list[nn.Parameter]) -> Optimizers:
    return [Spectral(params)]


def _train(run: Run, optimizers: Callable[[list[nn.Parameter]], Optimizers], half: bool = False) -> None:
    """Steps are unscaled by the scaler or by user code, in turn; the latter are clipped by torch or the engine."""
    model = run.build(lambda: Net(half))
    plain = model
    opts = optimizers(list(model.parameters()))
    model = run.shard(model, opts if len(opts) > 1 else opts[0])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    for step in range(8):
        name, who, value = CULPRITS.get(step % 5, ("", -1, 0.0))
        handle = plain.get_parameter(name).register_hook(broken(value)) if who == run.rank else None
        micros = 1 + 2 * (step % 3 == 2)
        for micro in range(micros - 1):
            with run.no_sync(model):
                scaler.scale(model(run.inputs(10 * step + micro, 4, 8)).float().square().mean() / micros).backward()
        scaler.scale(model(run.inputs(10 * step + 9, 4, 8)).float().square().mean() / micros).backward()
        if handle is not None:
            handle.remove()
        if not name:
            run.see(nn.utils.get_total_norm([p.grad for p in plain.parameters()]), "norm of scaled gradients")
        if step % 2 or step > 5:
            for opt in opts:
                scaler.unscale_(opt)
            if step < 5:
                run.clip_grad_norm_(model, 0.1)
            else:
                run.see(nn.utils.clip_grad_norm_(model.parameters(), 0.1), "torch's norm")
        for opt in opts:
            scaler.step(opt)
        scaler.update()
        for opt in opts:
            opt.zero_grad()
        run.see(scaler.get_scale(), "the scale")


program(partial(_train, optimizers=one), name="one_optimizer", more={"ranks": (2, 3), **PRECISIONS})
program(partial(_train, optimizers=fused), name="one_fused_optimizer", more=PRECISIONS)
program(partial(_train, optimizers=two), name="two_optimizers")
program(partial(_train, optimizers=full_matrices), name="over_full_matrices")
half = partial(_train, optimizers=two, half=True)
program(half, name="half_inside_forward", only={"precision": ("fp32",)}, loose=100.0)  # computed in float16


@program
def finite_on_all_ranks_or_on_none(run: Run) -> None:
    """A loop that skips steps by norms of its own: an infinity in one slice is one for all ranks."""
    model: Any = run.trained_model(Net, lambda model: one(list(model.parameters()))[0])
    params = dict(run.trained[-1].plain.named_parameters())
    for step, value in enumerate((math.inf, math.nan, 1.0)):
        for name in ("blocks.0.0.weight", "head.bias"):
            handle = params[name].register_hook(broken(value)) if run.rank == 1 else None
            model(run.inputs(step, 2, 8)).float().square().mean().backward()
            if handle is not None:
                handle.remove()
            found = [
                torch.isfinite(nn.utils.get_total_norm([p.grad for p in some if p.grad is not None], order))
                for some in (list(params.values()), of_groups(run))
                for order in (2.0, 1.0, math.inf)
            ]
            engine = run.engine_of(model)
            if engine is not None:
                found += [torch.isfinite(engine.clip_grad_norm_(math.inf, order)) for order in (2.0, 1.0, math.inf)]
            found.append(torch.stack([torch.isfinite(p.grad).all() for p in params.values()]).all())
            run.see(sorted({bool(each) for each in found}), f"finite with {value} in {name}")
            run.optimizer.zero_grad()
