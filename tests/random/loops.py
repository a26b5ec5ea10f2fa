"""Calls that train: forwards, graphs and backwards in many orders, also other ones on each rank."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from tests.random.models import Planned, Tape, unwrap
from tests.random.user import Case, User


def step(u: User) -> None:
    u.train()


def accumulate(u: User) -> None:
    micros = u.rng.choice((2, 3))
    for n in range(micros):
        with nullcontext() if n == micros - 1 else u.no_sync():
            u.backward(u.forward_loss(n) / micros)
    u.update()


def accumulate_synced(u: User) -> None:
    """Two backwards that both reduce."""
    u.backward(u.forward_loss(0) / 2)
    u.descend(u.forward_loss(1) / 2)


def two_forwards(u: User) -> None:
    """Contrastive: two forwards, one backward."""
    one, two = u.batch(0), u.batch(1)
    a, b = u.forward(one), u.forward(two)
    loss = u.loss(a, one) + u.loss(b, two) + (a.float() * b.float()).mean()
    u.see("loss", loss)
    u.descend(loss)


def crossed(u: User) -> None:
    """Two forwards, then their backwards, in either order."""
    losses = [u.forward_loss(0), u.forward_loss(1)]
    if u.rng.random() < 0.5:
        losses.reverse()
    for loss in losses:
        u.backward(loss)
    u.update()


def forward_only(u: User) -> None:
    """A forward whose graph gets no backward, dropped now or later."""
    loss = u.forward_loss(0)
    u.kept = [loss] if u.rng.random() < 0.5 else []
    del loss
    if u.rng.random() < 0.7:
        u.train(1)


def two_losses(u: User) -> None:
    batch = u.batch()
    out = u.forward(batch)
    u.backward(u.loss(out, batch), retain_graph=True)
    u.descend(u.loss(out, batch, 1))


def retain_twice(u: User) -> None:
    loss = u.forward_loss()
    u.backward(loss, retain_graph=True)
    u.backward(loss, retain_graph=u.rng.random() < 0.5)
    u.update()


def double_backward(u: User) -> None:
    """A penalty on the gradient of the inputs."""
    batch = u.batch(grad=True)
    out = u.forward(batch)
    (slope,) = torch.autograd.grad(out.float().sum(), batch.x, create_graph=True, allow_unused=True)
    penalty = slope.square().sum() / 40 if slope is not None else 0.0
    u.see("penalty", penalty)
    u.descend(u.loss(out, batch) + penalty)


def grad_inputs(u: User) -> None:
    batch = u.batch(grad=True)
    u.see("gradient", *torch.autograd.grad(u.loss(u.forward(batch), batch), batch.x, allow_unused=True))
    if u.rng.random() < 0.5:
        u.train(1)


def grad_params(u: User) -> None:
    params = [p for _, p in sorted(u.params(trained=True).items())]
    if chosen := u.rng.sample(params, min(3, len(params))):
        u.see("gradients", *torch.autograd.grad(u.forward_loss(), chosen, allow_unused=True))
    u.train(1)


def other_head(u: User) -> None:
    """Multi-task: another head, another expert; the others are not used."""
    u.train(head=u.rng.randrange(3), route=u.rng.randrange(3))


def other_heads(u: User) -> None:
    """Heads in turn, over accumulated batches."""
    with u.no_sync():
        u.backward(u.forward_loss(0, head=0, route=1))
    u.descend(u.forward_loss(1, head=1, route=2))


def layer_drop(u: User) -> None:
    u.train(skip=u.rng.randrange(len(u.case.arch.parsed)))


def recorded(u: User) -> None:
    """A loss on tensors recorded inside blocks, with the output or without it."""
    tape, batch = Tape(), u.batch()
    out = u.forward(batch, tape=tape)
    loss = tape.tensors[u.rng.randrange(len(tape.tensors))].float().square().sum() / 20
    if u.rng.random() < 0.5:
        loss = loss + u.loss(out, batch)
    u.see("loss", loss)
    if loss.requires_grad:
        u.descend(loss)


def part(u: User) -> None:
    """A part of the model called directly, and trained."""
    piece, batch, u.is_ahead = u.some_piece(u.model.heads[0]), u.batch(grad=True), True
    torch.manual_seed(batch.seed)
    loss = u.loss(unwrap(piece(batch.x)), batch)
    u.see("loss", loss)
    u.descend(loss)


def part_eval(u: User) -> None:
    piece = u.some_piece()
    u.model.eval()
    with u.rng.choice((torch.no_grad, torch.inference_mode))():
        u.see("output", unwrap(piece(u.batch().x)))
    u.model.train()


def checkpoint_reentrant(u: User) -> None:
    u.train(grad=True, recompute=True)


def checkpoint_nonreentrant(u: User) -> None:
    u.train(grad=u.rng.random() < 0.5, recompute=False)


def evaluate(u: User) -> None:
    u.evaluate(mode=u.rng.choice((torch.no_grad, torch.inference_mode, torch.enable_grad)))


def eval_between(u: User) -> None:
    loss = u.forward_loss()
    u.evaluate("before backward")
    u.backward(loss)
    u.evaluate("before the step")
    u.update()


def closure(u: User) -> None:
    if u.run.is_plain:
        return u.train()

    def run() -> Tensor:
        u.model.zero_grad()
        u.backward(loss := u.forward_loss())
        return loss

    u.optimizer.step(run)
    u.model.zero_grad()


def other_thread(u: User) -> None:
    """Forward and backward in another thread."""
    errors: list[BaseException] = []

    def run() -> None:
        torch.set_num_threads(1)
        try:
            u.backward(u.forward_loss())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in errors:
        raise error
    u.update()


def anomaly(u: User) -> None:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):  # some programs diverge
        u.train()


def raise_forward(u: User) -> None:
    with contextlib.suppress(Planned):
        u.forward(u.batch(), fail=u.rng.randrange(len(u.case.arch.parsed)))
    u.model.zero_grad()
    u.train(1)


def raise_backward(u: User) -> None:
    tape, batch = Tape(), u.batch(grad=True)
    out = u.forward(batch, tape=tape)

    def fail(_: Tensor) -> None:
        raise Planned

    inner = tape.tensors[u.rng.randrange(len(tape.tensors))]
    if inner.requires_grad:
        inner.register_hook(fail)
        with contextlib.suppress(Planned):
            u.loss(out, batch).backward()
    u.model.zero_grad()
    u.train(1)


# Ranks that differ ------------------------------------------------------------------------------------------------------


def fits(rule: Callable[[Case], bool]) -> Callable[[Any], Any]:
    """State which cases a call goes with."""

    def mark(call: Any) -> Any:
        call.fits = rule
        return call

    return mark


def _has(case: Case, *pieces: str) -> bool:
    return any(block.piece in pieces for block in case.arch.parsed)


def _several_keep(case: Case) -> bool:
    """Ranks may run different units only where none is gathered for a forward."""
    return case.setting.stage < 3 and case.setting.ranks > 1


def _experts_share_a_unit(case: Case) -> bool:
    """Blocks are found as children of one class in a list; one expert may be a unit where there is one such block."""
    count = sum(block.piece == "experts" for block in case.arch.parsed)
    return case.setting.stage < 3 or count == 0 or (count > 1 and case.arch.container in ("list", "sequential"))


def _trains_early(case: Case) -> bool:
    """A rank whose loss uses no trained parameter makes no backward that others could meet, as under DDP."""
    return not (case.arch.front_frozen and case.arch.parsed[0].frozen)


@fits(_several_keep)
def rank_branches(u: User) -> None:
    """Other heads, experts, blocks on each rank."""
    skip = u.run.rank % len(u.case.arch.parsed) if u.rng.random() < 0.5 else -1
    u.train(head=u.run.rank, route=u.run.rank, skip=skip)


@fits(lambda case: _several_keep(case) and not _has(case, "conv", "counter"))
def rank_forwards(u: User) -> None:
    """Another number of forwards on each rank. Where buffers change, DDP does not permit it."""
    total = u.forward_loss(0)
    for n in range(1, 1 + (u.run.rank + u.call.seed) % 3):
        total = total + u.forward_loss(n)
    u.descend(total)


@fits(lambda case: case.setting.ranks > 1 and _experts_share_a_unit(case))
def rank_experts(u: User) -> None:
    """Inside a unit ranks may differ at every stage."""
    u.train(route=u.run.rank)


@fits(lambda case: case.setting.ranks > 1 and _trains_early(case))
def rank_losses(u: User) -> None:
    """The same forward on all ranks; the first one's loss uses what a block recorded, the others' the output."""
    tape, batch = Tape(), u.batch(grad=True)
    out = u.forward(batch, tape=tape)
    loss = tape.tensors[0].float().square().sum() / 20 if u.run.rank == 0 else u.loss(out, batch)
    u.see("loss", loss)
    u.descend(loss)


@fits(lambda case: case.setting.ranks > 1 and not _has(case, "conv"))
def empty_batch(u: User) -> None:
    u.train(size=0 if u.run.rank == u.rng.randrange(u.world) else 2)
