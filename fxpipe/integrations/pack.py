"""Samples of different lengths in the microbatches of a step, one behind the other, by what they cost.

    samples of 700, 30, 512, 90, 410 tokens   ──►   [1, 730], [1, 1012]

A microbatch has one row.  In it the positions of each sample begin at 0, by which models that take
``position_ids`` keep samples apart, and the first label of each sample is ignored, which the last token of
the one before would predict.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import islice
from typing import Any, overload

import torch
from torch.utils.data import Sampler

from fxpipe.cost.batch_order import filled
from fxpipe.errors import OptionError, at_least_one, number_of

Sample = Mapping[str, torch.Tensor | Sequence[int]]


Microbatch = dict[str, torch.Tensor]


@overload
def pack(
    samples: Sequence[Sample | torch.Tensor],
    *,
    tokens: int,
    microbatches: int | None = None,
    replicas: None = None,
    cost: tuple[float, float] = (1.0, 0.0),
    multiple: int = 1,
    padding: int = 0,
    ignored: int = -100,
    documents: int | None = None,
) -> list[Microbatch]: ...


@overload
def pack(
    samples: Sequence[Sample | torch.Tensor],
    *,
    tokens: int,
    microbatches: int | None = None,
    replicas: int,
    cost: tuple[float, float] = (1.0, 0.0),
    multiple: int = 1,
    padding: int = 0,
    ignored: int = -100,
    documents: int | None = None,
) -> list[list[Microbatch]]: ...


def pack(
    samples: Sequence[Sample | torch.Tensor],
    *,
    tokens: int,
    microbatches: int | None = None,
    replicas: int | None = None,
    cost: tuple[float, float] = (1.0, 0.0),
    multiple: int = 1,
    padding: int = 0,
    ignored: int = -100,
    documents: int | None = None,
) -> list[Microbatch] | list[list[Microbatch]]:
    """The microbatches of a step, for ``pipe.step``; with ``functools.partial`` a collate function.

    samples: one-dimensional ``input_ids``, alone or in a mapping with ``labels`` (by default the same) and
        other leaves of the same length.
    tokens: the most of a microbatch.
    microbatches: their number, on each replica.  Without it there are as many as samples of up to ``tokens``
        fill, and a longer sample is alone in one: short microbatches, which the order of a batch evens out,
        leave a pipeline less idle than few long ones (docs/lengths.md).
    replicas: of how many the samples are; then there is a list for each, ``pack(…)[pipe.replica]``, all of
        as many microbatches and about as expensive; of too few samples, as at the end of an epoch,
        some have one less, or none.  ``run_local`` takes all of them.
    cost: (a, b) of a · L + b · L² for a sample of L tokens, ``pipe.sample_cost``; by it so many microbatches
        are filled that the largest is small.
    multiple: of which the lengths of microbatches are, by ``padding`` at their end, whose labels are ignored.
    documents: the most samples of a microbatch; with it that has their boundaries as ``cu_seqlens``,
        [1, documents + 1], for ``fxpipe.flash_attn_varlen_func`` in models of your own.

    Returns mappings of ``input_ids``, ``position_ids``, ``labels`` and the other leaves, each [1, tokens];
    with ``replicas`` lists of them.
    Raises OptionError for samples that do not fit, and for fewer of them than microbatches.
    """
    _check_numbers(tokens=tokens, multiple=multiple, microbatches=microbatches, replicas=replicas)
    rows = [_leaves(sample) for sample in samples]
    lengths, most = [len(row["input_ids"]) for row in rows], tokens - tokens % multiple
    each = [
        [_joined([rows[k] for k in place], multiple, padding, ignored, documents) for place in places]
        for places in _divided(lengths, most, microbatches, replicas or 1, cost)
    ]
    return each[0] if replicas is None else each


def _divided(
    lengths: Sequence[int], tokens: int, microbatches: int | None, replicas: int, cost: tuple[float, float]
) -> list[list[list[int]]]:
    """The samples of each microbatch of each replica; see ``pack``."""
    if microbatches is None:
        places = _filled_alike(lengths, tokens, replicas, cost)
    else:
        places = assigned(lengths, tokens, microbatches * replicas, cost)
    seconds = [sum(_seconds(lengths[k], cost) for k in place) for place in places]
    of_each: list[list[int]] = [[] for _ in range(replicas)]
    # The most expensive one first, always to the replica that has the least to do, of those with room.
    for m in sorted(range(len(places)), key=lambda m: -seconds[m]):
        able = [one for one in of_each if len(one) < -(-len(places) // replicas)]
        min(able, key=lambda one: sum(seconds[k] for k in one)).append(m)
    return [[places[m] for m in sorted(one)] for one in of_each]


def _filled_alike(
    lengths: Sequence[int], tokens: int, replicas: int, cost: tuple[float, float]
) -> list[list[int]]:
    """The samples of about as many microbatches as they fill, of which replicas can have as many each."""
    places = filled(lengths, tokens)
    if not (more := -len(places) % replicas):
        return places
    alone = [[k] for k, n in enumerate(lengths) if n > tokens]
    others = [k for k, n in enumerate(lengths) if n <= tokens]
    for number in range(len(places) + more - len(alone), len(others) + 1, replicas):
        with contextlib.suppress(OptionError):  # then they fit into more
            divided = assigned([lengths[k] for k in others], tokens, number, cost)
            return [*alone, *([others[k] for k in place] for place in divided)]
    return places  # of too few samples


def _seconds(length: int, cost: tuple[float, float]) -> float:
    return cost[0] * length + cost[1] * length**2


def pad(
    samples: Sequence[Sample | torch.Tensor],
    *,
    tokens: int,
    multiple: int = 1,
    padding: int = 0,
    ignored: int = -100,
    mask: str | None = "attention_mask",
) -> list[dict[str, torch.Tensor]]:
    """The microbatches of a step with a sample in each row, for models that do not keep packed samples apart.

    samples: as ``pack`` has them.  Those of about the same length are in one microbatch, with as many rows as
        ``tokens`` allow and at least one: [3, 680], [1, 2040]; ``dimensions`` names both
        (docs/lengths.md).
    multiple: of which the lengths of microbatches are, by ``padding`` at the end of rows, whose labels are
        ignored.  mask: the name of a leaf that is 1 at tokens and 0 at padding; None for none.
    """
    _check_numbers(tokens=tokens, multiple=multiple)
    rows = [_leaves(sample) for sample in samples]
    rows.sort(key=lambda row: -len(row["input_ids"]))
    microbatches = []
    while rows:
        length = -(-len(rows[0]["input_ids"]) // multiple) * multiple
        number = max(1, tokens // length)
        microbatches.append(_padded(rows[:number], length, padding, ignored, mask))
        rows = rows[number:]
    return microbatches


def _padded(
    rows: Sequence[Mapping[str, torch.Tensor]], length: int, padding: int, ignored: int, mask: str | None
) -> dict[str, torch.Tensor]:
    _check_alike(rows)
    if mask is not None:
        rows = [{**row, mask: torch.ones(len(row["input_ids"]), dtype=torch.long)} for row in rows]
    return {
        name: torch.stack([_filled(name, row[name], length, padding, ignored) for row in rows])
        for name in rows[0]
    }


def _filled(name: str, value: torch.Tensor, length: int, padding: int, ignored: int) -> torch.Tensor:
    """A leaf with something behind it, up to a length."""
    fill = ignored if name == "labels" else padding if name == "input_ids" else 0
    return torch.cat([value, value.new_full((length - len(value), *value.shape[1:]), fill)])


def _check_alike(rows: Sequence[Mapping[str, torch.Tensor]]) -> None:
    names = rows[0].keys()
    if any(row.keys() != names for row in rows):
        raise OptionError(f"One sample has {', '.join(names)}, and another one other leaves.")


def assigned(
    lengths: Sequence[int], tokens: int, microbatches: int, cost: tuple[float, float] = (1.0, 0.0)
) -> list[list[int]]:
    """The samples of each microbatch: the most expensive one first, always to the cheapest with room for it.

    Raises OptionError as ``pack`` does.
    """
    if len(lengths) < microbatches:
        raise OptionError(
            f"{number_of(len(lengths), 'sample')} cannot fill {microbatches} microbatches: give more, or "
            "compile for fewer microbatches."
        )
    seconds = [_seconds(n, cost) for n in lengths]
    places: list[list[int]] = [[] for _ in range(microbatches)]
    spent, room = [0.0] * microbatches, [tokens] * microbatches
    for k in sorted(range(len(lengths)), key=lambda k: (-seconds[k], k)):
        # An empty one first, as each microbatch has to have something.
        open_ones = [m for m in range(microbatches) if room[m] >= lengths[k]]
        if not open_ones:
            raise OptionError(
                f"The samples have {sum(lengths)} tokens, the longest {max(lengths)}, and do not fit into "
                f"{microbatches} microbatches of {tokens}: give fewer, or more tokens."
            )
        m = min(open_ones, key=lambda m: (bool(places[m]), spent[m], -room[m]))
        places[m].append(k)
        spent[m] += seconds[k]
        room[m] -= lengths[k]
    return [sorted(place) for place in places]


def _check_numbers(**numbers: int | None) -> None:
    """Raise OptionError for one that is no whole number from 1 on."""
    for name, number in numbers.items():
        if number is not None:
            at_least_one(name, number)


def _leaves(sample: Sample | torch.Tensor) -> dict[str, torch.Tensor]:
    given = {"input_ids": sample} if isinstance(sample, torch.Tensor) else sample
    leaves: dict[str, torch.Tensor] = {}
    if isinstance(given, Mapping):
        leaves = {name: torch.as_tensor(x) for name, x in given.items()}  # also of a dataset's lists
    if "input_ids" not in leaves or any(x.dim() < 1 for x in leaves.values()):
        raise OptionError("A sample is a tensor of tokens, or a mapping that has them as 'input_ids'.")
    lengths = {name: len(x) for name, x in leaves.items()}
    if len({*lengths.values()}) > 1 or not leaves["input_ids"].numel():
        raise OptionError(f"The leaves of a sample are equally long and not empty; they have {lengths}.")
    return {"input_ids": leaves["input_ids"], "labels": leaves["input_ids"], **leaves}


def _joined(
    rows: Sequence[Mapping[str, torch.Tensor]],
    multiple: int,
    padding: int,
    ignored: int,
    documents: int | None,
) -> dict[str, torch.Tensor]:
    _check_alike(rows)
    joined = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    joined["labels"][lengths.cumsum(0) - lengths] = ignored
    missing = -len(joined["input_ids"]) % multiple
    whole = len(joined["input_ids"]) + missing
    joined = {name: _filled(name, value, whole, padding, ignored) for name, value in joined.items()}
    if documents is not None:
        if len(rows) > documents:
            raise OptionError(
                f"A microbatch has {number_of(len(rows), 'sample')}, and documents is {documents}: give more."
            )
        ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        joined["cu_seqlens"] = torch.cat([ends, ends[-1:].expand(documents - len(rows))]).to(torch.int32)
    lengths = torch.cat([lengths, lengths.new_tensor([missing] if missing else [])])
    joined["position_ids"] = torch.cat([torch.arange(n) for n in lengths.tolist()])
    return {name: value.unsqueeze(0) for name, value in joined.items()}


#: How samples are divided over replicas; another number than of earlier versions, which did it otherwise.
_DIVISION = 2


class PackedSteps(Sampler[list[int]]):
    """The samples of each step, as a ``batch_sampler``: as many as fit, in a new order in each epoch.

    lengths: of all samples, in tokens.  tokens, microbatches, cost, multiple: as for ``pack``, which is the
    collate function.  step_tokens: the most of a step on a replica, instead of ``microbatches``.
    replica, replicas: with several, all have the same number of steps and of microbatches, and each gets its
    own samples.  Samples that are left at the end of an epoch come in the next one.

    ``state_dict`` and ``load_state_dict`` go on in the middle of an epoch with the same steps.  A loader with
    workers asks for steps before they are trained: it has to save the state with its own.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        tokens: int,
        microbatches: int | None = None,
        step_tokens: int | None = None,
        cost: tuple[float, float] = (1.0, 0.0),
        multiple: int = 1,
        replica: int = 0,
        replicas: int = 1,
        seed: int = 0,
    ):
        _check_numbers(tokens=tokens, multiple=multiple, microbatches=microbatches, replicas=replicas)
        if not 0 <= replica < replicas:
            raise OptionError(f"replica is {replica} and must be one of {number_of(replicas, 'replica')}.")
        if min(lengths, default=1) < 1:
            raise OptionError("A sample has at least one token, and lengths has fewer.")
        longest, most = max(lengths, default=0), tokens - tokens % multiple
        if (microbatches is None) == (step_tokens is None):
            raise OptionError(
                "PackedSteps needs either microbatches=, their number in each step, or step_tokens=, the "
                "most of a step."
            )
        if microbatches is not None and longest > most:
            raise OptionError(f"A sample of {longest} tokens does not fit into a microbatch of {tokens}.")
        if step_tokens is not None and longest > step_tokens:
            raise OptionError(f"A sample of {longest} tokens does not fit into a step of {step_tokens}.")
        self.lengths, self.tokens, self.microbatches = lengths, most, microbatches
        self.step_tokens = most * (microbatches or 0) if step_tokens is None else step_tokens
        self.cost, self.replica, self.replicas, self.seed = cost, replica, replicas, seed
        self.epoch, self.step = 0, 0
        self._taken = 0  # samples of the epoch that its steps have had

    def __iter__(self) -> Iterator[list[int]]:
        for step, taken in self._steps(self._taken):
            self.step, self._taken = self.step + 1, taken
            yield step
        self.epoch, self.step, self._taken = self.epoch + 1, 0, 0

    def _steps(self, taken: int) -> Iterator[tuple[list[int], int]]:
        """The steps behind these samples of the epoch, each with the number of samples up to its end."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        most = self.step_tokens * self.replicas
        while taken < len(order):
            total, end = 0, taken
            while end < len(order) and total + self.lengths[order[end]] <= most:
                total += self.lengths[order[end]]
                end += 1
            while end > taken and (step := self._fitting(order[taken:end])) is None:
                end -= 1
            if end == taken or step is None:
                return
            taken = end
            yield step, taken

    def _fitting(self, samples: Sequence[int]) -> list[int] | None:
        """This replica's samples of a step; None if they do not fit on any replica."""
        lengths = [self.lengths[k] for k in samples]
        try:
            places = _divided(lengths, self.tokens, self.microbatches, self.replicas, self.cost)
            of_each = [sorted(k for place in own for k in place) for own in places]
            # As each replica's ``pack`` will make them.
            numbers = {self._number([lengths[k] for k in of_replica]) for of_replica in of_each}
        except OptionError:
            return None
        if len(numbers) > 1 or 0 in numbers:
            return None
        return [samples[k] for k in of_each[self.replica]]

    def _number(self, lengths: Sequence[int]) -> int:
        """The number of a replica's microbatches."""
        if self.microbatches is None:
            return len(filled(lengths, self.tokens))
        return len(assigned(lengths, self.tokens, self.microbatches, self.cost))

    def state_dict(self) -> dict[str, Any]:
        numbers = {"epoch": self.epoch, "step": self.step, "taken": self._taken, "seed": self.seed}
        return {**numbers, "of": self._digest()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises OptionError for the state of other samples or options, by which it would say other steps."""
        if state.get("of", self._digest()) != self._digest():
            raise OptionError(
                "The state is that of other samples, or of other tokens, microbatches, step_tokens, cost or "
                "replicas: make PackedSteps as it was, or begin without the state."
            )
        self.epoch, self.step, self.seed = (int(state[name]) for name in ("epoch", "step", "seed"))
        # A state of earlier versions does not say it.
        before = islice(self._steps(0), self.step if "taken" not in state else 0)
        self._taken = int(state.get("taken", max((taken for _, taken in before), default=0)))

    def _digest(self) -> str:
        """What the steps follow from, beside the seed, in a few letters."""
        options: tuple[object, ...] = (
            self.tokens,
            self.microbatches,
            self.step_tokens,
            self.cost,
            self.replicas,
        )
        if self.replicas > 1:
            options += (_DIVISION,)
        return sha256(array("q", self.lengths).tobytes() + repr(options).encode()).hexdigest()[:16]
