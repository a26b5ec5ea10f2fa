"""accelerate on one rank: models and optimizers that are prepared, checkpoints, hooks, refusals."""

from __future__ import annotations

import copy
import errno
import gc
import importlib
import json
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, ResNetConfig, ResNetForImageClassification

import hf_zero as zero
from tests.huggingface.test_plugin import refused
from tests.kit.injection import fails, instead
from tests.kit.jobs.harness import distance, flip, gpt2, optimizer_distance

STAGES = (0, 1, 2, 3)


@pytest.mark.parametrize("stage", STAGES)
def test_a_frozen_model_is_sharded_only_where_that_saves(stage: int) -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=zero.ZeroPlugin(stage=stage))
    model = nn.Linear(4, 4).requires_grad_(False)
    expected = model(torch.ones(1, 4))
    assert accelerator.prepare(model) is model
    assert (zero.engine_of(model) is not None) is (stage == 3)
    assert torch.equal(model(torch.ones(1, 4)), expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_config_json_names_the_types_in_the_file(stage: int, tmp_path: Path) -> None:
    """A convolution comes first: under bf16 autocast its weight is gathered in bfloat16."""
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=2)
    model = ResNetForImageClassification(config)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", parallelism_config=zero.ZeroPlugin(stage=stage))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    loss = model(pixel_values=torch.randn(2, 3, 32, 32), labels=torch.tensor([0, 1])).loss
    accelerator.backward(loss)
    optimizer.step()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} >= {torch.float32}
    again = ResNetForImageClassification.from_pretrained(tmp_path)
    assert again.dtype == torch.float32
    assert distance(dict(again.state_dict()), dict(model.state_dict())) == 0.0


def test_a_second_accelerator_knows_the_first_ones_models() -> None:
    first = Accelerator(cpu=True, parallelism_config=zero.ZeroPlugin(stage=2))
    model = nn.Linear(4, 4)
    model, _ = first.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    first.backward(model(torch.ones(2, 4)).sum())
    norms = [float(who.clip_grad_norm_(model.parameters(), float("inf"))) for who in (first, Accelerator())]
    assert norms[0] == norms[1] > 0.0


@pytest.mark.parametrize("together", [True, False])
def test_an_optimizer_that_needs_other_spans_comes_later(together: bool) -> None:
    """Without an optimizer a bfloat16 parameter has no float32 master: the model is sharded again."""
    accelerator = Accelerator(cpu=True, parallelism_config=zero.ZeroPlugin(stage=3))
    model = accelerator.prepare(nn.Linear(4, 4).bfloat16())
    before = copy.deepcopy(dict(model.state_dict()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if together:
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        optimizer = accelerator.prepare(optimizer)
    engine = zero.engine_of(model)
    assert engine is not None
    assert engine.optimizers == (optimizer.optimizer,)
    assert distance(dict(model.state_dict()), before) == 0.0
    accelerator.backward(model(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().sum())
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["exp_avg"].dtype == torch.float32
    assert distance(dict(model.state_dict()), before) > 0.0


def test_models_are_freed() -> None:
    importlib.import_module("transformers.trainer")  # then the plugin looks whether a Trainer is calling
    accelerator = Accelerator(cpu=True, parallelism_config=zero.ZeroPlugin(stage=3))
    model = gpt2()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen = weakref.ref(model)
    model, optimizer = accelerator.free_memory(model, optimizer)
    gc.collect()
    assert seen() is None


def prepared(
    folder: Path, width: int = 4, async_save: bool = False, **settings: Any
) -> tuple[Accelerator, nn.Module, Any]:
    AcceleratorState._reset_state(True)
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2, **settings)
    plugin = zero.ZeroPlugin(stage=3, async_save=async_save)
    accelerator = Accelerator(cpu=True, project_config=project, parallelism_config=plugin)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@pytest.mark.parametrize("together", [True, False])
def test_two_optimizers_of_one_model(tmp_path: Path, together: bool) -> None:
    def built() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        matrices, rest = [model[0].weight, model[1].weight], [model[0].bias, model[1].bias]
        return model, [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]

    AcceleratorState._reset_state(True)
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    plugin = zero.ZeroPlugin(stage=3)
    accelerator = Accelerator(cpu=True, project_config=project, parallelism_config=plugin)
    (model, own), (plain, reference) = built(), built()
    if together:
        model, *opts = accelerator.prepare(model, *own)
    else:
        model, first = accelerator.prepare(model, own[0])
        opts = [first, accelerator.prepare(own[1])]
    engine = zero.engine_of(model)
    assert engine is not None
    assert engine.optimizers == tuple(own)

    def steps(first: int) -> None:
        for number in range(first, first + 4):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
            accelerator.backward(model(x).square().sum())
            plain(x).square().sum().backward()
            slices = [p for opt in opts[1:] for group in opt.param_groups for p in group["params"]]
            norm = accelerator.clip_grad_norm_(slices, 1e-3)  # of one of them alone
            biases = [plain[0].bias, plain[1].bias]
            torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(biases, 1e-3))
            for optimizers in (opts, reference):
                for opt in optimizers[number % 2 :]:
                    opt.step()
                for opt in optimizers:
                    opt.zero_grad()

    def check() -> None:
        for (name, found), wanted in zip(model.state_dict().items(), plain.state_dict().values()):
            torch.testing.assert_close(found, wanted, msg=name)

    steps(0)
    check()
    folder = Path(str(accelerator.save_state()))
    assert {"optimizer", "optimizer_1"} <= {path.name for path in folder.iterdir()}
    saved = plain.state_dict(), [copy.deepcopy(opt.state_dict()) for opt in reference]
    saved = {name: value.clone() for name, value in saved[0].items()}, saved[1]
    steps(4)
    accelerator.load_state(str(folder))
    plain.load_state_dict(saved[0])
    for opt, state in zip(reference, saved[1]):
        opt.load_state_dict(state)
    steps(8)
    check()


def step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(2, 4)).square().sum())
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("async_save", [False, True])
def test_automatic_checkpoint_naming(tmp_path: Path, async_save: bool) -> None:
    accelerator, model, optimizer = prepared(tmp_path, async_save=async_save)
    for _ in range(3):
        step(accelerator, model, optimizer)
        accelerator.save_state()
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = optimizer.state_dict()
    step(accelerator, model, optimizer)
    accelerator.load_state()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
    assert distance(dict(model.state_dict()), saved) == 0.0
    assert optimizer_distance(optimizer.state_dict(), state) == 0.0
    for number in (1, 2):
        zero.verify(tmp_path / "checkpoints" / f"checkpoint_{number}")


def test_load_state_passes_over_a_damaged_folder(tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared(tmp_path)
    folders = [tmp_path / "checkpoints" / f"checkpoint_{number}" for number in range(2)]
    states = []
    for _ in folders:
        step(accelerator, model, optimizer)
        accelerator.save_state()
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    flip(folders[1] / "model.safetensors")
    with pytest.warns(UserWarning, match=r"resuming from .*checkpoint_0. Passed over: checkpoint_1: .*is damaged"):
        accelerator.load_state()
    assert distance(dict(model.state_dict()), states[0]) == 0.0
    with pytest.raises(zero.CheckpointError, match=r"model.safetensors is damaged"):
        accelerator.load_state(str(folders[1]))
    (folders[1] / "optimizer" / "exp_avg.safetensors").unlink()
    step(accelerator, model, optimizer)
    accelerator.save_state()
    left = sorted(path.name for path in folders[0].parent.iterdir())
    assert left == ["checkpoint_0", "checkpoint_2"], "an incomplete one goes before an older complete one"
    (folders[0] / "zero_manifest.json").unlink()
    flip(folders[0].parent / "checkpoint_2" / "random_states_0.pkl")
    with pytest.raises(zero.CheckpointError, match=r"holds 2 checkpoint folders and none is complete"):
        accelerator.load_state()
    project = accelerator.project_configuration
    project.iteration = 2
    accelerator.save_state()
    zero.verify(folders[0].parent / "checkpoint_2")
    project.iteration = 2
    with pytest.raises(ValueError, match=r"complete. Set accelerator.project_configuration.iteration = 3 to"):
        accelerator.save_state()


def test_a_frozen_model_loads_at_every_stage(tmp_path: Path) -> None:
    """Its experts are separate in the names of `save_pretrained`, and stacked in the model."""
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 8)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1, "num_local_experts": 2}

    def built(seed: int, stage: int) -> tuple[Accelerator, nn.Module]:
        AcceleratorState._reset_state(True)
        torch.manual_seed(seed)
        teacher = MixtralForCausalLM(MixtralConfig(**sizes, **heads)).requires_grad_(False)
        model = nn.Linear(2, 2)
        accelerator = Accelerator(cpu=True, parallelism_config=zero.ZeroPlugin(stage=stage))
        accelerator.prepare(model, torch.optim.SGD(model.parameters()), teacher)
        return accelerator, teacher

    for seed, (saves, loads) in enumerate([(3, 2), (2, 2), (2, 3)]):
        accelerator, teacher = built(seed, saves)
        expected = {name: value.clone() for name, value in teacher.state_dict().items()}
        accelerator.save_state(str(tmp_path / str(seed)))
        accelerator, teacher = built(seed + 7, loads)
        accelerator.load_state(str(tmp_path / str(seed)))
        assert distance(dict(teacher.state_dict()), expected) == 0.0
    flip(tmp_path / "0" / "model_1" / "model.safetensors")
    with pytest.raises(zero.CheckpointError, match=r"model.safetensors is damaged"):
        built(9, 2)[0].load_state(str(tmp_path / "0"))


def test_load_state_names_what_does_not_fit(tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared(tmp_path)
    step(accelerator, model, optimizer)
    accelerator.save_state()
    other, *_ = prepared(tmp_path / "other", width=5)
    with pytest.raises(zero.CheckpointError, match=r"does not fit Sequential: 0 missing"):
        other.load_state(str(tmp_path / "checkpoints" / "checkpoint_0"))


@pytest.mark.filterwarnings("ignore:.*of plain accelerate")
def test_load_state_of_plain_accelerate_names_what_does_not_fit(tmp_path: Path) -> None:
    plain = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, optimizer = plain.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    step(plain, model, optimizer)
    folder = tmp_path / "plain"
    plain.save_state(str(folder))
    accelerator, model, optimizer = prepared(tmp_path)
    with pytest.warns(UserWarning, match="of plain accelerate"):
        accelerator.load_state(str(folder))
    state = load_file(folder / "model.safetensors")
    assert distance(dict(model.state_dict()), state) == 0.0
    stranger = {**state, "stranger": torch.zeros(1)}
    stranger.pop("1.bias")
    save_file(stranger, folder / "model.safetensors")
    with pytest.raises(zero.CheckpointError, match=r"missing \['1.bias'\], unexpected \['stranger'\]"):
        accelerator.load_state(str(folder))
    save_file({f"module.{name}": 2 * value for name, value in state.items()}, folder / "model.safetensors")
    accelerator.load_state(str(folder))  # of a DistributedDataParallel
    assert distance(dict(model.state_dict()), {name: 2 * value for name, value in state.items()}) == 0.0
    save_file(state, folder / "model.safetensors")
    (folder / "optimizer.bin").unlink()
    with pytest.raises(zero.CheckpointError, match="expected optimizer/ or optimizer.bin"):
        accelerator.load_state(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(zero.CheckpointError, match=r"expected model.safetensors or pytorch_model.bin"):
        accelerator.load_state(str(folder))


class Counter:
    """A registered object."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def test_hooks_and_registered_objects(tmp_path: Path) -> None:
    """A hook that saves its model itself gets the values; what it takes from the list is not saved twice."""
    accelerator, model, optimizer = prepared(tmp_path)
    frozen = accelerator.prepare(nn.Linear(3, 3).requires_grad_(False))
    counter = Counter(5)
    accelerator.register_for_checkpointing(counter)
    step(accelerator, model, optimizer)

    def save_own(models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        save_file({name: value.clone() for name, value in models[1].state_dict().items()}, f"{folder}/own.safetensors")
        weights.pop()

    seen: list[str] = []

    def load_own(models: list[nn.Module], folder: str) -> None:
        seen.append(folder)
        models.pop().load_state_dict(load_file(f"{folder}/own.safetensors"))

    hooks = accelerator.register_save_state_pre_hook(save_own), accelerator.register_load_state_pre_hook(load_own)
    folder = Path(accelerator.save_state())
    assert folder == tmp_path / "checkpoints" / "checkpoint_0"
    zero.verify(folder)
    assert not (folder / "model_1").exists()
    expected = {name: tensor.clone() for name, tensor in frozen.state_dict().items()}
    assert distance(load_file(folder / "own.safetensors"), expected) == 0.0
    counter.value = 6
    frozen.load_state_dict({name: tensor + 1 for name, tensor in expected.items()})
    accelerator.load_state()
    assert seen == [str(folder)]
    assert counter.value == 5
    assert distance(dict(frozen.state_dict()), expected) == 0.0
    for hook in hooks:
        hook.remove()
    again = Path(accelerator.save_state())
    assert distance(load_file(again / "model_1" / "model.safetensors"), expected) == 0.0
    frozen.load_state_dict({name: tensor + 1 for name, tensor in expected.items()})
    accelerator.load_state()
    assert distance(dict(frozen.state_dict()), expected) == 0.0


def test_a_failed_save_state_changes_nothing(tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared(tmp_path)
    step(accelerator, model, optimizer)
    accelerator.save_state()

    def fail(*_: Any) -> None:
        raise OSError("no more")

    hook = accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(zero.CheckpointError, match="no more"):
        accelerator.save_state()
    hook.remove()
    with instead(os, fsync=fails(errno.EIO)), pytest.raises(zero.CheckpointError, match="Input/output error"):
        accelerator.save_state()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_0"]
    accelerator.save_state()
    assert accelerator.save_iteration == 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_0", "checkpoint_1"]


class HalfDone(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        raise ValueError("after it wrote")


def test_load_state_after_a_step_that_was_left_half_done(tmp_path: Path) -> None:
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, parallelism_config=zero.ZeroPlugin(stage=3))
    model = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, HalfDone(model.parameters(), lr=0.1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator.save_state(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match="after it wrote"):
        step(accelerator, model, optimizer)
    with pytest.raises(zero.StateError, match="stopped half-way"):
        model(torch.ones(2, 4))
    accelerator.load_state(str(tmp_path / "saved"))
    model(torch.ones(2, 4))
    assert distance(dict(model.state_dict()), before) == 0.0


def test_end_training_waits_for_the_save(tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared(tmp_path, async_save=True)
    step(accelerator, model, optimizer)
    folder = Path(accelerator.save_state())
    step(accelerator, model, optimizer)
    accelerator.end_training()
    zero.verify(folder)


def test_pickled_state_is_refused(tmp_path: Path) -> None:
    accelerator, *_ = prepared(tmp_path)
    with refused("safetensors only"):
        accelerator.save_state(safe_serialization=False)


def test_save_on_each_node_is_refused(tmp_path: Path) -> None:
    accelerator, model, _ = prepared(tmp_path, save_on_each_node=True)
    with refused("save_on_each_node"):
        accelerator.save_state()
    with refused("save_on_each_node"):
        accelerator.save_model(model, tmp_path / "model")


def test_autocast_is_accelerates_own() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", parallelism_config=zero.ZeroPlugin(stage=3))
    model = nn.Linear(4, 4)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with accelerator.autocast():
        assert torch.is_autocast_enabled("cpu")
        inside = model(torch.ones(1, 4))
    assert inside.dtype == torch.float32, "accelerate hands outputs back in float32"
    assert torch.equal(model(torch.ones(1, 4)), inside)
