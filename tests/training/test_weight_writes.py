"""What a script writes to weights behind an update: numbers of a rank's part of the model are told."""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch

from fxpipe.training.optimizer import weight_writes
from fxpipe.training.optimizer.batch_digest import Facts, weights_of, words
from fxpipe.training.optimizer.weight_writes import (
    NOTHING,
    UNCHANGED,
    Form,
    WeightWrites,
    Written,
    different_writes,
)

RESOLUTION = 1e-6


class Rank:
    """One of several, with weights of its own, as its last update has left them."""

    def __init__(self, number, tensors=3):
        generator = torch.Generator().manual_seed(number)
        sizes = range(30, 30 + 7 * tensors, 7)
        self.weights = {f"w{k}": torch.randn(n, generator=generator) for k, n in enumerate(sizes)}
        self.writes = WeightWrites([*self.weights], self.weights.__getitem__, RESOLUTION)
        self.stepped()
        self.writes.updated()

    def stepped(self):
        self.writes.stepped({name: (torch.zeros_like(w), w.clone()) for name, w in self.weights.items()})

    @property
    def all(self):
        return torch.cat([*self.weights.values()])

    def each(self, change):
        for weight in self.weights.values():
            weight.copy_(change(weight))
        return self.writes.compare()


def scaled(rank):
    norm = rank.all.norm()
    return rank.each(lambda w: w * (3 / norm))


def bounded(rank):
    most = rank.all.std()
    return rank.each(lambda w: w.clamp(-most, most))


def capped(rank):
    """To the least norm of the ranks, so that one changes nothing."""
    norm, here = min(Rank(number).all.norm() for number in range(2)), rank.all.norm()
    return rank.each(lambda w: w * (norm / here) if here > norm else w)


def normalized(rank):
    """Gradient descent by hand, by the norm of the gradients here."""
    generator = torch.Generator().manual_seed(len(rank.weights))
    gradients = {name: torch.randn(len(w), generator=generator) for name, w in rank.weights.items()}
    rank.writes.stepped({name: (g, rank.weights[name].clone()) for name, g in gradients.items()})
    norm = torch.cat([*gradients.values()]).norm() + rank.all[40].abs()  # by ranks
    for name, weight in rank.weights.items():
        weight.sub_(0.1 * gradients[name] / norm)
    return rank.writes.compare()


def shrunk(rank):
    mean = rank.all.abs().mean()
    return rank.each(lambda w: w.sign() * (w.abs() - 0.2 * mean).clamp(min=0))


def pruned(rank):
    """By the median of this rank, which takes out more of the second one."""
    median = rank.all.abs().quantile(0.3 if rank.all[0] > 0 else 0.6)
    return rank.each(lambda w: w * (w.abs() > median))


@pytest.mark.parametrize(
    ("way", "form", "text"),
    [
        (scaled, Form.SCALED, "multiplied its weights by "),
        (normalized, Form.STEP, "added its gradients to its weights, times -"),
        (bounded, Form.BOUND, "bounded its weights by "),
        (pruned, Form.THRESHOLD, "zeroed its weights up to "),
        (shrunk, Form.SHRUNK, "shrunk its weights by "),
    ],
)
def test_a_number_of_the_weights_of_each_rank_is_told(way, form, text):
    each = [way(Rank(number)) for number in range(2)]
    assert [written.form for written in each] == [form] * 2
    message = different_writes(each, "step 4")
    assert message.startswith(f"Rank 1 has {text}")
    assert f" before step 4, and rank 0 {text}" in message
    assert "all_reduce" in message


def test_a_cap_that_one_rank_alone_exceeds():
    each = [capped(Rank(number)) for number in range(2)]
    assert sorted(written.form for written in each) == [Form.UNCHANGED, Form.SCALED]
    assert "multiplied its weights by 1" in different_writes(each, "step 4")
    rank = Rank(0)
    rank.weights["w0"].mul_(0.5)
    rank.weights["w1"].mul_(0.5)  # and not the third one, as by names
    assert different_writes([rank.writes.compare(), each[0], each[0]], "step 4") is None


ALIKE = {
    "factor": lambda w: 0.9 * w,
    "bound": lambda w: w.clamp(-0.5, 0.5),
    "no negative ones": lambda w: w.clamp(min=0.0),
    "norm of each": lambda w: w / w.norm(),
    "quantile of each": lambda w: w * (w.abs() > w.abs().quantile(0.3)),
    "threshold": lambda w: w * (w.abs() > 0.4),
    "shrunk": lambda w: w.sign() * (w.abs() - 0.1).clamp(min=0.0),
    "grid": lambda w: (16 * w).round() / 16,
    "average": lambda w: 0.5 * (w + torch.linspace(-1, 1, len(w))),
    "zeros": torch.zeros_like,
    "nothing": torch.clone,
}


@pytest.mark.parametrize("change", ALIKE.values(), ids=ALIKE)
def test_what_ranks_do_alike_or_to_each_tensor_by_itself(change):
    each = [Rank(number).each(change) for number in range(4)]
    assert different_writes(each, "step 4") is None


def test_the_number_of_one_tensor_may_be_its_own():
    rank = Rank(0, tensors=2)
    rank.weights["w0"].zero_()
    rank.writes.updated()
    assert scaled(rank) == NOTHING
    rank = Rank(1)
    rank.weights["w1"].mul_(0.3)
    assert rank.writes.compare() == NOTHING


def test_a_mask_that_is_applied_again_and_again_is_no_threshold():
    """What an update adds to masked elements is smaller than all others, and by ranks of other sizes."""
    rank = Rank(0)
    masks = {name: torch.arange(len(w)) % 5 > 1 for name, w in rank.weights.items()}
    for step in range(3):
        rank.stepped()
        for name, weight in rank.weights.items():
            weight.copy_(weight.sign() + 0.01 * torch.rand(len(weight)))
            assert step == 0 or weight[~masks[name]].abs().max() < 0.1 < weight[masks[name]].abs().min()
        rank.writes.updated()
        for name, weight in rank.weights.items():
            weight.mul_(masks[name])
        assert rank.writes.compare() == NOTHING


def test_tensors_have_their_turns():
    rank = Rank(0, tensors=2 * weight_writes.TENSORS)
    seen = set()
    for _ in range(2):
        rank.writes.updated()
        seen.update(rank.writes._then)
        assert len(rank.writes._then) == weight_writes.TENSORS
    assert seen == rank.weights.keys()


def test_a_factor_of_weights_that_changed_between_two_steps_of_one_update():
    rank = Rank(0)
    rank.stepped()
    assert rank.writes.compare() == UNCHANGED
    assert rank.each(lambda w: 0.8 * w) == (
        Form.SCALED,
        pytest.approx(0.8, rel=1e-5),
        pytest.approx(0.8, rel=1e-5),
        False,
    )


def test_on_a_device_it_is_told_a_step_later(monkeypatch):
    log = []
    event = SimpleNamespace(
        record=lambda: log.append("record"), synchronize=lambda: log.append("synchronize")
    )
    monkeypatch.setattr(weight_writes, "is_accelerator", lambda device: True)
    monkeypatch.setattr(weight_writes, "event", lambda device: event)
    rank = Rank(0)
    assert scaled(rank) == NOTHING
    assert log == ["record"]
    rank.stepped()
    rank.writes.updated()
    assert rank.writes.compare().form is Form.SCALED
    assert log == ["record", "record", "synchronize"]
    rank.stepped()
    assert rank.writes.compare() == UNCHANGED


def test_it_is_told_once():
    each = [scaled(rank := Rank(number)) for number in range(2)]
    with pytest.warns(UserWarning, match="Rank 1 has multiplied its weights by"):
        rank.writes.tell(each, "step 4", warns=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scaled(rank) == NOTHING
        rank.writes.tell([NOTHING] * 2, "step 5", warns=True)
        rank.writes.tell(each, "step 5", warns=True)
        Rank(0).writes.tell(each, "step 4", warns=False)


def test_numbers_that_are_not_finite():
    for value, form in ((math.nan, Form.NONE), (math.inf, Form.FACTOR)):
        rank = Rank(0)
        rank.weights["w0"][:] = value
        rank.writes.updated()
        assert rank.each(lambda w: 0.5 * w).form is form


def test_what_was_written_travels_with_a_step():
    each = [Written(Form.FACTOR, 0.25, 0.5), NOTHING, Written(Form.THRESHOLD, 1e-3, math.inf)]
    table = torch.stack([words(Facts(1, weights=written), [], {}) for written in each])
    assert weights_of(table) == each
