"""Optimizers over flat spans: which ones equal themselves, which are refused, groups, schedulers, clipping, state."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import hf_zero as zero
from hf_zero.runtime.optimizers.clipping import square_sum, tree_square_sum
from tests.kit.common import EachParameter, gpt2, loss_of, twins
from tests.runtime.test_models import Stack, check, sgd, token_loss

pytestmark = pytest.mark.gloo


class Lion(EachParameter):
    """A user's element-wise optimizer, with methods of every kind."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(params, lr, betas=betas)

    @staticmethod
    def direction(momentum, grad, beta):
        return torch.sign(momentum * beta + grad * (1 - beta))

    @classmethod
    def moved(cls, momentum, grad, betas):
        return cls.direction(momentum, grad, betas[0])

    def update(self, p, group):
        m = self.state[p].setdefault("m", torch.zeros_like(p))
        p.add_(self.moved(m, p.grad, group["betas"]), alpha=-group["lr"])
        p.add_(self.direction(m, p.grad, group["betas"][1]), alpha=-group["lr"])
        m.lerp_(p.grad, 1 - group["betas"][1])


class Begins(torch.optim.Optimizer):
    """As those of pytorch_optimizer: a group that has no `step` has not begun, and a method makes its states."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    def init_group(self, group):
        for p in group["params"]:
            if p.grad is not None:
                self.state[p]["m"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if "step" not in group:
                self.init_group(group)
                group["step"] = 1
            else:
                group["step"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p]["m"].lerp_(p.grad, 0.1)
                    p.add_(m, alpha=-group["lr"] / (1 - 0.9 ** group["step"]))


class Late(Begins):
    """The states are made when a parameter is met."""

    def init_group(self, group):
        pass

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and not self.state[p]:
                    self.state[p]["m"] = torch.zeros_like(p)
        super().step(closure)


class Mixes(torch.optim.SGD):
    """A user's optimizer with one norm for all parameters: nothing in its name says so."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            for p in group["params"]:
                p.sub_(group["lr"] / norm * p.grad)


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "user's Lion": lambda p: Lion(p, lr=1e-2),
    "begins": Begins,
    "begins late": Late,
}


def check_optimizer(rank: int, world: int, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        check(rank, world, Stack, token_loss, stages=(1, 3), optimizer=OPTIMIZERS[name], bound=0.0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_is_bit_equal(two, name):
    two.run(check_optimizer, name)


def check_offloaded(rank: int, world: int, name: str, folder: str) -> None:
    for tier in ("cpu", "disk"):
        settings = {"offload_optimizer": tier, "offload_dir": folder}
        check(rank, world, Stack, token_loss, stages=(1, 3), optimizer=OPTIMIZERS[name], bound=0.0, **settings)


@pytest.mark.parametrize("name", ["user's Lion", "begins", "begins late"])
def test_a_users_optimizer_is_bit_equal_offloaded(two, tmp_path, name):
    """What makes states, counts and knows that it has begun is its own methods and groups."""
    two.run(check_offloaded, name, str(tmp_path))


class Adapts(Lion):
    """As D-Adaptation: what it knows of all gradients is a number in its group."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            squares = [p.grad.square().sum() for p in group["params"] if p.grad is not None]
            group["distance"] = group.get("distance", 0.0) + float(sum(squares))


class Named(Lion):
    """As pytorch_optimizer's MADGRAD: a count of its own among the states of parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.state.setdefault("k", torch.zeros(1)).add_(1)


def refuse_what_mixes(rank: int, world: int) -> None:
    """Also at a rate at which the trial's results would be lost in rounding."""
    for tier, stage in (("none", 1), ("none", 3), ("cpu", 1)):
        for build, reason in (
            (Adapts, "'distance' in its groups depends on"),
            (Mixes, "another update beside others"),
            (Named, r"state\['k'\]"),
        ):
            model = Stack()
            with pytest.raises(zero.UnsupportedOptimizerError, match=reason):
                zero.shard(
                    model, build(model.parameters(), lr=1e-8), zero.ZeroConfig(stage=stage, offload_optimizer=tier)
                )


def test_what_mixes_parameters_is_refused(two):
    two.run(refuse_what_mixes)


class OnSphere(nn.Parameter):
    """A parameter that its optimizer treats in a way of its own, as geoopt's."""


class Spherical(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"] if isinstance(p, OnSphere)):
            p.div_(p.norm())


def refuse_special(rank: int, world: int, stage: int) -> None:
    model = Stack()
    name, param = next(iter(model.named_parameters()))
    owner, _, key = name.rpartition(".")
    setattr(model.get_submodule(owner), key, OnSphere(param.detach()))
    with pytest.raises(zero.UnsupportedOptimizerError, match="Spherical.*rules of its own for a OnSphere"):
        zero.shard(model, Spherical(model.parameters()), zero.ZeroConfig(stage=stage))
    zero.shard(model, torch.optim.AdamW(model.parameters()), zero.ZeroConfig(stage=stage))  # torch's look at no class


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_with_rules_of_their_own_are_refused_by_name(two, stage):
    two.run(refuse_special, stage)


def refuse(rank: int, world: int) -> None:
    for build, word in (
        (lambda p: torch.optim.LBFGS(p), "LBFGS"),
        (lambda p: Mixes(p, lr=0.1), "Mixes"),
    ):
        model = Stack()
        opt = build(list(model.parameters()))
        for attempt in (lambda m=model, o=opt: zero.shard(m, o, zero.ZeroConfig(stage=2)),):
            with pytest.raises(zero.UnsupportedOptimizerError, match=f"{word}.*element-wise"):
                attempt()
        assert not any(p.isnan().any() for p in model.parameters())  # the model is as it was
        if word != "LBFGS":
            zero.shard(model, opt, zero.ZeroConfig(stage=0))  # whole tensors everywhere: allowed


def test_what_cannot_be_shared_out_is_refused_by_name(two):
    two.run(refuse)


def grow_groups(rank: int, world: int, stage: int) -> None:
    """A scheduler, and a part unfrozen with `add_param_group` half way; equal to the plain loop."""

    def run(sharded: bool):
        torch.manual_seed(0)
        model = Stack(tied=True)
        model.blocks[1].requires_grad_(False)
        opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        if sharded:
            zero.shard(model, opt, zero.ZeroConfig(stage=stage))
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
        for step in range(6):
            if step == 3:
                model.blocks[1].requires_grad_(True)
                opt.add_param_group({"params": list(model.blocks[1].parameters()), "lr": 5e-3})
                scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
            for r in [rank] if sharded else range(world):
                token_loss(model, r, step).backward()
            if not sharded:
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad /= world
            opt.step()
            scheduler.step()
            opt.zero_grad()
        return model.state_dict(), opt.state_dict()

    (plain, plain_state), (ours, our_state) = run(False), run(True)
    if rank == 0:
        assert all(torch.equal(plain[k], ours[k]) for k in plain)
        assert plain_state["param_groups"] == our_state["param_groups"]
        for index, entries in plain_state["state"].items():
            for key, value in entries.items():
                assert torch.equal(value, our_state["state"][index][key]), (index, key)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_schedulers_and_add_param_group(two, stage):
    two.run(grow_groups, stage)


def merge(engine, model, opt):
    first, second = opt.param_groups
    first["params"] = first["params"] + second["params"]
    del opt.param_groups[1]


def extend(engine, model, opt):
    opt.param_groups[0]["params"].extend(opt.param_groups.pop()["params"])


def swap(engine, model, opt):
    opt.param_groups.reverse()


def remove_first(engine, model, opt):
    del opt.param_groups[0]


def list_anew(engine, model, opt):
    opt.param_groups[0]["params"] = [p for p in model.parameters() if p.dim() > 1][::-1]


def move_one(engine, model, opt):
    first, second = opt.param_groups
    moved = next(iter(model.blocks[0].parameters()))
    first["params"] = [p for p in first["params"] if p is not moved]
    second["params"] = [p for p in second["params"] if p is not moved] + [moved]


def forget_states(engine, model, opt):
    for group in opt.param_groups:
        for p in group["params"]:
            if p in opt.state:
                del opt.state[p]


def empty_states(engine, model, opt):
    for group in opt.param_groups:
        for p in group["params"]:
            opt.state[p].clear()


def set_states(engine, model, opt):
    for group in opt.param_groups:
        for p in group["params"]:
            for key in [key for key in opt.state[p] if key != "step"]:
                opt.state[p][key] = torch.zeros_like(p)


def clip_in_a_hook(engine, model, opt):
    """One that is registered after the model was sharded."""

    def hook(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.clamp_(-1e-4, 1e-4)

    opt.register_step_pre_hook(hook)


def clear_what_is_away(engine, model, opt):
    token_loss(model, 0, 9).backward()
    if engine is not None:
        engine.offload_states(["gradients"])
        with pytest.raises(zero.StateError, match="reload_states"):
            engine.clip_grad_norm_(1.0)
    opt.zero_grad()
    if engine is not None:
        engine.reload_states()


def hook_states(engine, model, opt):
    seen = []
    opt.register_state_dict_pre_hook(lambda optimizer: seen.append("before"))
    opt.register_state_dict_post_hook(lambda optimizer, state: {**state, "more": 1})
    opt.register_load_state_dict_pre_hook(lambda optimizer, state: seen.append(state.pop("more")))
    opt.register_load_state_dict_post_hook(lambda optimizer: seen.append("after"))
    opt.load_state_dict(opt.state_dict())
    assert seen == ["before", 1, "after"]


ACTS = (
    merge, extend, swap, remove_first, list_anew, move_one, forget_states, empty_states, set_states, clip_in_a_hook,
    clear_what_is_away, hook_states,
)  # fmt: skip


def act_between_steps(rank: int, world: int, folder: str, act, options: dict) -> None:
    """What a program does to its optimizer after two steps; equal to the plain loop."""

    def run(sharded: bool):
        torch.manual_seed(0)
        model = Stack(tied=True)
        groups = [[p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (True, False)]
        opt = torch.optim.AdamW(
            [{"params": groups[0]}, {"params": groups[1], "lr": 3e-2, "weight_decay": 0.0}], lr=1e-2, eps=1e-4
        )
        engine = zero.shard(model, opt, zero.ZeroConfig(offload_dir=folder, **options)) if sharded else None
        for step in range(4):
            if step == 2:
                act(engine, model, opt)
            for r in [rank] if sharded else range(world):
                token_loss(model, r, step).backward()
            if not sharded:
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad /= world
            opt.step()
            opt.zero_grad()
            model.zero_grad()
        state = opt.state_dict() if act is not remove_first or sharded else {"state": {}, "param_groups": []}
        return model.state_dict(), state

    (plain, plain_state), (ours, our_state) = run(False), run(True)
    if rank == 0:
        for key in plain:
            torch.testing.assert_close(ours[key], plain[key])
        if act is not remove_first:  # of a group that has gone torch's own method cannot give the state
            assert plain_state["param_groups"] == our_state["param_groups"]
            assert set(plain_state["state"]) == set(our_state["state"])
        for index, entries in plain_state["state"].items():
            for key, value in entries.items():
                torch.testing.assert_close(value, our_state["state"][index][key])


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_what_a_program_does_to_its_optimizer(two, tmp_path, act):
    places = [
        {"stage": 1},
        {"stage": 3},
        {"stage": 2, "offload_optimizer": "cpu"},
        {"stage": 3, "offload_optimizer": "disk", "offload_params": "disk"},
    ]
    for options in places:
        two.run(act_between_steps, str(tmp_path), act, options)


def clip(rank: int, world: int, stage: int) -> None:
    plain, model = twins(Stack)
    for r in range(world):
        token_loss(plain, r, 0).backward()
    for p in plain.parameters():
        p.grad /= world
    engine = zero.shard(model, sgd(list(model.parameters())), zero.ZeroConfig(stage=stage))
    token_loss(model, rank, 0).backward()
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        grads = [p.grad for p in plain.parameters()]
        expected = torch.nn.utils.get_total_norm(grads, norm_type)
        torch.testing.assert_close(engine.clip_grad_norm_(float("inf"), norm_type), expected)  # measures only
    some = list(plain.blocks[1].parameters())
    expected = torch.nn.utils.clip_grad_norm_(some, 0.01)
    got = engine.clip_grad_norm_(0.01, parameters=model.blocks[1].parameters())
    torch.testing.assert_close(got, expected)
    torch.nn.utils.clip_grad_value_(plain.parameters(), 1e-3)
    engine.clip_grad_value_(1e-3)
    total = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    torch.testing.assert_close(engine.clip_grad_norm_(1e-4, parameters=model.parameters()), total)
    torch.testing.assert_close(engine.clip_grad_norm_(float("inf")), torch.tensor(1e-4), rtol=1e-3, atol=0.0)
    with pytest.raises(zero.LayoutError, match="not of the sharded model"):
        engine.clip_grad_norm_(1.0, parameters=[nn.Parameter(torch.zeros(3))])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clipping(two, stage):
    two.run(clip, stage)


def test_norm_is_right_at_length():
    """torch's own float32 norm on CPU is off by 4e-3 here."""
    x = torch.randn(20_000_000, generator=torch.Generator().manual_seed(0))
    exact = x.double().square().sum()
    assert abs(square_sum([x]) / exact - 1).item() < 1e-7
    # What other devices do, here at a length that a CPU adds up well.
    parts = [*x[:100_000].split(4096), x[:64].bfloat16()]
    exact = sum(part.double().square().sum() for part in parts)
    assert abs(tree_square_sum(parts) / exact - 1).item() < 1e-6


def overflow(rank: int, world: int, stage: int) -> list[float]:
    """fp16: an overflow on one rank skips the step on all; the scale follows torch's rule on all."""
    torch.manual_seed(0)
    model = gpt2()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = zero.shard(model, opt, zero.ZeroConfig(stage=stage), mixed_precision="fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    scales = []
    for step, bad in enumerate([(), (), (1,), (), (0, 1), (0,), (), ()]):
        before = opt.param_groups[0]["params"][0].detach().clone()
        loss = loss_of(model, rank, step)
        scaler.scale(loss * (float("inf") if rank in bad else 1.0)).backward()
        if step % 2:
            scaler.unscale_(opt)
            engine.clip_grad_norm_(1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        assert torch.equal(before, opt.param_groups[0]["params"][0]) == bool(bad), (step, bad)
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_overflow_is_agreed(two, stage):
    first, second = two.run(overflow, stage)
    assert first == second == [256.0, 512.0, 256.0, 256.0, 128.0, 64.0, 64.0, 128.0]


def plain_autocast_float16(rank: int, world: int) -> float:
    """A user's own autocast and scaler around an engine that was told nothing of it."""
    torch.manual_seed(0)
    model = Stack()
    opt = sgd(list(model.parameters()))
    zero.shard(model, opt, zero.ZeroConfig(stage=2))
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = token_loss(model, rank, 0)
    scaler.scale(loss * (float("inf") if rank else 1.0)).backward()
    scaler.step(opt)
    scaler.update()
    return scaler.get_scale()


def test_overflow_under_the_users_own_autocast(two):
    assert two.run(plain_autocast_float16) == [8.0, 8.0]


def full_state(rank: int, world: int, stage: int) -> None:
    """optimizer.state_dict() is the plain optimizer's, and loads into it and back."""
    torch.manual_seed(0)
    model = Stack(tied=True)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero.shard(model, opt, zero.ZeroConfig(stage=stage))
    for step in range(2):
        token_loss(model, rank, step).backward()
        opt.step()
        opt.zero_grad()
    state, weights = opt.state_dict(), model.state_dict()
    if rank == 0:
        plain = Stack(tied=True)
        plain.load_state_dict(weights)
        plain_opt = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        plain_opt.load_state_dict(state)
        assert {k: list(v) for k, v in plain_opt.state_dict()["state"].items()} == {
            k: list(v) for k, v in state["state"].items()
        }
    else:
        assert all(t.is_meta for t in weights.values())
    box = [state]
    torch.distributed.broadcast_object_list(box)
    opt.load_state_dict(box[0])
    again = opt.state_dict()
    if rank == 0:
        for index, entries in state["state"].items():
            for key, value in entries.items():
                assert torch.equal(value, again["state"][index][key])
    wrong = {**box[0], "param_groups": [{**box[0]["param_groups"][0], "params": [0, 1]}]}
    with pytest.raises(zero.CheckpointError, match="groups of"):
        opt.load_state_dict(wrong)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_full_optimizer_state(two, stage):
    two.run(full_state, stage)


def write_state(rank: int, world: int, folder: str, stage: int) -> dict:
    torch.manual_seed(0)
    model = Stack(tied=True)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() < 2]},
    ]
    opt = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95))
    engine = zero.shard(model, opt, zero.ZeroConfig(stage=stage))
    for step in range(3):
        token_loss(model, rank % 2, step).backward()
        opt.step()
        opt.zero_grad()
    engine.save(folder)
    return opt.state_dict()


def read_state(rank: int, world: int, folder: str, stage: int) -> dict:
    torch.manual_seed(1)
    model = Stack(tied=True)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() < 2]},
    ]
    opt = torch.optim.AdamW(groups, lr=1e-3)
    engine = zero.shard(model, opt, zero.ZeroConfig(stage=stage))
    engine.load(folder)
    return opt.state_dict()


@pytest.mark.parametrize(
    ("writers", "readers", "stages"), [(2, 3, (3, 1)), (4, 1, (1, 2)), (1, 4, (2, 3)), (3, 2, (2, 0))]
)
def test_optimizer_state_at_another_world_size(pools, tmp_path, writers, readers, stages):
    saved = pools[writers].run(write_state, str(tmp_path), stages[0])[0]
    loaded = pools[readers].run(read_state, str(tmp_path), stages[1])[0]
    assert saved["param_groups"] == loaded["param_groups"]
    for index, entries in saved["state"].items():
        for key, value in entries.items():
            assert torch.equal(value, loaded["state"][index][key])


def lose(rank: int, world: int, folder: str) -> str:
    try:
        read_state(rank, world, folder, 2)
    except zero.CheckpointError as error:
        return str(error)
    return "loaded"


def test_missing_or_short_files_are_named_on_every_rank(pools, tmp_path):
    pools[3].run(write_state, str(tmp_path), 2)
    victim = tmp_path / "optimizer" / "exp_avg.safetensors"
    data = victim.read_bytes()
    for damage in (lambda: victim.unlink(), lambda: victim.write_bytes(data[: len(data) // 2])):
        damage()
        assert all(victim.name in answer for answer in pools[2].run(lose, str(tmp_path)))
    victim.write_bytes(data)
    (tmp_path / "optimizer" / "optimizer.json").unlink()
    assert all("optimizer.json" in answer for answer in pools[2].run(lose, str(tmp_path)))
