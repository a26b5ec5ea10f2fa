"""The time model of a step, on short records."""

from __future__ import annotations

import pytest

from hf_zero.plan.timeline import Link, Network, Operation


def op(seconds: int) -> Operation:
    return Operation("gather", seconds, "unit", "forward")


def test_hops_and_the_slowest_link():
    near, far = Link(1.0, 10.0, ""), Link(5.0, 2.0, "")
    assert Network(4, 1, near, far).time_s(op(20)) == 3 * 1.0 + 2
    hops_s = (2 * 5 + 2 * 1) * 3 / 4
    assert Network(4, 2, near, far, adapters=1).time_s(op(20)) == pytest.approx(hops_s + 10)
    assert Network(4, 2, near, far).time_s(op(20)) == pytest.approx(hops_s + 5)  # a ring for each of two adapters
    assert Network(1, 1, near, far).time_s(op(20)) == 0


def test_an_all_reduce_is_two_rings():
    near, far = Link(1.0, 10.0, "", all_reduce=4.0), Link(5.0, 2.0, "")
    summed = Operation("reduce", 20, "", "", is_all_reduce=True)
    assert Network(4, 1, near, far).time_s(summed) == 2 * 3 * 1.0 + 20 / 4
    hops_s = 2 * (2 * 5 + 2 * 1) * 3 / 4
    assert Network(4, 2, near, far, adapters=1).time_s(summed) == pytest.approx(hops_s + 10)


def test_groups_share_a_machines_adapters():
    """Two replicas of two ranks, each on its own machine: a gather stays there, a sum across has one of two adapters."""
    network = Network(4, 2, Link(0.0, 100.0, ""), Link(0.0, 2.0, ""))
    assert network.time_s(Operation("gather", 20, "", "", ranks=2)) == pytest.approx(0.2)
    assert network.time_s(Operation("across", 20, "", "", ranks=2, stride=2)) == pytest.approx(10)
