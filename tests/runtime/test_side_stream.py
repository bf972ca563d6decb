"""Functions that a thread runs beside the ops."""

import weakref
from concurrent.futures import Future
from functools import partial

import torch

from fxpipe.runtime.ranks import side_stream


def test_a_wait_ends_when_the_memory_of_the_function_is_free(monkeypatch):
    """Else it depends on the thread's turn of the interpreter whether the next op takes new memory."""
    alive: list[bool] = []

    class Watched(Future):
        def set_result(self, result):
            alive.append(tensor() is not None)
            super().set_result(result)

    monkeypatch.setattr(side_stream, "Future", Watched)
    operand = torch.zeros(3)
    tensor, function = weakref.ref(operand), partial(torch.Tensor.numel, operand)
    del operand
    begun = side_stream.InThread("tested").run(function)
    del function
    begun.wait()
    assert alive == [False]
