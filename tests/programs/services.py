"""What user code asks of a sharded model beside training: words, evaluation in another type, signals, moves, state."""

from __future__ import annotations

import functools
import os
import signal
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.models import LanguageModel, Odd, adamw, gpt2, mlp, sgd
from tests.oracle import Refused, Run, program
from tests.programs.failures import step_in_two
from tests.programs.usual import FP32, LOWEST, after_steps, trained_on


@program(reference="average", only=FP32, accept=lambda setting: setting.stage < 3 or not LOWEST)
def generates_other_lengths(run: Run) -> None:
    model = run.trained_model(gpt2)
    options = {"max_new_tokens": 3 + 2 * run.rank, "do_sample": False, "pad_token_id": 0}
    for step in range(2):
        run.see(model.generate(run.ids(9), **options), "words")
        tokens = run.ids(step)
        model(input_ids=tokens, labels=tokens).loss.backward()
        run.update()


@program(reference="average", more={"ranks": (1, 2)})
def ends_after_a_signal(run: Run) -> None:
    """One rank receives it. All end after the same step, and resume from what they saved as if nothing had been."""
    model = run.trained_model(functools.partial(LanguageModel, tied=True), adamw)
    before, is_hit = signal.getsignal(signal.SIGUSR1), run.rank == run.world - 1
    ends = None if run.is_plain else zero.on_preemption(model)
    for step in range(5):
        if step == 2 and is_hit and ends is not None:
            os.kill(os.getpid(), signal.SIGUSR1)
        step_in_two(run, step)
        if step == 2 if ends is None else ends():
            break
    run.see(step, "last step")
    run.save(model)
    if ends is not None:
        ends.close()
        assert ends.signalled is is_hit
        assert signal.getsignal(signal.SIGUSR1) is before
    run.load(run.trained_model(functools.partial(LanguageModel, tied=True), adamw))
    for step in (3, 4):
        step_in_two(run, step)


@after_steps(2, tells=lambda setting: setting.precision == "fp32")
def moved_and_cast(run: Run, step: int) -> None:
    run.refuses(zero.LayoutError, r"cannot be moved or cast.*zero\.engine_of\(model\)\.detach\(\)", run.model.half)
    run.refuses(zero.LayoutError, "cannot be moved or cast", lambda: run.model[0].to("meta"))
    run.model.to("cpu")
    if run.setting.precision == "fp32":
        run.model.added = nn.Linear(2, 2).double()
        run.see(run.model.float().added.weight.dtype, "the type of what was added")
        del run.model.added


@program(reference="average", only=FP32)
def trained_without_an_optimizer(run: Run) -> None:
    """It warns once, in the second step: no step will change the model. Evaluations, and one that comes later, do not warn."""
    for has_one in (False, True):
        model = run.build(mlp)
        run.shard(model)
        warned = []
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for step in range(3):
                with torch.no_grad():
                    run.loss(step)
            if has_one:
                run.bind(sgd(model))
            for step in range(3):
                run.loss(step).backward()
                if has_one:
                    run.update()
                warned.append(sum("sharded without an optimizer" in str(each.message) for each in found))
        expected = [0, 0, 0] if has_one else [0, 1, 1]
        run.see(expected if run.is_plain else warned, "warnings")


class Merges(nn.Linear):
    """Registers its frozen weight again in every forward, as PEFT's LoRA on attention does."""

    def forward(self, x: Tensor) -> Tensor:
        merged = self.weight.data + 1.0
        del self.weight
        self.weight = nn.Parameter(merged, requires_grad=False)
        y = super().forward(x)
        self.weight = nn.Parameter(self.weight.data - 1.0, requires_grad=False)
        return y


def merging() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(16, 16), Merges(16, 16), nn.Linear(16, 16))
    model[1].weight.requires_grad_(False)
    return model


def sgd_of_trained(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)


@trained_on(merging, sgd_of_trained, only=FP32)
def frozen_parameters_registered_again(run: Run, step: int) -> Tensor:
    known: Any = run.model[1].weight
    loss = run.model(run.inputs(step)).square().mean()
    run.see(run.is_plain or run.model[1].weight is known, "the parameter that the engine has")
    return loss


def sharing() -> nn.Sequential:
    model = mlp()
    model[2].weight.data = model[0].weight.data
    return model


@trained_on(sharing, sgd, only={"deferred": (False,)}, refused=(Refused(zero.LayoutError, "shares memory with"),))
def parameters_share_memory(run: Run, step: int) -> Tensor:
    return run.loss(step)


@program(reference="average")
def away_between_backward_and_step(run: Run) -> None:
    """States come back as they were."""
    run.mlp()
    engine = run.engine_of(run.model)
    for step in range(4):
        run.loss(step).backward()
        if engine is not None:
            with torch.inference_mode():  # the optimizer updates what it allocates
                engine.offload_states()
            run.refuses(zero.StateError, "reload_states", lambda step=step: run.loss(step))
            with torch.inference_mode():
                engine.reload_states()
        run.update()


@program(reference="average", only={"stage": (1, 2), "tier": ("none",)})
def away_after_a_save(run: Run) -> None:
    """A save has looked at the memory of the parameters, and user code still does; it is freed all the same."""
    model = run.trained_model(Odd)
    run.save(model)
    run.load(model)
    held = [param.data for param in model.parameters()]
    if (engine := run.engine_of(model)) is not None:
        engine.offload_states()
        with torch._C.DisableTorchFunctionSubclass():  # else asking for the storage reads the values, which are away
            assert all(param.untyped_storage().nbytes() == 0 for param in model.parameters())
        engine.reload_states()
    del held
    run.step(0)
