"""Parameters frozen and unfrozen in mid-training."""

from __future__ import annotations

import contextlib
import copy
import functools
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.models import LanguageModel, mlp, sgd, token_loss
from tests.oracle import Refused, Run, program


def deep() -> nn.Sequential:
    return mlp(depth=4)


@program(reference="average")
def unfrozen_before_an_evaluation(run: Run) -> None:
    """The first forward with other trained parameters, and with another group, is one under `inference_mode`."""
    model = run.build(deep)
    model[0].requires_grad_(False)
    run.shard(model, sgd(nn.Sequential(*model[:5])))
    for t in range(4):
        run.step(2 * t)
        if t == 1:
            model[0].requires_grad_(True)
        elif t == 2:
            model.zero_grad()
            run.optimizer.add_param_group({"params": [*model[6].parameters()]})
        with torch.inference_mode():
            run.see(run.loss(2 * t + 1))


@program(reference="average")
def unfrozen_between_forwards(run: Run) -> None:
    """The first forward's graph has saved parameters that are frozen, and train before the second."""
    model = run.build(mlp)
    model[2].requires_grad_(False)
    run.shard(model, sgd(model))
    run.step(0)
    first = run.loss(1)
    model[2].requires_grad_(True)
    (first + run.loss(2)).backward()
    run.update()
    run.step(3)


def frozen_at_first() -> nn.Module:
    """One block and a part of another are frozen at the start; the optimizer has them."""
    model = LanguageModel()
    model.body.blocks[2].requires_grad_(False)
    model.body.blocks[1].up.weight.requires_grad_(False)
    return model


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1]},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, eps=1e-3)


def callback(model: nn.Module, step: int) -> None:
    """What a callback freezes and unfreezes before this step."""
    embed, blocks, head = model.body.embed, model.body.blocks, model.heads[0]
    match step:
        case 1:
            blocks[0].requires_grad_(False)  # a whole unit, in the middle
            head.requires_grad_(False)  # all of another
        case 2:
            blocks[1].down.weight.requires_grad_(False)  # a part of one
            blocks[2].requires_grad_(True)  # frozen since the start
        case 3:
            embed.weight.requires_grad_(False)  # nothing before the blocks has a graph any more
            head.requires_grad_(True)
        case 5:
            blocks[0].requires_grad_(True)  # the graph begins in it
            blocks[1].up.weight.requires_grad_(True)
        case 6:
            model.requires_grad_(True)
        case 7:
            model.requires_grad_(False)
            blocks[0].norm.requires_grad_(True)


def tokens_loss(run: Run, step: int) -> Tensor:
    ids = run.ids(step)
    return token_loss(run.model(ids), ids)


def train(run: Run, first: int, last: int, micros: int = 1) -> None:
    for step in range(first, last):
        callback(run.model, step)
        for micro in range(micros):
            with run.no_sync(run.model) if micro < micros - 1 else contextlib.nullcontext():
                (tokens_loss(run, 10 * step + micro) / micros).backward()
        run.clip_grad_norm_(run.model, 0.5)
        run.update()


@program(reference="average", more={"ranks": (1, 2)})
def callbacks(run: Run) -> None:
    run.trained_model(frozen_at_first, decayed)
    train(run, 0, 9)


@program(reference="average", more={"ranks": (1, 2)})
def callbacks_and_micro_batches(run: Run) -> None:
    run.trained_model(frozen_at_first, decayed)
    train(run, 0, 9, micros=2)


def _resume(run: Run, at: int, early: bool) -> None:
    """Save before step `at` and load into another model; `early`: what is frozen by then is frozen before it is sharded."""
    model = run.trained_model(frozen_at_first, decayed)
    train(run, 0, at)
    engine = run.engine_of(model)
    if engine is not None:
        engine.save(run.folder / "checkpoint")
        zero.verify(str(run.folder / "checkpoint"))
    else:
        kept = copy.deepcopy((model.state_dict(), run.optimizer.state_dict()))
    again = run.build(frozen_at_first, seed=1)
    for step in range(at if early else 0):
        callback(again, step)
    optimizer = decayed(again)
    run.shard(again, optimizer)
    if engine is not None:
        run.engine_of(again).load(run.folder / "checkpoint")
    else:
        again.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
    for step in range(at):
        callback(again, step)
    train(run, at, 9)


program(partial(_resume, at=3, early=True), name="resumed_with_the_same_frozen", reference="average")


@program(reference="average")
def resumed_with_others_frozen(run: Run) -> None:
    """The callback comes to its changes again after the load."""
    _resume(run, 3, early=False)


program(partial(_resume, at=8, early=True), name="resumed_with_one_layer_left", reference="average")
program(partial(_resume, at=7, early=False), name="resumed_before_all_are_frozen", reference="average")


@program(reference="average")
def state_of_uneven_steps(run: Run) -> None:
    """The state of a plain optimizer, whose parameters have made different numbers of steps."""
    torch.manual_seed(0)
    plain = frozen_at_first()
    other = decayed(plain)
    for step in range(4):
        callback(plain, step)
        ids = torch.arange(12).view(2, 6) + step
        token_loss(plain(ids), ids).backward()
        other.step()
        other.zero_grad()
    model = run.build(frozen_at_first)
    model.load_state_dict(plain.state_dict())
    for mine, theirs in zip(model.parameters(), plain.parameters()):
        mine.requires_grad_(theirs.requires_grad)
    run.shard(model, decayed(model))
    run.optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    train(run, 4, 9)


@program(reference="average")
def frozen_between_backward_and_step(run: Run) -> None:
    """Torch steps over every gradient, of frozen parameters too; what is unfrozen then has none yet."""
    model = run.trained_model(frozen_at_first, decayed)
    for step in range(3):
        tokens_loss(run, step).backward()
        if step == 1:
            model.body.blocks[0].requires_grad_(False)
            model.body.blocks[2].requires_grad_(True)
        run.update()


@program(reference="average", only={"stage": (1, 2)})
def frozen_between_micro_batches(run: Run) -> None:
    """Gradients from before are used, though a forward has begun since."""
    model = run.trained_model(frozen_at_first, decayed)
    for step in range(3):
        with run.no_sync(model, defer=True):
            tokens_loss(run, 2 * step).backward()
        model.body.blocks[0].requires_grad_(step != 1)
        tokens_loss(run, 2 * step + 1).backward()
        run.update()


@program(
    only={"stage": (3,), "tier": ("cpu",)},
    refused=(Refused(zero.LayoutError, r"'body\.blocks\.0\..*step_in_backward"),),
)
def frozen_where_backward_steps(run: Run) -> None:
    model = run.build(frozen_at_first)
    run.shard(model, decayed(model), step_in_backward=True)
    tokens_loss(run, 0).backward()
    run.update()
    model.body.blocks[0].requires_grad_(False)
    tokens_loss(run, 1)


class Adversaries(nn.Module):
    """A generator and its critic; both have blocks, or neither has."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.maker, self.critic = (
            nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(depth))) for _ in range(2)
        )

    def forward(self, x: Tensor, which: str) -> Tensor:
        return self.critic(self.maker(x)) if which == "maker" else self.critic(self.maker(x).detach())


def accumulation_hooks(model: nn.Module) -> int:
    return sum(len(param._post_accumulate_grad_hooks or ()) for param in model.parameters())


@program(reference="average")
def frozen_again_and_again(run: Run) -> None:
    """Hooks on parameters do not add up from step to step."""
    model = run.mlp()
    counts = []
    for step in range(8):
        model[0].requires_grad_(step % 2 == 1)
        run.step(step)
        counts.append(accumulation_hooks(model))
    run.see(counts[-1] == counts[1], "hooks do not add up")


def _freeze_groups(optimizers: list[torch.optim.Optimizer], but: torch.optim.Optimizer | None) -> None:
    """As Lightning's `toggle_optimizer`; None: as its `untoggle_optimizer`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.requires_grad = but is None or optimizer is but


adam = functools.partial(torch.optim.Adam, eps=1e-3)


def _adversarial(run: Run, depth: int, in_parts: bool = False, made: Any = adam, steps: int = 4) -> None:
    """The one that is frozen has no gradients in the other's step."""
    model = run.build(lambda: Adversaries(depth))
    optimizers = [
        made(model.maker.parameters(), lr=1e-2),
        torch.optim.SGD(model.critic.parameters(), lr=0.1),
    ]
    run.shard(model, optimizers)
    for step in range(steps):
        for which, optimizer in zip(("maker", "critic"), optimizers):
            _freeze_groups(optimizers, optimizer)
            if in_parts:
                x = model.maker(run.inputs(step))
                out = model.critic(x if which == "maker" else x.detach())
            else:
                out = model(run.inputs(step), which)
            (out.square().mean() + out.mean()).backward()
            frozen = model.critic if which == "maker" else model.maker
            run.see([param.grad is None for param in frozen.parameters()], f"no gradients beside those of the {which}")
            optimizer.step()
            optimizer.zero_grad()
            _freeze_groups(optimizers, None)
    run.see(accumulation_hooks(model) <= len([*model.parameters()]), "hooks do not add up")


program(partial(_adversarial, depth=1), name="adversaries_frozen_by_groups", reference="average")
program(partial(_adversarial, depth=3), name="adversaries_with_blocks_frozen_by_groups", reference="average")
program(
    partial(_adversarial, depth=1, in_parts=True), name="adversaries_frozen_by_groups_in_parts", reference="average"
)
program(
    partial(_adversarial, depth=3, in_parts=True),
    name="adversaries_with_blocks_frozen_by_groups_in_parts",
    reference="average",
)


@program(reference="average")
def groups_frozen_and_given_back(run: Run) -> None:
    """A parameter that user code froze stays frozen when its group's tensors get the flags that they had."""
    model = run.build(lambda: Adversaries(3))
    optimizers = [adam(model.maker.parameters(), lr=1e-2), torch.optim.SGD(model.critic.parameters(), lr=0.1)]
    run.shard(model, optimizers)
    model.maker[1][0].bias.requires_grad_(False)
    for step in range(3):
        flags = [
            (tensor, tensor.requires_grad)
            for each in optimizers
            for group in each.param_groups
            for tensor in group["params"]
        ]
        for tensor, _ in flags:
            tensor.requires_grad_(False)
        with torch.no_grad():
            run.see(model(run.inputs(step), "maker").mean(), "evaluation with all frozen")
        for tensor, flag in flags:
            tensor.requires_grad_(flag)
        model(run.inputs(step), "maker").square().mean().backward()
        run.see([param.requires_grad for param in model.parameters()], "flags")
        for each in optimizers:
            each.step()
            each.zero_grad()


@program(reference="average", refused=(Refused(zero.LayoutError, "requires_grad of some tensors in group 0"),))
def one_tensor_of_a_group_frozen(run: Run) -> None:
    run.mlp()
    run.step(0)
    run.optimizer.param_groups[0]["params"][0].requires_grad_(False)
    run.step(1)


@program(
    reference="average",
    only={"stage": (1, 2), "replicas": (1,), "tier": ("none",)},
)
def frozen_by_groups_that_one_rank_has(run: Run) -> None:
    """An optimizer that steps over full matrices: their owner alone has them in its groups."""
    _adversarial(run, depth=3, made=torch.optim.Adafactor)


def _frozen_by_rank(run: Run) -> None:
    run.mlp()
    run.step(0)
    run.model[0].requires_grad_(False)
    run.step(1)
    if run.rank == 1:
        run.model[2].requires_grad_(False)
    run.step(2)


FLAGS = Refused(zero.RankMismatchError, r"requires_grad of parameter '2\.weight' is not the same")


program(_frozen_by_rank, name="frozen_on_one_rank", refused=(FLAGS,), only={"stage": (1,)})
program(
    _frozen_by_rank, name="frozen_on_one_rank_where_parameters_are_released", refused=(FLAGS,), only={"stage": (3,)}
)
