"""The offload store: tensors moved to a file and back."""

import torch

from fxpipe.runtime.offloader import TIMEOUT, Disk, Offloader


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
