"""LoRA through the stock Trainer on two ranks: the adapter that plain data parallel trains and saves."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PeftModel, get_peft_model
from transformers import TrainerCallback

from tests.huggingface.trainer_runs import (
    OURS,
    assert_curve,
    curve,
    saved,
    trainer,
)
from tests.kit.jobs.harness import (
    RANK,
    Tokens,
    barrier,
    distance,
    files_under,
    gpt2,
)

pytestmark = [pytest.mark.gloo, pytest.mark.wide]


def adapted(seed: int = 0) -> PeftModel:
    base = gpt2(0)
    torch.manual_seed(seed)
    config = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    return get_peft_model(base, config)


def adapter_run(name: str, stage: int | None, **changes: Any) -> dict[str, Any]:
    """Train, load the best, evaluate, save. What PEFT loads again is the adapter; the base stays as it was."""
    run = trainer(name, stage, model=adapted(), learning_rate=1e-2, load_best_model_at_end=True, **changes)
    run.train()
    out = {"curve": curve(run), "after": run.evaluate()["eval_loss"]}
    run.save_model()
    barrier()
    again = PeftModel.from_pretrained(gpt2(0), Path(name))
    loaded = {key.replace(".default", ""): value for key, value in again.state_dict().items() if "lora" in key}
    assert distance(loaded, saved(Path(name))) == 0.0
    key = "transformer.wte.weight"
    state = run.model.state_dict()
    assert RANK or torch.equal(state[f"base_model.model.{key}"], gpt2(0).state_dict()[key])
    out["config"] = (Path(name, "adapter_config.json")).read_text()
    out["files"] = [name for name in files_under(Path(name, "checkpoint-8"), OURS) if "optimizer" not in name]
    return out


reference = functools.cache(adapter_run)


def equals_data_parallel(name: str, stage: int, rel: float = 2e-6, **changes: Any) -> None:
    """The adapter that plain data parallel trains and saves, and no more."""
    source = "lora_ddp_bf16" if "bf16" in changes else "lora_ddp"
    plain = reference(source, None, bf16="bf16" in changes)
    mine = dict(reference(name, stage, **changes))
    assert_curve(mine.pop("curve"), plain["curve"], rel)
    assert mine.pop("after") == pytest.approx(plain["after"], rel=rel)
    assert mine == {name: plain[name] for name in mine}
    for folder in ("checkpoint-4", "checkpoint-8", "."):
        assert distance(saved(Path(name, folder)), saved(Path(source, folder))) < 1e-6


def resumes(name: str, stage: int, tolerance: float, **changes: Any) -> None:
    """Into an adapter that starts elsewhere. In "killed" the newest checkpoint was never finished."""
    source = "lora_bf16_3" if "bf16" in changes else "lora_3"
    reference(source, 3, **changes)
    checkpoint: str | bool = f"{source}/checkpoint-4"
    if name == "killed":
        if RANK == 0:
            shutil.copytree(source, name)
            Path(name, "checkpoint-8", "zero_manifest.json").unlink()
        checkpoint = True
        barrier()
    run = trainer(name, stage, model=adapted(99), learning_rate=1e-2, **changes)
    run.train(resume_from_checkpoint=checkpoint)
    assert distance(saved(Path(name, "checkpoint-8")), saved(Path(source, "checkpoint-8"))) <= tolerance


def generates() -> None:
    """Through the adapter's wrapper and through the base model; ranks end at different lengths."""
    run = trainer("generate", 3, model=adapted(), save_strategy="no", max_steps=2)
    run.train()
    states: list[Any] = [{key: value.clone() for key, value in run.model.state_dict().items()}]
    torch.distributed.broadcast_object_list(states, 0)
    twin = adapted()
    twin.load_state_dict(states[0])
    prompt = Tokens()[RANK]["input_ids"][None, :4]
    settings: dict[str, Any] = {"max_new_tokens": 3 + 4 * RANK, "do_sample": False, "pad_token_id": 0}
    run.model.eval(), twin.eval()
    whole = twin.generate(input_ids=prompt, **settings)
    assert torch.equal(run.model.generate(input_ids=prompt, **settings), whole)
    assert torch.equal(run.model.get_base_model().generate(prompt, **settings), whole)


class Allocate(TrainerCallback):
    """AdaLoRA's user calls this in every step."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.base_model.update_and_allocate(state.global_step)


def allocates_ranks() -> None:
    """AdaLoRA saves the rows that its masks keep, in checkpoints and at the end, and the masks in its config."""
    config = {"init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 1, "total_step": 8, "target_modules": ["c_attn"]}
    for name, stage in (("adalora_ddp", None), ("adalora", 3)):
        torch.manual_seed(0)
        model = get_peft_model(gpt2(0), AdaLoraConfig(fan_in_fan_out=True, task_type="CAUSAL_LM", **config))
        run = trainer(name, stage, model=model, callbacks=[Allocate()])
        run.train()
        run.save_model()
    for folder in ("checkpoint-4", "."):
        mine, plain = Path("adalora", folder), Path("adalora_ddp", folder)
        assert distance(saved(mine), saved(plain)) < 1e-5
        assert (mine / "adapter_config.json").read_text() == (plain / "adapter_config.json").read_text()
    assert any(len(value) < 4 for key, value in saved(Path("adalora")).items() if "lora_E" in key)


WORK: dict[str, Callable[[], None]] = {
    **{f"stage {stage}": partial(equals_data_parallel, f"lora_{stage}", stage) for stage in range(4)},
    # the best is loaded into a sharded model, where PEFT would cast it
    **{
        f"bf16 {stage}": partial(equals_data_parallel, f"lora_bf16_{stage}", stage, 5e-3, bf16=True) for stage in (1, 3)
    },
    "resume": partial(resumes, "lora_again", 3, 0.0),
    "resume newest": partial(resumes, "killed", 1, 1e-6),
    "bf16 resume": partial(resumes, "lora_bf16_again", 3, 0.0, bf16=True),
    "checkpointing": partial(equals_data_parallel, "lora_checkpointing", 3, gradient_checkpointing=True),
    "generate": generates,
    "adalora": allocates_ranks,
}


@pytest.mark.parametrize("name", WORK)
def test_on_two_ranks(on_two: Callable[..., Any], name: str) -> None:
    on_two(WORK[name])
