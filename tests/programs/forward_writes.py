"""Weights that a forward writes, or user code right after one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.oracle import Refused, Run, program
from tests.programs.usual import is_sharded, see_weights
from tests.programs.writes import set_full, set_gathered, set_local


class Codes(nn.Module):
    """A code book that each forward writes in a way of its own."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 33), nn.Linear(33, 3)
        self.inner = nn.Sequential(nn.Linear(33, 33), Book(how))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "bound":
            _bound(self.first)
        return self.last(self.inner(self.first(x)))


def _bound(layer: nn.Linear) -> None:
    """Writes a weight of a module of torch's, whose code does not say so."""
    layer.weight.data.clamp_(-0.1, 0.1)


class Book(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.zeros(9, 33), requires_grad=False)
        self.gain = nn.Parameter(torch.ones(33))
        self.how, self.writes = how, True

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.how == "counted":
            with torch.no_grad():
                self.gain.clamp_(-0.9, 0.9)
        out = x * self.gain.clone() + self.code.detach().sum(dim=0) * 0.01
        if self.training:
            match self.how:
                case "data":
                    self.code.data.add_(1)
                case "counted":
                    with torch.no_grad():
                        self.code.add_(1)
                case "replaced":
                    self.code.data = self.code.data + 1
                case "trained":
                    if self.writes:
                        self.gain.data.mul_(0.5)
        return out


@program(more={"ranks": (1, 2)})
def written_in_a_forward(run: Run) -> None:
    for how in ("data", "counted", "replaced", "trained", "bound"):
        model = run.trained_model(lambda how=how: Codes(how))
        book = model.inner[1]
        for step in range(3):
            book.writes = step != 1
            loss = run.loss(step)
            run.see(loss, f"loss of {how}")
            loss.backward()
            run.update()
        model.eval()
        with torch.no_grad():
            run.see(run.loss(4), f"evaluation of {how}")
        see_weights(run, model, how)


@program(reference="average")
def written_after_a_forward(run: Run) -> None:
    """After a forward with a graph the last unit is still gathered: that is no edit of what is written now."""
    model = run.trained_model(lambda: nn.Sequential(nn.Linear(16, 33), Book("")))
    code = model[1].code
    for number, way in enumerate((set_full, set_local, set_gathered, "load_state_dict"), 1):
        run.loss(number)
        value = torch.full((9, 33), float(number))
        if way == "load_state_dict":
            model.load_state_dict({"1.code": value}, strict=False)
        else:
            way(run, code, float(number) if way is set_local else value)
        if not run.is_plain:
            run.engine_of(model).refresh()
        with run.unsharded(model):
            run.see(code, f"code after write {number}")


class FirstBatch(nn.Module):
    """Takes its first values from the first batch that it sees, which differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(16, 5), nn.Parameter(torch.zeros(5))
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if not self.ready:
            self.shift.data.copy_(-x.detach().mean(dim=0))
            self.ready = True
        return x + self.shift


@program(
    only={"stage": (1, 2, 3)},
    refused=(Refused(zero.RankMismatchError, "parameter 'shift' is not on rank 1 what it is on rank 0", is_sharded),),
    accept=is_sharded,
)
def first_values_by_rank(run: Run) -> None:
    run.trained_model(FirstBatch)
    run.step(0)
    run.step(1)
