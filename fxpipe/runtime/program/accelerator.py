"""The door to accelerators: all that differs between a GPU and the CPU, on ``torch.accelerator``.

``cuda`` (NVIDIA's GPUs, and AMD's under ROCm) is what runs today; another kind that torch knows needs a line
in ``BACKENDS``.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from mmap import mmap

import torch
import torch.distributed as dist
from torch.utils.dlpack import from_dlpack

from fxpipe.errors import RunError

#: Kinds of accelerators, with the backend of torch.distributed that sends from their memory.
BACKENDS = {"cuda": "nccl", "xpu": "xccl"}

#: Streams of a priority that torch has; further ones are the first again.
STREAMS = 32
#: The processors of a GPU that a communicator takes at most, as those of a waiting receive spin; enough for
#: most of a link's bandwidth between GPUs of a machine.
MOST_CTAS = 4

#: What torch's process groups of nccl read when they are made, unless the user has set it.  A communicator of
#: two ranks carries messages in one direction: there is nothing else to serialize.  An error of the GPU or of
#: nccl ends the run with the op and the ranks (``watch.py``): torch's watchdog is not to end it before.
_SETTINGS = {
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}


def default_device() -> torch.device:
    """This process's accelerator if there is one (shared where processes outnumber them), else the CPU."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type not in BACKENDS:
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
    return torch.device(kind.type, index)


def is_accelerator(device: torch.device) -> bool:
    return device.type in BACKENDS


def check_supported(device: torch.device) -> None:
    """Raise RunError for a kind of device on which programs do not run."""
    if device.type not in ("cpu", *BACKENDS):
        raise RunError(
            f"The model lies on {device}, and programs run on {', '.join(('cpu', *BACKENDS))}. "
            "Move it to one of them."
        )
    if is_accelerator(device) and torch.accelerator.current_accelerator(check_available=True) is None:
        raise RunError(
            f"The model lies on {device}, and torch finds no such device here. Compile it on the CPU or the "
            'meta device: costs="H100" makes the schedule for a GPU that is elsewhere.'
        )


def select(device: torch.device) -> None:
    """Make it the current device of this process, which ``torch.device("cuda")`` in a program means."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """``select`` for a block."""
    return torch.accelerator.device_index(device.index if is_accelerator(device) else None)


def identity(device: torch.device) -> tuple[str, str]:
    """The name of a device, and what tells it from all others of its machine ("" for the CPU)."""
    if not is_accelerator(device):
        return device.type, ""
    properties = torch.get_device_module(device).get_device_properties(device)
    return properties.name, str(getattr(properties, "uuid", device.index))


def memory_size(device: torch.device) -> int:
    """The bytes of an accelerator's memory."""
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)


def device_allocations(device: torch.device) -> int:
    """How often torch's allocator has asked a device for memory; does not wait for it."""
    if not is_accelerator(device):
        return 0
    return int(torch.accelerator.memory_stats(device).get("num_device_alloc", 0))


def pinned_memory(size: int) -> torch.Tensor:
    """A flat tensor of bytes in memory that the device copies from and to in the background.

    torch's own allocator of such memory takes the next power of two: 64 GiB for 33.
    Raises RunError where the system does not pin so much.
    """
    if not torch.cuda.is_available():
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    tensor = torch.frombuffer(mmap(-1, size), dtype=torch.uint8)
    address, runtime = tensor.data_ptr(), torch.cuda.cudart()
    if error := int(runtime.cudaHostRegister(address, size, 0)):
        raise RunError(
            f"{size} bytes of this machine's memory cannot be pinned for offloaded activations (CUDA error "
            f"{error}). Offload less, or allow more: ulimit -l."
        )
    weakref.finalize(tensor, runtime.cudaHostUnregister, address)
    return tensor


def memory_pool(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """A function whose block takes the memory of this thread's tensors from a new pool of its own."""
    if device.type != "cuda":
        return contextlib.nullcontext
    return partial(torch.cuda.use_mem_pool, torch.cuda.MemPool(), device)


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as another tensor, which the caller keeps alive for as long as the memory is used.

    A backend of messages tells the allocator to hold a tensor's memory, once the tensor is gone, until all
    that its stream has by then is over, receives that were posted ahead too.  The allocator does not know
    this memory as its own.
    """
    alias: torch.Tensor = from_dlpack(tensor.__dlpack__(stream=-1))  # on the stream at hand
    return alias


def synchronize(device: torch.device) -> None:
    """Block until all that was started on a device is over."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def event(device: torch.device, *, timing: bool = False) -> torch.Event:
    """A new event of an accelerator; ``timing``: also for ``elapsed_time``."""
    return torch.Event(device, enable_timing=timing)


def stream(device: torch.device) -> torch.Stream:
    """A new stream of an accelerator."""
    return torch.Stream(device)


def current_stream(device: torch.device) -> torch.Stream:
    """The stream on which the ops of this thread run."""
    return torch.accelerator.current_stream(device)


_stream_to_host = cache(stream)


def on_host(device: torch.device, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Start to compute a small tensor and to copy it to the CPU; return the function that waits for it.

    On a stream of its own: a device copies one thing after the other to the CPU, and ops that come next are
    not to wait until all activations that are being offloaded have arrived there.
    """
    if not is_accelerator(device):
        value = function()
        return lambda: value
    ready, side = current_stream(device).record_event(), _stream_to_host(device)
    with side:
        side.wait_event(ready)
        copied = function().to("cpu", non_blocking=True)
        over = side.record_event()

    def known() -> torch.Tensor:
        over.synchronize()
        return copied

    return known


def generator(device: torch.device) -> torch.Generator:
    """The default generator of a device, from which its random ops draw."""
    if not is_accelerator(device):
        return torch.default_generator
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    default: torch.Generator = torch.get_device_module(device).default_generators[index]
    return default


def queues(device: torch.device) -> int | None:
    """The number of hardware queues that the environment gives a device; None if it does not say, as when the
    device was in use before fxpipe was imported."""
    number = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return int(number) if device.type == "cuda" and number.isdigit() else None


@contextlib.contextmanager
def communicator_settings() -> Iterator[None]:
    """The environment in which communicators are made; the user's own process groups keep theirs."""
    settings = {name: value for name, value in _SETTINGS.items() if name not in os.environ}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            del os.environ[name]


def communicator_options(device: torch.device) -> dict[str, object]:
    """Further arguments of ``torch.distributed.new_group`` for a backend of a device's kind.

    The communicator is made at once, with a priority that lets its kernels in between those of large ops.
    """
    if not is_accelerator(device):
        return {}
    if device.type != "cuda":
        return {"device_id": device}
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # torch writes into it: one each
    options.config.min_ctas, options.config.max_ctas = 1, MOST_CTAS
    return {"device_id": device, "pg_options": options}
