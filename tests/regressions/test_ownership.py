"""A parameter has one engine and memory of its own; ranks bind the same optimizer; detach gives everything back."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.kit.pool import on_ranks
from tests.models import VOCAB, WIDTH, adamw, sgd
from tests.programs.architectures import Stack, on_tokens

pytestmark = pytest.mark.gloo


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, *steps: int) -> None:
    for step in steps:
        on_tokens(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def sgd_of(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


# One engine per parameter --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_a_part_of_a_sharded_model_is_refused(rank: int, world: int, stage: int) -> None:
    config = zero.ZeroConfig(stage=stage)
    model = Stack()
    opt = sgd(model)
    engine = zero.shard(model, opt, config)
    for part in (model.blocks[1], model.blocks, model.head):
        with pytest.raises(zero.ConfigError, match=r"parameter '.*weight' belongs to a sharded Stack already"):
            zero.shard(part, None, config)
    with pytest.raises(zero.ConfigError, match="sharded already"):
        zero.shard(model, None, config)
    with pytest.raises(zero.ConfigError, match="sharded already"):
        zero.shard(nn.ModuleDict({"policy": model, "value": nn.Linear(WIDTH, 1)}), None, config)
    value = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 1))
    value[0].weight = model.embed.weight
    with pytest.raises(zero.ConfigError, match=r"'0\.weight' belongs"):
        zero.shard(value, None, config)
    train(model, opt, rank, 0)  # nothing has left a trace
    assert not any(value.isnan().any() for value in model.state_dict().values() if not value.is_meta)
    engine.detach()
    zero.shard(model.blocks, None, config)  # free again


@on_ranks()
def test_one_ranks_refusal_is_everyones(rank: int, world: int) -> None:
    """What one rank refuses all ranks refuse."""
    model, other = Stack(), Stack()
    if rank:
        other.head.weight.data = other.embed.weight.data
    with pytest.raises(zero.LayoutError if rank else zero.RankMismatchError, match="'head.weight'"):
        zero.shard(other, None, zero.ZeroConfig(stage=2))
    zero.shard(model, None, zero.ZeroConfig(stage=2))


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_shared_memory_is_refused(rank: int, world: int, stage: int) -> None:
    config = zero.ZeroConfig(stage=stage)
    model = Stack()
    model.head.weight.data = model.embed.weight.data
    with pytest.raises(
        zero.LayoutError, match=r"'head\.weight' shares memory with 'embed\.weight'|'embed\.weight' shares"
    ):
        zero.shard(model, None, config)
    model.head.weight.data = model.head.weight.data.clone()
    model.blocks[0].up.bias.data = model.blocks[0].up.weight.data[3:5].view(-1)  # a part of it
    with pytest.raises(zero.LayoutError, match=r"'blocks\.0\.up\.(bias|weight)' shares"):
        zero.shard(model, None, config)
    # Memory in common, but not an element: rows, and columns, of one matrix (as cuDNN lays out an RNN's weights).
    model = Stack()
    flat = torch.randn(2, VOCAB, WIDTH)
    model.embed.weight.data, model.head.weight.data = flat[0], flat[1]
    both = torch.randn(2 * WIDTH, 2 * WIDTH)
    model.blocks[0].up.weight.data, model.blocks[1].up.weight.data = both[:, :WIDTH], both[:, WIDTH:]
    zero.shard(model, None, config)
    # And with another engine's, gathered or released.
    other = Stack()
    with zero.GatheredParameters(model):
        other.head.weight.data = model.head.weight.data
    if stage == 1:
        other.head.weight.data = model.head.weight.data
        with pytest.raises(
            zero.LayoutError, match=r"'head\.weight' shares memory with 'a parameter of the sharded Stack'"
        ):
            zero.shard(other, None, config)
    else:
        other.head.weight.data = model.head.weight.data  # gathered for it
        with pytest.raises(zero.LayoutError, match=r"'head\.weight' shares memory with"):
            zero.shard(other, None, config)
        other.head.weight.data = torch.zeros(VOCAB, WIDTH)
        kept: list[Tensor] = []
        hook = model.head.register_forward_pre_hook(lambda module, _: kept.append(module.weight.data))
        with torch.no_grad():
            on_tokens(model, rank, 0)
        hook.remove()
        with zero.unsharded(model):
            pass  # releases what forwards have left gathered
        other.head.weight.data = kept[0]  # the memory is the view's own since the unit was released
        assert torch.equal(kept[0], zero.full_parameter(model.head.weight))
        zero.shard(other, None, config)
        return
    other.head.weight.data = torch.zeros(VOCAB, WIDTH)
    zero.shard(other, None, config)


# Binding -------------------------------------------------------------------------------------------------------------


@on_ranks()
def test_bind_compares_ranks(rank: int, world: int) -> None:
    model = Stack()
    params = list(model.parameters())
    engine = zero.shard(model, None, zero.ZeroConfig(stage=2))
    with pytest.raises(zero.RankMismatchError, match="optimizer group 0"):
        engine.bind(sgd_of(params[::-1] if rank else params))
    with pytest.raises(zero.RankMismatchError, match="group"):
        engine.bind(sgd_of([{"params": params[:3]}, {"params": params[3:]}] if rank else params))
    warm = torch.optim.AdamW(params)
    if rank:
        for p in params:
            p.grad = torch.zeros_like(p)
        with torch.no_grad():
            for p in params:
                warm.state[p] = {"step": torch.tensor(1.0), "exp_avg": p * 0, "exp_avg_sq": p * 0}
                p.grad = None
    with pytest.raises(zero.RankMismatchError, match="has state"):
        engine.bind(warm)
    opt = sgd_of(params)
    engine.bind(opt)
    train(model, opt, rank, 0)


# Optimizer state that is loaded, and given back -----------------------------------------------------------------------


@pytest.mark.parametrize(("world", "stage"), [(2, 0), (2, 3), (3, 1)])
@on_ranks(None)
def test_mixed_optimizer_states_are_refused(rank: int, world: int, stage: int) -> None:
    """States that are on the meta device in part, or differ between ranks, are refused on every rank."""
    torch.manual_seed(0)
    model, plain = Stack(), Stack()
    opt, reference = adamw(model), adamw(plain)
    zero.shard(model, opt, zero.ZeroConfig(stage=stage))
    train(model, opt, rank, 0, 1)
    train(plain, reference, 0, 0, 1)
    full = reference.state_dict()

    def as_meta(values: dict[str, Any]) -> dict[str, Any]:
        return {**values, "state": {i: {k: v.to("meta") for k, v in e.items()} for i, e in values["state"].items()}}

    with pytest.raises(zero.RankMismatchError, match="rank 0's tensors are on the meta device"):
        opt.load_state_dict(as_meta(full) if rank == 0 else full)
    if world > 2:
        with pytest.raises(zero.RankMismatchError, match=r"ranks \[1\] pass meta"):
            opt.load_state_dict(as_meta(full) if rank == 1 else full)
    with pytest.raises(zero.RankMismatchError, match="rank 1 passes states of other"):
        opt.load_state_dict({**full, "state": {}} if rank == 1 else full)
    short = {**full, "param_groups": [{**full["param_groups"][0], "params": [0]}]}
    with pytest.raises((zero.CheckpointError, zero.RankMismatchError), match="groups of"):
        opt.load_state_dict(short if rank == 1 else full)
    other = {**full, "state": {**full["state"], 0: {**full["state"][0], "exp_avg": torch.zeros(3)}}}
    with pytest.raises(zero.CheckpointError, match=r"'exp_avg' of 'embed\.weight'"):
        opt.load_state_dict(other)
    opt.load_state_dict(full)
    for name, p in plain.named_parameters():
        for key in ("exp_avg", "exp_avg_sq", "step"):
            found = zero.full_optimizer_state(model.get_parameter(name), key)
            assert torch.equal(found, reference.state[p][key]), (name, key)


# Pickles ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks()
def test_a_copy_may_be_pickled_or_sharded_and_the_model_may_not(rank: int, world: int, stage: int) -> None:
    model = Stack(tied=True)
    zero.shard(model, adamw(model), zero.ZeroConfig(stage=stage))
    made = copy.deepcopy(model)
    assert type(made) is Stack
    assert zero.engine_of(made) is None
    again = pickle.loads(pickle.dumps(made.blocks))
    assert torch.equal(again[1].up.weight, zero.full_parameter(model.blocks[1].up.weight))
    for attempt in (
        lambda: pickle.dumps(model),
        lambda: torch.save(model, io.BytesIO()),
        lambda: pickle.dumps(model.blocks),
    ):
        with pytest.raises(
            zero.StateError, match="sharded model cannot be pickled.*engine.save.*DataLoader.*collate_fn"
        ):
            attempt()
    for attempt in (pickle.dumps, copy.deepcopy):
        with pytest.raises(zero.StateError, match="an Engine cannot be copied"):
            attempt(zero.engine_of(model))
    zero.shard(made, None, zero.ZeroConfig(stage=3))  # as a frozen reference, say
