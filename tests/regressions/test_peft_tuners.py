"""PEFT's tuners, also those that register parameters again in every forward: as averaged gradients have it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hf_zero as zero
from tests.kit.pool import RankPool
from tests.kit.rows import each_value

pytestmark = [pytest.mark.gloo, pytest.mark.filterwarnings("ignore")]
WIDTH, VOCAB = 16, 11


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x, x, x, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


LINEAR = {"target_modules": ["up", "down"]}
TUNERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adalora": ("AdaLoraConfig", {**LINEAR, "total_step": 20, "init_r": 4, "target_r": 2}),
    "boft": ("BOFTConfig", {**LINEAR, "boft_block_size": 4}),
    "c3a": ("C3AConfig", {**LINEAR, "block_size": 4}),
    "delora": ("DeloraConfig", LINEAR),
    "dora": ("LoraConfig", {**LINEAR, "use_dora": True, "r": 4}),
    "fourierft": ("FourierFTConfig", {**LINEAR, "n_frequency": 10}),
    "glora": ("GloraConfig", LINEAR),
    "hira": ("HiraConfig", LINEAR),
    "hra": ("HRAConfig", LINEAR),
    "ia3": ("IA3Config", {**LINEAR, "feedforward_modules": ["down"]}),
    "ln": ("LNTuningConfig", {"target_modules": ["norm"]}),
    "loha": ("LoHaConfig", LINEAR),
    "lokr": ("LoKrConfig", LINEAR),
    "lora": ("LoraConfig", {"target_modules": ["up", "embed"], "r": 4, "modules_to_save": ["head"]}),
    "lora, attention": ("LoraConfig", {"target_modules": ["attn"], "r": 4}),
    "lora, attention and more": ("LoraConfig", {"target_modules": ["attn", "up", "embed"], "r": 4}),
    "lora, bias": ("LoraConfig", {**LINEAR, "r": 4, "bias": "all"}),
    "lora, parameters": ("LoraConfig", {"target_modules": [], "target_parameters": ["up.weight"], "r": 4}),
    "miss": ("MissConfig", {**LINEAR, "r": 4}),
    "oft": ("OFTConfig", {**LINEAR, "oft_block_size": 4, "r": 0}),
    "randlora": ("RandLoraConfig", {**LINEAR, "r": 4}),
    "road": ("RoadConfig", {**LINEAR, "group_size": 8}),
    "shira": ("ShiraConfig", {**LINEAR, "r": 4}),
    "trainable tokens": ("TrainableTokensConfig", {"target_modules": ["embed"], "token_indices": [1, 4]}),
    "vblora": ("VBLoRAConfig", {**LINEAR, "num_vectors": 8, "vector_length": 4, "topk": 2}),
    "vera": ("VeraConfig", {**LINEAR, "r": 4}),
    "wavelet": ("WaveFTConfig", {**LINEAR, "n_frequency": 16}),
}


def adapted(name: str) -> Any:
    import peft

    kind, options = TUNERS[name]
    torch.manual_seed(0)
    base = Base()
    torch.manual_seed(1)
    model = peft.get_peft_model(base, getattr(peft, kind)(**options))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # adapters begin as nothing: let them be something
        for param in model.parameters():
            if param.requires_grad and param.is_floating_point() and not bool(param.any()):
                param.normal_(0.0, 0.05, generator=generator)
    return model


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    ids = torch.randint(0, VOCAB, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))
    return F.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())


def trains(
    rank: int, world: int, name: str, config: dict[str, Any], folder: str, everything: bool = False, mixed: str = "no"
) -> None:
    warnings.simplefilter("ignore")
    model, plain = adapted(name), adapted(name)
    optimizers = [
        torch.optim.AdamW([p for p in each.parameters() if everything or p.requires_grad], lr=1e-2)
        for each in (model, plain)
    ]
    engine = zero.shard(model, optimizers[0], zero.ZeroConfig(**config), mixed_precision=mixed)
    for step in range(6):
        loss = loss_of(model, rank, step)
        if rank == step % world:
            assert len([*model.named_modules()]) == len([*plain.named_modules()]), "listed on one rank alone"
        loss.backward()
        for peer in range(world):
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed == "bf16"):
                whole = loss_of(plain, peer, step)
            (whole / world).backward()
            if peer == rank:
                torch.testing.assert_close(loss.detach(), whole.detach(), rtol=0, atol=2e-5 if mixed == "no" else 5e-2)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    atol = 5e-5 if mixed == "no" else 5e-2
    state = model.state_dict()
    expected = plain.state_dict()
    assert list(state) == list(expected)
    if rank == 0:
        for key, value in expected.items():
            torch.testing.assert_close(state[key], value, rtol=0, atol=atol, msg=lambda text, key=key: f"{key}: {text}")
    engine.save(folder)
    if name == "shira":
        with pytest.raises(zero.CheckpointError, match="has no way to load it back"):
            engine.load(folder)
    else:
        loss_of(model, rank, 7).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        engine.load(folder)
    engine.detach()
    loss = loss_of(model, rank, 8)
    torch.testing.assert_close(loss, loss_of(plain, rank, 8), rtol=0, atol=10 * atol)


@pytest.mark.parametrize(("name", "stage"), each_value(TUNERS, [1, 3]))
def test_tuners_train_as_data_parallel(two: RankPool, tmp_path: Path, name: str, stage: int) -> None:
    two.run(trains, name, {"stage": stage}, str(tmp_path / "saved"))


ATTENTION: dict[str, tuple[dict[str, Any], bool, str]] = {
    "plain": ({"stage": 0}, False, "no"),
    "stage 2": ({"stage": 2}, False, "no"),
    "bf16": ({"stage": 3}, False, "bf16"),
    "stage 2 in bf16": ({"stage": 2}, False, "bf16"),
    "frozen in the optimizer": ({"stage": 3}, True, "no"),
    "frozen in the optimizer, stage 1": ({"stage": 1}, True, "no"),
    "host": ({"stage": 3, "offload_params": "cpu", "offload_optimizer": "cpu"}, False, "no"),
    "disk": ({"stage": 3, "offload_params": "disk", "offload_optimizer": "disk"}, False, "no"),
}


@pytest.mark.parametrize("case", ATTENTION)
def test_adapters_of_attention_at_other_settings(two: RankPool, tmp_path: Path, case: str) -> None:
    config, everything, mixed = ATTENTION[case]
    two.run(trains, "lora, attention and more", config, str(tmp_path / "saved"), everything, mixed)


def replaces(rank: int, world: int, stage: int) -> None:
    """A frozen parameter that is replaced keeps its place; a trained one cannot be replaced: it would never be trained."""
    torch.manual_seed(0)
    model, plain = Base(), Base()
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        each.blocks[0].requires_grad_(False)
    optimizers = [torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1) for each in (model, plain)]
    zero.shard(model, optimizers[0], zero.ZeroConfig(stage=stage))
    for step in range(4):
        new = torch.randn(2 * WIDTH, WIDTH, generator=torch.Generator().manual_seed(step)) / 4
        for each in (model, plain):
            del each.blocks[0].up.weight
            each.blocks[0].up.weight = nn.Parameter(new.clone(), requires_grad=False)
        loss_of(model, rank, step).backward()
        for peer in range(world):
            (loss_of(plain, peer, step) / world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(zero.StateError, match=r"'head\.weight' was replaced by another parameter"):
        model.head.weight = nn.Parameter(torch.ones(VOCAB, WIDTH))
    torch.testing.assert_close(loss_of(model, 0, 9), loss_of(plain, 0, 9), rtol=0, atol=2e-5)
    model.blocks[1].norm.register_parameter("another", nn.Parameter(torch.zeros(3)))
    del model.blocks[1].norm.another
    state = model.state_dict()
    if rank == 0:
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=0, atol=2e-5, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_that_are_replaced(two: RankPool, stage: int) -> None:
    two.run(replaces, stage)


def kept_after_refusals(rank: int, world: int) -> None:
    """A second `zero.shard`, which is refused, leaves the first engine's parameters; a failed one leaves a plain model."""
    model = adapted("lora, attention")
    params = [p for p in model.parameters() if p.requires_grad]
    with pytest.raises(zero.ConfigError, match="units"):
        zero.shard(model, None, zero.ZeroConfig(stage=3, units="nothing"))
    assert not any("register_parameter" in vars(module) for module in model.modules())
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3))
    with pytest.raises(zero.ConfigError, match="is sharded already"):
        zero.shard(model, optimizer, zero.ZeroConfig(stage=3))
    for step in range(2):
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.detach()
    assert not any("register_parameter" in vars(module) for module in model.modules())
    loss_of(model, rank, 3).backward()


def test_parameters_are_kept_after_refusals(two: RankPool) -> None:
    two.run(kept_after_refusals)
