"""What accelerate saves and loads on two ranks: states, models, adapters, exports."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

import hf_zero as zero
from tests.huggingface.accelerate_runs import Run, accelerator_at, rank_0_distance, start, train, weights
from tests.kit.jobs.harness import (
    RANK,
    SAVED,
    Tokens,
    assert_refused,
    barrier,
    distance,
    files_under,
    gpt2,
    optimizer_distance,
)


def leave_half_done(run: Run) -> None:
    """A step that raises between two groups."""
    group = run.optimizer.param_groups[1]
    betas, group["betas"] = group["betas"], None
    with pytest.raises(TypeError):
        train(run, steps=2)
    group["betas"] = betas
    with pytest.raises(zero.StateError, match="stopped half-way"):
        train(run, steps=2)


def save_alone(models: list[Any], weights: list[dict[str, Any]], folder: str) -> None:
    """A hook that saves on the main process alone, as diffusers' scripts have it."""
    if RANK == 0:
        models[0].save_pretrained(folder)
        weights.pop()


def state_round_trip(stage: int, hooked: bool = False) -> None:
    whole = start(stage, accumulation=2)
    if hooked:
        whole.accelerator.register_save_state_pre_hook(save_alone)
    train(whole, steps=4)
    folder = Path(f"state{stage}{hooked}")
    whole.accelerator.save_state(str(folder))
    second = train(whole, steps=4, skip=4)
    end = weights(whole), whole.optimizer.state_dict()
    resumed = start(stage, accumulation=2, seed=99)
    leave_half_done(resumed)
    resumed.accelerator.load_state(str(folder))
    resumed.optimizer.optimizer.zero_grad()  # of the step that raised
    again = train(resumed, steps=4, skip=4)
    mine = weights(resumed), resumed.optimizer.state_dict()
    assert again == second
    assert rank_0_distance(mine[0], end[0]) == 0.0
    assert RANK or optimizer_distance(mine[1], end[1]) == 0.0
    assert files_under(folder) == [
        *SAVED,
        "random_states_0.pkl",
        "random_states_1.pkl",
        "scheduler.bin",
        "zero_manifest.json",
    ]


def ddp_state_into_zero() -> None:
    """A `save_state` folder of plain data parallel goes on at stage 2, and ends where data parallel ends."""
    plain = start(None)
    train(plain, steps=4)
    folder = Path("state_ddp")
    plain.accelerator.save_state(str(folder))
    barrier()
    train(plain, steps=4, skip=4)
    end = weights(plain)
    sharded = start(2, seed=99)
    sharded.accelerator.load_state(str(folder))
    train(sharded, steps=4, skip=4)
    assert rank_0_distance(weights(sharded), end) < 5e-6


DESCRIPTION = ["config.json", "generation_config.json"]


def save_model_files() -> None:
    run = start(3)
    run.model.generation_config.max_length = 17
    train(run, steps=2)
    accelerator = run.accelerator
    accelerator.save_model(run.model, "one_file")
    accelerator.save_model(run.model, "many_files", max_shard_size="20KB")
    accelerator.save_model(run.model, "pickled", safe_serialization=False)
    run.model.save_pretrained("pretrained", is_main_process=accelerator.is_main_process)
    state = weights(run)
    barrier()
    assert files_under(Path("one_file")) == [*DESCRIPTION, "model.safetensors", "zero_manifest.json"]
    assert "model.safetensors.index.json" in files_under(Path("many_files"))
    assert files_under(Path("pickled")) == [*DESCRIPTION, "pytorch_model.bin", "zero_manifest.json"]
    if RANK == 0:
        twin = gpt2()
        twin.load_state_dict(dict(state))
        accelerator_at(None).save_model(twin, "stock", max_shard_size="20KB")
        for path in (Path("stock")).glob("*.safetensors"):
            assert path.read_bytes() == (Path("many_files") / path.name).read_bytes(), path.name
        for name in ("pretrained", "one_file", "many_files", "pickled"):
            reloaded, told = GPT2LMHeadModel.from_pretrained(Path(name), output_loading_info=True)
            assert distance(dict(reloaded.state_dict()), dict(state)) == 0.0, name
            assert not any(told.values()), (name, told)
            assert reloaded.lm_head.weight is reloaded.transformer.wte.weight, "tied"
            assert reloaded.generation_config.max_length == 17, name


def moe() -> MixtralForCausalLM:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def save_model_loads(stage: int) -> None:
    """A folder of `save_model` is one of `from_pretrained` where the model has a config, also of one that is only evaluated;
    under bfloat16, in the type that the weights have."""
    accelerator = accelerator_at(stage, mixed_precision="bf16")
    model = accelerator.prepare_model(moe(), evaluation_mode=True)
    folder = Path(f"loads{stage}")
    accelerator.save_model(model, str(folder), max_shard_size="30KB")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    barrier()
    if RANK == 0:
        again, told = MixtralForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(told.values()), told
        assert again.config.dtype == torch.float32
        assert distance(dict(again.state_dict()), state) == 0.0
        assert (folder / "model.safetensors.index.json").is_file()
    line, _ = accelerator.prepare(line := nn.Linear(3, 3), torch.optim.SGD(line.parameters(), lr=0.1))
    accelerator.save_model(line, f"line{stage}")
    barrier()
    assert files_under(Path(f"line{stage}")) == ["model.safetensors", "zero_manifest.json"]


def adapters(stage: int) -> None:
    """Two adapters on one base model: only they are saved, both come back, and PEFT reads them."""
    from peft import LoraConfig, PeftModel, get_peft_model

    accelerator = accelerator_at(stage)
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    torch.manual_seed(1)
    model: Any = get_peft_model(gpt2(), config)
    model.add_adapter("other", config)
    for name, param in model.named_parameters():
        param.requires_grad_("lora_" in name)
    params = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(params, lr=1e-2))

    def step() -> dict[str, Tensor]:
        accelerator.backward(model(**{k: v[None] for k, v in Tokens()[RANK].items()}).loss)
        optimizer.step()
        optimizer.zero_grad()
        return {name: value.clone() for name, value in model.state_dict().items()}

    before, folder = step(), Path(f"adapters{stage}")
    accelerator.save_model(model, str(folder / "model"))
    accelerator.save_state(str(folder / "state"))
    step()
    accelerator.load_state(str(folder / "state"))
    assert rank_0_distance(dict(model.state_dict()), before) == 0.0
    names = {"adapter_config.json", "adapter_model.safetensors", "other/adapter_model.safetensors"}
    for kind in ("model", "state"):
        assert names <= set(files_under(folder / kind))
        assert "model.safetensors" not in files_under(folder / kind)
    if RANK == 0:
        again = PeftModel.from_pretrained(gpt2(), folder / "model")
        again.load_adapter(folder / "model" / "other", "other")
        assert distance(dict(again.state_dict()), before) == 0.0


def save_fails_on_every_rank() -> None:
    run = start(3)
    Path("a_file").write_text("not a folder")
    barrier()
    assert_refused(lambda: run.accelerator.save_model(run.model, "a_file/model"), "a_file", kind="CheckpointError")


WORK: dict[str, Callable[[], None]] = {
    **{f"state {stage}": partial(state_round_trip, stage, hooked=stage == 1) for stage in (0, 1, 3)},
    "ddp state": ddp_state_into_zero,
    "save_model": save_model_files,
    **{f"save_model {stage}": partial(save_model_loads, stage) for stage in (1, 3)},
    **{f"adapters {stage}": partial(adapters, stage) for stage in (0, 3)},
    "save fails": save_fails_on_every_rank,
}


@pytest.mark.gloo
@pytest.mark.parametrize("name", WORK)
def test_on_two_ranks(on_two: Callable[..., Any], name: str) -> None:
    on_two(WORK[name])
