"""Rows of settings that programs run under: values by factor, which of them go together, and pairwise coverage."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KEEPS = "keep_gathered"
FACTORS: Mapping[str, tuple[Any, ...]] = {
    "ranks": (1, 2, 3, 4),
    "stage": (0, 1, 2, 3),
    "tier": ("none", "cpu", "disk", "cpu/cpu", "disk/disk", "none/cpu", "cpu/disk", "disk/cpu"),
    "precision": ("fp32", "bf16", "fp16"),
    "replicas": (1, 2),
    "wire": ("none", "int8"),
    "kept": (False, True),
    "deferred": (False, True),
    "debug": (False, True),
}
"""Every value of every factor."""
EVERYDAY: Mapping[str, tuple[Any, ...]] = {
    **FACTORS,
    "ranks": (2,),
    "precision": ("fp32", "bf16"),
    "tier": ("none", "cpu", "disk", "cpu/cpu", "disk/disk"),
    "wire": ("none",),
    "debug": (False,),
}
"""What a program covers by default: two ranks, exact transport. Programs of wide use ask for more."""


@dataclass(frozen=True)
class Setting:
    """One row.

    Attributes:
        ranks: processes.
        tier: where masters, gradients and optimizer state are stored; behind the slash, parameters between uses (stage 3).
        kept: `keep_gathered` leaves room to keep units gathered from forward to backward (stage 3).
        deferred: the model is built under `zero.Init`.
        debug: ranks compare what they must have alike.
        alone: the core shards the model, without observers (`hf_zero.engine.shard`): tests/engine/test_core_alone.py.
        roads: what moves bytes, where it is not the usual: a name of tests/kit/transports.py or deferred_wire.py.
    """

    ranks: int = 2
    stage: int = 2
    tier: str = "none"
    precision: str = "fp32"
    replicas: int = 1
    wire: str = "none"
    kept: bool = False
    deferred: bool = False
    debug: bool = False
    alone: bool = False
    roads: str = ""

    def __str__(self) -> str:
        default = Setting()
        names = [field.name for field in dataclasses.fields(self)]
        shown = [name for name in names if name == "stage" or getattr(self, name) != getattr(default, name)]
        return " ".join(f"{name}={getattr(self, name)}" for name in shown)

    @property
    def optimizer_tier(self) -> str:
        return self.tier.partition("/")[0]

    @property
    def params_tier(self) -> str:
        return self.tier.partition("/")[2] or "none"

    @property
    def is_valid(self) -> bool:
        """Whether the package accepts this combination."""
        return (
            (self.stage > 0 or (self.replicas == 1 and self.wire == "none"))
            and (self.stage > 0 or self.ranks == 1 or self.tier == "none")
            and self.ranks % self.replicas == 0
            and (self.ranks > 1 or (self.replicas == 1 and self.wire == "none"))
            and (self.stage == 3 or self.params_tier == "none")
            and not (self.debug and self.wire != "none")
            and (not self.kept or (self.stage == 3 and self.tier == "none"))
        )

    def config(self, offload_dir: str) -> dict[str, Any]:
        """Keyword arguments of `zero.ZeroConfig`."""
        return {
            "stage": self.stage,
            "offload_optimizer": self.optimizer_tier,
            "offload_params": self.params_tier,
            "offload_dir": offload_dir,
            "replicas": self.replicas,
            "wire": self.wire,
            KEEPS: "1GiB" if self.kept else None,
            "stall_s": 20.0,
            "debug": self.debug,
        }


def is_sharded(setting: Setting) -> bool:
    """Whether a parameter's elements are on several ranks, so that ranks cannot differ in its value."""
    return setting.stage > 0 and setting.ranks > setting.replicas


def product(factors: Mapping[str, Sequence[Any]], accept: Callable[[Setting], bool]) -> list[Setting]:
    """Return every valid row over these values."""
    rows = (Setting(**dict(zip(factors, values))) for values in itertools.product(*factors.values()))
    return [row for row in rows if row.is_valid and accept(row)]


def values(row: Any) -> list[tuple[str, Any]]:
    """Return the row, a dataclass, as pairs of a factor and its value."""
    return [(field.name, getattr(row, field.name)) for field in dataclasses.fields(row)]


@functools.cache
def pairs(row: Any) -> frozenset[Any]:
    """Return every two values of the row."""
    return frozenset(itertools.combinations(values(row), 2))


def covering(rows: Sequence[Any], seed: str) -> list[Any]:
    """Return rows that together hold every pair of values that any of `rows` holds.

    Args:
        seed: an order in which equally good rows are taken, so that programs differ in what else they meet.
    """
    rows = random.Random(seed).sample(rows, len(rows))
    missing: set[Any] = set().union(*map(pairs, rows))
    chosen: list[Any] = []
    while missing:
        chosen.append(max(rows, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


def rarest(rows: Iterable[Setting], met: Counter[Any]) -> Setting:
    """Return the row whose pairs of values were met least often, and count it in `met`."""
    # `fsum`: the order of a set differs between processes, and with it a rounded sum.
    chosen = max(rows, key=lambda row: math.fsum(1 / (1 + met[pair]) for pair in pairs(row)))
    met.update(pairs(chosen))
    return chosen
