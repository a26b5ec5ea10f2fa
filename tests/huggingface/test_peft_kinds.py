"""Every kind of adapter that PEFT has for a causal model, trained on two ranks and merged: equal to plain data parallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn

import hf_zero as zero
from tests.kit.common import autocast, batch, gpt2, loss_of
from tests.kit.pool import RankPool
from tests.kit.rows import each_value

pytestmark = pytest.mark.gloo

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "fan_in_fan_out": True}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", LORA),
    "dora": ("LoraConfig", {**LORA, "use_dora": True}),
    "rslora": ("LoraConfig", {**LORA, "use_rslora": True}),
    "modules_to_save": ("LoraConfig", {**LORA, "target_modules": ["c_attn"], "modules_to_save": ["ln_f"]}),
    "trainable_tokens": ("LoraConfig", {**LORA, "target_modules": ["c_attn"], "trainable_token_indices": [3, 5, 7]}),
    "ia3": ("IA3Config", {}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
}
MERGED = ("lora", "dora", "rslora", "modules_to_save", "trainable_tokens", "ia3")


def adapted(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    import peft

    config, options = KINDS[kind]
    torch.manual_seed(1)
    base = gpt2(use_cache=kind == "prefix").to(dtype)
    torch.manual_seed(1)
    model = peft.get_peft_model(base, getattr(peft, config)(task_type="CAUSAL_LM", **options))
    if kind in MERGED:
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():  # adapters begin as nothing: let them be something
            for name, param in model.named_parameters():
                if param.requires_grad and "lora_B" in name:
                    param.normal_(0.0, 0.02, generator=generator)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def accelerator(stage: int, precision: str = "no") -> Any:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return zero.ZeroAccelerator(cpu=True, mixed_precision=precision, zero_plugin=zero.ZeroPlugin(stage=stage))


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, world: int, step: int, precision: str) -> Tensor:
    """Of all ranks; rank 0's loss."""
    losses = []
    for peer in range(world):
        ids = batch(step, 0, peer)
        with autocast(precision):
            losses.append(model(input_ids=ids, labels=ids).loss)
        (losses[-1] / world).backward()
    optimizer.step()
    optimizer.zero_grad()
    return losses[0].detach()


def assert_close(mine: dict[str, Tensor], other: dict[str, Tensor], atol: float = 2e-6) -> None:
    assert list(mine) == list(other)
    for name, value in mine.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def trained(rank: int, world: int, kind: str, stage: int, folder: str) -> None:
    from peft import PeftModel

    plain, model = adapted(kind), adapted(kind)
    plain_optimizer = optimizer_of(plain)
    run = accelerator(stage)
    model, optimizer = run.prepare(model, optimizer_of(model))
    for step in range(3):
        loss = loss_of(model, rank, step)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        reference = plain_step(plain, plain_optimizer, world, step, "no")
        if rank == 0:
            assert float(loss) == pytest.approx(float(reference), abs=1e-5)
    state = model.state_dict()
    if rank == 0:
        # K's biases have no gradient but rounding, which Adam makes steps of.
        assert_close(dict(state), plain.state_dict(), atol=1e-4)
    model.save_pretrained(folder, is_main_process=rank == 0, state_dict=state)
    torch.distributed.barrier()
    reloaded = PeftModel.from_pretrained(gpt2(use_cache=kind == "prefix"), folder)
    torch.manual_seed(1)
    ids = batch(9, 0, 0)
    model.eval(), plain.eval()
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        torch.testing.assert_close(plain(input_ids=ids).logits, logits, rtol=0, atol=1e-4)
        reloaded.eval()
    if kind not in MERGED:
        return
    model.merge_adapter()
    model.unmerge_adapter()
    merged, reference = model.merge_and_unload(), plain.merge_and_unload()
    assert type(merged) is type(reference)
    state = merged.state_dict()
    if rank == 0:
        assert_close(dict(state), reference.state_dict(), atol=1e-4)
        assert all(bool(torch.isfinite(value).all()) for value in state.values())
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=ids).logits, logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("kind", "stage"), each_value(KINDS, [1, 3]))
def test_training_saving_and_merging_equal_data_parallel(two: RankPool, tmp_path: Path, kind: str, stage: int) -> None:
    two.run(trained, kind, stage, str(tmp_path / kind))


def on_bfloat16(rank: int, world: int, stage: int, precision: str) -> None:
    """PEFT keeps adapters of a bfloat16 base in float32."""
    plain, model = adapted("lora", torch.bfloat16), adapted("lora", torch.bfloat16)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    plain_optimizer, optimizer = optimizer_of(plain), optimizer_of(model)
    zero.shard(model, optimizer, zero.ZeroConfig(stage=stage), mixed_precision=precision)
    for step in range(3):
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        reference = plain_step(plain, plain_optimizer, world, step, precision)
        assert rank != 0 or torch.equal(loss.detach(), reference)
    for (name, param), twin in zip(model.named_parameters(), plain.parameters()):
        assert torch.equal(zero.full_parameter(param), twin), name


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("stage", [1, 3])
def test_float32_adapters_on_a_bfloat16_base_equal_data_parallel(two: RankPool, stage: int, precision: str) -> None:
    two.run(on_bfloat16, stage, precision)
