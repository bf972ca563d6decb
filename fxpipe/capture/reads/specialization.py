"""Values that traced Python code reads, and the checks that the program then needs.

    depends on constants alone    ──►  the value, without a check
    depends on buffers alone      ──►  the value, and an ``expect`` of it
    depends on the microbatch     ──►  the example's value, and an ``expect`` of it, except for floating-point
                                       numbers, which no other microbatch would share: ``data_scalar.py``
    depends on random numbers     ──►  the value that all draws of them gave, and an ``expect`` of it
    indices by a mask that picks
    all or nothing in the example ──►  those indices, and an ``expect`` of the mask

Other shapes that depend on the microbatch, and floating-point numbers of it, are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from fxpipe.capture.reads.data_scalar import NumberOfData
from fxpipe.capture.reads.example import Example
from fxpipe.capture.reads.refusals import Refusals
from fxpipe.errors import CaptureError
from fxpipe.ir import compat
from fxpipe.ir.compat import pytree
from fxpipe.ir.graph import Input, Kind
from fxpipe.plan.branches import Branch
from fxpipe.runtime.program.checks import INSTEAD_OF_A_NUMBER, expect_op

aten = torch.ops.aten

Sources = frozenset[Input]


class Specialization:
    """Gives the model's code values, and adds checks of them.  inputs: the kind of each placeholder of the
    trace, and its real tensor.  place: returns the current place in the model's code.  most_checks: the trace
    ends with a CaptureError when it needs more.

    ``lasting``: the inputs that no microbatch changes.
    ``refusals``: what the model's code gets instead of values.  ``branches``: the questions with two answers
    that it asks of the microbatch alone, each with the answer that it got.  ``taken``: one that gets another
    answer than the example's.
    """

    def __init__(
        self, inputs: Sequence[tuple[Input, torch.Tensor]], place: Callable[[], str], most_checks: float
    ):
        self._example, self._place = Example(inputs), place
        self._most_checks = self._checks_left = most_checks
        # Those that the step changes are refused later.
        self.lasting = {
            x
            for x, tensor in inputs
            if x.kind is Kind.BUFFER or (x.kind is Kind.PARAMETER and not tensor.requires_grad)
        }
        self.refusals = Refusals(place, self._known)
        self._asked: set[Input] = set()  # the inputs on which the last value depends
        self.branches: dict[tuple[str, tuple[str, ...]], Branch] = {}
        self.taken: Branch | None = None

    def count_again(self) -> None:
        """Count the checks of a new forward."""
        self._checks_left = self._most_checks

    def numbers(self, tensor: torch.Tensor) -> list[object]:
        """The tensor's elements as Python numbers.

        Raises CaptureError for floating-point numbers of the data.
        """
        self._asked.clear()
        value, sources = self._value(tensor)
        with compat.no_modes():
            numbers = value.reshape(-1).tolist()
        if sources and numbers:
            if not self._lasting(sources) and (value.is_floating_point() or value.is_complex()):
                raise self._read(numbers[0], sources)
            if tensor.dtype != torch.bool and any(x.kind is Kind.PARAMETER for x in sources - self.lasting):
                self._warn_of_integers(numbers)
            if tensor.dtype is torch.bool and len(numbers) == 1:
                numbers = [self._answer(tensor, bool(numbers[0]))]
            self._expect(tensor.detach(), numbers)
        return numbers

    def _answer(self, tensor: torch.Tensor, answer: bool) -> bool:
        """The answer to a question with two: that of the example, or the one for which the trace is."""
        node = compat.traced_node(tensor)
        asked = None if node is None else self._example.question(node)
        if asked is None:
            return answer
        if self.taken is not None and (self.taken.leaf, self.taken.ops) == asked:
            answer = self.taken.answer
        self.branches.setdefault(asked, Branch(*asked, answer, self._place()))
        return answer

    def result(self, func: Any, args: Any, kwargs: Any) -> object:
        """The result of an op whose shape depends on values; None if other microbatches may have other
        shapes.

        The result is a copy, which the model may write to.
        """
        self._asked.clear()
        if func is aten.nonzero.default:
            positions = self._picked(args[0])
            return None if positions is None else aten.clone.default(positions)
        if func is aten.index.Tensor:
            return self._indexed(*args)
        if func is aten.masked_select.default:
            tensor, mask = torch.broadcast_tensors(*args)
            return self._indexed(tensor, [mask])
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if not all(map(self.is_lasting, tensors)):
            return self._counted(*args, **kwargs) if func is aten.bincount.default else None

        def real(tensor: torch.Tensor) -> torch.Tensor:
            value, sources = self._value(tensor)
            if sources:
                self._hold(tensor, value)
            return value

        args, kwargs = pytree.tree_map_only(torch.Tensor, real, (args, kwargs))
        with compat.no_modes():
            result = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, aten.clone.default, result)

    def number(self, tensor: torch.Tensor) -> object:
        """The element of a tensor of one, as ``item()`` gives it; a ``NumberOfData`` if that is refused."""
        try:
            return self.numbers(tensor)[0]
        except CaptureError as error:
            if not tensor.is_floating_point():
                raise
            return NumberOfData(tensor, partial(self.refusals.refuse, error))

    def fixable(self) -> tuple[str, ...]:
        """The inputs of the microbatch on which the last value depends; none if it also depends on
        parameters."""
        known = {x for x in self._asked if x.kind is not Kind.BUFFER}
        return tuple(sorted(x.name for x in known)) if all(x.kind is Kind.BATCH for x in known) else ()

    def remedy(self) -> str:
        """A further remedy for the last value, for messages."""
        names = self.fixable()
        if not names:
            return ""
        subject = f"{', '.join(map(repr, names))} {'is' if len(names) == 1 else 'are'}"
        return f", or, if {subject} the same in all batches, compile with fixed={list(names)}"

    def constant(self, tensor: torch.Tensor) -> tuple[str, Iterator[torch.Tensor]] | None:
        """The value of a tensor that is the same in all steps, from no input and no random number, in blocks
        of rows; and the ops that make it, as ``Example.recipe`` tells them.  None for others."""
        node = compat.traced_node(tensor)
        if node is None or not self._example.is_made_from_nothing(node):
            return None
        blocks = self._example.blocks(node, compat.traced_constants(), self._place())
        return self._example.recipe(node), blocks

    def between_steps(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor that buffers and frozen parameters alone lead to, which may change between
        steps; None for others, and for those without values."""
        return self._known(tensor) if self.is_lasting(tensor) else None

    def is_lasting(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the trace is the same for all microbatches."""
        return self._lasting(self.sources(tensor))

    def _lasting(self, sources: Sources) -> bool:
        """Whether a value with these inputs is the same for all microbatches."""
        return sources <= self.lasting

    def _read(self, number: object, sources: Sources) -> CaptureError:
        changing = sorted(sources - self.lasting, key=lambda x: x.name)
        source, known = "the data", "the data is known"
        if all(x.kind is Kind.PARAMETER for x in changing):
            source, known = f"the parameter {changing[0].name!r}, which is trained", "it is trained"
        return CaptureError(
            f"The model's code reads the number {number} from {source}, at {self._place()}. A pipeline "
            f"program is fixed before {known}: keep it a tensor (no .item(), float() or .numpy() "
            f"there){self.remedy()}.",
            self.fixable(),
        )

    def _warn_of_integers(self, numbers: list[int]) -> None:
        warnings.warn(
            f"The model's code reads the integer {numbers[0]} of the trained parameters, at {self._place()}. "
            "The step ends with an error at the first microbatch with another one. "
            f"{INSTEAD_OF_A_NUMBER} the model.",
            stacklevel=2,
        )

    def _indexed(self, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Replace masks among the indices by the positions that they pick."""
        places: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                places.append(index)
                continue
            picked = self._picked(index)
            if picked is None:
                return None
            with compat.no_modes():
                places += picked.unbind(1)
        items: torch.Tensor = aten.index.Tensor(tensor, places)
        return items

    def _counted(
        self, tensor: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
    ) -> torch.Tensor | None:
        """``bincount`` of integers below ``minlength``, which the program checks; None without a length."""
        if not minlength:
            return None
        self._expect(aten.all.default(aten.lt.Scalar(tensor, minlength)), [True])
        if weights is None:
            weights = torch.ones_like(tensor, dtype=torch.int64)
        elif weights.dtype != torch.float32:
            weights = weights.double()
        counts: torch.Tensor = weights.new_zeros(minlength).index_add(0, tensor, weights)
        return counts

    def _picked(self, mask: torch.Tensor) -> torch.Tensor | None:
        """The positions of nonzero elements as a real tensor, if they are known."""
        value, sources = self._value(mask)
        with compat.no_modes():
            positions = value.nonzero()
        if self._lasting(sources):
            if sources:
                self._hold(mask, value)
            return positions
        if len(positions) not in (0, value.numel()):
            return None
        picks_all = len(positions) > 0
        picked = aten.ne.Scalar(mask, 0)
        whole = aten.all.default(picked) if picks_all else aten.any.default(picked)
        self._expect(whole, [picks_all])
        return positions

    def _hold(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Add a check that a tensor has this value, which becomes a constant of the program."""
        with compat.no_modes():
            constant = value.clone()
        self._expect(aten.all.default(aten.eq.Tensor(tensor, constant)), [True])

    def _expect(self, tensor: torch.Tensor, numbers: list[object]) -> None:
        """Let the program check that a tensor has these elements."""
        expect_op(tensor, numbers, self._place())  # counts also where the model catches the error
        self._checks_left -= 1
        if self._checks_left < 0:
            raise CaptureError(f"More values of the data are read than the trace may check{self.remedy()}.")

    def sources(self, tensor: torch.Tensor) -> Sources:
        """The inputs on which a tensor depends."""
        node = compat.traced_node(tensor)
        sources = frozenset() if node is None else self._example.sources(node)
        self._asked |= sources
        return sources

    def _known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The real value; None if the example does not tell it."""
        asked = {*self._asked}
        try:
            value, _ = self._value(tensor)
        except CaptureError:
            return None
        finally:
            self._asked = asked
        return value if compat.is_real(value) else None

    def _value(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Sources]:
        """The real value, and the inputs on which it depends."""
        node = compat.traced_node(tensor)
        if node is None:  # not computed by an op of the trace
            return tensor, frozenset()
        value, sources = self._example.value(node, compat.traced_constants(), self._place())
        self._asked |= sources
        return value, sources
