"""Methods of an optimizer's own: those that only read may be called on one rank, those that write count on all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tests.oracle import Run, program
from tests.programs.usual import FP32, see_weights
from tests.settings import Setting


class Own(torch.optim.SGD):
    """SGD with what optimizers of other packages have besides `step`."""

    def current_lr(self) -> float:
        return float(self.param_groups[0]["lr"])

    @property
    def lr(self) -> float:
        return self.current_lr()

    def describe(self) -> str:
        return f"{self!r} {len(self.state)} {sum(p.numel() for group in self.param_groups for p in group['params'])}"

    def set_lr(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr

    def forget(self) -> None:
        for state in self.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()

    def raises(self) -> None:
        raise KeyError("of the optimizer's own")

    def _params(self) -> Iterator[nn.Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    @torch.no_grad()
    def eval(self) -> None:
        for param in self._params():
            param.data.mul_(0.5)

    @torch.no_grad()
    def train(self) -> None:
        for param in self._params():
            param.data.mul_(2.0)

    @torch.no_grad()
    def shrink(self) -> None:
        torch._foreach_mul_([*self._params()], 0.75)

    def replace(self) -> None:
        for param in self._params():
            param.data = param.detach() * 0.5

    @torch.no_grad()
    def first_step(self) -> None:
        self._kept = [param.data.clone() for param in self._params()]
        for param in self._params():
            param.mul_(1.5)

    @torch.no_grad()
    def second_step(self) -> None:
        for param, value in zip(self._params(), self._kept, strict=True):
            param.data = value
        self.step()

    @contextmanager
    def halved(self) -> Iterator[None]:
        self.eval()
        yield
        self.train()


def net() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 7), nn.Linear(7, 3, bias=False))
    with torch.no_grad():
        model[0].weight[16:] = 0  # where one rank has only zeros, no value changes there
    return model


def _start(run: Run) -> Any:
    run.trained_model(net, lambda model: Own(model.parameters(), lr=0.05, momentum=0.5))
    return run.optimizer


def _backward(run: Run, step: int) -> None:
    run.model(run.inputs(step, 4, 9)).square().mean().backward()


def _see_outputs(run: Run) -> None:
    with torch.no_grad():
        run.see(run.model(torch.ones(2, 9)), "outputs")


@program(reference="average")
def reads_on_one_rank(run: Run) -> None:
    optimizer = _start(run)

    def read() -> None:
        if run.rank == 0:
            found = [optimizer.current_lr(), optimizer.lr, "Own" in optimizer.describe()]
            try:
                optimizer.raises()
            except KeyError as error:
                found.append(str(error))
            run.see(found, "what is read")

    for step in range(3):
        read()
        _backward(run, step)
        read()
        if run.rank == 1:
            optimizer.set_lr(0.05)
        run.update()
        read()
        with torch.no_grad():  # the read gathers, on every rank
            run.see(sum(float(param.sum()) for param in run.model.parameters()), "a sum")
        read()
        with run.unsharded(run.model):
            read()


@program(reference="average")
def clears_on_one_rank(run: Run) -> None:
    """Before a forward there is nothing to clear."""
    optimizer = _start(run)
    for step in range(3):
        if run.rank == 0:
            optimizer.zero_grad()
        _backward(run, step)
        run.update()


def _in_memory(setting: Setting) -> bool:
    """Tensors of the disk tier take no writes."""
    return setting.optimizer_tier != "disk"


@program(reference="average", only=FP32, accept=_in_memory)
def writes(run: Run) -> None:
    optimizer = _start(run)
    for step in range(2):
        _backward(run, 3 * step)
        run.update()
        for write in (optimizer.eval, optimizer.train, optimizer.shrink, optimizer.replace):
            write()
            _see_outputs(run)
        optimizer.eval()
        see_weights(run, run.model)
        optimizer.train()
        _backward(run, 3 * step + 1)
        optimizer.first_step()
        optimizer.zero_grad()
        _backward(run, 3 * step + 2)
        optimizer.second_step()
        optimizer.zero_grad()
        optimizer.forget()
        with optimizer.halved():
            _see_outputs(run)
        with run.unsharded(run.model):
            optimizer.eval()
        optimizer.train()
        see_weights(run, run.model)
    optimizer.shrink()  # the state dict has it


class Lookahead(torch.optim.Optimizer):
    """A wrapper that shares its base's groups, as published implementations do."""

    def __init__(self, base: Any, k: int = 2) -> None:
        self.base, self.k, self.count = base, k, 0
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults
        self.slow: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)

    @torch.no_grad()
    def sync(self) -> None:
        fast = [param for group in self.param_groups for param in group["params"]]
        if self.slow:
            for slow, param in zip(self.slow, fast, strict=True):
                slow.lerp_(param, 0.5)
                param.copy_(slow)
        else:
            self.slow = [param.detach().clone() for param in fast]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.count += 1
        if self.count % self.k == 0:
            self.sync()

    def steps(self) -> int:
        return self.count

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)


@program(reference="average", only=FP32, accept=_in_memory)
def wrapped(run: Run) -> None:
    """The base is sharded; the wrapper is user code's."""
    wrapper = Lookahead(_start(run))
    for step in range(5):
        _backward(run, step)
        wrapper.step()
        wrapper.zero_grad()
        if run.rank == 0:
            run.see([wrapper.steps(), wrapper.current_lr()], "what is read")


class Muon(torch.optim.Muon):
    def current_lr(self) -> float:
        return float(self.param_groups[0]["lr"])

    @torch.no_grad()
    def shrink(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(0.5)


@program(reference="average", only=FP32, accept=_in_memory)
def of_full_matrices(run: Run) -> None:
    model = run.trained_model(net, lambda model: Muon([p for p in model.parameters() if p.dim() == 2], lr=0.05))
    optimizer: Any = run.optimizer
    for step in range(2):
        if run.rank == 0:
            run.see(optimizer.current_lr(), "the rate")
        _backward(run, step)
        run.update()
        optimizer.shrink()
        model.zero_grad()
