"""`hf-zero simulate`: the collectives of one step on any number of ranks, and its time, from the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console

from ..config import DTYPE_ALIASES, ranks_text, size_text
from ..errors import ConfigError
from ..plan.machine import Machine
from ..plan.network import LINKS, Network
from ..tiers.tier import Tier
from .plan import PlanRequest
from .show import print_json, table

NOMINAL_FLOPS = 400e12
NOMINAL_DEVICE_BANDWIDTH = 3.35e12
"""Bytes per second of an H100's memory (NVIDIA's datasheet)."""
NOMINAL_LINK = 64e9
"""Bytes per second in each direction between an H100 and its host (PCIe 5, 128 GB/s both ways together: the same datasheet)."""
_OFFLOAD = {"none": (), "cpu": ("link_down", "link_up"), "disk": ("link_down", "link_up", "disk_read", "disk_write")}
"""The speeds that each tier of activations needs."""


def hardware(given: Mapping[str, Any]) -> tuple[Machine, Network]:
    """Return a rank's device and the links between ranks: an H100's, or those of a machine file.

    Args:
        given: the flags of the command.

    Raises:
        ConfigError: the machine lacks a speed that is needed.
    """
    dtype, near = DTYPE_ALIASES.get(given["mixed_precision"], "float32"), LINKS["nvlink"]
    file, ranks = given["machine"], given["world_size"]
    nominal = Machine(
        device_bandwidth=NOMINAL_DEVICE_BANDWIDTH, link_down=NOMINAL_LINK, link_up=NOMINAL_LINK, latency=near.latency_s,
        collective=near.bandwidth, flops={dtype: NOMINAL_FLOPS},
    )  # fmt: skip
    machine = nominal if file is None else Machine.load(file)
    needed = ("device_bandwidth", *(("latency", "collective") if ranks > 1 else ()))
    lacking = [name for name in needed + _OFFLOAD[given["zero_offload_activations"]] if getattr(machine, name) is None]
    lacking += [] if machine.flops.get(dtype) else [f"flops[{dtype!r}]"]
    if lacking:
        raise ConfigError(f"{file or 'an H100'} has no {', '.join(lacking)}: add what a rank reaches to --machine FILE")
    return machine, Network(ranks, given["nodes"], LINKS[given["network"]])


def run(request: PlanRequest, network: Network, as_json: bool) -> None:
    """Print the collectives of a step on one rank, and its time."""
    made = request.plan(device_memory=None, host_memory=None)
    by_kind: dict[str, dict[str, float]] = {}
    for each in made.step.collectives:
        found = by_kind.setdefault(each.kind, {"collectives": 0, "bytes_sent": 0, "seconds": 0.0})
        found["collectives"] += each.count
        found["bytes_sent"] += round(each.count * each.nbytes)
        found["seconds"] += each.count * network.time_s(each, request.machine)
    peak_bytes = made.memory.at_peak(Tier.DEVICE)
    if as_json:
        print_json(
            {
                "stage": request.config.stage,
                "world_size": request.world_size,
                "nodes": network.nodes,
                "by_kind": by_kind,
                "planned_peak_bytes": peak_bytes,
                "step_s": made.step.seconds,
                "parts_s": made.parts,
                "machine": asdict(request.machine),
                "network": asdict(network),
            }
        )
        return
    rows = [
        (kind, f"{n['collectives']:,}", f"{n['bytes_sent']:,}", f"{n['seconds'] * 1e3:.3f}")
        for kind, n in by_kind.items()
    ]
    nodes = f"{network.nodes:,} node{'s' if network.nodes > 1 else ''}"
    sent_s = sum(found["seconds"] for found in by_kind.values())
    spent = made.step.seconds, made.parts.get("passes compute"), made.parts.get("step device"), sent_s
    step, compute, update, sent = (f"{(seconds or 0.0) * 1e3:.3f}" for seconds in spent)
    table(
        Console(),
        f"{request.model.name}: one step, stage {request.config.stage}, {ranks_text(request.world_size)} on {nodes}",
        ("kind", "collectives", "bytes sent by a rank", "ms"),
        rows,
        caption=(
            f"step {'' if request.machine.shares_memory else 'at least '}{step} ms: computation {compute}, "
            f"optimizer {update}, communication {sent}; planned peak {size_text(peak_bytes)}"
        ),
    )
