"""The colored graph as data, in columns, for reports; a saved pipeline keeps it as ``graph.json``.

Texts that repeat (targets, paths, shapes, lines of source) stand once in ``texts``.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from torch import fx

from fxpipe.errors import ArtifactError
from fxpipe.ir.graph import Kind, Section, offload, reload
from fxpipe.ir.liveness import Liveness, liveness
from fxpipe.ir.ops import is_between_lanes, node_flops
from fxpipe.ir.sections import edges_between
from fxpipe.ir.storage import call_nodes, is_view, node_bytes, root_within, storage_root
from fxpipe.ir.text import shape_text, target_text
from fxpipe.plan.artifact import Plan
from fxpipe.schedule.ops import Phase
from fxpipe.strict import (
    MEBIBYTE,
    Mismatch,
    between,
    entries,
    parse_json,
    read_text,
    refused,
    structure,
    unstructure,
)

NAME = "graph.json"
FORMAT = 1
MOST_BYTES, MOST_OPS = 64 * MEBIBYTE, 1 << 20

#: What a bit of an op's ``marks`` says.
SAVED, FOR_WEIGHT, RECOMPUTED, OFFLOADED, SHARDED, SENT = (1 << bit for bit in range(6))

Number = Annotated[int, between(0, 1 << 62)]
Column = Annotated[tuple[Number, ...], entries(0, MOST_OPS)]
PhaseColumn = Annotated[tuple[Annotated[int, between(0, 2)], ...], entries(0, MOST_OPS)]


@dataclass(frozen=True)
class Kept:
    """A storage that ``stage`` keeps of each microbatch; ``op``: the number of the op that made it (of
    another stage for a value that was received).  ``until``: "B", or "W" where W reads it as well."""

    stage: Number
    op: Number
    bytes: Number
    until: str


@dataclass(frozen=True)
class SentValue:
    """A value in the message from one section to another; both as text, ``"F2"``."""

    source: str
    target: str
    op: Number
    name: str
    shape: str
    bytes: Number


@dataclass(frozen=True)
class GraphRecord:
    """The ops of one microbatch in order.

    ``target``, ``path``, ``source``, ``shape``: numbers in ``texts``.  ``phase``: 0, 1, 2 for F, B, W.
    ``bytes``: of the storage that the op makes, 0 for a view.  ``inputs``: per op the numbers of the ops
    whose results it reads, ``weights``: of the texts that name parameters, buffers and leaves of the batch.
    """

    format: int
    texts: Annotated[tuple[str, ...], entries(0, MOST_OPS)]
    name: Annotated[tuple[str, ...], entries(0, MOST_OPS)]
    target: Column
    stage: Column
    phase: PhaseColumn
    path: Column
    source: Column
    shape: Column
    flops: Column
    bytes: Column
    marks: Column
    inputs: Annotated[tuple[Column, ...], entries(0, MOST_OPS)]
    weights: Annotated[tuple[Column, ...], entries(0, MOST_OPS)]
    kept: Annotated[tuple[Kept, ...], entries(0, MOST_OPS)]
    sent: Annotated[tuple[SentValue, ...], entries(0, MOST_OPS)]


def graph_record(graph: fx.Graph, sections: tuple[Section, ...], plan: Plan) -> GraphRecord:
    """The record of the colored graph of a compiled pipeline.

    Items of tuples, offloads and reloads are no ops of it: their users read the op behind them.
    """
    live = liveness(graph, sections, edges_between(sections), plan.placement)
    nodes = [node for node in call_nodes(graph) if node.target not in _PLUMBING]
    number = {node: k for k, node in enumerate(nodes)}
    texts = _Texts()
    marks = _marks(graph, nodes, live, plan)
    return GraphRecord(
        format=FORMAT,
        name=tuple(node.name for node in nodes),
        target=tuple(texts(target_text(node)) for node in nodes),
        stage=tuple(node.meta["color"].stage for node in nodes),
        phase=tuple(_PHASES.index(node.meta["color"].phase) for node in nodes),
        path=tuple(texts(node.meta["origin"].path) for node in nodes),
        source=tuple(texts(node.meta["origin"].source) for node in nodes),
        shape=tuple(texts(shape_text(node.meta.get("val"))) for node in nodes),
        flops=tuple(int(node_flops(node)) for node in nodes),
        bytes=tuple(0 if is_view(node) else node_bytes(node) for node in nodes),
        marks=tuple(marks.get(node, 0) for node in nodes),
        inputs=tuple(
            _numbers(number[_made_by(n)] for n in node.all_input_nodes if _is_op(n)) for node in nodes
        ),
        weights=tuple(_numbers(map(texts, _weights(node))) for node in nodes),
        kept=tuple(_kept(graph, live, number)),
        sent=tuple(_sent(live, number, graph)),
        texts=texts.known,
    )


_PLUMBING = (operator.getitem, offload, reload)
_PHASES = list(Phase)


class _Texts:
    """Gives each text a number, in the order of their first uses."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    @property
    def known(self) -> tuple[str, ...]:
        return tuple(self._numbers)


def _made_by(node: fx.Node) -> fx.Node:
    """The op behind an item, an offload or a reload."""
    while node.target in _PLUMBING:
        node = node.all_input_nodes[0]
    return node


def _is_op(node: fx.Node) -> bool:
    return _made_by(node).op == "call_function"


def _weights(node: fx.Node) -> list[str]:
    inputs = [n.meta["input"] for n in node.all_input_nodes if n.op == "placeholder"]
    return [each.name for each in inputs if each.kind is not Kind.KEY]


def _numbers(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(numbers))


def _marks(graph: fx.Graph, nodes: Sequence[fx.Node], live: Liveness, plan: Plan) -> dict[fx.Node, int]:
    marks: dict[fx.Node, int] = {}

    def mark(values: Iterable[fx.Node], bit: int) -> None:
        for value in values:
            if _is_op(value):
                marks[_made_by(value)] = marks.get(_made_by(value), 0) | bit

    for stage in range(len(live.saved_activations)):
        mark(live.saved_activations[stage], SAVED)
        mark(live.saved_for_weight[stage], FOR_WEIGHT)
    for _, root, _ in _offloaded(graph):
        mark([root], SAVED | OFFLOADED)
    for values in live.sent:
        mark(values, SENT)
    schedule = plan.ordered
    for node in nodes:
        color, origin = node.meta["color"], node.meta["origin"]
        if color.phase is not Phase.F and not origin.backward and not is_view(node):
            mark([node], RECOMPUTED)
        if schedule.is_vocabulary(color.stage) or is_between_lanes(node.target):
            mark([node], SHARDED)
    return marks


def _kept(graph: fx.Graph, live: Liveness, number: dict[fx.Node, int]) -> Iterable[Kept]:
    saved_roots = [
        (stage, root, Phase.B) for stage, saved in enumerate(live.saved_activations) for root in sorted(saved)
    ]
    for stage, root, user in [*saved_roots, *_offloaded(graph)]:
        if _is_op(root):
            later = user is Phase.W or any(
                storage_root(root) is storage_root(other) for other in live.saved_for_weight[stage]
            )
            yield Kept(stage, number[_made_by(root)], node_bytes(root), "W" if later else "B")


def _offloaded(graph: fx.Graph) -> Iterator[tuple[int, fx.Node, Phase]]:
    """The stage that offloads a value, the owner of its storage there, and the phase that reloads it."""
    for node in call_nodes(graph):
        if node.target is reload:
            color = node.meta["color"]
            yield color.stage, root_within(node, color.stage), color.phase


def _sent(live: Liveness, number: dict[fx.Node, int], graph: fx.Graph) -> Iterable[SentValue]:
    nodes = {node.name: node for node in call_nodes(graph)}
    for edge in live.edges:
        for name in edge.names:
            node = nodes[name]
            source, target = (f"{end.phase}{end.stage}" for end in (edge.source, edge.target))
            shape, size = shape_text(node.meta.get("val")), node_bytes(node)
            yield SentValue(source, target, number[_made_by(node)], name, shape, size)


def write_graph(record: GraphRecord, directory: Path) -> None:
    """Write ``graph.json``; not if it would be too large to be read again."""
    text = json.dumps(unstructure(record), separators=(",", ":"))
    if len(text) <= MOST_BYTES:
        (directory / NAME).write_text(text, encoding="utf-8")


def read_graph(directory: Path, stages: int) -> GraphRecord | None:
    """The record of a saved pipeline of so many stages; None where it was saved without one.

    Raises ArtifactError, naming the field, for a file that is damaged.
    """
    path = directory / NAME
    if not path.exists():
        return None
    with refused(ArtifactError, f"{path} is damaged:", "Remove it, or save the pipeline again."):
        record = structure(parse_json(read_text(path, MOST_BYTES)), GraphRecord)
        _check(record, stages)
    return record


def _check(record: GraphRecord, stages: int) -> None:
    """Raise Mismatch for another format, columns of different lengths, and numbers that name nothing."""
    if record.format != FORMAT:
        raise Mismatch(f"has the format {record.format}, and {FORMAT} can be read")
    ops, texts = len(record.name), len(record.texts)
    for field in ("target", "stage", "phase", "path", "source", "shape", "flops", "bytes", "marks", "inputs",
                  "weights"):  # fmt: skip
        if len(getattr(record, field)) != ops:
            raise Mismatch(f"has {len(getattr(record, field))} entries for {ops} ops", field)
    columns = {field: getattr(record, field) for field in ("target", "path", "source", "shape")}
    columns["weights"] = tuple(k for row in record.weights for k in row)
    for field, column in columns.items():
        if any(k >= texts for k in column):
            raise Mismatch("names a text that is not there", field)
    used = (
        [k for row in record.inputs for k in row] + [x.op for x in record.kept] + [x.op for x in record.sent]
    )
    if any(k >= ops for k in used):
        raise Mismatch("names an op that is not there", "inputs")
    if any(stage >= stages for stage in [*record.stage, *(saved.stage for saved in record.kept)]):
        raise Mismatch("names a stage that is not there", "stage")
