"""Each deliberate bug of `tests/mutants.py` can be planted, and the default run has the tests that are to find it."""

from __future__ import annotations

from tests import programs
from tests.conftest import WIDE
from tests.mutants import MUTANTS, PROGRAMS, ROOT, misfits


def test_every_mutant_applies() -> None:
    assert not misfits()


def test_the_default_run_has_the_first_tests_of_every_mutant() -> None:
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    listed = [*files, *(f"{PROGRAMS}::test_program[{name}]" for name in programs.PROGRAMS)]
    listed = [name for name in listed if not name.startswith(WIDE)]
    for mutant in MUTANTS:
        folders = [word for word in mutant.first if word.startswith("tests/")]
        words = mutant.first[-1].split(" or ") if "-k" in mutant.first else [""]
        assert any(name.startswith(tuple(folders)) and any(word in name for word in words) for name in listed), (
            mutant.name
        )
        for folder in folders:
            assert any(name.startswith(folder) for name in listed), f"{mutant.name}: {folder}"
