"""Parameters that are frozen and unfrozen between steps: equal to the same model trained whole, state and checkpoints too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.runtime.test_models import Stack, token_loss

pytestmark = pytest.mark.gloo
STEPS = 9


def frozen_first() -> nn.Module:
    """One block and a part of another are frozen at the start; the optimizer has them."""
    torch.manual_seed(0)
    model = Stack()
    model.blocks[2].requires_grad_(False)
    model.blocks[1].up.weight.requires_grad_(False)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1]},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


def change(model: nn.Module, step: int) -> None:
    """What a callback does before this step."""
    match step:
        case 1:
            model.blocks[0].requires_grad_(False)  # a whole unit, in the middle
            model.head.weight.requires_grad_(False)  # all of another
        case 2:
            model.blocks[1].down.weight.requires_grad_(False)  # a part of one
            model.blocks[2].requires_grad_(True)  # frozen since the start
        case 3:
            model.embed.weight.requires_grad_(False)  # nothing before the blocks has a graph any more
            model.head.weight.requires_grad_(True)
        case 5:
            model.blocks[0].requires_grad_(True)  # the graph begins in it
            model.blocks[1].up.weight.requires_grad_(True)
        case 6:
            model.requires_grad_(True)
        case 7:
            model.requires_grad_(False)
            model.blocks[0].norm.requires_grad_(True)


def whole(model: nn.Module, opt: torch.optim.Optimizer, world: int, micros: int, first: int, last: int) -> list[Tensor]:
    """All ranks in one process."""
    norms = []
    for step in range(first, last):
        change(model, step)
        for micro in range(micros):
            for rank in range(world):
                (token_loss(model, rank, 10 * step + micro) / (world * micros)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        opt.step()
        opt.zero_grad()
    return norms


def sharded(
    model: nn.Module, opt: torch.optim.Optimizer, engine: zero.Engine, rank: int, micros: int, first: int, last: int
) -> list[Tensor]:
    norms = []
    for step in range(first, last):
        change(model, step)
        for micro in range(micros):
            with contextlib.nullcontext() if micro == micros - 1 else engine.no_sync():
                (token_loss(model, rank, 10 * step + micro) / micros).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        opt.step()
        opt.zero_grad()
    return norms


def assert_equal(
    rank: int, model: nn.Module, opt: torch.optim.Optimizer, plain: nn.Module, other: torch.optim.Optimizer
) -> None:
    weights, state = model.state_dict(), opt.state_dict()["state"]
    if rank:
        return
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(
            weights[name], value, rtol=0, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    expected = other.state_dict()["state"]
    assert sorted(state) == sorted(expected)
    for index, entries in expected.items():
        for key, value in entries.items():
            torch.testing.assert_close(state[index][key], value, rtol=1e-5, atol=2e-6, msg=f"{key} of {index}")


def trains(rank: int, world: int, stage: int, micros: int, offload: str) -> None:
    plain = frozen_first()
    other = adamw(plain)
    expected = whole(plain, other, world, micros, 0, STEPS)
    model = frozen_first()
    opt = adamw(model)
    config = zero.ZeroConfig(stage=stage, offload_optimizer=offload, offload_params=offload if stage == 3 else "none")
    engine = zero.shard(model, opt, config)
    found = sharded(model, opt, engine, rank, micros, 0, STEPS)
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-5, atol=1e-6)
    assert_equal(rank, model, opt, plain, other)


@pytest.mark.parametrize(
    ("stage", "micros", "offload"), [(0, 1, "none"), (1, 2, "none"), (2, 1, "none"), (3, 2, "none"), (3, 1, "cpu")]
)
def test_frozen_and_unfrozen_in_mid_training(two, stage: int, micros: int, offload: str) -> None:
    two.run(trains, stage, micros, offload)


def test_frozen_and_unfrozen_on_one_rank(pools) -> None:
    pools[1].run(trains, 2, 2, "none")


def resumes(rank: int, world: int, stage: int, at: int, same_flags: bool, folder: str) -> None:
    """Saved before step `at`, loaded into a fresh engine: one that has frozen what was frozen then, or one as it was at first,
    whose callback comes to the changes again after the load."""
    plain = frozen_first()
    other = adamw(plain)
    whole(plain, other, world, 1, 0, STEPS)
    model = frozen_first()
    opt = adamw(model)
    engine = zero.shard(model, opt, zero.ZeroConfig(stage=stage))
    sharded(model, opt, engine, rank, 1, 0, at)
    engine.save(folder)
    zero.verify(folder)
    again = frozen_first()
    if same_flags:
        for step in range(at):
            change(again, step)
    opt = adamw(again)
    engine = zero.shard(again, opt, zero.ZeroConfig(stage=stage))
    engine.load(folder)
    for step in range(at):
        change(again, step)
    sharded(again, opt, engine, rank, 1, at, STEPS)
    assert_equal(rank, again, opt, plain, other)


@pytest.mark.parametrize(("stage", "at", "same_flags"), [(1, 3, True), (3, 3, False), (3, 8, True), (2, 7, False)])
def test_saved_and_resumed_while_something_is_frozen(
    two, tmp_path: Path, stage: int, at: int, same_flags: bool
) -> None:
    two.run(resumes, stage, at, same_flags, str(tmp_path / "checkpoint"))


def plain_state(rank: int, world: int, stage: int) -> None:
    """A plain optimizer's state, whose parameters have made different numbers of steps, is loaded as it is."""
    plain = frozen_first()
    other = adamw(plain)
    whole(plain, other, world, 1, 0, 4)
    model = frozen_first()
    model.load_state_dict(plain.state_dict())
    for mine, theirs in zip(model.parameters(), plain.parameters()):
        mine.requires_grad_(theirs.requires_grad)
    opt = adamw(model)
    engine = zero.shard(model, opt, zero.ZeroConfig(stage=stage))
    opt.load_state_dict(other.state_dict())
    whole(plain, other, world, 1, 4, STEPS)
    sharded(model, opt, engine, rank, 1, 4, STEPS)
    assert_equal(rank, model, opt, plain, other)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_plain_state_of_uneven_steps_is_loaded(two, stage: int) -> None:
    two.run(plain_state, stage)


def between_backward_and_step(rank: int, world: int, stage: int) -> None:
    """torch steps over every gradient that is there, frozen or not; what is unfrozen then has none yet."""

    def run(model: nn.Module, backward: Callable[[int], None], opt: torch.optim.Optimizer) -> None:
        for step in range(3):
            backward(step)
            if step == 1:
                model.blocks[0].requires_grad_(False)
                model.blocks[2].requires_grad_(True)
            opt.step()
            opt.zero_grad()

    plain = frozen_first()
    other = adamw(plain)
    run(plain, lambda step: [(token_loss(plain, r, step) / world).backward() for r in range(world)][-1], other)
    model = frozen_first()
    opt = adamw(model)
    zero.shard(model, opt, zero.ZeroConfig(stage=stage))
    run(model, lambda step: token_loss(model, rank, step).backward(), opt)
    assert_equal(rank, model, opt, plain, other)


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_between_backward_and_step(two, stage: int) -> None:
    two.run(between_backward_and_step, stage)


def hooks_of(rank: int, world: int, stage: int) -> list[int]:
    """On all parameters after each step, of which half freeze and unfreeze one, as those of adversarial training do."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=stage))
    counts = []
    for step in range(8):
        model[0].requires_grad_(step % 2 == 1)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(sum(len(param._post_accumulate_grad_hooks or ()) for param in model.parameters()))
    engine.detach()
    return counts


@pytest.mark.parametrize("stage", [2, 3])
def test_hooks_do_not_add_up_where_something_is_frozen_again_and_again(two, stage: int) -> None:
    for counts in two.run(hooks_of, stage):
        assert counts[1] > 0
        assert counts[-1] == counts[1]


def refused(rank: int, world: int) -> None:
    model = frozen_first()
    opt = adamw(model)
    zero.shard(model, opt, zero.ZeroConfig(stage=3, offload_optimizer="cpu", step_in_backward=True))
    token_loss(model, rank, 0).backward()
    opt.step()
    model.blocks[0].requires_grad_(False)
    with pytest.raises(zero.LayoutError, match=r"'blocks\.0\..*step_in_backward"):
        token_loss(model, rank, 1)


def test_refused_where_backward_steps(two) -> None:
    two.run(refused)


class Pair(nn.Module):
    """A generator and its critic. Neither has blocks, or both have."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maker, self.critic = (
            nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(depth))) for _ in range(2)
        )

    def forward(self, x: Tensor, which: str) -> Tensor:
        return self.critic(self.maker(x)) if which == "maker" else self.critic(self.maker(x).detach())


def freeze_groups(optimizers: list[torch.optim.Optimizer], but: torch.optim.Optimizer | None) -> None:
    """As Lightning's `toggle_optimizer`; None: as its `untoggle_optimizer`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.requires_grad = but is None or optimizer is but


def adversarial(rank: int, world: int, stage: int | None, depth: int, by_parts: bool, whole: bool) -> list[Tensor]:
    """Gradients of the one that is frozen must not be there in its own step."""
    model = Pair(depth)
    made = torch.optim.Adafactor if whole else torch.optim.Adam
    optimizers = [made(model.maker.parameters(), lr=1e-2), torch.optim.SGD(model.critic.parameters(), lr=0.1)]
    engine = zero.shard(model, optimizers, zero.ZeroConfig(stage=stage)) if stage is not None else None
    for step in range(6):
        for which, optimizer in zip(("maker", "critic"), optimizers):
            freeze_groups(optimizers, optimizer)
            losses = []
            for each in range(world) if engine is None else (rank,):
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + each))
                if by_parts:
                    made_up = model.maker(x)
                    out = model.critic(made_up if which == "maker" else made_up.detach())
                else:
                    out = model(x, which)
                losses.append((out.square().mean() + out.mean()) / (world if engine is None else 1))
            sum(losses).backward()
            frozen = model.critic if which == "maker" else model.maker
            assert all(param.grad is None for param in frozen.parameters())
            optimizer.step()
            optimizer.zero_grad()
            freeze_groups(optimizers, None)
    if engine is not None:
        hooks = sum(len(param._post_accumulate_grad_hooks or ()) for param in model.parameters())
        assert hooks <= len(list(model.parameters())), "hooks must not become more with every step"
        engine.detach()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("by_parts", [False, True], ids=["whole", "parts"])
def test_frozen_through_the_groups_of_an_optimizer(two, stage: int, depth: int, by_parts: bool) -> None:
    expected, _ = two.run(adversarial, None, depth, by_parts, False)
    for ours in two.run(adversarial, stage, depth, by_parts, False):
        assert all(torch.allclose(mine, theirs, atol=1e-6) for mine, theirs in zip(ours, expected, strict=True))


def test_frozen_through_groups_that_other_ranks_do_not_have_is_refused(two) -> None:
    two.run(refused_groups)


def refused_groups(rank: int, world: int) -> None:
    with pytest.raises(zero.LayoutError, match="which other ranks cannot see"):
        adversarial(rank, world, 2, 3, False, True)
