"""A step that fails and is caught has not been, or has been made as a whole, or the engine refuses to go on.

Each case is a run of a few steps with a failed one between two of them, caught by the program, and the same run without it.
What both end with is equal to the bit: parameters, optimizer state, options of groups.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hf_zero as zero
from tests.kit.offloading import SMALL_ROADS, equal, values

pytestmark = pytest.mark.gloo
WIDTH, WORDS = 24, 40


class Failed(Exception):
    """What the tests raise."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.before: Callable[[], object] = lambda: None
        self.between: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        self.before()
        return x + self.down(F.gelu(self.between(self.up(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Custom(torch.optim.Optimizer):
    """Momentum, written as users write it; something happens before a parameter and in the middle of one."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "made": 0})
        self.events: list[tuple[int, str, Callable[[], object]]] = []
        """(how many parameters come first, where in the next one, what happens); the twins of this optimizer have it, too."""
        self.seen = [0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["made"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                self._meet("before")
                state = self.state[p]
                if not state:
                    state.update(step=0, momentum=torch.zeros_like(p))
                state["step"] += 1
                self._meet("counted")
                state["momentum"].mul_(0.9).add_(p.grad)
                self._meet("in the middle")
                p.add_(state["momentum"], alpha=-group["lr"])
                self.seen[0] += 1
        return loss

    def _meet(self, where: str) -> None:
        for event in self.events:
            if event[:2] == (self.seen[0], where):
                self.events.remove(event)
                event[2]()


class Bomb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, error: BaseException) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ctx.error


def throws(error: BaseException) -> Callable[..., Any]:
    def throw(*_: Any, **__: Any) -> Any:
        raise error

    return throw


def interrupt(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Run:
    """A program that trains, and what it does where a step fails."""

    def __init__(self, rank: int, place: dict[str, Any], folder: str, optimizer: str = "AdamW") -> None:
        torch.manual_seed(0)
        self.rank, self.model = rank, Net()
        if optimizer == "Custom":
            self.optimizer: Any = Custom(self.model.parameters())
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.hooked_early: Callable[[], object] = lambda: None
        self.optimizer.register_step_post_hook(lambda *_: self.hooked_early())
        config = zero.ZeroConfig(offload_dir=folder if "disk" in place.values() else None, **place)
        self.engine = zero.shard(self.model, self.optimizer, config, roads=SMALL_ROADS)

    def micro(self, step: int, micro: int = 0) -> None:
        generator = torch.Generator().manual_seed(1000 * step + 10 * micro + self.rank)
        self.model(torch.randint(0, WORDS, (2, 5), generator=generator)).backward()

    def step(self, step: int) -> None:
        with self.engine.no_sync():
            self.micro(step)
        self.micro(step, 1)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> list[Any]:
        state = self.optimizer.state_dict()
        options = [
            group[key] for group in state["param_groups"] for key in sorted(group) if key not in ("params", "betas")
        ]
        entries = state["state"]
        return [
            *self.model.state_dict().values(),
            *(entries[i][k] for i in entries for k in sorted(entries[i])),
            *options,
        ]


# What fails, each of them before anything has been written: the step has not been ----------------------------------------


def in_forward(run: Run) -> None:
    run.model.blocks[1].before = throws(torch.OutOfMemoryError("none left, says the test"))
    run.step(99)


def interrupted_in_forward(run: Run) -> None:
    run.model.blocks[2].before = interrupt
    run.step(99)


def in_second_forward(run: Run) -> None:
    with run.engine.no_sync():
        run.micro(99)
    run.model.blocks[1].before = throws(Failed())
    run.micro(99, 1)


def in_backward(run: Run) -> None:
    run.model.blocks[1].between = lambda x: Bomb.apply(x, Failed())
    run.micro(99)


def in_second_backward(run: Run) -> None:
    run.micro(99)
    run.model.blocks[0].between = lambda x: Bomb.apply(x, KeyboardInterrupt())
    run.micro(99, 1)


def in_a_gradient_hook(run: Run) -> None:
    """After some units' gradients have been sent."""
    with run.model.blocks[0].down.weight.register_hook(throws(Failed())):
        run.step(99)


def in_a_pre_hook(run: Run) -> None:
    with run.optimizer.register_step_pre_hook(throws(Failed())):
        run.step(99)


def in_the_closure(run: Run) -> None:
    run.optimizer.step(throws(Failed()))


def in_the_closures_backward(run: Run) -> None:
    def closure() -> None:
        run.optimizer.zero_grad()
        in_backward(run)

    run.optimizer.step(closure)


def in_clipping(run: Run) -> None:
    run.micro(99)
    run.engine.clip_grad_norm_(throws(Failed())())


def before_the_first_parameter(run: Run) -> None:
    run.optimizer.events = [(run.optimizer.seen[0], "before", throws(torch.OutOfMemoryError("none")))]
    run.step(99)


def counted_already(run: Run) -> None:
    run.optimizer.events = [(run.optimizer.seen[0], "counted", throws(Failed()))]
    run.step(99)


DROPPED = [
    in_forward, interrupted_in_forward, in_second_forward, in_backward, in_second_backward, in_a_gradient_hook, in_a_pre_hook,
    in_the_closure, in_the_closures_backward, in_clipping,
]  # fmt: skip
IN_OPTIMIZER = [before_the_first_parameter, counted_already]


# What fails when the step can only be carried to its end: it has been ----------------------------------------------------


def in_an_early_post_hook(run: Run) -> None:
    run.hooked_early = throws(Failed())
    run.step(99)


def in_a_late_post_hook(run: Run) -> None:
    with run.optimizer.register_step_post_hook(throws(Failed())):
        run.step(99)


def interrupted_in_a_pre_hook(run: Run) -> None:
    with run.optimizer.register_step_pre_hook(interrupt):
        run.step(99)


def interrupted_in_a_post_hook(run: Run) -> None:
    run.hooked_early = interrupt
    run.step(99)


def interrupted_in_the_arithmetic(run: Run) -> None:
    run.optimizer.events = [(run.optimizer.seen[0] + 1, "in the middle", interrupt)]
    run.step(99)


MADE = [in_an_early_post_hook, in_a_late_post_hook, interrupted_in_a_pre_hook, interrupted_in_a_post_hook]
PLACES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "host": {"stage": 2, "offload_optimizer": "cpu"},
    "host, parameters too": {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
    "disk": {"stage": 1, "offload_optimizer": "disk"},
    "disk, parameters too": {"stage": 3, "offload_optimizer": "disk", "offload_params": "disk"},
}


def hurt(run: Run, fail: Callable[[Run], None]) -> None:
    """A failed step that the program catches, to go on with the next batch."""
    stopped: BaseException | None = None
    try:
        fail(run)
    except (Failed, KeyboardInterrupt, torch.OutOfMemoryError) as error:
        stopped = error
    assert stopped is not None, "nothing was raised"
    for block in run.model.blocks:
        del block.before, block.between
        block.before, block.between = (lambda: None), (lambda x: x)
    run.hooked_early = lambda: None
    run.optimizer.zero_grad()


def runs(rank: int, world: int, place: str, folder: str, optimizer: str, names: list[str]) -> list[str]:
    """Which of these cases end with other values than they should."""
    before, wrong = signal.signal(signal.SIGINT, signal.default_int_handler), []
    references: dict[bool, list[Any]] = {}
    try:
        for name in names:
            fail = globals()[name]
            made = fail in MADE or fail is interrupted_in_the_arithmetic
            for is_reference in (True, False):
                if is_reference and made in references:
                    continue
                run = Run(rank, PLACES[place], folder, optimizer)
                for step in (0, 1):
                    run.step(step)
                if not is_reference:
                    hurt(run, fail)
                elif made:
                    run.step(99)
                for step in (2, 3):
                    run.step(step)
                if is_reference:
                    references[made] = run.values()
                elif not equal(run.values(), references[made]):
                    wrong.append(name)
    finally:
        signal.signal(signal.SIGINT, before)
    return wrong


HALVES = {"host": 0, "host, parameters too": 1, "disk": 0, "disk, parameters too": 1}
"""Every failure at every stage, in memory; and in every tier, in one of its two places."""


@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_fails_has_not_been_or_is_made_to_its_end(two, tmp_path, place):
    names = [case.__name__ for case in (*DROPPED, *MADE)]
    chosen = names[HALVES[place] :: 2] if place in HALVES else names
    assert two.run(runs, place, str(tmp_path), "AdamW", chosen) == [[], []]


@pytest.mark.parametrize("place", ["stage 0", "stage 2", "stage 3", "host"])
def test_a_custom_optimizer_that_raises_before_it_writes(two, tmp_path, place):
    cases = [interrupted_in_the_arithmetic] + ([] if place == "host" else IN_OPTIMIZER)
    assert two.run(runs, place, str(tmp_path), "Custom", [case.__name__ for case in cases]) == [[], []]


# Half of a step ----------------------------------------------------------------------------------------------------------


def half(rank: int, world: int, place: str, folder: str, where: str) -> None:
    run = Run(rank, PLACES[place], folder, "Custom")
    for step in (0, 1):
        run.step(step)
    run.engine.save(f"{folder}/ckpt")
    clean = Run(rank, PLACES[place], folder, "Custom")
    for step in (0, 1, 2, 3):
        clean.step(step)
    run.optimizer.events = [(run.optimizer.seen[0] + (where == "before"), where, throws(Failed()))]

    def broken() -> None:
        run.step(99)
        run.micro(100)  # what is updated behind the step is waited for here

    with pytest.raises((Failed, zero.StateError, zero.TierError)):
        broken()
    for use in (
        lambda: run.micro(2), run.model.state_dict, lambda: run.engine.save(f"{folder}/other"), run.optimizer.step,
        run.optimizer.state_dict,
    ):  # fmt: skip
        with pytest.raises(zero.StateError, match=r"broke off half done.*Load the last checkpoint"):
            use()
    run.engine.load(f"{folder}/ckpt")
    run.optimizer.zero_grad()
    for step in (2, 3):
        run.step(step)
    assert equal(run.values(), clean.values())


@pytest.mark.parametrize("place", ["stage 0", "stage 1", "stage 3", "host", "disk, parameters too"])
@pytest.mark.parametrize("where", ["before", "in the middle"])
def test_half_a_step_is_refused_until_a_checkpoint_is_loaded(two, tmp_path, place, where):
    two.run(half, place, str(tmp_path), where)


def half_in_backward(rank: int, world: int, folder: str) -> None:
    """With `step_in_backward` a forward that raises leaves nothing behind, a backward leaves half a step."""
    place = {"stage": 2, "offload_optimizer": "cpu", "step_in_backward": True}
    clean, run = (Run(rank, place, folder) for _ in range(2))
    for step in range(4):
        clean.step(step)
    run.step(0)
    hurt(run, in_forward)
    run.step(1)
    run.engine.save(f"{folder}/ckpt")
    run.model.blocks[0].between = lambda x: Bomb.apply(x, Failed())
    with pytest.raises(Failed):
        run.micro(99)
    run.model.blocks[0].between = lambda x: x
    for use in (lambda: run.micro(2), run.optimizer.step, run.model.state_dict):
        with pytest.raises(zero.StateError, match=r"broke off half done.*step_in_backward.*Load the last checkpoint"):
            use()
    run.engine.load(f"{folder}/ckpt")
    run.optimizer.zero_grad()
    for step in (2, 3):
        run.step(step)
    assert equal(run.values(), clean.values())


def test_half_a_step_in_a_backward_is_refused(two, tmp_path):
    two.run(half_in_backward, str(tmp_path))


# The program tries the same again -----------------------------------------------------------------------------------------


def retried(rank: int, world: int, place: str, folder: str) -> None:
    """Without `zero_grad`: gradients of earlier micro-batches stay where a forward or a step raised."""

    def again(run: Run, attempt: Callable[[], object]) -> None:
        """It fails once, and is then made."""
        with pytest.raises(Failed):
            attempt()
        for block in run.model.blocks:
            block.before, block.between = (lambda: None), (lambda x: x)
        attempt()

    clean, run = (Run(rank, PLACES[place], folder) for _ in range(2))
    for step in range(4):
        clean.step(step)
    for step in (0, 1):
        run.step(step)
    with run.engine.no_sync():  # a forward
        run.micro(2)
    run.model.blocks[1].before = throws(Failed())
    again(run, lambda: run.micro(2, 1))
    handle = run.optimizer.register_step_pre_hook(throws(Failed()))  # a step
    with pytest.raises(Failed):
        run.optimizer.step()
    handle.remove()
    # The groups' gradients have the norm over all ranks again.
    masters = [p for group in run.optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.get_total_norm([p.grad for p in masters if p.grad is not None])
    torch.testing.assert_close(norm, run.engine.clip_grad_norm_(float("inf")), rtol=1e-5, atol=0.0)
    run.optimizer.step()
    run.optimizer.zero_grad()
    # The first backward of a step; nothing but its own gradients goes with it. Then the second, which takes the first's along.
    run.model.blocks[0].between = lambda x: Bomb.apply(x, Failed())
    with run.engine.no_sync():
        again(run, lambda: run.micro(3))
    run.model.blocks[0].between = lambda x: Bomb.apply(x, Failed())
    with pytest.raises(Failed):
        run.micro(3, 1)
    for use in (run.optimizer.step, lambda: run.engine.clip_grad_norm_(1.0)):
        with pytest.raises(zero.StateError, match=r"a backward of this step raised.*Call zero_grad\(\)"):
            use()
    run.model.blocks[0].between = lambda x: x
    run.optimizer.zero_grad()
    run.step(3)
    assert equal(run.values(), clean.values())


@pytest.mark.parametrize("place", ["stage 0", "stage 1", "stage 2", "stage 3", "host", "disk, parameters too"])
def test_what_failed_may_be_tried_again(two, tmp_path, place):
    two.run(retried, place, str(tmp_path))


def scaled(rank: int, world: int, stage: int) -> None:
    """float16: the scaler is the program's; a step that raised before it wrote anything is made again by `scaler.step`."""
    results = []
    for fails in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        zero.shard(model, optimizer, zero.ZeroConfig(stage=stage), mixed_precision="fp16")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
        for step in range(6):
            generator = torch.Generator().manual_seed(10 * step + rank)
            loss = model(torch.randint(0, WORDS, (2, 5), generator=generator))
            if fails and step % 2:
                model.blocks[1].between = lambda x: Bomb.apply(x, Failed())
                with pytest.raises(Failed):
                    scaler.scale(model(torch.zeros(2, 5, dtype=torch.long))).backward()
                model.blocks[1].between = lambda x: x
                optimizer.zero_grad()
                loss = model(torch.randint(0, WORDS, (2, 5), generator=generator.manual_seed(10 * step + rank)))
            scaler.scale(loss).backward()
            if fails:
                handle = optimizer.register_step_pre_hook(throws(Failed()))
                try:
                    scaler.step(optimizer)
                except Failed:
                    handle.remove()
                    scaler.step(optimizer)
                handle.remove()
            else:
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append([*values(model, optimizer), scaler.get_scale()])
    assert equal(*results), results[0][-1]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_scaler(two, stage):
    two.run(scaled, stage)


# One rank -----------------------------------------------------------------------------------------------------------------


def one_interrupted(rank: int, world: int, place: str, folder: str) -> None:
    """Ctrl-C in a step, on one rank alone: the step is made on all, and that rank's program hears of it afterwards."""
    clean, run = (Run(rank, PLACES[place], folder) for _ in range(2))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for step in range(4):
            clean.step(step)
        for step in range(4):
            run.hooked_early = interrupt if rank == 1 and step == 2 else lambda: None
            try:
                run.step(step)
            except KeyboardInterrupt:
                assert (rank, step) == (1, 2)
                run.optimizer.zero_grad()
            else:
                assert (rank, step) != (1, 2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert equal(run.values(), clean.values())


@pytest.mark.parametrize("place", ["stage 1", "stage 3", "host"])
def test_an_interrupt_on_one_rank_leaves_all_at_the_same_step(two, tmp_path, place):
    two.run(one_interrupted, place, str(tmp_path))


def signals(rank: int, world: int) -> None:
    """Others than Ctrl-C wait, too; a second one does not; handlers are the program's afterwards, also those set meanwhile."""
    heard: list[str] = []
    run = Run(rank, PLACES["stage 3"], "")
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, lambda number, _: heard.append(signal.Signals(number).name))

    def late(number: int, frame: object) -> None:
        heard.append("set in the step")

    def hook() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGALRM)
        heard.append("hook")
        signal.signal(signal.SIGALRM, late)

    run.hooked_early = hook
    run.step(0)
    assert heard == ["SIGTERM", "hook", "SIGTERM", "set in the step"]
    assert signal.getsignal(signal.SIGALRM) is late
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)


def test_signals_wait_for_the_end_of_the_step(pools):
    pools[1].run(signals)


# At any moment --------------------------------------------------------------------------------------------------------------


def at_any_moment(rank: int, world: int, place: str, folder: str, seed: int, rounds: int) -> list[str]:
    """A handler that raises comes after a random time of a step; the program looks whether the step has been made.

    On until a third of the rounds were hit. How long a step takes changes with what else the machine does: it is measured
    in each round, and a step that is hit gets more time at the next try, or a slow machine would never let it end.
    """
    generator = random.Random(seed)
    clean, run = (Run(rank, PLACES[place], folder) for _ in range(2))
    for step in range(3):
        clean.step(step)
        run.step(step)

    def made() -> int:
        return int(run.optimizer.state_dict()["state"][0]["step"])

    before = signal.signal(signal.SIGALRM, throws(KeyboardInterrupt()))
    hit = 0
    try:
        for step in itertools.count(3):
            if step >= 3 + rounds and hit >= rounds // 3:
                break
            started = time.perf_counter()
            clean.step(step)
            step_s = time.perf_counter() - started
            while made() == step:
                try:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, generator.uniform(0.02, 1.3) * step_s)
                        run.step(step)
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    hit += 1
                    step_s *= 1.2
                run.optimizer.zero_grad()
            if not equal(run.values(), clean.values()):
                return [f"{place}, seed {seed}: step {step} differs after {hit} interrupts"]
    finally:
        signal.signal(signal.SIGALRM, before)
    return []


@pytest.mark.parametrize("place", ["stage 2", "stage 3", "host, parameters too", "disk, parameters too"])
def test_interrupts_at_any_moment(pools, tmp_path, place):
    assert pools[1].run(at_any_moment, place, str(tmp_path), random.randrange(1 << 30), 12) == [[]]


@pytest.mark.slow
@pytest.mark.timeout(960)
@pytest.mark.parametrize("place", PLACES)
def test_many_interrupts_at_any_moment(pools, tmp_path, place):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    assert pools[1].run(at_any_moment, place, str(tmp_path), seed, 400, timeout_s=900) == [[]]


def test_hooks_that_an_interrupt_left_on_go_with_the_model() -> None:
    """torch tells no hook of a forward that Ctrl-C ends: saved tensors pass through its hooks until the next forward."""
    ids = torch.arange(6).view(2, 3)

    def sharded() -> Net:
        model = Net()
        zero.shard(model, torch.optim.AdamW(model.parameters()), zero.ZeroConfig(stage=3))
        return model

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def top() -> object:
        return torch._C._autograd._top_saved_tensors_default_hooks(True)

    before, gone = top(), sharded()
    gone.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        gone(ids)
    assert top() is not None
    del gone
    gc.collect()
    for _ in range(3):  # whose memory may lie where that of the first was
        sharded()(ids).backward()
        assert top() == before
