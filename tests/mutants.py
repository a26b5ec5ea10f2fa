"""Deliberate bugs: each is planted in a copy of the package, and the default tests must fail there. `make mutants` runs it.

A mutant is one replaced passage. `first` names the tests that most likely fail; if they all pass, the whole default run
follows. A mutant survives when that passes too: then a test is missing.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = "tests/test_programs.py"


@dataclass(frozen=True)
class Mutant:
    """One deliberate bug.

    Attributes:
        file: below hf_zero/.
        old: a passage that this file has exactly once.
        new: what takes its place.
        first: arguments of pytest for the tests that are run first.
    """

    name: str
    file: str
    old: str
    new: str
    first: tuple[str, ...] = (PROGRAMS,)


def program(pattern: str) -> tuple[str, ...]:
    """Only the programs whose names hold this."""
    return (PROGRAMS, "-k", pattern)


MUTANTS = (
    # Gradients
    Mutant(
        "a third backward hides that the second one raised",
        "engine/schedule.py",
        "            self._has_run = not self._is_first",
        "            self._has_run = False",
        program("failures"),
    ),
    Mutant(
        "a step in backward updates what this rank alone has gradients of",
        "engine/host_step.py",
        "iter(self._context.wire.start_maximum(mine)())",
        "iter(mine)",
        program("options"),
    ),
    Mutant(
        "a gradient is off by one part in a thousand",
        "comm/wire.py",
        "        torch.add(parts[0], parts[1], out=out)\n        rest = parts[2:]",
        "        torch.add(parts[0], parts[1], out=out)\n        out.mul_(1.001)\n        rest = parts[2:]",
        program("loops"),
    ),
    Mutant(
        "an all-reduce is not divided by the number of ranks",
        "comm/group_wire.py",
        "        source.mul_(1.0 / size)\n        return 1.0\n    return 1.0 / size",
        "        source.mul_(1.0 / size)\n        return 1.0\n    return 1.0",
        program("loops"),
    ),
    Mutant(
        "the second backward replaces the first one's gradient on the device",
        "engine/bucket.py",
        "            self.grad[: mean.numel()].add_(mean)",
        "            self.grad[: mean.numel()].copy_(mean)",
        program("loops"),
    ),
    Mutant(
        "the second backward's gradient on disk is added twice",
        "tiers/gradient_offload.py",
        "self._values.add_(self._target.read_into(before))",
        "self._values.add_(self._target.read_into(before), alpha=2)",
        program("loops"),
    ),
    Mutant(
        "gradients held by no_sync are kept in the compute dtype",
        "engine/bucket.py",
        "self._held = self._collect(Precision.hold_dtype(self.reduce_dtype))",
        "self._held = self._collect(self.span.compute_dtype)",
        program("small_gradients_after"),
    ),
    Mutant(
        "a backward after no_sync forgets what is held",
        "engine/bucket.py",
        "        buffer, self._held = self._held, None",
        "        buffer, self._held = None, None",
        program("loops or gradients"),
    ),
    Mutant(
        "a rank alone forgets the gradient of the backward before",
        "engine/bucket.py",
        "        elif isinstance(self.grad, Tensor):\n            self.grad[: mean",
        "        elif isinstance(self.grad, Tensor) and self.span.context.wire.size > 1:\n            self.grad[: mean",
    ),
    Mutant(
        "what a later backward adds is doubled before it is reduced",
        "engine/bucket.py",
        "[grad for _, grad in pairs])\n        return buffer",
        "[grad for _, grad in pairs], alpha=2)\n        return buffer",
        program("small_gradients_after"),
    ),
    Mutant(
        "cleared gradients of some parameters of a span stay",
        "compat/gradients.py",
        "                self._store(span, index, None)",
        "                pass",
        program("gradients"),
    ),
    Mutant(
        "a gradient that user code replaced is ignored",
        "compat/gradients.py",
        "        self._store(span, index, grad.detach())",
        "        pass",
        program("gradients"),
    ),
    Mutant(
        "zero_grad(set_to_none=False) does nothing",
        "engine/engine.py",
        "            else:\n                span.bucket.zero()",
        "            else:\n                pass",
    ),
    Mutant(
        "the padding of a gradient is not zero",
        "engine/bucket.py",
        "            buffer[self._used_numel :].zero_()",
        "            buffer[self._used_numel :].fill_(1)",
    ),
    # Norms, clipping, overflow
    Mutant(
        "the norm leaves out the last rank",
        "comm/group_wire.py",
        "return parts.sum(0,",
        "return parts[:-1].sum(0,",
        program("clip"),
    ),
    Mutant(
        "clipping leaves out the last span",
        "engine/clipping.py",
        "if span.bucket.grad is not None]\n        counting",
        "if span.bucket.grad is not None][:-1]\n        counting",
        program("clip"),
    ),
    Mutant(
        "a norm of order 1 is not summed over the elements' absolute values",
        "engine/clipping.py",
        "    return total.sqrt() if order == 2.0 else total ** (1.0 / order)",
        "    return total.sqrt()",
        program("clip or norm"),
    ),
    Mutant(
        "clip_grad_value_ clips at one side only",
        "engine/clipping.py",
        ".clamp_(-limit, limit))",
        ".clamp_(max=limit))",
        program("clip or value"),
    ),
    Mutant(
        "a step over the disk does not apply the factor of clipping",
        "engine/host_step.py",
        "                grad.mul_(update.factor)",
        "                pass",
        program("clip"),
    ),
    Mutant(
        "a rank does not report an overflow to the others",
        "compat/group_gradients.py",
        "self._overflow = self._wire.max_scalar(flags.float())",
        "self._overflow = flags.float()",
        program("scalers"),
    ),
    # Values
    Mutant(
        "after a step gathered values count as new",
        "engine/unit.py",
        "            span.is_old = True\n        for span in ()",
        "            span.is_old = False\n        for span in ()",
        program("loops"),
    ),
    Mutant(
        "the masters of a step are not copied to what is gathered",
        "engine/span.py",
        "                self.local.copy_(source)",
        "                pass",
        program("loops"),
    ),
    Mutant(
        "offloaded masters are published one element off",
        "engine/host_step.py",
        "        target = home[start : start + values.numel()]",
        "        start = max(0, start - 1)\n        target = home[start : start + values.numel()]",
        program("long_arrays"),
    ),
    Mutant(
        "slices of two ranks change places where they are collected",
        "engine/optimizer_state.py",
        "landing = whole[slice(*layout.bounds(rank))] if here else own",
        "landing = whole[slice(*layout.bounds(layout.shards - rank - 1))] if here else own",
    ),
    Mutant(
        "units are never released",
        "engine/unit.py",
        "        if self.state is State.SHARDED or not self.context.reshards or self.is_pinned:",
        "        if self.state is not None:",
    ),
    Mutant(
        "quantized values are decoded without the sum over ranks",
        "comm/group_wire.py",
        "codec.decode(part, out, add=rank > 0)",
        "codec.decode(part, out)",
        program("int8 or wire or coded or loops"),
    ),
    Mutant(
        "replicas do not average their gradients",
        "comm/hybrid.py",
        "            within.close()\n            self._average_across(out, sent_as, tag)",
        "            within.close()",
        program("gradients or micro_batches"),
    ),
    Mutant(
        "one rank reduces other units than the others",
        "engine/reduce_queue.py",
        "            self.start(self._order.popleft())",
        "            self.start(self._order.popleft() if self._order[0].context.wire.rank else self._order.pop())",
    ),
    # Writes
    Mutant(
        "`param.data = x` is lost where full parameters stay",
        "engine/write_back.py",
        "    if span.is_readable:\n        span.view(index).copy_(values)",
        "    if span.is_readable and not span.is_persistent:\n        span.view(index).copy_(values)",
        program("writes"),
    ),
    Mutant(
        "`param.data = x` is lost where parameters are released",
        "engine/write_back.py",
        "        write_back(span, index, values.detach().reshape(-1), shown_by_codec(span))",
        "        pass",
        program("writes"),
    ),
    Mutant(
        "a write in place between steps is lost",
        "compat/writes.py",
        "_versions(span.params))) if a != b]",
        "_versions(span.params))) if a < 0]",
        program("writes"),
    ),
    Mutant(
        "a write in a forward is lost at stage 3",
        "compat/writes.py",
        "    def unit_released(self, unit: Unit) -> None:\n        self._find_writes(unit)",
        "    def unit_released(self, unit: Unit) -> None:\n        self._record_versions(unit)",
        program("writes"),
    ),
    Mutant(
        "a write through `.data` is not found",
        "compat/writes.py",
        "if found != marked[index]]",
        "if found == marked[index] and not index]",
        program("writes or data"),
    ),
    Mutant(
        "a write to the optimizer's tensors is not noticed",
        "engine/bound_optimizers.py",
        "        is_counted = versions != self._versions\n",
        "        is_counted = False\n",
        program("writes or optimizers"),
    ),
    Mutant(
        "edits inside GatheredParameters are those of rank 0",
        "params/gathered.py",
        "wire.broadcast(values.view(-1).view(torch.uint8), modifier)",
        "wire.broadcast(values.view(-1).view(torch.uint8), 0)",
        program("unsharded or access"),
    ),
    # Buffers, flags, options
    Mutant(
        "rank 0's buffers are not sent",
        "compat/buffers.py",
        "                if buffer is not None and _signature(buffer) == sign:",
        "                if buffer is None:",
        program("buffer or norm or modules"),
    ),
    Mutant(
        "a parameter that is unfrozen does not train",
        "compat/freezing.py",
        "        if place is not None:\n            self._changed[place.unit] = None",
        "        if place is None:\n            self._changed[place.unit] = None",
        program("freezing"),
    ),
    Mutant(
        "options of the optimizer's groups are not compared between ranks",
        "diagnostics/optimizer_options.py",
        "            self._mark = zlib.crc32(repr(self._named()).encode())",
        "            self._mark = 0",
        ("tests/diagnostics/test_debug.py",),
    ),
    Mutant(
        "ranks that initialise differently are not compared",
        "params/rank_equality.py",
        "        if len(set(digests)) == 1 or WRITTEN_LOCALLY in digests or not",
        "        if digests or WRITTEN_LOCALLY in digests or not",
        ("tests/regressions/test_init_ranks.py",),
    ),
    Mutant(
        "tensors in containers are not found",
        "engine/graph.py",
        "    while level and depth < _MAX_DEPTH:",
        "    while level and depth < 1:",
        ("tests/engine/test_released.py",),
    ),
    # Steps
    Mutant(
        "a read does not wait for the offloaded step under way",
        "engine/host_step.py",
        "        if self._is_running:\n            failed:",
        "        if self._units is None:\n            failed:",
    ),
    Mutant(
        "a step that raised leaves the state that it made",
        "engine/step.py",
        "        for key in [*optimizer.state]:\n            if key not in known:",
        "        return True\n        for key in [*optimizer.state]:\n            if key not in known:",
        ("tests/test_programs.py", "tests/regressions/test_failed_steps.py", "-k", "failures or failed"),
    ),
    Mutant(
        "a step uses what a backward that raised has left",
        "engine/schedule.py",
        '            self._lost = f"a backward of this step raised',
        '            self._lost = None and f"a backward of this step raised',
    ),
    Mutant(
        "hooks stay after detach",
        "engine/schedule.py",
        "        for handle in self._handles:\n            handle.remove()",
        "        for handle in self._handles:\n            pass",
    ),
    # Storage and checkpoints
    Mutant(
        "the disk tier loses writes behind the first page",
        "tiers/array.py",
        "        self._leave_base()\n        return self._disk.write(self._offset(start), values)",
        "        self._leave_base()\n        return self._disk.write(self._offset(0), values)",
        ("tests/conformance/test_tiers.py", "tests/tiers"),
    ),
    Mutant(
        "the disk tier reads one element off",
        "tiers/array.py",
        "        return self._disk.read(self._offset(start), values)",
        "        return self._disk.read(self._offset(max(0, start - 1)), values)",
        ("tests/conformance/test_tiers.py", "tests/tiers"),
    ),
    Mutant(
        "a checkpoint's byte range is off by one element",
        "checkpoint/ranges.py",
        "        return self.stored.start + self.start * self.dtype.itemsize",
        "        return self.stored.start + max(0, self.start - 1) * self.dtype.itemsize",
        ("tests/conformance/test_checkpoints.py",),
    ),
    Mutant(
        "a damaged file is loaded",
        "checkpoint/manifest.py",
        "    if digest_of(data) != expected:",
        "    if not digest_of(data):",
        ("tests/conformance/test_checkpoints.py", "tests/checkpoint"),
    ),
    Mutant(
        "a background save copies the values late",
        "checkpoint/save.py",
        "item.values, at = copy_to(item.values, place), at + _padded(item.length)",
        "item.values, at = item.values, at + _padded(item.length)",
        ("tests/conformance/test_checkpoints.py", "tests/checkpoint"),
    ),
    Mutant(
        "all ranks get the random state of rank 0",
        "checkpoint/objects.py",
        "generators[wire.rank].read_by(",
        "generators[0].read_by(",
        ("tests/conformance/test_checkpoints.py", "tests/checkpoint"),
    ),
    Mutant(
        "no replica writes the optimizer's state of full matrices",
        "engine/pieces.py",
        "                    if rank == span.layout.owner(span.layout.slots[segment.members[0]]):",
        "                    if rank < 0:",
        program("muon_continued"),
    ),
    Mutant(
        "parameters of two groups share one segment",
        "engine/segments.py",
        "            and groups[last.members[-1]] == groups[index]",
        "            and groups[last.members[-1]] is not None",
        program("groups"),
    ),
)


def misfits() -> list[str]:
    """Return what is wrong with the list: passages that are missing or not unique, tests that are missing."""
    wrong = []
    for mutant in MUTANTS:
        file = ROOT / "hf_zero" / mutant.file
        source = file.read_text(encoding="utf-8") if file.exists() else ""
        if (count := source.count(mutant.old)) != 1:
            wrong.append(f"{mutant.name}: {mutant.file} has its passage {count} times")
        ast.parse(source.replace(mutant.old, mutant.new))
        missing = [name for name in mutant.first if name.startswith("tests/") and not (ROOT / name).exists()]
        wrong += [f"{mutant.name}: {name} does not exist" for name in missing]
    return wrong


def copied(folder: Path) -> Path:
    """The checkout's files, but for those that git ignores, in a folder of their own: there all tests pass."""
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def failed(folder: Path, arguments: tuple[str, ...], timeout_s: float) -> str:
    """The first test that fails there; empty: all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=line", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end within {timeout_s:.0f} s"
    if done.returncode == 0:
        return ""
    is_stopped = (
        done.returncode == 2 and "stopping after 1 failures" in done.stdout
    )  # by a test that failed, under xdist
    if done.returncode != 1 and not is_stopped:  # no test fits, a file is not there, pytest itself broke
        raise SystemExit(
            f"pytest {' '.join(arguments)} ended with {done.returncode}: {done.stdout[-300:]} {done.stderr[-300:]}"
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0] if lines else f"pytest ended with {done.returncode}: {done.stdout[-300:]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--only", default="", help="part of a mutant's name")
    parser.add_argument("--from", type=int, default=0, dest="start", help="the first mutant's number")
    parser.add_argument(
        "--first-only", action="store_true", help="do not run the whole default tests where `first` passes"
    )
    parser.add_argument("--timeout-s", type=float, default=1800.0)
    options = parser.parse_args()
    if wrong := misfits():
        print(*wrong, sep="\n")
        return 1
    survived = []
    for number, mutant in enumerate(MUTANTS):
        if options.only not in mutant.name or number < options.start:
            continue
        with tempfile.TemporaryDirectory(prefix="mutant_") as name:
            folder = copied(Path(name))
            file = folder / "hf_zero" / mutant.file
            file.write_text(file.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8")
            started = time.monotonic()
            found = failed(folder, mutant.first, options.timeout_s)
            if not found and not options.first_only:
                found = failed(folder, ("-n", "2", "--no-loadscope-reorder"), options.timeout_s)
            taken_s = time.monotonic() - started
        print(
            f"{number:2} {'caught  ' if found else 'SURVIVED'} {taken_s:5.0f} s  {mutant.name}  {found[:160]}",
            flush=True,
        )
        if not found:
            survived.append(mutant.name)
    print(f"{len(survived)} survived")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
