"""`from_pretrained` inside `zero.Init`: the stock model, of which each rank read and holds its own part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

import hf_zero as zero
from hf_zero import ConfigError, Init, LayoutError, ZeroError
from tests.huggingface.test_weights import FAMILIES, build, edit, own_dtype
from tests.kit.pool import RankPool


def differences(model: Any, stock: Any) -> list[str]:
    """What of a deferred model is not the stock model's. A collective."""
    out = []
    mine, theirs = (
        dict(model.named_parameters(remove_duplicate=False)),
        dict(stock.named_parameters(remove_duplicate=False)),
    )
    if list(mine) != list(theirs):
        return [f"names {sorted(mine.keys() ^ theirs.keys())}"]
    for name, param in mine.items():
        other = theirs[name]
        if param.is_contiguous() and param.numel() > 1 and param.untyped_storage().nbytes() > 8:
            out.append(f"{name} is whole")
        same = (param.shape, param.dtype, param.requires_grad) == (other.shape, other.dtype, other.requires_grad)
        if not same or not torch.equal(zero.full_parameter(param), other):
            out.append(name)
    ties = [{name for name in mine if mine[name] is mine[first]} for first in mine]
    if ties != [{name for name in theirs if theirs[name] is theirs[first]} for first in theirs]:
        out.append("ties")
    buffers = dict(stock.named_buffers())
    for name, buffer in model.named_buffers():
        if buffer.dtype != buffers[name].dtype or not torch.equal(buffer, buffers[name]):
            out.append(name)
    return out


def header_bytes(path: Path) -> int:
    with open(path, "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def loaded(cls: Any, path: str | Path, offload: str = "none", **options: Any) -> tuple[Any, Any, Init]:
    """The model inside Init, the stock one from the same random state."""
    torch.manual_seed(3)
    with Init(offload_params=offload) as init:
        model = cls.from_pretrained(path, **options)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    stock = cls.from_pretrained(path, **options)
    assert torch.equal(after, torch.get_rng_state())
    return model, stock, init


def check_families(rank: int, world: int, root: Path, offload: str) -> dict[str, tuple[int, int, int]]:
    """Bytes of parameters in the files, of buffers in them, and those that this rank has read."""
    out = {}
    for name in FAMILIES:
        model, stock, init = loaded(type(FAMILIES[name]()), root / name, offload)
        files = list((root / name).glob("*.safetensors"))
        headers = sum(map(header_bytes, files))
        buffers = sum(stock.get_buffer(key).nbytes for key, _ in stock.named_buffers() if key in stock.state_dict())
        payload = sum(path.stat().st_size for path in files) - headers - buffers
        out[name] = payload, buffers, init.bytes_read - headers
        with Init():
            assert model.state_dict().keys() == stock.state_dict().keys()
            if name == "gpt2":
                model.save_pretrained(root / offload, is_main_process=rank == 0)
        assert differences(model, stock) == [], name
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    for name in FAMILIES:
        build(name, own_dtype(name)).save_pretrained(root / name)
    return root


@pytest.mark.parametrize(("world", "offload"), [(3, "none"), (2, "disk")])
def test_equal_to_stock(world: int, offload: str, folders: Path, pools: dict[int, RankPool]) -> None:
    """Merged experts, too: nothing differs. Ranks read each byte once together or, for the disk, buffers alone."""
    results = pools[world].run(check_families, folders, offload)
    saved, origin = (folders / name / "model.safetensors" for name in (offload, "gpt2"))
    assert saved.read_bytes() == origin.read_bytes()
    for name in FAMILIES:
        (payload, buffers, _), read = results[0][name], [result[name][2] for result in results]
        if offload == "disk":
            assert read == [buffers] * world, name
            continue
        assert sum(read) == payload + world * buffers, name
        assert max(read) <= payload / world + buffers + 8 * 80, name  # slices differ by an element per parameter


@pytest.mark.parametrize("dtype", [None, "auto", torch.bfloat16, torch.float16], ids=str)
def test_types(dtype: Any, tmp_path: Path) -> None:
    """Cast as it is read: `dtype=` and `torch_dtype=`, and parameters that stay in float32 in spite of them."""
    build("t5", torch.bfloat16).save_pretrained(tmp_path)
    for option in ({"dtype": dtype}, {"torch_dtype": dtype}):
        model, stock, _ = loaded(transformers.T5ForConditionalGeneration, tmp_path, **option)
        assert differences(model, stock) == []
        assert {param.dtype for param in model.parameters()} == {param.dtype for param in stock.parameters()}


def test_split_files(tmp_path: Path) -> None:
    build("qwen3-moe").save_pretrained(tmp_path, max_shard_size=6_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    model, stock, _ = loaded(transformers.AutoModelForCausalLM, tmp_path)
    assert differences(model, stock) == []


def infos(info: dict[str, Any]) -> dict[str, Any]:
    return {key: sorted(map(str, value)) for key, value in info.items()}


def test_loading_info_is_the_stock_one(tmp_path: Path) -> None:
    """Missing, unexpected and mismatched keys: reported, and initialised with the stock loader's numbers."""
    build("bert").save_pretrained(tmp_path)
    cls: Any = transformers.BertForSequenceClassification

    def as_stock(**options: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
        torch.manual_seed(3)
        with Init():
            model, mine = cls.from_pretrained(tmp_path, output_loading_info=True, **options)
        torch.manual_seed(3)
        stock, theirs = cls.from_pretrained(tmp_path, output_loading_info=True, **options)
        assert infos(mine) == infos(theirs)
        assert differences(model, stock) == []
        return stock, theirs

    stock, info = as_stock(num_labels=3)
    assert info["missing_keys"]
    assert info["unexpected_keys"]

    stock.save_pretrained(tmp_path)
    with Init(), pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        cls.from_pretrained(tmp_path, num_labels=5)
    _, info = as_stock(num_labels=5, ignore_mismatched_sizes=True)
    assert len(info["mismatched_keys"]) == 2


class Shuffled(set[str]):
    """In each process sets of names have another order."""

    def __sub__(self, others: Any) -> Any:
        return sorted(super().__sub__(set(others)), reverse=torch.distributed.get_rank() == 1)


class Classifier(transformers.BertForSequenceClassification):
    def _move_missing_keys_from_meta_to_device(self, missing_keys: Any, *args: Any) -> None:
        super()._move_missing_keys_from_meta_to_device(Shuffled(missing_keys), *args)


def check_missing(rank: int, world: int, path: str) -> tuple[Tensor, list[str]]:
    torch.manual_seed(3)
    with Init():
        torch.rand(rank)  # a program that draws differently on each rank
        model = Classifier.from_pretrained(path, num_labels=3)
    weight = zero.full_parameter(model.classifier.weight)
    torch.manual_seed(3)
    stock = transformers.BertForSequenceClassification.from_pretrained(path, num_labels=3)
    return weight, differences(model, stock)


def test_missing_keys_are_drawn_once(folders: Path, pools: dict[int, RankPool]) -> None:
    """A new head has rank 0's numbers, whatever the ranks drew before."""
    results = pools[3].run(check_missing, str(folders / "bert"))
    assert [result[1] for result in results] == [[]] * 3
    assert 0 < results[0][0].abs().max() < 1


def check_ties(rank: int, world: int, root: str, offload: str) -> list[Any]:
    out = []
    for kind in ("equal", "different"):
        torch.manual_seed(3)
        with Init(offload_params=offload) as init:
            model = transformers.AutoModelForCausalLM.from_pretrained(f"{root}/{kind}")
        stock = transformers.AutoModelForCausalLM.from_pretrained(f"{root}/{kind}")
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        out.append((differences(model, stock), tied, init.peak_numel))
    return out


@pytest.mark.parametrize("offload", ["none", "disk"])
def test_both_names_of_a_tie(offload: str, tmp_path: Path, pools: dict[int, RankPool]) -> None:
    """Equal: one parameter, found without a whole one. Different, if only in the last rank's part: left untied."""
    model = build("llama-tied")

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def alter(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"][-1, -1] += 1

    for kind in ("equal", "different"):
        model.save_pretrained(tmp_path / kind)
        edit(tmp_path / kind, add)
    edit(tmp_path / "different", alter)
    for equal, different in pools[2].run(check_ties, str(tmp_path), offload):
        assert equal == ([], True, 0)
        assert different[:2] == ([], False)


def test_tie_under_the_other_name(tmp_path: Path) -> None:
    build("gpt2").save_pretrained(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("transformer.wte.weight")}))
    model, stock, _ = loaded(transformers.AutoModelForCausalLM, tmp_path)
    assert differences(model, stock) == []
    assert model.lm_head.weight is model.transformer.wte.weight


class OwnLlama(transformers.LlamaForCausalLM):
    """A class of its own, so that what is registered for it is nobody else's."""


def test_computed_keys(tmp_path: Path) -> None:
    """Tensors that transformers computes are read whole, one group at a time, and cut."""
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter, WeightRenaming

    register_checkpoint_conversion_mapping(
        "OwnLlama",
        [
            WeightRenaming("mlp.lower", "mlp.down_proj"),
            WeightConverter("mlp.turned", "mlp.up_proj.weight", operations=[Transpose(0, 1)]),
        ],
    )
    build("llama").save_pretrained(tmp_path)

    def turn(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if "mlp.down_proj" in name:
                tensors[name.replace("mlp.down_proj", "mlp.lower")] = tensors.pop(name)
            elif name.endswith("mlp.up_proj.weight"):
                tensors[name.replace("mlp.up_proj.weight", "mlp.turned")] = tensors.pop(name).T.contiguous()

    edit(tmp_path, turn)
    assert "model.layers.0.mlp.turned" in safetensors.torch.load_file(tmp_path / "model.safetensors")
    model, stock, init = loaded(OwnLlama, tmp_path, dtype=torch.bfloat16)
    assert differences(model, stock) == []
    assert torch.equal(
        stock.model.layers[0].mlp.up_proj.weight, build("llama").model.layers[0].mlp.up_proj.weight.bfloat16()
    )
    assert init.bytes_read == (tmp_path / "model.safetensors").stat().st_size


def test_other_sources(tmp_path: Path) -> None:
    """Pickled weights and state dicts: read by the stock loader, born all the same."""
    source = build("gpt2")
    source.save_pretrained(tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with Init() as init:
        model = transformers.GPT2LMHeadModel.from_pretrained(
            None, config=source.config, state_dict=dict(source.state_dict())
        )
    assert differences(model, stock) == []
    assert init.bytes_read == 0

    torch.save(source.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    model, stock, _ = loaded(transformers.AutoModelForCausalLM, tmp_path)
    assert differences(model, stock) == []


_REMOTE = """
import torch
from torch import nn
from transformers import PreTrainedModel, PretrainedConfig

class OwnConfig(PretrainedConfig):
    model_type = "own"
    def __init__(self, width=8, **kwargs):
        self.width = width
        super().__init__(**kwargs)

class Own(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.inner = nn.Linear(config.width, config.width)
        self.scale = nn.Parameter(torch.ones(config.width))
        self.register_buffer("seen", torch.zeros(3))
        self.post_init()
    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.02)
            module.bias.data.zero_()
    def forward(self, x):
        return self.inner(x) * self.scale
"""


def test_remote_code(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "modeling_own.py").write_text(_REMOTE)
    auto = {"AutoConfig": "modeling_own.OwnConfig", "AutoModel": "modeling_own.Own"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "width": 8, "auto_map": auto}))
    tensors = {"inner.weight": torch.randn(8, 8), "scale": torch.randn(8), "seen": torch.arange(3.0)}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model, stock, _ = loaded(transformers.AutoModel, folder, trust_remote_code=True)
    assert differences(model, stock) == []
    assert torch.equal(model.seen, torch.arange(3.0))

    edit(folder, lambda tensors: tensors.pop("scale"))
    with Init(), pytest.raises(LayoutError, match=r"'scale'.*_init_weights does not initialise it"):
        transformers.AutoModel.from_pretrained(folder, trust_remote_code=True)


def check_adapters(rank: int, world: int, root: str) -> list[Any]:
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(3)
    with Init():
        base = transformers.AutoModelForCausalLM.from_pretrained(f"{root}/llama")
        fresh = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"]))
        again = PeftModel.from_pretrained(
            transformers.AutoModelForCausalLM.from_pretrained(f"{root}/llama"), f"{root}/adapter"
        )
        injected = transformers.AutoModelForCausalLM.from_pretrained(f"{root}/adapter")
        empty = PeftModel.from_pretrained(  # on the meta device at first
            transformers.AutoModelForCausalLM.from_pretrained(f"{root}/llama"),
            f"{root}/adapter",
            low_cpu_mem_usage=True,
        )
    torch.manual_seed(3)
    base = transformers.AutoModelForCausalLM.from_pretrained(f"{root}/llama")
    stock = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"]))
    other = PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(f"{root}/llama"), f"{root}/adapter"
    )
    third = transformers.AutoModelForCausalLM.from_pretrained(f"{root}/adapter")
    return [differences(*pair) for pair in ((fresh, stock), (again, other), (injected, third), (empty, other))]


def test_adapters(folders: Path, pools: dict[int, RankPool]) -> None:
    """New ones, and those of a folder, on a born model."""
    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(folders / "llama")
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(folders / "adapter")
    assert pools[2].run(check_adapters, str(folders)) == [[[]] * 4] * 2


def check_truncated(rank: int, world: int, root: str) -> str:
    path = f"{root}/rank{rank}" if rank == world - 1 else f"{root}/rank0"
    try:
        with Init():
            transformers.AutoModelForCausalLM.from_pretrained(path)
    except ZeroError as error:
        with Init():
            transformers.AutoModelForCausalLM.from_pretrained(f"{root}/rank0")  # nothing is left behind
        return str(error)
    return ""


def test_short_file_on_one_rank(tmp_path: Path, pools: dict[int, RankPool]) -> None:
    model = build("llama")
    for rank in (0, 2):
        model.save_pretrained(tmp_path / f"rank{rank}")
    short = tmp_path / "rank2" / "model.safetensors"
    short.write_bytes(short.read_bytes()[:-10])
    for message in pools[3].run(check_truncated, str(tmp_path)):
        assert str(short) in message
        assert "cut short" in message


def test_refused_and_restored(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    stock = vars(transformers.PreTrainedModel)["_load_pretrained_model"]
    with Init(), pytest.raises(ConfigError, match="device_map"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"model": "cpu", "lm_head": "disk"})
    with Init():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"})
        assert vars(transformers.PreTrainedModel)["_load_pretrained_model"] is not stock
    assert vars(transformers.PreTrainedModel)["_load_pretrained_model"] is stock
    assert differences(model, transformers.AutoModelForCausalLM.from_pretrained(tmp_path)) == []
