"""Common mistakes in calls of the Python API: each is a ConfigError that names what was meant."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

import hf_zero as zero


def pair() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 4)
    return model, torch.optim.AdamW(model.parameters())


def swapped() -> Any:
    model, optimizer = pair()
    return zero.shard(optimizer, model)  # type: ignore[arg-type]


SHARD: dict[str, tuple[Callable[[], Any], str]] = {
    "dict": (lambda: zero.shard(*pair(), {"stage": 2}), r"config must be a ZeroConfig, found \{'stage': 2\}"),
    "int": (lambda: zero.shard(*pair(), 3), r"found 3. Call zero.shard\(model, optimizer, zero.ZeroConfig\(stage=3"),
    "swapped": (swapped, "model must be a torch.nn.Module, found AdamW"),
    "config second": (lambda: zero.shard(pair()[0], zero.ZeroConfig()), "optimizer must be .*found ZeroConfig"),
    "class": (lambda: zero.shard(pair()[0], torch.optim.AdamW), "optimizer must be .*AdamW"),
    "setting": (lambda: zero.shard(*pair(), stage=3), r"in a ZeroConfig. Call .*zero.ZeroConfig\(stage=3\)"),
    "misspelt": (lambda: zero.shard(*pair(), offload_param="cpu"), "no setting 'offload_param': did you mean 'offload_params'"),
    "precision": (lambda: zero.ZeroPlugin(bf16=True), "no setting 'bf16'. Precision is set by bf16=True in TrainingArguments"),
    "long": (lambda: zero.shard(pair()[0], config=pair()[1]), "config must be a ZeroConfig, found AdamW .* …. Call"),
    "Init": (lambda: zero.Init(offload_param="cpu"), "Init has no setting 'offload_param': did you mean 'offload_params'"),
    "Init of a dict": (lambda: zero.Init({"stage": 3}), r"Init takes keywords only, found {'stage': 3}: write Init\(\)"),  # type: ignore[call-arg]
    "Init of a stage": (lambda: zero.Init(stage=3), "Init has no setting 'stage'.*Pass it to ZeroConfig or ZeroPlugin"),
    "no device": (lambda: zero.shard(*pair(), device="gpu"), "device='gpu' is not a device"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARD)
def test_arguments_of_shard(name: str) -> None:
    call, text = SHARD[name]
    with pytest.raises(zero.ConfigError, match=text):
        call()


@pytest.mark.parametrize("device", ["cuda:99", 99, torch.device("cuda:99")])
def test_a_gpu_that_is_not_there(device: Any) -> None:
    with pytest.raises(zero.ConfigError, match="device='cuda:99', but this process sees .*CUDA_VISIBLE_DEVICES"):
        zero.shard(*pair(), device=device)


def test_device_as_text() -> None:
    assert zero.shard(*pair(), device="cpu") is not None


@pytest.mark.parametrize("kind", [zero.ZeroConfig, zero.ZeroPlugin])
def test_settings(kind: Any) -> None:
    for settings, text in (
        ({"offload_dir": 3}, "offload_dir must be the path of a folder, found 3"),
        ({"device_memory": 24}, "24 bytes: did you mean device_memory='24GiB'"),
        ({"host_memory": "64"}, "64 bytes: did you mean host_memory='64GiB'"),
        ({"device_memory": 24.5}, "24 bytes: did you mean device_memory='24.5GiB'"),
        ({"device_memory": "24000"}, "did you mean device_memory='24000MiB'"),
    ):
        with pytest.raises(zero.ConfigError, match=text):
            kind(**settings)
    for given, meant in ((3, "stage=3"), ({"stage": 2}, "stage=2")):
        with pytest.raises(zero.ConfigError, match=rf"keywords only.*write {kind.__name__}\({meant}\)"):
            kind(given)
    assert kind(device_memory="1000B")


def test_a_config_for_a_plugin() -> None:
    with pytest.raises(zero.ConfigError, match=r"found a ZeroConfig: pass zero.ZeroPlugin\(stage=3"):
        Accelerator(cpu=True, parallelism_config=zero.ZeroConfig(stage=3))  # type: ignore[arg-type]


@pytest.mark.parametrize(("offload", "count"), [("none", 1), ("cpu", 0)])
def test_one_rank_without_a_launcher(
    offload: str, count: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    AcceleratorState._reset_state(True)
    with caplog.at_level(logging.WARNING, "hf_zero"):
        Accelerator(cpu=True, parallelism_config=zero.ZeroPlugin(stage=3, offload_optimizer=offload))
    said = [record.getMessage() for record in caplog.records if "nothing is sharded" in record.getMessage()]
    assert said == ["hf_zero: 1 rank: nothing is sharded. Start with torchrun --nproc-per-node N"] * count
    AcceleratorState._reset_state(True)
