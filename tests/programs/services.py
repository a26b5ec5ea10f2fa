"""What user code asks of a sharded model beside training: words, evaluation in another type, signals, moves, state."""

from __future__ import annotations

import copy
import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp

import hf_zero as zero
from tests.models import gpt2, mlp, sgd
from tests.oracle import Refused, Run, program
from tests.programs.usual import FP32, after_steps, trained_on


@program(reference="average", only=FP32)
def generates_other_lengths(run: Run) -> None:
    model = run.trained_model(gpt2)
    options = {"max_new_tokens": 3 + 2 * run.rank, "do_sample": False, "pad_token_id": 0}
    for step in range(2):
        run.see(model.generate(run.ids(9), **options), "words")
        tokens = run.ids(step)
        model(input_ids=tokens, labels=tokens).loss.backward()
        run.update()


@after_steps(3, only=FP32)
def evaluated_in_bfloat16(run: Run, step: int) -> None:
    engine, x = run.engine_of(run.model), run.inputs(9)
    with torch.no_grad():
        exact = run.model(x)
        if engine is None:
            found = copy.deepcopy(run.model.module if hasattr(run.model, "module") else run.model).bfloat16()(
                x.bfloat16()
            )
        else:
            with engine.shown_in(torch.bfloat16):
                found = run.model(x.bfloat16())
    run.see(
        (str(found.dtype), torch.equal(found, exact), torch.allclose(found.float(), exact, atol=0.05)), "evaluation"
    )


@program(reference="average", only=FP32)
def ends_after_a_signal(run: Run) -> None:
    """Rank 0 receives it; every rank ends after the same step."""
    run.mlp()
    asked = run.engine_of(run.model) is not None
    ends: Callable[[], bool] = zero.on_preemption(run.model, [signal.SIGUSR1]) if asked else lambda: step >= 1
    for step in range(4):
        if step == 1 and run.rank == 0 and asked:
            os.kill(os.getpid(), signal.SIGUSR1)
        run.step(step)
        if ends():
            break
    run.see(step, "last step")


@after_steps(2)
def moved_and_cast(run: Run, step: int) -> None:
    run.refuses(zero.LayoutError, "cannot be moved or cast", run.model.half)
    run.refuses(zero.LayoutError, "cannot be moved or cast", lambda: run.model[0].to("meta"))
    run.model.to("cpu")


@after_steps(2)
def distributed_checkpoint_of_an_optimizer(run: Run, step: int) -> None:
    run.refuses(zero.StateError, "engine.save", lambda: dcp.get_optimizer_state_dict(run.model, run.optimizer))


@program(reference="average", only=FP32)
def trained_without_an_optimizer(run: Run) -> None:
    """It warns once: no step will change the model."""
    model = run.build(mlp)
    run.shard(model)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(3):
            run.loss(step).backward()
    warned = sum("sharded without an optimizer" in str(each.message) for each in found)
    run.see(warned or int(run.is_plain), "warnings")


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
