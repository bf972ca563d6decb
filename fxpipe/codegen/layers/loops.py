"""A run as a function of its own, called in a loop: the layers of a model are written once.

def blocks_forward(params, key, position, blocks_in):
    …
    return add, [norm_mean, …], [act_relu, …]

for i in range(2, 14):
    blocks_13_add, saved, … = blocks_forward(within(params, f"blocks.{i}"), key, 2 * i, blocks_13_add)
    saved_blocks.append(saved)
    …
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from torch import fx

from fxpipe.codegen.expressions import CONTAINERS, KEY, Scope, item, number, variable
from fxpipe.codegen.layers.layer_functions import LayerFunctions, from_to
from fxpipe.codegen.layers.outline import Repeated, Slot, Source
from fxpipe.codegen.layers.repeats import free_numbers
from fxpipe.codegen.layers.saved_lists import Stack, Taken
from fxpipe.codegen.layers.sequences import Values, loop_head
from fxpipe.codegen.layers.straight_lines import lines_of, straight_parts
from fxpipe.codegen.nodes import place, storages
from fxpipe.codegen.signatures import PHASE_NAMES
from fxpipe.codegen.statements import CARRY, Statement, body, emptying, unpacking
from fxpipe.codegen.wrapping import wrapped
from fxpipe.ir.compiled import computing
from fxpipe.ir.graph import Input, offload, reload
from fxpipe.ir.names import comment, identifier, unused
from fxpipe.ir.node_names import BACKWARD, Gradient, Named, gradient_name
from fxpipe.ir.size import size_names
from fxpipe.ir.text import shape_text
from fxpipe.schedule.ops import Phase


@dataclass
class _Arguments:
    """The arguments of a function, and of its call in the loop: texts around a value that may vary."""

    inner: list[str] = field(default_factory=list)
    outer: list[tuple[str, str | None, str]] = field(default_factory=list)

    def add(self, inner: str, before: str, varies: str | None = None, behind: str = "") -> None:
        self.inner.append(inner)
        self.outer.append((before, varies, behind))

    def of_call(self, texts: Mapping[str, str]) -> str:
        return ", ".join(a + (texts[varies] if varies else "") + b for a, varies, b in self.outer)


@dataclass(frozen=True)
class ForwardNames:
    """The names of values of the forward in the functions of its layers.

    ``inputs``: of what a layer takes of the one before.  ``results``: of what it computes.
    """

    inputs: dict[str, str]
    results: dict[str, str]


class Loop:
    """The lines of a run.

    ``takes``, ``gives``: what it takes, and what it gives by the name of the list, with the variable of each.
    ``unpacked``: the stacks whose values are used one by one behind it.  ``forward``: to which a run of the
    forward adds.  ``compiled``: whether Inductor compiles its section, of a W the stretches in it.
    """

    def __init__(
        self,
        run: Repeated,
        phase: Phase,
        scope: Scope,
        takes: Sequence[tuple[Taken, str]],
        gives: Sequence[tuple[str, Stack, str]],
        unpacked: Sequence[Stack],
        forward: ForwardNames,
        layers: LayerFunctions,
        compiled: bool,
    ) -> None:
        self.run, self.section, self.scope, self.layers = run, phase, scope, layers
        # That of a forward which B or W repeats is F.
        is_backward = any(node.meta["origin"].backward for node in run.body)
        self.phase = PHASE_NAMES[phase if is_backward else Phase.F]
        self.apart = compiled and phase is Phase.W
        self.compiled = compiled and not self.apart and any(computing(run.body))
        self.takes, self.gives, self.unpacked = takes, gives, unpacked
        self.paths = [_module(run.period(k)) for k in range(run.run.times)]
        self.around = _alike([_words(path) for path in self.paths])
        self.origins = {nodes[1]: nodes for nodes in (run.values(j) for j in range(run.run.period))}
        self.base = base_name(run)
        self.texts: dict[fx.Node, str] = {}
        self.numbers: dict[fx.Node, tuple[str, ...]] = {}
        self.varying: dict[str, Values] = {}
        self.used: set[str] = {CARRY}
        self.arguments = _Arguments()
        self.carried = [slot for slot in run.carried if not run.is_moved(slot)]
        self.forward = forward
        self.inputs = dict(_names_of_inputs(run, forward.inputs))
        self.moved = [slot for slot in run.carried if run.is_moved(slot)]

    def lines(self) -> Iterator[Statement]:
        """The loop in its section, with what comes before and after it."""
        self._of_rank()
        self._shared()
        self._numbers()
        unpacked = self._inputs()
        returned, targets, after = self._results()
        name = self._function(unpacked, returned)
        times = self.run.run.times
        heading = comment(from_to(self.paths))
        yield from self._before(heading)
        head, texts = loop_head(times, self.varying)
        call = f"{name}({self.arguments.of_call(texts)})"
        left = f"{', '.join(targets)} = " if targets else ""
        inner = [f"    {left}{call}", *(f"    {text}" for text in after)]
        reads = [self._outer(slot.nodes[0]) for slot in self.run.slots if slot.source is Source.SHARED]
        reads = [text for text in reads if text.isidentifier() and not KEY.fullmatch(text)]
        reads += [variable for _, variable in self.takes]
        yield Statement("\n".join([head, *inner]), tuple(reads), heading)
        yield from self._behind(heading)

    # Arguments

    def _of_rank(self) -> None:
        """The rank's tensors: those of a module by their names within it, others one by one."""
        slots = [slot for slot in self.run.slots if slot.source is Source.OF_RANK]
        split = {slot: _split([_input(node).name for node in slot.nodes]) for slot in slots}
        modules = Counter(paths for paths, name in split.values() if name and all(paths))
        module = modules.most_common(1)[0][0] if modules else ()
        kinds = dict.fromkeys(_input(slot.example).kind for slot in slots if split[slot][0] == module)
        for kind in sorted(kinds, key=list(CONTAINERS).index):
            self.varying["at"] = module
            self.layers.names.uses_within = True
            self.arguments.add(CONTAINERS[kind], f"within({CONTAINERS[kind]}, ", "at", ")")
        for slot in slots:
            kind, (paths, name) = _input(slot.example).kind, split[slot]
            if paths == module:
                self.texts[slot.example] = item(kind, name)
            else:
                argument = self._new(identifier(name or re.sub(r"\d+", "", paths[0].rpartition(".")[2])))
                self.varying[argument] = tuple(_input(node).name for node in slot.nodes)
                self.arguments.add(argument, f"{CONTAINERS[kind]}[", argument, "]")
                self.texts[slot.example] = argument

    def _shared(self) -> None:
        for slot in self.run.slots:
            if slot.source is Source.SHARED:
                outer = self._outer(slot.example)
                argument = outer if KEY.fullmatch(outer) else self._new(self._local(slot.nodes))
                self.arguments.add(argument, outer)
                self.texts[slot.example] = argument
        for length in size_names(self.run.body):
            self.used.add(length)
            self.arguments.add(length, length)

    def _numbers(self) -> None:
        """Numbers that differ from period to period; such that differ alike are one argument."""
        known: dict[tuple[str, ...], str] = {}
        for position, node in enumerate(self.run.body):
            rows = [free_numbers(self.run.period(k)[position]) for k in range(self.run.run.times)]
            texts = []
            for values in zip(*rows, strict=True):
                if len(set(map(repr, values))) == 1:
                    texts.append(number(values[0]))
                    continue
                offset = values[0] if isinstance(values[0], int) else 0
                alike = tuple(repr(value - offset) for value in values)  # 0, 0.0 and -0.0 differ
                if alike not in known:
                    argument = self._new("position" if isinstance(values[0], int) else "number")
                    self.varying[argument] = values
                    self.arguments.add(argument, "", argument)
                    known[alike] = argument
                ahead = offset - int(self.varying[known[alike]][0]) if isinstance(values[0], int) else 0
                texts.append(known[alike] + (f" + {ahead}" if ahead else ""))
            if rows[0]:
                self.numbers[node] = tuple(texts)

    def _inputs(self) -> list[tuple[str, list[str]]]:
        """The lists that the function unpacks: name, and the names of its values."""
        for slot in self.carried:
            argument = self.texts[slot.example] = self._new(self._carried_name(slot))
            self.arguments.add(argument, self._final(slot))
        unpacked: list[tuple[str, list[str]]] = []
        if self.moved:
            for slot in self.moved:
                self.texts[slot.example] = self._new(self._carried_name(slot))
            self.arguments.add(CARRY, CARRY)
            unpacked.append((CARRY, [self.texts[slot.example] for slot in self.moved]))
        for records, stack in self.takes:
            for k, slot in enumerate(records.slots):
                self.texts[slot.example] = self._new(self._record_name(records, k))
            argument = self._unused(records.container)
            self.arguments.add(argument, f"{stack}.pop()")
            unpacked.append((argument, [self.texts[slot.example] for slot in records.slots]))
        return unpacked

    def _results(self) -> tuple[list[str], list[str], list[str]]:
        """What the function returns, the variables that get it, and what the loop does with those."""
        for node in self.run.body:
            if node.target in (offload, reload):
                self.texts[node] = self.texts[node.all_input_nodes[0]]
            else:
                self.texts[node] = self._new(self._local(self.origins[node]))
        if self.phase == PHASE_NAMES[Phase.F]:
            texts = ((node, self.texts[nodes[1]]) for nodes in self.origins.values() for node in nodes)
            self.forward.results.update((node.name, text) for node, text in texts)
        returned = [self._result(slot.result) for slot in self.carried]
        targets = [self._final(slot) for slot in self.carried]
        if self.moved:
            returned.append(f"[{', '.join(self._result(slot.result) for slot in self.moved)}]")
            targets.append(CARRY)
        after = []
        for container, stack, name in self.gives:
            returned.append(f"[{', '.join(self._result(j) for j in stack.values)}]")
            target = container
            times = sum(1 for x in targets if x.startswith(target)) + 1
            target += f"_{times}" if times > 1 else ""
            targets.append(target)
            after.append(f"{name}.append({target})")
        return returned, targets, after

    def _function(self, unpacked: list[tuple[str, list[str]]], returned: list[str]) -> str:
        scope = Scope(self.scope.names, self.texts, self.numbers)
        lines = [line for name, values in unpacked for line in emptying(values, name)]
        returned_values: list[int | Slot] = [slot.result for slot in self.run.carried]
        returned_values += [value for _, stack, _ in self.gives for value in stack.values]
        named = {self.run.body[value] for value in returned_values if isinstance(value, int)}
        returned_texts = {self._result(value) for value in returned_values}
        name = f"{self.base}_{self.phase}"
        parts = [*straight_parts(self.run.body, self.section, scope, self._place, named, apart=self.apart)]
        lines += lines_of(parts, name, scope, self._place, returned_texts, self.layers)
        inside = {name for _, names in unpacked for name in names} | {self.texts[n] for n in self.run.body}
        same = storages(self.run.body, scope)
        freed = {name: same.get(name, name) for name in inside} | dict.fromkeys(self.used - inside, "")
        carried = [(self.texts[slot.example], slot.example.meta["val"]) for slot in self.run.carried]
        text = [f"    # {name}: {shape_text(value)}" for name, value in carried]
        text += [wrapped(line) for line in body(lines, returned_texts, freed)]
        if returned:
            text.append(wrapped(f"    return {', '.join(returned)}"))
        return self.layers.function(name, self.arguments.inner, text, self.paths, self.compiled)

    # In the section

    def _before(self, heading: str) -> Iterator[Statement]:
        for slot in self.carried:
            first, final = self._outer(slot.nodes[0]), self._final(slot)
            yield Statement(
                f"{final} = {first}", (first,) if first.isidentifier() else (), heading, frees=True
            )
        if self.moved:
            firsts = [self._outer(slot.nodes[0]) for slot in self.moved]
            variables = tuple(text for text in firsts if text.isidentifier())
            yield Statement(f"{CARRY} = [{', '.join(firsts)}]", variables, heading, frees=True)
        if names := [name for _, _, name in self.gives]:
            yield Statement(f"{', '.join(names)} = {', '.join('[]' for _ in names)}", (), heading)

    def _behind(self, heading: str) -> Iterator[Statement]:
        if self.moved:
            yield Statement(unpacking([self._final(slot) for slot in self.moved], CARRY), (CARRY,), heading)
        for _, stack, name in self.gives:
            if stack in self.unpacked:
                records = [f"({', '.join(map(variable, record))},)" for record in stack.records]
                yield Statement(unpacking(records, name), (name,), heading)

    def _final(self, slot: Slot) -> str:
        """The variable of a carried value in the section: that of the last period's result."""
        return self.scope.text(self.run.values(slot.result)[-1])

    def _outer(self, node: fx.Node) -> str:
        return self.scope.text(node)

    # Names

    def _result(self, value: int | Slot) -> str:
        return self.texts[value.example if isinstance(value, Slot) else self.run.body[value]]

    def _new(self, name: str) -> str:
        return self._unused(self.scope.names.local(variable(name)))

    def _unused(self, name: str) -> str:
        text = unused(name, self.used.__contains__)
        self.used.add(text)
        return text

    def _carried_name(self, slot: Slot) -> str:
        """The name of what a period takes of the one before: of a gradient, that of what its layer gives."""
        return self._local(slot.nodes) if gradients(slot.nodes) else input_names(self.run)[slot]

    def _record_name(self, records: Taken, k: int) -> str:
        """The name of value k of a record: an input of the periods that give it is called so here, too."""
        value = None if records.stack is None else records.stack.values[k]
        if records.stack is not None and isinstance(value, Slot) and not gradients(value.nodes):
            return input_names(records.stack.run)[value]
        return self._local(records.slots[k].nodes)

    def _local(self, nodes: Sequence[fx.Node]) -> str:
        """The name of a value, by period, without the path of the period's module; that of a module outside,
        which counts the ops of all periods, also without a number."""
        if which := gradients(nodes):
            via = {each.via for each in which}  # of a module outside: numbered over all periods
            text = which[1].via if len(via) == 1 else _without_number(which[1].via)
            return gradient_name(self._local_value([each.of for each in which]), text)
        prefix = _prefix(nodes[1])
        return prefix + self._local_value(
            [Named(node.name.removeprefix(prefix), node.meta["origin"].path) for node in nodes]
        )

    def _local_value(self, values: Sequence[Named]) -> str:
        """The local name of a value of the forward."""
        if (names := tuple(value.name for value in values)) in self.inputs:
            return self.inputs[names]
        texts = {self.forward.results.get(name, "") for name in names} - {""}
        if len(texts) == 1:
            return texts.pop()
        path = _words(values[1].path)
        bare = names[1].lstrip("_")
        known = (identifier(".".join(path[k:])).lstrip("_") for k in range(len(path)))
        prefix = next((word for word in known if bare.startswith(f"{word}_")), None)
        if prefix is None:
            return _without_number(bare)
        paths = [value.path for value in values]
        rest, within = bare[len(prefix) :], self._within(paths)
        rest = rest if len({*paths}) > 1 else _without_number(rest)
        at_number = not within or within[0].isdigit()  # an identifier begins with a word
        return f"{identifier(f'{self.base}.{within}' if at_number else within)}{rest}"

    def _place(self, node: fx.Node) -> str:
        if not node.meta["origin"].path and not node.meta["origin"].source:
            return place(node)
        within = self._within([node.meta["origin"].path for node in self.origins[node]])
        return f".{within}" if within else self.base

    def _within(self, paths: Sequence[str]) -> str:
        """The path of a module, by period, within that of the period, without the numbers of periods; nothing
        for that itself, and for one outside."""
        words, depth = _alike([_words(path) for path in paths]), len(self.around)
        is_inside = len({*paths}) > 1 and words[:depth] == self.around
        return ".".join(words[depth:]) if is_inside else ""


def input_names(run: Repeated) -> dict[Slot, str]:
    """The names of carried values as arguments of a period."""
    numbered = ((slot, f"_{k}" if k > 1 else "") for k, slot in enumerate(run.carried, start=1))
    return {slot: f"{_prefix(slot.example)}{base_name(run)}_in{number}" for slot, number in numbered}


def _names_of_inputs(run: Repeated, inputs: Mapping[str, str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """The values, by period, whose gradients a period of a backward gives to the next: what its layer takes,
    with the names of that in the forward, ``inputs``."""
    for slot, name in input_names(run).items():
        if which := gradients(run.values(slot.result)):
            yield tuple(each.of.name for each in which), inputs.get(which[1].of.name, name)


def gradients(nodes: Sequence[fx.Node]) -> list[Gradient]:
    """What values, by period, are gradients of; empty if they are none."""
    which = [node.meta.get("gradient") for node in nodes]
    return [each for each in which if each is not None] if all(which) else []


def _prefix(node: fx.Node) -> str:
    return BACKWARD if node.name.startswith(BACKWARD) else ""


def base_name(run: Repeated) -> str:
    """The name of the modules of a run, without their number: ``blocks``."""
    words = [word for word in _module(run.body).split(".") if word and not word.isdigit()]
    return identifier(words[-1]) if words else "block"


def _words(path: str) -> tuple[str, ...]:
    return tuple(path.split(".")) if path else ()


def _alike(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The words of paths in which all agree."""
    return tuple(column[0] for column in zip(*paths, strict=False) if len(set(column)) == 1)


def _without_number(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def _input(node: fx.Node) -> Input:
    source: Input = node.meta["input"]
    return source


def _split(names: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Names as paths of modules, and the name within a module that all of them end with."""
    words = [name.split(".") for name in names]
    backwards = zip(*(reversed(path) for path in words), strict=False)
    common = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, backwards))
    return tuple(".".join(path[: len(path) - common]) for path in words), ".".join(
        words[0][len(words[0]) - common :]
    )


def _module(nodes: Sequence[fx.Node]) -> str:
    """The innermost module around most of the nodes.  A list within an item of a list is none: of the modules
    ``block.3.layer.0`` and ``block.3.layer.1`` it is ``block.3``."""
    paths = [tuple(path.split(".")) for node in nodes if (path := node.meta["origin"].path)]
    around = Counter(path[:k] for path in paths for k in range(1, len(path) + 1))
    most = sorted((len(path), path) for path, number in around.items() if 5 * number > 4 * len(paths))
    if not most:
        return ""
    _, module = most[-1]
    return ".".join(module[:-1] if _is_inner_list(module, paths) else module)


def _is_inner_list(module: tuple[str, ...], paths: Sequence[tuple[str, ...]]) -> bool:
    """Whether all in a module, which is part of an item of a list, is part of its own items."""
    inside = [path[len(module) :] for path in paths if path[: len(module)] == module]
    is_of_item = len(module) > 1 and module[-2].isdigit() and not module[-1].isdigit()
    return is_of_item and all(path and path[0].isdigit() for path in inside)
