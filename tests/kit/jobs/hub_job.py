"""Pushing from a sharded model to a Hub that listens on this machine's loopback: <out> <its URL> <its token>."""

from __future__ import annotations

import os
import sys
from functools import partial

os.environ.update(HF_ENDPOINT=sys.argv[2], HF_HUB_OFFLINE="0", HF_HUB_DISABLE_XET="1")

import torch  # noqa: E402
from harness import OUT, RANK, Tokens, arguments, check, fresh, gpt2, watch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import Trainer  # noqa: E402

import hf_zero as zero  # noqa: E402


def push(stage: int) -> None:
    fresh()
    args = arguments(
        OUT / f"run{stage}",
        None,
        parallelism_config=zero.ZeroPlugin(stage=stage, async_save=True),
        max_steps=4,
        save_steps=2,
        push_to_hub=True,
        hub_strategy="checkpoint",
        hub_always_push=True,
        hub_model_id=f"user/tiny{stage}",
        hub_token=sys.argv[3],
    )
    run = Trainer(gpt2(), args, train_dataset=Tokens(), callbacks=[zero.ZeroCallback(report=False)])
    run.train()
    run.push_to_hub(commit_message="the end")
    state = run.model.state_dict()
    if RANK == 0:
        save_file({name: value.clone() for name, value in state.items()}, OUT / f"final{stage}.safetensors")


if __name__ == "__main__":
    watch()
    for stage in range(4):
        check(f"push {stage}", partial(push, stage))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
