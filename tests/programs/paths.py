"""Paths through a model: which parts a forward runs, which of them a loss reaches, and how often; the same on all ranks or not.

At stage 3 all ranks run the same units in a forward; what their losses reach may differ.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import VOCAB, WIDTH, Block, LanguageModel, generator, sgd, token_loss
from tests.oracle import Run, program
from tests.programs.architectures import Stack
from tests.programs.usual import FP32, trained_on

KEPT_WHOLE = {"stage": (0, 1, 2)}
"""`only=KEPT_WHOLE`: ranks run different units in a forward, which stage 3 does not support (docs/LIMITS.md)."""
OTHER_RANKS = {
    "more": {"ranks": (1, 2, 3, 4)},
    "accept": lambda s: s.ranks == 2
    or (s.stage > 1 and s.replicas == 1 + (s.ranks == 4) and s.tier in ("none", "cpu/cpu")),
}
"""Also alone, with an odd number of ranks, and in two replicas whose ranks share what a stage shards."""
PAST_LEARNING = 7
"""Steps of programs that must stay right after the engine has learned the order of their units."""


def language_model_loss(run: Run, step: int) -> Tensor:
    ids = run.ids(step)
    return token_loss(run.model(ids), ids)


def _model(name: str, build: Callable[[], nn.Module], loss: Any = language_model_loss, **options: Any) -> None:
    @functools.wraps(loss)
    def named(run: Run, step: int) -> Tensor:
        return loss(run, step)

    named.__name__, named.__module__ = name, __name__
    steps = options.pop("steps", 4)
    trained_on(build, steps=steps, **options)(named)


_model("whole_model", LanguageModel, more={"ranks": (1, 2, 3)}, reference="ddp")
_model("tied", functools.partial(LanguageModel, tied=True))
_model("fused_head", functools.partial(LanguageModel, fused=True), steps=PAST_LEARNING)
_model("fused_tied_head", functools.partial(LanguageModel, fused=True, tied=True))
_model("unused_head", functools.partial(LanguageModel, heads=3))


@trained_on(functools.partial(LanguageModel, fused=True, root=True))
def two_forwards_with_a_root_parameter(run: Run, step: int) -> Tensor:
    one, two = run.ids(step), run.ids(step + 100)
    return token_loss(run.model(one), one) + token_loss(run.model(two), two).square()


@trained_on(functools.partial(LanguageModel, root=True))
def forgotten_forward(run: Run, step: int) -> Tensor:
    """A forward without a backward before; in one step its graph is alive during the next backward."""
    run.model(run.ids(step + 100))
    if step == 1:
        run.kept = run.model(run.ids(step + 200))
    loss = language_model_loss(run, step)
    return loss


@program(reference="average", more={"ranks": (1, 2, 3)})
def two_backwards(run: Run) -> None:
    model = run.trained_model(lambda: LanguageModel(root=True))
    for step in range(4):
        one, two = run.ids(step), run.ids(step + 100)
        first, second = token_loss(model(one), one), token_loss(model(two), two)
        first.backward()
        second.backward()
        run.see(first + second, "losses")
        run.update()


@program(reference="average")
def retained_graph(run: Run) -> None:
    run.trained_model(lambda: LanguageModel(tied=True, root=True))
    for step in range(4):
        loss = language_model_loss(run, step)
        loss.backward(retain_graph=True)
        (0.5 * loss).backward(retain_graph=True)
        loss.square().backward()
        run.see(loss, "loss")
        run.update()


@trained_on(LanguageModel, steps=PAST_LEARNING)
def penalty_on_inputs_of_blocks(run: Run, step: int) -> Tensor:
    x = run.inputs(step, 2, 6, WIDTH).requires_grad_()
    hidden = x
    for block in run.model.body.blocks:
        hidden = block(hidden)
    loss = token_loss(run.model.heads[0](hidden), run.ids(step))
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + 0.1 * grad.square().sum()


@trained_on(LanguageModel, steps=PAST_LEARNING, loose=5.0)
def penalty_on_parameters(run: Run, step: int) -> Tensor:
    """Second derivatives amplify rounding: hence `loose`."""
    loss = language_model_loss(run, step)
    params = [p for p in run.model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
    return loss + 0.01 * sum(g.square().sum() for g in grads if g is not None)


@trained_on(LanguageModel)
def gradients_by_autograd_grad(run: Run, step: int) -> Tensor:
    loss = language_model_loss(run, step)
    params = list(run.model.parameters())
    grads = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
    run.see(sum(g.double().square().sum() for g in grads if g is not None), "squares of this rank's gradients")
    return loss


@trained_on(LanguageModel, steps=PAST_LEARNING)
def loss_on_an_inner_activation(run: Run, step: int) -> Tensor:
    run.model(run.ids(step))
    return run.model.body.blocks[1].seen.square().mean()


def frozen_front() -> nn.Module:
    model = LanguageModel()
    model.body.embed.requires_grad_(False)
    return model


@trained_on(frozen_front, steps=PAST_LEARNING)
def loss_on_the_first_block_every_other_step(run: Run, step: int) -> Tensor:
    """Behind a frozen embedding: the first block has no input that needs a gradient. Other steps leave it out."""
    ids, model = run.ids(step), run.model
    if step % 2:
        model(ids)
        return model.body.blocks[0].seen.square().mean()
    return token_loss(model.heads[0](model.body.norm(model.body.blocks[1](model.body.embed(ids)))), ids)


def _loss_on_the_first_block(run: Run, step: int) -> Tensor:
    """On one rank, behind a frozen embedding: a backward that comes to the output of no block, and to no input."""
    ids = run.ids(step)
    logits = run.model(ids)
    if (run.rank + step) % 2:
        return run.model.body.blocks[0].seen.square().mean()
    return token_loss(logits, ids)


_model("loss_on_the_first_block_by_rank", frozen_front, _loss_on_the_first_block, **OTHER_RANKS)


@program(reference="average", **OTHER_RANKS)
def losses_on_the_first_block_by_rank(run: Run) -> None:
    """The second backward of a step is of the whole model on some ranks only; the first one with and without `no_sync`."""
    model = run.trained_model(frozen_front)
    for step in range(4):
        with run.no_sync(model) if step % 2 else contextlib.nullcontext():
            one = language_model_loss(run, step)
            one.backward()
        two = _loss_on_the_first_block(run, step)
        if step % 2 == 0:  # a read between forward and backward
            next(p.grad for p in model.parameters() if p.requires_grad).norm()
        two.backward()
        run.see(one + two, "losses")
        run.update()


@trained_on(LanguageModel, **OTHER_RANKS)
def loss_depth_by_rank(run: Run, step: int) -> Tensor:
    """Ranks run the same forward and take the loss from different depths."""
    outputs: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda m, a, out: outputs.append(out)) for block in run.model.body.blocks]
    ids = run.ids(step)
    logits = run.model(ids)
    for hook in hooks:
        hook.remove()
    who = run.rank + step
    return token_loss(logits, ids) if who % 2 else outputs[who % 3].square().mean()


@trained_on(functools.partial(LanguageModel, heads=2))
def alternating_heads(run: Run, step: int) -> Tensor:
    ids = run.ids(step)
    return token_loss(run.model(ids, head=step % 2), ids)


@trained_on(functools.partial(LanguageModel, heads=2), only=KEPT_WHOLE)
def another_head_on_each_rank(run: Run, step: int) -> Tensor:
    ids = run.ids(step)
    return token_loss(run.model(ids, head=(run.rank + step) % 2), ids)


@trained_on(functools.partial(LanguageModel, heads=2), steps=PAST_LEARNING, **OTHER_RANKS)
def losses_on_other_heads(run: Run, step: int) -> Tensor:
    """All heads run on every rank. The one that a rank's loss leaves out shares its input with the one that it takes."""
    ids = run.ids(step)
    hidden = torch.relu(run.model.body(ids))
    return token_loss([head(hidden) for head in run.model.heads][(run.rank + step) % 2], ids)


@trained_on(LanguageModel, only=KEPT_WHOLE)
def layer_drop_by_rank(run: Run, step: int) -> Tensor:
    model, ids = run.model, run.ids(step)
    x = model.body.embed(ids)
    for index, block in enumerate(model.body.blocks):
        if (index + run.rank + step) % 3:
            x = block(x)
    return token_loss(model.heads[0](model.body.norm(x)), ids)


@trained_on(LanguageModel)
def layer_drop_alike(run: Run, step: int) -> Tensor:
    model, ids = run.model, run.ids(step)
    x = model.body.embed(ids)
    for index, block in enumerate(model.body.blocks):
        if (index + step) % 3:
            x = block(x)
    return token_loss(model.heads[0](model.body.norm(x)), ids)


@trained_on(LanguageModel, only=KEPT_WHOLE)
def uneven_forwards(run: Run, step: int) -> Tensor:
    total = torch.zeros(())
    for micro in range(1 + (run.rank + step) % 3):
        total = total + language_model_loss(run, step + 100 * micro)
    return total


@trained_on(LanguageModel, only=FP32)
def head_weight_read_in_the_loss(run: Run, step: int) -> Tensor:
    model, ids = run.model, run.ids(step)
    hidden = model.body(ids)
    return token_loss(F.linear(hidden, model.heads[0].weight, model.heads[0].bias), ids)


@trained_on(functools.partial(LanguageModel, tied=True), only=FP32)
def tied_weight_read_in_the_loss(run: Run, step: int) -> Tensor:
    model, ids = run.model, run.ids(step)
    return token_loss(F.linear(model.body(ids), model.heads[0].weight), ids)


def _checkpointed(run: Run, step: int, use_reentrant: bool) -> Tensor:
    model, ids = run.model, run.ids(step)
    x = model.body.embed(ids)
    for block in model.body.blocks:
        x = checkpoint(block, x, use_reentrant=use_reentrant)
    return token_loss(model.heads[0](model.body.norm(x)), ids)


@trained_on(LanguageModel, more={"ranks": (2, 3)})
def reentrant_checkpoints(run: Run, step: int) -> Tensor:
    return _checkpointed(run, step, use_reentrant=True)


@trained_on(LanguageModel, more={"ranks": (2, 3)})
def checkpoints(run: Run, step: int) -> Tensor:
    return _checkpointed(run, step, use_reentrant=False)


class Box:
    """A container that no library knows."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Boxing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, box: Box) -> Box:
        return Box(self.block(box.value))


class Boxes(Stack):
    block = Boxing

    def forward(self, ids: Tensor) -> Tensor:
        box = Box(self.embed(ids))
        for block in self.blocks:
            box = block(box)
        return self.head(box.value)


class ReadsOthers(Stack):
    """A weight is read by another module, in the middle of its forward; the weight's own module runs later too."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for index, block in enumerate(self.blocks):
            x = block(x) + 0.1 * F.linear(x, self.blocks[(index + 1) % 3].up.weight[:WIDTH])
        return self.head(x) + F.linear(x, self.embed.weight)


class Forces(Stack):
    """Takes a gradient inside its forward."""

    def forward(self, ids: Tensor) -> Tensor:
        with torch.enable_grad():
            x = self.embed(ids)
            if not x.requires_grad:
                x.requires_grad_()
            y = x
            for block in self.blocks:
                y = block(y)
            (force,) = torch.autograd.grad(y.square().sum(), x, create_graph=self.training)
        return self.head(y + 0.1 * force)


_model("unknown_containers", Boxes, steps=PAST_LEARNING, tells=lambda row: row.stage == 3)
_model("weights_of_others_read_in_forward", ReadsOthers, only=FP32)
_model("gradient_taken_in_forward", Forces, steps=PAST_LEARNING, loose=5.0)


class Ways(nn.Module):
    """Every rank runs the same forward; which paths back there are depends on `who`.

    Args:
        frozen: the first part of it has no gradient anywhere.
    """

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks, self.left, self.right = (nn.ModuleList(Block() for _ in range(n)) for n in (3, 2, 2))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.aux = nn.ModuleList(nn.Linear(WIDTH, VOCAB) for _ in range(3))
        if frozen:
            self.embed.requires_grad_(False)
            self.blocks.requires_grad_(False)

    def forward(self, ids: Tensor, way: str, who: int) -> Tensor:
        return getattr(self, way)(self.embed(ids), who)

    def towers(self, x: Tensor, who: int) -> Tensor:
        """A loss on the first tower alone, or on the one that reads it."""
        y = x
        for block in self.blocks:
            x = block(x)
        for block in self.left:
            y = block(y + 0.1 * x)
        return self.head(x if who % 2 else y)

    def branches(self, x: Tensor, who: int) -> Tensor:
        for block in self.blocks:
            x = block(x)
        one = two = x
        for left in self.left:
            one = left(one)
        for right in self.right:
            two = right(two)
        return self.head(one.detach() + two if who % 3 == 0 else one + two.detach() if who % 3 == 1 else one + two)

    def auxiliary(self, x: Tensor, who: int) -> Tensor:
        found = []
        for block, head in zip(self.blocks, self.aux):
            x = block(x)
            found.append(head(x))
        return sum((each for at, each in enumerate(found) if (at + who) % 3), torch.zeros(()))

    def cut(self, x: Tensor, who: int) -> Tensor:
        """Nothing goes back beyond another block on each rank."""
        for at, block in enumerate(self.blocks):
            x = block(x)
            x = x.detach() if at == who % 2 else x
        return self.head(x)

    def again(self, x: Tensor, who: int) -> Tensor:
        """All blocks a second time, the other way round; from these nothing goes back on some ranks."""
        for block in self.blocks:
            x = block(x)
        y = x
        for block in reversed(self.blocks):
            y = block(y if who % 2 else y.detach())
        return self.head(x + y)

    def twice(self, x: Tensor, who: int) -> Tensor:
        one, two, three = self.blocks
        first = one(x)
        x = two(x + (first if who % 4 in (0, 3) else first.detach()))
        second = one(x)
        return self.head(three(x + (second if who % 4 in (0, 3) else second.detach())))

    def apart(self, x: Tensor, who: int) -> Tensor:
        """A second graph begins at a leaf."""
        for block in self.blocks:
            x = block(x)
        leaf = x.detach().requires_grad_()
        for block in self.left:
            leaf = block(leaf)
        return self.head(x if who % 2 else leaf)


def _another_way_back(run: Run, step: int, way: str) -> Tensor:
    ids = run.ids(step)
    return token_loss(run.model(ids, way, run.rank + step), ids)


for way in ("towers", "branches", "auxiliary", "cut", "again", "twice", "apart"):
    for suffix, frozen in (("", False), ("_behind_frozen", True)):
        _model(
            f"way_back_{way}{suffix}",
            functools.partial(Ways, frozen=frozen),
            functools.partial(_another_way_back, way=way),
            steps=PAST_LEARNING,
            **(OTHER_RANKS if way in ("branches", "auxiliary", "twice") and not frozen else {}),
        )


class Branches(nn.Module):
    """Blocks that a rank may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, without: int) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index != without:
                x = block(x)
        return x


def _adversaries(run: Run, together: bool) -> None:
    """A generator and its critic, each with an optimizer; ranks may leave different blocks out of both."""
    maker, critic = (run.build(Branches, seed) for seed in (1, 2))
    optimizers = [sgd(maker), sgd(critic)]
    for model, optimizer in zip((maker, critic), optimizers):
        run.shard(model, optimizer)
    for step in range(4):
        x = torch.randn(3, WIDTH, generator=generator(run.rank, step))
        without = (run.rank + step) % 4 if together else 4
        made = maker(x, without)
        loss = critic(made, 3 - without if together else 4).square().mean() + made.mean()
        loss.backward()
        run.see(loss, "loss")
        run.sync_gradients()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        run.forget_gradients()


@program(reference="average")
def two_models_in_one_loss(run: Run) -> None:
    _adversaries(run, together=False)


@program(reference="average", only={"stage": (1, 2), "replicas": (1,), "tier": ("none",), "deferred": (False,), **FP32})
def two_models_with_other_blocks_on_each_rank(run: Run) -> None:
    """Elsewhere it can end in a StallError: two engines have no agreed order of collectives in one backward."""
    _adversaries(run, together=True)
