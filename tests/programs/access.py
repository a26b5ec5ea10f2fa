"""`GatheredParameters`, and whole or local values of parameters, gradients and optimizer state."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from tests.models import Odd, adamw, mlp
from tests.oracle import Run, program
from tests.programs.accessors import (
    full_gradient,
    full_optimizer_state,
    full_parameter,
    set_full_gradient,
    set_full_optimizer_state,
    set_full_parameter,
)
from tests.programs.architectures import OddShapes, on_tokens
from tests.programs.clearing import Spectral
from tests.programs.usual import FP32, is_sharded, see_weights, without_memory

RANKS = {"ranks": (1, 2, 3)}


def see_gathered(run: Run, model: nn.Module, what: str) -> None:
    with run.gathered(model):
        for name, param in model.named_parameters():
            run.see(param, f"gathered {name} {what}")


@program(reference="average", more=RANKS)
def gathered_edits(run: Run) -> None:
    """The edits of one rank count, in the next forward and step."""
    _gathered_edits(run)


@program(reference="average", only={"ranks": (4,), "replicas": (2,)})
def gathered_edits_of_replicas(run: Run) -> None:
    _gathered_edits(run)


def _gathered_edits(run: Run) -> None:
    model = run.trained_model(Odd)
    run.step(0)
    see_gathered(run, model, "after a step")
    last = run.world - 1
    params = [model.first.weight, *model.norm.parameters()]
    with run.gathered(params, modifier_rank=last), torch.no_grad():
        model.norm.bias.fill_(float(last if run.is_plain else run.rank))
        if run.is_plain or run.rank == last:
            model.first.weight[3:5] = 1.0
            model.norm.weight.data = torch.full((33,), 0.5, dtype=model.norm.weight.dtype)
    see_gathered(run, model, "after edits")
    if run.setting.stage == 3 and is_sharded(run.setting) and not run.setting.kept:
        assert all(map(without_memory, model.norm.parameters())), "parameters are not released"
    for name, value in model.state_dict().items():
        run.see(value if run.rank == 0 else None, f"state dict {name}")
    with torch.no_grad():
        run.see(run.loss(1), "evaluation")
    run.step(2)


def _edit(run: Run, params: Any, modifier: int | None, change: Callable[[], object]) -> None:
    with run.gathered(params, modifier_rank=modifier), torch.no_grad():
        change()


def _refused_edits(run: Run, model: Any, name: str) -> None:
    """They are undone."""
    weight, last = model.first.weight, run.world - 1
    both = [weight, model.norm.weight]

    def add() -> None:
        if run.rank == last:
            weight.data = weight + 1.0

    def replace() -> None:
        weight.data = torch.zeros(2)

    def fail() -> None:
        weight.zero_()
        raise ZeroDivisionError("of the loop")

    run.refuses(zero.StateError, rf"{name}.* was edited .* on rank {last}", lambda: _edit(run, both, None, add))
    run.refuses(
        zero.ZeroError,
        "edit values in place only|keeps its shape|has another shape",
        lambda: _edit(run, both, 0, replace),
    )
    run.refuses(ZeroDivisionError, "of the loop", lambda: _edit(run, both, 0, fail))
    run.refuses(zero.ConfigError, "modifier_rank must be", lambda: _edit(run, both, run.world, lambda: None))
    run.refuses(zero.ConfigError, "found a tuple", lambda: zero.GatheredParameters(model.named_parameters()))
    if not run.is_plain and run.rank != last:  # the edits of other ranks do not count
        _edit(run, both, last, lambda: weight.zero_())
    else:
        _edit(run, both, last, lambda: None)
    with run.gathered(model.parameters(), enabled=False):
        run.see(full_parameter(run, weight), "weight after refused edits")
    with run.gathered([weight], modifier_rank=0):
        with run.gathered(model), torch.no_grad():
            weight.fill_(0.25)
            run.see(model.norm.weight, "other weight in nested contexts")
        run.see(weight, "weight after the inner context")
    run.see(full_parameter(run, weight), "weight edited in nested contexts")


@program(reference="average", more=RANKS)
def refused_edits(run: Run) -> None:
    model = run.trained_model(Odd)
    run.step(0)
    _refused_edits(run, model, "'first.weight'")
    with run.gathered([model.last.weight], modifier_rank=0), torch.no_grad():
        model.last.weight.mul_(0.5)
        run.see(run.loss(1), "evaluation inside")
    with torch.no_grad():
        run.see(run.loss(1), "evaluation after it")
    run.refuses(zero.StateError, "belongs to no sharded model", lambda: zero.full_parameter(nn.Linear(2, 2).weight))
    run.step(2)


@program(reference="average", more=RANKS, only={"deferred": (True,)})
def edits_before_sharding(run: Run) -> None:
    """Of parameters created under `zero.Init`; other parameters are left alone."""
    model = run.build(Odd)
    _refused_edits(run, model, "shape")
    layer = nn.Linear(2, 2)
    with run.gathered(layer), torch.no_grad():
        layer.weight.zero_()
    _edit(run, model, 0, lambda: model.norm.bias.data.fill_(0.5))
    run.see(full_parameter(run, model.norm.bias), "bias")
    run.shard(model, adamw(model))
    see_weights(run, model)
    run.step(0)


def _local(run: Run, of: str, param: nn.Parameter, change: Callable[[Tensor], Tensor], *name: str) -> None:
    """Change this rank's part; in the reference, all of it."""
    if not run.is_plain:
        mine = getattr(zero, f"local_{of}")(param, *name)
        getattr(zero, f"set_local_{of}")(param, *name, change(mine))
    elif of == "optimizer_state":
        state = run.optimizer.state[param]
        state[name[0]] = change(state[name[0]])
    elif of == "gradient":
        param.grad = change(param.grad)
    else:
        param.data = change(param.data)


@program(reference="average", more=RANKS, tells=lambda setting: setting.ranks > 1)
def accessors(run: Run) -> None:
    """Whole and local values, read and written; the next step works on what was written."""
    model = run.trained_model(Odd, adamw)
    params, weight, bias = dict(model.named_parameters()), model.first.weight, model.first.bias
    run.see(full_gradient(run, weight), "gradient before a backward")
    run.forget_gradients()
    run.see(full_optimizer_state(run, weight, "exp_avg"), "state before a step")
    if not run.is_plain:
        run.see((zero.local_gradient(weight), zero.local_optimizer_state(weight, "exp_avg")), "local values")
    else:
        run.see((None, None), "local values")
    zeros = torch.zeros(33, 16)
    run.refuses(zero.StateError, "run a step first", lambda: zero.set_full_optimizer_state(weight, "exp_avg", zeros))
    with run.no_sync(model):
        run.loss(0).backward()
    for name, param in params.items():
        run.see(full_gradient(run, param), f"gradient of {name}")
    set_full_gradient(run, weight, torch.full((33, 16), 0.25))
    if not run.is_plain:
        zero.set_full_gradient(weight, weight.grad)  # a lazy gradient is a value, too
    _local(run, "gradient", weight, lambda mine: mine * 2)
    run.optimizer.step()
    for name, param in params.items():
        run.see(full_parameter(run, param), name)
        for key in ("exp_avg", "exp_avg_sq", "step", "max_exp_avg_sq"):
            run.see(full_optimizer_state(run, param, key), f"{key} of {name}")
    if not run.is_plain:
        for get in (zero.full_optimizer_state, zero.local_optimizer_state):
            get(weight, "step").add_(7)  # a copy
    run.refuses(zero.StateError, "one value for several", lambda: zero.set_full_optimizer_state(weight, "step", zeros))
    for wrong in (torch.zeros(3), 0.0):
        run.refuses(zero.StateError, "expected shape", lambda wrong=wrong: zero.set_full_parameter(weight, wrong))
    run.refuses(zero.StateError, "this rank owns", lambda: zero.set_local_parameter(bias, torch.zeros(7)))
    if run.world > 1:
        other = torch.full((33, 16), float(run.rank))
        run.refuses(
            zero.RankMismatchError, "rank 1 passes another value", lambda: zero.set_full_parameter(weight, other)
        )
    value = full_parameter(run, weight) * 2
    set_full_parameter(run, weight, value)
    set_full_optimizer_state(run, weight, "exp_avg", value * 3)
    _local(run, "optimizer_state", weight, lambda mine: mine * 4, "exp_avg_sq")
    _local(run, "parameter", bias, lambda mine: mine + 1.0)
    if not run.is_plain:
        run.engine_of(model).refresh()
    run.optimizer.zero_grad()
    run.step(1)
    see_weights(run, model)


@program(reference="average", only={"ranks": (2, 3), "stage": (1, 2, 3), "replicas": (1,)})
def local_parts(run: Run) -> None:
    """Put together they are the whole."""
    model = run.trained_model(Odd, adamw)

    def see_parts(what: str, param: nn.Parameter, mine: Tensor | None) -> None:
        parts: list[Any] = [None] * run.world
        dist.all_gather_object(parts, mine)
        if not run.is_plain:
            run.see(torch.cat(parts).view(param.shape), what)

    run.loss(0).backward()
    for name, param in model.named_parameters():
        if run.is_plain:
            run.see(full_gradient(run, param), f"gradient of {name}")
        see_parts(f"gradient of {name}", param, None if run.is_plain else zero.local_gradient(param))
    run.optimizer.step()
    for name, param in model.named_parameters():
        if run.is_plain:
            run.see(param, name)
            run.see(run.optimizer.state[param]["exp_avg"], f"state of {name}")
        see_parts(name, param, None if run.is_plain else zero.local_parameter(param))
        see_parts(f"state of {name}", param, None if run.is_plain else zero.local_optimizer_state(param, "exp_avg"))


@program(reference="average")
def permuted_rows(run: Run) -> None:
    """Edits that no plain sum shows, also far behind in a large matrix."""
    model = run.trained_model(lambda: nn.Sequential(nn.Embedding(300, 1024), nn.Linear(1024, 4)))
    weight = model[0].weight
    for edit in (
        lambda x: x.flip(0),
        lambda x: x.flip(1),
        lambda x: x.roll(1, 0),
        lambda x: x[[*range(280), 290, *range(281, 290), 280, *range(291, 300)]],
        lambda x: torch.cat([x[:, :1000], x[:, 1000:1003].roll(1, 1), x[:, 1003:]], 1),
    ):
        expected = edit(full_parameter(run, weight).clone())
        with run.gathered(weight, modifier_rank=0), torch.no_grad():
            if run.rank == 0 or run.is_plain:
                weight.copy_(edit(weight.clone()))
        run.see(torch.equal(full_parameter(run, weight), expected), "whether the edit counts")


@program(reference="average", more={"ranks": (1, 2)})
def an_empty_parameter(run: Run) -> None:
    """Read, written, gathered, saved and loaded as all others."""
    model = run.trained_model(OddShapes, adamw)
    nothing = model.empty
    for step in range(3):
        on_tokens(model, run.rank, step).backward()
        gradient = full_gradient(run, nothing)
        run.see(None if gradient is None else gradient.shape, "gradient")
        if step == 2:
            run.optimizer.zero_grad()
            run.forget_gradients()
        else:
            run.update()
    run.see(full_parameter(run, nothing).shape, "the parameter")
    if not run.is_plain:
        assert zero.local_parameter(nothing).shape == (0,)
        zero.local_gradient(nothing)
        zero.local_optimizer_state(nothing, "exp_avg")
        zero.full_optimizer_state(nothing, "exp_avg")
    set_full_parameter(run, nothing, torch.zeros(0, 4))
    with run.gathered(model, modifier_rank=0):
        run.see(nothing.shape, "the gathered parameter")
    run.save(model)
    run.load(model)
    on_tokens(model, run.rank, 4).backward()
    run.update()
    run.detach(model)
    run.see(nothing.shape, "the parameter in the end")


# Gradients that user code gives to parameters that had none ---------------------------------------------------------------


class Partly(nn.Module):
    """Its forward uses one of two layers; the other has two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.unused.never = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


GIVEN = torch.linspace(-1, 1, 256).view(16, 16)


def _set_part(run: Run, param: nn.Parameter) -> None:
    """Each rank gives the rows that it has; where one rank owns the matrix, all or nothing."""
    run.sync_gradients()
    if (engine := run.engine_of(run.model)) is None:
        param.grad = GIVEN.clone()
        return
    counts: list[int] = engine.exchange(zero.local_parameter(param).numel())
    start = sum(counts[: run.rank]) % GIVEN.numel()
    zero.set_local_gradient(param, GIVEN.view(-1)[start : start + counts[run.rank]])


def _given(run: Run, optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    model = run.trained_model(Partly, optimizer)
    for step in range(6):
        if step < 4:
            run.loss(step).backward()
        if step == 3:
            for param in model.parameters():
                param.grad = None
        if step in (0, 3):
            set_full_gradient(run, model.unused.weight, GIVEN.clone())
        elif step in (2, 4):
            _set_part(run, model.unused.weight)
        else:
            set_full_gradient(run, model.used.weight, GIVEN.clone())  # where its bias has none any more
        run.see([param.grad is not None for param in model.parameters()], "which have gradients")
        for param in model.parameters():
            run.see(full_gradient(run, param), "gradient")
        left = [param.grad for param in model.parameters() if param.grad is not None]
        if left:
            run.see(nn.utils.get_total_norm(left), "norm")
            run.clip_grad_norm_(model, float("inf"))
        run.update()
        see_weights(run, model)


GIVES: dict[str, Any] = {"reference": "average", "only": {"precision": ("fp32",), "replicas": (1,)}}


@program(**GIVES, tells=lambda setting: setting.optimizer_tier != "none")
def gradients_given_to_parameters_without_any(run: Run) -> None:
    """The next step uses them; alone, too."""
    _given(run, lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5, eps=1e-3))


@program(**GIVES)
def full_matrices_given_gradients(run: Run) -> None:
    _given(run, lambda model: Spectral(model.parameters(), lr=0.1))


class Slow(torch.optim.SGD):
    is_slow = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        time.sleep(0.05 * self.is_slow)
        super().step(closure)


@program(reference="average", only={"stage": (3,), "tier": ("cpu", "disk", "cpu/cpu"), **FP32})
def set_while_the_step_runs(run: Run) -> None:
    """An offloaded step goes on in a thread; what is set after it is not what it had."""
    model = run.trained_model(Odd, lambda model: Slow(model.parameters(), lr=0.1))
    run.optimizer.is_slow = True  # not before: the engine tries unknown optimizers
    for step in range(3):
        run.step(step)
        set_full_parameter(run, model.first.weight, torch.full((33, 16), 0.01 * step))
        run.see(full_parameter(run, model.first.weight), "what was set")


def _set_after_a_forward(run: Run) -> None:
    """No backward follows; the next forward has what was set."""
    model = run.mlp(depth=1)
    for step in range(3):
        run.loss(step)
        set_full_parameter(run, model[0].weight, torch.full((16, 16), 0.1 * step))
        run.see(run.loss(step), "loss with what was set")
        run.step(step)


@program(reference="average", only={"stage": (3,), **FP32})
def set_after_a_forward(run: Run) -> None:
    _set_after_a_forward(run)


@program(reference="average", only={"stage": (1, 2), "replicas": (1,), **FP32})
def set_where_full_parameters_stay(run: Run) -> None:
    _set_after_a_forward(run)


@program(
    reference="average",
    only={"stage": (3,), "tier": ("cpu/cpu", "disk/disk", "cpu/disk", "disk/cpu"), "precision": ("bf16",)},
)
def set_in_the_middle_of_a_slice(run: Run) -> None:
    """Forwards gather from another copy than the master, which follows."""
    model = run.trained_model(lambda: nn.Sequential(*(mlp(depth=3) for _ in range(3))))
    run.step(0)
    for param in [*model.parameters()][2::4]:  # at other places of their units
        set_full_parameter(run, param, torch.full(param.shape, 0.25))
    run.loop(steps=2)
