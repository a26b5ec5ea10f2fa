"""`zero.on_preemption`: signals, processes and models that need care. Training: `services.ends_after_a_signal`."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import hf_zero as zero
from tests.models import mlp, sgd


def sharded() -> zero.Engine:
    model = mlp()
    return zero.shard(model, sgd(model), zero.ZeroConfig(stage=2))


def test_a_second_signal_does_what_it_did_before() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        engine = sharded()
        zero.on_preemption(engine, [signal.SIGUSR1])
        ends = zero.on_preemption(engine, [signal.SIGUSR1])  # instead of the one before
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert ends.signalled
        assert not ends()  # no backward yet
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_forked_child_dies_of_the_signal_as_it_would_without_us() -> None:
    ends = zero.on_preemption(sharded(), [signal.SIGTERM])
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
        zero.on_preemption(sharded(), [signal.SIGUSR1, last])
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
