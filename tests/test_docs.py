"""The Python of pages runs as it stands there, on four processes."""

import docs_worker
import pytest
import torch
from launch import forked

pytestmark = [pytest.mark.slow, pytest.mark.waits]


#: The number of blocks that are whole, by page.
PAGES = {"README.md": 2, "docs/steps.md": 1, "docs/mesh.md": 3}


def test_pages(tmp_path):
    ran = forked(4, docs_worker.run, [*PAGES], str(tmp_path), dtype=torch.float32, logs=tmp_path / "logs")
    assert ran.code == 0, ran
    assert {page: len(docs_worker.blocks(page)) for page in PAGES} == PAGES
    assert all(out.count("ran ") == sum(PAGES.values()) for out in ran.stdout), ran
