"""What a message takes between the ranks that there are, and how much of it other work hides: measured on all at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..comm.wire import SoloWire
from ..errors import ConfigError

SIZES = tuple(1024 * 4**power for power in range(9))
"""Bytes that a rank sends in a gather: 1 KiB to 64 MiB."""
_TURNS, _SMALL_TURNS, _SMALL_BYTES = 7, 21, 1 << 20
"""Small messages take about as long as it takes a thread to wake up, which differs more from turn to turn."""
_OVERLAP_BYTES = 32 << 20
_PRODUCT = 384
"""Rows of the matrix products that run beside messages: they fit a processor's cache, so only the processor is shared."""


@dataclass(frozen=True, slots=True)
class WireSpeed:
    """Of a gather, while nothing else is sent.

    Attributes:
        latency_s: of one hop; `ranks - 1` hops are a gather's.
        bandwidth: bytes a second that a rank sends.
        overlap: share of a message's time, 0 to 1, that work going on at the same time does not feel. A network card that
            reads and writes memory by itself has 1; where processors copy each byte and all of them compute, it is near 0.
        points: (bytes, seconds) that the two first are fitted to.
    """

    latency_s: float
    bandwidth: float
    overlap: float
    points: tuple[tuple[float, float], ...] = ()


def fitted(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Seconds before the first byte and bytes a second, by least squares over (bytes, seconds).

    What is squared is the distance relative to the measured time: else the largest messages alone would decide, and the
    seconds before the first byte would be their noise.

    Raises:
        ConfigError: fewer than two sizes, or larger messages that take no longer.
    """
    if len({size for size, _ in points}) < 2 or any(taken <= 0 for _, taken in points):
        raise ConfigError(f"a line needs two sizes of messages or more and positive times, found {list(points)}")
    # Minimized: the sum of (a + b x - t)^2 / t^2, a weighted line.
    weights = [1 / taken**2 for _, taken in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points)) / total
    mean_t = sum(w * t for w, (_, t) in zip(weights, points)) / total
    slope = sum(w * (x - mean_x) * (t - mean_t) for w, (x, t) in zip(weights, points))
    slope /= sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points))
    latency_s = mean_t - slope * mean_x
    if latency_s < 0:  # noise: a message begins no earlier than it is sent, so the line goes through zero
        latency_s = 0.0
        slope = sum(w * x * t for w, (x, t) in zip(weights, points))
        slope /= sum(w * x * x for w, (x, _) in zip(weights, points))
    if slope <= 0:
        raise ConfigError(f"larger messages took no longer than small ones: {list(points)}; measure again")
    return latency_s, 1 / slope


def hidden_share(work_s: float, messages_s: float, both_s: float) -> float:
    """0 to 1: of messages that take `messages_s` alone, what work of `work_s`, which is no less, does not feel."""
    return min(1.0, max(0.0, 1 - (both_s - work_s) / messages_s))


def measure(device: torch.device, wire: SoloWire, sizes: Sequence[int] = SIZES) -> WireSpeed | None:
    """Gathers of several sizes, all ranks at the same time, to all others at once as the engine's; then one beside matrix
    products. Medians; some seconds. A collective, with the same result on every rank; None on one rank.
    """
    if wire.size == 1:
        return None
    points = []
    for size in sizes:
        gather, sent = _gather(device, wire, size)
        points.append((float(sent), _median_s(device, wire, gather, _SMALL_TURNS if sent < _SMALL_BYTES else _TURNS)))
    points = [(sent, max(row[at][1] for row in wire.exchange(points))) for at, (sent, _) in enumerate(points)]
    latency_s, bandwidth = fitted(points)
    overlap = _overlap(device, wire, min(_OVERLAP_BYTES, max(sizes)))
    return WireSpeed(latency_s / (wire.size - 1), bandwidth, min(wire.exchange(overlap)), tuple(points))


def finish(device: torch.device) -> None:
    """Wait for what the device has been given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gather(device: torch.device, wire: SoloWire, size: int) -> tuple[Callable[[], object], int]:
    """What begins and ends a gather in which a rank sends about `size` bytes, and how many it sends."""
    numel = max(32, size // 4 // (wire.size - 1))
    full, own = torch.ones(numel * wire.size, device=device), torch.ones(numel, device=device)
    return lambda: wire.gather(full, own, 0).close(), 4 * numel * (wire.size - 1)


def _median_s(device: torch.device, wire: SoloWire, action: Callable[[], object], turns: int = _TURNS) -> float:
    """Of turns that all ranks begin together, after one that does not count."""
    taken = []
    for _ in range(turns + 1):
        wire.barrier()
        started = time.perf_counter()
        action()
        finish(device)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def _overlap(device: torch.device, wire: SoloWire, size: int) -> float:
    numel = max(32, size // 4 // (wire.size - 1))
    full, own = torch.ones(numel * wire.size, device=device), torch.ones(numel, device=device)
    messages_s = _median_s(device, wire, lambda: wire.gather(full, own, 0).close())
    a, b = (torch.full((_PRODUCT, _PRODUCT), 0.5, device=device) for _ in range(2))
    once_s = _median_s(device, wire, lambda: torch.mm(a, b))
    # Work for longer than the messages take, and as much on every rank.
    products = max(1, int(2 * max(wire.exchange(messages_s)) / min(wire.exchange(once_s))))

    def work() -> None:
        for _ in range(products):
            torch.mm(a, b)

    def both() -> None:
        under_way = wire.gather(full, own, 0)
        work()
        under_way.close()

    return hidden_share(_median_s(device, wire, work), messages_s, _median_s(device, wire, both))
