"""The models that programs train: small, and each with something of its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 61
WIDTH = 16


def mlp(width: int = WIDTH, depth: int = 3) -> nn.Sequential:
    """Linear and tanh in turn; shapes that no number of ranks divides once `width` is odd."""
    return nn.Sequential(*[module for _ in range(depth) for module in (nn.Linear(width, width), nn.Tanh())])


class Block(nn.Module):
    """A residual block with a norm and two layers. `seen`: an activation from inside, for auxiliary losses."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        self.seen = hidden
        return x + self.down(hidden)


class Body(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class LanguageModel(nn.Module):
    """Embedding, residual blocks, one or several heads.

    Args:
        tied: the first head's weight is the embedding's.
        root: a parameter of the root module itself.
        fused: the head is applied by `F.linear`, its module is not called.
        heads: `forward(ids, head=n)` chooses one.
    """

    def __init__(
        self, *, tied: bool = False, root: bool = False, fused: bool = False, heads: int = 1, depth: int = 3
    ) -> None:
        super().__init__()
        self.body = Body(depth)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, VOCAB, bias=not tied) for _ in range(heads))
        if tied:
            self.heads[0].weight = self.body.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.0)) if root else None
        self.fused = fused

    def forward(self, ids: Tensor, head: int = 0) -> Tensor:
        hidden = self.body(ids)
        one = self.heads[head]
        logits = F.linear(hidden, one.weight, one.bias) if self.fused else one(hidden)
        return logits if self.scale is None else logits * self.scale


class Gated(nn.Module):
    """Shapes (), (1,) and (1, 1) beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(torch.tensor([2.0]))
        self.lone = nn.Parameter(torch.tensor([[0.3]]))
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.line(x) * self.one + self.lone


class Mixed(nn.Module):
    """Matrices, vectors and single numbers; a tied embedding."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Gated() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Convolutions(nn.Module):
    """Batch norm: buffers that training changes, one of them an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3 if n == 0 else 8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
            for n in range(2)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        for block in self.blocks:
            images = block(images)
        return self.head(images.mean((-1, -2)))


class Odd(nn.Module):
    """Odd sizes, so that ranks own parts of parameters; a 0-dim parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, 33), nn.LayerNorm(33), nn.Linear(33, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x))) * self.scale


class Experts(nn.Module):
    """A mixture of experts: each token goes to one, some experts get none."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, count, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x))
        weights = self.gate(x).softmax(-1)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        chosen = F.one_hot(weights.argmax(-1), weights.shape[-1]).to(x.dtype)
        return x + (outputs * (weights * chosen).unsqueeze(-2)).sum(-1)


def gpt2(**changes: Any) -> nn.Module:
    """GPT-2 with tied embedding and head."""
    import transformers

    options = {
        "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": VOCAB, "n_positions": 16, "bos_token_id": 0,
        "eos_token_id": 0, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "use_cache": False,
    }  # fmt: skip
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**options, **changes}))


def bert(**changes: Any) -> nn.Module:
    """BERT for masked language modelling, its first layer frozen."""
    import transformers

    options = {
        "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48,
        "vocab_size": VOCAB, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    model = transformers.BertForMaskedLM(transformers.BertConfig(**{**options, **changes}))
    model.bert.encoder.layer[0].requires_grad_(False)
    return model


def t5(**changes: Any) -> nn.Module:
    """An encoder and a decoder that share an embedding."""
    import transformers

    options = {
        "num_layers": 2, "num_decoder_layers": 2, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_heads": 2,
        "vocab_size": VOCAB, "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
        "use_cache": False,
    }  # fmt: skip
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**{**options, **changes}))


def llama(**changes: Any) -> nn.Module:
    """Grouped key-value heads, an untied head."""
    import transformers

    options = {
        "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "vocab_size": VOCAB, "max_position_embeddings": 32, "use_cache": False,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**options, **changes}))


# Data, other rows on each rank and in each step -------------------------------------------------------------------------


def generator(*key: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(part * 1009**at for at, part in enumerate(key)))


def inputs(rank: int, step: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (4, WIDTH)), generator=generator(rank, step))


def ids(rank: int, step: int, rows: int = 2, length: int = 6) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=generator(rank, step))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    """SGD with momentum: unlike Adam's, its steps show a gradient that is off by a factor."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.1, eps=1e-3)
