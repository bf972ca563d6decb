"""The versions of torch: what was tried, and a word on what was not."""

import re
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

import fxpipe
from fxpipe.api.tried_torch import NEWEST, OLDEST, warn_of_untried
from fxpipe.errors import OptionError

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1", "2.15.0+cu132", "built at home"])
def test_what_was_tried_needs_no_word(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_untried(version)


@pytest.mark.parametrize("version", ["2.16.0+cpu", "2.10.2", "3.0.0a0+git1234"])
def test_another_torch_is_told_with_the_remedy(version):
    with pytest.warns(UserWarning, match="tried with torch 2.11 to 2.15") as told:
        warn_of_untried(version)
    assert f"not with {version}," in str(told[0].message)
    assert str(told[0].message).endswith('pip install "torch>=2.11,<2.16".')


def test_a_private_part_that_another_torch_lacks(monkeypatch):
    """compile could not warn: its own import fails."""
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setitem(sys.modules, "fxpipe.api.compile", None)
    with pytest.raises(ImportError) as error:
        fxpipe.__getattr__("compile")
    assert "not with 2.99.0" in error.value.__notes__[0]


def test_sequences_are_not_divided_with_the_oldest_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
    with pytest.raises(OptionError, match=r"needs torch 2\.12 or newer, and this is 2\.11\.0"):
        fxpipe.ContextParallel({"ids": 1})


def test_the_oldest_is_required_and_that_of_the_tests_is_among_them():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={OLDEST[0]}.{OLDEST[1]}" in project["dependencies"]
    pinned = re.search(r"^torch==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert OLDEST <= (int(pinned[1]), int(pinned[2])) <= NEWEST
