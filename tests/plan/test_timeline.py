"""The event simulation of a step, on records made by hand."""

from __future__ import annotations

import pytest

from hf_zero.plan.timeline import Computed, Link, Network, Operation, Processor, Waited, replay


def bytes_of(operation: Operation) -> float:
    return float(operation.bytes)


def op(number: int, seconds: int) -> Operation:
    return Operation(number, "gather", seconds, "unit", "forward")


def test_what_is_waited_for_late_is_hidden():
    taken = replay([op(0, 3), Computed(5), Waited(0), Computed(1)], bytes_of, Processor(1.0))
    assert (taken.total_s, taken.compute_s, taken.communication_s, taken.exposed_s) == (6, 6, 3, 0)


def test_what_is_waited_for_at_once_is_not():
    taken = replay([op(0, 3), Waited(0), Computed(5)], bytes_of, Processor(1.0))
    assert (taken.total_s, taken.exposed_s) == (8, 3)


def test_operations_follow_one_another():
    taken = replay([op(0, 3), op(1, 4), Computed(1), Waited(1), Computed(2)], bytes_of, Processor(1.0))
    assert (taken.total_s, taken.communication_s) == (9, 7)


def test_communication_may_be_the_last_to_end():
    assert replay([Computed(2), op(0, 7)], bytes_of, Processor(1.0)).total_s == 9


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_messages_that_processors_move_take_from_computing(overlap):
    """3 s of messages beside 4 s of work, and 2 s after: hidden is the share that the processor does not feel."""
    events = [op(0, 3), Computed(4), Waited(0), Computed(1), Computed(1)]
    taken = replay(events, bytes_of, Processor(1.0, overlap=overlap))
    assert taken.total_s == pytest.approx(6 + 3 * (1 - overlap))
    assert (taken.compute_s, taken.communication_s) == (6, 3)
    assert taken.exposed_s == pytest.approx(3 * (1 - overlap))


def test_messages_wait_for_nothing_whoever_moves_them():
    """Those that are issued later begin later; without overlap the sum is the same wherever the waits are."""
    events = [op(0, 3), Computed(1), op(1, 2), Waited(0), Computed(2), Waited(1)]
    assert replay(events, bytes_of, Processor(1.0, overlap=0.0)).total_s == 3 + 1 + 2 + 2
    # At 3 s the first has arrived, and 1 s of the work was done beside it; the second takes until 5 s.
    assert replay(events, bytes_of, Processor(1.0, overlap=1.0)).total_s == 5
    # Half as fast beside messages: 1 s of work until 2 s, the second is issued then, 2 s more of work from 3 s to 6 s.
    assert replay(events, bytes_of, Processor(1.0, overlap=0.5)).total_s == 6


def test_bytes_take_the_memory_s_time():
    work = Computed(flops=6, bytes=8)
    assert replay([work], bytes_of, Processor(2.0)).total_s == 3
    assert replay([work], bytes_of, Processor(2.0, memory=4.0)).total_s == 5


def test_hops_and_the_slowest_link():
    near, far = Link(1.0, 10.0, ""), Link(5.0, 2.0, "")
    assert Network(4, 1, near, far).time_s(op(0, 20)) == 3 * 1.0 + 2
    hops_s = (2 * 5 + 2 * 1) * 3 / 4
    assert Network(4, 2, near, far, adapters=1).time_s(op(0, 20)) == pytest.approx(hops_s + 10)
    assert Network(4, 2, near, far).time_s(op(0, 20)) == pytest.approx(hops_s + 5)  # a ring for each of two adapters
    assert Network(1, 1, near, far).time_s(op(0, 20)) == 0


def test_an_all_reduce_is_two_rings():
    near, far = Link(1.0, 10.0, "", all_reduce=4.0), Link(5.0, 2.0, "")
    summed = Operation(0, "reduce", 20, "", "", is_all_reduce=True)
    assert Network(4, 1, near, far).time_s(summed) == 2 * 3 * 1.0 + 20 / 4
    hops_s = 2 * (2 * 5 + 2 * 1) * 3 / 4
    assert Network(4, 2, near, far, adapters=1).time_s(summed) == pytest.approx(hops_s + 10)


def test_groups_share_a_machines_adapters():
    """Two replicas of two ranks, each on its own machine: a gather stays there, a sum across has one of two adapters."""
    network = Network(4, 2, Link(0.0, 100.0, ""), Link(0.0, 2.0, ""))
    assert network.time_s(Operation(0, "gather", 20, "", "", ranks=2)) == pytest.approx(0.2)
    assert network.time_s(Operation(0, "across", 20, "", "", ranks=2, stride=2)) == pytest.approx(10)
