"""Several optimizers over one model, each over parameters of its own."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import hf_zero as zero
from tests.models import LanguageModel, Mixed, ids, mlp, token_loss
from tests.optimizers import Layerwise
from tests.oracle import Refused, Run, program
from tests.programs.accessors import full_optimizer_state, set_full_optimizer_state
from tests.programs.usual import FP32

Optimizers = list[torch.optim.Optimizer]
ONE_PLACE = {"tier": ("none",), "replicas": (1,), "kept": (False,), "deferred": (False,), **FP32}
"""`only=ONE_PLACE`: an error that is raised before the tiers matter."""


def adam(params: Any, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, eps=1e-3)


def muon(matrices: list[Tensor], others: list[Tensor]) -> Optimizers:
    return [torch.optim.Muon(matrices, lr=2e-2), adam(others)]


def adams(matrices: list[Tensor], others: list[Tensor]) -> Optimizers:
    return [adam(others), adam([{"params": matrices[:2]}, {"params": matrices[2:]}])]


def three(matrices: list[Tensor], others: list[Tensor]) -> Optimizers:
    first = torch.optim.SGD(matrices[:1], lr=1e-2, momentum=0.9)
    return [first, Layerwise(matrices[1:]), torch.optim.RMSprop(others, lr=1e-3, eps=1e-3)]


LISTS = {"muon": muon, "adams": adams, "three": three}
IN_MEMORY = {"offload_optimizer": "none", "offload_params": "none", "device_memory": None}
BY_BF16 = 100.0
"""`loose=BY_BF16`: Muon rounds to bfloat16 within its update, so a last bit of a gradient may become eight of them."""


def built(run: Run, name: str) -> tuple[Any, Optimizers]:
    """One parameter is frozen, one is in no optimizer; `run.kept`: whose rows all ranks train on."""
    model = run.build(Mixed)
    model.blocks[1].line.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad and p is not model.blocks[0].one]
    return model, LISTS[name]([p for p in trained if p.dim() == 2], [p for p in trained if p.dim() != 2])


def backward(run: Run, model: Any, step: int, what: str) -> Tensor:
    rows = ids(run.rank if run.kept is None else run.kept, step)
    loss = token_loss(model(rows), rows)
    loss.backward()
    run.see(loss, what)
    return loss


def every_order(run: Run, model: Any, optimizers: Optimizers, first: int) -> None:
    """The orders in which loops call several optimizers."""
    a, *others = optimizers
    for optimizer in optimizers:
        optimizer.zero_grad()
    backward(run, model, first, "as in every recipe")
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    backward(run, model, first + 1, "in the other order")
    for optimizer in reversed(optimizers):
        optimizer.step()
        optimizer.zero_grad()
    backward(run, model, first + 2, "one alone: the gradients of the others add up")
    a.step()
    a.zero_grad()
    backward(run, model, first + 3, "after one alone")
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()
    backward(run, model, first + 4, "one alone: the gradients of the others are forgotten")
    others[-1].step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    a.step(lambda: backward(run, model, first + 5, "in a closure"))
    for optimizer in others:
        optimizer.step()
    a.step()
    others[-1].zero_grad(set_to_none=False)
    a.zero_grad()
    backward(run, model, first + 6, "one stepped twice")
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def in_turn(run: Run, model: Any, optimizers: Optimizers, first: int) -> None:
    """Two steps of each."""
    for step in (first, first + 1):
        backward(run, model, step, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def schedules(optimizers: Optimizers) -> list[StepLR]:
    return [StepLR(optimizer, 2, 0.5 + 0.1 * number) for number, optimizer in enumerate(optimizers)]


def trained(run: Run, model: Any, optimizers: Optimizers, *firsts: int) -> None:
    schedulers = schedules(optimizers)
    for first in firsts:
        every_order(run, model, optimizers, first)
        for scheduler in schedulers:
            scheduler.step()


def in_every_order(run: Run, name: str) -> None:
    model, optimizers = built(run, name)
    groups = [optimizer.param_groups[0] for optimizer in optimizers]
    model = run.shard(model, optimizers)
    engine = run.engine_of(model)
    run.see(engine is None or engine.optimizers == tuple(optimizers), "the engine's optimizers")
    trained(run, model, optimizers, 0, 10)
    for optimizer in optimizers:
        optimizer.load_state_dict(optimizer.state_dict())
    trained(run, model, optimizers, 20)
    is_same = [optimizer.param_groups[0] is group for optimizer, group in zip(optimizers, groups)]
    run.see(engine is None or all(is_same), "the groups' identity")


def continued_from_a_checkpoint(run: Run, name: str) -> None:
    """In place, and in another model."""
    model, optimizers = built(run, name)
    model = run.shard(model, optimizers)
    in_turn(run, model, optimizers, 0)
    run.save(model)
    in_turn(run, model, optimizers, 10)
    with contextlib.nullcontext() if run.is_plain else torch.inference_mode():
        run.load(model)
    in_turn(run, model, optimizers, 20)
    other, others = built(run, name)
    other = run.shard(other, others, stage=3 if run.setting.stage < 3 else 1, **IN_MEMORY)
    run.load(other)
    in_turn(run, other, others, 20)


program(partial(in_every_order, name="adams"), name="adams_in_every_order", more={"debug": (False, True)})
program(partial(in_every_order, name="three"), name="three_in_every_order", more={"ranks": (1, 2, 3)})
program(partial(in_every_order, name="muon"), name="muon_in_every_order", loose=BY_BF16)
for _name, _loose in (("adams", 1.0), ("muon", BY_BF16)):
    continued = partial(continued_from_a_checkpoint, name=_name)
    program(continued, name=f"{_name}_continued_from_a_checkpoint", loose=_loose)


@program(only={**FP32, "deferred": (False,)})
def warm_and_let_go(run: Run) -> None:
    """Optimizers have states before the model is sharded, and step in plain PyTorch once the engine has gone."""
    model, optimizers = built(run, "adams")
    run.kept = 0
    in_turn(run, model, optimizers, 0)
    run.kept = None
    model = run.shard(model, optimizers)
    in_turn(run, model, optimizers, 10)
    run.detach(model)
    run.kept = 0
    in_turn(run, model, optimizers, 20)


@program
def clipped_together_and_apart(run: Run) -> None:
    model, optimizers = built(run, "adams")
    model = run.shard(model, optimizers)
    line = model.blocks[0].line
    for step in range(4):
        with run.no_sync(model):
            backward(run, model, 2 * step, "first")
        backward(run, model, 2 * step + 1, "second")
        if step % 2:
            matrices = [p for p in model.parameters() if p.dim() == 2 and p.requires_grad]
            run.clip_grad_norm_(model, 0.05, parameters=matrices)
        else:
            run.see(nn.utils.clip_grad_norm_(model.parameters(), 0.05), "norm of all")
        some = [p for group in optimizers[0].param_groups for p in group["params"]]
        run.see(nn.utils.clip_grad_norm_(some, 0.01), "norm of one optimizer's")
        for optimizer in optimizers if step != 2 else optimizers[1:]:
            optimizer.step()
        model.zero_grad()
    for param in (line.weight, line.bias):
        run.see(full_optimizer_state(run, param, "exp_avg"), "a state")
        run.see(full_optimizer_state(run, param, "momentum_buffer"), "a state that it has not")
    set_full_optimizer_state(run, line.bias, "exp_avg", torch.ones(16))
    run.see(full_optimizer_state(run, line.bias, "exp_avg"), "a state that was set")


@program(only={"precision": ("bf16",)})
def cleared_between_micro_batches(run: Run) -> None:
    """One optimizer's gradients, while they are this rank's alone. Two optimizers share spans that were built for one."""
    model = run.build(LanguageModel)
    named = [*model.named_parameters()]
    optimizers = [adam([p for name, p in named if ("up" in name) is is_up]) for is_up in (True, False)]
    model = run.shard(model, adam(model.parameters()))
    with torch.inference_mode():
        run.bind(optimizers)
    for step, way in enumerate((True, False, True)):
        with run.no_sync(model, defer=True):
            backward(run, model, 2 * step, "first")
        optimizers[step % 2].zero_grad(set_to_none=way)
        backward(run, model, 2 * step + 1, "second")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@program(only={"debug": (True,)})
def recorded_and_compared(run: Run) -> None:
    """A step of all optimizers is one step of the record. A gradient that is not finite stops its own optimizer."""
    model, optimizers = built(run, "adams")
    model = run.shard(model, optimizers)
    engine = run.engine_of(model)
    recorder = engine and engine.record(run.folder)
    for step in range(4):
        backward(run, model, step, "loss")
        for optimizer in (optimizers, optimizers[1:], optimizers[:1], optimizers[1:])[step]:
            optimizer.step()
        model.zero_grad()
        if recorder and step == 0:
            first, recorder = recorder, engine.record(first_step=1)
            assert '"kind": "end"' in first.path.read_text(), "the recorder before goes on"
    run.see(recorder.steps if recorder else 4, "steps recorded")
    if recorder:
        recorder.close()
    backward(run, model, 9, "loss")
    optimizers[0].step()
    with torch.no_grad():
        for param in (p for group in optimizers[1].param_groups for p in group["params"]):
            if param.grad is not None:
                param.grad.fill_(float("nan"))
    run.refuses(zero.NumericsError, "No weight was changed", optimizers[1].step)


@program
def bound_one_after_another(run: Run) -> None:
    model, (first, layerwise, third) = built(run, "three")
    model = run.shard(model, first)
    backward(run, model, 0, "with one")
    first.step()
    model.zero_grad()
    run.refuses(zero.LayoutError, "needs full matrices", lambda: run.bind(layerwise))  # it comes too late
    run.bind(second := adam(layerwise.param_groups[0]["params"]))
    run.bind(third)
    in_turn(run, model, [first, second, third], 10)
    one = model.blocks[0].one
    model.zero_grad()  # a gradient of no optimizer adds up in plain PyTorch; the engine forgets it at the step
    first.add_param_group({"params": [one], "lr": 0.05})
    in_turn(run, model, [first, second, third], 20)
    run.bind(last := adam([p for group in third.param_groups for p in group["params"]], lr=3e-2))
    run.see([[p.shape for p in group["params"]] for group in third.param_groups], "what the replaced one holds")
    for call in (third.step, third.zero_grad, third.state_dict):
        run.refuses(zero.StateError, "another optimizer was bound in its place", call)
    in_turn(run, model, [first, second, last], 30)
    run.bind([last, first])
    model.zero_grad()
    backward(run, model, 40, "without the second")
    for optimizer in (last, first):
        optimizer.step()


@program
def two_in_the_place_of_one(run: Run) -> None:
    """Neighbours among the parameters, which were in one group, go to different optimizers."""
    model = run.build(Mixed)
    params = [*model.parameters()]
    model = run.shard(model, one := adam(params))
    in_turn(run, model, [one], 0)
    two = [adam(params[::2], lr=3e-2), torch.optim.SGD(params[1::2], lr=1e-2, momentum=0.9)]
    run.bind(two)
    every_order(run, model, two, 10)
    set_full_optimizer_state(run, params[3], "momentum_buffer", torch.full(params[3].shape, 0.01))
    run.save(model)
    in_turn(run, model, two, 20)
    run.load(model)
    every_order(run, model, two, 30)
    for number, param in enumerate(params):
        run.see(full_optimizer_state(run, param, "exp_avg"), f"first moment of {number}")
        run.see(full_optimizer_state(run, param, "momentum_buffer"), f"momentum of {number}")
    for optimizer in two:
        optimizer.load_state_dict(optimizer.state_dict())
    in_turn(run, model, two, 40)


class Breaks(torch.optim.SGD):
    """Raises where it is told to: before its arithmetic, or in the middle of it."""

    at = ""
    done: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.at == "before":
            raise ValueError("not now")
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if self.done and self.at == "within":
                raise ValueError("half done")
            self.done.append(1)
            p.sub_(self.param_groups[0]["lr"] * p.grad)


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("in the middle")


@program(only={"tier": ("none",)})  # offloaded, a step runs later, on another thread
def steps_and_backwards_that_raise(run: Run) -> None:
    model = run.build(Mixed)
    params = list(model.parameters())
    optimizers = [first, second] = [adam(params[:5]), Breaks(params[5:], lr=1e-2)]
    model = run.shard(model, optimizers)
    backward(run, model, 0, "loss")
    first.step()
    second.at = "before"
    with contextlib.suppress(ValueError):
        second.step()
    second.at = ""
    second.step()  # nothing was lost in between
    model.zero_grad()

    def raise_in_backward() -> None:
        hook = model.blocks[0].register_forward_hook(lambda _, args, out: Raises.apply(out))
        try:
            backward(run, model, 1, "loss")
        finally:
            hook.remove()

    def raise_in_step() -> None:
        backward(run, model, 3, "loss")
        first.step()
        second.at = "within"
        second.done.clear()
        second.step()

    run.refuses(RuntimeError, "in the middle", raise_in_backward)
    for optimizer in optimizers:
        run.refuses(zero.StateError, "gone.*zero_grad", optimizer.step)
    for optimizer in optimizers:
        optimizer.zero_grad()
    in_turn(run, model, optimizers, 20)
    run.save(model)
    run.refuses(ValueError, "half done", raise_in_step)
    for optimizer in optimizers:  # both: the weights are not of one step
        run.refuses(zero.StateError, "broke off half done|stopped half-way", optimizer.step)
    second.at = ""
    run.load(model)
    model.zero_grad()
    in_turn(run, model, optimizers, 30)


def apart(model: Any) -> Optimizers:
    *most, last = model.parameters()
    return [torch.optim.SGD(most, lr=1e-2), adam([last])]


@program(only=ONE_PLACE)
def in_two_optimizers(run: Run) -> None:
    """Refused, at first and later; that it was tried leaves no trace."""
    model = run.build(mlp)
    optimizers = apart(model)
    both = [torch.optim.SGD(model.parameters(), lr=1e-2), optimizers[1]]
    match = r"'4.bias' is in two optimizers, number 0 \(SGD\) and number 1 \(AdamW\)"
    run.refuses(zero.LayoutError, match, lambda: zero.shard(model, both))
    run.shard(model, optimizers)
    more = [*optimizers, torch.optim.SGD([model[0].weight], lr=1e-2)]
    run.refuses(zero.LayoutError, "is in two optimizers", lambda: run.bind(more))
    for step in range(2):
        run.loss(step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@program(
    only={**ONE_PLACE, "tier": ("cpu",)},
    refused=(Refused(zero.ConfigError, "which of 2 optimizers steps"),),
)
def several_stepped_in_backward(run: Run) -> None:
    model = run.build(mlp)
    run.shard(model, apart(model), step_in_backward=True)


@program(only=ONE_PLACE, refused=(Refused(zero.RankMismatchError, "ranks differ"),))
def another_order_on_one_rank(run: Run) -> None:
    model = run.build(mlp)
    run.shard(model, apart(model)[:: -1 if run.rank else 1])


@program(only=ONE_PLACE, refused=(Refused(zero.RankMismatchError, r"group 0 \(SGD\).*group 0 \(RMSprop\)"),))
def another_class_on_one_rank(run: Run) -> None:
    model = run.build(mlp)
    run.shard(model, (torch.optim.RMSprop if run.rank else torch.optim.SGD)(model.parameters(), lr=0.1))


@program(only=ONE_PLACE, refused=(Refused(zero.RankMismatchError, "'lr' of the optimizer's group 0 of optimizer 1"),))
def another_rate_on_one_rank(run: Run) -> None:
    model = run.build(mlp)
    optimizers = apart(model)
    run.shard(model, optimizers)
    run.loss(0).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    optimizers[1].param_groups[0]["lr"] += run.rank
    run.loss(1).backward()


@program(only=ONE_PLACE, refused=(Refused(zero.CheckpointError, "optimizer groups hold other parameters"),))
def loaded_into_another_list(run: Run) -> None:
    model, optimizers = built(run, "muon")
    model = run.shard(model, optimizers)
    in_turn(run, model, optimizers, 0)
    run.save(model)
    other, others = built(run, "adams")
    run.load(run.shard(other, others))
