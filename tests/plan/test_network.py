"""The time of collectives over the links between ranks."""

from __future__ import annotations

import pytest

from hf_zero.plan.machine import Machine
from hf_zero.plan.network import Link, Network
from hf_zero.plan.work import PASSES, Collective


def gather(nbytes: int, ranks: int) -> Collective:
    return Collective("gather", PASSES, 1, nbytes, ranks)


def test_hops_and_the_slowest_link():
    near, far = Link(1.0, 10.0, ""), Link(5.0, 2.0, "")
    assert Network(4, 1, near, far).time_s(gather(20, 4)) == 3 * 1.0 + 2
    hops_s = (2 * 5 + 2 * 1) * 3 / 4
    assert Network(4, 2, near, far, adapters=1).time_s(gather(20, 4)) == pytest.approx(hops_s + 10)
    assert Network(4, 2, near, far).time_s(gather(20, 4)) == pytest.approx(
        hops_s + 5
    )  # a ring for each of two adapters
    assert Network(1, 1, near, far).time_s(gather(20, 1)) == 0


def test_an_all_reduce_is_two_rings():
    near, far = Link(1.0, 10.0, "", all_reduce=4.0), Link(5.0, 2.0, "")
    summed = Collective("reduce", PASSES, 1, 20, 4, is_all_reduce=True)
    assert Network(4, 1, near, far).time_s(summed) == 2 * 3 * 1.0 + 20 / 4
    hops_s = 2 * (2 * 5 + 2 * 1) * 3 / 4
    assert Network(4, 2, near, far, adapters=1).time_s(summed) == pytest.approx(hops_s + 10)


def test_groups_share_a_machines_adapters():
    """Two replicas of two ranks, each on its own machine: a gather stays there, a sum across has one of two adapters."""
    network = Network(4, 2, Link(0.0, 100.0, ""), Link(0.0, 2.0, ""))
    assert network.time_s(gather(20, 2)) == pytest.approx(0.2)
    assert network.time_s(Collective("across", PASSES, 1, 20, 2, stride=2)) == pytest.approx(10)


def test_a_machine_has_equal_links() -> None:
    network = Network.of(Machine(collective=10.0, latency=1.0, all_reduce=5.0), 4)
    assert network is not None
    summed = Collective("reduce", PASSES, 2, 20, 4, is_all_reduce=True)
    assert network.seconds([gather(20, 4), gather(10, 4), summed]) == {
        (PASSES, "gather"): 3.0 + 2.0 + 3.0 + 1.0,
        (PASSES, "reduce"): 2 * (6.0 + 4.0),
    }
    assert Network.of(Machine(latency=1.0), 4) is None
