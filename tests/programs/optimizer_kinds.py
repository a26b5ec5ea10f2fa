"""One program per optimizer: over elements, over whole matrices; and what is refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import hf_zero as zero
from tests import optimizers as own
from tests.models import Mixed, adamw, inputs, mlp, token_loss
from tests.oracle import Refused, Run, program
from tests.programs.usual import FP32, is_sharded
from tests.settings import FACTORS, Setting

Build = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
UPDATES = {"replicas": (1,), "kept": (False,), "deferred": (False,)}
"""`only=UPDATES`: what an optimizer computes, on the tiers."""


def is_refused_where_shared(setting: Setting) -> bool:
    return is_sharded(setting) or setting.optimizer_tier != "none"


# Over elements ----------------------------------------------------------------------------------------------------------


def over_elements(name: str, build: Build, precision: tuple[str, ...] = ("fp32",), exact: bool = True) -> None:
    """The learning rate, and momentum or betas where there are any, change in every step."""

    def run_it(run: Run) -> None:
        model = run.build(lambda: mlp(15, depth=2))
        optimizer = build(model.parameters())
        model = run.shard(model, optimizer)
        for step in range(3):
            loss = model(run.inputs(step, 4, 15)).square().mean()
            loss.backward()
            run.see(loss, "loss")
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                optimizer.step()
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                lr = group["lr"]
                if isinstance(lr, Tensor):
                    lr.mul_(0.7)
                else:
                    group["lr"] = lr * 0.7
                if "betas" in group:
                    group["betas"] = (group["betas"][0] * 0.9, group["betas"][1])

    tells = lambda setting: setting.optimizer_tier != "none"  # noqa: E731 -- else torch's own code makes the step
    program(run_it, name=name, only={**UPDATES, "precision": precision}, exact=exact, tells=tells)


# Fused kernels round the last elements of a tensor in another way: `exact=False`.
BOTH = ("fp32", "bf16")
over_elements("sgd", lambda p: torch.optim.SGD(p, lr=0.1), BOTH)
over_elements("sgd_nesterov", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), BOTH)
over_elements("adam", lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1))
over_elements("adam_amsgrad", lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1))
over_elements("adamw_fused", lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3, fused=True), BOTH, exact=False)
over_elements("adamw_foreach", lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True))
over_elements("adamw_tensor", lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), fused=True), exact=False)
over_elements("rmsprop", lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True))
over_elements("adagrad", lambda p: torch.optim.Adagrad(p, lr=1e-2))
over_elements("adadelta", torch.optim.Adadelta)
over_elements("nadam", lambda p: torch.optim.NAdam(p, lr=1e-2))
over_elements("radam", lambda p: torch.optim.RAdam(p, lr=1e-2))
over_elements("adamax", lambda p: torch.optim.Adamax(p, lr=1e-2))
over_elements("rprop", lambda p: torch.optim.Rprop(p, lr=1e-3))
over_elements("asgd", lambda p: torch.optim.ASGD(p, lr=1e-2))
over_elements("lion", lambda p: own.Lion(p, lr=1e-2))
over_elements("begins", own.Begins)
over_elements("begins_late", own.Late)
over_elements("bounded", lambda p: own.Bounded(p, lr=1e-1))
over_elements("careful", lambda p: own.Careful(p, lr=1e-2))
for _where in ("own", "group", "tensor"):
    over_elements(f"counts_in_{_where}", lambda p, where=_where: own.Counts(p, where, by_layer=False))


# Over whole matrices -----------------------------------------------------------------------------------------------------


class Kernels(nn.Module):
    """A convolution and a wide matrix, which some optimizers treat in a way of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = nn.Conv2d(3, 4, 3)
        self.wide = nn.Linear(144, 130)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.kernels(x).tanh().flatten(1))


def tokens_loss(run: Run, model: Any, step: int) -> Tensor:
    rows = run.ids(step)
    return token_loss(model(rows), rows)


def images_loss(run: Run, model: Any, step: int) -> Tensor:
    return model(run.inputs(step, 2, 3, 8, 8)).square().mean()


def zero_every_other_loss(run: Run, model: Any, step: int) -> Tensor:
    return tokens_loss(run, model, step) * (step % 2 == 0)


def mixed() -> nn.Module:
    model = Mixed()
    model.blocks[1].line.requires_grad_(False)
    return model


def matrices() -> nn.Module:
    """The rest of the model is another optimizer's."""
    model = mixed()
    for param in model.parameters():
        param.requires_grad_(param.requires_grad and param.dim() == 2)
    return model


def mixed_with_unused() -> nn.Module:
    model = mixed()
    model.add_module("unused", nn.Linear(6, 5))
    return model


def over_matrices(
    name: str, build: Build, make: Callable[[], nn.Module] = mixed, loss: Any = tokens_loss, **options: Any
) -> None:
    """With a schedule; its state goes through torch's own pair of methods, and through a checkpoint."""

    def run_it(run: Run) -> None:
        model = run.build(make)
        optimizer = build(model.parameters())
        model = run.shard(model, optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)

        def step(number: int) -> None:
            value = loss(run, model, number)
            value.backward()
            run.see(value, f"loss {number}")
            optimizer.step()
            optimizer.zero_grad()

        for number in range(3):
            step(number)
            schedule.step()
        optimizer.load_state_dict(optimizer.state_dict())
        run.save(model)
        step(9)
        run.load(model)
        step(4)

    program(run_it, name=name, **{"only": {**FP32, "deferred": (False,)}, "exact": True, **options})


over_matrices("adafactor", lambda p: torch.optim.Adafactor(p, lr=1e-2))
over_matrices("transformers_adafactor", own.hf_adafactor)
over_matrices("muon", lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=1e-2), matrices)
over_matrices("layerwise", own.Layerwise, only=FP32, more={"ranks": (1, 2, 3)})
over_matrices("blockwise", own.Blockwise)
over_matrices("replaces", own.Replaces)
over_matrices("two_rules", own.two_rules)
over_matrices("shampoo", own.Shampoo, only=FP32, more={"ranks": (1, 2, 3, 4), "debug": (False, True)})
over_matrices("lars", own.Lars, only={"deferred": (False,)}, more={"tier": FACTORS["tier"]}, exact=False)
over_matrices("forces", own.Forces, mixed_with_unused, tells=lambda row: row.tier != "none")
over_matrices("decays", own.Decays, only={**FP32, **UPDATES})
over_matrices("projects", own.Projects, loss=zero_every_other_loss, only={**FP32, **UPDATES})
over_matrices("doubled", own.Doubled, only={**FP32, **UPDATES})
over_matrices("centralizes", own.Centralizes, Kernels, images_loss, only={**FP32, **UPDATES})
over_matrices("wide", own.Wide, Kernels, images_loss, only={**FP32, **UPDATES})
for _where in ("own", "group", "tensor"):
    over_matrices(
        f"counts_by_layer_in_{_where}",
        lambda p, where=_where: own.Counts(p, where, by_layer=True),
        only={**FP32, **UPDATES},
    )


# With states of any kind -------------------------------------------------------------------------------------------------

CAST = ("bfloat16", "float64")
"""Kinds of which a plain optimizer's state is cast to the parameter's type: by torch's own `load_state_dict`, at the start and
by `engine.detach`."""


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1), nn.Linear(1, 1))


def with_states(kind: str, late: bool = False) -> None:
    """The optimizer has states before the model is sharded. They are saved, loaded, and go on in plain PyTorch."""

    def run_it(run: Run) -> None:
        plain = run.build(small)
        optimizer = own.States(plain.parameters(), kind, late)

        def step(number: int, model: Any, who: int) -> None:
            model(inputs(who, number, 2, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        if kind not in CAST:
            step(0, plain, 0)
        model = run.shard(plain, optimizer)
        for number in range(1, 5):
            step(number, model, run.rank)
        if run.is_plain:
            weights, states = copy.deepcopy(plain.state_dict()), copy.deepcopy([*optimizer.state.values()])
        else:
            run.save(model)
        step(5, model, run.rank)
        if run.is_plain:
            plain.load_state_dict(weights)
            optimizer.state.update(zip(optimizer.state, states))
        else:
            run.load(model)
        step(6, model, run.rank)
        if kind not in CAST:
            run.detach(model)
            step(7, plain, 0)

    name = f"state_{kind}{'_late' if late else ''}".replace(" ", "_")
    program(run_it, name=name, only={**FP32, **UPDATES})


for _kind in own.STATES:
    with_states(_kind)
for _kind in ("shape (1,)", "ints", "tuple"):
    with_states(_kind, late=True)


# Refused ----------------------------------------------------------------------------------------------------------------


@program(
    only={**FP32, **UPDATES, "ranks": (1, 2), "tier": ("none", "cpu")},
    refused=(
        Refused(
            zero.UnsupportedOptimizerError,
            r"one parameter after another(.|\n)*one rank with offload_optimizer='none'",
            lambda s: s.optimizer_tier != "none",
        ),
        Refused(
            zero.UnsupportedOptimizerError,
            r"together with others than alone(.|\n)*ZeroConfig\(stage=0\) on any number of ranks, or one rank",
            is_sharded,
        ),
    ),
)
def one_number_over_all_parameters(run: Run) -> None:
    run.mlp(lambda model: own.Global(model.parameters()))
    run.loop()


@program(
    only={**FP32, **UPDATES, "ranks": (1, 2), "tier": ("none", "cpu")},
    refused=(Refused(zero.UnsupportedOptimizerError, "could not be tried", is_refused_where_shared),),
)
def cannot_be_tried(run: Run) -> None:
    run.mlp(lambda model: own.Untried(model.parameters()))
    run.loop()


@program(
    only={**FP32, **UPDATES},
    refused=(Refused(zero.UnsupportedOptimizerError, "Mixes(.|\n)*element-wise", is_refused_where_shared),),
)
def steps_by_one_norm(run: Run) -> None:
    """Allowed at stage 0, where every rank has whole tensors."""
    run.mlp(lambda model: own.Mixes(model.parameters(), lr=0.1))
    run.loop()


class Hides(own.Layerwise):
    """Keeps the parameters that it was built with."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.mine = {"all": [group["params"] for group in self.param_groups]}


class LooksUp(own.Layerwise):
    """Decays parameters by their ids."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.decayed = {id(p) for group in self.param_groups for p in group["params"] if p.dim() > 1}

    def update(self, p: Any, group: Any) -> None:
        p.sub_(group["lr"] * (p.grad + 0.1 * p * (id(p) in self.decayed)))


def odd(held: Any, in_group: bool) -> Build:
    return lambda params: own.Keeps(params, held, in_group)


UNSUPPORTED: dict[str, tuple[Build, str]] = {
    "LBFGS": (torch.optim.LBFGS, "LBFGS.*keeps the parameters"),
    "adapts": (lambda p: own.Adapts(p, lr=1e-8), "'distance' in its groups depends on"),
    "mixes": (lambda p: own.Mixes(p, lr=1e-8), "another update together with others"),
    "named": (lambda p: own.Named(p, lr=1e-8), r"state\['k'\]"),
    "hides": (Hides, r"keeps the parameters it was built with, or their ids \(as 'mine'\)"),
    "looks up": (LooksUp, r"or their ids \(as 'decayed'\): use parameter groups"),
    "an object": (odd(object(), False), "Keeps cannot (.|\n)*'odd'(.|\n)*cannot be saved"),
    "a table": (odd({"m": torch.ones(2)}, False), "Keeps cannot (.|\n)*'odd'(.|\n)*cannot be saved"),
    "a table in a group": (odd({}, True), "Keeps cannot (.|\n)*'odd'(.|\n)*cannot be saved"),
    "a tensor in a group": (odd(torch.ones(3), True), "Keeps cannot (.|\n)*'odd'(.|\n)*cannot be saved"),
    "two tensors": (
        odd(TwoTensor(torch.ones(2), torch.ones(2)), False),
        "Keeps cannot (.|\n)*'odd'(.|\n)*cannot be saved",
    ),
    **{
        f"a state that is {held!r}": (odd(held, False), "Keeps cannot (.|\n)*'odd'(.|\n)*cannot be saved")
        for held in ({"a": 1.0}, [torch.ones(2)], 1 + 2j, torch.ones(1, dtype=torch.complex64))
    },
    "talks": (own.Talks, r"Talks cannot (.|\n)*communicates by itself \(allreduce_\)"),
}


@program(only={**FP32, **UPDATES, "stage": (1, 2, 3), "tier": ("none", "cpu")})
def unsupported(run: Run) -> None:
    """Refused by name; model and optimizer are as they were, and another optimizer trains the model."""
    model = run.build(mlp)
    for name, (build, match) in UNSUPPORTED.items():
        optimizer = build(list(model.parameters()))
        before = [p for group in optimizer.param_groups for p in group["params"]]
        config = zero.ZeroConfig(stage=run.setting.stage, offload_optimizer=run.setting.tier)
        run.refuses(
            zero.UnsupportedOptimizerError,
            match,
            lambda optimizer=optimizer, config=config: zero.shard(model, optimizer, config),
        )
        after = [p for group in optimizer.param_groups for p in group["params"]]
        run.see(all(one is other for one, other in zip(before, after, strict=True)), f"groups after {name}")
    run.shard(model, adamw(model))
    run.loop()


@program(only={**FP32, **UPDATES, "tier": ("cpu", "disk")})
def counts_steps_with_gradients(run: Run) -> None:
    """Its own step sees no gradient where each parameter is stepped by itself."""
    model = run.build(mlp)
    counts = own.Counts(model.parameters(), "own", by_layer=False, idles=False)
    match = "it changes 'k' only in steps in which a parameter has"
    run.refuses(zero.UnsupportedOptimizerError, match, lambda: run.shard(model, counts))
    run.shard(model, counts, offload_optimizer="none", offload_params="none")
    run.loop()


@program(only={**FP32, **UPDATES, "stage": (2,), "tier": ("cpu",)})
def bound_later_and_refused(run: Run) -> None:
    model = run.build(mlp)
    run.shard(model)
    run.refuses(zero.UnsupportedOptimizerError, "Global", lambda: run.bind(own.Global(model.parameters())))
    run.bind(adamw(model))
    run.loop()


def spherical() -> nn.Module:
    model = mlp()
    model[0].weight = own.OnSphere(model[0].weight.detach())
    return model


@program(only={**FP32, **UPDATES, "stage": (1, 3), "tier": ("none",)})
def rules_for_a_class_of_parameters(run: Run) -> None:
    """Refused by name, but for torch's own optimizers, which look at no class."""
    model = run.build(spherical)
    optimizer, match = own.Spherical(model.parameters()), "Spherical(.|\n)*rules of its own for a OnSphere"
    config = zero.ZeroConfig(stage=run.setting.stage)
    run.refuses(zero.UnsupportedOptimizerError, match, lambda: zero.shard(model, optimizer, config))
    run.shard(model, adamw(model))
    run.loop()
