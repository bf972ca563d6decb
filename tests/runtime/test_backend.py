"""The backend that carries messages, by where the ranks compute."""

import os
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch import nn

import fxpipe
import fxpipe.runtime.job.process as joined
from fxpipe.codegen.expressions import Aliases, Scope
from fxpipe.runtime.job.backend import Choice, RankPlace, choose
from fxpipe.runtime.job.process import Process
from fxpipe.runtime.program.accelerator import check_supported, communicator_settings, current, queues
from fxpipe.runtime.program.comm import answered, new_buffers, on_wire
from fxpipe.runtime.ranks.connect import _check_streams, _failure, _warn_of_few_queues
from fxpipe.runtime.ranks.distributed import DistributedComm

H100 = "NVIDIA H100 80GB HBM3"


def gpus(
    *identities: str, host: str = "a", visible: int = 8, processes: int | None = None
) -> list[RankPlace]:
    number = len(identities) if processes is None else processes
    return [RankPlace(host, "cuda", H100, identity, visible, number) for identity in identities]


def test_a_gpu_for_each_rank_takes_nccl():
    assert choose(gpus("x", "y")) == Choice("nccl")


def test_processes_that_see_one_gpu_each_take_nccl():
    assert choose(gpus("x", "y", visible=1)) == Choice("nccl")


def test_gpus_of_two_machines_may_have_the_same_identity():
    assert choose([*gpus("0", processes=1), *gpus("0", host="b", processes=1)]) == Choice("nccl")


def test_more_ranks_than_gpus_take_gloo_and_say_so():
    backend, warnings = (
        choose(gpus("x", "y", "x", visible=2)).backend,
        choose(gpus("x", "x", visible=1)).warnings,
    )
    assert backend == "gloo"
    assert len(warnings) == 1
    assert f"Ranks 0 and 1 share one {H100} of a" in warnings[0]
    assert "slow" in warnings[0]


def test_two_ranks_on_one_of_several_gpus_are_a_mistake():
    with pytest.raises(fxpipe.RunError, match=r"Ranks 1 and 2 share .*LOCAL_RANK"):
        choose(gpus("x", "y", "y"))


def test_the_users_nccl_is_refused_where_ranks_share_a_gpu():
    with pytest.raises(fxpipe.RunError, match=r"Ranks 0 and 1 share .* nccl needs one for each rank"):
        choose(gpus("x", "x", visible=1), "nccl")
    places = [replace(place, sharing=True) for place in gpus("x", "x", visible=1)]
    assert choose(places, "nccl") == Choice("nccl")


def test_the_users_gloo_between_gpus_is_taken_with_a_warning():
    choice = choose(gpus("x", "y"), "gloo")
    assert choice.backend == "gloo"
    assert "by gloo, which is slow: make it with nccl" in choice.warnings[0]


def test_different_gpus_are_said():
    places = gpus("x", "y")
    choice = choose([places[0], replace(places[1], name="NVIDIA A100-SXM4-80GB")])
    assert choice.backend == "nccl"
    assert "rank 0 NVIDIA H100 80GB HBM3, rank 1 NVIDIA A100-SXM4-80GB" in choice.warnings[0]


def test_ranks_on_different_kinds_of_devices_are_refused():
    with pytest.raises(fxpipe.RunError, match="Rank 0 computes on cuda and rank 1 on cpu"):
        choose([*gpus("x"), RankPlace("a", "cpu", "cpu", "", 0, 2)])


def test_the_cpu_takes_gloo_or_what_the_user_gives():
    places = [RankPlace("a", "cpu", "cpu", "", 0, 2)] * 2
    assert choose(places) == Choice("gloo")
    assert choose(places, "mpi") == Choice("mpi")


def test_a_rank_with_more_communicators_than_streams_is_refused():
    channels = [(0, other) for other in range(1, 34)]
    with pytest.raises(fxpipe.RunError, match="Rank 0 has 33 communicators, and torch has 32 streams"):
        _check_streams(channels, 34, None)
    _check_streams(channels[:32], 34, 36)


def test_streams_that_share_a_queue_are_refused(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    given = queues(torch.device("cuda", 0))
    with pytest.raises(fxpipe.RunError, match="CUDA_DEVICE_MAX_CONNECTIONS=1 makes the 8 streams of rank 0"):
        _check_streams([(0, 1), (1, 0), 0], 2, given)
    assert queues(torch.device("cpu")) is None
    with pytest.raises(
        fxpipe.RunError, match=r"=32 makes the 36 streams of rank 0 .* Use fewer stages a rank"
    ):
        _check_streams([(0, other) for other in range(1, 33)], 33, 32)


def test_the_environment_of_communicators_is_theirs_alone(monkeypatch):
    warning, errors = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "TORCH_NCCL_RETHROW_CUDA_ERRORS"
    monkeypatch.delenv(warning, raising=False)
    monkeypatch.setenv(errors, "1")
    with communicator_settings():
        assert (os.environ[warning], os.environ[errors]) == ("0", "1")
    assert (os.environ.get(warning), os.environ[errors]) == (None, "1")


def test_programs_name_no_gpu_by_its_index():
    assert Scope(Aliases([])).literal(torch.device("cuda:3")) == 'torch.device("cuda")'


def test_other_kinds_of_devices_are_refused():
    with pytest.raises(fxpipe.RunError, match="lies on mps, and programs run on cpu, cuda, xpu"):
        check_supported(torch.device("mps"))
    check_supported(next(nn.Linear(1, 1).parameters()).device)


def test_the_device_of_a_program_is_current():
    assert [current(torch.device(name)).idx for name in ("cpu", "cuda:1")] == [None, 1]


def test_a_late_message_is_named_with_the_limit():
    what = "a message from rank 0 to rank 1, by nccl,"
    assert _failure(lambda: "", what, timedelta(minutes=10)) is None
    found = _failure(lambda: "TIMEOUT", what, timedelta(minutes=10))
    assert str(found) == f"{what} has not ended after 0:10:00; timeout= of fxpipe.compile allows more"


def test_an_error_of_the_own_device_is_not_another_ranks():
    with pytest.raises(torch.AcceleratorError, match="device-side assert"), answered():
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")


def test_the_device_of_a_second_pipeline_is_selected(monkeypatch):
    selected = []
    monkeypatch.setattr(joined, "select", selected.append)
    monkeypatch.setattr(joined, "_joined", (None, "as before"))
    monkeypatch.setattr(joined.dist, "is_initialized", lambda: True)
    assert Process.join(torch.device("cuda", 1)) == "as before"
    assert selected == [torch.device("cuda", 1)]


def test_each_tensor_of_a_message_is_kept_once(monkeypatch):
    class Group:
        def send(self, tensors, peer, tag):
            return f"sent to {peer}"

    class Sent:
        def __init__(self):
            self.kept = []

        def add(self, work, tensors):
            self.kept += [(work, tensor) for tensor in tensors]

    monkeypatch.setattr("fxpipe.runtime.ranks.distributed.dist.get_group_rank", lambda group, rank: rank)
    cpu, given = torch.device("cpu"), [torch.zeros(2), torch.ones(3)]
    sent = Sent()
    DistributedComm(cpu, cpu, 0, 2, [0, 1], {(0, 1): Group()}, [], None, sent).send(given, 1)
    assert [work for work, _ in sent.kept] == ["sent to 1"] * 2
    assert all(kept is tensor for (_, kept), tensor in zip(sent.kept, given, strict=True))


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint32, torch.bool, torch.complex64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (3, 4), (0, 2)])
def test_messages_of_every_dtype_are_bytes(dtype, shape):
    tensor = torch.ones(shape).to(dtype).T if len(shape) == 2 else torch.ones(shape).to(dtype)
    wired = on_wire(tensor)
    assert (wired.dtype, wired.numel()) == (torch.uint8, tensor.nbytes)
    assert wired.data_ptr() == tensor.data_ptr()


def test_the_parts_of_one_memory_have_their_layout():
    layout = ((2, 3), (1, 2), torch.complex64)
    whole, parts = new_buffers(layout, 3, torch.device("cpu"))
    assert whole.nbytes == 3 * 6 * 8
    assert [(tuple(p.shape), p.stride(), p.dtype) for p in parts] == [layout] * 3
    assert {p.untyped_storage().data_ptr() for p in parts} == {whole.data_ptr()}


STARTED = """
import os, sys, torch
torch.cuda.is_initialized = lambda: {started}
import fxpipe
print(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
"""


@pytest.mark.in_ci("False-32")
@pytest.mark.slow
@pytest.mark.parametrize(("started", "found"), [(False, "32"), (True, "None")])
def test_the_number_of_queues_is_set_where_it_has_an_effect(started, found):
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_DEVICE_MAX_CONNECTIONS"}
    script = STARTED.format(started=started)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == [found], done.stderr


def test_few_queues_are_a_warning(monkeypatch, recwarn):
    gpu = torch.device("cuda", 0)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    _warn_of_few_queues(gpu)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    _warn_of_few_queues(torch.device("cpu"))
    assert not recwarn
    with pytest.warns(UserWarning, match="CUDA was used before fxpipe was imported"):
        _warn_of_few_queues(gpu)
