"""Capture: one functional ATen graph of the whole training step of one microbatch, as autograd ran it.

    model, example microbatch  ──►  fx.Graph: forward, loss, backward

``make_fx`` runs the user's forward and ``torch.autograd.grad`` on fake tensors, so that custom autograd
functions, no-grad regions and activation checkpointing mean what they mean in eager.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import torch
from torch import fx, nn

from fxpipe.capture.answers import Questions
from fxpipe.capture.assigned import Assigned
from fxpipe.capture.borrow import borrowed
from fxpipe.capture.checkpoint import recorded_checkpoints
from fxpipe.capture.clean import clean
from fxpipe.capture.constants import check_constants
from fxpipe.capture.failures import explained
from fxpipe.capture.frozen import Watch
from fxpipe.capture.functional import functionalize, writes_to_a_parameter
from fxpipe.capture.inputs import Given, inputs
from fxpipe.capture.made import check_made
from fxpipe.capture.provenance import Provenance
from fxpipe.capture.registered import Registered, overlapping, registered
from fxpipe.capture.results import find_results
from fxpipe.errors import CaptureError
from fxpipe.ir import compat
from fxpipe.ir.compat import pytree
from fxpipe.ir.graph import Kind
from fxpipe.ir.storage import output_dict
from fxpipe.runtime.checks import expect_op


@dataclass(frozen=True, eq=False)
class Captured:
    """The training step of one microbatch.

    ``graph``'s placeholders carry an ``Input``; its output is described at ``fxpipe.ir.graph.OUTPUTS``.
    ``constants`` are the tensors that the model made from nothing or held outside parameters and buffers.
    """

    graph: fx.Graph
    constants: dict[str, torch.Tensor]

    @property
    def checks(self) -> int:
        """The number of checks of each microbatch."""
        return len(output_dict(self.graph)["checks"])


def capture(
    model: nn.Module,
    example: Mapping[str, Any] | tuple[Any, ...],
    loss_fn: Callable[..., Any] | None,
    scale: float,
    device: torch.device,
    gradients: bool = True,
    fixed: Sequence[str] = (),
    outputs: Sequence[str] = (),
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
    Raises CaptureError, naming module path and source line, for a model that cannot be traced and a
    loss that is no scalar or needs no gradient.  Warns of Python state that the forward changes.
    """
    attempt = partial(_attempt, model, example, loss_fn, scale, device, gradients, fixed, outputs)
    try:
        found = attempt(contextlib.nullcontext(), inf)
    except CaptureError:
        with contextlib.suppress(CaptureError):
            return attempt(compat.compiling_flag(), inf)
        raise
    checks = found.checks - len(fixed)
    if checks > 0:  # the model's branch for compilers may depend less on data
        with contextlib.suppress(CaptureError):
            other = attempt(compat.compiling_flag(), checks - 1)
            return min(found, other, key=lambda captured: captured.checks)
    return found


def _attempt(
    model: nn.Module,
    example: Any,
    loss_fn: Callable[..., Any] | None,
    scale: float,
    device: torch.device,
    gradients: bool,
    fixed: Sequence[str],
    outputs: Sequence[str],
    flag: contextlib.AbstractContextManager[None],
    most_checks: float,
) -> Captured:
    """most_checks: of the data, besides those of ``fixed`` inputs; with more the trace is given up."""
    mode = compat.FakeMode(allow_non_fake_inputs=True)
    given = inputs(model, example, mode, device, fixed)
    step = _Step(model, example, loss_fn, scale, given, gradients, outputs, most_checks)
    fakes = {id(r.tensor): x.fake for r, x in zip(step.registered, given, strict=False)}
    values = [x.fake for x in given]
    with borrowed(model, loss_fn, fakes) as snapshot:
        watch = Watch(model, snapshot)
        sources = [x.input.kind is Kind.BATCH or x.fake.requires_grad for x in given]

        def traced(*values: torch.Tensor) -> list[torch.Tensor]:
            results = step(*values)
            watch.note_kept(sources)
            return results

        as_written = compat.plain_kernels(), compat.modules_without_code(), compat.uncompiled()
        with contextlib.ExitStack() as stack:
            for context in (flag, recorded_checkpoints(), *as_written, compat.without_log(), mode):
                stack.enter_context(context)
            try:
                module = compat.make_fx(traced)(*values)
            except CaptureError:
                raise
            except Exception as error:
                raise explained(error, step.provenance) from error
        constants = [getattr(module, n.target) for n in module.graph.find_nodes(op="get_attr")]
        check_constants(module, step.registered)
        watch.warn_of_changes({id(x) for x in constants})
    with compat.plain_kernels(), compat.modules_without_code(), mode:
        module = functionalize(module, values)
    frozen = {r.name for r in step.registered if not r.tensor.requires_grad}
    captured = Captured(*clean(module, [x.input for x in given], step.layout, frozen))
    _check_written(captured.graph, step.registered)
    return captured


def _check_written(graph: fx.Graph, tensors: Sequence[Registered]) -> None:
    """Raise CaptureError for a changed buffer that is empty, or that shares memory, as the other tensor would
    change too."""
    changed = output_dict(graph)["buffers"]
    for x in tensors:
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
        if a.name in changed or b.name in changed:
            raise CaptureError(
                f"{a.name!r} and {b.name!r} share memory and the forward writes to one of them. Make them "
                "one buffer, or copy one of them."
            )


class _Step:
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
    ):
        self.model, self.loss_fn, self.scale, self.given = model, loss_fn, scale, given
        self.gradients, self.outputs = gradients, outputs
        self.registered = registered(model)
        self.leaves, self.spec = pytree.tree_flatten(example)
        self.provenance = Provenance(model, [(x.input, x.real) for x in given], most_checks)
        self.layout: dict[str, Any] = {}  # what the flat outputs of the traced graph are

    def __call__(self, *values: torch.Tensor) -> list[torch.Tensor]:
        example = self._example()
        trained = [x for x in self.given if x.input.kind is Kind.PARAMETER and x.fake.requires_grad]
        wanted = {x.input.name: x.fake for x in trained}
        hooks = {r.name: compat.gradient_hooks(r.tensor) for r in self.registered}
        questions = Questions(self.provenance.answers, self.provenance.place)
        with self.provenance, questions:
            for name, value in wanted.items():
                for hook in hooks.get(name, ()):
                    value.register_hook(hook)
            args, kwargs = (example, {}) if isinstance(example, tuple) else ((), dict(example))
            output = self.model(*args, **kwargs)
            results = find_results(output, example, self.loss_fn, self.gradients, self.outputs)
            loss, count = results.loss, results.count
            for name, value in wanted.items():
                if value.grad is not None:
                    raise CaptureError(
                        f"The forward calls backward(), which adds to the gradient of {name!r} beside the "
                        "step's own. Add that loss to the loss, or take the gradients that the forward needs "
                        "with torch.autograd.grad(…) or backward(inputs=[…])."
                    )
            found = self._gradients(loss, wanted, 1.0 if count is not None else self.scale)
        if self.provenance.answers.refused is not None:  # which the model caught
            raise self.provenance.answers.refused
        check_made(self.model, self.registered, self.provenance.answers)
        replaced = self._replaced(questions.assigned)
        self.layout = {
            "loss": loss is not None,
            "count": count is not None,
            "outputs": list(results.outputs),
            "grads": list(found),
            "buffers": list(replaced),
            "aliases": self._aliases(replaced, questions.assigned),
        }
        numbers = [x.detach() for x in (loss, count) if x is not None]
        outputs = [x.detach() for x in results.outputs.values()]
        return [*numbers, *outputs, *found.values(), *replaced.values()]

    def _example(self) -> Any:
        """The microbatch with fake tensors, and with real ones for fixed inputs."""
        tensors = []
        for given in self.given:
            if given.input.kind is Kind.BATCH:
                tensors.append(given.real.detach().clone() if given.fixed else given.fake)
                if given.fixed:
                    with compat.no_modes():
                        numbers = given.real.reshape(-1).tolist()
                    expect_op(given.fake, numbers, f"the fixed input {given.input.name!r}")
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    def _replaced(self, assigned: Assigned) -> dict[str, torch.Tensor]:
        """The buffers that the forward replaced.  Raises CaptureError for a change that is not supported."""
        replaced = {}
        for r, given in zip(self.registered, self.given, strict=False):
            kind = r.kind.value
            if given.fake.untyped_storage()._cdata != given.storage:
                raise CaptureError(
                    f"The forward gives the {kind} {r.name!r} other memory (set_ or resize_). Copy into it "
                    "instead; or, if the first batch alone does it, run the model on one batch before you "
                    "compile it."
                )
            now = r.now()
            if all(x is given.fake for x in now):
                if assigned.data(given.fake) is not None:
                    if r.tensor.requires_grad:
                        raise writes_to_a_parameter(r.name, assigned.place(given.fake))
                    replaced[r.name] = given.fake.detach()
                continue
            new = now[0]
            if r.kind is Kind.PARAMETER or new is None or any(x is not new for x in now):
                what = (
                    "one of its names another tensor" if len(now) > 1 else "another tensor, or takes it away"
                )
                raise CaptureError(
                    f"The forward gives the {kind} {r.name!r} {what}. Replace parameters outside of the "
                    "forward, and write to a shared buffer in place."
                )
            if (new.shape, new.dtype, new.device) != (given.fake.shape, given.fake.dtype, given.fake.device):
                raise CaptureError(
                    f"The forward changes the buffer {r.name!r} from {_kind_of(given.fake)} to "
                    f"{_kind_of(new)}. A program keeps shapes and dtypes: give the buffer those that it has "
                    "later on from the start, or run the model on one batch before you compile it."
                )
            replaced[r.name] = new
        return replaced

    def _aliases(self, replaced: dict[str, torch.Tensor], assigned: Assigned) -> list[tuple[str, str]]:
        """Pairs of names: the forward gave the second, a buffer, the memory of the first.

        Raises CaptureError if the first is a parameter, as the optimizer writes to its memory.
        """
        owners: dict[int, Registered] = {}
        pairs = []
        for r, given in zip(self.registered, self.given, strict=False):
            now = replaced.get(r.name, given.fake)
            if (data := assigned.data(given.fake)) is not None:
                now = data
            owner = owners.setdefault(now.untyped_storage()._cdata, r)
            if owner is r or not (r.name in replaced or owner.name in replaced):
                continue
            if owner.kind is Kind.PARAMETER and owner.tensor.requires_grad:
                raise CaptureError(
                    f"The forward gives the buffer {r.name!r} the memory of the parameter {owner.name!r}, "
                    "which moves when that is trained. Give it a copy: .detach().clone()."
                )
            pairs.append((owner.name, r.name))
        return pairs

    def _gradients(
        self, loss: torch.Tensor | None, wanted: dict[str, torch.Tensor], scale: float
    ) -> dict[str, torch.Tensor]:
        if not self.gradients:
            return {}
        assert loss is not None, "find_results raises where gradients need one"
        self.provenance.backward_from(loss)
        with torch.autocast(loss.device.type, enabled=False):
            seed = torch.full((), scale, dtype=loss.dtype, device=loss.device)
            grads = torch.autograd.grad(loss, list(wanted.values()), seed, allow_unused=True)
        total = {name: grad for name, grad in zip(wanted, grads, strict=True) if grad is not None}
        for name, value in wanted.items():
            if value.grad is not None:  # the backward of a custom function called backward()
                total[name] = total[name] + value.grad if name in total else value.grad
        if not total:
            raise CaptureError(
                "No trainable parameter gets a gradient: the loss does not depend on any of them. "
                "Look for a detach() or a no_grad() block on the way."
            )
        return total


def _kind_of(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device}"
