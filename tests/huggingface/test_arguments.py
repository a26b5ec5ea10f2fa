"""Arguments of the stock Trainer that touch how a model is held, on two ranks, against the same script without them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainerCallback

from tests.huggingface.trainer_runs import trainer
from tests.kit.jobs.harness import RANK, Tokens, bert, distance, gpt2

pytestmark = [pytest.mark.gloo, pytest.mark.wide]


def run(name: str, stage: int | None, build: Any = gpt2, **changes: Any) -> Trainer:
    """`stage=None` is plain data parallel."""
    usual = {"max_steps": 3, "gradient_accumulation_steps": 1, "eval_strategy": "no", "save_strategy": "no"}
    return trainer(name, stage, model=build(), **{**usual, **changes})


def losses(run: Trainer) -> list[float]:
    return [entry[name] for entry in run.state.log_history for name in ("loss", "grad_norm") if name in entry]


# Full evaluation ---------------------------------------------------------------------------------------------------------

CLASSES = Tokens(classes=3), Tokens(rows=6, classes=3, seed=8)


def evaluated(kind: str, stage: int | None, **changes: Any) -> dict[str, Any]:
    made = run("eval", stage, bert, data=CLASSES, **{f"{kind}_full_eval": True}, **changes)
    loss = made.evaluate()["eval_loss"]
    found = made.predict(CLASSES[1])
    assert np.isfinite(found.predictions.astype(np.float64)).all()
    return {"loss": loss, "predictions": found.predictions.astype(np.float64).tolist(), "run": made}


def full_eval(kind: str, stage: int, **changes: Any) -> None:
    plain = evaluated(kind, None)
    exact = run("exact", None, bert, data=CLASSES).evaluate()["eval_loss"]
    assert plain["loss"] != exact, "the type shows"
    mine = evaluated(kind, stage, **changes)
    assert mine["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert np.array_equal(mine["predictions"], plain["predictions"])
    # It is trained as if it had not been evaluated, and evaluated once more afterwards.
    made = mine["run"]
    assert {param.dtype for param in made.model.parameters()} == {torch.float32}
    made.train()
    after = made.evaluate()["eval_loss"]
    state = {name: value.clone() for name, value in made.model.state_dict().items()}
    again = run("unseen", stage, bert, data=CLASSES, **changes)
    again.train()
    assert losses(made) == losses(again)
    unseen = again.model.state_dict()
    assert RANK or distance(state, unseen) == 0.0
    assert after == pytest.approx(again.evaluate()["eval_loss"], rel=2e-2)


# torch.compile -----------------------------------------------------------------------------------------------------------


def compiled(backend: str, stage: int, rel: float = 1e-5, **changes: Any) -> None:
    """Equal to training as it is, and no graph is made after the second step."""
    from torch._dynamo.utils import counters

    plain = run("plain", stage, **changes)
    plain.train()
    torch._dynamo.reset()
    counters.clear()
    seen: list[int] = []

    class Count(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen.append(counters["stats"]["unique_graphs"])

    made = run("compiled", stage, torch_compile=True, torch_compile_backend=backend, callbacks=[Count()], **changes)
    made.train()
    assert seen[-1] == seen[1] > 0, seen
    assert losses(made) == pytest.approx(losses(plain), rel=rel)
    assert made.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=rel)
    torch._dynamo.reset()


WORK: dict[str, Callable[[], None]] = {
    **{f"bf16_full_eval {stage}": partial(full_eval, "bf16", stage) for stage in range(4)},
    **{
        f"bf16_full_eval offloaded to {tier}": partial(full_eval, "bf16", 3, offload_params=tier, offload_dir=".")
        for tier in ("cpu", "disk")
    },
    **{f"fp16_full_eval {stage}": partial(full_eval, "fp16", stage) for stage in (1, 3)},
    "compiled eager 2": partial(compiled, "eager", 2),
    **{f"compiled aot_eager {stage}": partial(compiled, "aot_eager", stage) for stage in (1, 3)},
    "compiled bf16 3": partial(compiled, "aot_eager", 3, 2e-2, bf16=True),
    "compiled inductor 3": partial(compiled, "inductor", 3),  # needs a C++ compiler, as inductor does on CPU
}


@pytest.mark.parametrize("name", WORK)
def test_on_two_ranks(on_two: Callable[..., Any], name: str) -> None:
    on_two(WORK[name])
