"""How ranks see that they make different calls, and the network interface by which they connect."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import fxpipe
from fxpipe.runtime.job import interface
from fxpipe.runtime.job.calls import CALL, SPACE, different_calls, with_call
from fxpipe.runtime.job.interface import connecting, matching, set_interface
from fxpipe.runtime.job.user_line import called_function, place_of_main_thread
from fxpipe.runtime.ranks.connect import _unbound


def table(*calls: str) -> torch.Tensor:
    return torch.stack([with_call(call, torch.arange(rank, rank + 3)) for rank, call in enumerate(calls)])


def test_the_call_is_the_head_of_an_exchange():
    found = table("step 3 of pipeline 1 (Größe)", "step 3 of pipeline 1 (Größe)")
    assert found.shape == (2, CALL + SPACE)
    assert different_calls(found) is None
    assert found[1, CALL : CALL + 4].tolist() == [1, 2, 3, 0]


def test_another_call():
    message = different_calls(table("step 3", "step 3", "Pipeline.save of pipeline 1"))
    assert message is not None
    assert message.startswith("Rank 2 calls Pipeline.save of pipeline 1, and rank 0 calls step 3. All ranks")


def test_long_calls_are_cut():
    assert different_calls(table("x" * 5000, "x" * 5001)) is None
    assert different_calls(table("y" + "x" * 5000, "x" * 5000)) is not None


def test_long_calls_that_differ_in_the_character_at_the_cut():
    cut = "x" * (8 * CALL - 1)
    message = different_calls(table(cut + "ä", cut + "ä", cut + "中"))
    assert message is not None
    assert message.startswith("Rank 2 calls xxx")


def test_the_function_that_the_user_has_called(monkeypatch):
    """Not the inner ones, of which there is one for each exchange."""
    called = []
    monkeypatch.setattr("fxpipe.api.compile.check_supported", lambda device: called.append(called_function()))
    model = torch.nn.Linear(2, 2)
    with pytest.raises(fxpipe.FxpipeError):
        fxpipe.compile(model, (torch.ones(2, 2),), ranks=0, microbatches=1)
    assert called == ["compile"]
    assert called_function() == ""


def test_the_line_of_the_main_thread():
    with ThreadPoolExecutor(1) as other:
        place = other.submit(place_of_main_thread).result()
    assert re.match(r"test_calls\.py:\d+ \((place|with) ", place), place


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("eth", "eth0"),
        ("eth1:5", "eth1"),
        ("=eth", None),
        ("=ib0,eth1", "eth1"),
        ("^docker,eth0", "eth1"),
        ("^=docker0,eth0,eth1", "ib0"),
        ("enp", None),
    ],
)
def test_the_interface_that_nccl_is_to_take(asked, found):
    assert matching(asked, ["lo", "docker0", "eth0", "eth1", "ib0"]) == found


def test_gloo_takes_the_interface_of_nccl(monkeypatch):
    monkeypatch.setattr(interface.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setattr(interface, "_has_address", lambda name: True)
    own, given = {"NCCL_SOCKET_IFNAME": "eth"}, {"NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "lo"}
    none: dict[str, str] = {}
    for environment in (own, given, none):
        set_interface(environment)
    assert own["GLOO_SOCKET_IFNAME"] == "eth0"
    assert given["GLOO_SOCKET_IFNAME"] == "lo"
    assert none == {}


def test_gloo_takes_no_interface_without_an_address(monkeypatch):
    """Some that are down come before those by which ranks connect."""
    monkeypatch.setattr(interface.socket, "if_nameindex", lambda: [(7, "l-is-down"), (1, "lo")])
    environment = {"NCCL_SOCKET_IFNAME": "l"}
    set_interface(environment)
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"


def test_an_error_of_gloo_names_the_interface(monkeypatch):
    monkeypatch.setitem(os.environ, "GLOO_SOCKET_IFNAME", "eth7")
    with (
        pytest.raises(fxpipe.RunError, match=r"Set GLOO_SOCKET_IFNAME on each .* \(it is eth7;"),
        connecting(),
    ):
        raise RuntimeError("Gloo connectFullMesh failed with …")
    with pytest.raises(RuntimeError, match="of another kind"), connecting():
        raise RuntimeError("of another kind")


def test_groups_are_not_split_from_a_default_group_with_a_device():
    group = SimpleNamespace(bound_device_id=torch.device("cuda", 3))
    with _unbound(group):
        assert group.bound_device_id is None
    assert group.bound_device_id == torch.device("cuda", 3)
    with _unbound(None):
        pass
