"""Weights that user code writes between steps: in place, by assignment, through `.data`, by exchange."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from tests.models import adamw, mlp, sgd
from tests.oracle import Refused, Run, program
from tests.programs.usual import FP32, after_steps, after_two_steps, is_released, is_sharded


@after_two_steps()
def init_again(run: Run) -> None:
    model = run.model
    torch.manual_seed(5)
    model[0].reset_parameters()
    nn.init.ones_(model[2].bias)


@after_two_steps()
def data_assign(run: Run) -> None:
    run.model[0].weight.data = torch.eye(16)


@after_two_steps()
def param_replaced(run: Run) -> None:
    run.model[0].weight = nn.Parameter(torch.eye(16))


@after_two_steps()
def module_replaced(run: Run) -> None:
    torch.manual_seed(3)
    run.model[2] = nn.Linear(16, 16)


@after_two_steps(refused=(Refused(zero.RankMismatchError, "parameter '2.weight' is not on rank", is_sharded),))
def assigned_by_rank(run: Run) -> None:
    run.model[2].weight.data = run.inputs(7, 16, 16)


@after_two_steps(
    only=FP32, refused=(Refused(zero.RankMismatchError, "parameter '2.weight' is not on rank", is_sharded),)
)
def reset_by_rank(run: Run) -> None:
    torch.manual_seed(run.rank)
    run.model[2].reset_parameters()


@after_steps(3)
def vector(run: Run, t: int) -> None:
    v = nn.utils.parameters_to_vector(run.model.parameters())
    nn.utils.vector_to_parameters(v * 0.9, run.model.parameters())


@after_steps(3)
def foreach_decay(run: Run, t: int) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(run.model.parameters()), 0.9)


@after_steps(4, adamw)
def weight_clip(run: Run, t: int) -> None:
    for p in run.model.parameters():
        p.data.clamp_(-0.1, 0.1)


@after_steps(3, adamw, only=FP32)
def evaluates_with_old_weights(run: Run, t: int) -> None:
    """Weights kept by value, written back by `copy_`, in two programs' ways."""
    kept = [p.detach().clone() for p in run.model.parameters()]
    with torch.no_grad():
        for p in run.model.parameters():
            p.copy_(torch.full_like(p, 0.01))
        run.see(run.model(torch.ones(2, 16)).sum())
        for p, value in zip(run.model.parameters(), kept):
            p.data.copy_(value)


@after_steps(
    4,
    adamw,
    refused=(
        Refused(zero.StateError, "have no values where its state rests on disk", lambda s: s.optimizer_tier == "disk"),
    ),
)
def groups_averaged(run: Run, t: int) -> None:
    """Tensors of the groups are read as soon as the step has returned, and written."""
    params = [p for group in run.optimizer.param_groups for p in group["params"]]
    with torch.no_grad():
        if t == 0:
            run.kept = [p.clone() for p in params]
        for kept, p in zip(run.kept, params):
            kept.lerp_(p, 0.5)
        for kept, p in zip(run.kept, params if t == 2 else ()):
            p.copy_(kept)


@after_steps(
    4,
    adamw,
    refused=(
        Refused(zero.StateError, "have no values where its state rests on disk", lambda s: s.optimizer_tier == "disk"),
        Refused(
            zero.StateError,
            "were written through `.data` since the last step",
            lambda s: is_sharded(s) and not is_released(s),
        ),
    ),
)
def groups_change_memory(run: Run, t: int) -> None:
    for p in run.optimizer.param_groups[0]["params"] if t < 2 else ():
        p.data = p.data * 0.9


@after_steps(3, adamw)
def broadcast_by_hand(run: Run, t: int) -> None:
    """A collective lets go of its tensors some time after it has ended."""
    for p in run.model.parameters():
        if run.world > 1:
            dist.broadcast(p.data, 0)


@program(reference="average", only=FP32)
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
            run.see(model(torch.ones(2, 16)).sum())
        for n, p in model.named_parameters():
            p.data = backup[n]


@program(reference="average", only=FP32)
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
            run.see(model(torch.ones(2, 16)).sum())
        for n, p in model.named_parameters():
            p.data = backup[n]


@program(reference="average", only=FP32)
def perturb(run: Run) -> None:
    model = run.mlp(adamw)
    for t in range(4):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01)
        run.loss(t).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.01)
        run.update()


@program(reference="average", only=FP32)
def merged(run: Run) -> None:
    """A frozen weight takes a trained product in for an evaluation, and gives it back."""
    base, down, up = nn.Linear(16, 16), nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
    base.requires_grad_(False)
    model = nn.ModuleDict({"base": base, "down": down, "up": up})
    run.shard(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))
    for step in range(3):
        x = run.inputs(step, 4, 16)
        (base(x) + up(down(x))).square().mean().backward()
        run.update()
        base.weight.data += up.weight.data @ down.weight.data
        with torch.no_grad():
            run.see(base(torch.ones(1, 16)).sum())
        base.weight.data -= up.weight.data @ down.weight.data


@program(
    reference="average",
    only=FP32,
    refused=(Refused(zero.RankMismatchError, "parameter '0.weight' is not on rank", is_sharded),),
)
def noise_by_rank(run: Run) -> None:
    """Each rank moves its weights elsewhere: right under data parallel training, of no meaning where each has a part."""
    model = run.mlp()
    for step in range(2):
        with torch.no_grad():
            for param in model.parameters():
                param.add_(run.inputs(step, *param.shape))
        run.step(step)


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


@program(reference="average", only=FP32)
def weights_change_places(run: Run) -> None:
    """In one unit, and in two; also before the first forward."""
    model = nn.Sequential(TwoSquares(), *mlp())
    run.shard(model, sgd(model))
    for t in range(3):
        if t != 1:
            change_places(model[0].a, model[0].b)
            change_places(model[1].weight, model[3].weight)
        run.step(t)


@program(reference="average")
def unsharded_weights_change_places(run: Run) -> None:
    model = nn.Sequential(TwoSquares(), *mlp())
    run.shard(model, sgd(model))
    for t in range(3):
        with run.unsharded(model):
            change_places(model[0].a, model[0].b)
            change_places(model[1].weight, model[3].weight)
            model[5].weight.data = model[5].weight.data.t()
        run.step(t)
