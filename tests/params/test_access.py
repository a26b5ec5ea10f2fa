"""Whole values of sharded parameters: `GatheredParameters`, the accessors, and spans that are cut anew unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.comm.group_wire import PairWire
from hf_zero.comm.inflight import Inflight
from hf_zero.runtime.transports import Roads
from hf_zero.runtime.values.deferred import birth_of
from tests.kit.common import MODELS, Case, batch, differences, gpt2, loss_of, optimizer_for
from tests.kit.common import Result as Trained
from tests.kit.pool import RankPool

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


def sharded(stage: int, precision: str = "no", dtype: torch.dtype = torch.float32, groups: int = 2):
    model = gpt2().to(dtype)
    optimizer = optimizer_for(model, groups)
    return model, optimizer, zero.shard(model, optimizer, zero.ZeroConfig(stage=stage), mixed_precision=precision)


def backward(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    loss = loss_of(model, rank, step)
    loss.backward()
    return loss.detach()


def gathered(rank: int, world: int, stage: int, precision: str, dtype: torch.dtype) -> None:
    plain = gpt2().to(dtype)
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
    assert {p.stride() for p in block.ln_1.parameters()} == {(0,) if stage == 3 else (1,)}
    # The compute copies followed: what runs is the edited model, and it is another one than before.
    ids = batch(0, 0, 0)
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss
    with (
        torch.no_grad(),
        torch.autocast(
            "cpu", dtype=torch.float16 if precision == "fp16" else torch.bfloat16, enabled=precision != "no"
        ),
    ):
        assert torch.equal(loss, plain(input_ids=ids, labels=ids).loss)
    assert not torch.equal(loss, before)


@pytest.mark.parametrize(("world", "stage", "precision", "dtype"), CASES)
def test_one_ranks_edits_are_kept(
    pools: dict[int, RankPool], world: int, stage: int, precision: str, dtype: torch.dtype
):
    pools[world].run(gathered, stage, precision, dtype)


def refused(rank: int, world: int, stage: int) -> None:
    for born in (False, True):
        refused_on(rank, world, stage, born)
    layer = nn.Linear(2, 2)
    with zero.GatheredParameters(layer), torch.no_grad():
        layer.weight.zero_()  # plain parameters are nobody's business
    with pytest.raises(zero.StateError, match="belongs to no sharded model"):
        zero.full_parameter(layer.weight)


def refused_on(rank: int, world: int, stage: int, born: bool) -> None:
    torch.manual_seed(0)
    if born:
        with zero.Init():
            model = gpt2()
    else:
        model = sharded(stage)[0]
    weight, other = model.transformer.h[0].attn.c_proj.weight, model.transformer.h[0].ln_2.weight
    old = zero.full_parameter(weight)
    name = "shape" if born else r"'transformer\.h\.0\.attn\.c_proj\.weight'"

    def edit(modifier: int | None, change: Callable[[], object], params=(weight, other)) -> None:
        with zero.GatheredParameters(params, modifier_rank=modifier), torch.no_grad():
            change()

    with pytest.raises(zero.StateError, match=rf"{name}.* was edited .* on rank {world - 1}"):
        edit(None, lambda: weight.add_(1.0) if rank == world - 1 else None)
    with pytest.raises(zero.StateError, match="edit values in place only"):
        edit(0, lambda: setattr(weight, "data", torch.zeros(2)))
    with pytest.raises(ZeroDivisionError):
        edit(0, lambda: weight.zero_() / 0 if 1 // 0 else None)
    with pytest.raises(zero.ConfigError, match="modifier_rank must be"):
        edit(world, lambda: None)
    edit(world - 1, lambda: weight.zero_() if rank != world - 1 else None)  # nobody who counts has edited
    with zero.GatheredParameters(model.parameters(), enabled=False):
        assert torch.equal(zero.full_parameter(weight), old)
    with zero.GatheredParameters(weight, modifier_rank=0):
        with zero.GatheredParameters(model), torch.no_grad():  # the outer one decides
            weight.fill_(3.0)
            assert torch.equal(other, torch.ones(32))
        assert not weight.isnan().any()
    assert torch.equal(zero.full_parameter(weight), torch.full_like(old, 3.0))
    if born:
        assert all(not birth_of(p).is_open and birth_of(p).pins == 0 for p in model.parameters())
        with zero.Init(), zero.GatheredParameters(model, modifier_rank=0):
            weight.data.fill_(4.0)
            assert zero.full_parameter(other).sum() == 32
        zero.shard(model, None, zero.ZeroConfig(stage=stage))
        assert torch.equal(zero.full_parameter(weight), torch.full_like(old, 4.0))
    with zero.GatheredParameters(weight, modifier_rank=0):
        with torch.no_grad():
            weight.zero_()
        ids = batch(0, 0, 0)
        inside = model(input_ids=ids).logits.detach()
    assert torch.equal(inside, model(input_ids=ids).logits.detach())  # a forward inside sees the edits


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 1), (2, 3), (3, 3)])
def test_other_edits_are_refused_and_undone(pools: dict[int, RankPool], world: int, stage: int) -> None:
    pools[world].run(refused, stage)


def accessors(rank: int, world: int, stage: int, precision: str, dtype: torch.dtype) -> None:
    """Against plain data parallel in this process: gradients averaged in rank order, the same optimizer."""
    case = Case(stage=stage, groups=2, steps=1)
    model, optimizer, engine = sharded(stage)
    plain, sums = gpt2(), {}
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
    reference = optimizer_for(plain, 2)
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
    assert case.groups == len(optimizer.param_groups)


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (3, 3)])
def test_accessors_show_what_data_parallel_has(pools: dict[int, RankPool], world: int, stage: int) -> None:
    pools[world].run(accessors, stage, "no", torch.float32)


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
    frozen = bert_frozen()
    zero.shard(frozen, None, zero.ZeroConfig(stage=3))
    with pytest.raises(zero.StateError, match="is frozen"):
        zero.full_gradient(frozen.bert.encoder.layer[0].output.dense.weight)


def bert_frozen() -> nn.Module:
    return MODELS["bert"]()


def test_low_precision_and_frozen_parameters(two: RankPool) -> None:
    two.run(precise)


def recut(rank: int, world: int, stage: int) -> None:
    """A group added in training: the same training as with a plain model, one unit whole at a time, of those that it cuts."""
    case = Case(stage=stage, steps=4)
    model = gpt2(n_layer=4)
    late = [p for block in (0, 2) for p in model.transformer.h[block].parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if all(p is not q for q in late)]
    optimizer = torch.optim.AdamW(rest, lr=1e-3)
    wholes, measured = [], []

    class Looking(PairWire):
        """Looks at what is whole before each gather of a cut."""

        cutting = False

        def gather(self, full: Tensor, own: Tensor, tag: int, cuts: Sequence[int] = ()) -> Inflight:
            if self.cutting:
                measured.append(engine.report().measured["parameters"])
                at_rest = (p for p in model.parameters() if p.untyped_storage().nbytes() >= p.numel() * 4)
                wholes.append(sum(p.numel() for p in at_rest))
            return super().gather(full, own, tag, cuts)

    engine = zero.shard(
        model, optimizer, zero.ZeroConfig(stage=stage), roads=Roads(wire=Looking) if world > 1 else None
    )
    losses = []
    for step in range(case.steps):
        if step == 2:
            optimizer.add_param_group({"params": late, "lr": 1e-2})
            engine.sharded.wire.cutting = True
            engine.bind(optimizer)  # as the next forward would
            engine.sharded.wire.cutting = False
        losses.append(backward(model, rank, step).item())
        optimizer.step()
        optimizer.zero_grad()
    assert len(wholes) >= 4 or world == 1, "two units, of at least two spans each"
    largest = max(unit.layout.numel for unit in engine.units)
    if stage == 3 and world > 1:
        assert max(wholes) <= largest
        slices = sum(flat.span.slice_numel for unit in engine.units for flat in unit.flats)
        assert max(measured) <= 4 * (slices + largest)
    plain = gpt2(n_layer=4)
    slow = [p for block in (0, 2) for p in plain.transformer.h[block].parameters() if p.dim() > 1]
    reference = torch.optim.AdamW([p for p in plain.parameters() if all(p is not q for q in slow)], lr=1e-3)
    expected = []
    for step in range(case.steps):
        if step == 2:
            reference.add_param_group({"params": slow, "lr": 1e-2})
        total: dict[nn.Parameter, Tensor] = {}
        for peer in range(world):
            loss = backward(plain, peer, step)
            if peer == rank:
                expected.append(loss.item())
            for p in plain.parameters():
                total[p] = p.grad if p not in total else total[p] + p.grad
                p.grad = None
        for p in plain.parameters():
            p.grad = total[p] * (1.0 / world)
        reference.step()
        plain.zero_grad()
    assert losses == expected
    ours = Trained(losses, [], model.state_dict(), optimizer.state_dict()["state"], 1.0)
    theirs = Trained(expected, [], plain.state_dict(), reference.state_dict()["state"], 1.0)
    assert rank != 0 or differences(ours, theirs) == (0.0, 0.0)


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 1), (2, 3)])
def test_a_new_group_recuts_unit_by_unit(pools: dict[int, RankPool], world: int, stage: int) -> None:
    pools[world].run(recut, stage)
