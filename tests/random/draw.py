"""Makes a program from a seed, and a failing program smaller."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from types import FunctionType

from tests.random import changes, loops
from tests.random.models import Arch, random_arch
from tests.random.user import MORE_OPTIMIZERS, OPTIMIZERS, Case, User
from tests.settings import Setting

KINDS: dict[str, Callable[[User], None]] = {
    name: function
    for module in (loops, changes)
    for name, function in vars(module).items()
    if isinstance(function, FunctionType) and function.__module__ == module.__name__ and not name.startswith("_")
    if name != "fits"
}
"""All calls: the functions of `loops` and `changes`."""


def draw(
    seed: int,
    off: frozenset[str] = frozenset(),
    ranks: tuple[int, ...] = (1, 2, 2, 3),
    stages: tuple[int, ...] = (0, 1, 2, 3, 3),
) -> Case:
    """Return the program of a seed; calls that are `off` are replaced, the others stay as they are."""
    rng, later = random.Random(f"{seed}/setting"), random.Random(f"{seed}/extras")
    world, stage = rng.choice(ranks), rng.choice(stages)
    tiers = ("none", "none", "none", "cpu", "disk")
    precision = rng.choice(("fp32", "fp32", "bf16"))
    states = rng.choice(tiers) if world == 1 or stage > 0 else "none"
    params = rng.choice(tiers) if world == 1 or stage == 3 else "none"
    optimizer, groups, left_out = rng.choice((*OPTIMIZERS, "sgd")), rng.choice((1, 2)), rng.random() < 0.15
    replicas = 1 if stage == 0 else later.choice([n for n in (1, 1, 1, 2, 3) if world % n == 0])
    if later.random() < 0.4:
        optimizer = later.choice(sorted(MORE_OPTIMIZERS))
    setting = Setting(
        ranks=world,
        stage=stage,
        tier=f"{states}/{params}" if params != "none" else states,
        precision=precision,
        replicas=replicas,
        deferred=later.random() < 0.25,
        debug=later.random() < 0.1,
    )
    kept = replace(setting, kept=True)
    if kept.is_valid and later.random() < 0.3:
        setting = kept
    arch = random_arch(random.Random(f"{seed}/arch"))
    case = Case(seed, setting, optimizer, groups, left_out, arch)
    rng, names = random.Random(f"{seed}/ops"), sorted(KINDS)
    fitting = [name for name in names if name not in off and getattr(KINDS[name], "fits", lambda case: True)(case)]
    calls = []
    for _ in range(rng.choice((6, 9, 12))):
        kind, own = rng.choice(names), rng.randrange(10**6)
        calls.append(f"{kind if kind in fitting else random.Random(own).choice(fitting)}:{own}")
        if rng.random() < 0.4:
            calls.append(f"step:{rng.randrange(10**6)}")
    return replace(case, calls=" ".join(calls))


def simpler(case: Case) -> Iterator[Case]:
    """Yield programs to try in place of this one, the most drastic first."""
    calls, blocks, plain = case.calls.split(), case.arch.blocks.split(), Case()
    if len(calls) > 3:
        yield replace(case, calls=" ".join(calls[len(calls) // 2 :]))
        yield replace(case, calls=" ".join(calls[: len(calls) // 2]))
    for name in [field.name for field in fields(Setting) if field.name != "stage"]:
        yield replace(case, setting=replace(case.setting, **{name: getattr(plain.setting, name)}))
    for name in ("optimizer", "groups", "left_out"):
        yield replace(case, **{name: getattr(plain, name)})
    for i in range(len(calls)) if len(calls) > 1 else ():
        yield replace(case, calls=" ".join(calls[:i] + calls[i + 1 :]))
    for i in range(len(blocks)):
        for word in ("", "mlp", blocks[i].partition(":")[0]):
            if other := " ".join([*blocks[:i], word, *blocks[i + 1 :]]).strip():
                yield replace(case, arch=replace(case.arch, blocks=other))
    for field in fields(Arch):
        if field.name != "blocks":
            yield replace(case, arch=replace(case.arch, **{field.name: field.default}))
