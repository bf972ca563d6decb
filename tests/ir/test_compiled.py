"""How inner loops are compiled; what they compute is tested where they are used."""

from __future__ import annotations

import numba

from fxpipe.schedule.engine import compiled


def test_what_is_compiled_need_not_be_kept(monkeypatch):
    """numba raises RuntimeError where neither the package's folder nor the user's can be written to."""

    def njit(cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return numba.njit(**options)

    monkeypatch.setattr(compiled, "njit", njit)

    @compiled.compiled
    def add(a, b):
        return a + b

    assert add(1, 2) == 3
    assert add.signatures
