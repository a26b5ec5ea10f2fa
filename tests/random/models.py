"""Random models: a description that can be printed, made smaller and built."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCAB, TOKENS = 13, 4
WIDTHS = (6, 8, 11, 13)
"""11 and 13: nothing divides evenly."""
OUTPUTS = ("tensor", "tensor", "tuple", "dict", "data", "opaque")
CONTAINERS = ("list", "list", "sequential", "attributes", "nested")
FRONTS = ("embed", "linear", "both", "conv")


class Planned(Exception):
    """Raised inside a forward or a backward, and caught by the program."""


class Block(NamedTuple):
    piece: str
    out: str = "tensor"
    frozen: str = ""


@dataclass(frozen=True)
class Arch:
    """One model.

    Attributes:
        blocks: words `piece:out:frozen`, of which the last two may be left out.
        root: parameters of the root module: position, scale, empty.
    """

    blocks: str = "mlp mlp"
    width: int = 8
    container: str = "list"
    front: str = "embed"
    front_frozen: bool = False
    heads: int = 1
    tied: bool = False
    root: str = ""
    out: str = "tensor"

    @property
    def parsed(self) -> list[Block]:
        return [Block(*word.split(":")) for word in self.blocks.split()]

    @property
    def features(self) -> set[str]:
        """What `--kinds` can choose, besides calls."""
        found = {word for block in self.parsed for word in block} | {*self.root.split(), self.out}
        found |= {"heads"} if self.heads > 1 else set()
        found |= {"frozen"} if self.front_frozen else set()
        found |= {"tied"} if self.tied else set()
        return found - {"", "mlp", "tensor"}


def random_arch(rng: random.Random) -> Arch:
    def block() -> str:
        piece, out, frozen = rng.choice(PIECES), rng.choice(OUTPUTS), rng.random() < 0.15
        return f"{piece}:{out}" + ":frozen" * frozen

    return Arch(
        blocks=" ".join(block() for _ in range(rng.choice((2, 2, 3, 3, 4)))),
        width=rng.choice(WIDTHS),
        container=rng.choice(CONTAINERS),
        front=rng.choice(FRONTS),
        front_frozen=rng.random() < 0.15,
        heads=rng.choice((1, 1, 2, 3)),
        tied=rng.random() < 0.3,
        root=" ".join(name for name in ("position", "scale", "empty") if rng.random() < 0.25),
        out=rng.choice(OUTPUTS),
    )


def without(arch: Arch, off: frozenset[str]) -> Arch:
    """Return the model with these features replaced by the plainest."""

    def plain(block: Block) -> str:
        piece = "mlp" if block.piece in off else block.piece
        return f"{piece}:{'tensor' if block.out in off else block.out}" + ":frozen" * (block.frozen not in {"", *off})

    return replace(
        arch,
        blocks=" ".join(plain(block) for block in arch.parsed),
        front_frozen=arch.front_frozen and "frozen" not in off,
        heads=1 if "heads" in off else arch.heads,
        tied=arch.tied and "tied" not in off,
        root=" ".join(name for name in arch.root.split() if name not in off),
        out="tensor" if arch.out in off else arch.out,
    )


# Outputs ----------------------------------------------------------------------------------------------------------------


@dataclass
class Data:
    value: Tensor


class Opaque:
    """An output of a type that cannot be searched for tensors: no tuple, dict or dataclass."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


WRAP: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda value: value,
    "tuple": lambda value: (value, None),
    "dict": lambda value: {"value": value, "nothing": None},
    "data": Data,
    "opaque": Opaque,
}


def unwrap(output: Any) -> Tensor:
    if isinstance(output, (Tensor, tuple)):
        return output if isinstance(output, Tensor) else output[0]
    return output["value"] if isinstance(output, dict) else output.value


class Tape:
    """Keeps tensors from inside blocks, as hooks that record hidden states do."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []


# Pieces -----------------------------------------------------------------------------------------------------------------


class Piece(nn.Module):
    """Maps [batch, tokens, width] to the same shape, in some container."""

    out = "tensor"

    def inner(self, x: Tensor, route: int) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, route: int = 0, tape: Tape | None = None, fail: bool = False) -> Any:
        h = self.inner(x, route)
        if fail:
            raise Planned
        if tape is not None:
            tape.tensors.append(h)
        return WRAP[self.out](x + 0.5 * h)


class Mlp(Piece):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def inner(self, x: Tensor, route: int) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class Attention(Piece):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.attention = nn.MultiheadAttention(d, 2 if d % 2 == 0 else 1, batch_first=True)

    def inner(self, x: Tensor, route: int) -> Tensor:
        h = self.norm(x)
        return self.attention(h, h, h, need_weights=True)[0]  # its other kernel cannot be differentiated twice


class Sdpa(Piece):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d)

    def inner(self, x: Tensor, route: int) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        return self.proj(weights @ v)


class Conv(Piece):
    def __init__(self, d: int) -> None:
        super().__init__()
        # No bias: before a norm its gradient is rounding alone, which bf16 and RMSprop together make large.
        self.conv, self.norm = nn.Conv1d(d, d, 3, padding=1, bias=False), nn.BatchNorm1d(d)

    def inner(self, x: Tensor, route: int) -> Tensor:
        return torch.tanh(self.norm(self.conv(x.transpose(1, 2)))).transpose(1, 2)


class Recurrent(Piece):
    def __init__(self, d: int, cls: Any) -> None:
        super().__init__()
        self.rnn = cls(d, d, batch_first=True)

    def inner(self, x: Tensor, route: int) -> Tensor:
        return self.rnn(x)[0]


class ZeroDim(Piece):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.gate, self.one = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.full((1,), 0.3))
        self.lin = nn.Linear(d, d)

    def inner(self, x: Tensor, route: int) -> Tensor:
        return torch.tanh(self.lin(x) * self.gate) + self.one


class Empty(Piece):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, d))
        self.lin = nn.Linear(d, d)

    def inner(self, x: Tensor, route: int) -> Tensor:
        return torch.tanh(self.lin(x)) + self.none.sum()


class Sequence(Piece):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d, d + 3), nn.Tanh(), nn.Linear(d + 3, d, bias=False))

    def inner(self, x: Tensor, route: int) -> Tensor:
        return self.body(x)


class Nested(Piece):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp(d), Mlp(d)])
        self.norm = nn.LayerNorm(d)

    def inner(self, x: Tensor, route: int) -> Tensor:
        for layer in self.layers:
            x = unwrap(layer(x))
        return self.norm(x)


class InPlace(Piece):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, d), nn.Linear(d, d)

    def inner(self, x: Tensor, route: int) -> Tensor:
        return self.down(self.up(x).mul_(0.5).tanh_()).add_(0.1)


class Twice(Piece):
    """Calls a module twice in one forward, with a view between."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.lin = nn.Linear(d, d)

    def inner(self, x: Tensor, route: int) -> Tensor:
        return self.lin(torch.tanh(self.lin(x)).view(-1, x.shape[-1])).view_as(x)


class Reads(Piece):
    """Reads the weight of a module that it does not hold, with its own operation."""

    def __init__(self, d: int, other: nn.Linear) -> None:
        super().__init__()
        self.lin = nn.Linear(d, d)
        self.others = (other,)  # a tuple: not a submodule

    def inner(self, x: Tensor, route: int) -> Tensor:
        h = F.linear(self.lin(x), self.others[0].weight)
        return torch.tanh(h.sum(-1, keepdim=True)) + x * 0.1


class WeightNorm(Piece):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.lin = torch.nn.utils.parametrizations.weight_norm(nn.Linear(d, d))

    def inner(self, x: Tensor, route: int) -> Tensor:
        return torch.tanh(self.lin(x))


class Experts(Piece):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(d, d) for _ in range(3)])

    def inner(self, x: Tensor, route: int) -> Tensor:
        return torch.tanh(self.experts[route % 3](x))


class Counter(Piece):
    """Buffers: one counts forwards as an integer, one is not saved."""

    calls: Tensor
    decay: Tensor

    def __init__(self, d: int) -> None:
        super().__init__()
        self.lin = nn.Linear(d, d)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("decay", torch.full((d,), 0.9), persistent=False)

    def inner(self, x: Tensor, route: int) -> Tensor:
        if self.training:
            self.calls += 1
        return torch.tanh(self.lin(x)) * self.decay


class Dropout(Piece):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.lin, self.drop = nn.Linear(d, d), nn.Dropout(0.3)

    def inner(self, x: Tensor, route: int) -> Tensor:
        return self.drop(torch.tanh(self.lin(x)))


BUILD: dict[str, Callable[[int], Piece]] = {
    "mlp": Mlp, "attention": Attention, "sdpa": Sdpa, "conv": Conv, "gru": lambda d: Recurrent(d, nn.GRU),
    "lstm": lambda d: Recurrent(d, nn.LSTM), "zerodim": ZeroDim, "empty": Empty, "sequential": Sequence, "nested": Nested,
    "inplace": InPlace, "twice": Twice, "shared": Mlp, "tied": Mlp, "reads": Mlp, "weightnorm": WeightNorm,
    "experts": Experts, "counter": Counter, "dropout": Dropout,
}  # fmt: skip
"""`shared`, `tied` and `reads` depend on earlier blocks: see `Net`."""
PIECES = ("mlp", "mlp", *BUILD)


class Net(nn.Module):
    """Front, blocks, heads, and parameters of the root module."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.arch, d = arch, arch.width
        self.embed = nn.Embedding(VOCAB, d) if arch.front in ("embed", "both") else None
        self.proj = nn.Linear(d, d) if arch.front in ("linear", "both") else None
        self.conv = nn.Conv1d(d, d, 3, padding=1) if arch.front == "conv" else None
        if "position" in arch.root:
            self.position = nn.Parameter(torch.randn(TOKENS, d) * 0.1)
        if "empty" in arch.root:
            self.none = nn.Parameter(torch.zeros(0, 3))
        made: list[Piece] = []
        for block in arch.parsed:
            made.append(self._piece(block, made, d))
        half = len(made) // 2
        match arch.container:
            case "attributes":
                for i, piece in enumerate(made):
                    setattr(self, f"block{i}", piece)
            case "sequential":
                self.blocks = nn.Sequential(*made)
            case "nested":
                self.stages = nn.ModuleList([nn.ModuleList(made[:half]), nn.ModuleList(made[half:])])
            case _:
                self.blocks = nn.ModuleList(made)
        self.heads = nn.ModuleList([nn.Linear(d, VOCAB if i == 0 else 5 + i, bias=i > 0) for i in range(arch.heads)])
        if arch.tied and self.embed is not None:
            self.heads[0].weight = self.embed.weight
        if "scale" in arch.root:
            self.scale = nn.Parameter(torch.tensor(1.1))
        fronts = [front for front in (self.embed, self.proj, self.conv) if front is not None and arch.front_frozen]
        for module in [piece for piece, block in zip(made, arch.parsed) if block.frozen] + fronts:
            module.requires_grad_(False)

    def _piece(self, block: Block, made: list[Piece], d: int) -> Piece:
        if block.piece == "shared" and made:
            return made[0]
        linears = [m for piece in made for m in piece.modules() if type(m) is nn.Linear and m.in_features == d]
        linears = [m for m in linears if "weight" in m._parameters]
        piece = Reads(d, linears[0]) if block.piece == "reads" and linears else BUILD[block.piece](d)
        if block.piece == "tied":
            for other in made:
                if isinstance(other, Mlp):
                    piece.up.weight = other.up.weight
        piece.out = block.out
        return piece

    def pieces(self) -> list[Piece]:
        match self.arch.container:
            case "attributes":
                return [getattr(self, f"block{i}") for i in range(len(self.arch.parsed))]
            case "nested":
                return [piece for stage in self.stages for piece in stage]
        return list(self.blocks)

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        head: int = 0,
        route: int = 0,
        skip: int = -1,
        tape: Tape | None = None,
        fail: int = -1,
        recompute: bool | None = None,
    ) -> Any:
        h = x if self.proj is None else self.proj(x)
        if self.embed is not None:
            h = h + self.embed(ids)
        if self.conv is not None:
            h = self.conv(h.transpose(1, 2)).transpose(1, 2)
        if "position" in self.arch.root:
            h = h + self.position
        for i, piece in enumerate(self.pieces()):
            if i == skip:
                continue

            def run(t: Tensor, piece: Piece = piece, i: int = i) -> Tensor:
                return unwrap(piece(t, route, tape=tape, fail=i == fail))

            h = run(h) if recompute is None else checkpoint(run, h, use_reentrant=recompute)
        out = self.heads[head % len(self.heads)](torch.tanh(h))
        if "empty" in self.arch.root:
            out = out + self.none.sum()
        if "scale" in self.arch.root:
            out = out * self.scale
        return WRAP[self.arch.out](out)
