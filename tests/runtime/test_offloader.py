"""The offload store: tensors moved to a file and back."""

import types

import pytest
import torch

from fxpipe.errors import RunError
from fxpipe.runtime.program.accelerator import pinned_memory
from fxpipe.runtime.program.offload import TIMEOUT, Disk, Offloader


def test_what_comes_back_from_disk_is_what_went(tmp_path):
    offloader = Offloader(Disk(tmp_path, 1 << 16, TIMEOUT), torch.device("cpu"))
    given = [
        torch.randn(3, 5),
        torch.randn(4, 6, dtype=torch.bfloat16).t(),
        torch.arange(7),
        torch.randn(2, 3, 4).permute(2, 0, 1),
        torch.tensor(1.5, dtype=torch.float64),
        torch.randn(20)[5:9],
    ]
    values, other = [*given], [torch.ones(9)]
    offloader.offload(values, at=0)
    offloader.offload(other, at=1 << 15)
    offloader.wait_offload(values)
    assert not any(isinstance(value, torch.Tensor) for value in values)
    offloader.reload(values)
    offloader.wait_reload(values)
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(values, given, strict=True))
    assert list(tmp_path.iterdir()) == []


def test_as_much_memory_is_pinned_as_the_pool_has(monkeypatch):
    """By a stand-in for CUDA's runtime."""
    calls = []
    runtime = types.SimpleNamespace(
        cudaHostRegister=lambda *given: calls.append(given) or 0, cudaHostUnregister=calls.append
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    size = (1 << 20) + 3
    pool = pinned_memory(size)
    address = pool.data_ptr()
    assert (pool.numel(), calls) == (size, [(address, size, 0)])
    pool.fill_(7)
    del pool
    assert calls[1:] == [address]
    runtime.cudaHostRegister = lambda *given: 2
    with pytest.raises(RunError, match=r"1048579 bytes .* cannot be pinned .*CUDA error 2.* ulimit -l"):
        pinned_memory(size)
