"""Rows of settings that programs run under: values by factor, which of them go together, and pairwise coverage."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
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
"""Every value of every factor. `make test-all` runs their product, `make test` every pair of a theme's everyday values."""
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


def product(factors: Mapping[str, Sequence[Any]], accept: Callable[[Setting], bool]) -> list[Setting]:
    """Return every valid row over these values."""
    rows = (Setting(**dict(zip(factors, values))) for values in itertools.product(*factors.values()))
    return [row for row in rows if row.is_valid and accept(row)]


@functools.cache
def combinations(row: Setting, strength: int) -> frozenset[Any]:
    """Return every combination of `strength` values that a row holds."""
    values = [(field.name, getattr(row, field.name)) for field in dataclasses.fields(Setting)]
    return frozenset(itertools.combinations(values, strength))


@functools.cache
def everyday(row: Setting, strength: int) -> frozenset[Any]:
    """Return those of values that every program goes with."""
    found = combinations(row, strength)
    return frozenset(some for some in found if all(value in EVERYDAY[name] for name, value in some))


def _greedy(held: Mapping[Setting, Set[Any]], also: Mapping[Setting, Set[Any]] | None = None) -> list[Setting]:
    """Return rows that together hold all that any row holds: next comes the one that adds most, of that or else of `also`."""
    missing: set[Any] = set().union(*held.values())
    chosen: list[Setting] = []
    while missing:
        met = set().union(*(also[row] for row in chosen)) if also else set()
        best = max(held, key=lambda row: (len(held[row] & missing), len(also[row] - met) if also else 0))
        chosen.append(best)
        missing -= held[best]
    return chosen


def _shuffled(rows: Iterable[Setting], seed: str) -> list[Setting]:
    """In an order of `seed`'s own, so that programs differ in which further combinations they meet."""
    rows = [*rows]
    random.Random(seed).shuffle(rows)
    return rows


def covering(rows: Iterable[Setting], strength: int, seed: str) -> list[Setting]:
    """Return rows that together hold every combination of `strength` values (2: every pair) that any of `rows` holds."""
    return _greedy({row: combinations(row, strength) for row in _shuffled(rows, seed)})


def essentials(row: Setting) -> set[Any]:
    """Return what each program meets in the default run, as far as this row holds it."""
    values = {(name, getattr(row, name)) for name in ("ranks", "precision", "replicas", "wire", "deferred", "debug")}
    tiers = {tier for tier in (row.optimizer_tier, row.params_tier) if tier != "none"}
    is_released = row.stage == 3 and row.ranks > row.replicas and not tiers and not row.kept
    return values | tiers | ({"released"} if is_released else set()) | ({"stays"} if row.stage in (1, 2) else set())


def shared(wanted: Mapping[str, Mapping[Setting, Set[Any]]]) -> dict[str, list[Setting]]:
    """Return rows by program, for programs of one theme.

    Args:
        wanted: by program, its valid rows with what each of them holds of what that program has to meet. Beside it, the
            programs share every pair of everyday values that any of their rows holds; fewer than five, every value.
    """
    strength = 2 if len(wanted) >= 5 else 1
    missing: set[Any] = set().union(*(everyday(row, strength) for rows in wanted.values() for row in rows))
    chosen: dict[str, list[Setting]] = {}
    for name, rows in wanted.items():
        held = {row: rows[row] for row in _shuffled(rows, name)}
        chosen[name] = _greedy(held, {row: everyday(row, strength) & missing for row in rows})
        missing -= set().union(*(everyday(row, strength) for row in chosen[name]))
    while missing:
        name, row = max(
            ((name, row) for name, rows in wanted.items() for row in rows),
            key=lambda each: (len(everyday(each[1], strength) & missing), -len(chosen[each[0]])),
        )
        chosen[name].append(row)
        missing -= everyday(row, strength)
    return chosen
