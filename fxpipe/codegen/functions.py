"""One Python function for each section, and one for the layers that repeat in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from torch import fx

from fxpipe.codegen.comments import input_comments
from fxpipe.codegen.expressions import Aliases, Scope, variable
from fxpipe.codegen.layers.layer_functions import INDUCTOR, LayerFunctions
from fxpipe.codegen.layers.loops import ForwardNames, Loop, base_name, input_names
from fxpipe.codegen.layers.outline import LATER, Analysis, Repeated
from fxpipe.codegen.layers.saved_lists import Layout, Stack, Taken, layout, taken
from fxpipe.codegen.layers.straight_lines import Part, lines_of, straight_parts
from fxpipe.codegen.nodes import place, storages
from fxpipe.codegen.signatures import LISTS, Result, Signature
from fxpipe.codegen.statements import Statement, body, emptying, unpacking
from fxpipe.codegen.wrapping import wrapped
from fxpipe.ir.graph import Section, offload, reload
from fxpipe.ir.storage import call_nodes
from fxpipe.schedule.ops import Color, Phase


def function_sources(
    sections: Sequence[Section],
    calls: Mapping[Color, Signature],
    names: Aliases,
    compiled: AbstractSet[Color],
) -> list[str]:
    """The functions of layers, and then that of each section.

    ``compiled``: the sections that Inductor compiles, as a whole, or the layers and the stretches between.
    """
    layers = LayerFunctions(names)
    lists = _Lists(sections, calls, names)
    functions = [_Function(s, calls[s.color], names, lists, layers, s.color in compiled) for s in sections]
    texts = [function.source() for function in functions]
    return [*(function.source() for function in layers.functions.values()), *texts]


class _Lists:
    """The runs of a rank's sections, and the entries of the lists between these.

    ``forward``: gets its ``results`` while the functions are written.  ``inner``: the stacks of values that
    are used behind their run in the same section.
    """

    def __init__(self, sections: Sequence[Section], calls: Mapping[Color, Signature], names: Aliases) -> None:
        self.names = names
        self.runs = {s.color: _runs(s, calls[s.color]) for s in sections}
        forward = (run for color, runs in self.runs.items() if color.phase is Phase.F for run in runs)
        named = (named for run in forward for named in input_names(run).items())
        self.forward = ForwardNames({node.name: name for slot, name in named for node in slot.nodes}, {})
        self.layouts: dict[tuple[int, str], Layout] = {}
        self.inner = {color: layout((), LATER, layouts, layouts) for color, layouts in self.runs.items()}
        self._stacks: dict[tuple[Stack | Taken, str], str] = {}
        for (giver, taker, _), name in LISTS.items():
            for section in sections:
                values = calls[section.color].lists_out.get(name, ())
                if section.phase is giver and values:
                    ends = (self.runs.get(Color(section.stage, phase), []) for phase in (giver, taker))
                    self.layouts[section.stage, name] = layout(values, name, *ends)

    def variable(self, stack: Stack | Taken, container: str) -> str:
        """The variable of a stack, in all functions."""
        key = stack, container
        if key not in self._stacks:
            self._stacks[key] = self.names.new(f"{container}_{base_name(stack.run)}")
        return self._stacks[key]


def _runs(section: Section, call: Signature) -> list[Repeated]:
    lists_in = {value: name for name, values in call.lists_in.items() for value in values}
    lists_out: dict[str, tuple[str, ...]] = {}
    for name, values in call.lists_out.items():
        lists_out |= {value: (*lists_out.get(value, ()), name) for value in values}
    (nodes,) = section.graph.output_node().args
    returned = zip(nodes, section.outputs, strict=True)  # type: ignore[arg-type]
    results = {
        node
        for node, value in returned
        if value.name in call.values_out or Result(value.kind, value.name) in call.results
    }
    return Analysis(section, lists_in, lists_out, results).runs()


class _Function:
    """The function of one section."""

    def __init__(
        self,
        section: Section,
        signature: Signature,
        names: Aliases,
        lists: _Lists,
        layers: LayerFunctions,
        compiled: bool,
    ) -> None:
        self.section, self.signature, self.lists, self.layers = section, signature, lists, layers
        self.compiled = compiled
        self.nodes = call_nodes(section.graph)
        self.scope = Scope(names, _renamed(self.nodes))
        self.runs = {run.run.begin: run for run in lists.runs[section.color]}
        self.by_name = {node.name: node for node in section.graph.nodes}
        self.inner = lists.inner[section.color]
        self.whole = compiled and not self.runs and section.phase is not Phase.W  # as one function
        entries = {name: lists.layouts[section.stage, name] for name in signature.lists_in}
        entries[LATER] = self.inner
        self.takes: dict[int, tuple[Taken, ...]] = {}
        for begin, run in self.runs.items():
            # A stack has one taker: what another run takes of it as well is built from its values.
            others = {each.stack for each in self._taken() if each.stack is not None}
            self.takes[begin] = taken(run, entries, others)

    def source(self) -> str:
        call = self.signature
        arguments = [*call.containers, *call.lists_in, *map(variable, call.values_in)]
        lines = [line for name in call.lists_in for line in self._unpacked(name)]
        lines += [line for each in self._taken() if each.container != LATER for line in self._stacked(each)]
        lines += self._ops()
        results = self._results()
        end = [f"    return {', '.join(results)}"] if results else []
        head = [f"def {call.name}({', '.join(arguments)}):", *input_comments(self.section, call.values_in)]
        if self.whole:
            head.insert(0, INDUCTOR)
            self.layers.names.uses_inductor = True
        inner = body(lines, self._returned, storages(self.nodes, self.scope))
        return "\n".join(wrapped(line) for line in [*head, *inner, *end])

    def _unpacked(self, name: str) -> Iterator[Statement]:
        """A list from another phase, and those of its records that no run takes."""
        entries = self.lists.layouts[self.section.stage, name]
        singles = [self._text(entry) for entry in entries if isinstance(entry, str)]
        stacks = [entry for entry in entries if isinstance(entry, Stack)]
        if name.startswith("offloaded"):  # flat, for the offload store
            yield from self._sliced(name, singles, stacks)
        else:
            names = [*singles, *(self.lists.variable(stack, name) for stack in stacks)]
            yield from emptying(names, name)
        for stack in stacks:
            yield from self._leftover(stack, self.lists.variable(stack, name))

    def _sliced(self, name: str, singles: Sequence[str], stacks: Sequence[Stack]) -> Iterator[Statement]:
        begin = len(singles)
        if singles:
            yield Statement(unpacking(singles, f"{name}[:{begin}]"))
        for stack in stacks:
            size, end = len(stack.values), begin + len(stack.values) * len(stack.records)
            slices = f"[{name}[k : k + {size}] for k in range({begin}, {end}, {size})]"
            yield Statement(f"{self.lists.variable(stack, name)} = {slices}")
            begin = end
        yield Statement(f"{name}.clear()")

    def _leftover(self, stack: Stack, variable: str) -> Iterator[Statement]:
        """Unpack the records that the run which takes the stack does not take."""
        taker = next((each for each in self._taken() if each.stack is stack), None)
        numbers = {name: k for k, record in enumerate(stack.records) for name in record}
        places = [numbers[taker.record(k)[0]] for k in range(taker.first, taker.last + 1)] if taker else []
        for number, record in reversed(list(enumerate(stack.records))):
            if number > max(places, default=-1):
                yield self._popped(record, f"{variable}.pop()")
        for number, record in enumerate(stack.records):
            if number < min(places, default=0):
                yield self._popped(record, f"{variable}.pop(0)")

    def _popped(self, record: Sequence[str], popped: str) -> Statement:
        texts = [text if (text := self._text(name)).isidentifier() else "_" for name in record]  # _: an input
        return Statement(unpacking(texts, popped), (popped.partition(".")[0],))

    def _stacked(self, taker: Taken) -> Iterator[Statement]:
        """Bring the records that a run takes into the order in which it pops them."""
        name, times = self._variable(taker), taker.run.run.times
        if taker.stack is None:
            yield Statement(f"{name} = []")
        elif taker.ascending:
            yield Statement(f"{name}.reverse()", (name,))
        for period in reversed(range(taker.first)):
            yield self._built(taker, period, f"{name}.append(")
        for period in range(taker.last + 1, times):
            yield self._built(taker, period, f"{name}.insert(0, ")

    def _built(self, taker: Taken, period: int, call: str) -> Statement:
        values = [self._text(name) for name in taker.record(period)]
        return Statement(f"{call}[{', '.join(values)}])", (*values, self._variable(taker)))

    def _taken(self) -> Iterator[Taken]:
        return (each for takers in self.takes.values() for each in takers)

    def _variable(self, taker: Taken) -> str:
        return self.lists.variable(taker.stack or taker, taker.container)

    def _ops(self) -> Iterator[Statement]:
        name = self.signature.name
        yield from lines_of([*self._parts()], name, self.scope, place, self._returned, self.layers)

    def _parts(self) -> Iterator[Part]:
        """The loops, and what is between them."""
        position, apart = 0, self.compiled and not self.whole
        while position < len(self.nodes):
            if position in self.runs:
                run = self.runs[position]
                yield (), [*self._loop(run)]
                position = run.run.end
                continue
            end = next((k for k in range(position, len(self.nodes)) if k in self.runs), len(self.nodes))
            nodes = self.nodes[position:end]
            yield from straight_parts(nodes, self.section.phase, self.scope, place, apart=apart)
            position = end

    def _loop(self, run: Repeated) -> Iterator[Statement]:
        takers = self.takes[run.run.begin]
        takes = [(each, self._variable(each)) for each in takers]
        gives = [
            (name, entry, self.lists.variable(entry, name))
            for name in self.signature.lists_out
            for entry in self.lists.layouts[self.section.stage, name]
            if isinstance(entry, Stack) and entry.run is run
        ]
        later = [stack for stack in self.inner if isinstance(stack, Stack) and stack.run is run]
        gives += [(LATER, stack, self.lists.variable(stack, LATER)) for stack in later]
        passed = {each.stack for each in self._taken()}
        unpacked = [stack for stack in later if stack not in passed]
        yield from (line for each in takers if each.container == LATER for line in self._stacked(each))
        yield from Loop(
            run,
            self.section.phase,
            self.scope,
            takes,
            gives,
            unpacked,
            self.lists.forward,
            self.layers,
            self.compiled,
        ).lines()
        for stack in later:
            if stack in passed:
                yield from self._leftover(stack, self.lists.variable(stack, LATER))

    def _results(self) -> list[str]:
        """The expressions that are returned, in order."""
        (nodes,) = self.section.graph.output_node().args
        outputs = (Result(value.kind, value.name) for value in self.section.outputs)
        by_result = dict(zip(outputs, nodes, strict=True))  # type: ignore[arg-type]
        results = [self._text(name) for name in self.signature.values_out]
        results += [self.scope.text(by_result[result]) for result in self.signature.results]
        for name in self.signature.lists_out:
            entries = self.lists.layouts[self.section.stage, name]
            results.append(f"[{', '.join(self._entry(entry, name) for entry in entries)}]")
        return results

    def _entry(self, entry: str | Stack, name: str) -> str:
        if isinstance(entry, str):
            return self._text(entry)
        stack = self.lists.variable(entry, name)
        return f"*(x for record in {stack} for x in record)" if name.startswith("offloaded") else stack

    @property
    def _returned(self) -> set[str]:
        return {word for result in self._results() for word in re.findall(r"\w+", result)}

    def _text(self, name: str) -> str:
        return self.scope.text(self.by_name[name])


def _renamed(nodes: Sequence[fx.Node]) -> dict[fx.Node, str]:
    """Offloaded values have the name of the value itself, reloaded ones that of the ``reload``."""
    texts: dict[fx.Node, str] = {}
    for node in nodes:
        if node.target is offload:
            (value,) = node.all_input_nodes
            texts[node] = texts.get(value, variable(value.name))
        elif node.target is reload:
            (value,) = node.all_input_nodes
            texts[value] = texts[node] = variable(node.name)
    return texts
