"""LoRA through the stock Trainer on two ranks: the adapter that plain data parallel trains and saves.

Each check asserts by itself; `test_arguments.py` has the list of their names.
"""

from __future__ import annotations

import shutil
from functools import partial
from typing import Any

import pytest
import torch
from harness import (
    OUT,
    RANK,
    Tokens,
    barrier,
    check,
    distance,
    files_under,
    gpt2,
    watch,
)
from peft import LoraConfig, PeftModel, get_peft_model
from trainer_runs import (
    OURS,
    assert_curve,
    curve,
    saved,
    trainer,
)

# LoRA -----------------------------------------------------------------------------------------------------------------


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
    again = PeftModel.from_pretrained(gpt2(0), OUT / name)
    loaded = {key.replace(".default", ""): value for key, value in again.state_dict().items() if "lora" in key}
    assert distance(loaded, saved(OUT / name)) == 0.0
    key = "transformer.wte.weight"
    state = run.model.state_dict()
    assert RANK or torch.equal(state[f"base_model.model.{key}"], gpt2(0).state_dict()[key])
    out["config"] = (OUT / name / "adapter_config.json").read_text()
    out["files"] = [name for name in files_under(OUT / name / "checkpoint-8", OURS) if "optimizer" not in name]
    return out


def adapter_equals(
    name: str, stage: int, reference: dict[str, Any], source: str = "ddp", rel: float = 2e-6, **changes: Any
) -> None:
    """The adapter that plain data parallel trains and saves, and no more."""
    mine = adapter_run(name, stage, **changes)
    assert_curve(mine.pop("curve"), reference["curve"], rel)
    assert mine.pop("after") == pytest.approx(reference["after"], rel=rel)
    assert mine == {name: reference[name] for name in mine}
    for folder in ("checkpoint-4", "checkpoint-8", "."):
        assert distance(saved(OUT / name / folder), saved(OUT / source / folder)) < 1e-6


def adapter_resumes(name: str, source: str, stage: int, tolerance: float, **changes: Any) -> None:
    """Into an adapter that starts elsewhere. In "killed" the newest checkpoint was never finished."""
    checkpoint: str | bool = str(OUT / source / "checkpoint-4")
    if name == "killed":
        if RANK == 0:
            shutil.copytree(OUT / source, OUT / name)
            (OUT / name / "checkpoint-8" / "zero_manifest.json").unlink()
        checkpoint = True
        barrier()
    run = trainer(name, stage, model=adapted(99), learning_rate=1e-2, **changes)
    run.train(resume_from_checkpoint=checkpoint)
    assert distance(saved(OUT / name / "checkpoint-8"), saved(OUT / source / "checkpoint-8")) <= tolerance


def adapter_generates() -> None:
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


def main() -> None:
    ddp = check("ddp", lambda: adapter_run("ddp", None))
    for stage in range(4):
        check(f"stage {stage}", partial(adapter_equals, f"stage{stage}", stage, ddp))
    check("resume", lambda: adapter_resumes("resume3", "stage3", 3, 0.0))
    check("resume newest", lambda: adapter_resumes("killed", "stage3", 1, 1e-6))
    bf16 = check("bf16 ddp", lambda: adapter_run("bf16_ddp", None, bf16=True))
    for stage in (1, 3):  # the best is loaded into a sharded model, where PEFT would cast it
        check(f"bf16 {stage}", partial(adapter_equals, f"bf16_{stage}", stage, bf16, "bf16_ddp", 5e-3, bf16=True))
    check("bf16 resume", lambda: adapter_resumes("bf16_resume", "bf16_3", 3, 0.0, bf16=True))
    check("checkpointing", lambda: adapter_equals("checkpointing", 3, ddp, gradient_checkpointing=True))
    check("generate", adapter_generates)


if __name__ == "__main__":
    watch()
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
