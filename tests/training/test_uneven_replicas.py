"""Replicas with other numbers of microbatches train as one pipeline that takes all of them."""

from __future__ import annotations

import json
import re

import pytest
import torch
import uneven_replicas_worker as worker
from launch import forked
from lengths_model import LENGTH, Words, eager, microbatch, words
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from uneven_replicas_worker import NUMBERS, RANKS, REPLICAS, lists_of

import fxpipe

LIMIT = 1e-12


pytestmark = pytest.mark.usefixtures("double_in_module")


@pytest.fixture(scope="module")
def pipe(double_in_module: None) -> fxpipe.Pipeline:
    return worker.compiled()


def joined(lists):
    return [each for one in lists for each in one]


def check_step(pipe: fxpipe.Pipeline, lists: list[list[dict[str, torch.Tensor]]]) -> None:
    model = Words()
    model.load_state_dict(pipe.state_dict())
    result, loss = pipe.run_local(lists), eager(model, joined(lists))
    torch.testing.assert_close(result.loss, loss, rtol=0, atol=LIMIT)
    grads = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(result.grads, grads, rtol=0, atol=LIMIT)


@pytest.mark.parametrize("numbers", [(1, 4), (5, 2), (3, 2), (2, 3), (0, 4), (3, 0)])
def test_the_loss_and_gradients_are_those_of_all_microbatches(pipe, numbers):
    """Also where one of the replicas has as many as the example, or none."""
    check_step(pipe, lists_of(numbers))


def test_an_order_that_is_known_serves_replicas_that_changed_places(pipe):
    lists = lists_of((1, 4))
    check_step(pipe, lists)
    check_step(pipe, lists[::-1])
    check_step(pipe, lists)


def test_microbatches_of_about_the_same_size_share_a_place(pipe):
    """Of the one order that replicas run: else each would wait for the longest of all."""
    lengths = [[3, 15, 9, 2], [14, 3, 10]]
    result = pipe.run_local([[microbatch(n) for n in one] for one in lengths])
    forwards = [
        [one[int(op[3:])] for op, _, _ in rt.record.spans if op.startswith("F0")]
        for one, rt in zip(lengths, result.runtimes[::RANKS], strict=True)
    ]
    places = {15: 14, 9: 10, 3: 3}
    assert [places[n] for n in forwards[0] if n in places] == forwards[1]
    orders = pipe._runner._orders
    batch = [([{"sequence": n} for n in one], [16] * len(one)) for one in ([3, 15, 9], [15, 9, 3])]
    (together,), by_place = orders._key(batch)
    assert together == ((15, 16), (9, 16), (3, 16))
    assert by_place


@pytest.mark.in_ci("ZeRO 3, V")
@pytest.mark.parametrize(
    "options",
    [
        {"shard": "parameters", "schedule": "zb-v", "recompute": "full"},
        {"schedule": "zb-h1", "validation": "post", "shard": "optimizer"},
        {"schedule": "zb-v", "vocab_parallel": "1-barrier", "validation": "post", "outputs": []},
        {"schedule": "zb-h1", "offload": True},
        {"shard": "gradients"},
        {"vocab_parallel": "2-barrier", "replicas": 3, "outputs": []},
    ],
    ids=["ZeRO 3, V", "ZeRO 1, post", "vocabulary, post", "offload", "ZeRO 2", "three replicas"],
)
@pytest.mark.slow
def test_schedules_memory_and_what_replicas_divide(options):
    pipe = words(**{"replicas": REPLICAS, "outputs": ["head"], **options})
    for numbers in ((1, 6, 3), (5, 2, 2), (0, 3, 0)):
        check_step(pipe, lists_of(numbers[: pipe.plan.replicas]))


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.last(self.first(x).tanh()), y)


def sum_and_count(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    count = torch.ones_like(batch["y"]).sum()
    return output * count, count


def regression(length: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, length, 4), "y": torch.randn(2, length, 4)}


@pytest.mark.in_ci("mean of all")
@pytest.mark.parametrize("kind", ["mean of all", "mean of each", "sum and count"])
def test_each_kind_of_loss(kind):
    """A microbatch's own mean counts for 1 of all microbatches of all replicas."""
    torch.manual_seed(0)
    model = Regression()
    options = {
        "mean of all": {},
        "mean of each": {"mean": "microbatch"},
        "sum and count": {"loss_fn": sum_and_count},
    }[kind]
    pipe = fxpipe.compile(
        model, regression(12), ranks=1, replicas=2, microbatches=3, dimensions={"time": 12}, **options
    )
    names, parameters = zip(*model.named_parameters(), strict=True)
    for lengths in ([3], [12, 6, 5, 9]), ([], [12, 6]):
        lists = [[regression(n) for n in one] for one in lengths]
        shares = [1] * len(joined(lists)) if kind == "mean of each" else joined(lengths)
        loss = sum(model(**one) * n for one, n in zip(joined(lists), shares, strict=True)) / sum(shares)
        grads = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
        result = pipe.run_local(lists)
        torch.testing.assert_close(result.loss, loss.detach(), rtol=0, atol=LIMIT)
        torch.testing.assert_close(result.grads, grads, rtol=0, atol=LIMIT)


def test_random_numbers_are_those_of_the_place_in_the_lists_of_all(pipe):
    """One pipeline with all microbatches draws the same."""
    lists = lists_of((4, 2))
    (alone,) = words(ranks=1, outputs=["head"]).run_local(joined(lists), step=3).runtimes
    ranks = pipe.run_local(lists, step=3).runtimes
    of_replicas = [
        [rt.key(m) for m in range(len(one))] for one, rt in zip(lists, ranks[::RANKS], strict=True)
    ]
    assert joined(of_replicas) == [alone.key(m) for m in range(6)]


@pytest.mark.parametrize("numbers", [(1, 4), (0, 2)])
def test_outputs_are_those_of_all_replicas_in_turn(pipe, numbers):
    model, lists = Words(), lists_of(numbers)
    model.load_state_dict(pipe.state_dict())
    result = pipe.run_local(lists, outputs=["head"])
    for k, one in enumerate(joined(lists)):
        torch.testing.assert_close(result.listed["head"][k], model.logits(one["ids"]))


def test_what_is_asked_of_an_op_that_a_replica_lacks(pipe, tmp_path):
    """Ops of the first replica are recorded."""
    with pytest.raises(fxpipe.OptionError, match=r"No program runs the op 'F1\.1' of record"):
        pipe.run_local(lists_of((1, 4)), record={"F1.1": tmp_path / "recorded"})


class Total(Words):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embed(ids).tanh()).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction="sum") / total


def test_a_number_of_the_batch_is_that_of_a_replica():
    """As transformers' ``num_items_in_batch``: all divide by the sum of these, however many each has."""
    model, example = Total(), {**microbatch(LENGTH), "total": torch.tensor(7)}
    shape = {"ranks": 1, "replicas": 2, "microbatches": 3, "dimensions": {"sequence": LENGTH}}
    pipe = fxpipe.compile(model, example, **shape)

    def with_totals(totals: list[list[int]]) -> list[list[dict[str, torch.Tensor]]]:
        lists = lists_of((2, 4))
        return [
            [{**one, "total": torch.tensor(n)} for one, n in zip(*each, strict=True)]
            for each in zip(lists, totals, strict=True)
        ]

    lists = with_totals([[7] * 2, [31] * 4])
    loss = sum(model(**{**one, "total": torch.tensor(38)}) for one in joined(lists))
    loss.backward()
    result = pipe.run_local(lists)
    torch.testing.assert_close(result.loss, loss.detach(), rtol=0, atol=LIMIT)
    grads = {name: p.grad for name, p in model.named_parameters() if name in result.grads}
    torch.testing.assert_close(result.grads, grads, rtol=0, atol=LIMIT)
    with pytest.raises(
        fxpipe.BatchError, match=r"^Replica 1: Microbatch 2 has 8 in 'total', and microbatch 0 "
    ):
        pipe.run_local(with_totals([[7] * 2, [31, 31, 8, 31]]))
    with pytest.raises(
        fxpipe.BatchError, match=r"A replica has no microbatch, and with it no number 'total'"
    ):
        pipe.run_local([lists[0], []])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (lambda: joined(lists_of((1, 4))), "5 microbatches, for 2 replicas: give a list of microbatches for"),
        (lambda: lists_of((1, 4, 2)), "3 lists of them, for 2 replicas"),
        (lambda: [*lists_of((3,)), microbatch(5)], "1 list of them, for 2 replicas"),
        (lambda: [[], []], "^The list has 0 microbatches: give one or more"),
        (
            lambda: [*lists_of((2,)), [microbatch(5), microbatch(17)]],
            "^Replica 1: Microbatch 1 has sequence 17",
        ),
    ],
    ids=["no even lists", "too many lists", "a list and a microbatch", "empty lists", "longer"],
)
def test_lists_that_are_refused(pipe, batch, message):
    with pytest.raises(fxpipe.BatchError, match=message):
        pipe.run_local(batch())
    check_step(pipe, lists_of((2, 1)))


def test_packed_samples_of_replicas_as_they_are(pipe):
    """``run_local`` takes the lists that ``pack`` gives."""
    lists = lists_of((2, 2))
    check_step(pipe, lists)
    torch.testing.assert_close(pipe.run_local(lists).grads, pipe.run_local(joined(lists)).grads)


@pytest.mark.slow
def test_processes_train_as_plain_torch_and_resume(tmp_path):
    """Bit for bit as ranks in one process, too."""
    run = forked(RANKS * REPLICAS, worker.train, tmp_path, dtype=torch.float64, logs=tmp_path / "logs")
    assert run.code == 0, run
    local = worker.compiled(**worker.OPTIONS).run_local(lists_of(NUMBERS[0]))
    taken = set()
    for process in range(RANKS * REPLICAS):
        differences, refused = json.loads((tmp_path / f"{process}.json").read_text())
        assert max(map(abs, differences)) < LIMIT
        assert len(refused) == 2 * len(NUMBERS)
        for empty, of_all in zip(refused[::2], refused[1::2], strict=True):
            assert re.search("Rank 3 has 0 microbatches, and rank 2 has", empty)
            assert re.search(r"a list of lists, as of all replicas: give that of this one", of_all)
        assert torch.equal(load_file(tmp_path / f"losses {process}")["loss 0"], local.loss)
        for rows, grad in load_file(tmp_path / f"grads {process}").items():
            name, begin, end = re.fullmatch(r"(.*?)(?:\[(\d+):(\d+)\])?", rows).groups()
            whole = local.grads[name]
            assert torch.equal(grad, whole if begin is None else whole[int(begin) : int(end)]), rows
            taken.add(name)
    assert taken == local.grads.keys()
