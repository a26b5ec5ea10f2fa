"""Every Python block of the documents runs as it stands, on two ranks; README.md's are whole files (`test_readme.py`)."""

from __future__ import annotations

import pytest

from tests.kit.launch import Results, launch
from tests.test_docs import PAGES, ROOT, blocks_of

WITH_CODE = [page for page in PAGES if page != ROOT / "README.md" and blocks_of(page, "python")]
BLOCKS = [f"{page.name} {number}" for page in WITH_CODE for number in range(len(blocks_of(page, "python")))]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch("snippets_job", tmp_path_factory.mktemp("snippets"), *map(str, WITH_CODE))


@pytest.mark.gloo
@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs(results: Results, block: str) -> None:
    results(block)
