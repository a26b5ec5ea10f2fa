"""What stays in float32 in mixed precision, what is reported of it, and how gradients add up."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import hf_zero as zero
from tests.kit.pool import on_ranks
from tests.models import LanguageModel, ids, sgd, t5, token_loss
from tests.programs.precision import Attending, mixtral

pytestmark = pytest.mark.gloo

ROWS = ids(0, 0)


class Gate(nn.Linear):
    """A router that computes in float32 whatever is on around it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.float(), self.weight.float())


class Routed(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList([Gate(16, 4, bias=False) for _ in range(2)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body(tokens)
        for gate in self.gates:
            x = x * gate(x).softmax(-1).amax(-1, keepdim=True)
        return self.heads[0](x)


def seen_types(model: nn.Module, names: set[str], forward: Any) -> dict[str, torch.dtype]:
    """The types of parameters while their modules' forwards run."""
    found, handles = {}, []
    for name in names:
        owner, _, key = name.rpartition(".")

        def hook(module: nn.Module, *_: Any, name: str = name, key: str = key) -> None:
            found[name] = getattr(module, key).dtype

        handles.append(model.get_submodule(owner).register_forward_pre_hook(hook))
    forward(model)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks()
def test_weights_that_the_model_uses_in_float32(rank: int, world: int, stage: int) -> None:
    torch.manual_seed(0)
    plain = Routed()
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(ROWS)

    def found(**settings: Any) -> tuple[Tensor, nn.Module]:
        torch.manual_seed(0)
        model = Routed()
        zero.shard(model, None, zero.ZeroConfig(stage=stage, **settings), mixed_precision="bf16")
        return model(ROWS), model

    assert not torch.equal(found()[0], expected)
    for patterns in ("gates.*", ("*gates.0*", "gates.1.weight")):
        output, model = found(full_precision=patterns)
        assert torch.equal(output, expected)
        types = seen_types(model, {"gates.0.weight", "heads.0.weight"}, lambda m: m(ROWS))
        assert types == {"gates.0.weight": torch.float32, "heads.0.weight": torch.bfloat16}
    with pytest.raises(zero.ConfigError, match=r"no parameter is called '\*.router.\*'"):
        found(full_precision="*.router.*")


@on_ranks()
def test_what_a_class_keeps_in_float32(rank: int, world: int) -> None:
    """transformers' own lists: T5's `wo` for fp16 alone, strict ones for bf16 too."""
    query, wo, wi = (
        f"encoder.block.0.layer.{name}.weight"
        for name in ("0.SelfAttention.q", "1.DenseReluDense.wo", "1.DenseReluDense.wi")
    )

    def computed(model: nn.Module, mixed: str) -> dict[str, torch.dtype]:
        zero.shard(model, None, zero.ZeroConfig(stage=2), mixed_precision=mixed)
        return seen_types(model, {query, wo, wi}, lambda m: m(input_ids=ROWS, labels=ROWS))

    assert computed(t5(), "fp16") == {query: torch.float16, wo: torch.float32, wi: torch.float16}
    assert set(computed(t5(), "bf16").values()) == {torch.bfloat16}
    model = t5()
    model._keep_in_fp32_modules_strict = {"layer.0.SelfAttention.q"}
    assert computed(model, "bf16") == {query: torch.float32, wo: torch.bfloat16, wi: torch.bfloat16}


PACKED = {"packed.in_proj_weight", "apart.q_proj_weight", "apart.k_proj_weight", "apart.v_proj_weight"}
EXPERTS = {f"model.layers.{n}.mlp.experts.{name}" for n in (0, 1) for name in ("gate_up_proj", "down_proj")}


@on_ranks()
def test_matrices_of_attention_and_experts(rank: int, world: int) -> None:
    """Matrices of attention and of experts are computed with in bf16 where their kernels do so; one unit stays for backward."""
    for build, names, expected in (
        (Attending, PACKED, torch.bfloat16),
        (lambda: mixtral("eager"), EXPERTS, torch.bfloat16),
        (lambda: mixtral("grouped_mm"), EXPERTS, torch.float32),
    ):
        model = build()
        zero.shard(model, None, zero.ZeroConfig(stage=1), mixed_precision="bf16")
        types = seen_types(model, names, lambda m: m(ROWS))
        assert types == dict.fromkeys(names, expected), types
        model = build()
        engine = zero.shard(model, None, zero.ZeroConfig(stage=3), mixed_precision="bf16")
        output = model(ROWS)
        report = engine.report()
        held = sum(row.measured for row in report.tiers if row.kind == "gathered")
        assert held <= max(unit.gathered_bytes for unit in engine.layout.units)
        del output


# How gradients add up -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks()
def test_micro_steps_add_up_in_float32(rank: int, world: int, stage: int) -> None:
    """Many micro-steps cost no more precision than one reduce in the type that was asked for."""
    micros = 24
    for stored, reduced in ((s, r) for s in ("float32", "bfloat16") for r in ("float32", "bfloat16")):
        torch.manual_seed(0)
        plain = LanguageModel().to(getattr(torch, stored))
        model = copy.deepcopy(plain)
        mixed = "bf16" if stored == "float32" else "no"
        config = zero.ZeroConfig(stage=stage, reduce_dtype=reduced)
        engine = zero.shard(model, sgd(model), config, mixed_precision=mixed)
        with engine.no_sync():
            for _ in range(micros - 1):
                token_loss(model(ROWS), ROWS).backward()
        token_loss(model(ROWS), ROWS).backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed == "bf16"):
            token_loss(plain(ROWS), ROWS).backward()  # the same every time
        allowed = {"float32": 1e-6, "bfloat16": 2.0**-8}[reduced]
        for name, param in model.named_parameters():
            exact = micros * plain.get_parameter(name).grad.double()
            error = (zero.full_gradient(param).double() - exact).abs().max() / exact.abs().max()
            assert error <= 1.01 * allowed + 1e-6, (stored, reduced, name, error.item())


transformers.logging.set_verbosity_error()
