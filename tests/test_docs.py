"""The Python of README.md runs as it stands there, on four ranks."""

import docs_worker
import pytest
import torch
from launch import forked

pytestmark = [pytest.mark.slow, pytest.mark.waits]


def test_readme(tmp_path):
    page = "README.md"
    ran = forked(4, docs_worker.run, page, str(tmp_path), dtype=torch.float32, logs=tmp_path / "logs")
    assert ran.code == 0, ran
    assert all(out.count("ran ") == len(docs_worker.blocks(page)) == 2 for out in ran.stdout), ran
