"""PEFT's tuners, also those that register parameters again in every forward."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hf_zero as zero
from tests.models import gpt2
from tests.oracle import Run, program

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
MERGED = ("dora", "ia3", "lora", "rslora", "trainable_tokens")
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
    "lora_of_attention": ("LoraConfig", {"target_modules": ["attn"], "r": 4}),
    "lora_of_attention_and_more": ("LoraConfig", {"target_modules": ["attn", "up", "embed"], "r": 4}),
    "lora_with_biases": ("LoraConfig", {**LINEAR, "r": 4, "bias": "all"}),
    "lora_of_parameters": ("LoraConfig", {"target_modules": [], "target_parameters": ["up.weight"], "r": 4}),
    "miss": ("MissConfig", {**LINEAR, "r": 4}),
    "oft": ("OFTConfig", {**LINEAR, "oft_block_size": 4, "r": 0}),
    "randlora": ("RandLoraConfig", {**LINEAR, "r": 4}),
    "rslora": ("LoraConfig", {**LINEAR, "r": 4, "use_rslora": True}),
    "road": ("RoadConfig", {**LINEAR, "group_size": 8}),
    "shira": ("ShiraConfig", {**LINEAR, "r": 4}),
    "trainable_tokens": ("TrainableTokensConfig", {"target_modules": ["embed"], "token_indices": [1, 4]}),
    "vblora": ("VBLoRAConfig", {**LINEAR, "num_vectors": 8, "vector_length": 4, "topk": 2}),
    "vera": ("VeraConfig", {**LINEAR, "r": 4}),
    "wavelet": ("WaveFTConfig", {**LINEAR, "n_frequency": 16}),
}


def adapted(name: str, dtype: torch.dtype = torch.float32) -> Any:
    import peft

    kind, options = TUNERS[name]
    base = Base().to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, getattr(peft, kind)(**options))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # adapters begin as nothing: let them be something
        for param in model.parameters():
            if param.requires_grad and param.is_floating_point() and not bool(param.any()):
                param.normal_(0.0, 0.05, generator=generator)
    return model


def _tuned(run: Run, name: str, everything: bool = False, dtype: torch.dtype = torch.float32) -> None:
    """Trained, saved, trained on, loaded, and given back.

    Args:
        everything: the optimizer has the frozen parameters, too.
    """
    model = run.build(lambda: adapted(name, dtype))
    params = [param for param in model.parameters() if everything or param.requires_grad]
    bare, model = model, run.shard(model, torch.optim.AdamW(params, lr=1e-2, eps=1e-3))
    for step in range(6):
        rows = run.ids(step) % VOCAB
        loss = F.cross_entropy(model(rows).flatten(0, 1), rows.flatten())
        run.see(loss, "loss")
        if run.rank == step % run.world:
            run.see(len([*bare.named_modules()]), "modules, listed on one rank")
        loss.backward()
        run.update()
        if step == 3:
            run.save(model)
        if step == 4 and name == "shira":
            run.refuses(zero.CheckpointError, "has no way to load it back", lambda: run.load(model))
        elif step == 4:
            run.load(model)
    if name in MERGED and dtype is torch.float32:
        bare.merge_adapter()
        bare.unmerge_adapter()
        rows = run.ids(9) % VOCAB
        with torch.no_grad():
            run.see(model(rows), "what an adapted model computes")
            bare = bare.merge_and_unload()
            run.see(bare(rows), "what a merged one does")
        run.see(type(bare).__name__, "its class")
        see_merged(run, bare)


def see_merged(run: Run, model: nn.Module) -> None:
    """Rank 0 has the values of a sharded model's state dict."""
    state = model.state_dict()
    if run.rank == 0:
        for name, value in state.items():
            run.see(value, f"merged {name}")


FACTORS: dict[str, Any] = {"deferred": (False,), "precision": ("fp32",)}
BF16: dict[str, Any] = {"deferred": (False,), "precision": ("bf16",)}
for _name in TUNERS:
    program(partial(_tuned, name=_name), name=_name, reference="average", only=FACTORS)


@program(reference="average", only=BF16)
def lora_of_attention_in_bf16(run: Run) -> None:
    """The adapter is added to the frozen weight and taken out again in bfloat16: the weight is rounded, and not compared."""
    _tuned(run, "lora_of_attention_and_more")
    for param in run.model.parameters():
        if not param.requires_grad:
            param.data = torch.zeros_like(param)


program(
    partial(_tuned, name="lora_of_attention_and_more", everything=True),
    name="frozen_in_the_optimizer",
    reference="average",
    only=FACTORS,
)


def _prompted(run: Run, kind: str) -> None:
    """Virtual tokens before those of a model of transformers, which makes keys and values of them in each block."""
    import peft

    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = run.build(lambda: peft.get_peft_model(gpt2(use_cache=True), config))
    model = run.shard(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3))
    run.loop(lambda step: model(input_ids=run.ids(step), labels=run.ids(step)).loss, 3)
    run.save(model)
    run.loop(lambda step: model(input_ids=run.ids(step), labels=run.ids(step)).loss, 1)
    run.load(model)


program(partial(_prompted, kind="PromptTuningConfig"), name="prompt", reference="average", only=FACTORS)
program(partial(_prompted, kind="PrefixTuningConfig"), name="prefix", reference="average", only=FACTORS)


@program(reference="average", only={"deferred": (False,)})
def float32_adapters_on_a_bfloat16_base(run: Run) -> None:
    """As PEFT makes them."""
    _tuned(run, "rslora", dtype=torch.bfloat16)


@program(reference="average", only={**FACTORS, "stage": (3,), "tier": ("none",)})
def refused_twice(run: Run) -> None:
    """A refused call of `zero.shard` leaves a plain model; a refused second one leaves the first engine's parameters."""
    model = run.build(lambda: adapted("lora_of_attention"))
    run.refuses(zero.ConfigError, "units", lambda: zero.shard(model, None, zero.ZeroConfig(units="nothing")))
    run.see(any("register_parameter" in vars(module) for module in model.modules()), "whether modules are changed")
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2, eps=1e-3)
    model = run.shard(model, optimizer)
    run.refuses(zero.ConfigError, "is sharded already", lambda: zero.shard(model, optimizer))
    run.loop(lambda step: model(run.ids(step) % VOCAB).square().mean(), 2)
