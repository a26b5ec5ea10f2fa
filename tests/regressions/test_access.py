"""Whole values of sharded parameters: `GatheredParameters` and the accessors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.kit.pool import RankPool
from tests.models import adamw, bert, gpt2, ids

pytestmark = pytest.mark.gloo

CASES = [
    pytest.param(1, 3, "no", torch.float32),
    pytest.param(2, 0, "no", torch.float32),
    pytest.param(2, 1, "bf16", torch.float32),
    pytest.param(2, 3, "no", torch.float32),
    pytest.param(2, 3, "bf16", torch.float32),
    pytest.param(2, 3, "no", torch.bfloat16),
    pytest.param(3, 2, "no", torch.bfloat16),
    pytest.param(3, 3, "fp16", torch.float32),
]


def plainly(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return gpt2().to(dtype)


def sharded(
    stage: int, precision: str = "no", dtype: torch.dtype = torch.float32
) -> tuple[Any, torch.optim.Optimizer, zero.Engine]:
    model = plainly(dtype)
    optimizer = adamw(model)
    return model, optimizer, zero.shard(model, optimizer, zero.ZeroConfig(stage=stage), mixed_precision=precision)


def backward(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    tokens = ids(rank, step)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach()


def gathered(rank: int, world: int, stage: int, precision: str, dtype: torch.dtype) -> None:
    plain = plainly(dtype)
    model, optimizer, engine = sharded(stage, precision, dtype)
    before = backward(model, 0)
    optimizer.zero_grad()
    with zero.GatheredParameters(model):
        for (name, p), q in zip(model.named_parameters(), plain.parameters()):
            assert p.dtype == dtype, name
            assert torch.equal(p, q), name
    last = world - 1
    block = model.transformer.h[1]
    with zero.GatheredParameters([block.mlp.c_fc.weight, *block.ln_1.parameters()], modifier_rank=last):
        with torch.no_grad():
            block.ln_1.bias.fill_(float(rank))
            if rank == last:
                block.mlp.c_fc.weight[3:5] = 1.0
                block.ln_1.weight.data = torch.full((32,), 0.5, dtype=dtype)
    with torch.no_grad():
        plain.transformer.h[1].mlp.c_fc.weight[3:5] = 1.0
        plain.transformer.h[1].ln_1.weight.fill_(0.5)
        plain.transformer.h[1].ln_1.bias.fill_(float(last))
    with zero.GatheredParameters(model.parameters()):
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters()))
    state = model.state_dict()
    assert rank != 0 or all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    assert {unit.state.name for unit in engine.units} == {"SHARDED" if stage == 3 and world > 1 else "GATHERED"}
    # The compute copies followed: what runs is the edited model, and it is another one than before.
    tokens = ids(0, 0)
    with torch.no_grad():
        loss = model(input_ids=tokens, labels=tokens).loss
    with (
        torch.no_grad(),
        torch.autocast(
            "cpu", dtype=torch.float16 if precision == "fp16" else torch.bfloat16, enabled=precision != "no"
        ),
    ):
        assert torch.equal(loss, plain(input_ids=tokens, labels=tokens).loss)
    assert not torch.equal(loss, before)


@pytest.mark.parametrize(("world", "stage", "precision", "dtype"), CASES)
def test_one_ranks_edits_are_kept(
    pools: dict[int, RankPool], world: int, stage: int, precision: str, dtype: torch.dtype
):
    pools[world].run(gathered, stage, precision, dtype)


def refused(rank: int, world: int, stage: int) -> None:
    for deferred in (False, True):
        refused_on(rank, world, stage, deferred)
    layer = nn.Linear(2, 2)
    with zero.GatheredParameters(layer), torch.no_grad():
        layer.weight.zero_()  # plain parameters are left alone
    with pytest.raises(zero.StateError, match="belongs to no sharded model"):
        zero.full_parameter(layer.weight)


def refused_on(rank: int, world: int, stage: int, deferred: bool) -> None:
    torch.manual_seed(0)
    if deferred:
        with zero.Init():
            model = gpt2()
    else:
        model = sharded(stage)[0]
    weight, other = model.transformer.h[0].attn.c_proj.weight, model.transformer.h[0].ln_2.weight
    old = zero.full_parameter(weight)
    name = "shape" if deferred else r"'transformer\.h\.0\.attn\.c_proj\.weight'"

    def edit(modifier: int | None, change: Callable[[], object], params=(weight, other)) -> None:
        with zero.GatheredParameters(params, modifier_rank=modifier), torch.no_grad():
            change()

    with pytest.raises(zero.StateError, match=rf"{name}.* was edited .* on rank {world - 1}"):
        edit(None, lambda: weight.add_(1.0) if rank == world - 1 else None)
    with pytest.raises(zero.StateError, match="edit values in place only" if deferred else "keeps its shape"):
        edit(0, lambda: setattr(weight, "data", torch.zeros(2)))
    with pytest.raises(ZeroDivisionError):
        edit(0, lambda: weight.zero_() / 0 if 1 // 0 else None)
    with pytest.raises(zero.ConfigError, match="modifier_rank must be"):
        edit(world, lambda: None)
    edit(world - 1, lambda: weight.zero_() if rank != world - 1 else None)  # the rank that counts has not edited
    with zero.GatheredParameters(model.parameters(), enabled=False):
        assert torch.equal(zero.full_parameter(weight), old)
    with zero.GatheredParameters(weight, modifier_rank=0):
        with zero.GatheredParameters(model), torch.no_grad():  # the outer one decides
            weight.fill_(3.0)
            assert torch.equal(other, torch.ones(32))
        assert not weight.isnan().any()
    assert torch.equal(zero.full_parameter(weight), torch.full_like(old, 3.0))
    if deferred:
        with zero.Init(), zero.GatheredParameters(model, modifier_rank=0):
            weight.data.fill_(4.0)
            assert zero.full_parameter(other).sum() == 32
        zero.shard(model, None, zero.ZeroConfig(stage=stage))
        assert torch.equal(zero.full_parameter(weight), torch.full_like(old, 4.0))
    with zero.GatheredParameters(weight, modifier_rank=0):
        with torch.no_grad():
            weight.zero_()
        inside = model(input_ids=ids(0, 0)).logits.detach()
    assert torch.equal(inside, model(input_ids=ids(0, 0)).logits.detach())  # a forward inside sees the edits


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 1), (2, 3), (3, 3)])
def test_other_edits_are_refused_and_undone(pools: dict[int, RankPool], world: int, stage: int) -> None:
    pools[world].run(refused, stage)


def accessors(rank: int, world: int, stage: int) -> None:
    """Against plain data parallel in this process: gradients averaged in rank order, the same optimizer."""
    model, optimizer, engine = sharded(stage)
    plain, sums = plainly(), {}
    for peer in range(world):
        backward(plain, peer)
        for name, p in plain.named_parameters():
            sums[name] = p.grad if peer == 0 else sums[name] + p.grad
            p.grad = None
    names = [name for name, _ in model.named_parameters()]
    params = dict(model.named_parameters())
    weight = params["transformer.h.0.mlp.c_fc.weight"]
    assert zero.full_gradient(weight) is None
    assert zero.local_gradient(weight) is None
    assert zero.full_optimizer_state(weight, "exp_avg") is None
    assert zero.local_optimizer_state(weight, "exp_avg") is None
    with pytest.raises(zero.StateError, match="run a step first"):
        zero.set_full_optimizer_state(weight, "exp_avg", torch.zeros_like(weight))
    with engine.no_sync():
        backward(model, rank)
    for name in names:  # the first one reduces what no_sync left
        assert torch.equal(zero.full_gradient(params[name]), sums[name] * (1.0 / world)), name
    everyone = engine.exchange({name: zero.local_gradient(params[name]) for name in names})
    for name in names:
        pieces = [everyone[r][name] for r in range(1 if stage == 0 else world)]
        assert torch.equal(torch.cat(pieces), sums[name].flatten() * (1.0 / world)), name
    zero.set_full_gradient(weight, torch.full_like(weight, 0.25))
    zero.set_local_gradient(weight, zero.local_gradient(weight) * 2)
    optimizer.step()
    reference = adamw(plain)
    for name, p in plain.named_parameters():
        p.grad = sums[name] * (1.0 / world)
    plain.transformer.h[0].mlp.c_fc.weight.grad.fill_(0.5)
    reference.step()
    for name, p in plain.named_parameters():
        assert torch.equal(zero.full_parameter(params[name]), p), name
        for state in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(zero.full_optimizer_state(params[name], state), reference.state[p][state]), name
    assert zero.full_optimizer_state(weight, "max_exp_avg_sq") is None
    with pytest.raises(zero.StateError, match="one value for several"):
        zero.set_full_optimizer_state(weight, "step", torch.zeros_like(weight))
    with pytest.raises(zero.StateError, match="expected shape"):
        zero.set_full_parameter(weight, torch.zeros(3))
    if world > 1:
        with pytest.raises(zero.RankMismatchError, match="rank 1 passes another value"):
            zero.set_full_parameter(weight, torch.full_like(zero.full_parameter(weight), float(rank)))
    # Written values are what the next step works on.
    value = zero.full_parameter(weight) * 2
    zero.set_full_parameter(weight, value)
    zero.set_full_optimizer_state(weight, "exp_avg", value * 3)
    zero.set_local_optimizer_state(weight, "exp_avg_sq", zero.local_optimizer_state(weight, "exp_avg_sq") * 4)
    bias = params["transformer.h.0.mlp.c_fc.bias"]
    zero.set_local_parameter(bias, zero.local_parameter(bias) + 1.0)
    with pytest.raises(zero.StateError, match="this rank owns"):
        zero.set_local_parameter(bias, torch.zeros(7))
    engine.refresh()
    optimizer.zero_grad()
    twin = dict(plain.named_parameters())["transformer.h.0.mlp.c_fc.weight"]
    with torch.no_grad():
        twin.copy_(value)
        dict(plain.named_parameters())["transformer.h.0.mlp.c_fc.bias"].add_(1.0)
        reference.state[twin]["exp_avg"].copy_(value * 3)
        reference.state[twin]["exp_avg_sq"].mul_(4)
    reference.zero_grad()
    assert torch.equal(backward(model, 0), backward(plain, 0))
    optimizer.step()
    reference.step()
    for name, p in plain.named_parameters():
        assert torch.allclose(zero.full_parameter(params[name]), p, rtol=0, atol=1e-6), name


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (3, 3)])
def test_accessors_show_what_data_parallel_has(pools: dict[int, RankPool], world: int, stage: int) -> None:
    pools[world].run(accessors, stage)


def precise(rank: int, world: int) -> None:
    """Low precision parameters: accessors give the float32 master, and untouched elements keep their digits."""
    model, optimizer, _ = sharded(3, dtype=torch.bfloat16)
    backward(model, rank)
    optimizer.step()
    weight = model.transformer.h[0].mlp.c_fc.weight
    master = zero.full_parameter(weight)
    assert master.dtype == torch.float32
    assert not torch.equal(master, master.bfloat16().float())
    with zero.GatheredParameters(weight, modifier_rank=1), torch.no_grad():
        assert weight.dtype == torch.bfloat16
        weight[0] = 2.0
    after = zero.full_parameter(weight)
    assert torch.equal(after[0], torch.full((128,), 2.0))
    assert torch.equal(after[1:], master[1:])
    model.transformer.h[1].requires_grad_(False)
    frozen = bert()
    zero.shard(frozen, None, zero.ZeroConfig(stage=3))
    with pytest.raises(zero.StateError, match="is frozen"):
        zero.full_gradient(frozen.bert.encoder.layer[0].output.dense.weight)


def test_low_precision_and_frozen_parameters(two: RankPool) -> None:
    two.run(precise)
