"""The forward value to which each gradient of the backward belongs.

While the step is traced, ``mark_results`` says at nodes which output of an op of autograd each is, and
``mark_gradients``, called before autograd differentiates an op, which nodes are the gradients of the op's
outputs.  Autograd adds the gradients of all uses of a value first: so these are whole gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from fxpipe.ir import compat
from fxpipe.ir.graph import origin_of
from fxpipe.ir.names import identifier
from fxpipe.ir.node_names import SAME_VALUE, Gradient, Named, parameter_name
from fxpipe.plan.dtensors import local

aten = torch.ops.aten

#: In ``meta``, the sequence number of an op of autograd, and the number of one of its outputs.
_RESULT, _GRADIENT = "result_of", "gradient_of"
#: What a node that replaces another one keeps of it.
MARKS = (_RESULT, _GRADIENT)
_Readers = tuple[dict[str, set[fx.Node]], dict[fx.Node, fx.Node]]


def mark_results(values: object) -> None:
    """Let the nodes of tensors of the running trace say which op of autograd gave each.

    values: the arguments of an op; its own walk takes a quarter of the time of a tree of any kind.
    """
    if isinstance(values, torch.Tensor):
        if values.grad_fn is not None:
            _mark(values, _RESULT, (compat.sequence_number(values.grad_fn), values.output_nr))
    elif isinstance(values, tuple | list):
        for value in values:
            mark_results(value)
    elif isinstance(values, dict):
        mark_results([*values.values()])


def mark_gradients(sequence_number: int, gradients: Sequence[torch.Tensor | None]) -> None:
    """Let the nodes of the gradients of an op's outputs say so."""
    for number, gradient in enumerate(gradients):
        if gradient is not None:
            _mark(gradient, _GRADIENT, (sequence_number, number))


def _mark(tensor: torch.Tensor, key: str, output: tuple[int, int]) -> None:
    """An op that gives its gradient to its inputs as it is has marked it first: it is the op's."""
    node = compat.traced_node(local(tensor))
    if node is not None:
        node.meta.setdefault(key, output)


class GradientNames:
    """What the nodes of a traced graph are gradients of.

    ``parameters``: the nodes of the gradients of parameters, by name.  ``short``: paths of modules in names.
    """

    def __init__(self, graph: fx.Graph, parameters: Mapping[str, fx.Node], short: Mapping[str, str]) -> None:
        # After ``functionalize`` several nodes can stand for one, of which the last has the result.
        self._results = {node.meta[_RESULT]: root(node) for node in graph.nodes if _RESULT in node.meta}
        of = {node.meta[_GRADIENT]: root(node) for node in graph.nodes if _GRADIENT in node.meta}
        values = {node: self._results[key] for key, node in reversed(of.items()) if key in self._results}
        named = {root(node): parameter_name(name, short) for name, node in parameters.items()}
        self._values: dict[fx.Node, fx.Node | Named] = {**named, **values}
        self._uses = {seq: node for (seq, _), node in reversed(self._results.items())}
        self._short = short
        self._read_by: dict[fx.Node, _Readers] = {}  # by the gradients of values
        self._summands = {node: [*_summands(node)] for node in self._values}
        self._sums = {summand: node for node, summands in self._summands.items() for summand in summands}

    def of(self, node: fx.Node, new: Mapping[fx.Node, fx.Node]) -> Gradient | None:
        """What a node is the gradient of, or a summand of that; ``new``: the nodes that have names."""
        if node in self._values:
            return Gradient(_named(self._values[node], new))
        if node in self._sums and self._use(node) is not None:
            return Gradient(_named(self._values[self._sums[node]], new), self._via(node, new))
        return None

    def _use(self, summand: fx.Node) -> fx.Node | None:
        """The op of the forward that gives a summand."""
        return self._uses.get(origin_of(summand).seq)

    def _via(self, node: fx.Node, new: Mapping[fx.Node, fx.Node]) -> str:
        """The use that a summand comes from: its module, if no other summand of the value comes from there,
        else its name in the module."""
        total, use = self._sums[node], self._uses[origin_of(node).seq]
        if total not in self._read_by:
            self._read_by[total] = self._readers(total, new)
        by_text, first = self._read_by[total]
        here = new[use]
        text = next((text for text in self._texts(here) if len(by_text[text]) == 1), here.name)
        return text if first[use] is node else f"{text}_too"  # of x * x

    def _readers(self, total: fx.Node, new: Mapping[fx.Node, fx.Node]) -> _Readers:
        """The uses of a value by the texts that may name them, and of each use its first summand."""
        by_text, first = defaultdict[str, set[fx.Node]](set), dict[fx.Node, fx.Node]()
        for summand in self._summands[total]:
            use = self._use(summand) if self._sums[summand] is total else None
            if use is not None:
                first[use] = min(first.get(use, summand), summand)
                for text in self._texts(new[use]):
                    by_text[text].add(use)
        return by_text, first

    def _texts(self, use: fx.Node) -> tuple[str, str]:
        """The last part of the path of a use's module, and the use's name in the module."""
        path = origin_of(use).path
        inside = use.name.removeprefix(f"{identifier(self._short.get(path) or 'model')}_")
        module = path.rpartition(".")[2]
        return (inside if not module or module.isdigit() else identifier(module).lstrip("_")), inside


def _summands(node: fx.Node) -> Iterator[fx.Node]:
    """The operands of a sum of autograd's engine, which adds two at a time; each once, as sums of sums may
    have them in common."""
    todo, seen = [node], set[fx.Node]()
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        if _is_sum(one):
            todo += map(root, one.all_input_nodes)
        elif one is not node:
            yield one


def _is_sum(node: fx.Node) -> bool:
    """Whether autograd's engine added the gradients of several uses of a value."""
    return node.target is aten.add.Tensor and origin_of(node).is_of_autograd


def root(node: fx.Node) -> fx.Node:
    """The node that has a node's value: not one that passes it on, or transposes it once more."""
    transposed: fx.Node | None = None  # the last transpose on the way that no other undoes
    while True:
        if node.target is aten.t.default:
            transposed = node if transposed is None else None
        elif node.target not in SAME_VALUE:
            return transposed or node
        node = node.args[0]  # type: ignore[assignment]


def _named(value: fx.Node | Named, new: Mapping[fx.Node, fx.Node]) -> Named:
    if isinstance(value, Named):
        return value
    node = new[value]
    return Named(node.name, origin_of(node).path)
