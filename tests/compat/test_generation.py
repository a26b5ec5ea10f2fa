"""`generate` where ranks generate sequences of different lengths."""

from __future__ import annotations

import pytest
import torch

from hf_zero import ZeroConfig, shard
from tests.kit.pool import RankPool
from tests.models import gpt2, ids

pytestmark = pytest.mark.gloo


def generated(rank: int, world: int, stage: int) -> None:
    torch.manual_seed(0)
    plain = gpt2()
    torch.manual_seed(0)
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = shard(model, optimizer, ZeroConfig(stage=stage, stall_s=20))
    prompt = ids(rank, 0)
    options = {"max_new_tokens": 3 + 5 * rank, "do_sample": False, "pad_token_id": 0}
    for step in range(2):
        assert torch.equal(model.generate(prompt, **options), plain.generate(prompt, **options))
        tokens = ids(0, step)  # the same on all ranks: the plain model trains alike
        for each, steps in ((model, optimizer), (plain, torch.optim.SGD(plain.parameters(), lr=0.1))):
            each(input_ids=tokens, labels=tokens).loss.backward()
            steps.step()
            steps.zero_grad()
    if rank == 0 and stage < 3:  # full parameters are everywhere: one rank generates alone
        assert torch.equal(model.generate(prompt, **options), plain.generate(prompt, **options))
    engine.detach()
    assert "generate" not in model.__dict__


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_generate_other_lengths(two: RankPool, stage: int) -> None:
    two.run(generated, stage)
