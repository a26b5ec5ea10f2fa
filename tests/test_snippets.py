"""Every Python block of the documents runs as it stands, on two ranks; every command of theirs is one that its parser takes."""

from __future__ import annotations

import pytest

from tests.kit.launch import Results, launch
from tests.test_docs import PAGES, blocks_of

WITH_CODE = [page for page in PAGES if blocks_of(page, "python")]
BLOCKS = [f"{page.name} {number}" for page in WITH_CODE for number in range(len(blocks_of(page, "python")))]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch("snippets_job", tmp_path_factory.mktemp("snippets"), *map(str, WITH_CODE))


@pytest.mark.gloo
@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs(results: Results, block: str) -> None:
    results(block)
