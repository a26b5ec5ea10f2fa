"""`param.grad` after a backward: read, clipped, edited, cleared and replaced as in a plain loop."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.plan.plan import plan
from hf_zero.runtime.transports import Roads
from tests.kit.common import autocast, split_plan

pytestmark = pytest.mark.gloo

TIERS: list[dict[str, Any]] = [{}, {"offload_optimizer": "cpu"}, {"offload_optimizer": "disk"}]
clip = torch.nn.utils.clip_grad_norm_


class Net(nn.Module):
    """Odd sizes, so that ranks own parts of parameters; a 0-dim parameter; a part that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 33)
        self.norm = nn.LayerNorm(33)
        self.last = nn.Linear(33, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x))) * self.scale


class Pair:
    """A sharded model, and a plain one that gets the mean of all ranks' gradients."""

    def __init__(
        self, rank: int, world: int, dtype: str, folder: Path, roads: Roads | None = None, **options: Any
    ) -> None:
        self.rank, self.world, self.dtype = rank, world, dtype
        self.model, self.plain = Net(), Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.plain_optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.01)
        config = zero.ZeroConfig(offload_dir=str(folder), **options)
        self.engine = zero.shard(self.model, self.optimizer, config, mixed_precision=dtype, roads=roads)
        self.tolerance = 3e-2 if dtype == "bf16" else 2e-5
        self.calls = 0

    def inputs(self) -> list[Tensor]:
        self.calls += 1
        return [
            torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * self.calls + r)) for r in range(self.world)
        ]

    def backward(self, between: Callable[[nn.Module], None] | None = None) -> None:
        inputs = self.inputs()
        loss = self.model(inputs[self.rank]).square().mean()
        if between is not None:
            between(self.model)
        loss.backward()
        with autocast(self.dtype):
            total = sum(self.plain(x).square().mean() for x in inputs) / self.world
        if between is not None:
            between(self.plain)
        total.backward()

    def both(self, change: Callable[[nn.Module], Any]) -> tuple[Any, Any]:
        return change(self.model), change(self.plain)

    def step(self) -> None:
        for optimizer in (self.optimizer, self.plain_optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def differing(self, what: str = "values") -> list[str]:
        out = []
        for (name, p), q in zip(self.model.named_parameters(), self.plain.parameters()):
            mine, theirs = (zero.full_parameter(p), q) if what == "values" else (p.grad, q.grad)
            if mine is None or theirs is None:
                if (mine is None) != (theirs is None):
                    out.append(f"{name}: {mine is None} against {theirs is None}")
                continue
            mine = mine.clone()
            if (mine - theirs).abs().max() > self.tolerance * (1 + theirs.abs().max()):
                out.append(f"{what} of {name}: off by {(mine - theirs).abs().max()} of {theirs.abs().max()}")
        return out


def places(stage: int) -> list[tuple[str, dict[str, Any]]]:
    """Precisions and tiers: both in memory; of the two tiers below, where gradients rest alike, one each, by the stage."""
    below = zip(("no", "bf16") if stage % 2 else ("bf16", "no"), TIERS[1:] if stage else [])
    return [("no", TIERS[0]), ("bf16", TIERS[0]), *below]


def everywhere(rank: int, world: int, folder: Path, stage: int, play: Callable[[Pair], None]) -> None:
    """In the precisions and tiers of a stage, in one call."""
    for dtype, tier in places(stage):
        pair = Pair(rank, world, dtype, folder, stage=stage, **tier)
        try:
            play(pair)
        except Exception as error:
            raise AssertionError(f"{dtype}, {tier}: {error}") from error
        pair.engine.detach()


SLOW = pytest.mark.slow  # goes the ways of stage 2
WORLDS = [(1, 2), (2, 0), pytest.param(2, 1, marks=SLOW), (2, 2), (2, 3), (3, 2)]


def norms_and_edits(pair: Pair) -> None:
    for step in range(3):
        pair.backward()
        assert not (wrong := pair.differing("grad")), wrong
        for foreach, order in itertools.product(
            (None, True, False), (2.0, 1.0, 3.0, float("inf")) if step == 0 else (2,)
        ):
            mine, plain = pair.both(
                lambda m, order=order, foreach=foreach: torch.nn.utils.get_total_norm(
                    [p.grad for p in m.parameters()], order, foreach=foreach
                )
            )
            assert abs(mine - plain) <= pair.tolerance * plain, (foreach, order, mine, plain)
            torch.testing.assert_close(mine, pair.engine.clip_grad_norm_(float("inf"), order))
            assert len({float(norm) for norm in pair.engine.exchange(mine)}) == 1
        pair.both(
            lambda m, step=step: clip(m.parameters(), 1.0, foreach=[None, True, False][step], error_if_nonfinite=True)
        )
        assert abs(pair.engine.clip_grad_norm_(float("inf")) - 1.0) < 1e-4
        if step == 1:
            pair.both(lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 0.05))
            pair.both(lambda m: clip(m.last.parameters(), 0.01))
        pair.both(loops)
        assert not (wrong := pair.differing("grad")), wrong
        pair.step()
        assert all(p.grad is None for p in pair.model.parameters())
    assert not (wrong := pair.differing()), wrong


@torch.no_grad()
def loops(model: nn.Module) -> None:
    """What plain loops do with gradients."""
    for number, param in enumerate(model.parameters()):
        grad = param.grad
        assert grad is not None
        assert grad.shape == param.shape
        assert bool(grad.isfinite().all())
        assert grad.abs().max() <= grad.norm(float("inf")) + 1e-6
        torch.testing.assert_close((grad**2).sum().sqrt(), grad.detach().norm(), rtol=1e-4, atol=1e-6)
        grad.mul_(0.5)
        grad.data.add_(torch.full(grad.shape, 0.01 * number))
        grad.data = grad.data * 1.25
        if grad.dim():
            grad[0] = 0
            grad.view(-1)[-1:].mul_(3)
        grad.mul_((grad > -1e9).float()).mul_((torch.arange(grad.numel()) % 3 > 0).float().view(grad.shape))
        grad.copy_(grad.clone() * 1.5)
        assert len(grad.flatten().tolist()) == param.numel()
    weights = [p.grad for p in model.parameters()]
    torch._foreach_mul_(weights, [0.5 + i for i in range(len(weights))])
    torch._foreach_add_(weights, torch._foreach_neg(weights), alpha=0.25)


@pytest.mark.parametrize(("world", "stage"), WORLDS)
def test_norms_clipping_and_loops_equal_plain(pools, tmp_path, world, stage):
    pools[world].run(everywhere, tmp_path, stage, norms_and_edits, timeout_s=100)


def clear_all(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


def clear_some(model: nn.Module) -> None:
    model.first.weight.grad = None
    model.scale.grad = None
    model.last.zero_grad()


def clearing(pair: Pair) -> None:
    """Gradients of a first backward are cleared before the next forward, between it and its backward, or before the step."""
    for clear in (clear_all, clear_some, lambda m: m.zero_grad(set_to_none=False)):
        pair.backward()
        pair.both(clear)
        pair.backward()
        assert not (wrong := pair.differing("grad")), wrong
        pair.step()
        pair.backward()
        pair.backward(between=clear)
        assert not (wrong := pair.differing("grad")), wrong
        pair.step()
        assert not (wrong := pair.differing()), wrong
    pair.backward()
    pair.both(clear_all)
    pair.optimizer.step()  # nothing to do
    pair.plain_optimizer.step()
    assert not (wrong := pair.differing()), wrong
    pair.backward()
    pair.both(clear_some)
    mine, plain = pair.both(lambda m: clip(m.parameters(), 0.2))
    assert abs(mine - plain) <= pair.tolerance * plain
    assert abs(pair.engine.clip_grad_norm_(float("inf")) - 0.2) < 1e-4  # the cleared ones are no part of it
    pair.backward()
    pair.step()
    assert not (wrong := pair.differing()), wrong


@pytest.mark.parametrize(("world", "stage"), WORLDS)
def test_cleared_gradients_are_gone(pools, tmp_path, world, stage):
    pools[world].run(everywhere, tmp_path, stage, clearing, timeout_s=100)


def assign(model: nn.Module) -> None:
    for number, param in enumerate(model.parameters()):
        if number != 1:
            values = torch.linspace(-1, 1, param.numel()).view(param.shape)
            param.grad = values.to(param.dtype)


def replacing(pair: Pair) -> None:
    pair.backward()
    pair.both(assign)
    mine, plain = pair.both(lambda m: clip(m.parameters(), 0.5))
    assert abs(mine - plain) <= pair.tolerance * plain
    pair.step()
    pair.both(assign)  # of no backward at all
    for optimizer in (pair.optimizer, pair.plain_optimizer):
        optimizer.step()
    pair.both(clear_all)
    pair.backward()
    pair.both(assign)
    pair.backward()  # adds to what was assigned
    assert not (wrong := pair.differing("grad")), wrong
    pair.both(lambda m: setattr(m.first.weight, "grad", (m.first.weight.grad * 0.5).to(m.first.weight.dtype)))
    pair.both(lambda m: setattr(m.scale, "grad", m.scale.grad.detach()))
    pair.step()
    assert not (wrong := pair.differing()), wrong


@pytest.mark.parametrize(("world", "stage"), WORLDS)
def test_assigned_gradients_count(pools, tmp_path, world, stage):
    pools[world].run(everywhere, tmp_path, stage, replacing, timeout_s=100)


def accumulating(pair: Pair, defer: bool = False) -> None:
    """Several backwards, some inside no_sync; stand-ins are added to, also with a graph."""
    for _ in range(2):
        pair.backward()
        with pair.engine.no_sync(defer=defer):
            pair.backward()
        pair.backward()
        pair.both(lambda m: clip(m.parameters(), 1.0))
        pair.step()
    with pair.engine.no_sync(defer=defer):
        pair.backward()
    if defer:  # what has not travelled is the rank's own; asked for whole gradients, all ranks reduce
        pair.engine.clip_grad_norm_(float("inf"))
    mine = [p.grad for p in pair.model.parameters()]
    assert all(grad is not None for grad in mine)
    pair.both(lambda m: [p.grad.mul_(0.5) for p in m.parameters()])
    pair.backward()
    assert not (wrong := pair.differing("grad")), wrong
    inputs = pair.inputs()
    pair.model(inputs[pair.rank]).sum().backward(create_graph=pair.engine.config.stage < 3)
    with autocast(pair.dtype):
        (sum(pair.plain(x).sum() for x in inputs) / pair.world).backward()
    pair.both(lambda m: clip(list(m.parameters()), 1.0))
    pair.step()
    assert not (wrong := pair.differing()), wrong


@pytest.mark.parametrize(("world", "stage"), WORLDS)
def test_backwards_add_up(pools, tmp_path, world, stage):
    pools[world].run(everywhere, tmp_path, stage, accumulating, timeout_s=100)


@pytest.mark.parametrize(("world", "stage"), [(2, 2), (2, 3), (3, 3)])
def test_deferred_backwards_add_up(pools, tmp_path, world, stage):
    """Beside others that travel at once, in one step."""
    pools[world].run(everywhere, tmp_path, stage, partial(accumulating, defer=True), timeout_s=100)


def local_inside_no_sync(rank: int, world: int, dtype: str, folder: Path, stage: int) -> None:
    """As under DDP: gradients that have not travelled are this rank's own."""
    pair = Pair(rank, world, dtype, folder, stage=stage)
    inputs = pair.inputs()
    with pair.engine.no_sync(defer=True):
        pair.model(inputs[rank]).square().sum().backward()
    with autocast(dtype):
        pair.plain(inputs[rank]).square().sum().backward()
    assert not (wrong := pair.differing("grad")), wrong
    mine, plain = pair.both(lambda m: clip(m.parameters(), 1.0))
    assert abs(mine - plain) <= pair.tolerance * plain
    assert not (wrong := pair.differing("grad")), wrong
    pair.engine.detach()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["no", "bf16"])
def test_gradients_in_no_sync_are_the_ranks_own(two, tmp_path, dtype, stage):
    two.run(local_inside_no_sync, dtype, tmp_path, stage, timeout_s=60)


def refusals(rank: int, world: int, folder: Path) -> list[str]:
    pair = Pair(rank, world, "no", folder, stage=2)
    said = []

    def say(use: Callable[[], Any]) -> None:
        with contextlib.suppress(RuntimeError):
            use()
            said.append("nothing")
        try:
            use()
        except zero.StateError as error:
            said.append(str(error))

    pair.backward()
    kept = pair.model.last.weight.grad
    assert "Gradient(shape=(3, 33)" in repr(kept)
    pair.step()
    pair.backward()
    say(lambda: kept.norm())  # of the step before
    copied = pair.model.last.weight.grad.numpy()
    assert copied.shape == (3, 33)
    say(lambda: torch.mul(kept, 2, out=torch.empty(3, 33)))
    pair.engine.detach()
    early = Pair(rank, world, "no", folder, stage=2, offload_optimizer="cpu", step_in_backward=True)
    early.model(early.inputs()[rank]).sum().backward()
    say(lambda: clip(early.model.parameters(), 1.0))
    early.optimizer.step()
    early.optimizer.zero_grad()
    early.engine.detach()
    return said


def test_what_cannot_be_had_is_refused_by_name(two, tmp_path):
    for said in two.run(refusals, tmp_path, timeout_s=60):
        kept, out, early = said
        assert "'last.weight'" in kept
        assert "cleared since" in kept
        assert "cleared since" in out or "out=" in out
        assert "step_in_backward" in early


def scaled(rank: int, world: int, folder: Path) -> None:
    """A stock loss scaler works on the optimizer's groups; norms asked for before and after it differ by its scale."""
    pair = Pair(rank, world, "fp16", folder, stage=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    scaler.scale(pair.model(pair.inputs()[rank]).square().mean()).backward()
    first = [p.grad.norm() for p in pair.model.first.parameters()]
    scaler.unscale_(pair.optimizer)
    after = [p.grad.norm() for p in pair.model.parameters()]
    torch.testing.assert_close(torch.stack(first) / 2**8, torch.stack(after[1:3]), rtol=1e-4, atol=1e-7)
    norm = clip(pair.model.parameters(), 1e-3)
    torch.testing.assert_close(norm, torch.stack(after).norm())
    scaler.step(pair.optimizer)
    scaler.update()
    pair.engine.detach()


def test_a_stock_loss_scaler(two, tmp_path):
    two.run(scaled, tmp_path, timeout_s=60)


def hand_made_step(rank: int, world: int, stage: int, folder: Path) -> None:
    """A loop that updates parameters itself, where they are whole."""
    pair = Pair(rank, world, "no", folder, stage=stage)
    for _ in range(3):
        pair.backward()
        for model in (pair.model, pair.plain):
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(param.grad, alpha=-0.01)
        pair.both(clear_all)
    assert not (wrong := pair.differing()), wrong
    pair.engine.detach()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_step_by_hand(two, tmp_path, stage):
    two.run(hand_made_step, stage, tmp_path, timeout_s=60)


# The optimizer's groups -----------------------------------------------------------------------------------------------


def of_groups(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def by_hand(optimizer: torch.optim.Optimizer, order: float = 2.0) -> Tensor:
    """As loops of old, and optimizers like SAM, have it."""
    return torch.stack([p.grad.detach().data.norm(order) for p in of_groups(optimizer)]).norm(order)


def sharpness(optimizer: torch.optim.Optimizer) -> Tensor:
    return torch.stack([(1.0 * p.grad).norm(p=2) for p in of_groups(optimizer)]).norm(p=2)


def groups_clipped(pair: Pair) -> None:
    optimizers = (pair.optimizer, pair.plain_optimizer)
    for step in range(4):
        pair.backward()
        for order in (2.0, 1.0, 3.0, float("inf")):
            mine, plain = (by_hand(optimizer, order) for optimizer in optimizers)
            assert abs(mine - plain) <= pair.tolerance * plain, (order, mine, plain)
            torch.testing.assert_close(mine, pair.engine.clip_grad_norm_(float("inf"), order))
            listed = torch.nn.utils.get_total_norm([p.grad for p in of_groups(pair.optimizer)], order, foreach=True)
            torch.testing.assert_close(mine, listed)
            assert len({float(norm) for norm in pair.engine.exchange(listed)}) == 1
        mine, plain = map(sharpness, optimizers)
        assert abs(mine - plain) <= pair.tolerance * plain, (mine, plain)
        before = pair.engine.traffic["scalar"].calls
        for optimizer in optimizers:
            clip(of_groups(optimizer), 0.05, foreach=[None, True, False, None][step])
        assert pair.engine.traffic["scalar"].calls - before == (pair.engine.layout.shards > 1)
        assert abs(by_hand(pair.optimizer) - 0.05) < 1e-4
        pair.engine.clip_grad_norm_(0.02)
        clip(pair.plain.parameters(), 0.02)
        assert abs(by_hand(pair.optimizer) - 0.02) < 1e-4
        if step == 1:
            for optimizer in optimizers:
                torch.nn.utils.clip_grad_value_(of_groups(optimizer), 2e-3)
        if step == 2:  # gradients that are kept: a second backward adds to them
            pair.backward()
        if step == 3:
            for optimizer in optimizers:
                torch._foreach_mul_([p.grad for p in of_groups(optimizer)], 0.5)
                for p in of_groups(optimizer):
                    p.grad.add_(p.grad.clone(), alpha=0.25)
                    assert p.grad.numpy().shape == p.shape
                    assert float(p.grad.sum()) == pytest.approx(sum(p.grad.reshape(-1).tolist()), abs=1e-4)
        assert not (wrong := pair.differing("grad")), wrong
        pair.step()
        assert all(p.grad is None for p in of_groups(pair.optimizer))
    assert not (wrong := pair.differing()), wrong


def groups_everywhere(rank: int, world: int, folder: Path, stage: int) -> None:
    everywhere(rank, world, folder, stage, groups_clipped)
    if stage:  # ranks' spans are cut into several shards
        for dtype in ("no", "bf16"):
            pair = Pair(rank, world, dtype, folder, Roads(plan=split_plan), stage=stage, offload_optimizer="cpu")
            assert any(len(flat.shards) > 1 for unit in pair.engine.units for flat in unit.trained)
            groups_clipped(pair)
            pair.engine.detach()


@pytest.mark.parametrize(("world", "stage"), [(2, 0), (2, 1), (2, 2), (2, 3), pytest.param(3, 2, marks=SLOW)])
def test_clipping_of_the_groups_equals_plain(pools, tmp_path, world, stage):
    pools[world].run(groups_everywhere, tmp_path, stage, timeout_s=100)


@torch.no_grad()
def scale_data(param: nn.Parameter) -> None:
    param.grad.data = param.grad.data * 0.25


@torch.no_grad()
def clamp_a_copy(param: nn.Parameter) -> None:
    param.grad = param.grad.clone().clamp_(-0.01, 0.01)


def clear(param: nn.Parameter) -> None:
    param.grad = None


def groups_replaced(pair: Pair) -> None:
    """Gradients that are assigned to the optimizer's parameters, or cleared there, before a step or another backward."""
    optimizers = (pair.optimizer, pair.plain_optimizer)
    for change in (scale_data, clamp_a_copy, clear):
        for again in (False, True):
            pair.backward()
            for optimizer in optimizers:
                for param in of_groups(optimizer):
                    change(param)
            if change is not clear:
                assert not (wrong := pair.differing("grad")), (change, wrong)
                torch.testing.assert_close(*map(by_hand, optimizers), rtol=pair.tolerance, atol=pair.tolerance)
            if again:
                pair.backward()
            pair.step()
            assert not (wrong := pair.differing()), (change, again, wrong)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_assigned_gradients_of_the_groups_count(two, tmp_path, stage):
    two.run(everywhere, tmp_path, stage, groups_replaced, timeout_s=100)


class Watched(torch.optim.SGD):
    """What its step is given is plain; it may fail."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert all(type(p.grad) is Tensor for p in of_groups(self) if p.grad is not None)
        if self.fails:
            raise ValueError("this step fails")
        super().step()
        return loss


def groups_of_a_watched(rank: int, world: int, stage: int, offload: str, folder: Path) -> list[str]:
    pair = Pair(rank, world, "no", folder, stage=stage, offload_optimizer=offload)
    pair.engine.detach()
    model, plain = Net(), Net()
    optimizer = Watched(model.parameters(), lr=0.01)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=stage, offload_optimizer=offload))
    pair.model, pair.engine, pair.optimizer = model, engine, optimizer
    pair.plain, pair.plain_optimizer = plain, torch.optim.SGD(plain.parameters(), lr=0.01)
    for step in range(3):

        def closure() -> float:
            optimizer.zero_grad()
            pair.plain_optimizer.zero_grad()
            pair.backward()
            for each in (optimizer, pair.plain_optimizer):
                clip(of_groups(each), 0.05)
            return 1.0

        if step == 1:
            assert optimizer.step(closure) == 1.0
            pair.plain_optimizer.step()
        else:
            closure()
            if step == 2:
                optimizer.fails = True
                with pytest.raises(ValueError, match="this step fails"):
                    optimizer.step()
                optimizer.fails = False
            optimizer.step()
            pair.plain_optimizer.step()
            # Gradients are there until they are cleared.
            torch.testing.assert_close(by_hand(optimizer), by_hand(pair.plain_optimizer), rtol=1e-4, atol=1e-6)
    assert not (wrong := pair.differing()), wrong
    shown = [p.grad for p in of_groups(optimizer)]
    assert "norms are those over all ranks" in repr(shown[0])
    kept = shown[0]
    del shown
    optimizer.zero_grad()
    said = []
    for use in (kept.norm, kept.sum):
        with pytest.raises(zero.StateError) as error:
            use()
        said.append(str(error.value))
    pair.backward()
    assert of_groups(optimizer)[0].grad is not kept
    first = id(of_groups(optimizer)[0].grad)
    pair.step()
    pair.backward()
    assert id(of_groups(optimizer)[0].grad) == first  # nobody kept it: the same object as in the step before
    with engine.no_sync():
        pair.backward()
    clip(of_groups(optimizer), 1.0)
    engine.detach()
    return said


@pytest.mark.parametrize(("stage", "offload"), [(1, "none"), (2, "none"), (3, "cpu")])
def test_the_optimizer_sees_plain_gradients(two, tmp_path, stage, offload):
    for said in two.run(groups_of_a_watched, stage, offload, tmp_path, timeout_s=60):
        assert all("cleared since" in each for each in said)


def groups_of_a_scaler(rank: int, world: int, offload: str, folder: Path) -> None:
    """A stock loss scaler, and clipping of what it unscaled."""
    pair = Pair(rank, world, "fp16", folder, stage=2, offload_optimizer=offload)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for _ in range(2):
        scaler.scale(pair.model(pair.inputs()[rank]).square().mean()).backward()
        scaled = by_hand(pair.optimizer)
        scaler.unscale_(pair.optimizer)
        norm = clip(of_groups(pair.optimizer), 1e-3)
        torch.testing.assert_close(norm, scaled / 2**8, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(pair.engine.clip_grad_norm_(float("inf")), torch.tensor(1e-3), rtol=1e-3, atol=1e-7)
        scaler.step(pair.optimizer)
        scaler.update()
        pair.optimizer.zero_grad()
    pair.engine.detach()


@pytest.mark.parametrize("offload", ["none", "cpu", "disk"])
def test_a_stock_loss_scaler_and_clipped_groups(two, tmp_path, offload):
    two.run(groups_of_a_scaler, offload, tmp_path, timeout_s=60)


def groups_refused(rank: int, world: int, folder: Path) -> str:
    pair = Pair(rank, world, "no", folder, stage=2, step_in_backward=True)
    pair.backward()
    with pytest.raises(zero.StateError) as error:
        clip(of_groups(pair.optimizer), 1.0)
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    pair.engine.detach()
    return str(error.value)


def test_clipping_of_groups_that_are_updated_already_is_refused(two, tmp_path):
    assert all("step_in_backward" in said for said in two.run(groups_refused, tmp_path, timeout_s=60))


def groups_unlike(rank: int, world: int, folder: Path) -> None:
    """Ranks whose spans rest in other tiers, and are cut at other places, as `auto` may leave them."""
    roads = Roads(plan=split_plan if rank else plan)
    pair = Pair(rank, world, "no", folder, roads, stage=2, offload_optimizer="cpu")
    pair.engine.offload.storage.uses_disk = True  # as under `auto`, on every rank
    for _ in range(2):
        pair.backward()
        for foreach in (True, False):
            norms = torch.nn.utils.get_total_norm([p.grad for p in of_groups(pair.optimizer)], foreach=foreach)
            torch.testing.assert_close(norms, pair.engine.clip_grad_norm_(float("inf")))
        for optimizer in (pair.optimizer, pair.plain_optimizer):
            clip(of_groups(optimizer), 0.05)
        pair.step()
    assert not (wrong := pair.differing()), wrong
    pair.engine.detach()


def test_ranks_may_cut_their_slices_otherwise(two, tmp_path):
    two.run(groups_unlike, tmp_path, timeout_s=60)
