"""Calls that read or change gradients, weights, the optimizer, or what the engine holds."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn

import hf_zero as zero
from tests.programs.accessors import full_optimizer_state, set_full_optimizer_state
from tests.programs.usual import LOWEST
from tests.random.loops import fits
from tests.random.models import unwrap
from tests.random.user import MORE_OPTIMIZERS, OPTIMIZERS, User

Act = Callable[[User], None]

# Gradients --------------------------------------------------------------------------------------------------------------


def _before_step(act: Act) -> Act:
    """The action comes between a backward and its step."""

    @functools.wraps(act)
    def call(u: User) -> None:
        u.backward(u.forward_loss())
        act(u)
        u.update()

    return call


@_before_step
def clip_norm(u: User) -> None:
    u.run.clip_grad_norm_(u.model, 0.3)


@_before_step
def clip_value(u: User) -> None:
    if u.run.is_plain:
        nn.utils.clip_grad_value_(u.model.parameters(), 0.02)
    else:
        u.engine.clip_grad_value_(0.02)


@_before_step
def torch_clip_norm(u: User) -> None:
    u.see("norm", nn.utils.clip_grad_norm_(u.model.parameters(), 0.3))


@_before_step
def torch_clip_value(u: User) -> None:
    nn.utils.clip_grad_value_(u.model.parameters(), 0.02)


@_before_step
def grad_none(u: User) -> None:
    """`p.grad = None`, for all or for some."""
    names = sorted(u.params(trained=True))
    for name in names if u.rng.random() < 0.5 else names[: len(names) // 2]:
        u.params()[name].grad = None
    if u.rng.random() < 0.5:
        u.backward(u.forward_loss(1))


@_before_step
def part_zero_grad(u: User) -> None:
    u.some_piece(*u.model.heads).zero_grad()


@_before_step
def read_grad(u: User) -> None:
    u.see("norms", *(p.grad.norm() for p in u.model.parameters() if p.grad is not None))


@_before_step
def edit_grad(u: User) -> None:
    for p in u.model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


@_before_step
def full_gradient(u: User) -> None:
    params = u.params(trained=True)
    chosen = [params[name] for name in u.rng.sample(sorted(params), min(2, len(params)))]
    grads = [p.grad if u.run.is_plain else zero.full_gradient(p) for p in chosen]
    u.see("gradients", *(torch.zeros(p.shape) if grad is None else grad for p, grad in zip(chosen, grads)))


@_before_step
def group_clip(u: User) -> None:
    """As wrappers of optimizers and loss scalers, which know no model."""
    params = [p for group in u.optimizer.param_groups for p in group["params"]]
    if u.rng.random() < 0.5:
        u.see("norm", nn.utils.clip_grad_norm_(params, 0.3))
    else:
        u.run.clip_grad_norm_(u.model, 0.3, parameters=params)
    for p in params:
        if p.grad is not None:
            p.grad.mul_(0.5)


@_before_step
def set_gradient(u: User) -> None:
    if not u.params(trained=True):
        return
    p = u.some_param(trained=True)
    value = torch.full(p.shape, 0.01)
    if u.run.is_plain or u.rng.random() < 0.5:
        p.grad = value
    else:
        zero.set_full_gradient(p, value)


def weighed(u: User) -> None:
    """Ranks with samples of different weight."""
    weight, total = 1.0 + u.run.rank, u.world * (u.world + 1) / 2
    loss = u.forward_loss()
    u.descend(loss * (weight * u.world / total) if u.run.is_plain else u.engine.weigh(loss, weight))


def kept_back(u: User) -> None:
    """Local gradients wait for a later backward, at stages that reduce in each, too."""
    for n in range(2):
        with u.run.no_sync(u.model, **({} if u.run.is_plain else {"defer": True})):
            u.syncing = False
            u.backward(u.forward_loss(n))
        u.syncing = True
        if n == 0 and u.rng.random() < 0.3:
            u.evaluate()
    u.descend(u.forward_loss(2))


def zeroed(u: User) -> None:
    """Gradients that are zeros and not None: every parameter that had one is updated."""
    u.backward(u.forward_loss())
    u.optimizer.step()
    u.model.zero_grad(set_to_none=False)
    u.train(1, skip=u.rng.randrange(len(u.case.arch.parsed)))


def hooked(u: User) -> None:
    """A tensor hook on a parameter."""
    if u.params(trained=True):
        handle = u.some_param(trained=True).register_hook(lambda grad: grad * 3)
        u.backward(u.forward_loss())
        handle.remove()
        u.update()


# Weights ----------------------------------------------------------------------------------------------------------------


def _written(write: Act) -> Act:
    """A write between steps, and a call that reads it first."""

    @functools.wraps(write)
    def call(u: User) -> None:
        with torch.no_grad():
            write(u)
        # Batch norm: what a step reads depends on what this rank has seen.
        has_statistics = any(isinstance(module, nn.BatchNorm1d) for module in u.model.modules())
        match u.rng.choice(("eval", "grad", "state_dict", "step" if not has_statistics else "eval")):
            case "eval":
                u.evaluate()
            case "grad":
                u.evaluate(mode=torch.enable_grad)
            case "state_dict":
                u.model.state_dict()
            case "step":
                u.train()

    return call


@_written
def write_data(u: User) -> None:
    p = u.some_param()
    p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(u.call.seed)) * 0.3


@_written
def write_inplace(u: User) -> None:
    p = u.some_param()
    match u.rng.randrange(4):
        case 0:
            p.mul_(0.5)
        case 1 if p.numel() == 1 and u.case.setting.stage == 3:
            p.clamp_(-0.1, 0.1)  # through `.data` NaN stays NaN, and nothing reports it: docs/LIMITS.md
        case 1:
            p.data.clamp_(-0.1, 0.1)
        case 2 if u.case.setting.precision == "fp32":
            torch.manual_seed(u.call.seed)
            nn.init.normal_(p, std=0.3)
        case 2:
            nn.init.constant_(p, 0.3)  # torch draws other numbers in bf16 than in fp32
        case 3:
            p.copy_(torch.full_like(p, 0.2))


@_written
def write_block(u: User) -> None:
    """Weight clipping over a block; the write of a swap of averages."""
    for p in u.some_piece().parameters():
        p.data.mul_(0.6)


def swap(u: User) -> None:
    """`load_state_dict` of changed values: each rank's weights, rank 0's buffers."""
    before = {name: value.clone() for name, value in u.model.state_dict().items()}
    for name, value in u.model.named_buffers(remove_duplicate=False):
        if name in before:
            before[name] = u.from_first(value.clone())
    u.model.load_state_dict({k: v * 0.7 if v.is_floating_point() else v for k, v in before.items()})
    u.evaluate()
    if u.rng.random() < 0.5:
        u.model.load_state_dict(before)


def gathered(u: User) -> None:
    params = [u.some_param() for _ in range(2)]
    rank = u.rng.randrange(u.world)
    with u.run.gathered(params, modifier_rank=rank):
        u.see("values", *(p.data for p in params))
        if u.run.is_plain or u.run.rank == rank:
            for p in {id(p): p for p in params}.values():
                p.data.mul_(0.5).add_(0.01)


def full_parameter(u: User) -> None:
    p = u.some_param()
    value = p.data if u.run.is_plain else zero.full_parameter(p)
    u.see("value", value)
    if u.run.is_plain:
        p.data = value * 0.5 + 0.01
    else:
        zero.set_full_parameter(p, value * 0.5 + 0.01)


def unsharded(u: User) -> None:
    """All full parameters for a while; edits inside are kept."""
    with torch.no_grad(), u.run.unsharded(u.model):
        u.evaluate()
        if u.rng.random() < 0.7:
            p = u.some_param()
            p.mul_(0.9) if u.rng.random() < 0.5 else p.data.mul_(0.9)
            u.evaluate("after an edit")
        if u.rng.random() < 0.5 and u.run.rank == 0:
            u.see("norms", *(value.float().norm() for value in u.model.state_dict().values()))
    u.train()


def read(u: User) -> None:
    """Logging, and penalties on weights."""
    p, q = u.some_param(), u.some_param()
    u.see("values", p.detach().float().sum(), q.norm().item(), p.data.float().flatten()[:1].clone().numpy())
    penalty = sum((p.float().square().sum() for p in u.some_piece().parameters()), torch.zeros(()))
    u.descend(u.forward_loss() + 0.01 * penalty)


def state_dict(u: User) -> None:
    for name, value in u.model.state_dict().items():
        if u.run.rank == 0:
            u.see(name, value)


def deepcopy(u: User) -> None:
    """A copy for averages or as a reference model: a plain model that computes the same."""
    twin, batch = copy.deepcopy(u.model).eval(), u.batch(5)
    with torch.no_grad(), u.autocast():
        u.see("copy", unwrap(twin(batch.x, batch.ids)))


def average(u: User) -> None:
    """A moving average of the weights."""
    twin = torch.optim.swa_utils.AveragedModel(u.model)
    for n in range(2):
        u.train(n)
        with u.run.unsharded(u.model) if LOWEST else nullcontext():
            twin.update_parameters(u.model)
    batch = u.batch(5)
    with torch.no_grad(), u.autocast():
        u.see("average", unwrap(twin.eval()(batch.x, batch.ids)))


# Optimizers, files, and the engine's own calls --------------------------------------------------------------------------


def optimizer_reload(u: User) -> None:
    u.optimizer.load_state_dict(u.optimizer.state_dict())
    u.train()


def save_load(u: User) -> None:
    """Save, train on, and load. Rank 0's buffers are saved."""
    if not u.run.is_plain:
        folder = u.run.folder / f"saved{u.call.seed}"
        u.engine.save(folder, async_save=u.rng.random() < 0.3)
        u.train()
        return u.engine.load(folder)
    model, optimizer = copy.deepcopy(u.model.state_dict()), copy.deepcopy(u.optimizer.state_dict())
    for name, _ in u.model.named_buffers(remove_duplicate=False):
        if name in model:
            u.from_first(model[name])
    u.train()
    u.model.load_state_dict(model)
    u.optimizer.load_state_dict(optimizer)


def add_group(u: User) -> None:
    params = u.params(trained=True)
    late, u.left_out = [params[name] for name in u.left_out if name in params], []
    if late:
        u.optimizer.add_param_group({"params": late, "lr": 0.03})
    u.train()


def rebind(u: User) -> None:
    """Freeze a part, or unfreeze it, and continue with a new optimizer."""
    piece = u.some_piece(u.model.heads[0])
    thaw = not next(piece.parameters()).requires_grad
    if thaw and u.case.optimizer == "lars":  # docs/LIMITS.md, "Optimizers"
        return
    if not thaw and len(u.params(trained=True)) <= sum(1 for _ in piece.parameters()) + len(u.left_out):
        return
    piece.requires_grad_(thaw)
    u.optimizer = u.new_optimizer()
    u.run.trained[-1].optimizers[:] = [u.optimizer]
    if not u.run.is_plain:
        u.engine.bind(u.optimizer)
    u.train()


def freeze(u: User) -> None:
    """Freeze a part, or unfreeze it, for two steps of the same optimizer."""
    params = [*u.some_piece(*u.model.heads).parameters()]
    flags = [p.requires_grad for p in params]
    if len(u.params(trained=True)) - sum(flags) <= len(u.left_out):
        return
    for p in params:
        p.requires_grad_(not flags[0])
    u.train()
    u.train(1)
    for p, flag in zip(params, flags):
        p.requires_grad_(flag)
    u.train(2)


def two_optimizers(u: User) -> None:
    """Two of them instead of one, and one again."""
    names = sorted(set(u.params(trained=True)) - set(u.left_out))
    if len(names) < 2:
        return
    build = (OPTIMIZERS | MORE_OPTIMIZERS)[u.case.optimizer]
    two = [build([{"params": [u.params()[name] for name in part]}]) for part in (names[::2], names[1::2])]
    _bind(u, two)
    for n in range(2):
        u.backward(u.forward_loss(n))
        for optimizer in two:
            optimizer.step()
            if u.rng.random() < 0.5:
                optimizer.zero_grad()
        u.model.zero_grad()
    u.optimizer = u.new_optimizer()
    _bind(u, [u.optimizer])
    u.train(2)


def _bind(u: User, optimizers: list[torch.optim.Optimizer]) -> None:
    u.run.trained[-1].optimizers[:] = optimizers
    if not u.run.is_plain:
        u.engine.bind(optimizers)


@fits(lambda case: case.groups == 2)
def group_freeze(u: User) -> None:
    """A whole group rests for two steps."""
    if len(u.optimizer.param_groups) < 2:
        return
    tensors = u.optimizer.param_groups[1]["params"]
    if u.rng.random() < 0.5:
        tensors = u.optimizer.param_groups[0]["params"]
    for flag in (False, True):
        for p in tensors:
            p.requires_grad_(flag)
        u.train(flag)
        u.train(2 + flag)


def optimizer_state(u: User) -> None:
    """Moments are read, and written."""
    if not u.params(trained=True):
        return
    p = u.some_param(trained=True)
    for name in ("momentum_buffer", "exp_avg", "square_avg"):
        value = full_optimizer_state(u.run, p, name)
        u.see(name, value)
        if value is not None and value.shape == p.shape and u.rng.random() < 0.7:
            set_full_optimizer_state(u.run, p, name, value.clone() * 0.5)
    u.train()


def local_write(u: User) -> None:
    """Each rank writes the elements that it owns."""
    for p in (u.some_param(), u.some_param()):
        if u.run.is_plain:
            p.data.mul_(0.5)
        else:
            zero.set_local_parameter(p, zero.local_parameter(p) * 0.5)
    if not u.run.is_plain:
        u.engine.refresh()
    u.evaluate()
    u.train()


@fits(lambda case: "disk" not in case.setting.tier)
def group_write(u: User) -> None:
    """Between steps, to what the optimizer holds."""
    with torch.no_grad():
        for group in u.optimizer.param_groups:
            for p in group["params"]:
                p.mul_(0.95)
    u.evaluate()
    u.train()


def schedule(u: User) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(u.optimizer, 1, gamma=0.7)
    u.train()
    scheduler.step()
    for group in u.optimizer.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] *= 0.5


def reshard(u: User) -> None:
    """Detach, use the plain model, shard again."""
    first = u.run.trained.pop()
    if not u.run.is_plain:
        u.engine.detach()
    u.is_parallel = False
    with u.autocast():
        u.evaluate("plain")
    u.is_parallel = True
    u.shard()
    u.run.trained[-1].before = first.before
    u.share_buffers()


def away(u: User) -> None:
    """States leave the device while it does something else."""
    if not u.run.is_plain:
        u.engine.offload_states()
        u.engine.reload_states()
