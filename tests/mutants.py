"""Deliberate bugs: each is planted in a copy of the package, and the default tests must fail there. `make mutants` runs it.

A mutant is one replaced passage. `first` names the tests that most likely fail; if they all pass, the whole default run
follows. A mutant survives when that passes too: then a test is missing.
"""

from __future__ import annotations

import argparse
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
        "direct reduce gives the sum instead of the mean",
        "comm/wire.py",
        "        torch.add(parts[0], parts[1], out=out)\n        rest = parts[2:]",
        "        torch.add(parts[0], parts[1], out=out)\n        out.mul_(len(parts))\n        rest = parts[2:]",
        program("loops"),
    ),
    Mutant(
        "a reduced gradient has the wrong sign in one element",
        "comm/wire.py",
        "        torch.add(parts[0], parts[1], out=out)\n        rest = parts[2:]",
        "        torch.add(parts[0], parts[1], out=out)\n        out[-1:].neg_()\n        rest = parts[2:]",
        program("loops"),
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
        "runtime/values/state_shard.py",
        "            self.device_grad = piece.to(self.dtype, copy=True)\n        else:\n            grad.add_(piece)",
        "            self.device_grad = piece.to(self.dtype, copy=True)\n        else:\n            grad.copy_(piece)",
        program("loops"),
    ),
    Mutant(
        "the second backward's gradient in host memory is added twice",
        "runtime/values/offloaded_shard.py",
        "            self._apply_coefficient(grad)\n            grad.add_(landing)",
        "            self._apply_coefficient(grad)\n            grad.add_(landing, alpha=2)",
        program("loops"),
    ),
    Mutant(
        "gradients held by no_sync are kept in the computing type",
        "runtime/values/bucket.py",
        'self._gather_local(self.take(), Precision.hold_dtype(self.reduce_dtype), "gradients")',
        'self._gather_local(self.take(), self.compute_dtype, "gradients")',
        program("loops or gradients"),
    ),
    Mutant(
        "a backward after no_sync forgets what is held",
        "runtime/values/bucket.py",
        "        _add(self._bucket_views, grads)\n        if self._bucket is None:",
        "        _fill(self._bucket_views, grads)\n        if self._bucket is None:",
        program("loops or gradients"),
    ),
    Mutant(
        "a rank alone forgets the gradient of the backward before",
        "runtime/values/bucket.py",
        "                bucket.copy_(grad)\n            _add(views, grads)",
        "                bucket.copy_(grad)\n            _fill(views, grads)",
    ),
    Mutant(
        "what a later backward adds is doubled before it is reduced",
        "runtime/values/gradients.py",
        "self.local = incoming.clone() if before is None else before + incoming",
        "self.local = 2 * incoming if before is None else before + incoming",
        program("one_tensor_for_all or two_parameters"),
    ),
    Mutant(
        "cleared gradients of some parameters of a span stay",
        "runtime/values/bucket.py",
        "                    grad[piece.here].zero_()",
        "                    pass",
        program("gradients"),
    ),
    Mutant(
        "a gradient that the program replaced is ignored",
        "runtime/gradient_ops.py",
        "        if replaced:\n            self._replace(flat, replaced)",
        "        if len(replaced) > 1:\n            self._replace(flat, replaced)",
        program("gradients"),
    ),
    Mutant(
        "zero_grad(set_to_none=False) does nothing",
        "runtime/gradient_ops.py",
        "                if shard.has_grad:\n                    shard.zero_grad()",
        "                if shard.has_grad:\n                    pass",
    ),
    Mutant(
        "what a bucket lacks of the optimizer's padding is not zero",
        "runtime/values/bucket.py",
        "            self._bucket[self.span.used_numel :].zero_()",
        "            self._bucket[self.span.used_numel :].fill_(1)",
    ),
    # Norms, clipping, overflow
    Mutant(
        "the norm leaves out the last rank",
        "comm/group_wire.py",
        "        for part in parts[1:]:\n            total = total + part",
        "        for part in parts[1:-1]:\n            total = total + part",
        program("clip"),
    ),
    Mutant(
        "clipping leaves out the last span",
        "runtime/optimizers/clipping.py",
        "    for flat in flats:\n        for shard in flat.shards:\n            if pieces is None:",
        "    for flat in flats[:-1]:\n        for shard in flat.shards:\n            if pieces is None:",
        program("clip"),
    ),
    Mutant(
        "a norm of order 1 is not summed over the elements' absolute values",
        "runtime/optimizers/clipping.py",
        "    return powers.sqrt() if order == 2.0 else powers.pow(1.0 / order)",
        "    return powers.sqrt()",
        program("clip or norm"),
    ),
    Mutant(
        "clip_grad_value_ clips at one side only",
        "runtime/optimizers/clipping.py",
        "whole[piece].clamp_(-clip_value, clip_value)",
        "whole[piece].clamp_(max=clip_value)",
        program("clip or value"),
    ),
    Mutant(
        "an offloaded step does not apply the coefficient of clipping",
        "runtime/optimizers/host_step.py",
        "            return torch.mul(grad, coefficient.to(dtype), out=out)",
        "            return out.copy_(grad)",
        program("clip"),
    ),
    Mutant(
        "a rank does not tell the others of an overflow",
        "runtime/optimizers/clipping.py",
        "    return wire.max_scalar(read(wire, local, may_fail=any(flat.storage.uses_disk for flat in flats)))",
        "    return read(wire, local, may_fail=any(flat.storage.uses_disk for flat in flats))",
        ("tests/regressions/test_loss_scaler.py",),
    ),
    # Values
    Mutant(
        "after a step gathered values count as new",
        "runtime/values/unit.py",
        "                flat.stale = flat.stale or flat.span.is_updated\n        if self.policy.keep_full:",
        "        if self.policy.keep_full:",
        program("loops"),
    ),
    Mutant(
        "the masters of a step are not carried to what is gathered",
        "runtime/values/span_values.py",
        "            elif not shard.aliased:\n                self.publish(shard, 0, shard.master.detach())",
        "            elif not shard.aliased:\n                pass",
        program("loops"),
    ),
    Mutant(
        "offloaded masters are published one element off",
        "runtime/values/span_values.py",
        "start, numel, link = shard.start + at, values.numel(), self.storage.link",
        "start, numel, link = max(0, shard.start + at - 1), values.numel(), self.storage.link",
        program("long_arrays"),
    ),
    Mutant(
        "slices of two ranks change places where they are collected",
        "comm/group_wire.py",
        "            landing = own if full is None else full[cuts[rank] : cuts[rank + 1]]\n",
        "            landing = own if full is None else full[cuts[self.size - rank - 1] : cuts[self.size - rank]]\n",
    ),
    Mutant(
        "units are never released",
        "runtime/values/unit.py",
        "        if self.state is State.SHARDED or self.policy.keep_full:\n            return\n        if self.state",
        "        if self.state is not None:\n            return\n        if self.state",
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
        program("loops"),
    ),
    Mutant(
        "ranks reduce two spans of a unit in another order on one rank",
        "runtime/values/unit.py",
        "        for flat in self.trained:\n            if self.wire.size == 1:",
        "        for flat in self.trained if self.wire.rank else self.trained[::-1]:\n            if self.wire.size == 1:",
    ),
    # Writes
    Mutant(
        "`param.data = x` is lost where parameters stay whole",
        "runtime/values/carrying.py",
        "        for index in moved:\n            take_over(flat, unit, index)\n        flat.note_place()",
        "        for index in moved:\n            flat.show(index, flat.views[index])\n        flat.note_place()",
        program("writes"),
    ),
    Mutant(
        "`param.data = x` is lost where parameters are released",
        "runtime/values/carrying.py",
        "            take_over(flat, unit, index, is_guard=True)",
        "            flat.show(index, flat.guards.shown[index])",
        program("writes"),
    ),
    Mutant(
        "a write in place between steps is lost",
        "runtime/values/carrying.py",
        "    carry(flat)\n    flat.note_place()\n\n\ndef carry_given",
        "    flat.note_place()\n\n\ndef carry_given",
        program("writes"),
    ),
    Mutant(
        "a write in a forward is lost at stage 3",
        "runtime/values/carrying.py",
        "        if written:\n            carry(flat)\n            note_written(flat, written)",
        "        if written:\n            note_written(flat, written)",
        program("writes"),
    ),
    Mutant(
        "a write through `.data` inside a forward is not found",
        "runtime/values/carrying.py",
        "if index not in known and digest(flat.views[index].reshape(-1)) != was",
        "if index in known and digest(flat.views[index].reshape(-1)) != was",
        program("writes or data"),
    ),
    Mutant(
        "a write to the optimizer's tensors is not noticed",
        "runtime/values/writes.py",
        "                            edited = counted = True",
        "                            edited = False",
        program("writes or optimizers"),
    ),
    Mutant(
        "edits inside GatheredParameters are those of the rank before",
        "params/gathered.py",
        "wire.broadcast(param.data.view(-1).view(torch.uint8), self._modifier_rank)",
        "wire.broadcast(param.data.view(-1).view(torch.uint8), 0)",
        program("unsharded or access"),
    ),
    # Buffers, flags, options
    Mutant(
        "rank 0's buffers are not sent",
        "runtime/buffers.py",
        "                if buffer is not None and good:",
        "                if buffer is None and good:",
        program("buffer or norm or modules"),
    ),
    Mutant(
        "a frozen parameter goes on being trained",
        "runtime/build.py",
        "        if now == before:\n            return False\n        if self.sharded.config.step_in_backward:",
        "        if now == before or True:\n            return False\n        if self.sharded.config.step_in_backward:",
        program("freezing"),
    ),
    Mutant(
        "options of the optimizer's groups are not compared between ranks",
        "runtime/replicas.py",
        "            self._mark = zlib.crc32(repr(self.named()).encode()) & 0x7FFFFFFF",
        "            self._mark = 0",
        ("tests/runtime/test_debug.py",),
    ),
    Mutant(
        "ranks that initialise differently are not compared",
        "runtime/values/deferred.py",
        "                self._take_print(whole)\n                self._cut(whole, stores=True)",
        "                self._cut(whole, stores=True)",
        ("tests/regressions/test_init_ranks.py",),
    ),
    # Steps
    Mutant(
        "a read does not wait for the offloaded step under way",
        "runtime/offload.py",
        "            if unit.stepping is None:\n                continue\n            try:\n                unit.finish_step()",
        "            if True:\n                continue\n            try:\n                unit.finish_step()",
    ),
    Mutant(
        "a step that raised is not undone",
        "runtime/optimizers/transaction.py",
        "        for param in [*state]:\n            if param not in before:\n                del state[param]",
        "        return ''\n        for param in [*state]:\n            if param not in before:\n"
        "                del state[param]",
        ("tests/test_programs.py", "tests/regressions/test_failed_steps.py", "-k", "failures or failed"),
    ),
    Mutant(
        "the gradients of a backward that raised are used",
        "runtime/training.py",
        "            unit.drop_grads(shards=True)\n        self.offload.backward_broke_off()",
        "            pass\n        self.offload.backward_broke_off()",
    ),
    Mutant(
        "hooks stay after detach",
        "runtime/instance_methods.py",
        "        self._undo += [handle.remove for handle in handles]",
        "        pass",
    ),
    # Storage and checkpoints
    Mutant(
        "the disk tier loses writes behind the first page",
        "tiers/array.py",
        "        self._leave_base()\n        return self._disk.write(self._offset(start), values, on_done)",
        "        self._leave_base()\n        return self._disk.write(self._offset(0), values, on_done)",
        ("tests/conformance/test_tiers.py", "tests/tiers"),
    ),
    Mutant(
        "the disk tier reads one element off",
        "tiers/array.py",
        "        return self._disk.read(self._offset(start), values, on_done)",
        "        return self._disk.read(self._offset(max(0, start - 1)), values, on_done)",
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
        "random states are not loaded",
        "runtime/checkpoints.py",
        "        if len(random) == wire.size:\n            random[wire.rank]",
        "        if len(random) == -1:\n            random[wire.rank]",
        ("tests/conformance/test_checkpoints.py", "tests/checkpoint"),
    ),
    Mutant(
        "replicas all write the optimizer's state of whole matrices",
        "runtime/optimizers/state_pieces.py",
        "                        if rank < (flat.span.shards if flat.span.cuts else 1):",
        "                        if rank < 0:",
        ("tests/conformance/test_checkpoints.py", "tests/checkpoint"),
    ),
    Mutant(
        "parameters of two groups share one span",
        "core/layout.py",
        "            self.optimizer,\n            self.group,\n            self.cohort,",
        "            self.optimizer,\n            self.cohort,",
        program("group or optimizers"),
    ),
)


def misfits() -> list[str]:
    """What is wrong with the list: passages that are not there, or not once."""
    wrong = []
    for mutant in MUTANTS:
        count = (ROOT / "hf_zero" / mutant.file).read_text(encoding="utf-8").count(mutant.old)
        if count != 1:
            wrong.append(f"{mutant.name}: {mutant.file} has its passage {count} times")
        missing = [name for name in mutant.first if name.startswith("tests/") and not (ROOT / name).exists()]
        wrong += [f"{mutant.name}: {name} is not there" for name in missing]
    return wrong


def copied(folder: Path) -> Path:
    """The package and its tests in a folder of their own."""
    for name in ("hf_zero", "tests", "scripts", "benchmarks", "docs", "model_cards", "pyproject.toml", "README.md"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, folder)
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
    if done.returncode != 1:  # not a test that failed: no test fits, a file is not there, pytest itself broke
        raise SystemExit(
            f"pytest {' '.join(arguments)} ended with {done.returncode}: {done.stdout[-300:]} {done.stderr[-300:]}"
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0] if lines else f"pytest ended with 1: {done.stdout[-300:]}"


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
                found = failed(folder, ("-n", "2", "--dist", "loadgroup"), options.timeout_s)
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
