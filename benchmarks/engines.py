"""The engines that `compare.py` compares, each as one function from a model to a training step.

Every engine gets the same model, the same fused AdamW, the same clipping and the same micro-batches, and is driven by
its own public interface. FSDP2 is driven through `fully_shard` itself: accelerate turns it into plain DDP on CPU.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Step = Callable[[Sequence[Tensor]], Tensor]
"""One optimizer step over a list of micro-batches; returns their mean loss on this rank."""

LEARNING_RATE = 1e-3

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 512},
    "7m": {"n_layer": 6, "n_embd": 256, "n_head": 4, "vocab_size": 8192},
    "50m": {"n_layer": 8, "n_embd": 512, "n_head": 8},
    "124m": {"n_layer": 12, "n_embd": 768, "n_head": 12},
    "109m-blocks": {"n_layer": 8, "n_embd": 1024, "n_head": 16, "vocab_size": 8192},
    "350m": {"n_layer": 24, "n_embd": 1024, "n_head": 16},
}
"""GPT-2 shapes by the name that `--model-size` takes; other values are GPT-2's. In `109m-blocks` the blocks
are large, and the vocabulary is small."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Arguments of one launch."""

    engine: str
    measure: str
    """`time` (paired with DDP), `memory` (alone) or `calls` (alone, one process, the small Llama)."""
    model: str = "50m"
    dtype: str = "fp32"
    world_size: int = 2
    device: str = "cpu"
    blocks: int = 6
    steps: int = 5
    accumulation: int = 1
    clip: float = 1.0
    batch: int = 2
    sequence: int = 128

    @property
    def mixed(self) -> bool:
        return self.dtype == "bf16"


def build_model(size: str, sequence: int) -> nn.Module:
    """A causal language model from a configuration, equal on all ranks; no dropout, so that losses can be compared."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    config: Any
    if size == "calls":
        config = LlamaConfig(
            num_hidden_layers=12,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=128,
            tie_word_embeddings=False,
        )
    else:
        config = GPT2Config(
            **SIZES[size], n_positions=max(1024, sequence), resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        )
        config.bos_token_id = config.eos_token_id = 0
    config.use_cache = False
    torch.manual_seed(1234)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model.train()


def _adamw(job: Job, parameters: Any) -> torch.optim.AdamW:
    # Calls are counted with the optimizer's defaults, everything else with the fastest implementation.
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=None if job.measure == "calls" else True)


def _autocast(job: Job) -> AbstractContextManager[Any]:
    return torch.autocast(job.device, torch.bfloat16) if job.mixed else nullcontext()


def _loop(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
    clip: Callable[[float], Any] | None = None,
    autocast: bool = True,
) -> Step:
    """Return the usual PyTorch training step; engines replace parts of it."""

    def step(batches: Sequence[Tensor]) -> Tensor:
        losses = []
        for index, batch in enumerate(batches):
            with no_sync() if index + 1 < len(batches) else nullcontext():
                with _autocast(job) if autocast else nullcontext():
                    loss = model(input_ids=batch, labels=batch).loss
                (loss / len(batches) if len(batches) > 1 else loss).backward()
            losses.append(loss.detach())
        if job.clip:
            clip(job.clip) if clip is not None else nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        optimizer.step()
        optimizer.zero_grad()
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    return step


def _data_parallel(job: Job, model: nn.Module) -> nn.Module:
    if job.world_size == 1:
        return model  # one process has nothing to reduce: plain PyTorch is the baseline there
    device_ids = [torch.cuda.current_device()] if job.device == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=device_ids)


def _ddp(job: Job, model: nn.Module) -> Step:
    wrapped = _data_parallel(job, model)
    return _loop(job, wrapped, _adamw(job, wrapped.parameters()), no_sync=getattr(wrapped, "no_sync", nullcontext))


def _zero_redundancy(job: Job, model: nn.Module) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = _data_parallel(job, model)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True)
    return _loop(job, wrapped, optimizer, no_sync=getattr(wrapped, "no_sync", nullcontext))


def _hf_zero(stage: int, spare_memory: str | None = None, *, sockets: bool = False) -> Callable[[Job, nn.Module], Step]:
    """`spare_memory`: units stay gathered between forward and backward, and gradients of micro-batches on their rank.
    `sockets`: CPU ranks of one machine do not read each other's memory."""

    def build(job: Job, model: nn.Module) -> Step:
        import hf_zero as zero
        from hf_zero.comm.group_wire import P2PWire

        class Sockets(P2PWire):
            is_direct = False

        optimizer = _adamw(job, model.parameters())
        engine = zero.shard(
            model,
            optimizer,
            zero.ZeroConfig(stage=stage, keep_gathered=spare_memory),
            mixed_precision="bf16" if job.mixed else "no",
            **({"open_wire": Sockets} if sockets else {}),
        )
        no_sync = partial(engine.no_sync, defer=spare_memory is not None)
        return _loop(job, model, optimizer, no_sync=no_sync, clip=engine.clip_grad_norm_)

    return build


def _fsdp2(reshard: bool) -> Callable[[Job, nn.Module], Step]:
    def build(job: Job, model: nn.Module) -> Step:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        options: dict[str, Any] = {"mesh": init_device_mesh(job.device, (job.world_size,))}
        if job.mixed:  # what accelerate sets for mixed_precision="bf16"
            bf16 = torch.bfloat16
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16, output_dtype=bf16)
        blocks = set(model._no_split_modules or ())
        for module in model.modules():
            if type(module).__name__ in blocks:
                fully_shard(module, reshard_after_forward=reshard, **options)
        root: Any = fully_shard(
            model, reshard_after_forward=reshard, **options
        )  # said for the root too, as accelerate does

        class NoSync:
            def __enter__(self) -> None:
                root.set_requires_gradient_sync(False)

            def __exit__(self, *_: object) -> None:
                root.set_requires_gradient_sync(True)

        # Its own policy casts inputs and parameters, so autocast stays off.
        return _loop(job, model, _adamw(job, model.parameters()), no_sync=NoSync, autocast=False)

    return build


def _deepspeed(stage: int, strict: bool = False) -> Callable[[Job, nn.Module], Step]:
    def build(job: Job, model: nn.Module) -> Step:
        import deepspeed

        zero: dict[str, Any] = {"stage": stage}
        if strict:  # by default a model under 1e9 elements stays gathered, which is not stage 3
            zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
        config = {
            "train_micro_batch_size_per_gpu": job.batch,
            "gradient_accumulation_steps": job.accumulation,
            "gradient_clipping": job.clip,
            "zero_optimization": zero,
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": job.mixed},
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=_adamw(job, model.parameters()), config=config)

        def step(batches: Sequence[Tensor]) -> Tensor:
            losses = []
            for batch in batches:
                loss = engine(input_ids=batch, labels=batch).loss
                engine.backward(loss)  # divides by gradient_accumulation_steps itself
                engine.step()
                losses.append(loss.detach())
            return torch.stack(losses).mean()

        return step

    return build


BUILDERS: dict[str, Callable[[Job, nn.Module], Step]] = {
    "ddp": _ddp,
    "zero1": _hf_zero(1),
    "zero2": _hf_zero(2),
    "zero3": _hf_zero(3),
    "zero2-sockets": _hf_zero(2, sockets=True),
    "zero3-sockets": _hf_zero(3, sockets=True),
    "zero3-keep": _hf_zero(3, spare_memory="16GiB"),
    "fsdp2": _fsdp2(reshard=True),
    "fsdp2-keep": _fsdp2(reshard=False),
    "deepspeed1": _deepspeed(1),
    "deepspeed2": _deepspeed(2),
    "deepspeed3": _deepspeed(3),
    "deepspeed3-strict": _deepspeed(3, strict=True),
    "zero-redundancy": _zero_redundancy,
}
"""Every engine by the name that `--engines` takes."""


def missing(engine: str) -> str | None:
    """The module that `engine` needs and this environment lacks, else None."""
    module = (
        "deepspeed"
        if engine.startswith("deepspeed")
        else "hf_zero"
        if engine.startswith("zero") and engine != "zero-redundancy"
        else "torch"
    )
    return None if importlib.util.find_spec(module) else module


def setup(job: Job, rank: int) -> torch.device:
    """Join the process group and import what the engine needs, so that neither counts as the engine's own."""
    if job.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if job.device == "cuda" else "gloo")
    family = job.engine.rstrip("0123456789").split("-")[0]
    importlib.import_module(
        {"deepspeed": "deepspeed", "fsdp": "torch.distributed.fsdp"}.get(family, "torch.distributed.optim")
    )
    return torch.device(job.device, rank if job.device == "cuda" else None)
