"""What `make test` leaves out. `make test-wide` runs a part of it, as CI does; `make test-all` runs everything.

Further rows inside a file are marked where they are written (`pytest.mark.wide`, `tests/kit/rows.py`).
"""

from __future__ import annotations

WIDE: tuple[str, ...] = (
    "tests/checkpoint/test_export.py::test_an_export_killed_at_any_call",
    "tests/checkpoint/test_staging.py::test_killed_at_any_call[empty]",
    "tests/checkpoint/test_staging.py::test_killed_at_any_call[files of others]",
    "tests/checkpoint/test_staging.py::test_killed_at_any_call[old]",
    "tests/engine/test_offload.py::test_same_bits_through_copies",
    "tests/engine/test_page_faults.py",
    "tests/huggingface/test_accelerate.py::test_on_two_ranks[stage 0",
    "tests/huggingface/test_disk_bases.py",
    "tests/huggingface/test_evaluation.py",
    "tests/huggingface/test_from_pretrained.py",
    "tests/huggingface/test_trainer.py::test_on_two_ranks[stage 0",
    "tests/scripts/test_benchmark.py",
    "tests/scripts/test_plain_scripts.py",
    "tests/scripts/test_scripts.py",
    "tests/torture/test_elastic.py",
)
"""Files, and tests of files, by the beginning of their names in pytest."""
