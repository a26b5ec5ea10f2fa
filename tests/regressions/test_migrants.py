"""What programs that come from DeepSpeed or FSDP write first: the error says what to write here."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import hf_zero as zero

OF_MODELS = {
    "backward": "loss.backward()",
    "step": "optimizer.step()",
    "module": "the model itself",
    "save_checkpoint": "engine.save",
    "load_checkpoint": "engine.load",
}
OF_ENGINES = {**OF_MODELS, "module": "engine.model", "train": "model.train", "parameters": "model.parameters"}


class Own(nn.Module):
    """Has all these names itself: a submodule, a parameter, a buffer, a method and a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)
        self.backward = nn.Parameter(torch.ones(4))
        self.register_buffer("step", torch.ones(4))
        self.load_checkpoint = "a path"

    def save_checkpoint(self) -> str:
        return "saved"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x) * self.backward * self.step


class Delegating(nn.Module):
    """A class with a `__getattr__` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("inner", "module", "backward"):
                raise
            return getattr(self.inner, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=16))


MODELS = {
    "sequential": lambda: own_class()(nn.Linear(4, 4), nn.Linear(4, 4)),
    "linear": lambda: nn.Linear(4, 4),
    "gpt2": gpt2,
    "peft": lambda: get_peft_model(gpt2(), LoraConfig(target_modules=["c_attn"], r=2)),
    "delegating": Delegating,
}


def own_class() -> type[nn.Sequential]:
    """A class that no model of another test has: what is replaced is the class's."""
    return type("Stack", (nn.Sequential,), {})


def sharded(model: nn.Module, **settings: Any) -> zero.Engine:
    return zero.shard(model, torch.optim.AdamW(model.parameters()), zero.ZeroConfig(**settings))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", OF_MODELS)
def test_a_model_says_what_to_write(kind: str, name: str) -> None:
    model, other = MODELS[kind](), MODELS[kind]()
    kept = type(model), vars(type(model)).get("__getattr__")
    engine = sharded(model, stage=3)
    with pytest.raises(AttributeError) as caught:
        getattr(other, name)
    assert OF_MODELS[name] not in str(caught.value)
    with pytest.raises(AttributeError, match=re.escape(OF_MODELS[name])) as caught:
        getattr(model, name)
    assert type(model).__name__ in str(caught.value)
    assert name in str(caught.value)
    assert not hasattr(model, name)
    assert getattr(model, name, "other") == "other"
    with pytest.raises(AttributeError) as caught:
        _ = model.no_such_name
    assert "hf_zero" not in str(caught.value)
    assert type(model) is kept[0]
    engine.detach()
    assert vars(type(model)).get("__getattr__") is kept[1]
    with pytest.raises(AttributeError) as caught:
        getattr(model, name)
    assert OF_MODELS[name] not in str(caught.value)


def test_two_models_of_one_class() -> None:
    cls = own_class()
    models = [cls(nn.Linear(4, 4)) for _ in range(2)]
    engines = [sharded(model) for model in models]
    engines[0].detach()
    assert models[0](torch.ones(1, 4)).shape == (1, 4)
    with pytest.raises(AttributeError, match=re.escape("loss.backward()")):
        _ = models[1].backward
    engines[1].detach()
    assert "__getattr__" not in vars(cls)


def test_a_model_that_is_dropped_leaves_no_trace() -> None:
    cls = own_class()
    model = cls(nn.Linear(4, 4))
    sharded(model)
    del model
    gc.collect()
    assert "__getattr__" not in vars(cls)


@pytest.mark.parametrize("stage", [1, 3])
def test_names_that_a_model_has_stay_its_own(stage: int) -> None:
    torch.manual_seed(0)
    model, plain = Own(), Own()
    plain.load_state_dict(model.state_dict())
    sharded(model, stage=stage)
    for each in (model, plain):
        (each(torch.ones(2, 4)).sum() * 2).backward()
    assert model.save_checkpoint() == "saved"
    assert model.load_checkpoint == "a path"
    assert isinstance(model.module, nn.Linear)
    assert torch.equal(model.step, torch.ones(4))
    assert torch.equal(zero.full_gradient(model.backward), plain.backward.grad)
    other = sharded(fresh := nn.Sequential(nn.Linear(4, 4)))
    fresh.step = 3  # attributes that come later, as programs note their progress
    fresh.module = nn.Identity()
    assert fresh.step == 3
    assert isinstance(fresh.module, nn.Identity)
    other.detach()


def test_copies_and_pickles_are_as_before() -> None:
    model = gpt2()
    sharded(model, stage=2)
    twin = copy.deepcopy(model)
    assert type(twin) is GPT2LMHeadModel
    assert not hasattr(twin, "module")
    assert pickle.loads(pickle.dumps(GPT2LMHeadModel)) is GPT2LMHeadModel
    assert torch.equal(twin.transformer.wte.weight, zero.full_parameter(model.transformer.wte.weight))
    again = pickle.loads(pickle.dumps(twin))
    assert torch.equal(again.transformer.wte.weight, twin.transformer.wte.weight)


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
