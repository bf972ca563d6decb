"""Capture: one functional ATen graph of the whole training step of one microbatch, as autograd ran it.

    model, example microbatch  ──►  fx.Graph: forward, loss, backward

``make_fx`` runs the user's forward and ``torch.autograd.grad`` on fake tensors, so that custom autograd
functions, no-grad regions and activation checkpointing mean what they mean in eager.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import torch
from torch import fx, nn

from fxpipe.capture.activations import Activations
from fxpipe.capture.assigned import Assigned
from fxpipe.capture.borrow import borrowed
from fxpipe.capture.call import arguments, described
from fxpipe.capture.checkpoint import recorded_checkpoints
from fxpipe.capture.clean import clean
from fxpipe.capture.constants import check_constants
from fxpipe.capture.dtensors import local_gradient
from fxpipe.capture.failures import explained, in_another_thread
from fxpipe.capture.frozen import Watch
from fxpipe.capture.functional import KeepsState, check_unwritten, declare_writes, functionalize
from fxpipe.capture.hooks import Hooks
from fxpipe.capture.inputs import Given, inputs
from fxpipe.capture.kept import Constants, carries_gradients, unwritten, with_history
from fxpipe.capture.made import check_made
from fxpipe.capture.provenance import Provenance
from fxpipe.capture.questions import Questions
from fxpipe.capture.registered import Registered, overlapping, registered
from fxpipe.capture.repeat import difference
from fxpipe.capture.replaced import aliases, put_back, replaced_buffers
from fxpipe.capture.replay import Run
from fxpipe.capture.results import Results, find_results
from fxpipe.capture.snapshot import Snapshot
from fxpipe.capture.values import Values
from fxpipe.errors import CaptureError
from fxpipe.ir import compat
from fxpipe.ir.compat import pytree
from fxpipe.ir.graph import Kind, Origin
from fxpipe.ir.storage import graph_outputs
from fxpipe.plan.dtensors import local
from fxpipe.plan.lanes import NO_LANES, LanePlan
from fxpipe.runtime.program.checks import expect_op
from fxpipe.runtime.torch_private import hook_functions


@dataclass(frozen=True, eq=False)
class Captured:
    """The training step of one microbatch.

    ``graph``'s placeholders carry an ``Input``; its output is an ``Outputs``.
    ``constants`` are the tensors that the model made from nothing or held outside parameters and buffers.
    ``lanes``: where the model has DTensors.
    ``own_hooks``: the functions of hooks that the forward registered by itself.
    """

    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    lanes: LanePlan = NO_LANES
    own_hooks: tuple[str, ...] = ()

    @property
    def checks(self) -> int:
        """The number of checks of each microbatch."""
        return len(graph_outputs(self.graph).checks)


def capture(
    model: nn.Module,
    example: Mapping[str, Any] | tuple[Any, ...],
    loss_fn: Callable[..., Any] | None,
    scale: float,
    device: torch.device,
    gradients: bool = True,
    fixed: Sequence[str] = (),
    outputs: Sequence[str] = (),
    kept: Collection[str] = (),
) -> Captured:
    """Trace the loss of one microbatch and its gradients; the model stays as it is.

    example: keyword arguments (a mapping) or positional arguments (a tuple) of one microbatch.
    loss_fn: ``(output, example) -> loss`` or ``-> (sum, count)``, with a mapping of metrics behind it or not;
        None takes the loss from the output (``results.py``).
    scale: the gradient of the loss that the backward starts from (1 / microbatches; for a loss given
        as (sum, count) it is 1, and the division is the step's last act).
    gradients: False traces the loss alone.
    fixed: names of the example's tensors whose values are part of the program.
    outputs: names of values of the forward that the graph gives as well.
    kept: names of tensors in plain attributes that other steps change (``plan/kept.py``).
    Raises CaptureError, naming module path and source line, for a model that cannot be traced and a
    loss that is no scalar or needs no gradient.  Warns of Python state that the forward changes.
    """
    trace = partial(_traced, model, example, loss_fn, scale, device, gradients, fixed, outputs)
    attempt = partial(_attempt, trace, dict.fromkeys(kept, False))
    try:
        found = attempt(contextlib.nullcontext, inf)
    except CaptureError:
        with contextlib.suppress(CaptureError):
            return attempt(compat.compiling_flag, inf)
        raise
    checks = found.checks - len(fixed)
    if checks > 0:  # the model's branch for compilers may depend less on data
        with contextlib.suppress(CaptureError):
            other = attempt(compat.compiling_flag, checks - 1)
            return min(found, other, key=lambda captured: captured.checks)
    return found


def _attempt(
    trace: Callable[..., Captured],
    kept: Mapping[str, bool],
    flag: Callable[[], contextlib.AbstractContextManager[None]],
    most_checks: float,
) -> Captured:
    """A trace; while state is found among its constants, another one with that among its buffers."""
    refused = ""
    while True:
        try:
            return trace(flag, most_checks, kept, refused)
        except KeepsState as error:
            if not error.names:
                raise
            kept, refused = {**kept, **error.names}, str(error)


def _traced(
    model: nn.Module,
    example: Any,
    loss_fn: Callable[..., Any] | None,
    scale: float,
    device: torch.device,
    gradients: bool,
    fixed: Sequence[str],
    outputs: Sequence[str],
    flag: Callable[[], contextlib.AbstractContextManager[None]],
    most_checks: float,
    kept: Mapping[str, bool],
    refused: str,
) -> Captured:
    """most_checks: of the data, besides those of ``fixed`` inputs; with more the trace is given up.
    kept: as for ``inputs``.  refused: what was wrong with a trace that had them as constants."""
    mode = compat.FakeMode()
    given = inputs(model, example, mode, device, fixed, kept)
    step = _Function(model, example, loss_fn, scale, given, gradients, outputs, most_checks, kept)
    mode.source = step.provenance.source
    fakes = {id(r.tensor): x.fake for r, x in zip(step.registered, given, strict=False)}
    values = [x.local for x in given]
    with borrowed(model, loss_fn, fakes) as snapshot:
        watch, before = Watch(snapshot), hook_functions(model)
        step.snapshot = snapshot
        put_back(step.registered, given)

        as_written = compat.plain_kernels(), compat.modules_without_code(), compat.uncompiled()
        with contextlib.ExitStack() as stack:
            stack.callback(step.constants.detach)
            for context in (flag(), recorded_checkpoints(), *as_written, compat.without_log(), mode):
                stack.enter_context(context)
            try:
                module = compat.make_fx(step)(*values)
            except Exception as error:
                if mode.elsewhere:
                    raise in_another_thread(mode.elsewhere) from error
                if isinstance(error, KeepsState) and error.tensor is not None:
                    error.names = step.constants.like(error.tensor)
                raise (
                    error
                    if isinstance(error, CaptureError)
                    else explained(error, step.provenance, step.of_loss)
                ) from error
        after = hook_functions(model)
        if mode.elsewhere:
            raise in_another_thread(mode.elsewhere)
        mode.source = str  # the other one leads to the model, and the graph's tensors to the mode
        replaced = unwritten(module.graph, step.registered)
        check_constants(module, [r for r in step.registered if r.name not in replaced])
        if refused and step.difference:  # a state that the first batch alone sets, for example
            raise CaptureError(f"{refused} {step.difference}.")
        watch.warn_of_changes(step.difference)
        step.hooks.warn(module.graph)
    with compat.plain_kernels(), compat.modules_without_code(), mode:
        module = functionalize(module, values)
    frozen = {r.name for r in step.registered if not r.tensor.requires_grad}
    cleaned = clean(module, [x.input for x in given], step.layout, frozen)
    captured = Captured(*cleaned, own_hooks=tuple(sorted(after - before)))
    _check_written(captured.graph, step.registered, replaced)
    return captured


def _check_written(graph: fx.Graph, tensors: Sequence[Registered], replaced: set[str]) -> None:
    """Raise CaptureError for a changed buffer that is empty, or that shares memory, as the other tensor would
    change too.  replaced: names of those that get new memory."""
    changed = graph_outputs(graph).buffers
    for x in (x for x in tensors if x.name not in replaced):
        if x.name in changed and not x.tensor.numel():
            raise CaptureError(
                f"The forward writes to the buffer {x.name!r}, which is empty "
                f"({changed[x.name].meta['origin']}): its first run would give it a shape. Run the model on "
                "one batch before you compile it."
            )
        expanded = any(n > 1 and not step for n, step in zip(x.tensor.shape, x.tensor.stride(), strict=True))
        if x.name in changed and expanded:
            raise CaptureError(
                f"The forward changes the buffer {x.name!r}, which is expanded: several of its elements are "
                "one in memory. Register a copy of it (.contiguous())."
            )
    for a, b in overlapping(tensors):
        if (a.name in changed or b.name in changed) and not replaced.issuperset((a.name, b.name)):
            raise CaptureError(
                f"{a.name!r} and {b.name!r} share memory and the forward writes to one of them. Make them "
                "one buffer, or copy one of them."
            )


@dataclass(frozen=True, eq=False)
class _Step:
    """One run of the step: results, gradients and replaced buffers by name.

    ``state``: the constants of modules that it replaced.
    ``run``: without the backward, unless that runs code of the model (``backward``).
    """

    results: Results
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    backward: bool
    run: Run


class _Function:
    """The traced function, from fake parameters, buffers and batch leaves to loss and gradients."""

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        loss_fn: Any,
        scale: float,
        given: list[Given],
        gradients: bool,
        outputs: Sequence[str],
        most_checks: float,
        kept: Mapping[str, bool],
    ):
        self.model, self.loss_fn, self.scale, self.given = model, loss_fn, scale, given
        self.hooks = Hooks(model, gradients)
        self.gradients, self.activations = gradients, Activations(model, outputs)
        self.fixed = {x.input.name: x.real.reshape(-1).tolist() for x in given if x.fixed}
        self.registered = registered(model, kept)
        self.constants = Constants(model, kept)
        self.leaves, self.spec = pytree.tree_flatten(example)
        self.provenance = Provenance(model, [(x.input, local(x.real)) for x in given], most_checks)
        self.snapshot = Snapshot([], [])  # of the model, before the trace
        self.difference = ""  # of a second run from the traced one
        self.of_loss = ""  # while loss_fn runs: its arguments, as text
        self.layout: dict[str, Any] = {}  # what the flat outputs of the traced graph are

    def __call__(self, *values: torch.Tensor) -> list[torch.Tensor]:
        trained = [x for x in self.given if x.input.kind is Kind.PARAMETER and x.fake.requires_grad]
        wanted = {x.input.name: x.fake for x in trained}
        questions = Questions(self.provenance, self.hooks)
        questions.hooked = self.hooks.follow_gradients(self.registered, wanted)
        with self.hooks, self.provenance, questions:
            first = self._step(wanted, self.gradients, questions)
        if self.provenance.answers.refused is not None:  # which the model caught
            raise self.provenance.answers.refused
        check_made(self.model, self.registered, self.provenance.answers)
        declare_writes(compat.traced_graph())
        check_unwritten(compat.traced_graph(), compat.traced_constants())
        results, found, replaced = first.results, first.gradients, first.buffers
        self.layout = {
            "loss": results.loss is not None,
            "count": results.count is not None,
            "outputs": list(results.outputs),
            "grads": list(found),
            "buffers": list(replaced),
            "aliases": aliases(self.registered, self.given, replaced, questions.assigned),
        }
        numbers = [x.detach() for x in (results.loss, results.count) if x is not None]
        outputs = [x.detach() for x in results.outputs.values()]
        flat = [*numbers, *outputs, *found.values(), *replaced.values()]
        if not self.snapshot.is_whole or self.snapshot.is_changed():
            reshaped = self.constants.reshaped()
            try:
                self.difference = self._repeat(first, flat, wanted, questions)
                if self.difference and first.state:
                    raise KeepsState("")
            except KeepsState as error:
                error.args = (f"{error}{reshaped}",)
                error.names = {name: now.requires_grad for name, now in first.state.items()}
                raise
        return flat

    def _step(self, wanted: dict[str, torch.Tensor], backward: bool, questions: Questions) -> _Step:
        questions.assigned = Assigned()
        results = self._forward(wanted)
        scale = 1.0 if results.count is not None else self.scale
        gradients: dict[str, torch.Tensor] = {}
        if backward:
            gradients, backward = self._gradients(results.loss, wanted, scale, questions)
        buffers = replaced_buffers(self.registered, self.given, questions.assigned)
        named: dict[str, torch.Tensor | None] = {"loss": results.loss, "count": results.count}
        named |= {f"the output {name!r}": x for name, x in results.outputs.items()}
        named |= {f"the buffer {name!r}": x for name, x in buffers.items()}
        state = self.constants.replaced()
        named |= {f"the {name!r} that the model keeps": x for name, x in state.items()}
        if backward:
            named |= {f"the gradient of {name!r}": x for name, x in gradients.items()}
        nodes = {name: compat.traced_node(x) for name, x in named.items() if x is not None}
        return _Step(results, gradients, buffers, state, backward, Run(self.provenance.calls, nodes))

    def _repeat(
        self,
        first: _Step,
        traced: list[torch.Tensor],
        wanted: dict[str, torch.Tensor],
        questions: Questions,
    ) -> str:
        """Run the step again, as the next one would run, and take it out of the graph; ``difference``.

        traced: the results of the trace, which stay as they are.
        """
        last = compat.last_node()
        nodes = [compat.traced_node(x) for x in traced]
        put_back(self.registered, self.given)
        for x, placeholder in zip(
            self.given, compat.traced_graph().find_nodes(op="placeholder"), strict=False
        ):
            x.fake.grad = None
            compat.track(x.local, placeholder)
        self.snapshot.begin_again()
        kept = {}
        for name, tensor in self.snapshot.new_tensors():
            node = compat.traced_node(tensor) if isinstance(tensor, compat.FakeTensor) else None
            if node is not None and node.op != "placeholder":
                kept[node] = name
                if tensor.requires_grad and tensor.is_leaf:
                    raise CaptureError(
                        f"The forward makes a trainable tensor and keeps it in {name} "
                        f"({node.meta.get('origin', Origin())}): no step would train it. Make it beforehand, "
                        "or run the model on one batch before you compile it."
                    )
        inputs = [(x.input, local(x.real)) for x in self.given]
        values = partial(Values, inputs, first.run.results)
        self.provenance.repeat(first.run.calls, [x.local for x in self.given], values)
        questions.again = True
        with warnings.catch_warnings(), self.provenance, questions:
            warnings.simplefilter("ignore")  # they were given in the first run
            second = self._step(wanted, first.backward, questions)
        found = difference(first.run, second.run, inputs, kept)
        graph = compat.traced_graph()
        for node in reversed(compat.nodes_after(last)):
            graph.erase_node(node)
        for tensor, node in zip(traced, nodes, strict=True):
            if node is not None:
                compat.track(tensor, node)
        return found

    def _forward(self, wanted: dict[str, torch.Tensor]) -> Results:
        example = self._example()
        args, kwargs = arguments(example)
        with self.activations.kept():
            output = self.model(*args, **kwargs)
        if self.loss_fn is not None:
            self.of_loss = (
                f"It gets the output, {described([output])}, and the microbatch, {described([example])}."
            )
        results = find_results(output, example, self.loss_fn, self.gradients, self.activations)
        self.of_loss = ""
        for name, value in wanted.items():
            if value.grad is not None:
                raise CaptureError(
                    f"The forward calls backward(), which adds to the gradient of {name!r} beside the "
                    "step's own. Add that loss to the loss, or take the gradients that the forward needs "
                    "with torch.autograd.grad(…) or backward(inputs=[…])."
                )
        return results

    def _example(self) -> Any:
        """The microbatch with fake tensors, and with real ones for fixed inputs."""
        tensors = []
        for given in self.given:
            if given.input.kind is Kind.BATCH:
                tensors.append(given.real.detach().clone() if given.fixed else given.fake)
                if given.fixed:
                    name = given.input.name
                    expect_op(given.fake, self.fixed[name], f"the fixed input {name!r}")
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    def _gradients(
        self,
        loss: torch.Tensor | None,
        wanted: dict[str, torch.Tensor],
        scale: float,
        questions: Questions,
    ) -> tuple[dict[str, torch.Tensor], bool]:
        """The gradients by name, and whether the backward may run code of the model."""
        assert loss is not None, "find_results raises where gradients need one"
        carried = with_history(self.registered, self.given)
        self.provenance.backward_from(loss)
        runs_code = questions.hooked or self.provenance.backward_runs_code
        self.provenance.compares = runs_code
        with torch.autocast(loss.device.type, enabled=False):
            seed = torch.full((), scale, dtype=loss.dtype, device=loss.device)
            asked = [*wanted.values(), *(fake for _, fake in carried)]
            grads = torch.autograd.grad(loss, asked, seed, allow_unused=True)
        self.provenance.compares = True
        for (r, _), grad in zip(carried, grads[len(wanted) :], strict=True):
            if grad is not None:
                raise carries_gradients(r)
        found = zip(wanted.items(), grads, strict=False)
        total = {name: local_gradient(grad, x) for (name, x), grad in found if grad is not None}
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
