"""One rank of one launch of `offload.py`: measure one case, write the results as JSON.

A measurement is a list of *subjects* that take turns in the same processes, in the order A B B A, so that what else the
machine does hits all alike. In a turn all ranks start together, and the slowest rank's time counts. Each subject comes
with the bytes that one turn of it must move through memory or to and from the disk, so that speeds can be compared.

* `step-host`: `optimizer.step()` until the last parameter is stored, against three references over as many elements:
  in-place torch operators with the same reads and writes (no arithmetic to speak of: the bandwidth there is), torch's fused
  AdamW over one tensor, and, where types differ, the operators that such a step is made of, in a plain loop over blocks: the
  gradient's cast, the fused kernel, the parameter's cast.
* `step-disk`: the same step with the optimizer's state on disk, against plain positional O_DIRECT reads and writes of as many
  bytes in a second file, each request written after it was read, and against DeepSpeed's NVMe path over as many elements.
* `train`: whole steps of a GPT-2-class model, against the same stage with nothing offloaded.
* `gpu`: whole steps of a Llama-class model on one GPU, each engine in processes of its own.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from compare_worker import Batches, synchronize, work
from engines import LEARNING_RATE, Job, Step, build_model
from torch import Tensor, nn

import hf_zero as zero

WARM_UP = 2
LAYERS = 16
STEPS_PER_TURN = 3
REQUEST_BYTES = 4 << 20
BLOCK_NUMEL = 1 << 19


@dataclass(frozen=True, kw_only=True)
class OffloadJob(Job):
    """Arguments of one launch. `measure` is the kind, `engine` the case within it."""

    config: Mapping[str, Any]
    """Settings of `ZeroConfig`, or of the engine."""
    numel: int = 1 << 26
    """Elements of optimizer state per rank, about, of the kinds that step without a real model."""
    folder: str | None = None

    def but(self, **changes: Any) -> OffloadJob:
        return replace(self, **changes)


@dataclass
class Subject:
    """A subject that takes turns. `ready` runs before each turn, untimed."""

    turn: Callable[[], Any]
    bytes: float = 0.0
    """That one turn must read and write; 0 where only times are compared."""
    ready: Callable[[], Any] = lambda: None
    steps: int = 1
    """That one turn makes; seconds are of one of them."""


def take_turns(subjects: Mapping[str, Subject], job: Job, device: torch.device) -> dict[str, Any]:
    """Measure all subjects in turns; return the slowest rank's seconds per turn, and those of the first turn."""
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    order = list(subjects)
    for _ in range(WARM_UP + job.steps):
        for name in order:
            subject = subjects[name]
            subject.ready()
            synchronize(device)
            dist.barrier()
            start = time.perf_counter()
            subject.turn()
            synchronize(device)
            taken = torch.tensor((time.perf_counter() - start) / subject.steps, dtype=torch.float64, device=device)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            seconds[name].append(float(taken))
        order.reverse()
    return {
        "first_seconds": {name: times[0] for name, times in seconds.items()},
        "seconds": {name: times[WARM_UP:] for name, times in seconds.items()},
        "bytes": {name: subject.bytes for name, subject in subjects.items()},
    }


# Steps without a model to speak of ------------------------------------------------------------------------------------


class Layers(nn.Module):
    """`LAYERS` square matrices for each rank: gradients of every element at next to no cost."""

    def __init__(self, numel: int, world_size: int) -> None:
        super().__init__()
        width = max(8, math.isqrt(numel // LAYERS))
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS * world_size))
        self.batch = torch.randn(4, width, generator=torch.Generator().manual_seed(0))

    def forward(self) -> Tensor:
        x = self.batch
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@dataclass
class Stepped:
    """An engine over `Layers`: gradients, the step over them, and what the step holds per rank."""

    backward: Callable[[], Any]
    step: Callable[[], Any]
    numel: int
    """Per rank."""


def _hf_zero_step(job: OffloadJob) -> Stepped:
    torch.manual_seed(0)
    model = Layers(job.numel, job.world_size)
    numel = sum(parameter.numel() for parameter in model.parameters()) // job.world_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    config = zero.ZeroConfig(offload_dir=job.folder, **job.config)
    engine = zero.shard(model, optimizer, config, mixed_precision="bf16" if job.mixed else "no")

    def backward() -> None:
        optimizer.zero_grad()
        model().backward()

    def step() -> None:
        optimizer.step()
        engine.finish_step()

    return Stepped(backward, step, numel)


def _deepspeed_step(job: OffloadJob) -> Stepped:
    import deepspeed

    torch.manual_seed(0)
    model = Layers(job.numel, job.world_size)
    numel = sum(parameter.numel() for parameter in model.parameters()) // job.world_size
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": job.mixed},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "aio": {"block_size": 1 << 20, "queue_depth": 16, "thread_count": 1, "single_submit": False, "overlap_events": True},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": job.numel // 8,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": job.folder,
                "buffer_count": 16,  # four per group of parameters, of which three are under way
                "pipeline_read": True,
                "pipeline_write": True,
            },
        },
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    return Stepped(lambda: engine.backward(engine()), engine.step, numel)


def step_host(job: OffloadJob, rank: int, device: torch.device) -> dict[str, Any]:
    stepped = _hf_zero_step(job)
    numel = stepped.numel
    plain = nn.Parameter(torch.ones(numel))
    plain.grad = torch.full((numel,), 1e-3)
    fused = torch.optim.AdamW([plain], lr=LEARNING_RATE, fused=True)
    fused.step()
    master, gradient = plain.detach(), plain.grad
    first, second = fused.state[plain]["exp_avg"], fused.state[plain]["exp_avg_sq"]
    low = [torch.ones(numel if job.mixed else 0, dtype=torch.bfloat16) for _ in range(2)]
    narrow = job.mixed and job.world_size == 1  # the gradient comes in the type it was computed in

    def streams() -> None:
        first.mul_(0.999)
        second.mul_(0.999)
        if narrow:
            master.mul_(0.999)
        else:
            master.add_(gradient, alpha=1e-9)
        if narrow:
            low[1].copy_(low[0])
        elif job.mixed:
            low[1].fill_(1.0)

    scratch, count = torch.empty(BLOCK_NUMEL), torch.ones(())

    def operators() -> None:
        for start in range(0, numel, BLOCK_NUMEL):
            block = slice(start, min(start + BLOCK_NUMEL, numel))
            grad = scratch[: block.stop - start].copy_(low[0][block]) if narrow else gradient[block]
            lists: list[list[Tensor]] = [[master[block]], [grad], [first[block]], [second[block]], [], [count]]
            torch._fused_adamw_(
                *lists,
                amsgrad=False,
                beta1=0.9,
                beta2=0.999,
                lr=LEARNING_RATE,
                weight_decay=0.01,
                eps=1e-8,
                maximize=False,
            )
            low[1][block].copy_(master[block])

    # Master and two moments are read and written, the gradient is read, a parameter of another type or tier is written.
    separate = job.mixed or job.config["offload_params"] == "none"
    gradient_bytes, parameter_bytes = (2 if narrow else 4), (2 if job.mixed else 4) * separate
    streamed = 24 + (4 if narrow else 6 if job.mixed else 4)
    subjects = {
        "step": Subject(stepped.step, (24 + gradient_bytes + parameter_bytes) * numel, stepped.backward),
        "streams": Subject(streams, streamed * numel),
        "fused": Subject(fused.step, 28 * numel),
    }
    if job.mixed:
        subjects["operators"] = Subject(operators, subjects["step"].bytes)
    return take_turns(subjects, job, device) | {"numel": numel}


class RawDisk:
    """A file, and plain loops that read all of it and write all of it.

    A request is written after it was read, as in a step. Loops that write ahead of their reads would find what they have
    just written in a cache of the host, and measure that.
    """

    def __init__(self, folder: str | None, nbytes: int) -> None:
        self.nbytes = nbytes - nbytes % REQUEST_BYTES or REQUEST_BYTES
        self._file = tempfile.NamedTemporaryFile(dir=folder, prefix="benchmark-raw-")  # noqa: SIM115
        self._fd = self._file.fileno()
        os.posix_fallocate(self._fd, 0, self.nbytes)
        mode = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        buffer = mmap.mmap(-1, REQUEST_BYTES)
        self.direct = True
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, mode | os.O_DIRECT)
            os.preadv(self._fd, [buffer], 0)
        except OSError:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, mode)
            self.direct = False

    def move(self, threads: int) -> None:
        """Read and write `nbytes` each, with so many threads for either."""
        there: SimpleQueue[int | None] = SimpleQueue()

        def transfer(call: Callable[..., int], offset: int, buffer: mmap.mmap) -> None:
            if call(self._fd, [buffer], offset) != REQUEST_BYTES:
                raise OSError(f"a transfer of {REQUEST_BYTES} bytes at byte {offset} was cut short")

        def read(part: int) -> None:
            with mmap.mmap(-1, REQUEST_BYTES) as buffer:
                for offset in range(part * REQUEST_BYTES, self.nbytes, threads * REQUEST_BYTES):
                    transfer(os.preadv, offset, buffer)
                    there.put(offset)
            there.put(None)

        def write() -> None:
            with mmap.mmap(-1, REQUEST_BYTES) as buffer:
                buffer.write(b"\1" * REQUEST_BYTES)
                while (offset := there.get()) is not None:
                    transfer(os.pwritev, offset, buffer)

        with ThreadPoolExecutor(2 * threads) as pool:
            running = [pool.submit(read, part) for part in range(threads)] + [
                pool.submit(write) for _ in range(threads)
            ]
            for one in running:
                one.result()


def step_disk(job: OffloadJob, rank: int, device: torch.device) -> dict[str, Any]:
    stepped = _hf_zero_step(job)
    each = 12 * stepped.numel  # master and two moments, read and written
    moved: dict[str, list[int]] = {}

    def counted(name: str, step: Callable[[], Any]) -> Callable[[], None]:
        def turn() -> None:
            before = storage_bytes()
            step()
            moved[name] = [after - start for start, after in zip(before, storage_bytes())]

        return turn

    subjects = {"step": Subject(counted("step", stepped.step), 2 * each, stepped.backward)}
    if job.engine.endswith("deepspeed"):  # charged with what the task needs, not with what it moves
        peer = _deepspeed_step(job)
        subjects["deepspeed"] = Subject(counted("deepspeed", peer.step), 2 * each, peer.backward)
    raw = RawDisk(job.folder, each)
    for threads in (1, 2, 4):
        subjects[f"raw, {threads} + {threads}"] = Subject(partial(raw.move, threads), 2 * raw.nbytes)
    return take_turns(subjects, job, device) | {"numel": stepped.numel, "direct": raw.direct, "storage_bytes": moved}


def storage_bytes() -> tuple[int, int]:
    """Read from and written to block devices by this process, as the kernel counts."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])


# Whole training steps -------------------------------------------------------------------------------------------------


Trainable = tuple[Step, Callable[[], Any]]
"""A step, and a wait until the last step's parameters are stored."""


def _loop(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, no_sync: Callable[[], Any]) -> Step:
    """The ordinary loop; nothing is clipped."""

    def step(batches: Sequence[Tensor]) -> Tensor:
        losses = []
        for index, batch in enumerate(batches):
            with no_sync() if index + 1 < len(batches) else nullcontext():
                loss = model(input_ids=batch, labels=batch).loss
                (loss / len(batches)).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean()

    return step


def _hf_zero(job: OffloadJob, model: nn.Module) -> Trainable:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    config = zero.ZeroConfig(offload_dir=job.folder, **job.config)
    engine = zero.shard(model, optimizer, config, mixed_precision="bf16" if job.mixed else "no")
    return _loop(job, model, optimizer, engine.no_sync), engine.finish_step


def _fsdp2(job: OffloadJob, model: nn.Module) -> Trainable:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    bf16 = torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16, output_dtype=bf16)
    options: dict[str, Any] = {"mp_policy": policy, "offload_policy": CPUOffloadPolicy()}
    blocks = set(model._no_split_modules or ())  # type: ignore[arg-type]
    for module in model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    return _loop(job, model, optimizer, nullcontext), nullcontext


def _deepspeed(job: OffloadJob, model: nn.Module) -> Trainable:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": job.batch,
        "gradient_accumulation_steps": job.accumulation,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)

    def step(batches: Sequence[Tensor]) -> Tensor:
        losses = []
        for batch in batches:
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return step, nullcontext


ENGINES: dict[str, Callable[[OffloadJob, nn.Module], Trainable]] = {
    "hf_zero": _hf_zero,
    "fsdp2": _fsdp2,
    "deepspeed": _deepspeed,
}


class Trained:
    """An engine with its batches and losses."""

    def __init__(self, job: OffloadJob, model: nn.Module, rank: int, device: torch.device) -> None:
        self.numel = sum(parameter.numel() for parameter in model.parameters())
        self.batches = Batches(job, model.config.vocab_size, rank, device)  # type: ignore[union-attr, arg-type]
        self._losses: list[Tensor] = []
        self._step, self._finish = ENGINES[job.engine.split()[0]](job, model)

    def turn(self) -> None:
        """Several steps: remaining work of one continues in the next forward."""
        for _ in range(STEPS_PER_TURN):
            self._losses.append(self._step(self.batches()))
        self._finish()

    @property
    def losses(self) -> list[float]:
        return [float(loss) for loss in self._losses]


def train(job: OffloadJob, rank: int, device: torch.device) -> dict[str, Any]:
    stage = {"stage": job.config["stage"]}
    offloaded, plain = (
        Trained(job.but(config=config), build_model(job.model, job.sequence), rank, device)
        for config in (job.config, stage)
    )
    subjects = {
        "step": Subject(offloaded.turn, steps=STEPS_PER_TURN),
        "in memory": Subject(plain.turn, steps=STEPS_PER_TURN),
    }
    found = take_turns(subjects, job, device)
    difference = max(abs(a - b) for a, b in zip(offloaded.losses, plain.losses))
    return found | {"numel": plain.numel, "losses": offloaded.losses, "loss_difference": difference}


LLAMAS: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    "1b": {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24, "num_attention_heads": 16},
    "3b": {"hidden_size": 3200, "intermediate_size": 8640, "num_hidden_layers": 26, "num_attention_heads": 32},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
}
"""Llama shapes, smallest first; other settings as in Llama 2."""


def llama(size: str, sequence: int, device: torch.device) -> nn.Module:
    """Random weights, made on the device in float32; activation checkpointing on."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        **LLAMAS[size], vocab_size=32_000, max_position_embeddings=max(2048, sequence), use_cache=False
    )
    torch.manual_seed(1234)
    with device:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def available_bytes() -> int:
    """Return MemAvailable: unlike resident bytes, it accounts for page-locked memory."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("the kernel does not report MemAvailable")


def gpu(job: OffloadJob, rank: int, device: torch.device) -> dict[str, Any]:
    model = llama(job.model, job.sequence, device)
    before = least = available_bytes()
    trained = Trained(job, model, rank, device)

    def ready() -> None:
        nonlocal least
        least = min(least, available_bytes())

    found = take_turns({"step": Subject(trained.turn, ready=ready, steps=STEPS_PER_TURN)}, job, device)
    ready()
    return found | {
        "numel": trained.numel,
        "losses": trained.losses,
        "host_bytes": before - least,
        "device_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
    }


KINDS: dict[str, Callable[[OffloadJob, int, torch.device], dict[str, Any]]] = {
    "step-host": step_host,
    "step-disk": step_disk,
    "train": train,
    "gpu": gpu,
}


if __name__ == "__main__":
    work(OffloadJob, KINDS)
