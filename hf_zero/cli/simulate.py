"""`hf-zero simulate`: the collectives of one step on any number of ranks, and its time, from the plan."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console

from ..config import size_text
from ..errors import ConfigError
from ..plan.machine import Machine
from ..plan.network import LINKS, Link, Network
from ..tiers.tier import Tier
from .plan import Asked
from .show import print_json, ranks_text, table

NOMINAL_FLOPS = 400e12
NOMINAL_DEVICE_BANDWIDTH = 3.35e12
"""Bytes per second of an H100's memory (NVIDIA's datasheet)."""
NOMINAL_LINK = 64e9
"""Bytes per second in each direction between an H100 and its host (PCIe 5, 128 GB/s both ways together: the same datasheet)."""


def hardware(
    mixed_precision: str, ranks: int, nodes: int, far: str, adapters: int, file: str | None, *, uses_link: bool = False
) -> tuple[Machine, Network]:
    """Return a rank's device and the links between ranks: an H100's, or those of a machine file.

    Args:
        far: name of the link between machines.
        adapters: of one machine; 0: one for each of its ranks.
        uses_link: bytes move between device and host memory in a step.

    Raises:
        ConfigError: the file lacks a speed that is needed.
    """
    dtype = "bfloat16" if mixed_precision == "bf16" else "float32"
    near, device, link = LINKS["nvlink"], NOMINAL_DEVICE_BANDWIDTH, NOMINAL_LINK
    machine = Machine(device_bandwidth=device, link_down=link, link_up=link, flops={dtype: NOMINAL_FLOPS})
    if file is not None:
        machine = Machine.load(file)
        needed: tuple[str, ...] = ("device_bandwidth", "latency", "collective") if ranks > 1 else ("device_bandwidth",)
        needed += ("link_down", "link_up") if uses_link else ()
        lacking = [name for name in needed if getattr(machine, name) is None]
        lacking += [] if dtype in machine.flops else [f"flops[{dtype!r}]"]
        if lacking:
            raise ConfigError(f"{file} has no {', '.join(lacking)}: add what a rank of this machine reaches")
        near = Link(machine.latency or 0.0, machine.collective or 1.0, file, machine.all_reduce)
    return machine, Network(ranks, nodes, near, LINKS[far], adapters)


def run(asked: Asked, network: Network, as_json: bool) -> None:
    """Print the collectives of a step on one rank, and its time."""
    made = asked.plan(device_memory=None, host_memory=None)
    by_kind: dict[str, dict[str, float]] = {}
    for each in made.collectives:
        found = by_kind.setdefault(each.kind, {"collectives": 0, "bytes_sent": 0, "seconds": 0.0})
        found["collectives"] += each.count
        found["bytes_sent"] += round(each.count * each.nbytes)
        found["seconds"] += each.count * network.time_s(each)
    sent_s = sum(found["seconds"] for found in by_kind.values())
    compute_s, update_s = (made.parts.get(part) or 0.0 for part in ("passes compute", "step device"))
    peak_bytes = made.memory.at_peak(Tier.DEVICE)
    if as_json:
        print_json(
            {
                "stage": asked.config.stage,
                "world_size": asked.world_size,
                "nodes": network.nodes,
                "by_kind": by_kind,
                "planned_peak_bytes": peak_bytes,
                "step_s": made.step_s,
                "parts_s": dict(made.parts),
                "machine": asked.machine.to_dict(),
                "network": asdict(network),
            }
        )
        return
    rows = [
        (kind, f"{n['collectives']:,}", f"{n['bytes_sent']:,}", f"{n['seconds'] * 1e3:.3f}")
        for kind, n in by_kind.items()
    ]
    nodes = f"{network.nodes:,} node{'s' if network.nodes > 1 else ''}"
    least = "" if asked.machine.shares_memory else "at least "
    table(
        Console(),
        f"{asked.model.name}: one step, stage {asked.config.stage}, {ranks_text(asked.world_size)} on {nodes}",
        ("kind", "collectives", "bytes sent by a rank", "ms"),
        rows,
        caption=(
            f"step {least}{(made.step_s or 0.0) * 1e3:.3f} ms: computation {compute_s * 1e3:.3f}, optimizer "
            f"{update_s * 1e3:.3f}, communication {sent_s * 1e3:.3f}; planned peak {size_text(peak_bytes)}"
        ),
    )
