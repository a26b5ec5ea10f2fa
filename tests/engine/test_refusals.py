"""What the engine refuses at once, by a named error on every rank, and what it does in rare states instead."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero as zero
from tests.kit.pool import on_ranks
from tests.models import adamw, inputs, mlp, sgd

pytestmark = pytest.mark.gloo
OFFLOADED = {"offload_optimizer": "cpu", "step_in_backward": True}


def start(make: Callable[[nn.Module], Any] = sgd, **settings: Any) -> tuple[Any, Any, zero.Engine]:
    model = mlp()
    optimizer = make(model)
    return model, optimizer, zero.shard(model, optimizer, zero.ZeroConfig(stall_s=15, **settings))


def loss(model: nn.Module) -> torch.Tensor:
    return model(inputs(0, 0)).square().mean()


def said(act: Callable[[], object], kind: type[zero.ZeroError] = zero.StateError) -> str:
    with pytest.raises(kind) as error:
        act()
    return str(error.value)


def a_parameter_in_two_groups() -> str:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = sgd(model)
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": [model[0].bias]})
        return optimizer

    return said(lambda: start(make), zero.LayoutError)


def clipping_in_a_backward() -> str:
    model, _, engine = start(stage=2)
    model[0].weight.register_hook(lambda _: engine.clip_grad_norm_(1.0) and None)
    return said(lambda: loss(model).backward())


def whole_weights_in_a_backward() -> str:
    model, _, _ = start(stage=3)
    hidden = model(inputs(0, 0))
    hidden.register_hook(lambda _: zero.unsharded(model).__enter__())
    return said(lambda: hidden.sum().backward())


def a_unit_that_the_backward_has_updated() -> str:
    model, _, _ = start(stage=3, **OFFLOADED)
    x = inputs(0, 0).requires_grad_()
    x.register_hook(lambda _: model[4].weight.norm() and None)
    return said(lambda: model(x).square().mean().backward())


def a_parameter_whose_engine_is_gone() -> str:
    model, optimizer, engine = start(stage=3)
    weight = model[0].weight
    del model, optimizer, engine
    gc.collect()
    return said(weight.norm)


def state_that_no_checkpoint_holds() -> str:
    model, optimizer, _ = start(adamw, stage=2)
    loss(model).backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["extra"] = torch.eye(4).to_sparse()
    return said(optimizer.state_dict, zero.CheckpointError)


def a_gradient_of_another_shape() -> str:
    model, optimizer, _ = start(stage=2)
    loss(model).backward()
    (tensor, *_), other = optimizer.param_groups[0]["params"], torch.ones(2)
    acts = [lambda p=p: setattr(p, "grad", other) for p in (model[0].weight, tensor)]
    return " ".join(map(said, [*acts, lambda: setattr(model[0].weight.grad, "data", other)]))


def meta_tensors_on_rank_0() -> str:
    model, _, _ = start(stage=2)
    meta = {name: value.to("meta") for name, value in model.state_dict().items()}
    return said(lambda: model.load_state_dict(meta), zero.RankMismatchError)


REFUSED: dict[Callable[[], str], str] = {
    a_parameter_in_two_groups: "'0.bias' is twice in the groups",
    clipping_in_a_backward: "clip_grad_norm_ inside a backward",
    whole_weights_in_a_backward: "zero.unsharded cannot begin in a backward",
    a_unit_that_the_backward_has_updated: "Set step_in_backward to False",
    a_parameter_whose_engine_is_gone: "its engine is gone",
    state_that_no_checkpoint_holds: "'extra' of '0.weight' is a Tensor (torch.sparse_coo)",
    a_gradient_of_another_shape: "a gradient of shape (2,) was assigned to '0.weight' of (16, 16)",
    meta_tensors_on_rank_0: "rank 0's tensors are on the meta device",
}


@on_ranks()
def test_refused_on_every_rank(rank: int, world: int) -> list[str]:
    found = [(act(), words) for act, words in REFUSED.items()]
    return [text for text, words in found if words not in text]


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks()
def test_states_in_host_memory_for_a_while(rank: int, world: int, stage: int) -> None:
    model, optimizer, engine = start(adamw, stage=stage)
    loss(model).backward()
    optimizer.step()
    engine.offload_states()
    others = lambda: engine.clip_grad_norm_(1.0), lambda: engine.load("nowhere"), model[0].weight.norm
    assert said(engine.offload_states).startswith("offload_states: states are in host memory already")
    assert {*map(said, others)} == {"the model's states are in host memory. Call engine.reload_states() first"}
    engine.reload_states()
    assert said(engine.reload_states).startswith("reload_states: no states are in host memory")


@on_ranks()
def test_offloaded_states_are_read_and_copied(rank: int, world: int) -> None:
    model, optimizer, engine = start(adamw, stage=2, offload_optimizer="cpu")
    loss(model).backward()
    optimizer.step()
    tensors = [each for group in optimizer.param_groups for each in group["params"]]
    norms = torch.stack(torch._foreach_norm(tensors))  # of a list: it waits for the step behind each
    assert torch.equal(norms, torch.stack([each.norm() for each in tensors]))
    wanted = [state["exp_avg"].clone() for state in optimizer.state.values()]
    for copied in (copy.deepcopy(optimizer.state), pickle.loads(pickle.dumps(optimizer.state))):
        assert all(map(torch.equal, wanted, (state["exp_avg"] for state in copied.values())))
    engine.detach()
    model, optimizer, engine = start(stage=2, **OFFLOADED)
    loss(model).backward()
    assert engine.clip_grad_norm_(float("inf")).isnan(), "no gradient is left to measure"
    engine.detach()
