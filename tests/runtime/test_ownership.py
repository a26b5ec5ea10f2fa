"""A parameter has one engine and memory of its own; a bound optimizer is the same everywhere, and is given back whole."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.tiers.fingerprint import fingerprint, mixed_sums
from tests.kit.common import twins
from tests.runtime.test_models import Stack, sgd, token_loss

pytestmark = pytest.mark.gloo


def adamw(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, *steps: int) -> None:
    for step in steps:
        token_loss(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer, world: int, *steps: int) -> None:
    """The same steps of a plain model on all ranks' batches."""
    for step in steps:
        sums: dict[Tensor, Tensor] = {}
        for rank in range(world):
            token_loss(model, rank, step).backward()
            for p in model.parameters():
                if p.grad is not None:
                    sums[p] = p.grad if p not in sums else sums[p] + p.grad
                    p.grad = None
        for p, total in sums.items():
            p.grad = total * (1.0 / world)
        optimizer.step()
        optimizer.zero_grad()


# One engine per parameter --------------------------------------------------------------------------------------------


def parts(rank: int, world: int, stage: int) -> None:
    config = zero.ZeroConfig(stage=stage)
    model = Stack()
    opt = sgd(list(model.parameters()))
    engine = zero.shard(model, opt, config)
    for part in (model.blocks[1], model.blocks, model.head):
        with pytest.raises(zero.ConfigError, match=r"parameter '.*weight' belongs to a sharded Stack already"):
            zero.shard(part, None, config)
    with pytest.raises(zero.ConfigError, match="sharded already"):
        zero.shard(model, None, config)
    with pytest.raises(zero.ConfigError, match="sharded already"):
        zero.shard(nn.ModuleDict({"policy": model, "value": nn.Linear(8, 1)}), None, config)
    value = nn.Sequential(nn.Embedding(23, 8), nn.Linear(8, 1))
    value[0].weight = model.embed.weight
    with pytest.raises(zero.ConfigError, match=r"'0\.weight' belongs"):
        zero.shard(value, None, config)
    trained(model, opt, rank, 0)  # none of it has left a trace
    assert not any(value.isnan().any() for value in model.state_dict().values() if not value.is_meta)
    engine.detach()
    zero.shard(model.blocks, None, config)  # free again


@pytest.mark.parametrize("stage", [1, 3])
def test_a_part_of_a_sharded_model_is_refused(two, stage):
    two.run(parts, stage)


def one_sided(rank: int, world: int) -> None:
    """What one rank refuses all ranks refuse."""
    model, other = Stack(), Stack()
    if rank:
        other.head.weight.data = other.embed.weight.data
    with pytest.raises(zero.LayoutError if rank else zero.RankMismatchError, match="'head.weight'"):
        zero.shard(other, None, zero.ZeroConfig(stage=2))
    zero.shard(model, None, zero.ZeroConfig(stage=2))


def test_one_ranks_refusal_is_everyones(two):
    two.run(one_sided)


def aliases(rank: int, world: int, stage: int) -> None:
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
    flat = torch.randn(2, 23, 8)
    model.embed.weight.data, model.head.weight.data = flat[0], flat[1]
    both = torch.randn(16, 16)
    model.blocks[0].up.weight.data, model.blocks[1].up.weight.data = both[:, :8], both[:, 8:]
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
        other.head.weight.data = torch.zeros(23, 8)
        kept: list[Tensor] = []
        hook = model.head.register_forward_hook(lambda module, *_: kept.append(module.weight.data))
        with torch.no_grad():
            token_loss(model, rank, 0)
        hook.remove()
        other.head.weight.data = kept[0]  # the memory is the view's own since the unit was released
        assert torch.equal(kept[0], zero.full_parameter(model.head.weight))
        zero.shard(other, None, config)
        return
    other.head.weight.data = torch.zeros(23, 8)
    zero.shard(other, None, config)


@pytest.mark.parametrize("stage", [1, 3])
def test_shared_memory_is_refused(two, stage):
    two.run(aliases, stage)


def test_fingerprints_see_every_permutation():
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        x = (torch.randn(160, 4096, generator=generator) * 3).to(dtype)
        x[1] = torch.roll(x[0], 1)
        for print_of in (fingerprint, mixed_sums):
            seen = {tuple(print_of(x).tolist())}
            others = [x.flip(0), x.flip(1), x.roll(1, 0), x.roll(1, 1), x.clone(), x.clone(), x.clone()]
            others[4][[140, 150]] = x[[150, 140]]  # beyond the first 64 rows of 4096
            others[5][[0, 1]] = x[[1, 0]]
            others[6][159, [4000, 4001, 4002]] = x[159, [4001, 4002, 4000]]
            changed = [other for other in others if not torch.equal(other, x)]
            seen |= {tuple(print_of(other).tolist()) for other in changed}
            assert len(seen) == 1 + len(changed)
            assert torch.equal(print_of(x), print_of(x.clone()))
    assert fingerprint(torch.zeros(0)).shape == fingerprint(torch.tensor(1.0)).shape == (2,)


def swapped_tokens(rank: int, world: int) -> None:
    """Two token embeddings change places, far behind in the matrix."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(300, 1024), nn.Linear(1024, 4))
    before = model[0].weight.detach().clone()
    zero.shard(model, None, zero.ZeroConfig(stage=3))
    with zero.GatheredParameters(model[0].weight, modifier_rank=0), torch.no_grad():
        if rank == 0:
            model[0].weight[[280, 290]] = model[0].weight[[290, 280]]
    after = zero.full_parameter(model[0].weight)
    before[[280, 290]] = before[[290, 280]]
    assert torch.equal(after, before)


def test_swapped_rows_are_kept(two):
    two.run(swapped_tokens)


# Binding -------------------------------------------------------------------------------------------------------------


def bound_otherwise(rank: int, world: int) -> None:
    model = Stack()
    params = list(model.parameters())
    engine = zero.shard(model, None, zero.ZeroConfig(stage=2))
    with pytest.raises(zero.RankMismatchError, match="optimizer group 0"):
        engine.bind(sgd(params[::-1] if rank else params))
    with pytest.raises(zero.RankMismatchError, match="group"):
        engine.bind(sgd([{"params": params[:3]}, {"params": params[3:]}] if rank else params))
    warm = adamw(params)
    if rank:
        for p in params:
            p.grad = torch.zeros_like(p)
        with torch.no_grad():
            for p in params:
                warm.state[p] = {"step": torch.tensor(1.0), "exp_avg": p * 0, "exp_avg_sq": p * 0}
                p.grad = None
    with pytest.raises(zero.RankMismatchError, match="has state"):
        engine.bind(warm)
    opt = sgd(params)
    engine.bind(opt)
    trained(model, opt, rank, 0)


def test_bind_compares_ranks(two):
    two.run(bound_otherwise)


def unbound(rank: int, world: int) -> None:
    def said(caught) -> int:
        return sum("without an optimizer" in str(w.message) for w in caught)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Stack()
        zero.shard(model, None, zero.ZeroConfig(stage=2))
        lost = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
        for step in range(4):
            with torch.no_grad():
                token_loss(model, rank, step)  # evaluation says nothing, and is told nothing
            trained(model, lost, rank, step)
            assert said(caught) == (0 if step == 0 else 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Stack()
        engine = zero.shard(model, None, zero.ZeroConfig(stage=3))
        for step in range(3):
            with torch.no_grad():
                token_loss(model, rank, step)
        opt = sgd(list(model.parameters()))
        engine.bind(opt)
        trained(model, opt, rank, 0, 1, 2)
        assert said(caught) == 0


def test_training_without_an_optimizer_is_said_once(two):
    two.run(unbound)


# Its state -----------------------------------------------------------------------------------------------------------


def own_state(rank: int, world: int, stage: int) -> None:
    """`load_state_dict(state_dict())`, as it is with the model; mixtures are refused everywhere."""
    torch.manual_seed(0)
    model, plain = Stack(), Stack()
    plain.load_state_dict(model.state_dict())
    opt, reference = adamw(model.parameters()), adamw(plain.parameters())
    zero.shard(model, opt, zero.ZeroConfig(stage=stage))
    trained(model, opt, rank, 0, 1)
    plainly(plain, reference, world, 0, 1)
    state = opt.state_dict()
    opt.load_state_dict(state)
    trained(model, opt, rank, 2)
    plainly(plain, reference, world, 2)
    for name, p in plain.named_parameters():
        assert torch.equal(zero.full_parameter(model.get_parameter(name)), p.float()), name
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(zero.full_optimizer_state(model.get_parameter(name), key), reference.state[p][key])
    if world == 1:
        return

    def as_meta(values: dict) -> dict:
        return {
            **values,
            "state": {i: {k: v.to("meta") for k, v in e.items()} for i, e in values["state"].items()},
        }

    full = reference.state_dict()
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
    trained(model, opt, rank, 3)
    plainly(plain, reference, world, 3)
    assert torch.equal(zero.full_parameter(model.head.weight), plain.head.weight)


@pytest.mark.parametrize(("world", "stage"), [(1, 2), (2, 0), (2, 3), (3, 1)])
def test_an_optimizers_own_state_loads(pools, world, stage):
    pools[world].run(own_state, stage)


class Gated(nn.Module):
    """Parameters of shape (), (1,), (1, 1) and (0,) beside others, and alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(torch.tensor([2.0]))
        self.lone = nn.Parameter(torch.tensor([[0.3]]))
        self.none = nn.Parameter(torch.zeros(0))
        self.line = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.line(x) * self.one + self.lone + self.none.sum()


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(20.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.first + torch.tanh(self.second * x)


class GatedStack(Stack):
    block = Gated


class GatesStack(Stack):
    """Spans of nothing but parameters of shape ()."""

    block = Gates


def small_neighbours(rank: int, world: int, stage: int, build) -> None:
    for warm in (True, False):
        plain, model = twins(build)
        reference, opt = adamw(plain.parameters()), adamw(model.parameters())
        plainly(plain, reference, world, 0, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if warm:
                plainly(model, opt, world, 0, 1)
                zero.shard(model, opt, zero.ZeroConfig(stage=stage))
            else:
                zero.shard(model, opt, zero.ZeroConfig(stage=stage))
                model.load_state_dict(plain.state_dict())
                opt.load_state_dict(reference.state_dict())
        plainly(plain, reference, world, 2)
        trained(model, opt, rank, 2)
        for name, p in plain.named_parameters():
            mine = model.get_parameter(name)
            assert torch.equal(zero.full_parameter(mine), p), (name, warm)
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(zero.full_optimizer_state(mine, key), reference.state[p][key]), (name, key, warm)


@pytest.mark.parametrize("build", [GatedStack, GatesStack])
@pytest.mark.parametrize(("world", "stage"), [(1, 2), (2, 1), (2, 3)])
def test_small_parameters_keep_their_own_state(pools, world, stage, build):
    pools[world].run(small_neighbours, stage, build)


def given_back(rank: int, world: int, stage: int, offload: str, folder: str) -> None:
    plain, model = twins(lambda: Stack(tied=True))
    for each in (plain, model):
        each.blocks[1].requires_grad_(False)

    def grouped(m: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [
                {"params": [p for p in m.parameters() if p.dim() > 1]},
                {"params": [p for p in m.parameters() if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=1e-2,
        )

    opt, reference = grouped(model), grouped(plain)
    groups = list(opt.param_groups)
    config = zero.ZeroConfig(stage=stage, offload_optimizer=offload, offload_dir=folder if offload == "disk" else None)
    engine = zero.shard(model, opt, config)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    expected = torch.optim.lr_scheduler.StepLR(reference, 2, 0.5)
    for step in range(2):
        trained(model, opt, rank, step)
        plainly(plain, reference, world, step)
        scheduler.step()
        expected.step()
    engine.detach()
    engine.detach()  # nothing more to undo
    assert all(mine is theirs for mine, theirs in zip(groups, opt.param_groups))
    where = {id(p): i for i, p in enumerate(model.parameters())}
    there = {id(p): i for i, p in enumerate(plain.parameters())}
    for mine, theirs in zip(opt.param_groups, reference.param_groups):
        assert [where[id(p)] for p in mine["params"]] == [there[id(p)] for p in theirs["params"]]
    ours, state = opt.state_dict(), reference.state_dict()
    assert ours["param_groups"] == state["param_groups"]
    assert list(ours["state"]) == list(state["state"])
    for index, entries in state["state"].items():
        assert all(torch.equal(ours["state"][index][key], value) for key, value in entries.items())
    for step in (2, 3):
        plainly(model, opt, world, step)
        plainly(plain, reference, world, step)
        scheduler.step()
        expected.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters()))
    zero.shard(model, opt, config)  # and in again, warm
    trained(model, opt, rank, 4)
    plainly(plain, reference, world, 4)
    assert torch.equal(zero.full_parameter(model.embed.weight), plain.embed.weight)


@pytest.mark.parametrize(
    ("world", "stage", "offload"), [(1, 2, "none"), (2, 0, "none"), (2, 1, "cpu"), (2, 3, "none"), (2, 3, "disk")]
)
def test_detach_gives_the_optimizer_back(pools, tmp_path, world, stage, offload):
    pools[world].run(given_back, stage, offload, str(tmp_path))


# Copies --------------------------------------------------------------------------------------------------------------


class Normed(Stack):
    """With buffers, a root parameter and hooks of the user's."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.zeros(3))
        self.blocks[0].norm.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale


def copied(rank: int, world: int, stage: int, precision: str) -> None:
    plain, model = twins(Normed)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    opt = adamw([p for p in model.parameters() if p.requires_grad])
    zero.shard(model, opt, zero.ZeroConfig(stage=stage), mixed_precision=precision)
    trained(model, opt, rank, 0)
    before = {name: zero.full_parameter(p) for name, p in model.named_parameters()}
    for made in (copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model).module):
        assert type(made) is Normed
        assert zero.engine_of(made) is None
        assert made.head.weight is made.embed.weight
        assert {n: p.requires_grad for n, p in made.named_parameters()} == {
            n: p.requires_grad for n, p in plain.named_parameters()
        }
        for name, p in made.named_parameters():
            assert type(p) is nn.Parameter
            assert torch.equal(p, before[name]), name
        calls.clear()
        token_loss(made, rank, 5).backward()  # plain in all it does
        assert calls == [1]  # the user's hook is a part of it
        assert all(p.grad is not None for p in made.parameters() if p.requires_grad)
        made.zero_grad()
        again = pickle.loads(pickle.dumps(made.blocks))
        assert torch.equal(again[1].up.weight, before["blocks.1.up.weight"])
        assert torch.equal(copy.deepcopy(made).state_dict()["head.weight"], before["embed.weight"])
    part = copy.deepcopy(model.blocks[1])
    assert torch.equal(part.up.weight, before["blocks.1.up.weight"])
    both = copy.deepcopy({"model": model, "head": model.head})
    assert both["head"] is both["model"].head
    for attempt in (
        lambda: pickle.dumps(model),
        lambda: torch.save(model, io.BytesIO()),
        lambda: pickle.dumps(model.blocks),
    ):
        with pytest.raises(zero.StateError, match="sharded model cannot be pickled.*engine.save"):
            attempt()
    for attempt in (pickle.dumps, copy.deepcopy):
        with pytest.raises(zero.StateError, match="an Engine cannot be copied"):
            attempt(zero.engine_of(model))
    trained(model, opt, rank, 1)  # nothing was taken from the model itself
    assert not torch.equal(zero.full_parameter(model.embed.weight), before["embed.weight"])
    zero.shard(copy.deepcopy(model), None, zero.ZeroConfig(stage=3))  # as a frozen reference, say


@pytest.mark.parametrize(
    ("world", "stage", "precision"), [(1, 2, "no"), (2, 0, "no"), (2, 1, "bf16"), (2, 3, "no"), (2, 3, "bf16")]
)
def test_a_copy_is_plain(pools, world, stage, precision):
    pools[world].run(copied, stage, precision)


def averaged(rank: int, world: int, stage: int, precision: str) -> None:
    plain, model = twins(lambda: Stack(tied=True))
    opt, reference = adamw(model.parameters()), adamw(plain.parameters())
    zero.shard(model, opt, zero.ZeroConfig(stage=stage), mixed_precision=precision)
    options = {"multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)}
    ema, expected = (torch.optim.swa_utils.AveragedModel(each, **options) for each in (model, plain))
    for step in range(3):
        trained(model, opt, rank, step)
        if precision == "no":
            plainly(plain, reference, world, step)
        else:
            plain.load_state_dict({name: zero.full_parameter(p) for name, p in model.named_parameters()}, strict=False)
        with zero.GatheredParameters(model):
            ema.update_parameters(model)
        expected.update_parameters(plain)
    for mine, theirs in zip(ema.module.parameters(), expected.module.parameters()):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("stage", "precision"), [(1, "no"), (3, "no"), (3, "bf16")])
def test_an_average_of_weights(two, stage, precision):
    two.run(averaged, stage, precision)


# A step that raises --------------------------------------------------------------------------------------------------


class Stops(Exception):
    pass


class Breaks(torch.optim.AdamW):
    when = ""

    def stop(self, place: str) -> None:
        if self.when == place:
            self.when = ""
            raise Stops

    def step(self, closure=None):
        self.stop("begin")
        super().step(closure)  # torch runs step hooks for this one, too


def stepped_twice(rank: int, world: int, offload: str, folder: str) -> None:
    """A step that raises, wherever it does, and is made again is made once."""
    for when in ("hook", "begin"):
        plain, model = twins(Stack)
        opt, reference = Breaks(model.parameters(), lr=1e-2), adamw(plain.parameters())
        config = zero.ZeroConfig(stage=2, offload_optimizer=offload, offload_dir=folder if offload == "disk" else None)
        engine = zero.shard(model, opt, config)
        opt.register_step_pre_hook(lambda *_, opt=opt: opt.stop("hook"))
        for step in range(4):
            token_loss(model, rank, step).backward()
            if step == 2:
                opt.when = when
                with pytest.raises(Stops):
                    opt.step()
            opt.step()
            opt.zero_grad()
            plainly(plain, reference, world, step)
        engine.finish_step()
        for name, p in plain.named_parameters():
            assert torch.equal(zero.full_parameter(model.get_parameter(name)), p), (name, when)
            assert zero.full_optimizer_state(model.get_parameter(name), "step").item() == 4


@pytest.mark.parametrize("offload", ["none", "cpu", "disk"])
def test_a_step_that_raised_is_made_once(two, tmp_path, offload):
    two.run(stepped_twice, offload, str(tmp_path))


# Spans of one parameter, and of none ---------------------------------------------------------------------------------


class Ragged(nn.Module):
    """Heads of one parameter of 175 elements: no multiple of 32 times the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(7, 7), nn.ReLU()) for _ in range(2)])
        self.heads = nn.ModuleList([nn.Linear(7, 25, bias=False) for _ in range(2)])

    def forward(self, x: Tensor, heads: list[int]) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return sum((self.heads[head](x).square().sum() for head in heads), x.sum())


def ragged(rank: int, world: int, stage: int, held: bool) -> None:
    def heads_of(r: int, step: int) -> list[int]:
        return [h for h in range(2) if (r + step + h) % world == 0]

    def x_of(r: int, step: int) -> Tensor:
        return torch.randn(5, 7, generator=torch.Generator().manual_seed(10 * step + r))

    plain, model = twins(Ragged)
    opt, reference = sgd(list(model.parameters())), sgd(list(plain.parameters()))
    engine = zero.shard(model, opt, zero.ZeroConfig(stage=stage), mixed_precision="bf16" if held else "no")
    for step in range(4):
        if held:
            with engine.no_sync():
                model(x_of(rank, step), heads_of(rank, step)).backward()
        model(x_of(rank, step), heads_of(rank, step)).backward()
        norm = engine.clip_grad_norm_(float("inf"))
        assert norm.isfinite()
        opt.step()
        opt.zero_grad()
        total = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
        for r in range(world):
            with torch.autocast("cpu", torch.bfloat16, enabled=held):
                loss = plain(x_of(r, step), heads_of(r, step))
            loss.backward()
            for name, p in plain.named_parameters():
                if p.grad is not None:
                    total[name] += p.grad * (2 if held else 1)
                    p.grad = None
        for name, p in plain.named_parameters():
            p.grad = total[name] / world
        reference.step()
        reference.zero_grad()
    for name, p in plain.named_parameters():
        mine = zero.full_parameter(model.get_parameter(name))
        torch.testing.assert_close(mine, p.detach(), rtol=2e-2 if held else 1e-6, atol=2e-2 if held else 1e-6)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("world", [2, 3])
def test_a_span_of_one_parameter_that_some_ranks_use(pools, world, stage, held):
    pools[world].run(ragged, stage, held)


class Empties(Stack):
    """Nothing but empty parameters in a span: alone in a block, and of another type."""

    class block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(8, 8)
            self.nothing = nn.Parameter(torch.zeros(0, 3, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.line(x) + self.nothing.sum().float()


def empties(rank: int, world: int, stage: int, offload: str, folder: str) -> None:
    plain, model = twins(Empties)
    opt, reference = adamw(model.parameters()), adamw(plain.parameters())
    options = {"offload_optimizer": offload, "offload_params": offload if stage == 3 else "none"}
    config = zero.ZeroConfig(stage=stage, **options, offload_dir=folder if offload == "disk" else None)
    engine = zero.shard(model, opt, config)
    trained(model, opt, rank, 0, 1)
    plainly(plain, reference, world, 0, 1)
    nothing = model.blocks[0].nothing
    assert zero.full_parameter(nothing).shape == (0, 3)
    assert zero.local_parameter(nothing).shape == (0,)
    zero.set_full_parameter(nothing, torch.zeros(0, 3))
    zero.full_optimizer_state(nothing, "exp_avg")
    zero.local_optimizer_state(nothing, "exp_avg")
    with zero.GatheredParameters(model, modifier_rank=0):
        assert nothing.shape == (0, 3)
    token_loss(model, rank, 5).backward()
    zero.full_gradient(nothing)
    zero.local_gradient(nothing)
    opt.zero_grad()
    engine.save(f"{folder}/ck")
    engine.load(f"{folder}/ck")
    opt.load_state_dict(opt.state_dict())
    trained(model, opt, rank, 2)
    plainly(plain, reference, world, 2)
    engine.finish_step()
    for name, p in plain.named_parameters():
        assert torch.equal(zero.full_parameter(model.get_parameter(name)), p.float()), name
    engine.detach()
    assert nothing.shape == (0, 3)


@pytest.mark.parametrize(
    ("world", "stage", "offload"), [(1, 2, "none"), (2, 1, "none"), (2, 3, "none"), (2, 2, "cpu"), (2, 3, "disk")]
)
def test_empty_parameters_alone_in_a_span(pools, tmp_path, world, stage, offload):
    pools[world].run(empties, stage, offload, str(tmp_path))
