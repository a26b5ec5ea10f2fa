"""Speeds of collectives: the fit on known points, the measurement on real ranks."""

from __future__ import annotations

import pytest
import torch

import hf_zero as zero
from hf_zero.comm.group_wire import open_wire
from hf_zero.comm.wire import SoloWire
from hf_zero.plan.machine import SIZES, fitted, measure


def test_the_fit_finds_what_the_points_were_made_of():
    latency_s, bandwidth = fitted([(size, 5e-5 + size / 2e9) for size in SIZES])
    assert (latency_s, bandwidth) == pytest.approx((5e-5, 2e9), rel=1e-9)


def test_noise_of_the_largest_does_not_become_latency():
    """Within 10 % each: small messages say what the first byte takes, not a tenth of the largest one's 34 ms."""
    noise = [1.1, 0.9] * len(SIZES)
    latency_s, bandwidth = fitted([(size, (5e-5 + size / 2e9) * share) for size, share in zip(SIZES, noise)])
    assert latency_s == pytest.approx(5e-5, rel=0.15)
    assert bandwidth == pytest.approx(2e9, rel=0.15)


def test_nothing_begins_before_it_is_sent():
    assert fitted([(1e3, 1e-6), (2e3, 3e-6)])[0] == 0.0


@pytest.mark.parametrize(
    "points", [[], [(1e3, 1e-3)], [(1e3, 1e-3), (1e3, 2e-3)], [(1e3, 0.0), (2e3, 1e-3)], [(1e3, 2e-3), (1e6, 1e-3)]]
)
def test_points_without_a_line_are_refused(points):
    with pytest.raises(zero.ConfigError, match="two sizes|no longer than small"):
        fitted(points)


def measured(rank: int, world: int) -> tuple[object, ...]:
    wire = open_wire(torch.device("cpu"))
    wire.start(30.0)
    found = measure(torch.device("cpu"), wire, (1 << 10, 1 << 16, 1 << 24))
    assert found is not None
    assert [sent for sent, _ in found.points] == [1 << 10, 1 << 16, 1 << 24]
    return found.latency_s, found.bandwidth, found.all_reduce, found.points


@pytest.mark.gloo
def test_all_ranks_find_the_same(pools):
    one, two = pools[2].run(measured)
    assert one == two
    latency_s, bandwidth, all_reduce, _ = one
    assert 0 <= latency_s < 1
    assert 1e6 < bandwidth < 1e12
    assert 1e6 < all_reduce < 1e12
    assert measure(torch.device("cpu"), SoloWire()) is None
