"""The function that is traced: forward, loss and backward on fake tensors.

It runs them a second time, as the next step would, to see whether that runs the same ops.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fxpipe.capture.activations import Activations
from fxpipe.capture.call import Microbatch, arguments, arguments_of_forward, described
from fxpipe.capture.capture_options import CaptureOptions
from fxpipe.capture.functional import KeepsState, check_unwritten, declare_writes
from fxpipe.capture.hooks import Hooks
from fxpipe.capture.inputs import TracedInput
from fxpipe.capture.lanes.dtensors import local_gradient
from fxpipe.capture.provenance import Provenance
from fxpipe.capture.reads.data_assignment import DataAssignments
from fxpipe.capture.reads.length_reads import LengthReads
from fxpipe.capture.reads.tensor_reads import TensorReads
from fxpipe.capture.reads.varying_values import Values
from fxpipe.capture.reads.world import World
from fxpipe.capture.results import Results, find_results
from fxpipe.capture.rules.attention_masks import AttentionMasks
from fxpipe.capture.state.attribute_state import Constants, carries_gradients, with_history
from fxpipe.capture.state.lazy_parameters import check_made
from fxpipe.capture.state.recorded_state import RecordedState
from fxpipe.capture.state.registered import registered
from fxpipe.capture.state.repeat import difference
from fxpipe.capture.state.replaced_buffers import aliases, put_back, replaced_buffers
from fxpipe.capture.state.replay import ForwardRun
from fxpipe.capture.traced_nodes import last_node, nodes_after
from fxpipe.errors import CaptureError
from fxpipe.ir import compat
from fxpipe.ir.compat import pytree
from fxpipe.ir.graph import Kind, Origin
from fxpipe.plan.dtensors import local
from fxpipe.plan.step import ASKED_NOTHING
from fxpipe.runtime.program.checks import expect_op


@dataclass(frozen=True, eq=False)
class _Step:
    """The results of a run of the step: its outputs, gradients and replaced buffers by name.

    ``state``: the constants of modules that it replaced.
    ``run``: without the backward, unless that runs code of the model (``backward``).
    """

    results: Results
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    backward: bool
    run: ForwardRun


class StepFunction:
    """The traced function, from fake parameters, buffers and batch leaves to loss and gradients."""

    def __init__(
        self,
        model: nn.Module,
        example: object,
        loss_fn: Any,
        scale: float,
        traced_inputs: list[TracedInput],
        options: CaptureOptions,
        most_checks: float,
        kept: Mapping[str, bool],
        changing: Collection[str] = (),
    ):
        self.model, self.loss_fn, self.scale, self.inputs = model, loss_fn, scale, traced_inputs
        self.hooks = Hooks(model, options.gradients)
        self.gradients, self.activations = options.gradients, Activations(model, options.outputs)
        self.fixed = {x.input.name: x.real.reshape(-1).tolist() for x in traced_inputs if x.fixed}
        self.assumed = options.assumed
        self.registered = registered(model, kept)
        self.pairs = [*zip(self.registered, traced_inputs, strict=False)]  # without the batch
        self.constants = Constants(model, kept)
        self.leaves, self.spec = pytree.tree_flatten(example)
        self.provenance = Provenance(model, [(x.input, local(x.real)) for x in traced_inputs], most_checks)
        self.provenance.answers.taken = options.branch
        self.world = World(options.replicas, self.provenance)
        self.recorded = RecordedState()  # of the model, before the trace
        self.difference = ""  # of a second run from the traced one
        self.of_loss = ""  # while loss_fn runs: its arguments, as text
        # By place and by name, the arguments of the forward; the rest is for loss_fn.
        args, kwargs = arguments(example) if loss_fn is None else arguments_of_forward(model, example)
        self.taken, self.taken_names = len(args), {*kwargs}
        self.unread: set[str] = set()  # keys of the example that neither forward nor loss_fn reads
        self.added: set[str] = set()  # those that loss_fn puts there
        self.asked = ASKED_NOTHING  # see ``TensorReads``
        self.attention = AttentionMasks(
            self.provenance.answers, options.rules, options.masks, options.fused_attention, changing
        )
        self.masks = self.attention.masks
        self.replaced: set[str] = set()  # buffers that the forward gives other tensors
        self.length_reads = LengthReads() if options.lengths else None
        self.aliases: list[tuple[str, str]] = []  # of buffers

    def __call__(self, *values: torch.Tensor) -> dict[str, Any]:
        """The loss and the count, if there are any, and by name outputs, gradients and replaced buffers."""
        trained = [x for x in self.inputs if x.input.kind is Kind.PARAMETER and x.fake.requires_grad]
        wanted = {x.input.name: x.fake for x in trained}
        reads = TensorReads(self.provenance, self.hooks)
        reads.with_gradients = frozenset(
            id(x.fake) for x in self.inputs if x.real.is_leaf and x.real.grad is not None
        )
        reads.hooked = self.hooks.follow_gradients(self.registered, wanted)
        lengths = self.length_reads or contextlib.nullcontext()
        with self.hooks, self.provenance, reads, self.attention, lengths:
            first = self._step(wanted, self.gradients, reads)
        self.masks, self.replaced = self.attention.masks, {*first.buffers}
        check_made(self.model, self.registered, self.provenance.answers)
        declare_writes(compat.traced_graph())
        check_unwritten(compat.traced_graph(), compat.traced_constants())
        self.asked = reads.asked
        results, gradients, replaced = first.results, first.gradients, first.buffers
        self.aliases = aliases(self.pairs, replaced, reads.assigned)
        of_forward = {"loss": results.loss, "count": results.count, "outputs": results.outputs}
        detached = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, of_forward)
        found = {**detached, "grads": gradients, "buffers": replaced}
        if not self.recorded.is_whole or self.recorded.is_changed() or reads.text or self.world.asked:
            reshaped = self.constants.reshaped()
            try:
                traced = [x for x in pytree.tree_leaves(found) if x is not None]
                self.difference = self._repeat(first, traced, wanted, reads)
                if first.state:  # the second run may have read another one, of the same value
                    raise KeepsState("")
            except KeepsState as error:
                error.args = (f"{error}{reshaped}",)
                error.names = {name: now.requires_grad for name, now in first.state.items()}
                raise
        return found

    def _step(self, wanted: dict[str, torch.Tensor], backward: bool, reads: TensorReads) -> _Step:
        reads.assigned = DataAssignments()
        results = self._forward(wanted)
        scale = 1.0 if results.count is not None else self.scale
        gradients: dict[str, torch.Tensor] = {}
        if backward:
            gradients, backward = self._gradients(results.loss, wanted, scale, reads)
        self.provenance.answers.refusals.end()
        buffers = replaced_buffers(self.pairs, reads.assigned)
        named: dict[str, torch.Tensor | None] = {"loss": results.loss, "count": results.count}
        named |= {f"the output {name!r}": x for name, x in results.outputs.items()}
        named |= {f"the buffer {name!r}": x for name, x in buffers.items()}
        state = self.constants.replaced()
        named |= {f"the {name!r} that the model keeps": x for name, x in state.items()}
        if backward:
            named |= {f"the gradient of {name!r}": x for name, x in gradients.items()}
        nodes = {name: compat.traced_node(x) for name, x in named.items() if x is not None}
        return _Step(results, gradients, buffers, state, backward, ForwardRun(self.provenance.calls, nodes))

    def _repeat(
        self, first: _Step, traced: list[torch.Tensor], wanted: dict[str, torch.Tensor], reads: TensorReads
    ) -> str:
        """Run the step again, as the next one would run, and take it out of the graph; ``difference``.

        traced: the results of the trace, which stay as they are.
        """
        # What of the first run the tracer knows by its tensors is noted before the second one changes them.
        last = last_node()
        nodes = [compat.traced_node(x) for x in traced]
        put_back(self.pairs)
        for x, placeholder in zip(
            self.inputs, compat.traced_graph().find_nodes(op="placeholder"), strict=False
        ):
            x.fake.grad = None
            compat.track(x.local, placeholder)
        self.recorded.begin_again()
        kept = {}
        for name, tensor in self.recorded.new_tensors():
            node = compat.traced_node(tensor) if isinstance(tensor, compat.FakeTensor) else None
            if node is not None and node.op != "placeholder":
                kept[node] = name
                if tensor.requires_grad and tensor.is_leaf:
                    raise CaptureError(
                        f"The forward makes a trainable tensor and keeps it in {name} "
                        f"({node.meta.get('origin', Origin())}): no step would train it. Make it beforehand, "
                        "or run the model on one batch before you compile it."
                    )
        inputs = [(x.input, local(x.real)) for x in self.inputs]
        values = partial(Values, inputs, first.run.results)
        self.provenance.repeat(first.run.calls, [x.local for x in self.inputs], values)
        reads.again = True
        self.attention.begin()
        self.world.again()
        shown = contextlib.redirect_stdout(io.StringIO())
        with warnings.catch_warnings(), shown, self.provenance, reads, self.attention:
            warnings.simplefilter("ignore")  # they were given in the first run
            second = self._step(wanted, first.backward, reads)
        problem = difference(first.run, second.run, inputs, kept)
        self.world.end(problem)
        if problem and reads.text:
            raise CaptureError(
                f"The model's code reads the text of a tensor, which it makes at {reads.text}. A program "
                f"is fixed before the data is known: compare tensors instead. ({problem}.)"
            )
        graph = compat.traced_graph()
        for node in reversed(nodes_after(last)):
            graph.erase_node(node)
        for tensor, node in zip(traced, nodes, strict=True):
            if node is not None:
                compat.track(tensor, node)
        return problem

    def _forward(self, wanted: dict[str, torch.Tensor]) -> Results:
        example = self._example()
        args, kwargs = arguments(example)
        args, kwargs = args[: self.taken], {name: x for name, x in kwargs.items() if name in self.taken_names}
        with self.activations.kept():
            output = self.model(*args, **kwargs)
        if self.loss_fn is not None:
            self.of_loss = (
                f"It gets the output, {described([output])}, and the whole microbatch, "
                f"{described([example])}: take the labels out of it, as in "
                "loss_fn=lambda output, batch: cross_entropy(output, batch[…])."
            )
            example = Microbatch(example) if isinstance(example, dict) else example
        results = find_results(output, example, self.loss_fn, self.gradients, self.activations)
        self.of_loss = ""
        if isinstance(example, Microbatch):
            self.unread = {*[*example]} - self.taken_names - example.names
            self.added = {*[*example]} - example.example
        for name, value in wanted.items():
            if value.grad is not None:
                raise CaptureError(
                    f"The forward calls backward(), which adds to the gradient of {name!r} beside the "
                    "step's own. Add that loss to the loss, or take the gradients that the forward needs "
                    "with torch.autograd.grad(…) or backward(inputs=[…])."
                )
        return results

    def _example(self) -> object:
        """The microbatch with fake tensors, with real ones for fixed inputs, and with tensors that the graph
        makes where all elements are assumed to be one number."""
        tensors = []
        for traced in self.inputs:
            name = traced.input.name
            if traced.input.kind is not Kind.BATCH:
                continue
            if name in self.assumed:
                fake = traced.fake  # of which the values below know the shape alone
                tensors.append(
                    torch.full(fake.shape, self.assumed[name], dtype=fake.dtype, device=fake.device)
                )
            elif traced.fixed:
                tensors.append(traced.real.detach().clone())
                expect_op(traced.fake, self.fixed[name], f"the fixed input {name!r}")
            else:
                tensors.append(traced.fake)
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    def _gradients(
        self, loss: torch.Tensor | None, wanted: dict[str, torch.Tensor], scale: float, reads: TensorReads
    ) -> tuple[dict[str, torch.Tensor], bool]:
        """The gradients by name, and whether the backward may run code of the model."""
        assert loss is not None, "find_results raises where gradients need one"
        carried = with_history(self.pairs)
        self.provenance.backward_from(loss)
        runs_code = reads.hooked or self.provenance.backward_runs_code
        self.provenance.compares = runs_code
        with torch.autocast(loss.device.type, enabled=False):
            seed = torch.full((), scale, dtype=loss.dtype, device=loss.device)
            asked = [*wanted.values(), *(fake for _, fake in carried)]
            grads = torch.autograd.grad(loss, asked, seed, allow_unused=True)
        self.provenance.compares = True
        for (r, _), grad in zip(carried, grads[len(wanted) :], strict=True):
            if grad is not None:
                raise carries_gradients(r)
        pairs = zip(wanted.items(), grads, strict=False)
        total = {name: local_gradient(grad, x) for (name, x), grad in pairs if grad is not None}
        for name, value in wanted.items():
            if value.grad is not None:  # the backward of a custom function called backward()
                added = local_gradient(value.grad, value)
                total[name] = total[name] + added if name in total else added
        if not total:
            raise CaptureError(
                "No trainable parameter gets a gradient: the loss does not depend on any of them. "
                "Look for a detach() or a no_grad() block on the way."
            )
        return total, runs_code
