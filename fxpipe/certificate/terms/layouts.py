"""Shapes and dtypes of terms: of the captured graph known, of others computed on the meta device."""

from __future__ import annotations

from typing import Any

import torch

from fxpipe.certificate.terms.terms import BATCH_MEAN, NUMBER, Layout, Term, Terms


class Unknown(Exception):
    """A term has no layout: its operands do not fit each other, or the op does not run on the meta device, or
    the captured step names what this torch does not have.  ``of``: the term, or its operands."""

    of: tuple[Term, ...] = ()


def layout_of(terms: Terms, term: Term) -> Layout:
    """The layout of a term, computed where it is not known.  Raises Unknown for what is no tensor."""
    if not isinstance(term, Term):
        raise Unknown(f"{term} is no tensor")
    if term.layout is None:
        _compute(terms, term)
    if term.layout is None:
        raise Unknown(f"{term} is no tensor")
    return term.layout


def results_of(terms: Terms, term: Term) -> int:
    """The number of items of an op that gives several.  Raises Unknown."""
    if term.results is None:
        _compute(terms, term)
    return term.results or 0


def _compute(terms: Terms, term: Term) -> None:
    try:
        value = _run(terms, term["of"])[term["index"]] if term.op == "item" else _run(terms, term)
    # What torch raises where operands do not fit an op.
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
        unknown = Unknown(f"{term.written()} has no shape: {str(error).partition(chr(10))[0]}")
        unknown.of = (term,)
        raise unknown from error
    if isinstance(value, torch.Tensor):
        term.layout = Layout(tuple(value.shape), value.dtype)
    elif isinstance(value, tuple | list):
        term.results = len(value)


def _run(terms: Terms, term: Term) -> Any:
    """Run an op on tensors without data."""
    args = dict(term.arguments)
    if term.op == "keyed":
        args = dict(args["given"])
        return _call(terms, term["op"][1], args)
    if term.op == "sum_over_ranks":
        return _plain(terms, term["parts"][0])
    if term.op == BATCH_MEAN:
        return _plain(terms, term["of"])
    if term.op == "shifted":
        return _plain(terms, term["self"])
    return _call(terms, term.op, args)


def _call(terms: Terms, name: str, args: dict[str, object]) -> object:
    namespace, _, packet = name.partition(".")
    if not packet:
        raise TypeError(f"{name} is no op of torch")
    run = getattr(getattr(torch.ops, namespace), packet)
    return run(**{key: _plain(terms, value) for key, value in args.items()})


def _plain(terms: Terms, argument: object) -> object:
    """A canonical argument as torch takes it."""
    match argument:
        case Term() if argument.op == NUMBER:
            return _plain(terms, argument["s"])
        case Term():
            layout = layout_of(terms, argument)
            return torch.empty(layout.shape, dtype=layout.dtype, device="meta")
        case ("bool" | "str", value):
            return value
        case ("float", str(text)):
            return float.fromhex(text) if text != "nan" else float("nan")
        case ("complex", str(text)):
            return complex(text)
        case ("torch", str(text)):
            named = getattr(torch, text.removeprefix("torch."), None)  # torch.cpu is a module
            is_layout = isinstance(named, torch.dtype | torch.layout | torch.memory_format)
            return named if is_layout else torch.device("meta")
        case tuple():
            return [_plain(terms, each) for each in argument]
    return argument
