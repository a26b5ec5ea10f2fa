"""Random programs: what a user may do with a model, under every setting, must equal plain data parallel or be refused by name.

A case is a seed: it gives an architecture (`random_models`), a setting (stage, ranks, precision, tiers, optimizer) and
a list of user calls. The same program text runs twice: on real ranks with the engine, and on plain replicas of the model
in one process, one per rank, whose gradients are averaged in rank order where DDP would (`Plain`). Programs are generators
that stop where ranks meet; the replicas are moved from one such place to the next together.

    python -m tests.kit.random_programs --seeds 0:1000                  # everything
    python -m tests.kit.random_programs --seeds 17 --without opaque     # some kinds of calls or features of models off
    python -m tests.kit.random_programs --case '…'                      # a reproduction, as a failure prints it

A failure is cut down (calls, blocks, options) while it still fails the same way, and printed as such a line.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import gc
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
import torch
import torch._dynamo  # optimizers do so on first use, which takes seconds: here once, and not in each rank
from torch import Tensor

import hf_zero as zero
from tests.kit.pool import RankFailure, RankPool
from tests.kit.random_calls import KINDS, MORE_OPTIMIZERS, OPTIMIZERS, Case, Op, Program, Setting, User, own
from tests.kit.random_models import FEATURES, Arch, Block, random_arch, smaller

# Cases ------------------------------------------------------------------------------------------------------------------


def random_setting(rng: random.Random, ranks: tuple[int, ...], stages: tuple[int, ...]) -> Setting:
    world, stage = rng.choice(ranks), rng.choice(stages)
    tiers = ("none", "none", "none", "cpu", "disk")
    return Setting(
        stage=stage,
        ranks=world,
        dtype=rng.choice(("no", "no", "bf16")),
        offload_optimizer=rng.choice(tiers) if world == 1 or stage > 0 else "none",
        offload_params=rng.choice(tiers) if world == 1 or stage == 3 else "none",
        optimizer=rng.choice((*OPTIMIZERS, "sgd")),
        groups=rng.choice((1, 2)),
        left_out=rng.random() < 0.15,
    )


def random_extras(rng: random.Random, setting: Setting) -> Setting:
    """Settings that came later, from numbers of their own: the rest of a seed's case is as it was."""
    replicas = 1 if setting.stage == 0 else rng.choice([n for n in (1, 1, 1, 2, 3) if setting.ranks % n == 0])
    optimizer = rng.choice(sorted(MORE_OPTIMIZERS)) if rng.random() < 0.4 else setting.optimizer
    return replace(
        setting,
        replicas=replicas,
        optimizer=optimizer,
        born=rng.random() < 0.25,
        debug=rng.random() < 0.1,
    )


def random_case(
    seed: int,
    off: frozenset[str] = frozenset(),
    ranks: tuple[int, ...] = (1, 2, 2, 3),
    stages: tuple[int, ...] = (0, 1, 2, 3, 3),
) -> Case:
    """Kinds that are off leave the rest of a seed's case as it is."""
    setting = random_setting(random.Random(f"{seed}/setting"), ranks, stages)
    setting = random_extras(random.Random(f"{seed}/extras"), setting)
    arch = random_arch(random.Random(f"{seed}/arch"))
    for name in off & set(FEATURES):
        arch = FEATURES[name](arch)
    rng = random.Random(f"{seed}/ops")
    names = sorted(KINDS)
    fitting = [name for name in names if name not in off and KINDS[name].fits(setting, arch)]
    ops = []
    for _ in range(rng.choice((6, 9, 12))):
        op = Op(rng.choice(names), rng.randrange(10**6))
        ops.append(op if op.kind in fitting else Op(random.Random(op.seed).choice(fitting), op.seed))
        if rng.random() < 0.4:
            ops.append(Op("step", rng.randrange(10**6)))
    return Case(seed, setting, arch, tuple(ops))


# The oracle -------------------------------------------------------------------------------------------------------------


class Plain:
    """The oracle: all ranks of plain data parallel in one process."""

    def __init__(self, case: Case, folder: str, refused: dict[str, str]) -> None:
        self.users = [User(case, rank, folder, refused) for rank in range(case.setting.ranks)]
        sent: list[dict[str, Tensor]] = []
        for user in self.users:
            user.sent = sent
        for user in self.users:
            user.start(sharded=False)

    def run(self, program: Callable[[User], Program]) -> None:
        programs = [program(user) for user in self.users]
        replies: list[Any] = [None] * len(programs)
        while True:
            requests = [self._send(p, reply) for p, reply in zip(programs, replies)]
            if requests[0] is None and not any(requests):
                return
            if None in requests or len({(r[0], r[1]) for r in requests if r}) > 1:
                raise RuntimeError(f"the replicas meet at different places: {requests}")
            replies = self._meet([r for r in requests if r])

    @staticmethod
    def _send(program: Program, reply: Any) -> tuple[str, int, Any] | None:
        try:
            return program.send(reply)
        except StopIteration:
            return None

    def _meet(self, requests: list[tuple[str, int, Any]]) -> list[Any]:
        kind, rank, value = requests[0]
        match kind:
            case "average":
                self._average()
            case "buffers":
                self._share_buffers()
            case "from":
                value = requests[rank][2]
                return [copy.deepcopy(value) for _ in requests]
        return [None] * len(requests)

    def _average(self) -> None:
        """As DDP: gradients of all ranks, summed in rank order; none where no rank has one."""
        for params in zip(*(user.model.parameters() for user in self.users)):
            grads = [p.grad for p in params]
            if all(grad is None for grad in grads):
                continue
            whole = [torch.zeros_like(p) if grad is None else grad for p, grad in zip(params, grads)]
            total = whole[0].clone()
            for grad in whole[1:]:
                total = total + grad
            for p in params:
                p.grad = total.clone() * (1.0 / len(params))

    def _share_buffers(self) -> None:
        first = dict(self.users[0].model.named_buffers())
        for user in self.users[1:]:
            for name, buffer in user.model.named_buffers():
                buffer.data.copy_(first[name])  # unseen by graphs that keep it


# Running ----------------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What one rank, or the oracle for one rank, saw."""

    notes: list[tuple[str, Any]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


def whole(u: User) -> Program:
    """The program of a case, and at its end a look at everything."""
    for place, op in enumerate(u.case.ops):
        u.begin(place, op)
        yield from KINDS[op.kind].run(u)
    u.begin(len(u.case.ops), Op("end", 0))
    yield from u.look()
    for name, p in sorted(u.params().items()):
        u.note(f"full {name}", zero.full_parameter(p) if u.engine is not None else p)


def ending(u: User, outcome: Outcome) -> None:
    model, optimizer = u.model.state_dict(), u.optimizer.state_dict()
    outcome.notes, outcome.refused = u.notes, u.refused
    if u.rank == 0:
        outcome.params = {name: value.detach().float().numpy() for name, value in model.items()}
        for index, entries in optimizer["state"].items():
            for key, value in entries.items():
                if value is not None:
                    outcome.state[f"{key} of {index}"] = torch.as_tensor(value).detach().float().numpy()
        outcome.state["options"] = numpy.array([[g["lr"], len(g["params"])] for g in optimizer["param_groups"]])


def run_rank(rank: int, world: int, case: Case, folder: str, limit_s: float) -> Outcome:
    """On a real rank."""
    outcome = Outcome()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    user: User | None = None
    with open(Path(folder) / f"rank{rank}.txt", "w") as log:
        faulthandler.dump_traceback_later(max(1.0, limit_s - 2.0), file=log)
        try:
            user = User(case, rank, folder, sharded=True)
            user.start(sharded=True)
            own(whole(user))
            ending(user, outcome)
            if user.engine is not None:
                user.engine.wait_for_save()
                user.engine.detach()
        except BaseException as error:
            place = f"{user.place} {user.op.kind}" if user is not None else "the start"
            raise Stopped(f"at {place}: {type(error).__name__}: {error}") from error
        finally:
            faulthandler.cancel_dump_traceback_later()
    del user
    gc.collect()
    return outcome


def _nothing(rank: int, world: int) -> None:
    pass


class Stopped(Exception):
    """Where a rank's program ended, and why."""


def run_plain(case: Case, folder: str, refused: dict[str, str]) -> list[Outcome]:
    plain = Plain(case, folder, refused)
    try:
        plain.run(whole)
    finally:  # programs of two ranks in one process, by turns: the one that leaves last puts back what the other had set
        torch.autograd.set_detect_anomaly(False)
    outcomes = [Outcome() for _ in plain.users]
    for user, outcome in zip(plain.users, outcomes):
        ending(user, outcome)
    return outcomes


# Largest difference, as a share of the largest element of the same kind of value. fp32: sums in another order. bf16: one
# rounding is 2^-9 of a value; a weight's gradient is made of products of such, and where a weight is used more than once the
# engine's reads are rounded apart from the replica's: a few roundings, carried on over a dozen steps.
BOUNDS = {"no": 2e-5, "bf16": 3e-2}


def differences(case: Case, ours: list[Outcome], plain: list[Outcome]) -> str:
    """The first thing that is not equal; empty if all is."""
    bound = BOUNDS[case.setting.dtype]
    for rank, (mine, theirs) in enumerate(zip(ours, plain)):
        if mine.refused != ours[0].refused:
            return f"rank {rank} refused {mine.refused}, rank 0 {ours[0].refused}"
        labels = [label for label, _ in mine.notes], [label for label, _ in theirs.notes]
        if labels[0] != labels[1]:
            return f"rank {rank} noted {labels[0]}, expected {labels[1]}"
        for (label, value), (_, expected) in zip(mine.notes, theirs.notes):
            if words := _gap(value, expected, bound):
                return f"rank {rank} at {label}: {words}"
    first, expected_first = ours[0], plain[0]
    for what, mine_, theirs_ in (
        ("parameter or buffer", first.params, expected_first.params),
        ("optimizer state", first.state, expected_first.state),
    ):
        if sorted(mine_) != sorted(theirs_):
            return f"{what}: found {sorted(set(mine_) - set(theirs_))} more, {sorted(set(theirs_) - set(mine_))} less"
        scales: dict[str, float] = {}
        for name, value in theirs_.items():
            key = name.split(" of ")[0] if what == "optimizer state" else "parameters"
            scales[key] = max(scales.get(key, 0.0), float(numpy.abs(value).max()) if value.size else 0.0)
        for name, value in theirs_.items():
            key = name.split(" of ")[0] if what == "optimizer state" else "parameters"
            if words := _gap(mine_[name], value, bound, 0.05 * scales[key]):
                return f"{what} {name}: {words}"
    return ""


WORST: Counter[str] = Counter()


def _gap(value: Any, expected: Any, bound: float, floor: float = 1e-2) -> str:
    value, expected = numpy.asarray(value, "f8"), numpy.asarray(expected, "f8")
    if value.shape != expected.shape:
        return f"shape {value.shape} instead of {expected.shape}"
    if not value.size:
        return ""
    if not numpy.isfinite(expected).all():
        return "the oracle is not finite"
    gap = numpy.abs(value - expected).max() / max(numpy.abs(expected).max(), floor)
    if gap <= bound:
        WORST[str(bound)] = max(WORST[str(bound)], gap)
        return ""
    return f"off by {gap:.1e} ({value.ravel()[:3]} instead of {expected.ravel()[:3]})"


class Runner:
    """Runs cases on pools that stay up; a case that fails hard costs a pool."""

    def __init__(self, limit_s: float = 30.0, pools: dict[int, RankPool] | None = None) -> None:
        self.limit_s = limit_s
        self._pools = pools or {world: RankPool(world) for world in (1, 2, 3, 4)}
        self.refusals: Counter[str] = Counter()

    def check(self, case: Case, expected: Case | None = None) -> str:
        """What is wrong with this case; empty if nothing is. `expected`: what the oracle runs, if not the same."""
        folder = tempfile.mkdtemp(prefix="hf_zero_program_")
        pool = self._pools[case.setting.ranks]
        try:
            try:
                pool.run(_nothing)  # a fresh pool's start is no part of the case's time
                ours = pool.run(run_rank, case, folder, self.limit_s, timeout_s=self.limit_s)
            except RankFailure as failure:
                where = [path.read_text() for path in sorted(Path(folder).glob("rank*.txt"))]
                if stopped := re.search(r"Stopped: (at .*)", str(failure)):
                    return f"error: {stopped[1]}\n{failure}"
                word = "crash" if "died" in str(failure) else "hang"
                places = re.findall(r"random_calls\.py\", line \d+ in (\w+)\n.* in whole", "\n".join(where))
                return "\n".join([f"{word} in {', '.join(dict.fromkeys(places))}", str(failure), *where])
            for reason in ours[0].refused.values():
                self.refusals[re.sub(r"'[^']*'|\d+", "…", reason)[:150]] += 1
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    plain = run_plain(expected or case, folder, ours[0].refused)
            except Exception as error:
                return f"invalid: {type(error).__name__}: {error}\n{traceback.format_exc()}"
            wrong = differences(case, ours, plain)
            return f"mismatch: {wrong}" if wrong else ""
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.stop()

    def shrink(self, case: Case, wrong: str, seconds: float = 60.0) -> tuple[Case, str]:
        """The smallest case found that still goes wrong in the same way."""
        until = time.monotonic() + seconds

        def simpler(now: Case) -> Iterator[Case]:
            half = len(now.ops) // 2
            if half > 1:
                yield replace(now, ops=now.ops[half:])
                yield replace(now, ops=now.ops[:half])
            plain = Setting(stage=now.setting.stage)
            for name in (
                "offload_params",
                "offload_optimizer",
                "groups",
                "left_out",
                "dtype",
                "replicas",
                "born",
                "debug",
                "ranks",
                "optimizer",
            ):
                if getattr(now.setting, name) != getattr(plain, name):
                    yield replace(now, setting=replace(now.setting, **{name: getattr(plain, name)}))
            for i in range(len(now.ops)):
                yield replace(now, ops=now.ops[:i] + now.ops[i + 1 :])
            for arch in smaller(now.arch):
                yield replace(now, arch=arch)

        tried: set[Case] = set()
        progress = True
        while progress:
            progress = False
            for other in simpler(case):
                if time.monotonic() > until:
                    return case, wrong
                if other in tried:
                    continue
                tried.add(other)
                found = self.check(other)
                if found and _sort(found) == _sort(wrong):
                    case, wrong, progress = other, found, True
                    break
        return case, wrong


def _sort(wrong: str) -> str:
    """What makes two failures the same: the sort, and of errors the type."""
    head = wrong.splitlines()[0]
    error = re.match(r"error: at \w+ ?\w*: (\w+):", head)
    return error[1] if error else re.split(r"[: ]", head)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:100", help="one, or from:to")
    parser.add_argument("--kinds", default="", help="only these, comma-separated (a train step is always there)")
    parser.add_argument("--without", default="", help="all but these")
    parser.add_argument("--ranks", default="1,2,2,3")
    parser.add_argument("--stages", default="0,1,2,3,3")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for one case")
    parser.add_argument(
        "--shrink", type=float, default=60.0, help="seconds for making a failure smaller; 0: not at all"
    )
    parser.add_argument("--case", help="a reproduction to run instead of seeds")
    args = parser.parse_args()
    names = set(KINDS) | set(FEATURES)
    chosen, dropped = set(filter(None, args.kinds.split(","))), set(filter(None, args.without.split(",")))
    if unknown := (chosen | dropped) - names:
        parser.error(f"no such kinds: {', '.join(sorted(unknown))}; there are {', '.join(sorted(names))}")
    off = frozenset((names - chosen - {"step"} if chosen else set()) | dropped)
    ranks, stages = (tuple(int(n) for n in text.split(",")) for text in (args.ranks, args.stages))
    first, _, last = args.seeds.partition(":")
    cases: Iterator[Case] = (
        iter([_read(args.case)])
        if args.case
        else (random_case(seed, off, ranks, stages) for seed in range(int(first), int(last or int(first) + 1)))
    )
    runner = Runner(args.limit)
    failures: list[str] = []
    count, began = 0, time.monotonic()
    seen: Counter[str] = Counter()
    try:
        for case in cases:
            count += 1
            seen.update(case.kinds)
            wrong = runner.check(case)
            if wrong:
                print(f"--- seed {case.seed}: {wrong.splitlines()[0]}", flush=True)
                if args.shrink:
                    case, wrong = runner.shrink(case, wrong, args.shrink)
                print(f"{wrong}\n  --case {str(case)!r}\n", flush=True)
                failures.append(f"{case.seed}: {wrong.splitlines()[0][:160]} [{' '.join(sorted(case.kinds))}]")
            elif count % 25 == 0:
                print(f"{count} cases, {len(failures)} failed, {time.monotonic() - began:.0f} s", flush=True)
    finally:
        runner.close()
    print(
        f"{count} cases in {time.monotonic() - began:.0f} s, {len(failures)} failed; worst that passed: {dict(WORST)}"
    )
    print("refused:", *(f"\n  {n} × {reason}" for reason, n in runner.refusals.most_common()))
    print("calls:", ", ".join(f"{name} {seen[name]}" for name in sorted(names)))
    print("failed:", *(f"\n  {line}" for line in failures))
    return 1 if failures else 0


def _read(text: str) -> Case:
    """A case as it prints itself."""
    case = eval(text, {"Case": Case, "Setting": Setting, "Arch": Arch, "Block": Block, "Op": Op})
    if not isinstance(case, Case):
        raise SystemExit(f"not a case: {text}")
    return case


if __name__ == "__main__":
    from tests.kit import random_programs  # under its own name, which the ranks import …

    sys.modules["__main__"] = types.ModuleType("__main__")  # … and not a second time as this
    sys.exit(random_programs.main())
