"""What a program reads of ``rt`` for terms: parameters, gradients, buffers, constants, batch and keys."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from fxpipe.certificate.problems import Line, Rejected
from fxpipe.certificate.programs.calls import Calls
from fxpipe.certificate.programs.sections import Called, Sections
from fxpipe.certificate.programs.values import Announced, Container, Leaves, Length, Memory, OpLog, Sum, Value
from fxpipe.certificate.ranks.exchanges import ParameterRows
from fxpipe.certificate.ranks.world import World
from fxpipe.certificate.reference import Reference
from fxpipe.plan.artifact import Plan, RankTensors


@dataclass(eq=False, repr=False)
class Inputs:
    """One rank.  ``versions``: how often the program has given a buffer a new value.  ``batch``: what its
    step is given.  ``reads_parameters``: whether it has read one."""

    rank: int
    plan: Plan
    reference: Reference
    world: World
    calls: Calls
    sections: Sections
    log: OpLog
    versions: Counter[str] = field(default_factory=Counter)
    # It is known by identity: microbatches of anything else are refused.
    batch: object = field(default_factory=object)
    reads_parameters: bool = False
    _buffers: dict[str, Value] = field(default_factory=dict)

    @property
    def line(self) -> Line:
        return self.calls.line()

    @property
    def microbatch_count(self) -> int:
        return self.plan.step.microbatches

    own_count = microbatch_count

    @property
    def places(self) -> list[int]:
        return [*range(self.plan.step.microbatches)]

    @property
    def params(self) -> Container:
        return Container("params", self._parameter)

    @property
    def constants(self) -> Container:
        return Container("constants", lambda name: self._input("constant", name, self._tensors.constants))

    @property
    def buffers(self) -> Container:
        return Container("buffers", self.buffer, self._set_buffer)

    @property
    def grads(self) -> Container:
        return Container("grads", self._gradient)

    def _parameter(self, name: str) -> Value:
        value = self._input("parameter", name, self._tensors.parameters)
        self.reads_parameters = True
        self.rows.read([name])
        if self.sections.running:
            self.calls.effects.read.add(name)
        return value

    @property
    def _tensors(self) -> RankTensors:
        return self.plan.tensors[self.rank]

    def _input(self, kind: str, name: str, known: tuple[str, ...]) -> Value:
        if name not in known:
            raise Rejected(self.line, f"reads the {kind} {name!r}, which this rank does not hold")
        # A memory for each read: none may be written to, so nobody sees that they are one.
        return Value(self.reference.input(kind, name), None, Memory(f"a {kind}"))

    def buffer(self, name: str) -> Value:
        if name not in self._buffers:
            term = self.reference.input("buffer", name)
            if name not in self._tensors.buffers:
                raise Rejected(self.line, f"reads the buffer {name!r}, which this rank does not hold")
            self._buffers[name] = Value(term, 0, Memory("a buffer"))
        return self._buffers[name]

    def _set_buffer(self, name: str, value: object) -> None:
        """The new value of a buffer must be the captured step's, of the microbatch whose turn it is."""
        number, expected = self.versions[name], self.reference.buffers.get(name)
        if not isinstance(value, Value) or expected is None:
            self.calls.note(f"gives the buffer {name!r} a value, and the step does not change it")
            return
        what = f"the buffer {name!r}"
        if value.term is not expected:
            self.reference.note_difference(what, self.line, value.term, expected)
        elif value.microbatch not in (None, number):
            self.calls.note(f"gives {what} of microbatch {value.microbatch}, where that of {number} is due")
        self.versions[name] += 1
        memory = Memory("a buffer")
        self._buffers[name] = Value(self.reference.input("buffer", name), number + 1, memory)

    def _gradient(self, name: str) -> Sum:
        if name not in self._tensors.gradients:
            raise Rejected(self.line, f"adds to the gradient of {name!r}, which this rank does not hold")
        return Sum(name)

    def microbatches(self, batch: object) -> list[Leaves]:
        if batch is not self.batch:
            raise Rejected(self.line, "takes microbatches of something else than the step's batch")

        def read(name: str, microbatch: int) -> Value:
            if name not in self.plan.step.leaves[self.rank]:
                raise Rejected(self.line, f"reads the leaf {name!r}, which this rank does not get")
            return Value(self.reference.input("batch", name), microbatch, Memory("the batch"))

        return [Leaves(m, read) for m in range(self.plan.step.microbatches)]

    def lengths(self, name: str) -> list[Length]:
        for each in self.plan.step.lengths:
            if each.name == name:
                return [Length(each.example, m) for m in range(self.plan.step.microbatches)]
        raise Rejected(self.line, f"asks for the lengths {name!r}, which the plan does not have")

    def layouts(self, messages: Called) -> list[dict[object, Announced]]:
        """What ``messages`` gives for the lengths of each microbatch."""
        values = [each.example for each in self.plan.step.lengths]
        # Once: in a check all microbatches have the example's lengths.
        layouts = messages.run(*values)
        if not isinstance(layouts, dict):
            raise Rejected(self.line, "has messages that are no dict of layouts")
        return [
            {name: Announced(name, layout, m) for name, layout in layouts.items()}
            for m in range(self.plan.step.microbatches)
        ]

    def key(self, microbatch: int) -> Value:
        return Value(self.reference.input("key", "key"), microbatch, Memory("a key"))

    def lane_key(self, microbatch: int, n: int = 0, stride: int = 1) -> Value:
        name = f"lane_key_{n}_{stride}" if n else "lane_key"
        return Value(self.reference.input("key", name), microbatch, Memory("a key"))

    @cached_property
    def rows(self) -> ParameterRows:
        """The rows of parameters that replicas divide."""
        return ParameterRows(self.rank, self.plan, self.calls, self.log)
