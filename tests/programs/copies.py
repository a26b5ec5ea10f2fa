"""Copies and averages of a sharded model, and state that is loaded where it came from."""

from __future__ import annotations

import copy
import functools

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tests.models import LanguageModel, adamw
from tests.oracle import Run, program
from tests.programs.architectures import GatedStack, on_tokens
from tests.programs.usual import after_steps

tied = functools.partial(LanguageModel, tied=True, root=True)


def train(run: Run, step: int) -> None:
    on_tokens(run.model, run.rank, step).backward()
    run.update()


@after_steps(4, adamw)
def optimizer_state_loaded_where_it_came_from(run: Run, step: int) -> None:
    with torch.inference_mode():  # what it allocates is trained later
        run.optimizer.load_state_dict(run.optimizer.state_dict())


@program(reference="average", loose=5.0)
def copies_are_plain_models(run: Run) -> None:
    """Hooks of user code go along, frozen parameters stay frozen, tied ones tied; a copy trains by itself.

    A copy computes in float32 where the row says bf16, hence `loose`.
    """
    model = run.build(functools.partial(GatedStack, tied=True))
    model.blocks[0].line.requires_grad_(False)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    run.shard(model, adamw(model))
    train(run, 0)
    for made in (copy.deepcopy(model), AveragedModel(model).module):
        calls.clear()
        loss = on_tokens(made, run.rank, 5)
        loss.backward()
        run.see(loss, "loss of a copy")
        run.see(len(calls), "calls of a copied hook")
        run.see(made.head.weight is made.embed.weight, "tied")
        for name, param in made.named_parameters():
            run.see(type(param) is nn.Parameter, f"type of {name}")
            run.see(param, name)
            run.see(param.requires_grad and param.grad, f"gradient of {name}")
    run.see(copy.deepcopy(model.blocks[1]).line.weight, "a copied part")
    alone = copy.deepcopy(model.blocks[1].line.weight)
    run.see((type(alone) is nn.Parameter, str(alone.dtype)), "a copied parameter")
    both = copy.deepcopy({"model": model, "head": model.head})
    run.see(both["head"] is both["model"].head, "identity inside a copy")
    train(run, 1)


@program(reference="average")
def averages_by_state_dict(run: Run) -> None:
    """As timm's and YOLO's: on every rank, from values that one rank has alone elsewhere; also inside `unsharded`."""
    model = run.build(tied)
    average = copy.deepcopy(tied())
    run.shard(model, adamw(model))
    for step in range(3):
        train(run, step)
        with torch.no_grad(), run.unsharded(model):
            kept = copy.deepcopy(model.state_dict())
            for name, mine in average.state_dict().items():
                if step == 0:
                    mine.copy_(kept[name])
                mine.lerp_(model.state_dict()[name].detach(), 0.5)
        with torch.no_grad():
            for mine, theirs in zip(average.state_dict().values(), model.state_dict().values()):
                mine.lerp_(theirs.detach(), 0.5)
    for name, param in average.named_parameters():
        run.see(param, name)
    model.load_state_dict(average.state_dict())
    train(run, 3)
    with torch.inference_mode():
        model.load_state_dict(model.state_dict())
    train(run, 4)
