"""What ``benchmarks/published.py`` computes itself, and the form of its file of runs."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def published(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)  # as for a script
    return importlib.import_module("published")


def test_flops_are_those_of_the_sources(published):
    """72 · layers · width² · (1 + length / 6 width + words / 12 layers width) of arXiv 2104.04473, but for
    biases and norms."""
    shape = {"layers": 4, "width": 64, "heads": 4, "vocabulary": 512, "length": 128}
    model = published.Decoder(**shape, bias=False)
    norms = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    flops = published.flops_of_token(shape, published.in_products(model) - norms)
    assert flops == pytest.approx(72 * 4 * 64**2 * (1 + 128 / (6 * 64) + 512 / (12 * 4 * 64)))


def test_first_and_last_stages_have_fewer_layers(published):
    assert published.layers_of_stages(30, 8, 1) == [3, 4, 4, 4, 4, 4, 4, 3]
    assert published.split_points([1, 2, 1]) == ["layers.1", "layers.3"]
    assert published.split_points([0, 1, 1, 0]) == ["layers.0", "layers.1", "norm"]
    with pytest.raises(ValueError, match="31 layers"):
        published.layers_of_stages(31, 8, 1)


@pytest.mark.parametrize(("gain", "other", "same"), [(1.1, 1.3, True), (0.9, 0.5, True), (1.1, 0.9, False)])
def test_signs(published, gain, other, same):
    assert published.same_sign(gain, other) is same


@pytest.mark.parametrize(("ratio", "near"), [(1.14, True), (0.86, True), (1.16, False), (0.84, False)])
def test_bars(published, ratio, near):
    assert published.within(ratio, 0.15) is near


def test_every_run_has_a_source_and_one_figure():
    file = tomllib.loads((BENCHMARKS / "published.toml").read_text())
    assert all(source["where"] and source["assumed"] for source in file["source"].values())
    for group in file["group"]:
        names = [run["name"] for run in group["runs"]]
        assert len(set(names)) == len(names)
        for run in group["runs"]:
            whole = {**file["source"][group["source"]], **group, **run}
            assert ("rate" in whole) != ("mfu" in whole)
            assert "model" not in whole or whole["model"] in file["model"]
            assert run.get("against", names[0]) in names


def test_the_page_has_the_counts_of_the_results():
    results = (BENCHMARKS / "results/published.txt").read_text()
    page = (BENCHMARKS.parent / "docs/predictions.md").read_text()
    (runs,) = re.findall(r"^MFU: (\d+ of \d+) within 20%", results, re.MULTILINE)
    ((signs, gains),) = re.findall(
        r"^Gains: (\d+ of \d+) signs right, (\d+ of \d+) within", results, re.MULTILINE
    )
    assert f"{runs} runs are within 20%" in page
    assert f"{signs} signs are right, {gains} gains within 15%" in page
