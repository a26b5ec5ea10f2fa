"""The command: see `tests.random`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

import tests.random
from tests.random.check import Checker
from tests.random.draw import KINDS, draw
from tests.random.models import Arch
from tests.random.user import Case
from tests.settings import Setting


def main() -> int:
    parser = argparse.ArgumentParser(
        description=tests.random.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0:100", help="one, or from:to")
    parser.add_argument("--kinds", default="", help="only these, comma-separated; training steps are always drawn")
    parser.add_argument("--ranks", default="1,2,2,3")
    parser.add_argument("--stages", default="0,1,2,3,3")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for one program; then it is a hang")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds for making a failure smaller")
    parser.add_argument("--case", help="a program to run instead of seeds, as a failure prints it")
    args = parser.parse_args()
    chosen = {*filter(None, args.kinds.split(","))}
    if unknown := chosen - {*KINDS}:
        parser.error(f"unknown kinds: {', '.join(sorted(unknown))}. Choose from {', '.join(sorted(KINDS))}")
    off = frozenset({*KINDS} - chosen - {"step"} if chosen else ())
    ranks, stages = (tuple(int(n) for n in text.split(",")) for text in (args.ranks, args.stages))
    first, _, last = args.seeds.partition(":")
    cases = (draw(seed, off, ranks, stages) for seed in range(int(first), int(last or int(first) + 1)))
    if args.case:
        cases = (eval(args.case, {"Case": Case, "Setting": Setting, "Arch": Arch}) for _ in range(1))
    checker, began, count = Checker(limit_s=args.limit), time.monotonic(), 0
    failed: list[str] = []
    seen: Counter[str] = Counter()
    try:
        for case in cases:
            count += 1
            seen.update(case.kinds)
            if failure := checker.check(case):
                print(f"--- seed {case.seed} failed: {failure.sort}", flush=True)
                failed.append(f"seed {case.seed}: {failure.sort} ({', '.join(sorted(case.kinds))})")
                print(checker.shrink(failure, args.shrink) if args.shrink else failure, flush=True)
                print(f"Before it was made smaller:\n  python -m tests.random --seeds {case.seed}\n", flush=True)
            if count % 25 == 0:
                print(f"{count} programs, {len(failed)} failed, {time.monotonic() - began:.0f} s", flush=True)
    finally:
        checker.close()
    print("kinds:", ", ".join(f"{name} {seen[name]}" for name in sorted(seen)))
    print(f"{count} programs in {time.monotonic() - began:.0f} s, {len(failed)} failed", *failed, sep="\n  ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
