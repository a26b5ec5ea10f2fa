"""Arguments and calls of the stock Trainer and Accelerator that touch how a model is held: full evaluation in another type,
torch.compile, freezing in a callback, generation. Each against the same script without the plugin."""

from __future__ import annotations

import contextlib
import io
import os
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from harness import OUT, RANK, WORLD, Tokens, bert, check, distance, fresh, gpt2, watch
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_zero as zero


def run(
    name: str, stage: int | None, build: Any = gpt2, callbacks: Any = None, data: Any = None, **changes: Any
) -> Trainer:
    """`stage=None` is plain data parallel."""
    fresh()
    settings: dict[str, Any] = {
        "output_dir": str(OUT / name), "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_steps": 3,
        "learning_rate": 3e-3, "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "use_cpu": True, "seed": 3, "optim": "adamw_torch",
    }  # fmt: skip
    offload = changes.pop("offload_params", "none")
    if stage is not None:
        offloaded = {"offload_params": offload, "offload_dir": str(OUT / "tier") if offload == "disk" else None}
        settings["parallelism_config"] = zero.ZeroPlugin(stage=stage, **offloaded)
    args = TrainingArguments(**{**settings, **changes})
    data = data or (Tokens(), Tokens(rows=6, seed=8))
    return Trainer(build(), args, train_dataset=data[0], eval_dataset=data[1], callbacks=callbacks)


def losses(trainer: Trainer) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history for name in ("loss", "grad_norm") if name in entry]


# Full evaluation ---------------------------------------------------------------------------------------------------------

CLASSES = Tokens(classes=3), Tokens(rows=6, classes=3, seed=8)


def evaluated(kind: str, stage: int | None, **changes: Any) -> dict[str, Any]:
    trainer = run("eval", stage, bert, data=CLASSES, **{f"{kind}_full_eval": True}, **changes)
    loss = trainer.evaluate()["eval_loss"]
    found = trainer.predict(CLASSES[1])
    assert np.isfinite(found.predictions.astype(np.float64)).all()
    return {"loss": loss, "predictions": found.predictions.astype(np.float64).tolist(), "trainer": trainer}


def full_eval(kind: str, stage: int, **changes: Any) -> None:
    plain = evaluated(kind, None)
    exact = run("exact", None, bert, data=CLASSES).evaluate()["eval_loss"]
    assert plain["loss"] != exact, "the type shows"
    mine = evaluated(kind, stage, **changes)
    assert mine["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert np.array_equal(mine["predictions"], plain["predictions"])
    # It is trained as if it had not been evaluated, and evaluated once more afterwards.
    trainer = mine["trainer"]
    assert {param.dtype for param in trainer.model.parameters()} == {torch.float32}
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    again = run("unseen", stage, bert, data=CLASSES, **changes)
    again.train()
    assert losses(trainer) == losses(again)
    unseen = again.model.state_dict()
    assert RANK or distance(state, unseen) == 0.0
    assert after == pytest.approx(again.evaluate()["eval_loss"], rel=2e-2)


# torch.compile -----------------------------------------------------------------------------------------------------------


def compiled(backend: str, stage: int) -> None:
    """Equal to training as it is, and no graph is made in a later step."""
    from torch._dynamo.utils import counters

    plain = run("plain", stage)
    plain.train()
    torch._dynamo.reset()
    counters.clear()
    seen: list[int] = []

    class Count(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen.append(counters["stats"]["unique_graphs"])

    trainer = run(
        "compiled", stage, torch_compile=True, torch_compile_backend=backend, max_steps=3, callbacks=[Count()]
    )
    trainer.train()
    assert seen[0] > 0, "something is compiled"
    assert seen[-1] == seen[0], seen
    assert losses(trainer) == pytest.approx(losses(plain), rel=1e-5)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)


def compiled_bf16(stage: int) -> None:
    plain = run("plain", stage, bf16=True)
    plain.train()
    torch._dynamo.reset()
    trainer = run("compiled", stage, torch_compile=True, torch_compile_backend="aot_eager", bf16=True)
    trainer.train()
    assert losses(trainer) == pytest.approx(losses(plain), rel=2e-2)


# Freezing ----------------------------------------------------------------------------------------------------------------


class Freeze(TrainerCallback):
    """The first block for some steps, the second from then on; also where the run goes on from a checkpoint."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        blocks = model.transformer.h
        blocks[0].requires_grad_(not 1 <= state.global_step < 3)
        blocks[1].requires_grad_(state.global_step < 3)


def freezing(stage: int) -> None:
    common: dict[str, Any] = {"max_steps": 6, "ddp_find_unused_parameters": True, "weight_decay": 0.1}
    plain = run("freeze_plain", None, callbacks=[Freeze()], **common)
    plain.train()
    folder = f"freeze{stage}"
    mine = run(folder, stage, callbacks=[Freeze()], **{**common, "save_strategy": "steps", "save_steps": 2})
    mine.train()
    assert losses(mine) == pytest.approx(losses(plain), rel=2e-6)
    state = mine.model.state_dict()
    # AdamW makes of a gradient that is 0 but for rounding, as that of a key's bias, a step of its own size.
    assert RANK or distance(dict(state), dict(plain.model.state_dict())) < 1e-5
    for step in (2, 4):  # the first block is frozen, then the second
        again, said = run(folder, stage, callbacks=[Freeze()], **common), io.StringIO()
        with contextlib.redirect_stderr(said):
            again.train(resume_from_checkpoint=str(OUT / folder / f"checkpoint-{step}"))
        assert said.getvalue().count(f"resumed from checkpoint-{step} (") == (RANK == 0), "once, on the first rank"
        assert losses(again)[-4:] == pytest.approx(losses(mine)[-4:], rel=2e-6)
        other = again.model.state_dict()
        assert RANK or distance(dict(state), dict(other)) < 1e-6


# Generation --------------------------------------------------------------------------------------------------------------


def generates(stage: int, precision: str) -> None:
    """Ranks that generate different numbers of tokens, before, between and after steps, without Trainer or Accelerator."""
    ids = Tokens()[RANK]["input_ids"][None]
    whole, model = gpt2(), gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero.shard(model, optimizer, zero.ZeroConfig(stage=stage), mixed_precision=precision)
    for step in range(3):
        values = [None]
        state = {name: value.clone() for name, value in model.state_dict().items()}
        if WORLD > 1:
            values = [state]
            torch.distributed.broadcast_object_list(values, 0)
        whole.load_state_dict(values[0])
        with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext():
            expected = whole.generate(ids[:, :4], max_new_tokens=3 + 4 * RANK, do_sample=False, pad_token_id=0)
        found = model.generate(ids[:, :4], max_new_tokens=3 + 4 * RANK, do_sample=False, pad_token_id=0)
        assert torch.equal(found, expected), step
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    watch()
    wanted = os.environ.get("ONLY", "")
    works: dict[str, Any] = {}
    for kind in ("bf16", "fp16"):
        for stage in (1, 3):
            works[f"{kind}_full_eval {stage}"] = partial(full_eval, kind, stage)
    for stage in (0, 2):
        works[f"bf16_full_eval {stage}"] = partial(full_eval, "bf16", stage)
    for tier in ("cpu", "disk"):
        works[f"bf16_full_eval offloaded to {tier}"] = partial(full_eval, "bf16", 3, offload_params=tier)
    works["compiled eager 2"] = partial(compiled, "eager", 2)
    works["compiled aot_eager 1"] = partial(compiled, "aot_eager", 1)
    works["compiled aot_eager 3"] = partial(compiled, "aot_eager", 3)
    works["compiled bf16 3"] = partial(compiled_bf16, 3)
    for stage in (1, 3):
        works[f"freezing {stage}"] = partial(freezing, stage)
        works[f"generates {stage} bf16"] = partial(generates, stage, "bf16")
    works["generates 3 no"] = partial(generates, 3, "no")
    works["compiled inductor 3"] = partial(compiled, "inductor", 3)
    for name, work in works.items():
        if re.search(wanted, name) and ("inductor" not in name or "inductor" in wanted):
            check(name, work)


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
