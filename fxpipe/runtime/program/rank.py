"""``rt``: the runtime that a generated program calls, one object per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from fxpipe.errors import RunError
from fxpipe.plan.step import StepSpec
from fxpipe.plan.tensors import dtype_of
from fxpipe.runtime.batch.lengths import Lengths, cut, or_example, stand_in
from fxpipe.runtime.batch.outputs import Collected
from fxpipe.runtime.program.bucket_verbs import REPLICAS, BucketVerbs
from fxpipe.runtime.program.captured import key_of_step
from fxpipe.runtime.program.comm import Collective, Comm, Layout, Numbers, Pending, Wait, in_layout
from fxpipe.runtime.program.losses import Losses
from fxpipe.runtime.program.offload import Offloader
from fxpipe.runtime.program.random import fold
from fxpipe.runtime.torch_private import multiply_each


@dataclass(eq=False, kw_only=True)
class Runtime(BucketVerbs):
    """The tensors of one rank, and its communication with other ranks.

    ``buffers``, ``constants`` by name.  Gradients accumulate; zero them before the step if needed.
    ``weighted``: the batches of the steps that are one evaluation, each with what its microbatches count for.
    ``sizes``: the lengths of each microbatch of the step, in the plan's order; those of the example before
    the first.  ``numbers``: how many microbatches each replica has.  ``places``: which of this one's comes in
    each place of the order that all of them run.  ``kept_total``: None, or what gets the
    total of the losses while a step is captured, to be shared behind each replay.  ``device``: where the
    program runs; None if the batch is always there.  ``validate``: waits for the verdict of all ranks on the
    last update, undoes it if it does not stand, and tells whether it does.
    """

    rank: int
    comm: Comm
    buffers: dict[str, torch.Tensor]
    constants: Mapping[str, torch.Tensor]
    offloader: Offloader | None = None
    step_number: int = 0
    current_op: str = ""
    device: torch.device | None = None
    collected: Collected = field(default_factory=Collected)
    validate: Callable[[], bool] | None = None
    weighted: Sequence[tuple[object, Sequence[float]]] = ()
    losses: Losses = field(default_factory=Losses)
    sizes: Sequence[Lengths] = ()
    numbers: Sequence[int] = ()
    places: Sequence[int] = ()
    kept_total: list[torch.Tensor] | None = None
    _weight: float = 0.0  # of an evaluation, once a mean of it is known
    _sharing: Numbers | None = None
    _shared: list[float] | None = None
    _ahead: dict[int, Pending] | None = None

    def __post_init__(self) -> None:
        if not self.sizes:
            number = self.spec.microbatches
            self.expect(self.spec, [or_example(self.spec, [None] * number)], [range(number)])

    def expect(
        self, spec: StepSpec, of_replicas: Sequence[Sequence[Lengths]], places: Sequence[Sequence[int]]
    ) -> None:
        """Let the next step be of these microbatches.  spec: the plan's.  of_replicas: the lengths of those
        of each replica; places: theirs."""
        replica = 0 if self.replicas is None else self.replicas.index
        self.numbers = [*map(len, of_replicas)]
        self.places = places[replica]
        self.spec = spec.with_microbatches(self.numbers[replica])
        # Without any it has one that stands in, as what others count of theirs.
        self.sizes = of_replicas[replica] or or_example(spec, [None])

    def start(self) -> None:
        """Begin a step, also after one that failed."""
        self.record.end()
        self.comm.start()
        self.current_op, self.waiting = "", None
        self.losses.forget()
        self._sharing, self._shared, self._weight = None, None, 0.0
        self._sums, self._gathers, self._ahead = [], {}, None

    def op(self, name: str) -> None:
        """Record that op ``name`` begins ("F1.3": forward of stage 1, microbatch 3)."""
        self.waiting = _DEVICE
        self.record.keep_up()
        self.waiting, self.current_op = None, name
        self.record.begin(name)

    def warm_up(self, *made: dict[int, object]) -> Iterator[None]:
        """Run the ops that a rank may run before all ranks know whether the last update stands: once, and
        again where it does not.

        made: what these ops give, by microbatch.
        """
        buffers, gathers = dict(self.buffers), [*self._gathers]
        self._ahead = {}
        yield
        ahead, self._ahead = self._ahead, None
        self.record.pause()  # the wait for the verdict is no part of the last op
        if self.validate is not None and not self.validate():
            self._take_back(ahead, made)
            self.buffers.update(buffers)
            for bucket in gathers:
                self.gather_parameters(bucket)
            yield
        # Not before: a loss that is computed again would have been shared already.
        if self._knows_loss or self.rank != self.spec.loss_rank:
            self._share_loss()

    def _take_back(self, ahead: Mapping[int, Pending], made: Sequence[dict[int, object]]) -> None:
        """Forget what was computed with weights that do not stand, and what other ranks have sent of it."""
        for pending in ahead.values():  # the n-th message of a channel is the n-th receive: none may be left
            self.wait_all(pending)
        for bucket in [*self._gathers]:
            self.wait_parameters(bucket)
        for values in made:
            values.clear()
        self.losses.forget()
        self.collected.forget()
        self.record.forget()

    def _posted(self, pending: Pending | None) -> Pending | None:
        """Remember what is to arrive, as long as it may have to come again."""
        if self._ahead is not None and pending is not None:
            self._ahead[id(pending)] = pending
        return pending

    @property
    def _knows_loss(self) -> bool:
        return len(self.losses.values) == self.spec.microbatches

    @property
    def microbatch_count(self) -> float:
        """The number of microbatches of this step, as a mean over replicas; of an evaluation of fewer rows,
        or of more steps, what all of them count for."""
        if not self.weighted:
            return sum(self.numbers) / len(self.numbers)
        return self._weight or self.own_count

    @property
    def own_count(self) -> float:
        """As ``microbatch_count``, of this replica alone."""
        if not self.weighted:
            return self.spec.microbatches
        return sum(weight for _, part in self.weighted for weight in part)

    def microbatches(self, batch: object) -> list[dict[str, torch.Tensor]]:
        """Cut the batch into microbatches, each a dict from leaf name to tensor."""
        if not self.spec.microbatches:
            return [stand_in(self.spec, self.device)]
        return cut(self.spec, batch, self.sizes, self.spec.leaves[self.rank], self.device)

    def lengths(self, name: str) -> list[int]:
        """The lengths of a named dimension, by microbatch."""
        return [lengths[name] for lengths in self.sizes]

    def layouts(self, messages: Callable[..., dict[str, Layout]]) -> list[dict[str, Layout]]:
        """The layouts of the messages of each microbatch, which ``messages`` gives for its lengths."""
        return [messages(*lengths.values()) for lengths in self.sizes]

    def key(self, microbatch: int) -> int:
        """The random-number key of one microbatch of this step; those of all replicas have other keys."""
        return key_of_step(partial(self._key, microbatch))

    def _key(self, microbatch: int) -> int:
        before = 0 if self.replicas is None else sum(self.numbers[: self.replicas.index])
        return fold(fold(fold(0, self.spec.seed), self.step_number), before + microbatch)

    def lane_key(self, microbatch: int, n: int = 0, stride: int = 1) -> int:
        """The key of this lane, for values of which each lane has another share; or each of n lanes that are
        ``stride`` behind each other."""
        assert self.lanes is not None, "a program of lanes runs with them"
        from fxpipe.plan.lanes import LaneGroup  # which most programs run without

        lanes = self.lanes.along(LaneGroup(n, stride)) if n else self.lanes
        return key_of_step(lambda: fold(self._key(microbatch), lanes.index))

    def once(
        self, compute: Callable[..., dict[str, torch.Tensor]], *tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Run ``compute`` on parameters, buffers or constants, for the whole step.

        Waits for what other replicas have updated of any parameter.
        """
        if any(each is self.params for each in tensors):
            for bucket in [*self._gathers]:
                self.wait_parameters(bucket)
        values = compute(*tensors)
        if self.record.at_once is not None:
            self.record.at_once(values.values())
        return values

    def batch_means(
        self,
        counts: Callable[..., dict[str, torch.Tensor]],
        batches: Sequence[Mapping[str, torch.Tensor]],
        *constants: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """The means, over the microbatches of all replicas, of what ``counts`` finds in each.

        constants: what it takes beside a microbatch; they may be buffers, and a list has one for each.
        """
        parts: list[tuple[Sequence[Mapping[str, torch.Tensor]], Sequence[float]]]
        parts = [(self.microbatches(batch), weights) for batch, weights in self.weighted]
        parts = parts or [(batches, [1.0 if self.spec.microbatches else 0.0] * len(batches))]
        each = [
            counts(batch, *(x[m] if isinstance(x, list) else x for x in constants))
            for part, _ in parts
            for m, batch in enumerate(part)
        ]
        weights = [weight for _, part in parts for weight in part]
        means = {}
        for name, first in each[0].items():
            values = multiply_each([one[name].double() for one in each], weights)
            total = torch.stack([*values]).sum(0).view(-1)  # no number of the host is copied to a device
            total = torch.cat([total, total.new_full((1,), sum(weights))])
            if self.replicas is not None:
                self.waiting = REPLICAS
                self.mean_over_replicas(total)
                self.waiting = None
            self._weight = float(total[-1]) if self.weighted else 0.0
            means[name] = (total[:-1] / total[-1]).view(first.shape).to(first.dtype)
        return means

    def receive(self, layouts: Layout | list[Layout], source: int) -> Pending:
        """Allocate the buffers of a message, one or a list, and start to receive it; does not block."""
        pending = self.comm.receive(layouts if isinstance(layouts, list) else [layouts], source)
        self._posted(pending)
        return pending

    def wait(self, pending: Pending) -> torch.Tensor:
        """Block until a message of one tensor has arrived; return it."""
        (tensor,) = self.wait_all(pending)
        return tensor

    def wait_all(self, pending: Pending) -> list[torch.Tensor]:
        """Block until the tensors of a message, or values of all ranks, have arrived; return them, in rank
        order."""
        with self._waits_for(Wait("rank {}", pending.source) if pending.source >= 0 else _ALL):
            tensors = self.comm.wait(pending)
        if self._ahead is not None:
            self._ahead.pop(id(pending), None)
        if self.record.at_arrival is not None:
            for tensor in tensors:
                self.record.at_arrival(tensor)
        return tensors

    def broadcast(
        self, tensor: torch.Tensor | None, layout: Layout, source: int, group: int
    ) -> Pending | None:
        """Start to broadcast the tensor of rank ``source``; the other ranks get it by ``wait``."""
        return self._collective("broadcast", tensor, layout, source, group)

    def gather(self, tensor: torch.Tensor, layout: Layout, to: int, group: int) -> Pending | None:
        """Start to gather every rank's tensor on rank ``to``, which gets them by ``wait_all``."""
        return self._collective("gather", tensor, layout, to, group)

    def all_gather(self, tensor: torch.Tensor, layout: Layout, group: int) -> Pending | None:
        """Start to gather every rank's tensor on all ranks, which get them by ``wait_all``."""
        return self._collective("all_gather", tensor, layout, -1, group)

    def reduce(self, tensor: torch.Tensor, layout: Layout, to: int, group: int) -> Pending | None:
        """Start to add up every rank's tensor, in rank order; rank ``to`` gets the sum by ``wait``."""
        return self._collective("reduce", tensor, layout, to, group)

    def _collective(
        self, verb: Collective, tensor: torch.Tensor | None, layout: Layout, root: int, group: int
    ) -> Pending | None:
        sent = None if tensor is None else in_layout(tensor, layout)
        return self._posted(self.comm.collective(verb, sent, layout, root, group))

    def send(
        self, values: torch.Tensor | list[torch.Tensor], layouts: Layout | list[Layout], to: int
    ) -> None:
        """Start to send a tensor, or several as one message; they stay alive until then.  Does not block."""
        if isinstance(values, torch.Tensor) or not isinstance(layouts, list):
            values, layouts = [values], [layouts]  # type: ignore[list-item]
        self.comm.send([in_layout(t, layout) for t, layout in zip(values, layouts, strict=True)], to)

    def offload(self, values: list[object], at: int) -> None:
        """Start to copy tensors to the rank's pool, from byte ``at`` on; handles take their places."""
        self._offloading.offload(values, at)

    def wait_offload(self, values: list[object]) -> None:
        """Wait until the values are offloaded, and free their memory."""
        if self.record.at_free is not None:
            self.record.at_free()
        with self._waits_for(_OFFLOADED):
            self._offloading.wait_offload(values)

    def reload(self, values: list[object]) -> None:
        """Start to copy offloaded values back."""
        self._offloading.reload(values)

    def wait_reload(self, values: list[object]) -> None:
        """Wait until the values are reloaded; the tensors take the places of their handles."""
        with self._waits_for(_OFFLOADED):
            self._offloading.wait_reload(values)

    def add_loss(self, loss: torch.Tensor, count: torch.Tensor | None = None) -> None:
        """Add the loss of one microbatch; with ``count`` if it is a sum over that many."""
        self.losses.add(loss, count)
        if self._ahead is None and self._knows_loss:  # else ``warm_up`` does, once the update stands
            self._share_loss()

    def add_output(self, name: str, value: torch.Tensor, microbatch: int) -> None:
        """Keep an output of one microbatch, if this step was asked for it."""
        self.collected.add(name, value, microbatch, self.spec.microbatches)

    def all_reduce_gradient(self, name: str, ranks: tuple[int, ...]) -> None:
        """Sum the gradient of a parameter that several ranks hold; all of them get the same bits.

        The first of ``ranks`` adds the gradients in rank order and sends the sum back.
        """
        grad = self._summed(name)
        layout: Layout = (tuple(grad.shape), grad.contiguous().stride(), grad.dtype)
        first = ranks[0]
        if self.rank != first:
            self.send(grad, layout, first)
            # The sum proves that this rank's part has arrived, whose memory it overwrites.
            grad.copy_(self.wait(self.receive(layout, first)))
            return
        for rank in ranks[1:]:
            grad.add_(self.wait(self.receive(layout, rank)))
        for rank in ranks[1:]:
            self.send(grad, layout, rank)

    def divide_gradients_by_count(self) -> None:
        """Turn gradients of a sum into those of the mean, for losses given as (sum, count)."""
        _, count = self.total
        self._flush()  # gradients of tied parameters may still be on their way to other ranks
        summed = (each.summed for each in self.buckets if each.summed is not None)
        for grad in self.grads.values() if self.replicas is None else summed:
            grad.div_(count)

    def _summed(self, name: str) -> torch.Tensor:
        """The gradient of a parameter, or what this replica has of it after the sum over replicas."""
        shard = next((shard.summed for shard in self.buckets if name in shard.names), None)
        return self.grads[name] if shard is None else shard

    def finish(self) -> torch.Tensor | None:
        """End the step when all messages are sent; return the loss of the batch, if there is one, on every
        rank."""
        total, count = self.total
        self._flush()
        self.record.end()
        self.step_number += 1
        if not self.spec.has_loss:
            return None
        dtype = dtype_of(self.spec.loss_dtype)
        return (torch.tensor(total, dtype=torch.float64) / count).to(dtype)

    @property
    def _offloading(self) -> Offloader:
        if self.offloader is None:
            raise RunError(
                "The program offloads, but the plan of this pipeline has no offload pool. Compile with "
                "offload=."
            )
        return self.offloader

    def _flush(self) -> None:
        self.waiting = _TAKERS
        self.comm.flush()
        self.waiting = None

    @property
    def _loss_of(self) -> Wait:
        """Who gives this rank the loss."""
        source = self.spec.loss_rank
        if self.rank == source and self.replicas is not None:
            return Wait("the losses of the other replicas", "replicas")
        return Wait("the loss of rank {}", source)

    def _share_loss(self) -> None:
        """Start to give all ranks the loss of the batch."""
        if self._sharing is not None:
            return
        has_loss = self.rank == self.spec.loss_rank
        if self.kept_total is None:
            self.share_total(self.losses.total_on_host() if has_loss else None)
            return
        self._sharing = _ONES
        if has_loss:
            self.kept_total.append(self.losses.total())

    def share_total(self, total: Numbers | None) -> None:
        """Start to give all ranks the total of the losses, which the rank that has it passes."""
        self._sharing = self.comm.share_numbers(total, self.spec.loss_rank)

    @property
    def total(self) -> tuple[float, float]:
        """The sum of the losses of the step and its divisor, on every rank; waits for what gives them."""
        if self._shared is None:
            with self._waits_for(self._loss_of):
                self._share_loss()
                assert self._sharing is not None
                self._shared = self._sharing().tolist()
        return self._shared[0], self._shared[1]


_ONES = partial(torch.ones, 2, dtype=torch.float64)
_ALL = Wait("all ranks", "ranks")
_TAKERS = Wait("other ranks to take its messages", "ranks")
_DEVICE = Wait("its device", "ranks")  # which may itself wait for a message
_OFFLOADED = Wait("its offloaded activations", None)
