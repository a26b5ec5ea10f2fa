"""Compare saving and loading with the raw disk and with the peers: the same model on the same ranks, in turns.

    python benchmarks/checkpoint.py --folder /data/scratch                     # 124M, everything that is installed
    python benchmarks/checkpoint.py --folder /data/scratch --only raw hf_zero --output runs/ck.json

Each rank is a process of its own. A round does every measurement once, in an order that turns from round to round; ratios are
taken within a round. `raw` is the ceiling: all ranks write the same number of bytes from memory at the same time, each into a
separate file, and fsync it, or read them after they left the page cache. Everything is durable: all files of peers that do
not fsync are synced after them. Extra memory is the high-water mark of resident memory during a save,
over its start.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import free_port, threads, versions

WEIGHTS = ("raw weights", "hf_zero weights", "torch.save weights", "safetensors on rank 0", "dcp weights")
STATES = ("raw all", "hf_zero all", "hf_zero async", "copy to host", "dcp all", "deepspeed all")
LOADS = ("raw read", "hf_zero load", "hf_zero load, no digests", "hf_zero verify")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/checkpoint"), help="on the disk to be measured")
    parser.add_argument("--size", default="124m", help="as in compare.py")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[], help="measurements that begin with one of these words")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument("--timeout", type=float, default=1800.0)
    return parser.parse_args()


def launch(options: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, wait for them, and give back rank 0's result."""
    options.folder.mkdir(parents=True, exist_ok=True)
    result = options.folder / "result.json"
    result.unlink(missing_ok=True)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(options.ranks)}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:]],
            env=os.environ
            | common
            | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "OMP_NUM_THREADS": str(threads(options.ranks)),
                "_RANK_OF": "1",
            },
        )
        for rank in range(options.ranks)
    ]
    deadline = time.monotonic() + options.timeout
    try:
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks) or time.monotonic() > deadline:
                raise SystemExit("a rank failed or time was up")
            time.sleep(0.2)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
    return dict(json.loads(result.read_text()))


# One rank ------------------------------------------------------------------------------------------------------------


class Rank:
    """Arguments of one rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist
        from engines import build_model

        import hf_zero as zero

        self.torch, self.dist, self.zero = torch, dist, zero
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.folder = options.folder
        self.build = lambda: build_model(options.size, 128)
        self.model = self.build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.engine = zero.shard(self.model, self.optimizer, zero.ZeroConfig(stage=3))
        self.tokens = torch.randint(0, 500, (1, 128))  # the smallest model has 512
        self.step(self.model, self.optimizer)
        self.weights_bytes = self.engine.layout.numel * 4
        self.all_bytes = 3 * self.weights_bytes
        self.peers: dict[str, Callable[[Path], None]] = {}

    def step(self, model: Any, optimizer: Any) -> None:
        model(self.tokens, labels=self.tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    # Measurements: each returns the seconds of the slowest rank -----------------------------------------------------

    def timed(self, work: Callable[[], None]) -> float:
        self.dist.barrier()
        start = time.perf_counter()
        work()
        return self.slowest(time.perf_counter() - start)

    def slowest(self, seconds: float) -> float:
        value = self.torch.tensor([seconds])
        self.dist.all_reduce(value, self.dist.ReduceOp.MAX)
        return float(value)

    def settle(self) -> None:
        """Wait until writes of the last measurement are on disk."""
        if self.rank == 0:
            os.sync()
        self.dist.barrier()

    def fresh(self, name: str) -> Path:
        path = self.folder / name
        if self.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        self.settle()
        return path

    def raw_write(self, total: int) -> float:
        path = self.fresh("raw")
        share = total // self.size
        data = memoryview(self.torch.randint(0, 255, (share,), dtype=self.torch.uint8).numpy())
        path.mkdir(parents=True, exist_ok=True)

        def work() -> None:
            fd = os.open(path / f"file-{self.rank}", os.O_WRONLY | os.O_CREAT)
            for start in range(0, share, 8 << 20):
                os.pwrite(fd, data[start : start + (8 << 20)], start)
            os.fsync(fd)
            os.close(fd)

        return self.timed(work)

    def save(self, name: str, **options: Any) -> float:
        path = self.fresh(name)
        return self.timed(lambda: self.engine.save(path, **options))

    def save_behind(self) -> tuple[float, float]:
        path = self.fresh("async")
        self.dist.barrier()
        start = time.perf_counter()
        self.engine.save(path, async_save=True)
        blocked = time.perf_counter() - start
        self.engine.wait_for_save()
        return self.slowest(blocked), self.slowest(time.perf_counter() - start)

    def copy(self) -> float:
        """Copy the bytes that an asynchronous save keeps into new memory."""
        masters = [span.values() for unit in self.engine.units for span in unit.spans]
        states = [v for s in self.optimizer.state.values() for v in s.values() if v.numel() > 1]

        def work() -> None:
            self.kept = [tensor.clone() for tensor in masters + states]

        seconds = self.timed(work)
        self.kept = []
        return seconds

    def gathered(self, write: Callable[[Any, Path], None], name: str) -> float:
        """Gather the full model; rank 0 writes it."""
        path = self.fresh(name)

        def work() -> None:
            state = self.model.state_dict()
            if self.rank == 0:
                path.mkdir(parents=True)
                write(state, path / "file")
                sync(path)
            self.dist.barrier()

        return self.timed(work)

    def rank_0(self, name: str) -> float:
        """`torch.save` of a model that rank 0 holds already, without the gather."""
        path = self.fresh(name)
        state = self.model.state_dict()

        def work() -> None:
            if self.rank == 0:
                path.mkdir(parents=True)
                self.torch.save(state, path / "file")
                sync(path)
            self.dist.barrier()

        return self.timed(work)

    def forget(self, path: Path) -> None:
        for file in path.rglob("*"):
            if file.is_file():
                fd = os.open(file, os.O_RDONLY)
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
        self.dist.barrier()

    def raw_read(self) -> float:
        """Read the checkpoint's bytes into allocated memory, half of every file on each of two ranks."""
        path = self.folder / "hf_zero"
        self.forget(path)
        files = sorted(file for file in path.rglob("*.safetensors"))
        buffer = memoryview(bytearray(8 << 20))

        def work() -> None:
            for file in files:
                fd = os.open(file, os.O_RDONLY)
                size = os.fstat(fd).st_size
                low, high = size * self.rank // self.size, size * (self.rank + 1) // self.size
                for start in range(low, high, len(buffer)):
                    os.preadv(fd, [buffer[: min(len(buffer), high - start)]], start)
                os.close(fd)

        return self.timed(work)

    def load(self, verify: bool) -> float:
        path = self.folder / "hf_zero"
        self.forget(path)
        return self.timed(lambda: self.engine.load(path, verify=verify))

    def verify(self) -> float:
        """Verify on rank 0, in one thread, from the page cache."""
        path = self.folder / "hf_zero"
        for _ in range(2):
            start = time.perf_counter()
            if self.rank == 0:
                self.zero.verify(path, threads=1)
            seconds = time.perf_counter() - start
            self.dist.barrier()
        return self.slowest(seconds)

    def extra_memory(self) -> int:
        path = self.fresh("memory")
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_bytes("VmRSS")
        self.engine.save(path)
        return int(self.slowest(float(resident_bytes("VmHWM") - before)))

    # Peers ----------------------------------------------------------------------------------------------------------

    def prepare(self, name: str) -> bool:
        """Build a peer's model, once; False where it is not installed."""
        kind = name.split()[0]
        if kind not in ("dcp", "deepspeed") or kind in self.peers:
            return True
        try:
            self.peers[kind] = self.make_dcp() if kind == "dcp" else self.make_deepspeed()
        except ImportError:
            return False
        return True

    def make_dcp(self) -> Callable[[Path], None]:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = self.build()
        mesh = init_device_mesh("cpu", (self.size,))
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = self.torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.step(model, optimizer)

        def save(path: Path) -> None:
            weights, states = get_state_dict(model, optimizer)
            whole = {"model": weights, "optimizer": states} if path.name == "dcp all" else {"model": weights}
            dcp.save(whole, checkpoint_id=path)

        return save

    def make_deepspeed(self) -> Callable[[Path], None]:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        model = self.build()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = self.torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
        engine.backward(engine(self.tokens, labels=self.tokens).loss)
        engine.step()
        return lambda path: engine.save_checkpoint(str(path))

    def peer(self, name: str) -> float:
        path = self.fresh(name)

        def work() -> None:
            self.peers[name.split()[0]](path)
            self.dist.barrier()
            if self.rank == 0:
                sync(path)
            self.dist.barrier()

        return self.timed(work)

    def measure(self, name: str) -> dict[str, float]:
        import safetensors.torch as safetensors

        def write(state: Any, path: Path) -> None:
            safetensors.save_file({k: v.clone() for k, v in state.items() if k != "lm_head.weight"}, path)

        if name == "hf_zero async":
            blocked, total = self.save_behind()
            return {"hf_zero async, blocked": blocked, "hf_zero async, all": total}
        work: dict[str, Callable[[], float]] = {
            "raw weights": lambda: self.raw_write(self.weights_bytes),
            "raw all": lambda: self.raw_write(self.all_bytes),
            "hf_zero weights": lambda: self.save("weights", save_optimizer=False),
            "hf_zero all": lambda: self.save("hf_zero"),
            "copy to host": self.copy,
            "torch.save weights": lambda: self.rank_0("torch.save"),
            "safetensors on rank 0": lambda: self.gathered(write, "safetensors"),
            "raw read": self.raw_read,
            "hf_zero load": lambda: self.load(True),
            "hf_zero load, no digests": lambda: self.load(False),
            "hf_zero verify": self.verify,
        }
        return {name: work[name]() if name in work else self.peer(name)}


def sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"the kernel does not report {field}")


def run_rank(options: argparse.Namespace) -> None:
    rank = Rank(options)
    wanted = [n for n in WEIGHTS + STATES + LOADS if not options.only or n.startswith(tuple(options.only))]
    wanted = [name for name in wanted if rank.prepare(name)]
    saves, loads = [n for n in wanted if n not in LOADS], [n for n in wanted if n in LOADS]
    rounds: list[dict[str, float]] = []
    rank.save("hf_zero")
    for index in range(options.rounds):
        found: dict[str, float] = {}
        turn = index % max(1, len(saves))
        for name in saves[turn:] + saves[:turn] + loads:
            found.update(rank.measure(name))
        rounds.append(found)
        if rank.rank == 0:
            print(f"round {index + 1}: " + ", ".join(f"{n} {s:.3f} s" for n, s in found.items()), file=sys.stderr)
    extra = rank.extra_memory()
    if rank.rank == 0:
        body = {
            "rounds": rounds,
            "weights_bytes": rank.weights_bytes,
            "all_bytes": rank.all_bytes,
            "extra_bytes": extra,
        }
        (options.folder / "result.json").write_text(json.dumps(body))
    rank.dist.barrier()
    rank.dist.destroy_process_group()


# The report ----------------------------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['weights_bytes'] / 1e6:.0f} MB of weights, {result['all_bytes'] / 1e6:.0f} MB in all")
    for heading in ("what", "seconds", "GB/s", "of raw", "min … max"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for name in result["rounds"][0]:
        seconds = [found[name] for found in result["rounds"]]
        size = result["weights_bytes"] if name in WEIGHTS else result["all_bytes"]
        raw = "raw weights" if name in WEIGHTS else "raw read" if name in LOADS else "raw all"
        ratios = [found[raw] / found[name] for found in result["rounds"] if raw in found]
        table.add_row(
            name,
            f"{statistics.median(seconds):.3f}",
            f"{size / statistics.median(seconds) / 1e9:.2f}",
            f"{statistics.median(ratios):.2f}" if ratios else "",
            f"{min(ratios):.2f} … {max(ratios):.2f}" if ratios else "",
        )
    console = Console()
    console.print(table)
    console.print(f"extra memory of a save, the rank with most: {result['extra_bytes'] / 2**20:.0f} MiB")


def main() -> int:
    options = parse()
    if os.environ.get("_RANK_OF"):
        run_rank(options)
        return 0
    result = launch(options)
    report(result)
    if options.output:
        result["options"] = {key: getattr(options, key) for key in ("size", "ranks", "rounds", "only")}
        result["versions"] = versions()
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
