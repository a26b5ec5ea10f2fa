"""Names at rest of transformers and PEFT models: files equal to those of the stock code byte for byte, and found again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.checkpoint.safetensors import Stored, build_header, read_header
from hf_zero.checkpoint.weights import Drawing, Located, format_of, names_of
from hf_zero.huggingface.converters import Conversions
from hf_zero.huggingface.recording import recording
from tests.kit import families
from tests.kit.families import bert, mixtral, qwen3_moe, resnet, t5, vit

transformers.logging.set_verbosity_error()


def llama(**changes: Any) -> nn.Module:
    return families.llama(num_key_value_heads=2, **changes)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": llama, "llama-tied": lambda: llama(tie_word_embeddings=True), "gpt2": gpt2, "bert": bert, "t5": t5,
    "qwen3-moe": qwen3_moe, "mixtral": mixtral, "vit": vit, "resnet": resnet,
}  # fmt: skip


def build(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model without two equal elements in a parameter, so that a misplaced one shows."""
    torch.manual_seed(0)
    model = FAMILIES[family]().to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape))
    return model


def stand_in_state(model: nn.Module) -> dict[str, Tensor]:
    """`state_dict()` as a format gets it: meta parameters, tied ones the same object; buffers with values."""
    owners: dict[int, Tensor] = {}
    params = dict(model.named_parameters(remove_duplicate=False))
    return {
        key: owners.setdefault(id(params[key]), torch.empty_like(params[key], device="meta").detach())
        if key in params
        else value
        for key, value in model.state_dict().items()
    }


def write(drawing: Drawing, model: nn.Module, folder: Path) -> None:
    """The files of a drawing with the values of `model`, run by run."""
    params = {name: param.detach() for name, param in model.named_parameters()}
    values = dict(drawing.values)
    for conversion in drawing.conversions:
        values.update(conversion.convert({name: params[name] for name in conversion.sources}))
    for file in drawing.files:
        head, header = build_header([(e.key, e.dtype, e.shape) for e in file.entries], file.metadata)
        payload = bytearray(header.file_bytes - header.header_bytes)
        for entry in file.entries:
            parts = [params[run.source].reshape(-1)[run.there] for run in entry.runs]
            value = (torch.cat(parts) if parts else values[entry.key]).contiguous()
            assert str(value.dtype) == f"torch.{entry.dtype}"
            assert value.numel() == torch.Size(entry.shape).numel()
            place = header.tensors[entry.key]
            raw = value.reshape(-1).view(torch.uint8).numpy().tobytes()
            payload[place.start - header.header_bytes : place.stop - header.header_bytes] = raw
        (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
        (folder / file.name).write_bytes(head + payload)


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing inside may ask a module for its state: of a sharded one that is a collective."""

    def refuse(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"state_dict() of {type(self).__name__} was asked for")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "state_dict", refuse)
        yield


def draw_and_write(model: Any, folder: Path, max_shard_size: int | str = "50GB") -> Drawing:
    folder.mkdir(parents=True, exist_ok=True)
    state = stand_in_state(model)
    with quiet():
        drawing = format_of(model).draw(state, folder, max_shard_size)
    write(drawing, model, folder)
    return drawing


def locate(model: nn.Module, stored: dict[str, Stored]) -> Located:
    with quiet():
        return format_of(model).locate(stored)


def same_folders(ours: Path, stock: Path) -> None:
    names = sorted(str(path.relative_to(stock)) for path in stock.rglob("*") if path.is_file())
    assert names == sorted(str(path.relative_to(ours)) for path in ours.rglob("*") if path.is_file())
    for name in names:
        if not name.endswith(".md"):
            assert (ours / name).read_bytes() == (stock / name).read_bytes(), name


def stored_in(folder: Path) -> dict[str, Stored]:
    out = {}
    for path in sorted(folder.rglob("*.safetensors")):
        inside = path.parent.relative_to(folder).as_posix()
        for key, place in read_header(path).tensors.items():
            out[key if inside == "." else f"{inside}/{key}"] = place
    return out


def value_of(stored: Stored) -> Tensor:
    raw = bytearray(stored.file.read_bytes()[stored.start : stored.stop])
    dtype = getattr(torch, stored.dtype)
    return torch.frombuffer(raw, dtype=dtype).reshape(stored.shape) if raw else torch.empty(stored.shape, dtype=dtype)


def load(located: Located, stored: dict[str, Stored], model: nn.Module) -> None:
    """The values of `located` into `model`, piece by piece."""
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    with torch.no_grad():
        for name, pieces in located.pieces.items():
            at = 0
            for piece in pieces:
                assert piece.start == at
                at = piece.stop
                params[name].data.view(-1)[piece.here].copy_(value_of(stored[piece.source]).reshape(-1)[piece.there])
            assert at == params[name].numel()
        for name, key in located.buffers.items():
            buffers[name].copy_(value_of(stored[key]))
        for conversion in located.conversions:
            for name, value in conversion.convert({key: value_of(stored[key]) for key in conversion.sources}).items():
                params[name].copy_(value)


def fits(located: Located) -> None:
    assert (located.missing, located.unexpected, located.mismatched) == ((), (), ())


def same_values(ours: nn.Module, other: nn.Module) -> None:
    mine, theirs = ours.state_dict(), other.state_dict()
    assert list(mine) == list(theirs)
    for key, value in theirs.items():
        assert torch.equal(mine[key], value), key


def blank(model: Any) -> Any:
    """The same model with other values in everything that a file can bring back."""
    other = type(model)(model.config).to(model.dtype)
    with torch.no_grad():
        for value in other.state_dict().values():
            value.fill_(7)
    return other


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("limit", ["50GB", 6_000], ids=["whole", "split"])
def test_files_equal_stock(family: str, limit: int | str, tmp_path: Path) -> None:
    model = build(family, torch.bfloat16 if family in ("llama-tied", "mixtral") else torch.float32)
    drawing = draw_and_write(model, tmp_path / "ours", limit)
    assert not drawing.conversions
    model.save_pretrained(tmp_path / "stock", max_shard_size=limit)
    same_folders(tmp_path / "ours", tmp_path / "stock")
    if limit != "50GB":
        assert len(drawing.files) > 1

    stored = stored_in(tmp_path / "ours")
    fresh = blank(model)
    located = locate(fresh, stored)
    fits(located)
    assert not located.conversions
    load(located, stored, fresh)
    same_values(fresh, model)


def test_merged_experts_are_runs(tmp_path: Path) -> None:
    """Each expert's gate, up and down is a few long runs of the merged parameters."""
    drawing = draw_and_write(build("qwen3-moe"), tmp_path)
    experts = [entry for file in drawing.files for entry in file.entries if ".experts." in entry.key]
    assert len(experts) == 2 * 4 * 3
    assert all(len(entry.runs) == 1 for entry in experts)


def test_transposed_is_computed(tmp_path: Path) -> None:
    """`Transpose` moves single elements: such a parameter is worked out whole, both ways, by transformers' own code."""
    from transformers.core_model_loading import Chunk, Transpose, WeightConverter, WeightRenaming

    model = build("llama")
    model._weight_conversions = [
        WeightRenaming("mlp.lower", "mlp.down_proj"),
        WeightConverter("mlp.turned", "mlp.up_proj.weight", operations=[Transpose(0, 1)]),
        WeightConverter("attn.qk", ["attn.q_proj.weight", "attn.k_proj.weight"], operations=[Chunk(dim=0)]),
    ]
    drawing = draw_and_write(model, tmp_path / "ours")
    assert [conversion.targets for conversion in drawing.conversions] == [
        ("model.layers.0.mlp.turned",), ("model.layers.1.mlp.turned",)
    ]  # fmt: skip
    assert [conversion.sources for conversion in drawing.conversions][0] == ("model.layers.0.mlp.up_proj.weight",)
    model.save_pretrained(tmp_path / "stock")
    same_folders(tmp_path / "ours", tmp_path / "stock")

    stored = stored_in(tmp_path / "ours")
    assert stored["model.layers.0.mlp.turned"].shape == (32, 48)
    fresh = blank(model)
    fresh._weight_conversions = model._weight_conversions
    located = locate(fresh, stored)
    fits(located)
    assert {conversion.targets for conversion in located.conversions} == {
        (f"model.layers.{i}.mlp.up_proj.weight",) for i in range(2)
    }
    load(located, stored, fresh)
    same_values(fresh, model)


def test_ignored_on_save(tmp_path: Path) -> None:
    model = build("llama")
    model._keys_to_ignore_on_save = ["model.norm.weight"]
    draw_and_write(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "stock")
    same_folders(tmp_path / "ours", tmp_path / "stock")
    stored = stored_in(tmp_path / "ours")
    assert "model.norm.weight" not in stored
    assert locate(model, stored).missing == ()


def test_config_says_the_own_type(tmp_path: Path) -> None:
    """While a low-precision copy is gathered, the file and config.json still say the parameters' own type."""
    model = build("llama")
    state = stand_in_state(model)
    model.to(torch.bfloat16)
    drawing = format_of(model).draw(state, tmp_path, "50GB")
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    assert {entry.dtype for file in drawing.files for entry in file.entries} == {"float32"}
    assert next(model.parameters()).dtype == torch.bfloat16


def test_head_prefix_and_legacy_names(tmp_path: Path) -> None:
    """A base model's file in a model with a head, the other way round, and names of the TensorFlow days."""
    base, headed = build("bert").bert, build("bert")
    base.save_pretrained(tmp_path / "base")
    stored = stored_in(tmp_path / "base")
    fresh = blank(headed)
    located = locate(fresh, stored)
    assert not located.unexpected
    assert all(name.startswith("cls.") for name in located.missing)
    load(located, stored, fresh)
    same_values(fresh.bert, base)

    headed.save_pretrained(tmp_path / "headed")
    state = safetensors.torch.load_file(tmp_path / "headed" / "model.safetensors")
    old = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for key, value in state.items()
    }
    assert old.keys() != state.keys()
    safetensors.torch.save_file(old, tmp_path / "headed" / "model.safetensors", metadata={"format": "pt"})
    stored = stored_in(tmp_path / "headed")
    fresh = blank(headed)
    located = locate(fresh, stored)
    fits(located)
    load(located, stored, fresh)
    same_values(fresh, headed)
    inner = locate(blank(headed).bert, stored)
    assert not inner.missing
    assert all(key.startswith("cls.") for key in inner.unexpected)


def test_gaps_are_named() -> None:
    model = build("llama")
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    stored = {name: Stored(Path("x"), "float32", shape, 0, 0) for name, shape in shapes.items()}
    del stored["model.norm.weight"]
    stored["extra.weight"] = Stored(Path("x"), "float32", (3,), 0, 0)
    stored["lm_head.weight"] = Stored(Path("x"), "float32", (65, 32), 0, 0)
    located = locate(model, stored)
    assert located.missing == ("model.norm.weight",)
    assert located.unexpected == ("extra.weight",)
    assert located.mismatched == (("lm_head.weight", (65, 32), (97, 32)),)
    assert "lm_head.weight" not in located.pieces
    assert not hasattr(model, "_weight_conversions")
    assert "state_dict" not in model.__dict__


def test_tied_under_either_name() -> None:
    model = build("gpt2")
    for name in ("transformer.wte.weight", "lm_head.weight"):
        stored = {
            key: Stored(Path("x"), "float32", tuple(param.shape), 0, 0)
            for key, param in model.named_parameters(remove_duplicate=False)
            if key == name or key not in ("transformer.wte.weight", "lm_head.weight")
        }
        located = locate(model, stored)
        assert located.missing == ()
        assert located.pieces["transformer.wte.weight"][0].source == name


def test_around_other_stock_code(tmp_path: Path) -> None:
    """accelerate's `save_model`, which looks for shared memory by address and splits by its own rule."""
    from accelerate import Accelerator

    model = build("gpt2")
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(model, tmp_path / "stock", max_shard_size=20_000)
    state, fresh = stand_in_state(model), build("gpt2")
    (tmp_path / "ours").mkdir()
    with recording(model, state) as record:
        accelerator.get_state_dict = lambda *args, **kwargs: dict(state)
        accelerator.save_model(model, tmp_path / "ours", max_shard_size=20_000)
    assert not list((tmp_path / "ours").glob("*.safetensors"))
    write(record.drawing(tmp_path / "ours"), fresh, tmp_path / "ours")
    same_folders(tmp_path / "ours", tmp_path / "stock")


# PEFT ---------------------------------------------------------------------------------------------------------------


def adapted(adapters: tuple[str, ...] = ("default",), **changes: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes})
    torch.manual_seed(0)
    model = peft.get_peft_model(llama(), config, adapter_name=adapters[0])
    for adapter in adapters[1:]:
        model.add_adapter(adapter, config)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape))
    return model


@pytest.mark.parametrize("adapters", [("default",), ("default", "other")], ids=["one", "two"])
@pytest.mark.parametrize("saved", [None, ["lm_head"]], ids=["lora", "modules_to_save"])
def test_adapters(adapters: tuple[str, ...], saved: list[str] | None, tmp_path: Path) -> None:
    model = adapted(adapters, modules_to_save=saved)
    draw_and_write(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "stock")
    same_folders(tmp_path / "ours", tmp_path / "stock")

    stored = stored_in(tmp_path / "ours")
    fresh = adapted(adapters, modules_to_save=saved)
    with torch.no_grad():
        for name, param in fresh.named_parameters():
            if any(f".{adapter}." in name for adapter in adapters):
                param.fill_(7)
    form = format_of(fresh)
    assert set(form.stems) == {
        str(path.relative_to(tmp_path / "ours"))[:-12] for path in (tmp_path / "ours").rglob("*.safetensors")
    }
    located = locate(fresh, stored)
    fits(located)
    assert set(located.pieces) <= set(names_of(fresh).values())
    load(located, stored, fresh)
    same_values(fresh, model)


KINDS = {
    "dora": lambda peft: peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, bias="lora_only"),
    "ia3": lambda peft: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "prompt": lambda peft: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    "prefix": lambda peft: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    "embedding": lambda peft: peft.LoraConfig(r=4, target_modules=["embed_tokens", "lm_head"]),
}


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_adapters(kind: str, tmp_path: Path) -> None:
    """Saved without a forward of the model: nothing of it runs that would have to gather."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(llama(), KINDS[kind](peft))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape))
    expected = {name: param.clone() for name, param in model.named_parameters() if param.requires_grad}
    draw_and_write(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "stock")
    same_folders(tmp_path / "ours", tmp_path / "stock")
    stored = stored_in(tmp_path / "ours")
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.fill_(7)
    located = locate(model, stored)
    fits(located)
    load(located, stored, model)
    for name, param in model.named_parameters():
        assert not param.requires_grad or torch.equal(param, expected[name]), name


def test_injected_adapter(tmp_path: Path) -> None:
    """transformers' own way to add an adapter."""
    peft = pytest.importorskip("peft")
    model = build("llama")
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"]))
    draw_and_write(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "stock")
    same_folders(tmp_path / "ours", tmp_path / "stock")
    form = format_of(model)
    assert form.stems == {"adapter_model": ""}
    located = locate(model, stored_in(tmp_path / "ours"))
    fits(located)
    assert set(located.pieces) == {name for name, _ in model.named_parameters() if "lora_" in name}


def test_adapter_gaps() -> None:
    model = adapted()
    located = locate(model, {"other.weight": Stored(Path("x"), "float32", (1,), 0, 0)})
    assert len(located.missing) == 2 * 2 * 2
    assert all("lora_" in name for name in located.missing)
    assert located.unexpected == ("other.weight",)


# Code of one's own ------------------------------------------------------------------------------------------------------


class Halved(transformers.LlamaForCausalLM):
    """Saves other values than it holds."""

    def save_pretrained(self, folder: Any, state_dict: Any = None, **kwargs: Any) -> None:  # type: ignore[override]
        state = self.state_dict() if state_dict is None else state_dict
        super().save_pretrained(folder, state_dict={key: value / 2 for key, value in state.items()}, **kwargs)


def halved() -> Any:
    torch.manual_seed(0)
    return Halved(llama().config)


def test_computed_by_own_code_is_a_named_error(tmp_path: Path) -> None:
    model = halved()
    state = stand_in_state(model)
    with (
        quiet(),
        pytest.raises(zero.CheckpointError, match="save_pretrained computes 'model.embed_tokens.weight'.*unsharded"),
    ):
        format_of(model).draw(state, tmp_path, "50GB")
    assert not list(tmp_path.glob("*.safetensors"))


def test_columns_are_not_taken_for_rows() -> None:
    """A converter that reorders inside rows, or cuts them, is computed; its row numbers would look the same."""
    from transformers.core_model_loading import Chunk, Concatenate, Interleave, MergeModulelist, WeightConverter

    meta = {name: torch.empty(4, 6, device="meta") for name in ("a", "b")}
    for operations, is_placed in (
        ([MergeModulelist(0), Concatenate(1)], True),
        ([Concatenate(0)], True),
        ([Concatenate(1)], False),
        ([Concatenate(-1)], False),
        ([MergeModulelist(1), Concatenate(0)], False),
        ([MergeModulelist(0), Concatenate(2)], False),
        ([Concatenate(0), Chunk(1)], False),
        ([Concatenate(0), Interleave(0)], False),
    ):
        conversions = Conversions()
        converter = WeightConverter(["a", "b"], "out", operations=operations)
        for name, tensor in meta.items():
            converter.add_tensor("out", name, name, conversions.source(name, tensor))
        with conversions.recording():
            (made,) = converter.convert("out").values()
        assert (conversions.pieces(made) is not None) == is_placed, operations
        values = {name: torch.randn(4, 6) for name in meta}
        runs = conversions.pieces(made)
        for name, value in values.items():
            converter.add_tensor("out", name, name, value)
        (expected,) = converter.convert("out").values()
        expected = expected[0] if isinstance(expected, list) else expected
        if runs is None:
            (conversion,) = conversions.computed({"out": made})
            assert torch.equal(conversion.convert(values)["out"], expected)
        else:
            parts = [values[run.source].reshape(-1)[run.there] for run in runs]
            assert torch.equal(torch.cat(parts).view(made.shape), expected)
