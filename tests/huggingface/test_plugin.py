"""The plugin and ZeroAccelerator by themselves: settings, and what is refused."""

from __future__ import annotations

import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, DistributedType
from torch import nn

import hf_zero as zero
from hf_zero.huggingface.arguments import ACCELERATE_STATE, refuse


def test_a_plugin_shows_its_settings() -> None:
    plugin = zero.ZeroPlugin(stage=1, reduce_dtype="bf16")
    assert plugin.config == zero.ZeroConfig(stage=1, reduce_dtype="bf16")
    assert repr(plugin) == "ZeroPlugin(stage=1, reduce_dtype='bf16')"
    assert plugin.to_json() == plugin.config.to_dict()


def test_plugin_is_pure_data() -> None:
    plugin = zero.ZeroPlugin(stage=3)
    Accelerator(cpu=True, parallelism_config=plugin)
    again = pickle.loads(pickle.dumps(plugin))
    assert again == plugin
    assert again.config == plugin.config


def test_plugin_turns_a_stock_accelerator() -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=zero.ZeroPlugin(stage=3))
    assert type(accelerator) is zero.ZeroAccelerator
    assert isinstance(accelerator, Accelerator)
    assert isinstance(Accelerator(), zero.ZeroAccelerator), "accelerate keeps its first configuration"


class OwnAccelerator(Accelerator):
    """A user's subclass."""

    def shout(self) -> str:
        return "mine"

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        return super().clip_grad_norm_(parameters, max_norm / 2, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        super().clip_grad_value_(parameters, clip_value / 2)


def test_plugin_turns_a_subclass() -> None:
    accelerator = OwnAccelerator(cpu=True, parallelism_config=zero.ZeroPlugin(stage=2))
    assert type(accelerator).__name__ == "ZeroOwnAccelerator"
    assert isinstance(accelerator, OwnAccelerator)
    assert accelerator.shout() == "mine"


@pytest.mark.parametrize("stage", [0, 3])
def test_a_subclass_clips_in_its_own_way(stage: int) -> None:
    accelerator = OwnAccelerator(cpu=True, parallelism_config=zero.ZeroPlugin(stage=stage))
    model = accelerator.prepare(nn.Linear(4, 4, bias=False))
    accelerator.backward(model(torch.ones(1, 4)).sum())
    accelerator.clip_grad_value_(model.parameters(), 1.0)
    norms = [float(accelerator.clip_grad_norm_(model.parameters(), 1.0)) for _ in range(2)]
    assert norms == pytest.approx([2.0, 0.5])


@pytest.mark.parametrize("argument", ["zero_plugin", "parallelism_config"])
def test_accelerator_class(argument: str) -> None:
    accelerator = zero.ZeroAccelerator(cpu=True, **{argument: zero.ZeroPlugin(stage=1)})
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    same_model, wrapped = accelerator.prepare(model, optimizer)
    engine = zero.engine_of(model)
    assert same_model is model
    assert wrapped.optimizer is optimizer
    assert engine is not None
    assert engine.optimizer is optimizer
    assert engine.config == zero.ZeroConfig(stage=1)


def refused(match: str, error: type[Exception] = zero.ConfigError) -> Any:
    return pytest.raises(error, match=match)


@pytest.mark.parametrize("name", ["tp_size", "cp_size", "dp_shard_size", "dp_replicate_size"])
def test_other_parallelism_is_refused(name: str) -> None:
    with refused(f"takes no {name}"):
        zero.ZeroPlugin(stage=3, **{name: 2})


def test_parallelism_from_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    with refused("PARALLELISM_CONFIG_TP_SIZE=2"):
        zero.ZeroPlugin(stage=3)


def test_an_older_accelerator_is_refused() -> None:
    Accelerator(cpu=True)
    with refused("exists already and would ignore"):
        zero.ZeroPlugin(stage=3)


def test_an_older_accelerator_is_refused_also_late() -> None:
    plugin = zero.ZeroPlugin(stage=3)
    Accelerator(cpu=True)
    with refused("would be ignored"):
        zero.ZeroAccelerator(zero_plugin=plugin)


def test_another_older_plugin_is_warned_of() -> None:
    Accelerator(cpu=True, parallelism_config=zero.ZeroPlugin(stage=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zero.ZeroPlugin(stage=2)
    with pytest.warns(UserWarning, match="would keep that and ignore"):
        zero.ZeroPlugin(stage=3)


def test_fsdp_is_refused() -> None:
    with refused("both want to shard the model"):
        Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(), parallelism_config=zero.ZeroPlugin())


def test_deepspeed_from_the_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    state = Accelerator(cpu=True).state
    AcceleratorState._reset_state(True)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")  # accelerate itself wants the library before it says so
    with refused("both want to shard the model"):
        refuse(ACCELERATE_STATE, state)


def test_fp8_is_refused() -> None:
    """accelerate itself wants a GPU and a library before it says so."""
    with refused("fp8"):
        refuse(ACCELERATE_STATE, SimpleNamespace(distributed_type=DistributedType.NO, mixed_precision="fp8"))


def test_device_map_is_refused() -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=zero.ZeroPlugin(stage=3))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.hf_device_map = {"0": 0, "1": "cpu"}
    with refused("without device_map"):
        accelerator.prepare(model)


def test_wrapped_models_and_stray_optimizers_are_refused() -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=zero.ZeroPlugin(stage=2))
    with refused("pass the bare model"):
        accelerator.prepare(nn.DataParallel(nn.Linear(2, 2)))
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    with refused("comm_hook='bf16'"):
        Accelerator(kwargs_handlers=[hook]).prepare(nn.Linear(2, 2))
    with refused("before its optimizer or together"):
        accelerator.prepare(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    model = nn.Linear(2, 2)
    two = [torch.optim.SGD(params, lr=0.1) for params in (model.parameters(), [model.bias])]
    with refused("'bias' is in two optimizers, number 0 .SGD. and number 1 .SGD.", zero.LayoutError):
        accelerator.prepare(model, *two)


class Lomo(torch.optim.SGD):
    """Known by its name."""


def test_lomo_is_refused() -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=zero.ZeroPlugin(stage=2))
    model = nn.Linear(2, 2)
    with refused("inside backward", zero.UnsupportedOptimizerError):
        accelerator.prepare(model, Lomo(model.parameters(), lr=0.1))


def test_a_model_sharded_otherwise_is_refused() -> None:
    model = nn.Linear(4, 4)
    zero.shard(model, config=zero.ZeroConfig(stage=3))
    accelerator = Accelerator(cpu=True, parallelism_config=zero.ZeroPlugin(stage=2))
    with refused("is sharded with"):
        accelerator.prepare(model)
