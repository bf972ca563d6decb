"""Samples of different lengths in the microbatches of a step."""

from __future__ import annotations

from functools import partial
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader
from zoo import relative_error, too_far

import fxpipe
from fxpipe.cost.batch_order import filled
from fxpipe.errors import OptionError
from fxpipe.integrations.pack import assigned

pytestmark = pytest.mark.usefixtures("double")

#: Of samples; the longest is as long as a microbatch.
LENGTHS = [7, 3, 20, 9, 4, 11, 5, 2]
TOKENS, MICROBATCHES = 20, 4


def samples(lengths=LENGTHS) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randint(1, 32, (n,)) for n in lengths]


def test_samples_stand_one_behind_the_other():
    first, second, third = samples([3, 2, 4])
    found = fxpipe.pack([first, second, third], tokens=8, microbatches=2, multiple=4)
    assert [x["input_ids"].shape for x in found] == [(1, 4), (1, 8)]
    assert torch.equal(found[0]["input_ids"][0], third)
    assert torch.equal(found[1]["input_ids"][0], torch.cat([first, second, torch.zeros(3, dtype=torch.long)]))
    assert found[1]["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    ignored = [-100, *first[1:].tolist(), -100, *second[1:].tolist(), -100, -100, -100]
    assert found[1]["labels"].tolist() == [ignored]


def test_boundaries_of_a_fixed_number():
    """The last one is that of the last sample, and repeats; padding is no sample."""
    found = fxpipe.pack(samples([3, 2, 4]), tokens=8, microbatches=2, multiple=4, documents=3)
    assert [x["cu_seqlens"].tolist() for x in found] == [[[0, 4, 4, 4]], [[0, 3, 5, 5]]]
    assert found[0]["cu_seqlens"].dtype == torch.int32
    with pytest.raises(OptionError, match="A microbatch has 2 samples, and documents is 1: give more"):
        fxpipe.pack(samples([3, 2, 4]), tokens=8, microbatches=2, documents=1)


def test_other_leaves_come_along():
    one = {"input_ids": torch.arange(3), "labels": torch.tensor([-100, 5, 6]), "weights": torch.rand(3, 2)}
    (found,) = fxpipe.pack([one], tokens=4, microbatches=1, multiple=4, padding=9)
    assert found["input_ids"].tolist() == [[0, 1, 2, 9]]
    assert found["labels"].tolist() == [[-100, 5, 6, -100]]
    assert torch.equal(found["weights"][0], torch.cat([one["weights"], torch.zeros(1, 2)]))


def test_samples_in_rows_of_their_own():
    """Those of about the same length are in one microbatch, of as many rows as there is room for."""
    found = fxpipe.pad(samples([3, 7, 2, 4, 1, 11]), tokens=8, multiple=2)
    assert [(*x["input_ids"].shape,) for x in found] == [(1, 12), (1, 8), (2, 4), (2, 2)]
    of_four, of_three = samples([3, 7, 2, 4])[3], samples([3])[0]
    assert found[2]["input_ids"].tolist() == [of_four.tolist(), [*of_three.tolist(), 0]]
    assert found[2]["labels"].tolist() == [of_four.tolist(), [*of_three.tolist(), -100]]
    assert found[2]["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]


def test_samples_as_a_dataset_has_them():
    """Lists of numbers, and leaves of more dimensions."""
    given = [
        {"input_ids": [5, 6], "weights": torch.ones(2, 3)},
        {"input_ids": [7], "weights": torch.ones(1, 3)},
    ]
    (found,) = fxpipe.pad(given, tokens=8, padding=1, mask=None)
    assert found["input_ids"].tolist() == [[5, 6], [7, 1]]
    assert found["weights"].sum((1, 2)).tolist() == [6, 3]
    assert fxpipe.pack(given, tokens=8)[0]["labels"].tolist() == [[-100, 6, -100]]
    with pytest.raises(OptionError, match="One sample has input_ids, labels, and another one other leaves"):
        fxpipe.pad([samples([3])[0], given[0]], tokens=8, mask=None)


def test_the_largest_microbatch_is_small():
    """At most the mean and one sample, by what samples cost."""
    torch.manual_seed(1)
    lengths = torch.randint(50, 2000, (60,)).tolist()
    for cost in ((1.0, 0.0), (1.0, 0.01)):
        seconds = [cost[0] * n + cost[1] * n * n for n in lengths]
        places = assigned(lengths, 16000, 8, cost)
        assert sorted(k for place in places for k in place) == [*range(60)]
        assert max(sum(seconds[k] for k in place) for place in places) <= sum(seconds) / 8 + max(seconds)


def test_what_does_not_fit():
    with pytest.raises(
        OptionError, match="61 tokens, the longest 20, and do not fit into 2 microbatches of 20"
    ):
        fxpipe.pack(samples(), tokens=20, microbatches=2)
    with pytest.raises(OptionError, match="8 samples cannot fill 9 microbatches"):
        fxpipe.pack(samples(), tokens=20, microbatches=9)
    with pytest.raises(
        OptionError, match=r"equally long and not empty; they have \{'input_ids': 2, 'labels': 3\}"
    ):
        fxpipe.pack([{"input_ids": torch.ones(2), "labels": torch.ones(3)}], tokens=8, microbatches=1)
    with pytest.raises(OptionError, match="A sample is a tensor of tokens, or a mapping"):
        fxpipe.pack([[5, 6, 7]], tokens=8)
    for function in (fxpipe.pack, fxpipe.pad):
        with pytest.raises(OptionError, match="tokens is 0 and must be a whole number, at least 1"):
            function(samples(), tokens=0)
        with pytest.raises(OptionError, match="multiple is 0 and must be"):
            function(samples(), tokens=20, multiple=0)
    with pytest.raises(OptionError, match="replica is 2 and must be one of 2 replicas"):
        fxpipe.PackedSteps(LENGTHS, tokens=20, microbatches=2, replica=2, replicas=2)
    with pytest.raises(OptionError, match="A sample has at least one token"):
        fxpipe.PackedSteps([5, 0], tokens=20, microbatches=2)
    with pytest.raises(OptionError, match="A sample of 20 tokens does not fit into a microbatch of 16"):
        fxpipe.PackedSteps(LENGTHS, tokens=16, microbatches=2)


def test_as_many_microbatches_as_samples_fill():
    found = fxpipe.pack(samples([3, 30, 9, 8, 12]), tokens=20)
    assert sorted(x["input_ids"].shape[1] for x in found) == [12, 20, 30]
    assert filled([3, 30, 9, 8, 12], 20) == [[1], [3, 4], [0, 2]]


@pytest.mark.parametrize("replicas", [1, 3])
def test_steps_of_some_tokens_have_each_sample_once(replicas):
    torch.manual_seed(3)
    lengths = torch.randint(2, 50, (120,)).tolist()
    fit = {"tokens": 24, "step_tokens": 150, "replicas": replicas}
    each = [[*fxpipe.PackedSteps(lengths, replica=k, **fit)] for k in range(replicas)]
    for together in zip(*each, strict=True):
        numbers = {len(filled([lengths[k] for k in own], 24)) for own in together}
        assert len(numbers) == 1
        assert sum(lengths[k] for own in together for k in own) <= 150 * replicas
    taken = sorted(k for steps in each for own in steps for k in own)
    assert len(taken) == len({*taken})
    assert len(taken) > 100


@pytest.mark.parametrize("microbatches", [None, 2])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_lists_for_replicas(replicas, microbatches):
    """Of as many microbatches, with each sample once and about the same cost."""
    torch.manual_seed(5)
    given = [torch.full((int(n),), k) for k, n in enumerate(torch.randint(20, 60, (40,)))]
    tokens = 400 if microbatches is None else 1200
    options = {"tokens": tokens, "microbatches": microbatches, "cost": (1.0, 0.1)}
    lists = fxpipe.pack(given, replicas=replicas, **options)
    numbers = {len(one) for one in lists}
    assert len(lists) == replicas
    assert len(numbers) == 1
    assert microbatches is None or numbers == {microbatches}
    taken = [k for one in lists for each in one for k in each["input_ids"].unique().tolist()]
    assert sorted(taken) == [*range(40)]
    assert all(each["input_ids"].shape[1] <= tokens for one in lists for each in one)
    seconds = [
        sum(n + 0.1 * n * n for each in one for n in each["input_ids"].unique(return_counts=True)[1].tolist())
        for one in lists
    ]
    assert max(seconds) < 1.1 * min(seconds)
    if replicas == 1:
        alone = fxpipe.pack(given, **options)
        assert [x["input_ids"].tolist() for x in lists[0]] == [x["input_ids"].tolist() for x in alone]


def test_replicas_with_few_samples():
    """There are more microbatches than samples fill where replicas have as many each only so; where there are
    too few samples for that, some replicas have less."""
    assert filled([4, 3, 2, 1], 5) == [[0, 3], [1, 2]]
    lists = fxpipe.pack(samples([4, 3, 2, 1]), tokens=5, replicas=3)
    assert sorted(one["input_ids"].shape[1] for (one,) in lists) == [3, 3, 4]
    lists = fxpipe.pack(samples([30, 2, 2]), tokens=5, replicas=2)
    assert [[one["input_ids"].shape[1] for one in each] for each in lists] == [[30], [4]]
    for few, replicas, expected in (([30, 2], 3, [[30], [2], []]), ([30, 20, 20], 2, [[30], [20, 20]])):
        lists = fxpipe.pack(samples(few), tokens=5, replicas=replicas)
        assert [[one["input_ids"].shape[1] for one in each] for each in lists] == expected
    with pytest.raises(OptionError, match="8 samples cannot fill 9 microbatches"):
        fxpipe.pack(samples(), tokens=20, microbatches=3, replicas=3)
    for wrong in (0, 1.5, "2"):
        with pytest.raises(OptionError, match=r"^replicas is .* and must be a whole number, at least 1"):
            fxpipe.pack(samples(), tokens=20, replicas=wrong)


def test_a_number_of_microbatches_or_of_tokens():
    for both in ({}, {"microbatches": 2, "step_tokens": 40}):
        with pytest.raises(OptionError, match=r"needs either microbatches=, .* or step_tokens="):
            fxpipe.PackedSteps(LENGTHS, tokens=16, **both)
    with pytest.raises(OptionError, match="A sample of 20 tokens does not fit into a step of 19"):
        fxpipe.PackedSteps(LENGTHS, tokens=8, step_tokens=19)


def steps(**options):
    torch.manual_seed(3)
    lengths = torch.randint(2, 20, (100,)).tolist()
    return fxpipe.PackedSteps(lengths, tokens=TOKENS, microbatches=MICROBATCHES, **options), lengths


def test_steps_have_each_sample_once_and_go_on_as_before():
    sampler, lengths = steps()
    first, second = [*sampler], [*sampler]
    assert first != second
    for epoch in (first, second):
        seen = [k for step in epoch for k in step]
        assert len(seen) == len({*seen})
        left = sum(lengths) - sum(lengths[k] for k in seen)
        assert left < TOKENS * MICROBATCHES
    again, _ = steps()
    taken = iter(again)
    assert [next(taken), next(taken)] == first[:2]
    resumed, _ = steps()
    resumed.load_state_dict(again.state_dict())
    assert [*resumed] == first[2:]
    assert [*resumed] == second
    of_earlier, _ = steps()
    of_earlier.load_state_dict({name: x for name, x in again.state_dict().items() if name != "taken"})
    assert [*of_earlier] == first[2:]


def test_a_run_goes_on_without_the_steps_before(monkeypatch):
    """Near the end of an epoch these would take minutes, on all ranks."""
    sampler, _ = steps()
    *_, last = islice(sampler, 5)
    resumed, _ = steps()
    resumed.load_state_dict(sampler.state_dict())
    tried = []
    monkeypatch.setattr(resumed, "_fitting", lambda samples: tried.append(samples) or [*samples])
    next(iter(resumed))
    assert len(tried) == 1
    assert set(tried[0]).isdisjoint(last)


@pytest.mark.parametrize("change", [{"lengths": [3, 5, 7]}, {"cost": (1.0, 0.5)}, {"replicas": 2}])
def test_the_state_of_other_steps_is_refused(change):
    options = {"lengths": [3, 5, 6], "tokens": 16, "microbatches": 2}
    state = fxpipe.PackedSteps(**options).state_dict()
    fxpipe.PackedSteps(**options).load_state_dict({k: x for k, x in state.items() if k != "of"})  # of before
    with pytest.raises(fxpipe.OptionError, match="state is that of other samples"):
        fxpipe.PackedSteps(**options | change).load_state_dict(state)


def test_the_state_of_a_version_that_divided_otherwise_is_refused():
    sampler = fxpipe.PackedSteps([3, 5, 6], tokens=16, microbatches=2, replicas=2)
    of_earlier = sampler.state_dict() | {"of": "56a395aa3fe59d0d"}  # 0.1.0 at 4e14fd66
    with pytest.raises(fxpipe.OptionError, match="state is that of other samples"):
        sampler.load_state_dict(of_earlier)


def test_replicas_have_as_many_steps_and_other_samples():
    (one, lengths), (other, _) = steps(replica=0, replicas=2), steps(replica=1, replicas=2)
    pairs = [*zip(one, other, strict=True)]
    assert len(pairs) > 4
    seen = [k for pair in pairs for step in pair for k in step]
    assert len(seen) == len({*seen})
    data = samples(lengths)
    collate = partial(fxpipe.pack, tokens=TOKENS, microbatches=MICROBATCHES)
    for batch in DataLoader(data, batch_sampler=steps(replica=1, replicas=2)[0], collate_fn=collate):
        assert len(batch) == MICROBATCHES


@pytest.mark.slow
def test_a_packed_step_is_that_of_each_sample_alone():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double()
    data = samples()
    example = fxpipe.pack([data[2]], tokens=TOKENS, microbatches=1)[0]
    pipe = fxpipe.compile(
        model, example, ranks=2, microbatches=MICROBATCHES, schedule="1f1b", dimensions={"sequence": TOKENS}
    )
    found = pipe.run_local(fxpipe.pack(data, tokens=TOKENS, microbatches=MICROBATCHES))
    count = sum(len(x) - 1 for x in data)
    loss = torch.zeros(())
    for sample in data:
        one = model(sample[None], labels=sample[None]).loss * (len(sample) - 1) / count
        one.backward()
        loss += one.detach()
    assert relative_error(found.loss, loss) < 1e-6  # the loss is computed in single precision
    assert too_far(found.grads, {n: p.grad for n, p in model.named_parameters()}, 1e-5) == {}
