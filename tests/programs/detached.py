"""Modules after `engine.detach()`: methods that user code had put on them are back, and nothing of the engine is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.models import mlp, sgd
from tests.oracle import Run, program
from tests.programs.usual import FP32

X = torch.linspace(-1, 1, 32).view(2, 16)


class Speaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def generate(self, x: Tensor, synced_gpus: bool = False) -> Tensor:
        return self(x)


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: 2 * function(*args, **kwargs)


def sharded(run: Run, model: Any) -> None:
    run.shard(model, sgd(model))
    if (engine := run.engine_of(model)) is not None:
        engine.compile(using=lambda function: function)


@program(reference="average")
def methods_of_user_code(run: Run) -> None:
    model = run.build(Speaks)
    block, calls = model.blocks[1], []
    block.forward = doubled(block.forward)
    model.generate = doubled(model.generate)
    model.zero_grad = lambda *_, **__: calls.append("zero_grad")
    model.compile = lambda *_, **__: calls.append("compile")
    model.no_sync = "user code's own"
    forward, own = (
        block.forward,
        {name: model.__dict__[name] for name in ("generate", "zero_grad", "compile", "no_sync")},
    )
    sharded(run, model)
    run.step(0)
    with torch.no_grad():
        run.see(model(X), "outputs")
        run.see(model.generate(X), "words")
    run.detach(model)
    for param in () if run.is_plain else model.parameters():
        assert param.untyped_storage().nbytes() == param.nbytes, "its memory has more than its values"
    for number in range(0 if run.is_plain else 2):
        if number > 0:
            zero.shard(model, None, zero.ZeroConfig(stage=run.setting.stage)).detach()
        assert block.forward is forward
        assert all(model.__dict__[name] is method for name, method in own.items())
        names = {
            "forward",
            "_apply",
            "__deepcopy__",
            "__reduce_ex__",
            "_call_impl",
            "_compiled_call_impl",
            "state_dict",
        }
        assert not names & {*model.blocks[0].__dict__, *model.__dict__}
        assert model.blocks[0](X).dtype == model.generate(X).dtype == torch.float32
        with torch.no_grad():
            twin = Speaks()
            twin.load_state_dict(model.state_dict())
            twin.blocks[1].forward = doubled(twin.blocks[1].forward)
            assert torch.equal(model(X), twin(X))
            assert torch.equal(model.generate(X), 2 * twin(X))


@program(reference="average", only={"stage": (2, 3)})
def a_method_put_on_later(run: Run) -> None:
    """It is user code's own to take off."""
    model = run.build(Speaks)
    sharded(run, model)
    run.step(0)
    if run.is_plain:
        return
    model.blocks[0].forward = wrapper = doubled(model.blocks[0].forward)
    run.detach(model)
    assert model.blocks[0].forward is wrapper
    del model.blocks[0].forward
    twin = Speaks()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model(X), twin(X))


@program(reference="average", only=FP32)
def trained_on(run: Run) -> None:
    """The same optimizer goes on with the state that it had, in the model's own type."""
    for dtype in (torch.float32, torch.float64):
        model = run.build(lambda dtype=dtype: mlp(depth=2).to(dtype))  # type: ignore[misc]
        run.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        optimizer = run.optimizer
        for step in range(4):
            if step == 2:
                with torch.inference_mode():  # what it allocates is trained later
                    run.detach(model)
            rows = run.inputs(step) if step < 2 else X
            loss = model(rows.to(dtype)).square().mean()
            loss.backward()
            run.see(loss, f"loss in {dtype}")
            optimizer.step()
            optimizer.zero_grad()
