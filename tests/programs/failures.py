"""Steps that fail and are caught: such a step has not been, or was made as a whole; later steps are right."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.kit.injection import fails, instead
from tests.models import LanguageModel, sgd, token_loss
from tests.oracle import Run, program


class Failed(Exception):
    """What hooks and closures raise here."""


class Bomb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Failed


def throw(*_: Any) -> Any:
    raise Failed


def throw_out_of_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError("none is left")


def layer(run: Run, block: int) -> nn.Module:
    return run.model.body.blocks[block].down


def micro(run: Run, step: int) -> None:
    tokens = run.ids(step)
    token_loss(run.model(tokens), tokens).backward()


def step_in_two(run: Run, step: int) -> None:
    with run.no_sync(run.model):
        micro(run, 2 * step)
    micro(run, 2 * step + 1)
    run.update()


def in_forward(run: Run) -> None:
    with layer(run, 1).register_forward_pre_hook(throw):
        step_in_two(run, 99)


def out_of_memory(run: Run) -> None:
    with layer(run, 1).register_forward_pre_hook(throw_out_of_memory):
        step_in_two(run, 99)


def in_second_forward(run: Run) -> None:
    with run.no_sync(run.model):
        micro(run, 98)
    with layer(run, 2).register_forward_pre_hook(throw):
        micro(run, 99)


def in_backward(run: Run) -> None:
    with layer(run, 1).register_forward_hook(lambda module, args, out: Bomb.apply(out)):
        micro(run, 99)


def in_second_backward(run: Run) -> None:
    micro(run, 98)
    with layer(run, 0).register_forward_hook(lambda module, args, out: Bomb.apply(out)):
        micro(run, 99)


def in_a_gradient_hook(run: Run) -> None:
    """After gradients of some units were sent."""
    with layer(run, 0).weight.register_hook(throw):
        step_in_two(run, 99)


def between_backward_and_step(run: Run) -> None:
    micro(run, 99)
    raise Failed


def in_a_pre_hook(run: Run) -> None:
    with run.optimizer.register_step_pre_hook(throw):
        step_in_two(run, 99)


def in_the_closure(run: Run) -> None:
    run.optimizer.step(throw)


def in_the_closures_backward(run: Run) -> None:
    def closure() -> None:
        run.optimizer.zero_grad()
        in_backward(run)

    run.optimizer.step(closure)


def in_an_early_post_hook(run: Run) -> None:
    """The step is made; the hook is one from before the model was sharded."""
    run.kept = throw
    try:
        step_in_two(run, 99)
    finally:
        run.kept = None


def in_a_late_post_hook(run: Run) -> None:
    """The step is made."""
    with run.optimizer.register_step_post_hook(throw):
        step_in_two(run, 99)


@contextlib.contextmanager
def caught(*errors: type[BaseException]) -> Iterator[None]:
    try:
        yield
    except errors:
        return
    raise AssertionError("nothing was raised")


def _fails(run: Run, *ways: Callable[[Run], None]) -> None:
    model = run.build(LanguageModel)
    optimizer = sgd(model)
    optimizer.register_step_post_hook(lambda *_: run.kept and run.kept())
    run.shard(model, optimizer)
    step_in_two(run, 0)
    for step, fail in enumerate(ways, 1):
        with caught(Failed, torch.OutOfMemoryError):
            fail(run)
        run.optimizer.zero_grad()
        run.forget_gradients()
        step_in_two(run, step)
        with torch.no_grad():
            run.see(model(run.ids(step)).norm(), f"output after {fail.__name__}")


@program(reference="average")
def passes_fail(run: Run) -> None:
    _fails(
        run, in_forward, out_of_memory, in_second_forward, in_backward, in_second_backward, in_a_gradient_hook,
        between_backward_and_step,
    )  # fmt: skip


@program(reference="average")
def steps_fail(run: Run) -> None:
    _fails(
        run, in_a_pre_hook, in_the_closure, in_the_closures_backward, in_an_early_post_hook, in_a_late_post_hook
    )  # fmt: skip


@program(reference="average")
def tried_again(run: Run) -> None:
    """Without `zero_grad`: gradients of earlier micro-batches stay where a forward or a step raised."""
    model = run.trained_model(LanguageModel)
    for step in range(3):
        with run.no_sync(model):
            micro(run, 2 * step)
        with caught(Failed), layer(run, 1).register_forward_pre_hook(throw):
            micro(run, 2 * step + 1)
        micro(run, 2 * step + 1)
        with caught(Failed), run.optimizer.register_step_pre_hook(throw):
            run.optimizer.step()
        run.clip_grad_norm_(model, float("inf"))
        run.update()


class Breaks(torch.optim.AdamW):
    """Raises once where its step begins, after it has changed its rate."""

    is_broken = False

    def step(self, closure: Any = None) -> Any:
        if self.is_broken:
            self.is_broken = False
            self.param_groups[0]["lr"] *= 4
            raise Failed
        return super().step(closure)


@program(reference="average")
def tried_again_after_the_optimizer_raised(run: Run) -> None:
    run.trained_model(LanguageModel, lambda model: Breaks(model.parameters(), lr=1e-2, eps=1e-3))
    for step in range(4):
        micro(run, step)
        if step == 2:
            run.optimizer.is_broken = True
            with caught(Failed):
                run.optimizer.step()
            if run.is_plain:  # the engine gives the options back
                run.optimizer.param_groups[0]["lr"] /= 4
        run.see(run.optimizer.param_groups[0]["lr"], "rate")
        run.update()


@program(reference="average")
def backward_tried_again(run: Run) -> None:
    """A first backward that raised leaves nothing of its own. Together with a second, earlier gradients are lost."""
    model = run.trained_model(LanguageModel)
    step_in_two(run, 0)
    with run.no_sync(model):
        with caught(Failed):
            in_backward(run)
        if run.is_plain:  # keeps what autograd had come to
            run.optimizer.zero_grad()
        micro(run, 2)
    micro(run, 3)
    run.update()
    with run.no_sync(model):
        micro(run, 4)
    with caught(Failed):
        in_backward(run)
    micro(run, 5)  # does not bring them back
    for act in (run.optimizer.step, lambda: run.clip_grad_norm_(model, 1.0)):
        run.refuses(zero.StateError, r"a backward of this step raised.*Call zero_grad\(\)", act)
    run.optimizer.zero_grad()
    run.forget_gradients()
    step_in_two(run, 3)


@program(reference="average", only={"stage": (1, 2, 3), "tier": ("cpu", "disk", "cpu/cpu")})
def forward_fails_where_backward_steps(run: Run) -> None:
    """A failed forward is no half step."""
    model = run.build(LanguageModel)
    run.shard(model, sgd(model), step_in_backward=True)
    for step in range(2):
        with caught(Failed), layer(run, 1).register_forward_pre_hook(throw):
            micro(run, 99)
        run.optimizer.zero_grad()
        step_in_two(run, step)


@program(reference="average", only={"precision": ("fp16",)})
def scaled_and_tried_again(run: Run) -> None:
    """The scaler is user code's; a step that raised before it wrote anything is made again by `scaler.step`."""
    run.trained_model(LanguageModel)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    for step in range(6):
        tokens = run.ids(step)
        if step % 2:
            with caught(Failed), layer(run, 1).register_forward_hook(lambda module, args, out: Bomb.apply(out)):
                scaler.scale(token_loss(run.model(tokens), tokens)).backward()
            run.optimizer.zero_grad()
        scaler.scale(token_loss(run.model(tokens), tokens)).backward()
        run.sync_gradients()
        with contextlib.suppress(Failed), run.optimizer.register_step_pre_hook(throw):
            scaler.step(run.optimizer)  # a step that overflowed is not called
        with contextlib.suppress(RuntimeError):  # that it was left out already
            scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        run.forget_gradients()
        run.see(scaler.get_scale(), "the scale")


@contextlib.contextmanager
def failing_disk(kind: str) -> Iterator[None]:
    """A system call on the file of the disk tier, which has no name, fails."""

    def call(real: Any, fd: int, *args: Any) -> int:
        is_tier = not os.fstat(fd).st_nlink
        return int((fails(errno.EIO)(real, fd, *args)) if is_tier else real(fd, *args))

    with instead(os, **{kind: call}):
        yield


@program(reference="average", only={"stage": (3,), "tier": ("disk", "disk/disk"), "replicas": (1,)})
def disk_fails_in_backward(run: Run) -> None:
    """For gradients, on one rank: every rank raises, nothing was updated, and training continues."""
    run.trained_model(LanguageModel)

    def both(step: int) -> None:
        micro(run, 2 * step)
        micro(run, 2 * step + 1)

    both(0)
    run.update()
    for step, kind in enumerate(("pwritev", "preadv"), 1):
        micro(run, 8)
        tokens = run.ids(9)
        loss = token_loss(run.model(tokens), tokens)
        if run.engine_of(run.model) is not None:
            run.engine_of(run.model).finish_step()
        with failing_disk(kind) if run.rank == 1 and not run.is_plain else contextlib.nullcontext():
            run.refuses(zero.TierError, "(?s)rank 1.*The disk failed|The disk failed.*rank 1", loss.backward)
        run.refuses(zero.StateError, r"zero_grad\(\)", run.optimizer.step)
        run.optimizer.zero_grad()
        run.forget_gradients()
        both(step)
        run.update()
