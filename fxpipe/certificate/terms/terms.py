"""Terms: values as the ops that compute them, each kept once, so that equal values are one object.

A term is of any microbatch: where it depends on the data, a random key or a buffer that the step changes, it
``varies``, and says nothing of which microbatch it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

#: The op whose result is the same for all microbatches.
BATCH_MEAN = "batch_mean"

Arguments = tuple[tuple[str, Any], ...]
"""Name -> canonical argument, without those that have their default."""
Named = dict[str, Any]
"""Name -> argument of an op: a term, a number, a name of torch's, None, or a list of such."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


@dataclass(eq=False, repr=False, slots=True)
class Term:
    """``op``: the functional name of an op, ``"aten.add"``, or the kind of an input.  ``name``: of the value
    in the captured graph, "" where it has none.  ``layout``: if it is known.  ``results``: the number of its
    items, of an op that gives several.  ``line``: of the program that was the first to compute it."""

    # In the order in which terms are made: operands have lower numbers.
    number: int
    op: str
    arguments: Arguments
    varies: bool
    layout: Layout | None = None
    name: str = ""
    results: int | None = None
    line: Any = None

    def __getitem__(self, name: str) -> Any:
        """An argument; None where it is not given."""
        if type(name) is not str:
            raise TypeError("a tensor stands in the place of a list")  # Python would iterate by numbers
        return next((value for key, value in self.arguments if key == name), None)

    def __str__(self) -> str:
        return self.name or self.written()

    def written(self, depth: int = 3) -> str:
        """The term as one call, its operands by their names, or as calls, at most ``depth`` deep."""
        if not self.arguments:
            return self.op
        if self.op in INPUTS:
            return str(self["name"])
        if self.op == NUMBER:
            return shown(self["s"])
        values = [value for _, value in self.arguments]
        if self.op == "keyed":
            values = [*values[:3], *(value for _, value in values[3])]
        arguments = ", ".join(shown(value, depth - 1) for value in values)
        return f"{self.op.removeprefix('aten.')}({arguments})"


#: A number in the place of a tensor.  A tensor of it may give a result another dtype.
NUMBER = "number"
INPUTS = ("parameter", "buffer", "constant", "batch", "key")


def shown(argument: object, depth: int = 2) -> str:
    """A canonical argument for a message."""
    match argument:
        case Term():
            return argument.name or (
                argument.written(depth) if depth > 0 and len(argument.arguments) < 5 else "…"
            )
        case ("bool" | "complex" | "str" | "torch" | "op", value):
            return repr(value) if argument[0] == "str" else str(value)
        case ("float", str(text)):
            return str(float.fromhex(text))
        case tuple():
            return f"[{', '.join(shown(each, depth - 1) for each in argument)}]"
    return str(argument)


def canonical(argument: object) -> object:
    """An argument in a form in which equal ones are equal and others are not (1, 1.0 and True differ)."""
    match argument:
        case Term() | None:
            return argument
        case bool():
            return ("bool", argument)
        case int():
            if argument.bit_length() > 63:
                raise TypeError("an integer of more than 64 bits is no argument of an op")
            return argument
        case float():
            # All bits: -0.0 is not 0.0, and a NaN equals another one.
            return ("float", "nan" if argument != argument else argument.hex())
        case complex():
            return ("complex", repr(argument))
        case str():
            return ("str", argument)
        case list() | tuple():
            return tuple(map(canonical, argument))
        case torch.device():
            if argument.index is not None:
                raise TypeError(f"names the device {argument}: a rank has one, without a number in programs")
            return ("torch", argument.type)
        case torch.dtype() | torch.layout() | torch.memory_format():
            return ("torch", str(argument))
    raise TypeError(f"{type(argument).__name__} is no argument of an op")


def operands(argument: object) -> Iterator[Term]:
    """The terms in a canonical argument, or in all arguments of a term."""
    if isinstance(argument, Term):
        yield argument
    elif isinstance(argument, tuple):
        for each in argument:
            yield from operands(each)


@dataclass(eq=False, repr=False)
class Terms:
    """The table of all terms.  ``rules``: by op, identities (``identities.py``): functions that give a
    simpler term for arguments, or None.  ``line``: gives the line of the program that runs, None for the
    captured step.  ``views``: the first term of each view, by what it is a view of, and where its elements
    are.  ``devices``: to which the captured step moves values.  ``captured``: the number of its terms, which
    come first; all others are a program's alone.  ``whole``: gives the captured term that one equals that is
    made of parts, or None; None where parts are not looked for (``parts.py``)."""

    rules: dict[str, Callable[[Terms, str, dict[str, object]], Term | None]]
    line: Callable[[], object] = lambda: None
    known: dict[tuple[str, Arguments], Term] = field(default_factory=dict)
    views: dict[object, Term] = field(default_factory=dict)
    devices: set[object] = field(default_factory=set)
    captured: int = 0
    whole: Callable[[Term], Term | None] | None = None

    def make(self, op: str, arguments: dict[str, object]) -> Term:
        """The term of an op with canonical arguments, after the identities."""
        rule = self.rules.get(op)
        equal = None if rule is None else rule(self, op, arguments)
        term = equal if equal is not None else self.plain(op, arguments)
        return term if self.whole is None else self.whole(term) or term

    def plain(self, op: str, arguments: dict[str, object], line: object = None) -> Term:
        """The term as it is written.  line: that makes it, if it is not the one that runs."""
        key = op, tuple(arguments.items())
        term = self.known.get(key)
        if term is None:
            varies = op != BATCH_MEAN and any(each.varies for each in operands(key[1]))
            term = Term(len(self.known), op, key[1], varies, line=line or self.line())
            self.known[key] = term
        return term

    def number(self, value: object, dtype: torch.dtype) -> Term:
        """The term of a number in the place of a tensor, beside another tensor.  dtype: of its kind."""
        term = self.plain(NUMBER, {"s": canonical(value)})
        term.layout = term.layout or Layout((), dtype)
        return term

    def forget_programs(self) -> None:
        """Drop the terms of programs that were checked before, which have their lines."""
        # Terms stand in the order in which they were made, those of the captured step first.
        for key in [*self.known][self.captured :]:
            del self.known[key]
        self.views = {key: term for key, term in self.views.items() if term.number < self.captured}

    def first_alone(self, of: Iterable[Term]) -> Term | None:
        """The first term that a program alone computes, of those that some terms are computed from."""
        todo = [term for term in of if term.number >= self.captured]
        alone = set(todo)
        for term in todo:
            fresh = {each for each in operands(term.arguments) if each.number >= self.captured} - alone
            alone |= fresh
            todo += fresh
        return min((term for term in alone if term.line), key=lambda term: term.number, default=None)

    def input(self, kind: str, name: str, layout: Layout | None, varies: bool) -> Term:
        term = self.plain(kind, {"name": name})
        term.varies = varies
        term.layout, term.name = term.layout or layout, term.name or name
        return term

    def item(self, term: Term, index: int) -> Term:
        """One of the results of an op that gives several: of one with a mask of results, as if it gave that
        one alone."""
        mask = term["output_mask"]
        if mask is not None and index < len(mask) and mask[index] == ("bool", True):
            alone = tuple(("bool", k == index) for k in range(len(mask)))
            one = self.plain(term.op, {**dict(term.arguments), "output_mask": alone})
            one.results, one.name = term.results, one.name or term.name
            term = one
        return self.make("item", {"of": term, "index": index})
