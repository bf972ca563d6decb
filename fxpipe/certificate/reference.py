"""The captured step on terms: what the programs of all ranks must compute, of every microbatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fxpipe.certificate.problems import ORDER, Line, Problem, differs_at
from fxpipe.certificate.programs.calls import keyed_term, op_term
from fxpipe.certificate.terms.difference import Difference, difference
from fxpipe.certificate.terms.layouts import Unknown
from fxpipe.certificate.terms.parts import EqualValues, Parts
from fxpipe.certificate.terms.schemas import draws, schema_of
from fxpipe.certificate.terms.terms import BATCH_MEAN, Layout, Named, Term, Terms, canonical
from fxpipe.errors import ArtifactError, number_of
from fxpipe.plan.captured import CapturedInput, CapturedOp, CapturedOps
from fxpipe.plan.tensors import dtype_of

_TORCH = (torch.dtype, torch.layout, torch.memory_format)


@dataclass(eq=False, repr=False)
class Reference:
    """``loss`` … ``checks``: terms, as ``Outputs`` in ``ir/graph.py`` says.  ``named``: those of all ops.
    ``causes``: of the results that differ.
    ``split``: whether its vocabulary layers are split.  ``inputs``: those that it has, by kind and name.
    ``parts``: of its values, where the programs may make these in parts."""

    terms: Terms
    loss: Term | None = None
    count: Term | None = None
    outputs: dict[str, Term] = field(default_factory=dict)
    grads: dict[str, tuple[Term, ...]] = field(default_factory=dict)
    buffers: dict[str, Term] = field(default_factory=dict)
    checks: tuple[tuple[Term, object], ...] = ()
    causes: dict[Difference, list[tuple[str, Line]]] = field(default_factory=dict)
    named: dict[str, Term] = field(default_factory=dict)
    split: bool = False
    inputs: dict[tuple[str, str], Layout | None] = field(default_factory=dict)
    parts: Parts | None = None

    def input(self, kind: str, name: str) -> Term:
        """The term of an input, also of one that the captured step does not have."""
        varies = kind in ("batch", "key") or (kind == "buffer" and name in self.buffers)
        return self.terms.input(kind, name, None, varies)

    def note_difference(self, what: str, line: Line, actual: Term, expected: Term) -> None:
        """Keep why a result is not what it should be: the first op that differs.

        line: where the result is given.
        """
        # Of values in parts most terms are not the captured step's: the first is told that is no part of one.
        foreign = None if self.parts is None else self.parts.first_foreign(actual)
        if foreign is None or foreign.line is None:
            cause = difference(self.terms.captured, actual, expected)
        else:
            text = f"computes {foreign.written()} in parts, which the captured step does not have"
            cause = Difference(foreign.line, text, False)
        self.causes.setdefault(cause, []).append((what, line))

    def problems(self) -> Iterator[Problem]:
        """One for each line that computes or takes another value, however many results it changes."""
        by_line: dict[Line, list[tuple[Difference, str]]] = {}
        for each, changed in self.causes.items():
            for what, line in changed:
                by_line.setdefault(each.line or line, []).append((each, what))
        for line, differences in by_line.items():
            first, what = differences[0]
            others = len({name for _, name in differences}) - 1
            so = f"{what} and {number_of(others, 'other')}" if others else what
            cause = ORDER if first.is_shifted else differs_at(line)
            yield Problem(line.rank, line.number, f"{first.text}: changes {so}", cause)


def reference_of(step: CapturedOps, terms: Terms, rows: Sequence[int] = ()) -> Reference:
    """The captured step on terms.  Raises ArtifactError where an op does not exist, or does not fit its
    arguments.

    rows: numbers of rows in which values that are equal are one value.
    """
    terms.whole = EqualValues(terms, rows) if rows else None
    reference = Reference(terms, buffers=dict.fromkeys(step.buffers))  # type: ignore[arg-type]
    values: list[Any] = [_input(reference, one) for one in step.inputs]
    checks: dict[int, tuple[Term, Any]] = {}
    for op in step.ops:
        try:
            if op.target == "expect":
                value, *says = decoded(op.args, values)
                # It gives nothing, but has a number, by which ``step.checks`` names it.
                checks[len(values)] = value, canonical(says)
                values.append(None)
            else:
                values.append(_op(terms, op, values, reference))
                reference.named[op.name] = values[-1]
        except (Unknown, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ArtifactError(
                f"The captured step has an op that does not fit, {op.name}: {error}."
            ) from error
    reference.split = step.split
    reference.loss = None if step.loss is None else values[step.loss]
    reference.count = None if step.count is None else values[step.count]
    reference.outputs = {name: values[k] for name, k in step.outputs.items()}
    reference.grads = {name: tuple(values[k] for k in ks) for name, ks in step.grads.items()}
    reference.buffers = {name: values[k] for name, k in step.buffers.items()}
    reference.checks = tuple(checks[k] for k in step.checks)
    # From here on a new term is a program's alone.
    terms.captured = len(terms.known)
    return reference


def _layout(record: CapturedInput | CapturedOp) -> Layout | None:
    if record.shape is None or record.dtype is None:
        return None
    return Layout(record.shape, dtype_of(record.dtype))


def _input(reference: Reference, record: CapturedInput) -> Term:
    term = reference.input(record.kind, record.name)
    term.layout = reference.inputs[record.kind, record.name] = _layout(record)
    return term


def _op(terms: Terms, op: CapturedOp, values: list[object], reference: Reference) -> Term:
    args = decoded(op.args, values)
    kwargs = {name: decoded(argument, values) for name, argument in op.kwargs.items()}
    term = _term(terms, op, args, kwargs, reference)
    # The first of several equal values gives the name.
    term.name = term.name or op.name
    if term.layout is None:
        term.layout = _layout(op)
    if term.results is None:
        term.results = op.results
    return term


def _term(terms: Terms, op: CapturedOp, args: list[Any], kwargs: Named, reference: Reference) -> Term:
    match op.target:
        case "getitem":
            return terms.item(args[0], args[1])
        case "read_buffer":
            return args[0]  # type: ignore[no-any-return]
        case "sum_over_ranks":
            return terms.plain("sum_over_ranks", {"parts": tuple(args)})
        case "batch_mean":
            return terms.plain(BATCH_MEAN, {"of": args[0]})
        case "keyed":
            key, position, target, *positional = args
            schema = schema_of(target)
            return keyed_term(terms, key, position, schema, schema.bind(positional, kwargs))
    schema = schema_of(op_named(op.target))
    arguments = schema.bind(args, kwargs)
    if op.position is not None and draws(schema, arguments):
        return keyed_term(terms, reference.input("key", "key"), op.position, schema, arguments)
    return op_term(terms, schema, arguments)


def decoded(argument: object, values: list[object]) -> Any:
    """An argument of a captured op.  values: of the nodes before it.  Raises Unknown for other data."""
    if isinstance(argument, list | tuple):
        return [decoded(each, values) for each in argument]
    if not isinstance(argument, dict):
        return argument
    match argument:
        case {"value": int(number)}:
            return values[number]
        case {"float": str(text)} if text in ("inf", "-inf", "nan"):
            return float(text)
        case {"complex": [real, imaginary]}:
            return complex(decoded(real, values), decoded(imaginary, values))
        case {"device": str(kind)}:
            return torch.device(kind)
        # The text is untrusted: of torch it names a dtype, a layout or a memory format alone.
        case {"torch": str(text)} if isinstance(
            value := getattr(torch, text.removeprefix("torch."), None), _TORCH
        ):
            return value
        case {"op": str(text)}:
            return op_named(text)
    raise Unknown(f"has the argument {argument!r}, which is none")


def op_named(text: str) -> object:
    """The op of torch with a name such as ``aten.addmm.default``.  Raises Unknown where there is none."""
    parts = text.split(".")
    value: object = torch.ops
    for part in parts:
        value = getattr(value, part, None)
    if len(parts) != 3 or not hasattr(value, "_schema"):
        raise Unknown(f"names the op {text!r}, which this version of torch does not have")
    return value
