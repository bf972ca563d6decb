"""How inner loops are compiled; what they compute is tested where they are used."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from fxpipe.schedule.costs import Exchange, StageCost, chain
from fxpipe.schedule.engine import compiled, kernel
from fxpipe.schedule.engine.arrays import schedule_arrays
from fxpipe.schedule.engine.order import Order
from fxpipe.schedule.search.build import build

NAMED = """
import sys
from dataclasses import replace
from fxpipe.schedule.costs import Exchange, StageCost, chain
from fxpipe.schedule.engine.arrays import schedule_arrays
from fxpipe.schedule.engine.order import Order
from fxpipe.schedule.search.build import build
for m in {microbatches}:
    costs = chain([StageCost(1 + k, 1.0, 1.0, 2.0, 1.0) for k in range(4)])
    schedule = build("zb-h1", ranks=4, microbatches=m, costs=costs)
    costs = replace(costs, exchanges=(Exchange({sum}),) * 4)
    arrays = schedule_arrays(costs, schedule.placement, m, exchanges=True)
    assert Order.of(arrays, schedule.order).run() is not None
    print("numba" in sys.modules)
"""


def test_what_is_compiled_need_not_be_kept(monkeypatch):
    """numba raises RuntimeError where neither the package's folder nor the user's can be written to."""

    def unwritable():
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(compiled, "_own_cache", unwritable)

    @compiled.compiled
    def add(a, b):
        return a + b

    assert add(1, 2) == 3
    assert add.compiled.signatures


@pytest.mark.in_ci("0.0")
@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_a_named_schedule_of_some_hundred_ops_needs_no_numba(seconds):
    """One of many ops does, from the call on whose work is too much for Python.

    seconds: of the sums of replicas.
    """
    code = NAMED.format(microbatches=[8, 4000], sum=seconds)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True"]


@pytest.mark.parametrize("sums", [(), (0.5, 0.25, 0.75)])
def test_python_runs_the_ops_as_numba_does(sums):
    """To the bit: the same numbers in the same order."""
    stages = [StageCost(1 + k / 7, 1.3, 0.9 - k / 9, 2.0, 1.0) for k in range(3)]
    costs = replace(chain(stages, 0.1), exchanges=tuple(Exchange(seconds) for seconds in sums))
    schedule = build("zb-h1", ranks=3, microbatches=5, costs=costs)
    arrays = schedule_arrays(costs, schedule.placement, 5, exchanges=True)
    order = Order.of(arrays, schedule.order)
    compiled._compile_waiting()
    fast, found = (kernel.run_ops, kernel.score), []
    for run, value in (fast, tuple(function.py_func for function in fast)):
        end, cause = np.full(len(order.op_ids), -1.0), np.full(len(order.op_ids), -1)
        first, free = np.zeros(3), np.zeros(3)
        turn = np.zeros(len(order.op_ids), np.int64)
        assert run(order.arrays.tables, order.op_ids, 5, 0.0, end, cause, first, free, turn)
        found.append([*end, *cause, *first, *free, *turn, value(first, free, True)])
    assert found[0] == found[1]


def test_functions_call_what_is_compiled_of_others():
    @compiled.compiled
    def twice(x):
        return 2 * x

    names = {"twice": twice}
    exec("def four_times(x): return twice(twice(x))", names)
    four_times = compiled.compiled(names["four_times"])
    assert four_times(3) == 12
    assert names["twice"] is twice.compiled
