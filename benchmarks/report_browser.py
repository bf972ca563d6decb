"""Tries reports in a headless Chromium: loading, zoom, clicks, keys, search, unfolding, names, frames.

Each pipeline is compiled, saved with measured times that are longer than the predicted ones, and reported;
page is then used as a person would, by the mouse and the keyboard.  Ends with 1 if a check fails.

    python benchmarks/report_browser.py --output benchmarks/results/report_browser.txt
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from devtools import Page, chromium
from report import Report
from torch import nn

import fxpipe
from fxpipe.plan.saved.files import read_plan
from fxpipe.plan.saved.recorded import write_spans
from fxpipe.schedule.ops import Op, OpKind
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.viz.report.write import saved_source, write_report

WIDTH = 128
LEAST_FRAMES, MOST_BYTES = 30, 5_000_000
HOSTILE = "</script><img src=x onerror=hacked=1>"
READY = """new Promise(done => {
  const look = () => document.body?.dataset.ready ? done(performance.now()) : setTimeout(look, 10);
  look();
})"""
FRAMES = """(async () => {
  const {timeline, model} = report, all = model.end, began = performance.now(), most = 90;
  for (let k = 0; k < most; k++) {  // zoom in, move, zoom out
    const size = all * (1 - 0.9 * Math.sin(Math.PI * k / most)), low = (all - size) * k / most;
    timeline.show(low, low + size);
    await new Promise(requestAnimationFrame);
  }
  return most / (performance.now() - began) * 1000;
})()"""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.parts = nn.ModuleDict({"inner": nn.Linear(WIDTH, WIDTH), HOSTILE: nn.Linear(WIDTH, WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.parts[HOSTILE](torch.relu(self.parts["inner"](self.norm(x))))


class Net(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


Net.__name__ = f"Net{HOSTILE}"


def saved(directory: Path, ranks: int, microbatches: int) -> None:
    """Compile and save a pipeline, with the times of a step that ran about as predicted."""
    pipe = fxpipe.compile(
        Net(3 * ranks), (torch.zeros(16, WIDTH),), ranks=ranks, microbatches=microbatches, schedule="zb-h1",
        loss_fn=lambda out, batch: out.pow(2).mean(), check=False,
    )  # fmt: skip
    pipe.save(directory)
    plan, noise = read_plan(directory), random.Random(0)
    for rank, spans in enumerate(simulate(plan.ordered, plan.costs).spans):
        shift = noise.random() * 1e-4

        def end(op: Op, start: float, end: float) -> float:  # all take 1.2 times as long, one op 1.6 times
            return start + (1.6 if (op.kind, op.stage) == (OpKind.W, 2) else 1.2) * (end - start)

        write_spans(
            directory, rank, [(str(op), 2 * s + shift, end(op, 2 * s, s + e) + shift) for op, s, e in spans]
        )


@dataclass
class Checks:
    page: Page
    failed: int = 0
    lines: Callable[[str], None] = print

    def that(self, what: str, found: Any) -> None:
        self.failed += not found
        self.lines(f"  {'ok    ' if found else 'FAILED'} {what}")

    def title(self) -> str:
        return str(self.page.run("document.querySelector('#inspector h2').textContent"))

    def at(self, script: str) -> tuple[float, float]:
        """The middle of an element, or of a span of the timeline given as [layer, rank, from, until]."""
        x, y = self.page.run(f"(() => {{ {_PLACES} return {script}; }})()")
        return x, y


_PLACES = """
  const middle = (element) => {
    const b = element.getBoundingClientRect();
    return [b.x + b.width / 2, b.y + b.height / 2];
  };
  const span = (layer, rank, from, until) => {
    const t = report.timeline, row = t.rowOf(layer, rank), over = t.plot.over.getBoundingClientRect();
    return [over.x + t.plot.valToPos((from + until) / 2, "x"), over.y + row.y + row.height / 2];
  };
  const layer = report.model.predicted, host = document.getElementById("rows");
  const op = (name) => {
    const [rank, k] = layer.places.get(name), t = layer.tracks[rank];
    return span(layer, rank, t.start[k], t.end[k]);
  };
  const gap = (rank, k) => span(layer, rank, ...layer.gap(rank, k));
"""
_ENTER = "dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'}))"


def use(checks: Checks) -> None:
    """Use the page of 4 ranks and 8 microbatches."""
    page, that = checks.page, checks.that
    that("the page has no errors", not page.errors)
    that("nothing is loaded", page.run("performance.getEntriesByType('resource').length") == 0)
    that(
        "hostile names are text",
        page.run("window.hacked === undefined")
        and HOSTILE in page.run("document.querySelector('h1').textContent"),
    )
    text = page.run("document.getElementById('inspector').textContent")
    that("it begins with what the step loses", "What the measured step loses" in text and "rank 0" in text)
    page.click(*checks.at("op('F2.3')"))
    that("a click on an op shows it", checks.title().split() == ["F", "F2.3"])
    text = page.run("document.getElementById('inspector').textContent")
    that("its message has names and shapes", "Receives" in text and "f32[16, 128]" in text)
    that("it names the line of the program", "rank2.py:" in text and "def F2(m):" in text)
    waits = page.run("report.model.predicted.tracks[1].cause.indexOf(1)")
    page.click(*checks.at(f"gap(1, {waits})"))
    that("a click on a gap says what it waits for", checks.title() == "Rank 1 waits for F0.0 of rank 0")
    x, (_, y) = checks.at("[host.getBoundingClientRect().x + 20, span(layer, 1, 0, 1)]")
    page.click(x, y)
    text = page.run("document.getElementById('inspector').textContent")
    that("a click on a rank's name adds up its gaps", checks.title() == "Why rank 1 is idle")
    that("... by what it waits for", "ops of rank 0" in text and "messages on their way" in text)
    page.click(*checks.at(f"gap(1, {waits})"))
    for key, name in (("ArrowRight", "F1.0"), ("ArrowRight", "F1.1")):
        page.key(key)
        that(f"{key} goes on to {name}", checks.title().split()[-1] == name)
    page.key("ArrowUp")
    that("ArrowUp goes to the row above", page.run("report.timeline.selected.layer.name") == "measured")
    wide = page.run("report.timeline.range[1] - report.timeline.range[0]")
    page.wheel(*checks.at("op('F3.0')"), -200)
    page.key("+")
    time.sleep(0.2)
    that("wheel and + zoom", page.run("report.timeline.range[1] - report.timeline.range[0]") < 0.5 * wide)
    page.key("0")
    page.key("/")
    page.type("B1.4")
    page.key("Enter")
    that("/ searches for an op", checks.title().split() == ["B", "B1.4"])
    page.key("f")
    that("f follows the cause", checks.title().split()[-1] != "B1.4")
    page.click(*checks.at("middle(document.querySelector('#held-head button'))"))
    that(
        "the peak says what is live",
        "saved activations" in page.run("document.getElementById('inspector').textContent"),
    )
    page.key("3")
    boxes = "document.querySelectorAll('#graph-view .node').length"
    before = page.run(boxes)
    page.click(*checks.at("middle([...document.querySelectorAll('#graph-view .node.group')][0])"))
    after = page.run(boxes)
    that("a click unfolds a module", after > before)
    page.run(f"document.querySelector('#graph-view .node.group').{_ENTER}")
    unfolded = page.run(boxes)
    that("Enter unfolds, too", unfolded > after)
    page.run("[...document.querySelectorAll('.cluster-title')].at(-1).dispatchEvent(new MouseEvent('click'))")
    that("a click on a title folds", page.run(boxes) < unfolded)
    page.key("/")
    page.type("blocks_4_add")
    page.key("Enter")
    that(
        "search finds an op in the graph",
        checks.title() == "blocks_4_add" and page.run("!!document.querySelector('.node.found')"),
    )
    for number, (name, words) in enumerate(TABS.items(), 1):
        page.key(str(number))
        that(
            f"the part {name!r} has {words!r}",
            words in page.run(f"document.getElementById('{name}').textContent"),
        )
    page.key("1")
    page.resize(420, 800)
    time.sleep(0.2)
    that("a narrow window shows the ranks", page.run("document.getElementById('rows').clientHeight > 100"))
    that(
        "the op that differs the most from its expected time is the first",
        page.run("document.querySelector('#measured tbody td').textContent") == "W2",
    )
    that("it is marked", page.run("document.querySelectorAll('#measured .off').length") == 1)
    that("still no errors", not page.errors)


TABS = {
    "timeline": "critical path",
    "memory": "saved activations",
    "graph": "all stages",
    "stages": "balance",
    "links": "Messages between ranks",
    "measured": "predicted",
    "candidates": "schedule",
    "about": "optimizer",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--screenshots", type=Path, metavar="DIRECTORY", help="light and dark, to be looked at"
    )
    given = parser.parse_args()
    report = Report(f"Reports in a browser (bars: {LEAST_FRAMES} frames a second, {MOST_BYTES / 1e6:g} MB)")
    if given.screenshots is not None:
        given.screenshots.mkdir(parents=True, exist_ok=True)
    rows, failed = [], 0
    with tempfile.TemporaryDirectory() as folder, chromium() as page:
        for ranks, microbatches in ((4, 8), (8, 32), (32, 256)):
            directory = Path(folder) / f"{ranks}x{microbatches}"
            saved(directory, ranks, microbatches)
            began = time.perf_counter()
            path = write_report(saved_source(directory), directory / "report.html")
            seconds = time.perf_counter() - began
            page.open(path.as_uri())
            ready = page.run(READY)
            frames, size = page.run(FRAMES), path.stat().st_size
            page.key("0")
            checks = Checks(page, lines=report.line)
            name = f"{ranks} ranks × {microbatches} microbatches"
            report.line(name)
            checks.that(f"at least {LEAST_FRAMES} frames a second", frames >= LEAST_FRAMES)
            checks.that(f"at most {MOST_BYTES / 1e6:g} MB", size <= MOST_BYTES)
            if ranks == 4:
                use(checks)
            failed += checks.failed
            boxes = page.run(
                "report.model.layers.reduce((n, l) => n + l.tracks.reduce((m, t) => m + t.n, 0), 0)"
            )
            rows.append(
                (name, str(boxes), f"{seconds:.2f}", f"{size / 1e6:.2f}", f"{ready:.0f}", f"{frames:.0f}")
            )
            if given.screenshots is not None:
                for dark in (False, True):
                    page.open(path.as_uri(), dark=dark)
                    page.run(READY)
                    time.sleep(0.3)
                    page.screenshot(given.screenshots / f"{directory.name}{'-dark' if dark else ''}.png")
    report.line()
    report.table(["", "boxes", "written in s", "MB", "ready after ms", "frames a second"], rows)
    report.save(given.output)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
