"""Evaluation in another type (`bf16_full_eval`), inside and around `unsharded` and `GatheredParameters`.

Masters keep every digit, edits count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from tests.models import adamw
from tests.oracle import AUTOCAST, Run, program
from tests.programs.state_dict_entries import see_same, whole

BF16 = torch.bfloat16
X = torch.ones(2, 6)


class Scale(nn.Module):
    """Its result has the type of its buffer where that is wider."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.full((3,), 1.003), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.by


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 3), Scale())


def train(run: Run, step: int) -> None:
    run.model(run.inputs(step, 4, 6)).float().square().mean().backward()
    run.update()


def shown_in(run: Run, dtype: torch.dtype) -> AbstractContextManager[Any]:
    engine = run.engine_of(run.model)
    return contextlib.nullcontext() if engine is None else engine.shown_in(dtype)


class Evaluation:
    """Compares an evaluation in bfloat16 with that of a plain model of bfloat16 with the same weights."""

    def __init__(self, run: Run) -> None:
        self.run, self.before = run, whole(run)
        plain = normed()
        plain.load_state_dict(self.before)
        dtype = AUTOCAST.get(run.setting.precision)
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype is not None):
            self.expected = plain.to(BF16)(X.to(BF16))

    def see(self, what: str) -> None:
        if self.run.is_plain:
            self.run.see((True, True), what)
            return
        with torch.no_grad():
            output = self.run.model(X.to(BF16))
        types = {output.dtype, *(param.dtype for param in self.run.model.parameters())}
        self.run.see((types == {BF16}, torch.equal(output, self.expected)), what)

    def see_kept(self, what: str) -> None:
        see_same(self.run, self.before, what)

    def see_state_dict(self, what: str) -> None:
        state = self.run.model.state_dict()
        see_same(self.run, state if self.run.rank == 0 else self.before, what)


def nested(run: Run) -> None:
    model = run.trained_model(normed, adamw)
    for step in range(2):
        train(run, step)
    found = Evaluation(run)
    for in_compute_dtype in (False, True):
        with run.unsharded(model, in_compute_dtype=in_compute_dtype):
            shown = {name: param.detach().clone() for name, param in model.named_parameters()}
            with shown_in(run, BF16):
                found.see("evaluation inside unsharded")
                found.see_state_dict("a state dict in evaluation")
                with shown_in(run, BF16):
                    found.see("evaluation twice inside")
                with shown_in(run, torch.float32):
                    run.see({param.dtype for param in model.parameters()}, "types in float32")
                found.see("evaluation behind float32")
                found.see_kept("masters in evaluation")
            now = model.named_parameters()
            run.see([name for name, p in now if p.dtype != shown[name].dtype or not torch.equal(p, shown[name])])
        found.see_kept("masters after evaluation inside")
        with shown_in(run, BF16):
            with run.unsharded(model, in_compute_dtype=in_compute_dtype):
                found.see("evaluation around unsharded")
                found.see_state_dict("a state dict in both")
            found.see("evaluation after unsharded")
        found.see_kept("masters after evaluation around")
    with shown_in(run, BF16):
        with run.gathered(model):
            run.see([name for name, param in model.named_parameters() if not torch.equal(param, found.before[name])])
        found.see("evaluation after gathered weights")
    with run.gathered(model[0].weight):
        with shown_in(run, BF16):
            found.see("evaluation inside gathered weights")
        run.see(torch.equal(model[0].weight, found.before["0.weight"]), "a gathered weight after evaluation")
    found.see_kept("masters at last")
    for step in range(2, 4):
        train(run, step)


def edited(run: Run) -> None:
    model = run.trained_model(normed, adamw)
    train(run, 0)
    weight, expected = model[0].weight, whole(run)

    def whole_weights() -> AbstractContextManager[Any]:
        return run.unsharded(model)

    def evaluation() -> AbstractContextManager[Any]:
        return shown_in(run, BF16)

    def gathered() -> AbstractContextManager[Any]:
        return run.gathered(weight, modifier_rank=1)

    def write(how: str, row: int, value: float) -> None:
        new = weight.detach().clone() if how == "replaced" else weight
        new[row, 1:3] = value
        if new is not weight:
            weight.data = new

    ways: list[tuple[Callable[[], AbstractContextManager[Any]], ...]] = [
        (evaluation,), (whole_weights, evaluation), (evaluation, whole_weights),
        (gathered, evaluation), (evaluation, gathered), (whole_weights, evaluation, gathered),
    ]  # fmt: skip
    for number, entered in enumerate(ways):
        for how in ("in place", "replaced"):
            value = float(number + 2 + 100 * (how == "replaced"))
            expected["0.weight"][number, 1:3] = value
            with contextlib.ExitStack() as stack, torch.no_grad():
                for enter in entered:
                    stack.enter_context(enter())
                    if enter is not gathered:
                        model(X.to(next(model.parameters()).dtype))
                if run.is_plain or gathered not in entered or run.rank == 1:
                    write(how, number, value)
                if gathered not in entered and (number % 2 == 0) is (how == "replaced"):  # a look may write edits back
                    see_same(run, expected, f"edits {how} inside {number}")
            see_same(run, expected, f"edits {how} after {number}")
            train(run, number)
            expected = whole(run)


def left_by_an_error(run: Run) -> None:
    model = run.trained_model(normed, adamw)
    train(run, 0)
    before, dtypes = whole(run), [param.dtype for param in model.parameters()]
    for entered in (
        (lambda: run.unsharded(model), lambda: shown_in(run, BF16)),
        (lambda: shown_in(run, BF16), lambda: run.unsharded(model)),
        (lambda: run.gathered(model, modifier_rank=0), lambda: shown_in(run, BF16)),
        (lambda: shown_in(run, BF16), lambda: run.gathered(model, modifier_rank=0)),
    ):
        with contextlib.suppress(ValueError), contextlib.ExitStack() as stack:
            for enter in entered:
                stack.enter_context(enter())
            raise ValueError("no batch")
        run.see([param.dtype for param in model.parameters()] == dtypes, "whether types are as before")
        see_same(run, before, "masters")
    train(run, 1)


for act in (nested, edited, left_by_an_error):
    for each in ("fp32", "bf16"):
        program(act, name=f"{act.__name__}_{each}", reference="average", only={"precision": (each,)})
