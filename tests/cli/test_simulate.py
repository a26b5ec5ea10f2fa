"""hf-zero simulate: what it records without other ranks is what real ranks send."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

import hf_zero as zero
from hf_zero.cli import main as cli
from hf_zero.cli.simulate import recorded_step
from hf_zero.comm.recorded import absent_ranks

CASES = [(1, "no", 1), (1, "bf16", 2), (2, "no", 2), (2, "bf16", 1), (3, "no", 1), (3, "bf16", 2)]


def recorded(rank: int, world: int) -> list[object]:
    """By case: (kind, bytes, unit, phase) of each collective, in order."""
    out: list[object] = []
    for stage, mixed_precision, accumulation in CASES:
        torch.manual_seed(0)
        config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=63, n_positions=8)
        model = transformers.GPT2LMHeadModel(config).train()
        ids = torch.zeros(1, 8, dtype=torch.long)

        def loss(model: torch.nn.Module = model, ids: torch.Tensor = ids) -> torch.Tensor:
            found: torch.Tensor = model(input_ids=ids, labels=ids).loss
            return found

        record, engine = recorded_step(model, loss, zero.ZeroConfig(stage=stage), mixed_precision, accumulation)
        assert world == 1 or record.operations
        out.append([(each.kind, each.bytes, each.unit, each.phase) for each in record.operations])
        engine.detach()
    return out


def without_ranks(rank: int, world: int, size: int) -> list[object]:
    with absent_ranks(size):
        return recorded(0, size)


@pytest.mark.gloo
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_order_and_bytes_are_those_of_real_ranks(pools, size):
    assert pools[1].run(without_ranks, size, timeout_s=250)[0] == pools[size].run(recorded, timeout_s=250)[0]


def test_table_and_json(capsys):
    arguments = ["simulate", "gpt2-tiny", "--world-size", "64", "--nodes", "8", "--zero-stage", "3", "--sequence", "8"]
    assert cli.main([*arguments, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert {"gather", "reduce"} <= set(values["by_kind"])
    assert values["total_s"] >= max(values["compute_s"], values["communication_s"]) > 0


def test_refusals_are_one_line(capsys):
    assert cli.main(["simulate", "gpt2-tiny", "--world-size", "10", "--nodes", "3"]) == 2
    assert "10 ranks do not divide by 3 nodes" in capsys.readouterr().err
