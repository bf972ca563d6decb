"""Capture: one functional ATen graph of the whole training step of one microbatch, as autograd ran it.

    model, example microbatch  ──►  fx.Graph: forward, loss, backward

``make_fx`` runs the user's forward and ``torch.autograd.grad`` on fake tensors, so that custom autograd
functions, no-grad regions and activation checkpointing mean what they mean in eager.
"""

from __future__ import annotations

import contextlib
import contextvars
import io
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import fx, nn

from fxpipe.capture.call import warn_of_added, warn_of_unread
from fxpipe.capture.capture_options import CAPTURE_ALL, CaptureOptions
from fxpipe.capture.clean import clean
from fxpipe.capture.failures import explained, in_another_thread
from fxpipe.capture.functional import KeepsState, functionalize, overwritten
from fxpipe.capture.hooks import hook_functions
from fxpipe.capture.inputs import inputs
from fxpipe.capture.reads.checkpoint import recorded_checkpoints
from fxpipe.capture.reads.length_reads import Comparison
from fxpipe.capture.reads.table_rows import check_table_rows
from fxpipe.capture.rows.analysis import RowAnalysis
from fxpipe.capture.rules.attention_masks import Masks
from fxpipe.capture.rules.batch_means import NO_MEANS, BatchMeans, divide_by_batch_means
from fxpipe.capture.rules.buffer_updates import warn_of_updates
from fxpipe.capture.rules.gradient_hooks import warn_of_gradients
from fxpipe.capture.rules.joins import warn_of_joins
from fxpipe.capture.rules.loss_tail import Tail
from fxpipe.capture.rules.metrics import warn_of_metrics
from fxpipe.capture.scale import REPLICAS_LATER
from fxpipe.capture.state.attribute_state import unwritten
from fxpipe.capture.state.constants import check_constants
from fxpipe.capture.state.fake_model import borrowed
from fxpipe.capture.state.frozen_state import StateWatch
from fxpipe.capture.state.registered import Registered, overlapping
from fxpipe.capture.state.replaced_buffers import put_back
from fxpipe.capture.step_function import StepFunction
from fxpipe.errors import CaptureError
from fxpipe.ir import compat, patches
from fxpipe.ir.graph import Kind, Origin
from fxpipe.ir.size import Share
from fxpipe.ir.storage import call_nodes, graph_outputs, storage_root
from fxpipe.plan.branches import Branch
from fxpipe.plan.dtensors import mesh_of
from fxpipe.plan.lanes import NO_LANES, LanePlan
from fxpipe.plan.step import ASKED_NOTHING, Asked
from fxpipe.python_state.walk import PythonState
from fxpipe.runtime.batch.microbatches import batch_leaves
from fxpipe.runtime.program.checks import is_assert


@dataclass(frozen=True, eq=False)
class Captured:
    """The training step of one microbatch.

    ``graph``'s placeholders carry an ``Input``; its output is an ``Outputs``.  ``constants`` are the tensors
    that the model made from nothing or held outside parameters and buffers.
    """

    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    lanes: LanePlan = NO_LANES
    """Those of a model with DTensors."""
    own_hooks: tuple[str, ...] = ()
    """The functions of hooks that the forward registered by itself."""
    sources: tuple[weakref.ref[torch.Tensor], ...] = ()
    """The model's own tensors that constants are copies of."""
    stored: Mapping[str, Collection[str]] = field(default_factory=dict)
    """What the forward sets of Python state (``RecordedState.stored``)."""
    asked: Asked = ASKED_NOTHING
    """What the forward asks of tensors."""
    written: frozenset[str] = frozenset()
    """The leaves of the microbatch that it writes to."""
    unread: frozenset[str] = frozenset()
    """The leaves of which nothing reads anything."""
    means: BatchMeans = NO_MEANS
    """What the loss divides by."""
    masks: Masks = field(default_factory=Masks)
    """What became of the masks of attention."""
    comparisons: tuple[Comparison, ...] = ()
    """Those that the forward's Python makes with sizes, where they were asked for."""
    branches: tuple[Branch, ...] = ()
    """What the model's code asks of the microbatch alone, with two answers."""

    @property
    def checks(self) -> int:
        """The number of checks of each microbatch, beside the model's own asserts."""
        return sum(not is_assert(str(node.args[2])) for node in graph_outputs(self.graph).checks)


def capture(
    model: nn.Module,
    example: Mapping[str, object] | tuple[object, ...],
    loss_fn: Callable[..., object] | None,
    scale: float,
    device: torch.device,
    options: CaptureOptions = CAPTURE_ALL,
    kept: Collection[str] = (),
    walked: PythonState | None = None,
) -> Captured:
    """Trace the loss of one microbatch and its gradients; the model stays as it is.

    example: keyword arguments (a mapping) or positional arguments (a tuple) of one microbatch.
    loss_fn: ``(output, example) -> loss`` or ``-> (sum, count)``, with a mapping of metrics behind it or not;
        None takes the loss from the output (``results.py``).
    scale: the gradient of the loss that the backward starts from (1 / microbatches; for a loss given
        as (sum, count) it is 1, and the division is the step's last act).
    kept: names of tensors in plain attributes that other steps change (``plan/attribute_state.py``).
    walked: the Python that the model and the loss function reach, if it is known.
    Raises CaptureError, naming module path and source line, for a model that cannot be traced and a
    loss that is no scalar or needs no gradient.  Warns of Python state that the forward changes.
    """
    walked = PythonState.of(model, loss_fn) if walked is None else walked
    trace = partial(_traced, model, example, loss_fn, scale, device, options, walked)
    attempt = partial(_attempt, trace, dict.fromkeys(kept, False))
    captured = _of_fewest_checks(attempt, len(options.fixed))
    if not options.over_batch:
        return captured

    share = Share(scale) if options.lengths else scale  # of any number of microbatches

    def forward(microbatch: Any) -> tuple[fx.Graph, Mapping[str, torch.Tensor]] | None:
        alone = replace(options, gradients=False, over_batch=False)
        shown = contextlib.redirect_stdout(io.StringIO())
        with warnings.catch_warnings(), shown, contextlib.suppress(CaptureError):
            warnings.simplefilter("ignore")  # they were given
            other = capture(model, microbatch, loss_fn, scale, device, alone, kept, walked)
            return other.graph, other.constants
        return None

    analysis, named = RowAnalysis(captured.graph, captured.constants), graph_outputs(captured.graph)
    is_judged, means = options.judged and share != 1, NO_MEANS
    if named.loss is not None and named.count is None:
        tail = Tail(captured.graph, analysis)
        if is_judged:
            warn_of_joins(tail, analysis, example, forward)
            warn_of_metrics(captured.graph, analysis, [each.node for each in tail.divisions], example)
        replicas = REPLICAS_LATER if options.replicas is None else options.replicas
        means = divide_by_batch_means(tail, share, replicas)
    elif is_judged:
        analysis.follow()
        warn_of_metrics(captured.graph, analysis, (), example)
    if is_judged:
        warn_of_updates(captured.graph, analysis)
        warn_of_gradients(captured.graph, analysis.rows)
    return replace(captured, means=means)


def _of_fewest_checks(attempt: Callable[..., Captured], fixed: int) -> Captured:
    """The trace of the model as it is, or of its branch for compilers, where that depends less on data.

    fixed: the number of checks that are in any trace.
    """
    try:
        first = attempt(contextlib.nullcontext, inf)
    except CaptureError:
        with contextlib.suppress(CaptureError):
            return attempt(patches.compiling_flag, inf)
        raise
    checks = first.checks - fixed
    if checks > 0:
        with contextlib.suppress(CaptureError):
            other = attempt(patches.compiling_flag, checks - 1)
            return min(first, other, key=lambda captured: captured.checks)
    return first


class _MasksChange(Exception):
    """The step changes buffers that masks of attention are made from, which must not be checked then."""

    def __init__(self, buffers: frozenset[str]) -> None:
        super().__init__()
        self.buffers = buffers


def _attempt(
    trace: Callable[..., Captured],
    kept: Mapping[str, bool],
    flag: Callable[[], contextlib.AbstractContextManager[object]],
    most_checks: float,
) -> Captured:
    """A trace; while state is found among its constants, another one with that among its buffers."""
    refused, changing = "", frozenset[str]()
    while True:
        try:  # what the forward gives to context variables is of this trace alone
            return contextvars.copy_context().run(trace, flag, most_checks, kept, refused, changing)
        except _MasksChange as error:
            changing |= error.buffers
        except KeepsState as error:
            if not error.names:
                raise
            kept, refused = {**kept, **error.names}, str(error)


def _traced(
    model: nn.Module,
    example: object,
    loss_fn: Callable[..., object] | None,
    scale: float,
    device: torch.device,
    options: CaptureOptions,
    walked: PythonState,
    flag: Callable[[], contextlib.AbstractContextManager[object]],
    most_checks: float,
    kept: Mapping[str, bool],
    refused: str,
    changing: frozenset[str],
) -> Captured:
    """Trace the step once.  most_checks: of the data, besides those of ``fixed`` inputs; with more the trace
    is given up.  kept: as for ``inputs``.  refused: what was wrong with them as constants.  changing: as for
    ``AttentionMasks``."""
    mode = compat.FakeMode()
    traced_inputs = inputs(model, example, mode, device, options.fixed, kept)
    step = StepFunction(model, example, loss_fn, scale, traced_inputs, options, most_checks, kept, changing)
    mode.source = step.provenance.source
    fakes = {id(r.tensor): x.fake for r, x in step.pairs}
    values = [x.local for x in traced_inputs]
    with borrowed(model, walked, fakes, step.provenance) as recorded:
        watch, before = StateWatch(recorded), hook_functions(model)
        step.recorded = recorded
        put_back(step.pairs)
        module = _run(step, model, mode, flag, options)
        after = hook_functions(model)
        if mode.elsewhere:
            raise in_another_thread(mode.elsewhere)
        mode.source = str  # the other one leads to the model, and the graph's tensors to the mode
        memory = {storage_root(x) for node in call_nodes(module.graph) for x in overwritten(node)}
        leaves = zip(module.graph.find_nodes(op="placeholder"), traced_inputs, strict=True)
        in_place = [x.input for node, x in leaves if node in memory]
        written = {x.name for x in in_place if x.kind is Kind.BATCH}
        changed = step.replaced | {x.name for x in in_place if x.kind is not Kind.BATCH}
        if not changed.isdisjoint(step.masks.checked):
            raise _MasksChange(frozenset(changed))
        replaced = unwritten(module.graph, step.registered)
        check_constants(module, [r for r in step.registered if r.name not in replaced], model, loss_fn)
        if refused and step.difference:  # a state that the first batch alone sets, for example
            raise CaptureError(f"{refused} {step.difference}.")
        files = {node.meta.get("origin", Origin()).source.rpartition(":")[0] for node in module.graph.nodes}
        step.hooks.warn(module.graph)
        with patches.plain_kernels(), patches.graphs_alone(), mode:
            module = functionalize(module, values)
        frozen = {r.name for r in step.registered if not r.tensor.requires_grad}
        constants = (getattr(module, node.target) for node in module.graph.find_nodes(op="get_attr"))
        of_model = {id(r.tensor) for r in step.registered}
        read = (tensor for key, tensor in step.provenance.read.items() if key not in of_model)
        sources = (*map(weakref.ref, constants), *read)
        captured = Captured(
            *clean(module, [x.input for x in traced_inputs], step.aliases, frozen),
            own_hooks=tuple(sorted(after - before)),
            sources=sources,
            stored=recorded.stored(),
            asked=step.asked,
            written=frozenset(written),
            masks=step.masks,
            comparisons=() if step.length_reads is None else tuple(step.length_reads.comparisons),
            branches=(*step.provenance.answers.branches.values(),),
            unread=frozenset(n for n, _ in batch_leaves(example) if n.partition(".")[0] in step.unread),
        )
        _check_written(captured.graph, step.registered, replaced)
        check_table_rows(captured.graph, module)
        warn_of_unread(step.unread, model)
        warn_of_added(step.added)
        carried = {id(x) for r in step.registered for x in (r.tensor, r.local, *r.now())}
        watch.warn_of_changes(step.difference, files, carried)  # last: an error says more than they
    return captured


def _run(
    step: StepFunction,
    model: nn.Module,
    mode: compat.FakeMode,
    flag: Callable[[], contextlib.AbstractContextManager[object]],
    options: CaptureOptions,
) -> fx.GraphModule:
    """The ops that the step runs on fake tensors, with torch as a program has it."""
    as_written = (
        patches.plain_kernels(),
        patches.graphs_alone(),
        patches.uncompiled(),
        patches.weighted_errors(),
        patches.whole_heads(),
        patches.unoptimized_scripts(),
    )
    checkpoints = (
        patches.checkpoints_that_end(),
        patches.selective_checkpoints(),
        recorded_checkpoints(step.provenance),
    )
    with contextlib.ExitStack() as stack:
        stack.callback(step.constants.detach)
        for context in (
            flag(),
            *checkpoints,
            *as_written,
            patches.without_log(),
            step.recorded.watching(),
            mode,
        ):
            stack.enter_context(context)
        if mesh_of(model) is None:  # whose code speaks of lanes
            stack.enter_context(patches.default_group(step.world, options.has_group or options.replicas != 1))
            stack.enter_context(step.world.environment())
            step.provenance.communicates = step.world.refuse_to_communicate
        try:
            return compat.make_fx(step)(*(x.local for x in step.inputs))
        except Exception as error:  # the model's own code may raise anything
            if mode.elsewhere:
                raise in_another_thread(mode.elsewhere) from error
            if isinstance(error, KeepsState) and error.tensor is not None:
                error.names = step.constants.like(error.tensor)
            raise explained(error, step.provenance, step.of_loss) from error


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
