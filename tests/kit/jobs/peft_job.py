"""LoRA on two ranks: what is trained and saved is the adapter, the same at every stage as under plain data parallel."""

from __future__ import annotations

import json
import shutil
from typing import Any

import torch
from harness import OUT, RANK, Tokens, arguments, barrier, check, distance, files_under, fresh, gpt2, watch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import Trainer


def adapted(seed: int = 0) -> PeftModel:
    base = gpt2(0)
    torch.manual_seed(seed)
    config = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    return get_peft_model(base, config)


def trainer(name: str, stage: int | None, seed: int = 0, callbacks: list[Any] | None = None, **changes: Any) -> Trainer:
    fresh()
    args = arguments(
        OUT / name,
        stage,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=6,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        seed=3,
        **changes,
    )
    return Trainer(
        model=adapted(seed),
        args=args,
        train_dataset=Tokens(),
        eval_dataset=Tokens(rows=8, seed=8),
        callbacks=callbacks,
    )


def adapter(name: str, step: int) -> dict[str, Tensor]:
    barrier()
    return load_file(OUT / name / f"checkpoint-{step}" / "adapter_model.safetensors")


def whole_run(name: str, stage: int | None, **changes: Any) -> dict[str, Any]:
    run = trainer(name, stage, load_best_model_at_end=True, **changes)
    run.train()
    loss = run.evaluate()["eval_loss"]
    run.save_model()
    barrier()
    reloaded = PeftModel.from_pretrained(gpt2(0), OUT / name)
    final = load_file(OUT / name / "adapter_model.safetensors")
    mine = {key.replace(".default", ""): value for key, value in reloaded.state_dict().items() if "lora" in key}
    if RANK == 0:
        reloaded.save_pretrained(OUT / f"{name}_stock")
    frozen = run.model.state_dict()
    base = gpt2(0).state_dict()
    return {
        "loss": [entry["loss"] for entry in run.state.log_history if "loss" in entry],
        "grad_norm": [entry["grad_norm"] for entry in run.state.log_history if "grad_norm" in entry],
        "eval_loss": loss,
        "files": files_under(OUT / name / "checkpoint-6"),
        "reloaded": distance(mine, final),
        "as stock": RANK != 0
        or (OUT / f"{name}_stock" / "adapter_model.safetensors").read_bytes()
        == (OUT / name / "adapter_model.safetensors").read_bytes(),
        "adapter_config": (OUT / name / "adapter_config.json").read_text(),
        "frozen": float(
            (frozen["base_model.model.transformer.wte.weight"] - base["transformer.wte.weight"]).abs().max()
        )
        if RANK == 0
        else 0.0,
        "config": json.loads((OUT / name / "adapter_config.json").read_text())["peft_type"],
    }


def compare(name: str, reference: str) -> dict[str, float]:
    out = {str(step): distance(adapter(name, step), adapter(reference, step)) for step in (3, 6)}
    out["final"] = distance(
        load_file(OUT / name / "adapter_model.safetensors"), load_file(OUT / reference / "adapter_model.safetensors")
    )
    return out


def resume(name: str, source: str, stage: int, **changes: Any) -> float:
    run = trainer(name, stage, seed=99, **changes)
    run.train(resume_from_checkpoint=str(OUT / source / "checkpoint-3"))
    return distance(adapter(name, 6), adapter(source, 6))


def resume_newest(source: str) -> float:
    """A killed run: its newest adapter checkpoint was never finished."""
    if RANK == 0:
        shutil.copytree(OUT / source, OUT / "killed")
        (OUT / "killed" / "checkpoint-6" / "zero_manifest.json").unlink()
    barrier()
    run = trainer("killed", 1, seed=99)
    run.train(resume_from_checkpoint=True)
    return distance(adapter("killed", 6), adapter(source, 6))


def generates() -> dict[str, Any]:
    run = trainer("generate", 3, save_strategy="no")
    run.train()
    state = run.model.state_dict()
    if RANK == 0:
        torch.save(dict(state), OUT / "generate.pt")
    barrier()
    prompt = Tokens()[RANK]["input_ids"][None, :4]
    settings: dict[str, Any] = {"max_new_tokens": 3 + 4 * RANK, "do_sample": False, "pad_token_id": 0}
    run.model.eval()
    sharded = run.model.generate(input_ids=prompt, **settings)
    inner = run.model.get_base_model().generate(prompt, **settings)
    twin = adapted()
    twin.load_state_dict(torch.load(OUT / "generate.pt", weights_only=True))
    twin.eval()
    whole = twin.generate(input_ids=prompt, **settings)
    return {"equal": bool(torch.equal(sharded, whole)), "inner": bool(torch.equal(inner, whole))}


def main() -> None:
    watch()
    check("ddp", lambda: whole_run("ddp", None))
    for stage in range(4):
        check(f"stage {stage}", lambda: whole_run(f"stage{stage}", stage))  # noqa: B023
        check(f"stage {stage} saved", lambda: compare(f"stage{stage}", "ddp"))  # noqa: B023
    check("resume", lambda: resume("resume3", "stage3", 3))
    check("resume newest", lambda: resume_newest("stage3"))
    check("bf16 ddp", lambda: whole_run("bf16_ddp", None, bf16=True))
    for stage in (1, 3):
        check(f"bf16 {stage}", lambda: whole_run(f"bf16_{stage}", stage, bf16=True))  # noqa: B023
        check(f"bf16 {stage} saved", lambda: compare(f"bf16_{stage}", "bf16_ddp"))  # noqa: B023
    check("bf16 resume", lambda: resume("bf16_resume", "bf16_3", 3, bf16=True))
    check("checkpointing", lambda: whole_run("checkpointing", 3, gradient_checkpointing=True))
    check("checkpointing saved", lambda: compare("checkpointing", "ddp"))
    check("generate", generates)


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
