"""docs/differences.md: what reads differently from plain training on purpose, and the call that reads the plain value."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.oracle import Run, program
from tests.programs.accessors import full_gradient
from tests.programs.usual import FP32


class Model(nn.Module):
    """Two trained blocks around a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.base, self.last = (nn.Linear(16, 16) for _ in range(3))
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.base(torch.tanh(self.first(x))))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, eps=1e-3)


def _built(run: Run) -> tuple[Any, Model]:
    """A model that is sharded, and a plain one of the same values."""
    model = run.trained_model(Model, adamw)
    torch.manual_seed(0)
    return model, Model()


@program(reference="average", only={"precision": ("bf16",)})
def types_and_values_in_bfloat16(run: Run) -> None:
    model, plain = _built(run)
    run.loss(0).backward()
    run.see(full_gradient(run, model.first.weight), "gradient")
    if not run.is_plain:
        for name in ("first", "base"):
            param, exact = model.get_submodule(name).weight, plain.get_submodule(name).weight
            assert param.dtype == torch.bfloat16
            assert torch.equal(param.detach(), exact.bfloat16())
            assert torch.equal(zero.full_parameter(param), exact)
            assert zero.full_parameter(param).dtype == torch.float32
        state, grad = model.state_dict(), model.first.weight.grad
        assert state["base.weight"].dtype == torch.float32
        assert run.rank or torch.equal(state["base.weight"], plain.base.weight)
        whole = zero.full_gradient(model.first.weight)
        assert grad.dtype == (grad + 0).dtype == whole.dtype == torch.float32
        assert torch.equal(grad + 0, whole)
        assert not torch.equal(whole, whole.bfloat16().float()), "the exact gradient was kept"
        assert run.optimizer.param_groups[0]["params"][0].dtype == torch.float32
    run.update()


@program(reference="average", only=FP32)
def gradients_inside_no_sync(run: Run) -> None:
    for defer in (False, True):
        model, plain = _built(run)
        weight = model.first.weight
        plain(run.inputs(0)).square().mean().backward()
        with run.no_sync(model, defer=defer):
            run.loss(0).backward()
            if not run.is_plain:
                is_own = run.setting.stage < 2 or defer
                shown = plain.first.weight.grad if is_own else zero.full_gradient(weight)
                torch.testing.assert_close(weight.grad + 0, shown)
            if not defer:
                run.see(full_gradient(run, weight), "the mean")
                run.forget_gradients()
        run.loss(1).backward()
        run.sync_gradients()
        run.see(weight.grad, "after a backward outside")
        run.update()


@program(reference="average")
def parameters_and_gradients_as_objects(run: Run) -> None:
    model, _ = _built(run)
    run.loss(0).backward()
    param = model.first.weight
    assert isinstance(param, nn.Parameter)
    assert isinstance(param.grad, Tensor)
    assert run.is_plain or run.optimizer.param_groups[0]["params"][0].dim() == 1
    assert run.is_plain or not (type(param) is nn.Parameter or type(param.grad) is Tensor)
    kept = param.grad
    for name in ("grad", "data"):
        given = torch.ones(param.shape)
        setattr(param, name, given)
        given.zero_()
        assert float(getattr(param, name).sum()) == (0 if run.is_plain else param.numel())
        setattr(param, name, torch.full(param.shape, 0.5))
    run.refuses(zero.StateError, "replaced or cleared since", lambda: kept + 0)
    run.update()
    state = run.optimizer.state[param]["exp_avg"] if run.is_plain else zero.full_optimizer_state(param, "exp_avg")
    run.see(state.shape, "shape of the state")


@program(reference="average")
def a_state_dict_is_of_its_moment(run: Run) -> None:
    model, plain = _built(run)
    kept = copy.deepcopy(model.state_dict()) if run.is_plain else model.state_dict()
    run.step(0)
    later = model.state_dict()
    if run.rank == 0:
        run.see(torch.equal(kept["first.weight"], plain.first.weight), "whether it is as it was")
        run.see(torch.equal(later["first.weight"], kept["first.weight"]), "whether a later one is")


@program(reference="average")
def the_sum_of_gradients(run: Run) -> None:
    """docs/migration.md: the counterpart of `gradient_allreduce_op="sum"`."""
    model, _ = _built(run)
    (run.loss(0) * (run.world if run.is_plain else run.engine_of(model).world_size)).backward()
    run.sync_gradients()
    run.see(model.first.weight.grad, "sum")
    run.update()
