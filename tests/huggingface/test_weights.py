"""Files of transformers and PEFT models, saved by two ranks, equal those of `save_pretrained` byte for byte and load again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.core_model_loading import Chunk, Concatenate, Transpose, WeightConverter, WeightRenaming

import hf_zero as zero
from tests.kit.families import mixtral, qwen3_moe, resnet, vit
from tests.kit.pool import RankPool
from tests.models import bert, gpt2, llama, t5

transformers.logging.set_verbosity_error()


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": llama, "llama-tied": lambda: llama(tie_word_embeddings=True), "gpt2": gpt2, "bert": bert, "t5": t5,
    "qwen3-moe": qwen3_moe, "mixtral": mixtral, "vit": vit, "resnet": resnet,
}  # fmt: skip


def converted(*conversions: Any) -> nn.Module:
    model = llama(num_attention_heads=2)  # as many as of keys
    model._weight_conversions = list(conversions)
    return model


def ignoring() -> nn.Module:
    model = llama()
    model._keys_to_ignore_on_save = ["model.norm.weight"]
    return model


UP, DOWN = "mlp.up_proj.weight", "mlp.down_proj.weight"
CONVERTED: dict[str, Callable[[], nn.Module]] = {
    "renamed and transposed": lambda: converted(
        WeightRenaming("mlp.lower", "mlp.down_proj"), WeightConverter("mlp.turned", UP, operations=[Transpose(0, 1)])
    ),
    "split": lambda: converted(
        WeightConverter("attn.qk", ["attn.q_proj.weight", "attn.k_proj.weight"], operations=[Chunk(dim=0)])
    ),
    "transposed square": lambda: converted(
        WeightConverter("attn.turned", "attn.q_proj.weight", operations=[Transpose(0, 1)])
    ),
    "rows": lambda: converted(WeightConverter(["mlp.a", "mlp.b"], UP, operations=[Concatenate(0)])),
    "columns": lambda: converted(WeightConverter(["mlp.a", "mlp.b"], UP, operations=[Concatenate(1)])),
    "columns from the end": lambda: converted(WeightConverter(["mlp.a", "mlp.b"], DOWN, operations=[Concatenate(-1)])),
    "ignored": ignoring,
}


def adapted(config: peft.PeftConfig, *others: str) -> nn.Module:
    model = peft.get_peft_model(llama(), config)
    for name in others:
        model.add_adapter(name, config)
    return model


def lora(**changes: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes})


def injected() -> nn.Module:
    """transformers' own way to add an adapter."""
    model = llama()
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"]))
    return model


ADAPTERS: dict[str, Callable[[], nn.Module]] = {
    "lora": lambda: adapted(lora()),
    "lora, two": lambda: adapted(lora(), "other"),
    "lora and head": lambda: adapted(lora(modules_to_save=["lm_head"])),
    "lora and head, two": lambda: adapted(lora(modules_to_save=["lm_head"]), "other"),
    "lora of embeddings": lambda: adapted(peft.LoraConfig(r=4, target_modules=["embed_tokens", "lm_head"])),
    "dora": lambda: adapted(peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, bias="lora_only")),
    "ia3": lambda: adapted(peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "prompt": lambda: adapted(peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)),
    "prefix": lambda: adapted(peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)),
    "injected": injected,
}
ALL = {**FAMILIES, **CONVERTED, **ADAPTERS}


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model without two equal elements in a parameter, so that a misplaced one shows."""
    torch.manual_seed(0)
    model = ALL[name]().to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape))
    return model


def own_dtype(name: str) -> torch.dtype:
    return torch.bfloat16 if name in ("llama-tied", "mixtral") else torch.float32


def saved_values(name: str, model: nn.Module) -> list[Tensor]:
    """What a save of the model has."""
    every = [*model.named_parameters(), *model.named_buffers()]
    if name in ADAPTERS:
        every = [(key, value) for key, value in every if value.requires_grad or ".other." in key]
    return [value for key, value in every if not (name == "ignored" and key == "model.norm.weight")]


def engine_of(model: nn.Module) -> zero.Engine:
    return zero.shard(model, None, zero.ZeroConfig(stage=3))


def same_state(model: nn.Module, stock: nn.Module, rank: int) -> None:
    mine, theirs = model.state_dict(), stock.state_dict()
    if rank == 0:
        assert list(mine) == list(theirs)
        assert [key for key, value in theirs.items() if not torch.equal(mine[key], value)] == []


def same_folders(ours: Path, stock: Path) -> int:
    """Return the number of weight files."""
    names = sorted(str(path.relative_to(stock)) for path in stock.rglob("*") if path.is_file())
    found = sorted(str(path.relative_to(ours)) for path in ours.rglob("*") if path.is_file())
    assert [name for name in found if not name.startswith("zero_")] == names
    for name in names:
        if not name.endswith(".md"):
            assert (ours / name).read_bytes() == (stock / name).read_bytes(), name
    return sum(name.endswith(".safetensors") for name in names)


def round_trip(rank: int, world: int, root: Path, name: str, limit: int | str) -> int:
    stock, dtype = root / "stock", own_dtype(name)
    if rank == 0:
        build(name, dtype).save_pretrained(stock, max_shard_size=limit)
    engine_of(build(name, dtype)).save(root / "ours", max_shard_size=limit)
    files = same_folders(root / "ours", stock) if rank == 0 else 0
    model = build(name, dtype)
    with torch.no_grad():
        for value in saved_values(name, model):
            value.fill_(7)
    engine_of(model).load(root / "ours")
    same_state(model, build(name, dtype), rank)
    return files


@pytest.mark.gloo
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("name", ALL)
def test_files_equal_stock(name: str, tmp_path: Path, two: RankPool) -> None:
    two.run(round_trip, tmp_path, name, "50GB")


@pytest.mark.gloo
@pytest.mark.parametrize("name", FAMILIES)
def test_split_files_equal_stock(name: str, tmp_path: Path, two: RankPool) -> None:
    assert two.run(round_trip, tmp_path, name, 6_000)[0] > 1


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the tensors of a folder's only weight file."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.filterwarnings("ignore:.*plain model folder")
def test_head_prefix_and_legacy_names(tmp_path: Path) -> None:
    """A base model's file in a model with a head, the other way round, and names of the TensorFlow days."""
    headed = build("bert")
    headed.bert.save_pretrained(tmp_path / "base")
    headed.save_pretrained(tmp_path / "headed")
    expected = headed.state_dict()

    def loaded(folder: str, part: str = "") -> dict[str, Tensor]:
        model = build("bert")
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(7)
        target = model.get_submodule(part)
        engine_of(target).load(tmp_path / folder, strict=False)
        return dict(model.state_dict())

    def differing(found: dict[str, Tensor]) -> set[str]:
        return {key.partition(".")[0] for key, value in expected.items() if not torch.equal(found[key], value)}

    assert differing(loaded("base")) == {"cls"}
    assert differing(loaded("headed", "bert")) == {"cls"}
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def rename(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if key.endswith(tuple(old))]:
            module, _, last = key.rpartition(".LayerNorm.")
            tensors[f"{module}.{old[f'LayerNorm.{last}']}"] = tensors.pop(key)

    edit(tmp_path / "headed", rename)
    assert differing(loaded("headed")) == set()


@pytest.mark.filterwarnings("ignore:.*plain model folder")
def test_a_tie_under_its_other_name(tmp_path: Path) -> None:
    build("gpt2").save_pretrained(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("transformer.wte.weight")}))
    model = gpt2()
    engine_of(model).load(tmp_path)
    same_state(model, build("gpt2"), 0)


def test_gaps_are_named(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "llama")

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors |= {"extra.weight": torch.zeros(3), "lm_head.weight": torch.zeros(65, 32)}

    edit(tmp_path / "llama", change)
    build("lora").save_pretrained(tmp_path / "lora")
    save_file({"other.weight": torch.zeros(1)}, tmp_path / "lora" / "adapter_model.safetensors")
    for name, parts in (
        ("llama", ("model.norm.weight", "extra.weight", "lm_head.weight", "65, 32")),
        ("lora", ("8 missing", "lora_A", "other.weight")),
    ):
        with pytest.raises(zero.CheckpointError) as caught, pytest.warns(UserWarning, match="plain model folder"):
            engine_of(build(name)).load(tmp_path / name)
        assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


class Halved(transformers.LlamaForCausalLM):
    """Saves other values than it holds."""

    def save_pretrained(self, folder: Any, state_dict: Any = None, **kwargs: Any) -> None:  # type: ignore[override]
        state = self.state_dict() if state_dict is None else state_dict
        super().save_pretrained(folder, state_dict={key: value / 2 for key, value in state.items()}, **kwargs)


def test_computed_by_own_code_is_a_named_error(tmp_path: Path) -> None:
    engine = engine_of(Halved(llama().config))
    with pytest.raises(zero.CheckpointError, match="save_pretrained computes 'model.embed_tokens.weight'.*unsharded"):
        engine.save(tmp_path / "halved")
    assert not (tmp_path / "halved").exists()
