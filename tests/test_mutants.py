"""Each deliberate bug of `tests/mutants.py` can be planted, and the default run has the tests that are to find it."""

from __future__ import annotations

import subprocess
import sys

from tests.mutants import MUTANTS, ROOT, misfits


def test_every_mutant_applies() -> None:
    assert not misfits()


def test_the_default_run_has_the_first_tests_of_every_mutant() -> None:
    paths = {word for mutant in MUTANTS for word in mutant.first if word.startswith("tests/")}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *sorted(paths)]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for mutant in MUTANTS:
        folders = tuple(word for word in mutant.first if word.startswith("tests/"))
        words = mutant.first[-1].split(" or ") if "-k" in mutant.first else [""]
        assert any(name.startswith(folders) and any(word in name for word in words) for name in listed), mutant.name
        for folder in folders:
            assert any(name.startswith(folder) for name in listed), f"{mutant.name}: {folder}"
