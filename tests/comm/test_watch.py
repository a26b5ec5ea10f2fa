"""Ranks that diverge: every one that lives gets an error that says where all of them stand. Slow ranks are waited for."""

from __future__ import annotations

import contextlib
import io
import os
import pdb
import re
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero as zero
from hf_zero.comm.watch import SLOW_FACTOR
from tests.kit.common import batch, gpt2, optimizer_for
from tests.kit.pool import RankPool

pytestmark = pytest.mark.gloo
STALL_S = 3.0


class Loop:
    """Three steps; then `fault` happens in the fourth on one rank."""

    def __init__(self, rank: int, stage: int, folder: Path, stall_s: float = STALL_S) -> None:
        self.rank = rank
        self.folder = folder
        self.model = gpt2()
        self.optimizer = optimizer_for(self.model, 1)
        self.engine = zero.shard(self.model, self.optimizer, zero.ZeroConfig(stage=stage, stall_s=stall_s))

    def loss(self, step: int) -> object:
        ids = batch(step, 0, self.rank)
        return self.model(input_ids=ids, labels=ids).loss

    def train(self, step: int) -> None:
        self.loss(step).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Injected(Exception):
    """What a test raises in user code."""


def left_out(loop: Loop) -> None:
    """A batch is left out: this rank makes one step fewer, and waits at a barrier of its program."""
    loop.train(4)
    with contextlib.suppress(RuntimeError):  # torch's own, once the connections are broken
        dist.barrier()
    loop.engine.exchange(None)


def left_out_late(loop: Loop) -> None:
    """The others' verdict finds this rank at a barrier for less time than it is given there."""
    loop.train(4)
    time.sleep(2 / 3 * STALL_S)
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    loop.engine.exchange(None)


def left_out_before_a_save(loop: Loop) -> None:
    loop.train(4)
    loop.engine.save(loop.folder / "saved")


def raised(where: str, loop: Loop) -> None:
    """The program raises in the middle of a step, catches it, and goes on with the next batch."""

    def fail(*_: object) -> None:
        raise Injected(where)

    block, tensors = loop.model.transformer.h[1], []
    hooks = {
        "forward": lambda: block.register_forward_pre_hook(fail),
        "loss": lambda: loop.model.register_forward_hook(fail),
        "backward": lambda: block.register_forward_pre_hook(
            lambda _, args: tensors.append(args[0].register_hook(fail))
        ),
        "optimizer": lambda: loop.optimizer.register_step_pre_hook(fail),
    }
    handle = hooks[where]()
    with pytest.raises(Injected):
        loop.train(3)
    handle.remove()
    loop.optimizer.zero_grad()
    for step in range(4, 6):
        loop.train(step)
    loop.engine.exchange(None)


def gathered(loop: Loop) -> None:
    with zero.GatheredParameters(loop.model):
        pass


def evaluated(loop: Loop) -> None:
    with torch.no_grad():
        for _ in range(2):  # the first meets the others' forward
            loop.loss(3)


class Choosing(nn.Module):
    """Runs the blocks that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(4))

    def forward(self, which: tuple[int, ...]) -> torch.Tensor:
        hidden = torch.ones(2, 16)
        for number in which:
            hidden = self.blocks[number](hidden)
        return hidden.square().mean()


def choose(loop: Loop, which: tuple[int, ...], others: tuple[int, ...]) -> None:
    model = Choosing()
    zero.shard(model, optimizer_for(model, 1), zero.ZeroConfig(stage=3, stall_s=STALL_S))
    for _ in range(2):
        model((0, 1, 2, 3)).backward()
    model(which if loop.rank == 0 else others).backward()


def other_model(loop: Loop) -> None:
    second = gpt2()
    zero.shard(second, optimizer_for(second, 1), zero.ZeroConfig(stage=3, stall_s=STALL_S))
    model = second if loop.rank == 0 else loop.model
    ids = batch(3, 0, loop.rank)
    model(input_ids=ids, labels=ids)


def sharded_alone(loop: Loop) -> None:
    model = gpt2()
    zero.shard(model, optimizer_for(model, 1), zero.ZeroConfig(stage=3, stall_s=STALL_S))


def born_alone(loop: Loop) -> None:
    with zero.Init(stall_s=STALL_S):
        gpt2()


ALONE: dict[str, tuple[Callable[[Loop], object], str]] = {
    "state_dict": (lambda loop: loop.model.state_dict(), r"rank 0: in state_dict\(\), waits for all ranks"),
    "save": (lambda loop: loop.engine.save(loop.folder / "saved"), "rank 0: in saving to"),
    "load": (lambda loop: loop.engine.load(loop.folder / "saved"), "rank 0: in loading"),
    "full_parameter": (
        lambda loop: zero.full_parameter(next(loop.model.parameters())),
        r"rank 0: in full_parameter\(\)",
    ),
    "GatheredParameters": (gathered, "rank 0: in GatheredParameters"),
    "clip": (lambda loop: loop.engine.clip_grad_norm_(1.0), r"rank 0: in clip_grad_norm_\(\)"),
    "bind": (lambda loop: loop.engine.bind(optimizer_for(loop.model, 1)), "rank 0: in Engine.bind"),
    "detach": (lambda loop: loop.engine.detach(), "rank 0: in Engine.detach"),
    "step": (lambda loop: loop.optimizer.step(), "(?s)rank 0: in forward of step 4.*rank 1: in forward of step 3"),
    "forward": (lambda loop: loop.loss(3), "(?s)rank 0: in forward of step 3.*rank 1: in backward of step 3"),
    "generate": (
        lambda loop: loop.model.generate(batch(0, 0, 0), max_new_tokens=2, do_sample=False, pad_token_id=0),
        r"rank 0: in generate\(\)",
    ),
    "evaluate": (evaluated, "rank 0: in a forward without gradients"),
    "shard": (sharded_alone, "rank 0: in zero.shard"),
    "Init": (born_alone, "rank 0: in zero.Init"),
    "left_out": (
        left_out,
        "(?s)rank 0: in what follows the step of step 4.*torch.distributed, in barrier.*rank 1: in (for|back)ward of step 4",
    ),
    "left_out_late": (left_out_late, "(?s)rank 0: in what follows the step of step 4.*rank 1: in forward of step 4"),
    "left_out_before_a_save": (
        left_out_before_a_save,
        "rank 0: in saving to",
    ),
    "raised_in_forward": (partial(raised, "forward"), "(?s)rank 0: in .*rank 1: in "),
    "raised_after_forward": (partial(raised, "loss"), "rank 0: in what follows the step"),
    "raised_in_backward": (partial(raised, "backward"), "(?s)rank 0: in .*rank 1: in backward"),
    "raised_in_optimizer": (
        partial(raised, "optimizer"),
        "(?s)of step 4.*of step 5|of step 5.*of step 4|of step 3.*of step 4",
    ),
}
"""What rank 0 does alone, and what the error says of where ranks stand."""

BOTH: dict[str, tuple[Callable[[Loop], object], str]] = {
    "skipped_block": (lambda loop: choose(loop, (0,), (0, 1, 2, 3)), "waits for the parameters of blocks"),
    "other_experts": (lambda loop: choose(loop, (0, 1), (0, 3)), "waits for the parameters of blocks"),
    "other_model": (other_model, "(?s)rank 0: in forward of step 0.*rank 1: in forward of step 3"),
}
"""What each rank does in its own way."""


def diverge(
    rank: int, world: int, stage: int, case: str, folder: Path, stall_s: float = STALL_S
) -> tuple[str, list[str], float]:
    """The error of this rank, what was warned of, and the seconds until then."""
    loop = Loop(rank, stage, folder, stall_s)
    for step in range(3):
        loop.train(step)
    if case == "load":
        loop.engine.save(folder / "saved")
    loop.engine.exchange(None)
    error, began = "", time.monotonic()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            if case in BOTH:
                BOTH[case][0](loop)
            elif rank == 0:
                ALONE[case][0](loop)
            for step in range(3, 6):
                loop.train(step)
            loop.engine.exchange(None)
        except zero.StallError as stalled:
            error = str(stalled)
    silenced = [str(warning.message) for warning in told if "silenced" in str(warning.message)]
    return error, silenced, time.monotonic() - began


@pytest.fixture
def pool() -> Iterator[RankPool]:
    """Ranks of their own: their connections are broken afterwards."""
    ranks = RankPool(2)
    yield ranks
    ranks.stop()


def side_by_side(function: Callable[..., object], rows: Sequence[tuple[object, ...]]) -> list[list[object]]:
    """`function(*row)` of every row on ranks of its own, all at the same time: what takes the time is waiting."""
    pools = [RankPool(2) for _ in rows]
    try:
        with ThreadPoolExecutor(len(rows)) as threads:
            runs = [threads.submit(ranks.run, function, *row, timeout_s=150) for ranks, row in zip(pools, rows)]
            return [run.result() for run in runs]
    finally:
        for ranks in pools:
            ranks.stop()


CASES = {
    "collectives at stage 3": [
        (3, case) for case in ("state_dict", "save", "load", "full_parameter", "GatheredParameters", "bind")
    ],
    "collectives": [(2, "clip"), (3, "detach"), (3, "shard"), (3, "Init"), (1, "save")],
    "steps": [
        *[(3, case) for case in ("step", "forward", "generate", "evaluate", "skipped_block", "other_experts")],
        (3, "other_model"),
    ],
    "batches": [
        *[(stage, "left_out") for stage in (1, 3)],
        (3, "left_out_late"),
        (2, "left_out_before_a_save"),
        (2, "raised_after_forward"),
        *[(3, f"raised_in_{where}") for where in ("forward", "backward", "optimizer")],
    ],
}


def quoted() -> dict[tuple[int, str], str]:
    """The messages in docs/RELIABILITY.md, by stage and case."""
    page = (Path(__file__).parents[2] / "docs" / "RELIABILITY.md").read_text(encoding="utf-8")
    found = re.findall(r"^`(\w+)` on rank 0 alone, stage (\d):\n\n```text\n(.*?)```", page, re.S | re.M)
    return {(int(stage), case): text for case, stage, text in found}


def without_numbers(message: str) -> str:
    """What is the same in every run."""
    message = re.sub(r"\S*/(?=[\w.]+)", "", message)
    message = re.sub(r"\.py:\d+", ".py:1", message)
    return re.sub(r"\d+ s\b", "1 s", message).strip()


def test_messages_are_quoted():
    """The comparison below is not passed by finding none."""
    cases = {row for rows in CASES.values() for row in rows}
    assert quoted()
    assert {*quoted()} <= cases


@pytest.mark.parametrize(
    "group",
    [
        "collectives",
        "batches",
        *(pytest.param(each, marks=pytest.mark.wide) for each in ("steps", "collectives at stage 3")),
    ],
)
def test_ranks_that_diverge_are_named_on_every_rank(group, tmp_path):
    rows = [(stage, case, tmp_path / f"{stage}_{case}") for stage, case in CASES[group]]
    for (stage, case, _), answers in zip(rows, side_by_side(diverge, rows)):
        for error, silenced, _ in answers:
            assert "ranks have diverged" in error, (stage, case, answers)
            assert "rank 0: " in error
            assert "rank 1: " in error
            assert "test_watch.py:" in error  # where each rank's own program stands
            assert re.search({**ALONE, **BOTH}[case][1], error), (stage, case, error)
            assert silenced == [], (stage, case)
        page = quoted().get((stage, case))
        if page is not None:
            assert without_numbers(answers[0][0]) == without_numbers(page)


def late(rank: int, world: int, case: str) -> tuple[str, str]:
    """Rank 0 waits for what rank 1, which sleeps, never calls."""
    error, said = "", io.StringIO()
    side = None
    if case == "behind":
        model = gpt2()
        side = zero.shard(model, None, zero.ZeroConfig(stage=3, stall_s=0.3)).saves.background_wire()
    if rank == 0:
        with contextlib.redirect_stderr(said):
            try:
                if side is None:
                    model = gpt2()
                    zero.shard(model, None, zero.ZeroConfig(stage=3, stall_s=0.3))
                else:
                    with ThreadPoolExecutor(1) as threads:
                        threads.submit(side.exchange, None).result()
            except zero.StallError as stalled:
                error = str(stalled)
    else:
        time.sleep(SLOW_FACTOR * 0.3 + 5)
    return error, said.getvalue()


@pytest.mark.wide
def test_a_rank_that_never_comes(tmp_path):
    """It may be slow, so it is given longer: before its first call, and behind training."""
    before, behind = side_by_side(late, [("before",), ("behind",)])
    error, said = before[0]
    assert re.search(r"rank 0 has waited \d+ s in zero.shard, for rank 1: no answer so far", said), said
    assert "rank 1: no answer so far" in error
    error, said = behind[0]
    assert "rank 1: in the start of step 0, waits for no other rank" in error, error


def apart(rank: int, world: int) -> tuple[str, float]:
    """At stage 0 a step waits for nobody: rank 0 makes one alone."""
    loop = Loop(rank, 0, Path())
    loop.train(0)
    loop.loss(1).backward()
    loop.optimizer.step()
    if rank == 0:
        loop.optimizer.step()
    loop.optimizer.zero_grad()
    began = time.monotonic()
    with pytest.raises(zero.RankMismatchError, match="gradients of different steps") as refused:
        loop.train(2)
    return str(refused.value), time.monotonic() - began


def test_gradients_of_different_steps_are_not_averaged(pool):
    first, second = pool.run(apart)
    assert "rank 0 has made 3 optimizer steps, others from 2 to 3" in first[0]
    assert "rank 1 has made 2 optimizer steps" in second[0]


def disagreeing(rank: int, world: int, stage: int, defer: bool = False) -> str:
    """Rank 0 alone leaves two micro-batches of three in no_sync: rank 1 sends gradients that nobody waits for."""
    loop = Loop(rank, stage, Path())
    loop.train(0)
    told = ""
    try:
        for micro in range(3):
            with loop.engine.no_sync(defer=defer) if rank == 0 and micro < 2 else contextlib.nullcontext():
                loop.loss(1 + micro).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.train(4)
    except zero.ZeroError as error:
        told = f"{type(error).__name__}: {error}"
    return told


def test_ranks_that_disagree_in_no_sync():
    """Where gradients add up locally in no_sync; the others send them in every backward, and nothing diverges."""
    zeroth, first, second, deferred, at_once = side_by_side(disagreeing, [(0,), (1,), (2,), (2, True), (3, True)])
    for answers in (zeroth, first, deferred):
        for told in answers:
            assert re.match(r"(?s)RankMismatchError: .*no_sync|StallError: .*rank 0: .*rank 1: ", told), told
    assert second == ["", ""]
    for told in at_once:  # stage 3 agrees in every backward: the first one is refused
        assert "ranks disagree in no_sync: this backward of step 1 leaves its gradients on rank(s) 0," in told, told


def slow(rank: int, world: int, how: str) -> tuple[int, str]:
    """Rank 1 is late for its first step, or for a later one; both go on."""
    loop = Loop(rank, 3, Path())
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        for step in range(3):
            if rank == 1 and step == (0 if how == "in its first step" else 1):
                SLOWLY[how]()
            loop.train(step)
        loop.engine.exchange(None)
    loop.engine.detach()
    return loop.engine.rank, said.getvalue()


def work() -> None:
    until = time.monotonic() + 2 * STALL_S
    while time.monotonic() < until:
        sum(range(1000))


def hold_the_interpreter() -> None:
    """One call into C that lets no other thread run, the watch's neither."""
    began, numel = time.monotonic(), 2_000_000
    sum(range(numel))
    sum(range(int(numel * 2 * STALL_S / (time.monotonic() - began))))


class Traced(pdb.Pdb):
    """A debugger in which somebody thinks before they type."""

    def __init__(self) -> None:
        super().__init__(stdin=self, stdout=io.StringIO())
        self.use_rawinput = False

    def readline(self) -> str:
        time.sleep(2 * STALL_S)
        return "continue\n"


def stop() -> None:
    """As Ctrl-Z does, for as long as the limit; someone else wakes this process."""
    os.system(f"(sleep {STALL_S}; kill -CONT {os.getpid()}) &")
    os.kill(os.getpid(), signal.SIGSTOP)


SLOWLY: dict[str, Callable[[], object]] = {
    "in its first step": partial(time.sleep, 3 * STALL_S),
    "asleep": partial(time.sleep, 2 * STALL_S),
    "busy": work,
    "in a call": hold_the_interpreter,
    "stopped": stop,
    "in a debugger": lambda: Traced().set_trace(),
}


@pytest.mark.wide
def test_a_slow_rank_is_waited_for():
    """For longer than `stall_s`: the others say for whom they wait, and go on."""
    for how, answers in zip(SLOWLY, side_by_side(slow, [(how,) for how in SLOWLY])):
        assert [rank for rank, _ in answers] == [0, 1]
        if how not in ("stopped", "in a call"):  # for how long depends on the machine
            assert re.search(r"rank 0 has waited \d+ s for .*rank 1: ", answers[0][1]), (how, answers)


@pytest.mark.wide
def test_how_long_an_error_takes(capsys):
    """Figures of docs/RELIABILITY.md; on a machine that does nothing else."""
    figures = []
    for stage, how in [(2, "state_dict"), (3, "forward"), (1, "clip")]:
        for stall_s in (3.0, 30.0):
            (answers,) = side_by_side(diverge, [(stage, how, Path(), stall_s)])
            took_s = max(seconds for _, _, seconds in answers)
            figures.append(f"{how}, stage {stage}, stall_s {stall_s:.0f}: {took_s:.1f} s")
            assert took_s <= stall_s + 5
    with capsys.disabled():
        print("\n" + "\n".join(figures))
