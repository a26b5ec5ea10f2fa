"""`sp_size` with everything else that a run may use: each row equals one process with whole sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero as zero
from tests.kit.pool import RankPool
from tests.sequence.models import batch, llama, whole
from tests.sequence.test_parity import error, made

pytestmark = pytest.mark.gloo
ROWS: dict[str, dict[str, Any]] = {
    "bf16": {"stage": 3, "mixed_precision": "bf16"},
    "Muon": {"stage": 2, "optimizer": "Muon"},
    "offload to the host": {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
    "offload to disk": {"stage": 3, "offload_optimizer": "disk", "offload_params": "disk"},
    "activations and loss": {"stage": 3, "offload_activations": "disk", "chunked_loss": True},
    "replicas": {"stage": 3, "replicas": 2},
    "wire": {"stage": 1, "reduce_dtype": "bfloat16"},
    "compiled blocks": {"stage": 3, "compiled": True},
    "compiled blocks, checkpointed": {"stage": 3, "compiled": True, "offload_activations": "cpu"},
}


def run(rank: int, world: int, folder: str, compiled: bool) -> dict[str, float]:
    found = {}
    reference = made(llama)
    loss, gradients = whole(reference, [batch(group) for group in range(world // 2)], True)
    for name, row in ROWS.items():
        if ("compiled" in row) != compiled:
            continue
        settings = dict(row)
        precision = settings.pop("mixed_precision", "no")
        model: Any = made(llama)
        if "offload_activations" in settings:
            model.gradient_checkpointing_enable()
        settings.pop("compiled", None)
        kind = settings.pop("optimizer", "SGD")
        matrices = [p for p in model.parameters() if p.dim() == 2] if kind == "Muon" else list(model.parameters())
        optimizer = getattr(torch.optim, kind)(matrices, lr=0.1)
        config = zero.ZeroConfig(sp_size=2, stall_s=30, offload_dir=folder, **settings)
        engine = zero.shard(model, optimizer, config, mixed_precision=precision)
        for block in model.model.layers if compiled else ():
            block.compile(backend="aot_eager")
        local = engine.local_sequence(batch(rank // 2))
        assert int(local["num_items_in_batch"]) > 0
        out = model(**local)
        out.loss.backward()
        seen = {each: gradients[each] for each, p in model.named_parameters() if kind != "Muon" or p.dim() == 2}
        found[name] = error(model, out.loss.detach().float(), loss, seen)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.isfinite(model(**engine.local_sequence(batch(rank // 2, 1))).loss), name
        engine.detach()
    return found


@pytest.mark.parametrize(("world", "compiled"), [(2, False), (4, False), (2, True)])
def test_each_row(pools: dict[int, RankPool], tmp_path: Path, world: int, compiled: bool) -> None:
    for found in pools[world].run(run, str(tmp_path), compiled, timeout_s=300):
        limits = {"bf16": 0.05, "wire": 0.01}
        assert {name: value for name, value in found.items() if value > limits.get(name, 2e-6)} == {}
