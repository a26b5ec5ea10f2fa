"""Calls that read or change gradients, weights, the optimizer, or what the engine holds."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hf_zero as zero
from tests.random.models import unwrap
from tests.random.user import User

# Gradients --------------------------------------------------------------------------------------------------------------


def _with_gradients(u: User, body: Callable[[], Any]) -> None:
    """A backward, an action on gradients that may be refused, and the step."""
    u.backward(u.forward_loss())
    u.attempt(body)
    u.update()


def hooked(u: User) -> None:
    """A tensor hook on a parameter."""
    if u.params(trained=True):
        handle = u.some_param(trained=True).register_hook(lambda grad: grad * 3)
        u.backward(u.forward_loss())
        handle.remove()
        u.update()


def clip_norm(u: User) -> None:
    _with_gradients(u, lambda: u.run.clip_grad_norm_(u.model, 0.3))


def clip_value(u: User) -> None:
    def body() -> None:
        if u.run.is_plain:
            nn.utils.clip_grad_value_(u.model.parameters(), 0.02)
        else:
            u.engine.clip_grad_value_(0.02)

    _with_gradients(u, body)


def torch_clip_norm(u: User) -> None:
    _with_gradients(u, lambda: u.see("norm", nn.utils.clip_grad_norm_(u.model.parameters(), 0.3)))


def torch_clip_value(u: User) -> None:
    _with_gradients(u, lambda: nn.utils.clip_grad_value_(u.model.parameters(), 0.02))


def grad_none(u: User) -> None:
    """`p.grad = None`, for all or for some."""
    names = sorted(u.params(trained=True))
    chosen = names if u.rng.random() < 0.5 else names[: len(names) // 2]
    u.backward(u.forward_loss())

    def body() -> None:
        for name in chosen:
            u.params()[name].grad = None

    u.attempt(body)
    if u.rng.random() < 0.5:
        u.backward(u.forward_loss(1))
    u.update()


def part_zero_grad(u: User) -> None:
    _with_gradients(u, u.some_piece(*u.model.heads).zero_grad)


def read_grad(u: User) -> None:
    def body() -> None:
        norms = [p.grad.norm().float() for p in u.model.parameters() if p.grad is not None]
        u.see("norm", torch.stack(norms).norm() if norms else 0.0)

    _with_gradients(u, body)


def edit_grad(u: User) -> None:
    def body() -> None:
        for p in u.model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)

    _with_gradients(u, body)


def full_gradient(u: User) -> None:
    params = u.params(trained=True)
    u.backward(u.forward_loss())
    chosen = [params[name] for name in u.rng.sample(sorted(params), min(2, len(params)))]
    grads = [p.grad if u.run.is_plain else zero.full_gradient(p) for p in chosen]
    u.see("gradients", *(torch.zeros(p.shape) if grad is None else grad for p, grad in zip(chosen, grads)))
    u.update()


# Weights ----------------------------------------------------------------------------------------------------------------


def _written(u: User, write: Callable[[], Any]) -> None:
    """A write between steps, and a call that reads it first and may refuse it."""
    # Batch norm: what a step reads depends on what this rank has seen.
    has_statistics = any(isinstance(module, nn.BatchNorm1d) for module in u.model.modules())
    follow = u.rng.choice(("eval", "grad", "state_dict", "step" if not has_statistics else "eval"))

    def body() -> None:
        with torch.no_grad():
            write()
        match follow:
            case "eval":
                u.evaluate()
            case "grad":
                u.evaluate(mode=torch.enable_grad)
            case "state_dict":
                u.model.state_dict()
            case "step":
                u.train()

    u.attempt(body)


def write_data(u: User) -> None:
    p = u.some_param()
    value = torch.randn(p.shape, generator=torch.Generator().manual_seed(u.call.seed)) * 0.3

    def write() -> None:
        p.data = value.clone()

    _written(u, write)


def write_inplace(u: User) -> None:
    p, how = u.some_param(), u.rng.randrange(4)

    def write() -> None:
        match how:
            case 0:
                p.mul_(0.5)
            case 1 if p.numel() == 1 and u.case.setting.stage == 3:
                p.clamp_(-0.1, 0.1)  # through `.data` NaN stays NaN, and nothing reports it: docs/LIMITS.md
            case 1:
                p.data.clamp_(-0.1, 0.1)
            case 2:
                torch.manual_seed(u.call.seed)
                if u.case.setting.precision == "fp32":
                    nn.init.normal_(p, std=0.3)
                else:
                    nn.init.constant_(p, 0.3)  # torch draws other numbers in bf16 than in fp32
            case 3:
                p.copy_(torch.full_like(p, 0.2))

    _written(u, write)


def write_block(u: User) -> None:
    """Weight clipping over a block; the write of a swap of averages."""
    piece = u.some_piece()

    def write() -> None:
        for p in piece.parameters():
            p.data.mul_(0.6)

    _written(u, write)


def swap(u: User) -> None:
    """`load_state_dict` of changed values: those that each rank's `state_dict` returned, and its own buffers."""
    state = u.model.state_dict()
    state = {**state, **{name: value for name, value in u.model.named_buffers() if name in state}}
    before = {name: value.clone() for name, value in state.items()}
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


def state_dict(u: User) -> None:
    for name, value in u.model.state_dict().items():
        if u.run.rank == 0:
            u.see(name, value)


def deepcopy(u: User) -> None:
    """A copy for averages or as a reference model: a plain model that computes the same, or a named error."""

    def body() -> None:
        twin, batch = copy.deepcopy(u.model).eval(), u.batch(5)
        with torch.no_grad(), u.autocast():
            u.see("copy", unwrap(twin(batch.x, batch.ids)))

    u.attempt(body)


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
        if name in model and u.world > 1:
            dist.broadcast(model[name], 0)
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
    if not thaw and len(u.params(trained=True)) <= sum(1 for _ in piece.parameters()) + len(u.left_out):
        return
    piece.requires_grad_(thaw)
    u.optimizer = u.new_optimizer()
    u.run.trained[-1].optimizers[:] = [u.optimizer]
    if not u.run.is_plain:
        u.engine.bind(u.optimizer)
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

    @contextlib.contextmanager
    def plain() -> Any:
        with torch.no_grad(), nullcontext() if u.run.is_plain else u.autocast():
            yield

    u.is_parallel = False
    u.evaluate("plain", mode=plain)
    u.is_parallel = True
    u.shard()
    u.run.trained[-1].before = first.before
    u.share_buffers()


def away(u: User) -> None:
    def body() -> None:
        if not u.run.is_plain:
            u.engine.offload_states()
            u.engine.reload_states()

    u.attempt(body)
