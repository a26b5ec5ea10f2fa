"""A signal on one rank: every rank ends after the same step, and resumes from what was saved as if nothing had been."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import hf_zero as zero
from tests.kit.pool import RankPool
from tests.models import LanguageModel, adamw, ids, mlp, sgd, token_loss

STEPS = 5


class Loop:
    """Two micro-batches per step, the first of them inside `no_sync`."""

    def __init__(self, stage: int, offload: str = "none") -> None:
        torch.manual_seed(0)
        self.model = LanguageModel(tied=True)
        self.optimizer = adamw(self.model)
        config = zero.ZeroConfig(stage=stage, offload_optimizer=offload)
        self.engine = zero.shard(self.model, self.optimizer, config)

    def backward(self, step: int, micro: int, rank: int) -> None:
        tokens = ids(rank, 2 * step + micro)
        token_loss(self.model(tokens), tokens).backward()

    def train(self, step: int, rank: int) -> None:
        with self.engine.no_sync():
            self.backward(step, 0, rank)
        self.backward(step, 1, rank)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[torch.Tensor]:
        return [zero.full_parameter(parameter).clone() for parameter in self.model.parameters()]


def interrupted(rank: int, world: int, stage: int, offload: str, folder: Path) -> tuple[int, bool, bool, bool]:
    """The last rank gets SIGUSR1 in step 2, at another place of its code than the others."""
    before = signal.getsignal(signal.SIGUSR1)
    whole = Loop(stage, offload)
    for step in range(STEPS):
        whole.train(step, rank)
    expected = whole.weights()
    whole.engine.detach()

    loop = Loop(stage, offload)
    ends = zero.on_preemption(loop.model)
    saved = -1
    for step in range(STEPS):
        if step == 2 and rank == world - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        loop.train(step, rank)
        if ends():
            saved = step
            loop.engine.save(folder / "saved")
            break
    ends.close()
    given_back = signal.getsignal(signal.SIGUSR1) is before
    loop.engine.detach()

    again = Loop(stage, offload)
    again.engine.load(folder / "saved")
    for step in range(saved + 1, STEPS):
        again.train(step, rank)
    equal = all(torch.equal(one, other) for one, other in zip(expected, again.weights()))
    again.engine.detach()
    return saved, given_back, ends.signalled, equal


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "offload"), [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (3, "cpu")])
def test_every_rank_ends_after_the_same_step(two: RankPool, stage: int, offload: str, tmp_path: Path) -> None:
    found = two.run(interrupted, stage, offload, tmp_path)
    assert [saved for saved, *_ in found] == [2, 2]
    assert [signalled for _, _, signalled, _ in found] == [False, True]
    assert all(given_back and equal for _, given_back, _, equal in found)


def test_one_process(tmp_path: Path) -> None:
    assert interrupted(0, 1, 2, "none", tmp_path) == (2, True, True, True)


def test_a_second_signal_does_what_it_did_before() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        loop = Loop(2)
        ends = zero.on_preemption(loop.engine, [signal.SIGUSR1])
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert ends.signalled
        assert not ends()  # no backward yet
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_forked_child_dies_of_the_signal_as_it_would_without_us() -> None:
    ends = zero.on_preemption(Loop(2).engine, [signal.SIGTERM])
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)  # the test fails
    _, status = os.waitpid(child, 0)
    ends.close()
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert not ends.signalled


@pytest.mark.parametrize("last", [signal.SIGKILL, 10**6])
def test_signals_that_cannot_be_handled_are_refused_and_the_others_given_back(last: int) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(zero.ConfigError, match="cannot be handled here"):
        zero.on_preemption(Loop(2).engine, [signal.SIGUSR1, last])
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(zero.ConfigError, match="is not sharded"):
        zero.on_preemption(mlp())


def test_a_repartition_forgets_no_signal() -> None:
    """A parameter without a gradient leaves its unit's span before the first step."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = sgd(model)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3))
    ends = zero.on_preemption(engine, [signal.SIGUSR1])
    for signalled in (False, True):
        if signalled:
            os.kill(os.getpid(), signal.SIGUSR1)
        model[1](torch.ones(2, 4)).sum().backward()
        model[0].bias.sum().backward()
        assert ends() is signalled
        optimizer.step()
        optimizer.zero_grad()
    engine.detach()
