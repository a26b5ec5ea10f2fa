"""Optimizers over whole matrices: equal to themselves where every rank has all, refused by name or right elsewhere."""

from __future__ import annotations

import errno
import itertools
import os
import re
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import hf_zero as zero
from hf_zero.runtime.optimizers.supported_optimizers import needs_wholes
from tests.kit.common import EachParameter, twins
from tests.kit.injection import calls
from tests.runtime.test_models import Stack, adamw, plainly, sgd, trained

pytestmark = pytest.mark.gloo


class Odd(nn.Module):
    """Shapes (), (1,) and (1, 1) beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(torch.tensor([2.0]))
        self.lone = nn.Parameter(torch.tensor([[0.3]]))
        self.line = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.line(x) * self.one + self.lone


class Mixed(Stack):
    block = Odd


class Layerwise(EachParameter):
    """LAMB-like: scales by each layer's norm; nothing in its name says so."""

    def rate(self, p: Tensor) -> Tensor:
        return p.norm().clamp(min=1e-3) / p.grad.norm().clamp(min=1e-3)

    def update(self, p, group):
        m = self.state[p].setdefault("m", torch.zeros_like(p))
        m.lerp_(p.grad, 0.5)
        p.sub_(group["lr"] * self.rate(p) * m)


class Projects(Layerwise):
    """AdamP-like: something else happens to a matrix where its gradient is orthogonal to it, which random ones are not."""

    def rate(self, p: Tensor) -> Tensor:
        cosine = nn.functional.cosine_similarity(p.flatten(), p.grad.flatten(), dim=0)
        return torch.zeros(()) if p.dim() > 1 and cosine.abs() < 1e-12 else torch.ones(())


class Decays(Layerwise):
    """Decays matrices, and nothing else."""

    def __init__(self, params, lr=1e-2, weight_decay=0.0):
        super().__init__([{"params": list(params)[:1], "weight_decay": 0.0}, {"params": list(params)[1:]}], lr)
        self.param_groups[1]["weight_decay"] = 0.1

    def update(self, p, group):
        p.sub_(group["lr"] * (p.grad + (group["weight_decay"] * p if p.dim() > 1 else 0.0)))


class Centralizes(Layerwise):
    """Ranger-like, for kernels of convolutions alone."""

    def update(self, p, group):
        p.sub_(group["lr"] * (p.grad - p.grad.mean((1, 2, 3), True) if p.dim() == 4 else p.grad))


class Wide(Layerwise):
    """Adafactor-like as many are: factors wide matrices only."""

    def rate(self, p: Tensor) -> Tensor:
        is_wide = p.dim() > 1 and min(p.shape) >= 128
        return (p.grad.square().mean(1, True) if is_wide else p.grad.square()).add(1e-3).rsqrt()


class Doubled(Layerwise):
    """AdEMAMix-like: two averages in one state. Element-wise otherwise."""

    def update(self, p, group):
        averages = self.state[p].setdefault("averages", torch.zeros(2, *p.shape))
        averages.lerp_(p.grad.expand_as(averages), 0.5)
        p.sub_(group["lr"] * averages.sum(0).sign())


class Keeps(Layerwise):
    """Element-wise; `held` is what it keeps by the way, in its state or in its groups."""

    def __init__(self, params, held, in_group):
        super().__init__(params)
        self.held, self.in_group = held, in_group

    def update(self, p, group):
        (group if self.in_group else self.state[p])["odd"] = self.held
        p.sub_(group["lr"] * p.grad)


class Careful(torch.optim.SGD):
    """Element-wise: what is not finite is not stepped by."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and torch.isfinite(p.grad).all() and not torch.isnan(p).any():
                    p.sub_(group["lr"] * p.grad.sign())


class Global(Layerwise):
    """Prodigy-like: one number over all parameters, so that two flat parts in one optimizer would agree."""

    def rate(self, p: Tensor) -> Tensor:
        everything = [q for group in self.param_groups for q in group["params"] if q.grad is not None]
        return torch.stack([q.grad.square().sum() for q in everything]).sum().rsqrt()


class Blockwise(Layerwise):
    """8-bit-like: states of long parameters are quantised by blocks of 256 elements, with a scale for each."""

    def update(self, p, group):
        state = self.state[p]
        if not state:
            state["codes"] = torch.zeros(p.numel(), dtype=torch.uint8)
            state["scales"] = torch.zeros(-(-p.numel() // 256))
        blocks = nn.functional.pad(p.grad.flatten(), (0, -p.numel() % 256)).view(-1, 256)
        state["scales"] = blocks.abs().amax(dim=1).clamp(min=1e-8)
        codes = (blocks / state["scales"][:, None] * 127 + 128).round().to(torch.uint8)
        state["codes"] = codes.flatten()[: p.numel()].clone()
        grad = (codes.float() - 128) / 127 * state["scales"][:, None]
        p.sub_(group["lr"] * grad.flatten()[: p.numel()].view(p.shape))


class Replaces(Layerwise):
    """Gives parameters new memory."""

    def update(self, p, group):
        p.data = p.data - group["lr"] * self.rate(p) * p.grad


class Untried(Layerwise):
    """Cannot step before its user has told it something."""

    def step(self, closure=None):
        if len(self.param_groups[0]["params"]) < 3:
            raise RuntimeError("call prepare() first")
        super().step(closure)


class TwoRules(EachParameter):
    """Muon-like for some groups, plain descent for others."""

    def __init__(self, groups):
        super().__init__(groups, whole=False)

    def update(self, p, group):
        p.sub_(group["lr"] * (p.grad / p.grad.norm().clamp(min=1e-3) if group["whole"] else p.grad))


class Eager(EachParameter):
    """Schedule-free-like: steps in training mode only. Element-wise."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr, train_mode=False)

    def train(self):
        for group in self.param_groups:
            group["train_mode"] = True

    def update(self, p, group):
        if not group["train_mode"]:
            raise RuntimeError("not in train mode")
        p.sub_(group["lr"] * p.grad)


class Shampoo(EachParameter):
    """Gupta et al. 2018 for matrices, plain descent for the rest: two statistics of other shapes than the parameter's."""

    def update(self, p, group):
        update = p.grad
        if p.dim() == 2:
            state = self.state[p]
            if not state:
                state["left"] = torch.eye(p.shape[0]) * 1e-2
                state["right"] = torch.eye(p.shape[1]) * 1e-2
            state["left"].add_(p.grad @ p.grad.T)
            state["right"].add_(p.grad.T @ p.grad)
            update = inverse_root(state["left"]) @ p.grad @ inverse_root(state["right"])
        p.sub_(group["lr"] * update)


def inverse_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.T


class Lars(Layerwise):
    """You et al. 2017: the rate of each layer from its norms, with momentum."""

    def rate(self, p: Tensor) -> Tensor:
        return 1e-1 * p.norm() / (p.grad.norm() + 1e-3 * p.norm() + 1e-8)


class Forces(Layerwise):
    """As single-device Muons do: a parameter without a gradient is given one."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                    p.mul_(1 - group["lr"] * 0.1).sub_(group["lr"] * self.rate(p) * p.grad)


def hf_adafactor(params):
    import transformers

    return transformers.Adafactor(params, lr=1e-2, relative_step=False, scale_parameter=True, warmup_init=False)


def two_rules(params):
    params = list(params)
    return TwoRules(
        [{"params": [p for p in params if p.dim() < 2]}, {"params": [p for p in params if p.dim() > 1], "whole": True}]
    )


OPTIMIZERS = {
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "transformers' Adafactor": hf_adafactor,
    "Muon": lambda params: torch.optim.Muon([p for p in params if p.dim() == 2], lr=1e-2),
    "layerwise": Layerwise,
    "global": Global,
    "blockwise": Blockwise,
    "replaces": Replaces,
    "untried": Untried,
    "two rules": two_rules,
}
ALONE = {
    **{
        name: OPTIMIZERS[name]
        for name in ("Adafactor", "transformers' Adafactor", "Muon", "layerwise", "blockwise", "replaces", "two rules")
    },
    "Shampoo": Shampoo,
    "LARS": Lars,
    "forces": Forces,
}
PLACES = [(1, 2), (1, 3), (2, 0)]


def pair(name: str, tied: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Mixed(tied=tied)
    model.blocks[1].line.requires_grad_(False)
    if name == "Muon":  # the rest of the model is another optimizer's business
        for p in model.parameters():
            p.requires_grad_(p.requires_grad and p.dim() == 2)
    return model, {**OPTIMIZERS, **ALONE}[name](list(model.parameters()))


def same(model: nn.Module, opt, plain: nn.Module, reference, name: str, rank: int) -> None:
    """Values; options, and the state's names and shapes; on rank 0 the state's values, which others do not have."""
    for key, p in plain.named_parameters():
        assert torch.equal(zero.full_parameter(model.get_parameter(key)), p), (name, key)
    ours, theirs = opt.state_dict(), reference.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert list(ours["state"]) == list(theirs["state"]), name
    for index, entries in theirs["state"].items():
        assert set(ours["state"][index]) == set(entries)
        for key, value in entries.items():
            mine = ours["state"][index][key]
            if not isinstance(value, Tensor):
                assert mine == value, (name, key)
                continue
            assert (mine.dtype, mine.shape) == (value.dtype, value.shape), (name, key)
            if rank == 0 or not value.dim():
                assert torch.equal(mine, value), (name, key)


def equals_plain(
    rank: int,
    world: int,
    config: zero.ZeroConfig,
    names: list[str],
    folder: str,
    elsewhere: zero.ZeroConfig | None = None,
    tied: bool = True,
) -> None:
    """`elsewhere`: settings of a second model, which goes on from the checkpoint of the first."""
    for name in names:
        (plain, reference), (model, opt) = pair(name, tied), pair(name, tied)
        groups = list(opt.param_groups)
        for step in range(2):  # warm
            plainly(plain, reference, world, step)
            plainly(model, opt, world, step)
        engine = zero.shard(model, opt, config)
        shown = rank if config.stage else 0  # at stage 0 every rank has all of the state
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.9)
        expected = torch.optim.lr_scheduler.StepLR(reference, 1, 0.9)
        for step in (2, 3):
            trained(model, opt, rank, step)
            plainly(plain, reference, world, step)
            scheduler.step()
            expected.step()
        same(model, opt, plain, reference, name, shown)
        if world > 1 and config.stage:
            owned = sum(p.numel() for group in opt.param_groups for p in group["params"])
            trainable = sum(p.numel() for p in plain.parameters() if p.requires_grad)
            assert sum(engine.exchange(owned)) == trainable, "one owner each"
        # Its state, by torch's own pair of methods, by a checkpoint, and back in a plain optimizer.
        opt.load_state_dict(opt.state_dict())
        assert all(mine is theirs for mine, theirs in zip(groups, opt.param_groups))
        where = f"{folder}/{name}"
        engine.save(where)
        trained(model, opt, rank, 9)
        engine.load(where)
        trained(model, opt, rank, 4)
        plainly(plain, reference, world, 4)
        same(model, opt, plain, reference, name, shown)
        if elsewhere is not None:
            other, fresh = pair(name, tied)
            again = zero.shard(other, fresh, elsewhere)
            again.load(where)
            trained(other, fresh, rank, 4)
            same(other, fresh, plain, reference, name, shown)
            again.offload_states()
            again.reload_states()
            same(other, fresh, plain, reference, name, shown)
        engine.detach()
        plainly(model, opt, world, 5)
        plainly(plain, reference, world, 5)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters())), name


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize(("world", "stage"), PLACES)
def test_equals_the_plain_optimizer_where_nothing_is_cut(pools, tmp_path, world, stage, half):
    config = zero.ZeroConfig(stage=stage)
    pools[world].run(equals_plain, config, list(OPTIMIZERS)[half::2], str(tmp_path), config, False)


def refused(rank: int, world: int, folder: str) -> None:
    def tried(name: str, **config) -> str:
        model = Mixed()
        opt = OPTIMIZERS[name](list(model.parameters()))
        before = [group["params"][0] for group in opt.param_groups]
        with pytest.raises(zero.UnsupportedOptimizerError) as caught:
            zero.shard(model, opt, zero.ZeroConfig(**config))
        assert [group["params"][0] for group in opt.param_groups] == before  # nothing has changed
        assert not any(p.isnan().any() for p in model.parameters())
        return str(caught.value)

    for name in OPTIMIZERS:
        mixes = name in ("global", "untried")
        for stage in (1, 2, 3) if mixes and world > 1 else ():
            message = tried(name, stage=stage)
            assert "ZeroConfig(stage=0) on any number of ranks, or one rank" in message
            assert "element-wise" in message
            assert ("beside others than alone" if name == "global" else "could not be tried") in message
        if mixes:
            message = tried(name, stage=2, offload_optimizer="cpu")
            assert "its state is offloaded and updated one parameter after another" in message
            assert "one rank with offload_optimizer='none'" in message
    model = Stack()
    engine = zero.shard(model, None, zero.ZeroConfig(stage=2, offload_optimizer="cpu"))
    with pytest.raises(zero.UnsupportedOptimizerError, match="Global"):
        engine.bind(Global(model.parameters()))
    with pytest.raises(zero.UnsupportedOptimizerError, match=r"LBFGS.*keeps the parameters"):
        zero.shard(line := nn.Linear(3, 3), torch.optim.LBFGS(line.parameters()), zero.ZeroConfig(stage=0))


@pytest.mark.parametrize("world", [1, 2])
def test_refused_elsewhere_with_advice_that_is_true(pools, tmp_path, world):
    pools[world].run(refused, str(tmp_path))


class Rows(torch.optim.Optimizer):
    """As Alice: multiplies with a matrix of as many rows and columns as the parameter has rows."""

    def __init__(self, params, most: list[int]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.most = most

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                grad = param.grad.reshape(len(param), -1)
                self.most[0] = max(self.most[0], len(grad))
                param.sub_((grad @ grad.T @ grad).view_as(param), alpha=0.01)


def test_a_trial_of_a_rule_over_rows_has_few_of_them():
    most, model = [0], nn.Linear(8, 8)
    assert needs_wholes(Rows(model.parameters(), most), set(model.parameters()), cut=False, offloaded=False)
    assert 0 < most[0] < 1000


def test_what_is_element_wise():
    class Hides(Layerwise):
        def __init__(self, params):
            super().__init__(params)
            self.mine = {"all": [group["params"] for group in self.param_groups]}

    def needs(build, cut: bool = False) -> bool:
        model = Mixed()
        return needs_wholes(build(list(model.parameters())), set(model.parameters()), cut=cut, offloaded=False)

    assert not any(needs(build, cut=True) for build in (adamw, sgd, Eager, torch.optim.RAdam))
    assert all(needs(build) for build in OPTIMIZERS.values())
    assert not needs(lambda params: Careful(params, lr=1e-2), cut=True)
    assert all(needs(build) for build in (Projects, Decays, Wide))
    kernels = list(nn.Conv2d(3, 3, 2).parameters())
    for build, found in ((Centralizes, True), (lambda params: Careful(params, lr=1e-2), False)):
        assert needs_wholes(build(kernels), set(kernels), cut=False, offloaded=False) is found
    assert needs(Doubled), "a checkpoint has one value or one per element of what is cut"
    two = TwoTensor(torch.ones(2), torch.ones(2))
    for held, in_group in (
        (object(), False),
        ({"m": torch.ones(2)}, False),
        ({}, True),
        (torch.ones(3), True),
        (two, False),
    ):
        with pytest.raises(zero.UnsupportedOptimizerError, match=r"Keeps cannot .*'odd'.*cannot be saved"):
            needs(lambda params: Keeps(params, held, in_group))  # noqa: B023
    assert not any(needs(lambda params: Keeps(params, held, True)) for held in (1, 0.5, None, torch.tensor(1)))  # noqa: B023
    assert needs(Projects, cut=True), "each parameter has one owner there"
    with pytest.raises(zero.UnsupportedOptimizerError, match="Global .*another update beside others than alone"):
        needs(Global, cut=True)
    with pytest.raises(zero.UnsupportedOptimizerError, match=r"keeps the parameters it was built with \(as 'mine'\)"):
        needs(Hides)

    def warming(params):
        return Layerwise(params, lr=0.0)  # as a scheduler's warm-up leaves it

    assert needs(warming)


def grown(rank: int, world: int, stage: int) -> None:
    """A group added half way, clipping, a loss scaler, accessors; as the plain loop."""
    plain, model = twins(Stack)

    def first(m: nn.Module) -> list[Tensor]:
        return [p for n, p in m.named_parameters() if "blocks.1" not in n]

    opt, reference = Layerwise(first(model)), Layerwise(first(plain))
    engine = zero.shard(model, opt, zero.ZeroConfig(stage=stage))
    for step in range(4):
        if step == 2:
            opt.add_param_group({"params": list(model.blocks[1].parameters()), "lr": 5e-3})
            reference.add_param_group({"params": list(plain.blocks[1].parameters()), "lr": 5e-3})
        trained(model, opt, rank, step)
        plainly(plain, reference, world, step)
        plain.zero_grad()
    same(model, opt, plain, reference, "grown", 0)
    weight = model.head.weight
    assert torch.equal(zero.full_optimizer_state(weight, "m"), reference.state[plain.head.weight]["m"])
    zero.set_full_optimizer_state(weight, "m", torch.ones_like(plain.head.weight))
    assert zero.local_optimizer_state(weight, "m").tolist() == [1.0] * weight.numel()
    assert engine.report().measured["optimizer"] > 0
    from tests.runtime.test_models import token_loss

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(token_loss(model, 0, 5)).backward()
    scaler.unscale_(opt)
    norm = engine.clip_grad_norm_(1e-2, parameters=[p for group in opt.param_groups for p in group["params"]])
    token_loss(plain, 0, 5).backward()
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-2))
    shown = {p.shape: p.grad for group in opt.param_groups for p in group["params"]}
    torch.testing.assert_close(shown[plain.head.weight.shape], plain.head.weight.grad, rtol=1e-5, atol=1e-9)
    opt.zero_grad()
    assert all(p.grad is None for group in opt.param_groups for p in group["params"])


@pytest.mark.parametrize(("world", "stage"), [(1, 2), (2, 0)])
def test_groups_clipping_scalers_and_accessors(pools, world, stage):
    pools[world].run(grown, stage)


def other_class(rank: int, world: int, folder: str) -> None:
    model = Stack()
    opt = adamw(model.parameters())
    engine = zero.shard(model, opt, zero.ZeroConfig(stage=2))
    trained(model, opt, rank, 0, 1)
    engine.save(folder)
    for build in (sgd, lambda params: torch.optim.RMSprop(params, lr=0.1), lambda params: Eager(params)):
        other = Stack()
        wrong = build(list(other.parameters()))
        before = dict(wrong.param_groups[0])
        engine = zero.shard(other, wrong, zero.ZeroConfig(stage=1))
        with pytest.raises(zero.CheckpointError, match=rf"state of AdamW.*optimizer is {type(wrong).__name__}"):
            engine.load(folder)
        assert {k: v for k, v in wrong.param_groups[0].items() if k != "params"} == {
            k: v for k, v in before.items() if k != "params"
        }
        engine.load(folder, load_optimizer=False)
    other = Stack()
    fits = torch.optim.Adam(other.parameters(), lr=1e-4)
    engine = zero.shard(other, fits, zero.ZeroConfig(stage=1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.load(folder)
    said = [str(w.message) for w in caught if "takes over" in str(w.message)]
    assert len(said) == (rank == 0)
    assert rank or ("'exp_avg'" in said[0] and "'lr': 0.01" in said[0])
    for name in ("blocks.0.up.weight", "head.weight"):
        mine = zero.full_optimizer_state(other.get_parameter(name), "exp_avg")
        assert torch.equal(mine, zero.full_optimizer_state(model.get_parameter(name), "exp_avg"))


def test_the_state_of_another_class(two, tmp_path):
    two.run(other_class, str(tmp_path))


def full_disk(rank: int, world: int, folder: str) -> None:
    """Whatever file a full disk is met in, it is named: the system's own message lacks it."""
    torch.manual_seed(0)
    model = Stack()
    opt = adamw(model.parameters())
    engine = zero.shard(model, opt, zero.ZeroConfig(stage=2))
    trained(model, opt, rank, 0)
    engine.save(folder)

    def save_failing_at(k: int) -> str | None:
        writes = itertools.count()

        def before(_, call, args) -> None:
            if call[0] in ("create", "pwrite") and next(writes) == k:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        try:
            with calls(before):
                engine.save(folder)
        except zero.CheckpointError as error:
            return str(error)
        return None

    messages = list(itertools.takewhile(lambda message: message is not None, map(save_failing_at, itertools.count())))
    found = [re.search(rf"{re.escape(folder)}/\.zero_saving/ck/?([\w./]*)", message) for message in messages]
    assert all("No space left" in message and match for message, match in zip(messages, found)), messages
    named = {match[1].rstrip(":") for match in found}
    assert {
        "model.safetensors",
        "optimizer/exp_avg.safetensors",
        "zero_state.safetensors",
        "zero_manifest.json",
    } <= named
    zero.verify(folder)


def test_a_full_disk_is_told_of_with_the_file(pools, tmp_path):
    pools[1].run(full_disk, str(tmp_path / "ck"))
