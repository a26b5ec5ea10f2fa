"""Unusual modules: recurrent, parametrized, sparse, complex, empty; parameters that are views of one tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

import hf_zero as zero
from tests.models import adamw, generator, mlp, sgd
from tests.oracle import Refused, Run, program
from tests.programs.usual import FP32, Build, Optimize, trained_on


class LayersLeftOut(nn.Module):
    """Lists with None where a layer is optional, as x-transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([None if n else nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 16), nn.Tanh()), None])
            for n in range(3)
        )
        self.heads = nn.ModuleDict({"one": nn.Linear(16, 4), "other": None})

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer, _ in self.layers:
            x = x + layer(x if norm is None else norm(x))
        return self.heads["one"](x)


class TransposedTie(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 8, bias=False)
        self.b = mlp(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.b(self.a(x)), self.a.weight.t())


class Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m = mlp()
        self.m[0].double()

    def forward(self, x: Tensor) -> Tensor:
        return self.m[1:](self.m[0](x.double()).float())


class KeepsInContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.w = w
        ctx.x = x
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        return g @ ctx.w, g.t() @ ctx.x


class CustomFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(KeepsInContext.apply(x, part.weight))
        return x


def with_views_of_one_tensor() -> nn.Module:
    base = torch.randn(2, 16, 16) * 0.1
    model = mlp()
    model[0].weight = nn.Parameter(base[0])
    model[2].weight = nn.Parameter(base[1])
    return model


def pruned() -> nn.Module:
    model = mlp()
    torch.manual_seed(1)
    prune.l1_unstructured(model[0], "weight", 0.5)
    return model


def between(first: nn.Module, last: nn.Module) -> nn.Module:
    return nn.Sequential(first, nn.Tanh(), last)


def _plainly(name: str, build: Build, optimizer: Optimize = sgd, **options: Any) -> None:
    """The usual loop over this model."""

    def run_it(run: Run) -> None:
        run.trained_model(build, optimizer)
        run.loop()

    program(run_it, name=name, **{"reference": "average", **options})


_plainly("layers_left_out", LayersLeftOut, adamw)
_plainly("transposed_tie", TransposedTie, adamw)
_plainly("mixed_dtypes", Doubles, adamw)
_plainly("custom_function_keeps_weight_in_context", CustomFunctions, only=FP32)
_plainly("views_of_one_tensor", with_views_of_one_tensor)
_plainly("share_memory", lambda: mlp().share_memory())
_plainly("pruned", pruned)
_plainly("weight_norm", lambda: between(*(parametrizations.weight_norm(nn.Linear(16, 16)) for _ in range(2))))
_plainly("weight_norm_old", lambda: between(*(nn.utils.weight_norm(nn.Linear(16, 16)) for _ in range(2))))
_plainly("orthogonal", lambda: between(parametrizations.orthogonal(nn.Linear(16, 16)), nn.Linear(16, 4)))
_plainly(
    "scripted_part",
    lambda: between(torch.jit.script(nn.Linear(16, 16)), nn.Linear(16, 16)),
    refused=(Refused(zero.ConfigError, "is a RecursiveScriptModule of torch.jit"),),
)


@trained_on(
    lambda: nn.ModuleDict({"r": nn.LSTM(8, 16, 2, batch_first=True, bidirectional=True), "h": nn.Linear(32, 3)}),
    adamw,
    only=FP32,  # torch has a bf16 kernel for some CPUs only
)
def lstm(run: Run, t: int) -> Tensor:
    return run.model.h(run.model.r(run.inputs(t, 2, 5, 8))[0]).square().mean()


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.LSTMCell(8, 16)
        self.h = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = None
        for _ in range(4):
            h = self.c(x, h)
            x = self.h(h[0])
        return x


@trained_on(Cells, adamw)
def lstm_cell(run: Run, t: int) -> Tensor:
    return run.model(run.inputs(t, 3, 8)).square().mean()


@trained_on(lambda: between(*(parametrizations.spectral_norm(nn.Linear(16, 16)) for _ in range(2))))
def spectral(run: Run, t: int) -> Tensor:
    return run.model(torch.ones(4, 16)).square().mean()


@trained_on(lambda: between(nn.utils.spectral_norm(nn.Linear(16, 16)), nn.Linear(16, 16)))
def spectral_old(run: Run, t: int) -> Tensor:
    return run.model(torch.ones(4, 16)).square().mean()


def bags(run: Run, step: int) -> Tensor:
    return torch.randint(0, 20, (4, 5), generator=generator(run.rank, step))


@trained_on(lambda: nn.Sequential(nn.EmbeddingBag(20, 16), nn.Linear(16, 4)), adamw)
def embedding_bag(run: Run, t: int) -> Tensor:
    return run.model(bags(run, t)).square().mean()


@trained_on(lambda: nn.Sequential(nn.Embedding(20, 16, sparse=True), nn.Linear(16, 4)), sgd)
def embedding_sparse(run: Run, t: int) -> Tensor:
    return run.model(bags(run, t)).square().mean()


@trained_on(lambda: nn.Sequential(nn.Embedding(20, 16, max_norm=1.0), nn.Linear(16, 4)), sgd)
def embedding_maxnorm(run: Run, t: int) -> Tensor:
    return run.model(torch.arange(20)).square().mean()


class ScaledEmbedding(nn.Module):
    """An embedding whose own `forward` multiplies its weight, from step `since` on: its backward needs the values then."""

    def __init__(self, since: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.embed, self.head, self.since, self.step = nn.Embedding(20, 16), mlp(), since, 0
        plain = self.embed.forward

        def scaled(ids: Tensor) -> Tensor:
            return plain(ids) if self.step < self.since else F.embedding(ids, self.embed.weight * self.scale)

        self.embed.forward = scaled

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


@trained_on(lambda: ScaledEmbedding(0), steps=8)
def embedding_scaled(run: Run, t: int) -> Tensor:
    return run.model(bags(run, t)).square().mean()


@trained_on(lambda: ScaledEmbedding(6), steps=8)
def embedding_scaled_late(run: Run, t: int) -> Tensor:
    run.model.step = t
    return run.model(bags(run, t)).square().mean()


@trained_on(lambda: ScaledEmbedding(6), steps=8, tells=lambda row: row.stage == 3)
def embedding_scaled_on_one_rank(run: Run, t: int) -> Tensor:
    run.model.step = t * run.rank
    return run.model(bags(run, t)).square().mean()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8, dtype=torch.cfloat) * 0.1)
        self.parts = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.parts((x.to(torch.cfloat) @ self.w).abs())


@trained_on(Complex, adamw)
def complex_params(run: Run, t: int) -> Tensor:
    return run.model(run.inputs(t, 4, 8)).square().mean()


@program(reference="average")
def clipped_doubles(run: Run) -> None:
    """The norm has the gradients' digits."""
    model = run.build(lambda: mlp().double())
    run.shard(model, sgd(model))
    for step in range(3):
        model(run.inputs(step, 4, 16).double()).square().mean().backward()
        run.clip_grad_norm_(run.model, 1e-3)
        run.update()


@program(reference="average")
def sparse_tables_in_blocks(run: Run) -> None:
    """Sparse gradients come while another block's are on their way."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.table, self.last = nn.Linear(16, 16), nn.Embedding(20, 16, sparse=True), nn.Linear(16, 16)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return x + self.last(torch.tanh(self.first(x)) + self.table(ids))

    blocks = run.trained_model(
        lambda: nn.ModuleList(Block() for _ in range(4)), lambda m: torch.optim.SGD(m.parameters(), lr=0.1)
    )

    def loss(t: int) -> Tensor:
        x = run.inputs(t, 4, 5, 16)
        for block in blocks:
            x = block(x, bags(run, t))
        return x.square().mean()

    run.loop(loss)


@program(reference="average", only=FP32, more={"debug": (False, True)})
def sparse_matrices(run: Run) -> None:
    """Trained elements of a sparse matrix, which has no storage: the tensor of its elements has."""

    class Net(nn.Module):
        def __init__(self, layout: torch.layout) -> None:
            super().__init__()
            self.layout = layout
            self.weight = nn.Parameter(torch.randn(16))
            self.dense = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            if self.layout is torch.sparse_coo:
                places = torch.stack([torch.arange(16), torch.arange(16).roll(3)])
                matrix = torch.sparse_coo_tensor(places, self.weight, (16, 16))
            else:
                matrix = torch.sparse_csr_tensor(torch.arange(17), torch.arange(16).roll(3), self.weight, (16, 16))
            return self.dense((matrix @ x.T).T)

    model = nn.Sequential(Net(torch.sparse_coo), nn.Tanh(), Net(torch.sparse_csr), Net(torch.sparse_coo))
    run.shard(model, sgd(model))
    run.loop(run.loss)


@program(reference="average")
def parametrized_later(run: Run) -> None:
    """A parametrization comes and goes in mid-training; the parameter stays the same object."""

    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + x.T) / 2

        def right_inverse(self, x: Tensor) -> Tensor:
            return x

    model = run.mlp()
    run.step(0)
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    run.step(1)
    run.step(2)
    parametrize.remove_parametrizations(model[0], "weight")
    run.step(3)


@program(reference="average", only=FP32)
def parametrized_weights_assigned(run: Run) -> None:
    """torch gives the parameter other memory (`set_`). State dicts have the values at once; training continues with them."""
    model = run.trained_model(lambda: between(*(parametrizations.weight_norm(nn.Linear(16, 16)) for _ in range(2))))
    for step in range(2):
        model[2 * step].weight = torch.eye(16) / (2 + step)
        name = f"{2 * step}.parametrizations.weight.original1"
        run.see(run.trained[0].plain.state_dict()[name], "state dict")
        run.step(step)


@program(reference="average", only=FP32, more={"debug": (False, True)})
def padded_evaluations(run: Run) -> None:
    """torch's encoder takes a padded batch apart into nested tensors, where no gradient is asked for."""
    layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    run.shard(model, sgd(model))
    padding = torch.tensor([[False] * 4 + [True] * 2, [False] * 6])
    for t in range(2):
        model(run.inputs(t, 2, 6, 16), src_key_padding_mask=padding).square().mean().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            run.see(model(torch.ones(2, 6, 16), src_key_padding_mask=padding)[1].norm())
        model.train()


@program(reference="average")
def tbptt(run: Run) -> None:
    model = run.trained_model(lambda: nn.ModuleDict({"c": nn.GRUCell(8, 16), "o": nn.Linear(16, 2)}))
    h = torch.zeros(3, 16)
    for t in range(4):
        for k in range(3):
            h = model.c(run.inputs(t * 3 + k, 3, 8), h)
        model.o(h).square().mean().backward()
        h = h.detach()
        run.update()


class Slotted:
    """Holds a tensor where no search finds it."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class OpaqueBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.Tanh())

    def forward(self, x: Slotted) -> Slotted:
        return Slotted(x.value + self.inner(x.value))


@trained_on(lambda: nn.Sequential(*(OpaqueBlock() for _ in range(3))), tells=lambda row: row.stage == 3)
def opaque_outputs(run: Run, t: int) -> Tensor:
    loss: Tensor = run.model(Slotted(run.inputs(t))).value.square().mean()
    return loss
