"""What programs that come from DeepSpeed or FSDP write first: the error says what to write here."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero as zero

OF_ENGINES = {
    "backward": "loss.backward()",
    "step": "optimizer.step()",
    "save_checkpoint": "engine.save",
    "load_checkpoint": "engine.load",
    "module": "engine.model",
    "train": "model.train",
    "parameters": "model.parameters",
}


def sharded(model: nn.Module, **settings: Any) -> zero.Engine:
    return zero.shard(model, torch.optim.AdamW(model.parameters()), zero.ZeroConfig(**settings))


@pytest.mark.parametrize("name", OF_ENGINES)
def test_an_engine_says_what_to_write(name: str) -> None:
    engine = sharded(nn.Linear(4, 4))
    with pytest.raises(AttributeError, match=re.escape(OF_ENGINES[name])):
        getattr(engine, name)
    assert not hasattr(engine, name)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = engine.no_such_name  # type: ignore[attr-defined]
    with pytest.raises(zero.StateError):
        copy.copy(engine)


def test_an_engine_is_not_called() -> None:
    engine: Any = sharded(nn.Linear(4, 4))
    with pytest.raises(TypeError, match=re.escape("model(")):
        engine(torch.ones(1, 4))


MISNAMED = [
    ("offload_param", "cpu", "offload_params"),
    ("offload_optimiser", "cpu", "offload_optimizer"),
    ("offload_optimizer_device", "cpu", "offload_optimizer"),
    ("offload_param_device", "cpu", "offload_params"),
    ("nvme_path", "/tmp", "offload_dir"),
    ("communication_data_type", "bf16", "reduce_dtype"),
    ("sharding_strategy", "FULL_SHARD", "stage"),
    ("reshard_after_forward", True, "stage"),
    ("zero_quantized_gradients", True, "wire"),
]


@pytest.mark.parametrize(("name", "value", "meant"), [*MISNAMED, ("zero_stage", 3, "stage")])
@pytest.mark.parametrize("cls", [zero.ZeroConfig, zero.ZeroPlugin])
def test_a_setting_by_another_name(cls: Any, name: str, value: Any, meant: str) -> None:
    for kind in (zero.ConfigError, TypeError):  # a wrong keyword is a TypeError everywhere else
        with pytest.raises(kind, match=rf"{name}.*did you mean.*'{meant}'"):
            cls(**{name: value})
    with pytest.raises(zero.ConfigError, match="stage, reduce_dtype"):
        cls(colour="blue")


@pytest.mark.parametrize(
    ("name", "value", "meant"), [*MISNAMED, ("stage", 3, "stage"), ("zero_offload_param", 1, "offload_params")]
)
def test_a_flag_by_another_name(name: str, value: Any, meant: str, tmp_path: Path) -> None:
    with pytest.raises(zero.ConfigError, match=rf"{name}.*did you mean.*'zero_{meant}'"):
        zero.ZeroTrainingArguments(str(tmp_path), **{name: value})
    with pytest.raises(TypeError, match="colour"):
        zero.ZeroTrainingArguments(str(tmp_path), colour="blue")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("nvme", "disk"),
        ("gpu", "none"),
        ("CPU", "cpu"),
        (True, "cpu"),
        ({"device": "nvme"}, "disk"),
        (None, "none"),
    ],
)
@pytest.mark.parametrize("name", ["offload_optimizer", "offload_params"])
def test_a_value_by_another_name(name: str, value: Any, meant: str, tmp_path: Path) -> None:
    asked = f"did you mean '{meant}'"
    for cls in (zero.ZeroConfig, zero.ZeroPlugin):
        with pytest.raises(zero.ConfigError, match=asked):
            cls(**{name: value})
    with pytest.raises(zero.ConfigError, match=asked):
        zero.ZeroTrainingArguments(str(tmp_path), use_cpu=True, **{f"zero_{name}": value})
    if name == "offload_params":
        with pytest.raises(zero.ConfigError, match=asked):
            zero.Init(offload_params=value)


@pytest.mark.parametrize("cls", [zero.ZeroConfig, zero.ZeroPlugin, zero.ZeroTrainingArguments])
def test_signatures_and_pickles_stay(cls: Any, tmp_path: Path) -> None:
    names = inspect.signature(cls).parameters
    assert "stage" in names or "zero_stage" in names
    given = {"zero_stage": 3, "output_dir": str(tmp_path)} if cls is zero.ZeroTrainingArguments else {"stage": 3}
    again = pickle.loads(pickle.dumps(cls(**given)))
    assert getattr(again, "stage", None) == 3 or again.zero_stage == 3
