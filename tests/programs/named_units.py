"""`ZeroConfig.units`: modules that are gathered as one, so that ranks may run different parts of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models import generator
from tests.oracle import Run, program

WIDTH, EXPERTS = 8, 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Mixture(nn.Module):
    """Runs only the experts that its batch asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return x + sum(weights[:, [each]] * self.experts[each](x) for each in chosen)


class Towers(nn.Module):
    """Mixtures outside of any block: each expert is a unit, unless `units` names something else."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.first, self.second = Mixture(), Mixture()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        return self.head(self.second(self.first(self.embed(x), chosen), chosen[::-1][:1]))


def batch(rank: int, step: int) -> tuple[Tensor, list[int]]:
    """Rows, and the experts that they use: others on each rank."""
    x = torch.randn(3, WIDTH, generator=generator(rank, step))
    return x, [(rank + step) % EXPERTS] if step % 2 else [rank, 3 - rank, 2][: 1 + rank]


def _sharded(run: Run, units: Any) -> Any:
    model = run.build(Towers)
    return run.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3), units=units)


def _train(run: Run, units: Any, steps: range) -> Any:
    model = _sharded(run, units)
    for step in steps:
        loss = model(*batch(run.rank, step)).square().mean()
        loss.backward()
        run.see(loss, "loss")
        run.update()
        if step == 3:
            with torch.no_grad():
                run.see(model(*batch(run.rank, step)), "evaluated")
    return model


def _named(name: str, units: Any, **options: Any) -> None:
    def run_it(run: Run) -> None:
        _train(run, units, range(6))

    program(run_it, name=name, reference="average", **options)


STAGE_3 = {"stage": (3,)}
_named("by_class", "Mixture", only=STAGE_3)
_named("by_a_name_and_a_pattern", ["first.experts", "second"], only=STAGE_3)
_named("the_whole_model", ("Towers",), only=STAGE_3)
_named("everything", ("*",), only=STAGE_3)
_named("by_class_and_a_pattern_inside", ("Mixture", "*.experts.*"), only=STAGE_3)


@program(reference="average", only={"kept": (False,), "deferred": (False,)})
def saved_and_loaded_by_other_units(run: Run) -> None:
    first = _train(run, ("Mixture",), range(4))
    run.save(first)
    for others in ((), ("Mixture",), ("first", "*.experts"), ("Expert",)):
        again = _sharded(run, others)
        run.load(again)
