"""Offloading on one CUDA device: streams change no bit, results are those in memory, the device holds what it should."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import hf_zero as zero
from tests.kit.bits import same, values
from tests.kit.common import MODELS, Case, batch, optimizer_for
from tests.kit.transports import SMALL, Inflight, Link, Roads
from tests.settings import covering

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "offload_optimizer": ("none", "cpu", "disk"),
    "offload_params": ("none", "cpu", "disk"),
    "stage": (0, 2, 3),
    "dtype": ("no", "bf16", "fp16"),
    "model": ("gpt2", "bert"),
    "accumulation": (1, 3),
    "clip": (None, 0.5),
    "groups": (1, 2),
    "checkpointing": (False, True),
}
MODEL_SIZES = {"gpt2": {"n_layer": 4, "n_embd": 64}, "bert": {"num_hidden_layers": 4, "hidden_size": 64}}


def cases() -> list[Case]:
    rows = [Case(**dict(zip(DIMENSIONS, values)), steps=6) for values in itertools.product(*DIMENSIONS.values())]
    return covering([row for row in rows if {row.offload_optimizer, row.offload_params} != {"none"}], "gpu")


def build(case: Case, folder: str, roads: Roads | None = None) -> tuple[Any, Any, zero.Engine]:
    model = MODELS[case.model](**MODEL_SIZES[case.model]).cuda()
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = optimizer_for(model, case.groups)
    for group in optimizer.param_groups:
        group["eps"] = 1e-4  # the gradient of a key's bias is rounding alone: Adam would make whole steps of it
    engine = zero.shard(model, optimizer, case.config(folder), mixed_precision=case.dtype, **case.roads(roads).given)
    return model, optimizer, engine


def train(case: Case, folder: str, roads: Roads | None = None) -> list[Any]:
    """Losses, norms, parameters and optimizer states, on the CPU."""
    model, optimizer, engine = build(case, folder, roads)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=3, enabled=case.dtype == "fp16")
    out: list[Any] = []
    for step in range(case.steps):
        for micro in range(case.accumulation):
            last = micro == case.accumulation - 1
            with contextlib.nullcontext() if last else engine.no_sync():
                ids = batch(step, micro, 0).cuda()
                loss = model(input_ids=ids, labels=ids).loss / case.accumulation
                scaler.scale(loss).backward()
            out.append(loss.detach())
        if case.clip is not None:
            scaler.unscale_(optimizer)
            out.append(engine.clip_grad_norm_(case.clip))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    out += values(model, optimizer)
    out = [value.cpu() if isinstance(value, torch.Tensor) else value for value in out]
    engine.detach()
    return out


class InOrder(Link):
    """Every copy is over before anything else happens."""

    def copy_to_host(self, *args: Any) -> Inflight:
        torch.cuda.synchronize()
        move = super().copy_to_host(*args)
        torch.cuda.synchronize()
        return move

    def copy_to_device(self, *args: Any, **options: Any) -> Inflight:
        torch.cuda.synchronize()
        move = super().copy_to_device(*args, **options)
        torch.cuda.synchronize()
        return move


@pytest.mark.parametrize(
    "case", cases(), ids=lambda case: f"{case.offload_optimizer}-{case.offload_params}-{case.dtype}"
)
def test_streams_change_no_bit(case, tmp_path):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        expected = train(case, str(tmp_path), Roads(link=InOrder))
        ours = train(replace(case, sizes=SMALL), str(tmp_path))
    finally:
        torch.use_deterministic_algorithms(False)
    assert [i for i, (a, b) in enumerate(zip(ours, expected)) if not same(a, b)] == []


@pytest.mark.parametrize(
    "case", cases(), ids=lambda case: f"{case.offload_optimizer}-{case.offload_params}-{case.dtype}"
)
def test_equals_the_run_in_memory(case, tmp_path):
    """To rounding: the host's optimizer kernel is another one than the device's."""
    plain = Case(
        model=case.model, stage=case.stage, dtype=case.dtype, accumulation=case.accumulation, clip=case.clip,
        groups=case.groups, checkpointing=case.checkpointing, steps=case.steps,
    )  # fmt: skip
    expected, ours = train(plain, str(tmp_path)), train(case, str(tmp_path))
    assert len(ours) == len(expected)
    rtol = 1e-4 if case.dtype == "no" else 2e-2
    for mine, theirs in zip(ours, expected):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=1e-4 if case.dtype == "no" else 2e-3)


@pytest.mark.parametrize(("optimizer", "params"), [("cpu", "none"), ("disk", "none"), ("cpu", "cpu"), ("disk", "disk")])
def test_the_device_holds_no_optimizer_state(optimizer, params, tmp_path):
    case = Case(stage=3, dtype="bf16", offload_optimizer=optimizer, offload_params=params)
    before = torch.cuda.memory_allocated()
    model, adam, engine = build(case, str(tmp_path))
    seen = []
    for step in range(20):
        ids = batch(step, 0, 0).cuda()
        model(input_ids=ids, labels=ids).loss.backward()
        adam.step()
        adam.zero_grad()
        engine.finish_step()
        torch.cuda.synchronize()
        seen.append(torch.cuda.memory_allocated() - before)
    spans = list(engine.layout.spans)
    own = (
        sum(span.numel * getattr(torch, span.spec.compute_dtype).itemsize for span in spans) if params == "none" else 0
    )
    # Buffers (masks, positions) and the batch, guards, and the allocator's 512-byte steps.
    assert own <= seen[-1] <= own + (256 << 10)
    assert seen[-1] == seen[3]
    numel = sum(span.slice_numel for span in spans)
    # Masters and gradients; the optimizer's own state is never copied to the device.
    assert engine.context.storage.link.page_locked_bytes >= (8 * numel if optimizer == "cpu" else 0)
    engine.detach()


def test_bf16_takes_six_bytes_per_parameter(tmp_path):
    """Over the link: a float32 gradient down, a bf16 parameter up."""
    case = Case(stage=2, dtype="bf16", offload_optimizer="cpu")
    model, adam, engine = build(case, str(tmp_path))
    meter = engine.context.storage.meter
    for step in range(2):
        engine.finish_step()
        meter.reset()
        ids = batch(step, 0, 0).cuda()
        model(input_ids=ids, labels=ids).loss.backward()
        adam.step()
        adam.zero_grad()
        engine.finish_step()
    spans = list(engine.layout.spans)
    narrow = sum(span.slice_numel for span in spans if span.spec.compute_dtype == "bfloat16")
    wide = sum(span.slice_numel for span in spans) - narrow
    assert narrow > wide
    assert meter["down"].bytes + meter["up"].bytes == 6 * narrow + 8 * wide
    engine.detach()
