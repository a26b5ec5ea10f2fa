"""Delete one file of `hf_zero/compat/` at a time from a copy of the package: which programs fail then? `make compat-matrix`.

Each program runs under one row: stage 3, two ranks, fp32, no tier, or the nearest row that it accepts. By default these are
ordinary programs and a few for each file; `--all` takes hours. What is deleted is the file
and its registration. Names that other folders import of it become empty classes, so the package still imports.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.kit.pool import RankFailure, RankPool
from tests.mutants import ROOT, copied
from tests.oracle import Program, _refusal, fresh_folder, train
from tests.programs import PROGRAMS
from tests.settings import Setting, values

COMPAT = ROOT / "hf_zero" / "compat"
ROW = Setting(stage=3)
LIMIT_S = 90.0
USUAL = (
    "loops.gpt2_clipped_and_accumulated", "loops.t5_shared_embedding", "paths.tied", "optimizers.state_by_parameter",
    "buffers.norms", "compiled.compile_whole", "copies.copies_are_plain_models", "freezing.callbacks", "gradients.grad_edit",
    "graphs.func_grad", "groups.clipped_groups", "paths.loss_on_an_inner_activation", "paths.penalty_on_parameters",
    "reads.weight_reads", "state_dicts.state_dict_gathers_nothing_for_long", "writes.param_replaced", "writes.weight_clip",
)  # fmt: skip
"""Programs of the default run, with all of `services`: four that need no file, and one or more for each file."""
ABSENT = "def __getattr__(name: str) -> type:\n    return type(name, (), {})\n"
"""What stands in for a deleted file whose names other folders import."""


def row_of(program: Program) -> Setting:
    """Return the row nearest to `ROW` that a program accepts."""
    near = {*values(ROW)}
    return max(program.rows, key=lambda row: len(near.intersection(values(row))))


def delete(package: Path, name: str) -> None:
    """Delete one file of `compat/`, with its import and its entry in `observers`."""
    file, init = package / "compat" / f"{name}.py", package / "compat" / "__init__.py"
    source = init.read_text(encoding="utf-8")
    imported = next(node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom) and node.module == name)
    gone = [f"        {each.name}(),\n" for each in imported.names]
    for text in (f"{ast.unparse(imported)}\n", *gone):
        source = source.replace(text, "")
    init.write_text(source, encoding="utf-8")
    file.write_text(ABSENT, encoding="utf-8")


def on_rank(rank: int, world: int, name: str, row: Setting, folder: str, known: str) -> list[str]:
    """Run a program under one row. Return what is wrong.

    Args:
        known: a folder with references; one that is missing is added.
    """
    from tests.comparing import compare

    chosen, (refused, file) = PROGRAMS[name], (PROGRAMS[name].refusal(row), Path(known, f"{name}-{rank}"))
    if refused is not None:
        return _refusal(chosen, row, refused, rank, world, folder)
    if not file.exists():
        plain = Setting(ranks=row.ranks, precision=row.precision)
        file.write_bytes(pickle.dumps(train(chosen, plain, rank, world, f"{folder}/plain", True)))
    ours = train(chosen, row, rank, world, f"{folder}/ours", False)
    return compare(chosen, row, ours, pickle.loads(file.read_bytes()))


def run(names: Sequence[str], known: str) -> dict[str, str]:
    """Run these programs. Return the first line of what is wrong, by program."""
    pools: dict[int, RankPool] = {}
    wrong: dict[str, str] = {}
    for name in names:
        row = row_of(PROGRAMS[name])
        pool = pools.setdefault(row.ranks, RankPool(row.ranks))
        with fresh_folder() as folder:
            try:
                answers = pool.run(on_rank, name, row, folder, known, timeout_s=LIMIT_S)
            except RankFailure as failure:
                wrong[name] = next((line for line in str(failure).splitlines() if "Error: " in line), str(failure))
                continue
        if lines := [line for found in answers for line in found]:
            wrong[name] = lines[0]
    for pool in pools.values():
        pool.stop()
    return wrong


def run_without(name: str, known: str, programs: Sequence[str]) -> dict[str, str]:
    """As `run`, in a copy of the package without one file; an empty name: in a whole copy."""
    with tempfile.TemporaryDirectory(prefix="compat_") as folder:
        copy = copied(Path(folder))
        if name:
            delete(copy / "hf_zero", name)
        found = copy / "found.json"
        command = [sys.executable, "-m", "tests.compat_matrix", "--found", str(found), "--known", known, *programs]
        environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=copy, env=environment, check=True, stderr=subprocess.DEVNULL)
        answer: dict[str, str] = json.loads(found.read_text(encoding="utf-8"))
        return answer


def line_of(name: str, lost: Mapping[str, str]) -> str:
    """Return a line of the table: the file, the number of programs that it alone serves, and the first two."""
    return f"{name + '.py':27} {len(lost):3}  {', '.join([*lost][:2])}".rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make compat-matrix", description=__doc__)
    parser.add_argument("programs", nargs="*", help="names of programs")
    parser.add_argument("--all", action="store_true", help="run all programs")
    parser.add_argument("--only", default="", help="part of a file's name")
    parser.add_argument("--verbose", action="store_true", help="print each program that fails, and why")
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--known", help="a folder in which references are kept for the next run")
    options = parser.parse_args()
    programs = options.programs or [
        name for name in PROGRAMS if options.all or name in USUAL or name.startswith("services.")
    ]
    if options.found is not None:
        options.found.write_text(json.dumps(run(programs, options.known)), encoding="utf-8")
        return 0
    names = [path.stem for path in sorted(COMPAT.glob("*.py")) if path.stem != "__init__" and options.only in path.stem]
    useless = []
    with tempfile.TemporaryDirectory(prefix="known_") as fresh:
        known = options.known or fresh
        whole = run_without("", known, programs)
        for name, why in whole.items():
            print(f"fails in the whole package: {name}: {why}", flush=True)
        for name in names:
            started = time.monotonic()
            lost = {program: why for program, why in run_without(name, known, programs).items() if program not in whole}
            print(line_of(name, lost), f" ({time.monotonic() - started:.0f} s)", flush=True)
            if options.verbose:
                print(*(f"    {program}: {why}" for program, why in lost.items()), sep="\n", flush=True)
            if not lost:
                useless.append(name)
    if useless:
        print(f"No program needs {', '.join(useless)}. Write one, or delete the file.")
    return 1 if useless or whole else 0


if __name__ == "__main__":
    sys.exit(main())
