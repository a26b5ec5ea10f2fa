"""Weights that user code writes between steps: in place, by assignment, through `.data`, by exchange."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from tests.models import Odd, adamw, generator, mlp, sgd
from tests.oracle import Refused, Run, program
from tests.programs.accessors import full_parameter
from tests.programs.gradients import TwoSquares
from tests.programs.usual import FP32, after_steps, after_two_steps, is_sharded, see_weights


@after_two_steps(refused=(Refused(zero.StateError, "'0.weight' was replaced by another parameter"),))
def param_replaced(run: Run) -> None:
    run.model[0].weight = nn.Parameter(torch.eye(16))


@after_two_steps(refused=(Refused(zero.StateError, "'2.weight' was replaced by a submodule without it"),))
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


@after_steps(3, tells=lambda row: row.stage in (1, 2) and row.tier == "cpu")
def zeros_change_their_sign(run: Run, t: int) -> None:
    """As masks of pruning and soft thresholds do. Ranks that write the same zeros do not differ."""
    weight = run.model[2].weight
    with torch.no_grad():
        weight.mul_(torch.arange(16) % 2)
        full_parameter(run, weight)
        weight.neg_()


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
        Refused(zero.StateError, "have no values where its state is on disk", lambda s: s.optimizer_tier == "disk"),
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
        Refused(zero.StateError, "have no values where its state is on disk", lambda s: s.optimizer_tier == "disk"),
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


def seeded(param: Tensor, seed: int) -> Tensor:
    return torch.randn(param.shape, generator=generator(seed)) * 0.3


@torch.no_grad()
def edit(model: nn.Module, kind: str) -> None:
    for number, param in enumerate(model.parameters()):
        match kind:
            case "mul_":
                param.mul_(0.5)
            case "clamp_":
                param.data.clamp_(-0.1, 0.1)
            case "copy_":
                param.data.copy_(seeded(param, number))
            case "init":
                nn.init.constant_(param, 0.02 * (number % 5 - 2))  # torch draws other numbers in other types
            case "one element":
                param.data[(0,) * param.dim()] = 0.7
            case "data":
                param.data = seeded(param, number)
            case "some data":
                if number % 2:
                    param.data = seeded(param, number)


KINDS = ("one element", "mul_", "clamp_", "copy_", "some data", "init", "data")
"""In place, where torch counts it; through `.data`, which it does not count; other memory."""


def with_a_frozen_norm() -> nn.Module:
    model = Odd()
    model.norm.requires_grad_(False)
    return model


@program(more={"ranks": (1, 2, 3)})
def every_kind_of_write(run: Run) -> None:
    """Before a forward, between backward and step, and with neither after it; to trained and frozen weights."""
    model = run.trained_model(with_a_frozen_norm)
    for step, kind in enumerate(KINDS):
        run.step(3 * step)
        edit(model, kind)
        loss = run.loss(3 * step + 1)
        run.see(loss, f"loss after {kind}")
        loss.backward()
        edit(model, KINDS[step - 3])
        run.update()
        see_weights(run, model, f"after {KINDS[step - 3]} and a step:")
        edit(model, kind)
        see_weights(run, model, f"after {kind}:")
    edit(model, "copy_")


@program(only={"stage": (1, 2, 3)}, refused=(Refused(zero.StateError, "'last.weight'(?s:.*)\\(4, 33\\)"),))
def other_shape(run: Run) -> None:
    model = run.trained_model(Odd)
    run.step(0)
    model.last.weight.data = torch.ones(4, 33)
    run.loss(1)


UPDATED_IN_BACKWARD = {"stage": (1, 2, 3), "tier": ("cpu", "disk")}


@program(only={**UPDATED_IN_BACKWARD, "stage": (1, 2)})
def written_after_updates_in_backward(run: Run) -> None:
    model = run.build(Odd)
    model = run.shard(model, sgd(model), step_in_backward=True)
    for step in range(3):
        run.step(step)
        edit(model, "copy_")
    see_weights(run, model)


@program(only=UPDATED_IN_BACKWARD, refused=(Refused(zero.StateError, "'last.weight'"),))
def written_during_updates_in_backward(run: Run) -> None:
    """Another thread updates the weight until the step has returned."""
    model = run.build(Odd)
    run.shard(model, sgd(model), step_in_backward=True)
    run.step(0)
    run.loss(1).backward()
    with torch.no_grad():
        if run.setting.tier == "disk":
            model.last.weight.data = model.last.weight.data * 2
        else:
            model.last.weight.mul_(2)
    run.optimizer.step()


@program(only=FP32)
def averaged_weights_for_a_checkpoint(run: Run) -> None:
    """Averaged weights for an evaluation and a checkpoint, the former ones back for training, then the checkpoint."""
    model = run.trained_model(Odd)
    engine = run.engine_of(model)
    run.step(0)
    kept = [p.detach().clone() for p in model.parameters()]
    edit(model, "copy_")
    with torch.no_grad():
        run.see(run.loss(1), "evaluation")
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    if engine is not None:
        engine.save(run.folder / "averaged")
    see_weights(run, model, "averaged weight")
    for param, value in zip(model.parameters(), kept):
        param.data.copy_(value)
    run.step(2)
    see_weights(run, model, "weight")
    if engine is not None:
        engine.load(run.folder / "averaged", load_optimizer=False)
    else:
        model.load_state_dict(saved)
    see_weights(run, model, "loaded weight")
    run.step(3)


def set_full(run: Run, param: nn.Parameter, value: Tensor) -> None:
    if run.is_plain:
        param.data.copy_(value)
    else:
        zero.set_full_parameter(param, value)


def set_local(run: Run, param: nn.Parameter, value: float) -> None:
    """Each rank sets its own elements."""
    if run.is_plain:
        param.data.fill_(value)
    else:
        zero.set_local_parameter(param, zero.local_parameter(param) * 0 + value)
        run.engine_of(run.model).refresh()


def set_gathered(run: Run, param: nn.Parameter, value: Tensor) -> None:
    with run.gathered([param], modifier_rank=0), torch.no_grad():
        param.copy_(value)


@program(reference="average")
def one_write_after_another(run: Run) -> None:
    """A write, and then other ways to write parameters of the same block."""
    model = run.trained_model(Odd)
    run.step(0)
    model.first.weight.data = seeded(model.first.weight, 1)
    set_full(run, model.first.bias, torch.full((33,), 0.25))
    see_weights(run, model, "set whole:")
    set_gathered(run, model.last.weight, torch.full((3, 33), 0.5))
    see_weights(run, model, "set gathered:")
    set_local(run, model.last.bias, 0.125)
    see_weights(run, model, "set local:")
    model.load_state_dict({name: seeded(p, 3) for name, p in Odd().state_dict().items()}, strict=True)
    run.step(1)
    see_weights(run, model, "loaded:")


@program(only=FP32, reference="average")
def data_between_forward_and_backward(run: Run) -> None:
    """Torch does not count such a write. Backward computes with the new values, and the step starts from them."""
    model = run.mlp(depth=4)
    weights = [p for p in model.parameters() if p.dim() > 1]
    for t in range(9):
        loss = run.loss(t)
        if t in (2, 3, 5, 8):
            weights[t % len(weights)].data.mul_(0.5)
        loss.backward()
        run.see(loss, "loss")
        run.update()


@program(reference="average", only={"precision": ("bf16",)})
def digits_of_what_is_not_written(run: Run) -> None:
    """Writes reach the masters with all their digits, and leave those of other elements alone."""
    model = run.trained_model(lambda: nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8)), adamw)
    run.step(0)
    expected = {name: full_parameter(run, param).clone() for name, param in model.named_parameters()}

    def see(what: str) -> None:
        now = {name: full_parameter(run, param) for name, param in model.named_parameters()}
        run.see([name for name in now if not torch.equal(now[name], expected[name])], f"differing after {what}")

    weight = model[0].weight
    with torch.no_grad():
        weight[3, 5] = expected["0.weight"][3, 5] = 0.5
        weight[40:].fill_(0.25)
        expected["0.weight"][40:] = 0.25
    see("writes that torch counts")
    weight.data[0].zero_()
    expected["0.weight"][0] = 0
    see("a write that it does not count")
    model[2].weight.data = expected["2.weight"] = torch.randn(8, 64, generator=generator(1))
    see("an assignment")
    for param in model.parameters():  # values that go away and come back, as shown
        kept = param.detach().clone()
        param.data = torch.zeros_like(kept)
        run.see(param.any(), "whether a value is left")
        param.data = kept
    for name, param in model.named_parameters():
        run.see(
            torch.allclose(full_parameter(run, param), expected[name], atol=4e-3, rtol=8e-3), f"whether {name} is back"
        )
    run.step(1)


class Adapted(nn.Module):
    """Each block has frozen and trained parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"base": nn.Linear(16, 16), "added": nn.Linear(16, 16), "norm": nn.LayerNorm(16)})
            for _ in range(3)
        )
        self.head = nn.Linear(16, 7)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block["norm"](x + block["base"](x) + block["added"](x))
        return self.head(x)


def partly_frozen(model: nn.Module, frozen: set[str]) -> torch.optim.Optimizer:
    for name, param in model.named_parameters():
        param.requires_grad_(name not in frozen)
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


def bases(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters() if "base" in name}


@program(reference="average", only={**FP32, "stage": (1, 2, 3)})
def written_by_its_owner(run: Run) -> None:
    """The rank that owns a frozen parameter writes it; `engine.refresh()` comes steps later."""
    model = run.build(Adapted)
    run.shard(model, partly_frozen(model, bases(model)))
    engine, param = run.engine_of(model), model.blocks[0]["base"].bias
    if engine is None:
        param.data.add_(1)
    elif len(mine := zero.local_parameter(param)):
        zero.set_local_parameter(param, mine + 1)
    run.loop(lambda step: model.head(run.inputs(step)).square().mean(), 2)
    if engine is not None:
        engine.refresh()
    with run.unsharded(model):
        run.see(param, "written parameter")


@program(reference="average")
def transposed_in_place(run: Run) -> None:
    """Operations that change strides write no element."""
    model = run.mlp()
    for step in range(3):
        with torch.no_grad():
            for weight in (model[0].weight, model[2].weight):
                weight.t_()
        run.step(step)
