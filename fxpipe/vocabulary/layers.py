"""Finds the vocabulary layers of a captured step: projections into a cross-entropy, and embeddings."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from fxpipe.errors import VocabularyError
from fxpipe.ir.builder import node_arg
from fxpipe.ir.graph import Kind
from fxpipe.ir.storage import call_nodes, graph_outputs
from fxpipe.vocabulary.axes import (
    LOOKUPS,
    PICKS,
    RESHAPES,
    UNPICKS,
    is_argmax,
    is_logsumexp,
    is_of_batch,
    is_total,
    vocabulary_axes,
    whole,
)
from fxpipe.vocabulary.fills import mask_filled_columns
from fxpipe.vocabulary.losses import labels_of
from fxpipe.vocabulary.padding import pad

aten = torch.ops.aten
_PROJECTIONS = {aten.mm.default: 1, aten.addmm.default: 2}  # where the table is among the arguments
_OF_TABLES = RESHAPES | {aten.t.default, aten._to_copy.default, aten.transpose.int, aten.permute.default}
_OF_TABLES |= {aten.slice.Tensor}


@dataclass(eq=False)
class VocabularyLayers:
    """The vocabulary layers of a step."""

    size: int
    tables: tuple[fx.Node, ...]
    axes: dict[fx.Node, int]
    """The dimension of a value that is the vocabulary."""
    padded: dict[fx.Node, int]
    """The former length of values that have got that of the vocabulary."""
    losses: list[fx.Node] = field(default_factory=list)
    """The log-softmaxes."""
    label_gathers: list[fx.Node] = field(default_factory=list)
    """The ops that take the labels' entries of a log-softmax."""
    vocab_sums: list[fx.Node] = field(default_factory=list)
    """The sums of a log-softmax over the vocabulary."""
    products: list[fx.Node] = field(default_factory=list)
    """The matrix products over the vocabulary, which give the gradient of the projected values."""
    lookups: list[fx.Node] = field(default_factory=list)
    """The embeddings."""
    totals: list[fx.Node] = field(default_factory=list)
    """The sums of gradients over tokens and vocabulary, for what scales all logits."""
    argmaxes: list[fx.Node] = field(default_factory=list)
    """The largest of each token's logits."""
    logsumexps: list[fx.Node] = field(default_factory=list)
    """Those of each token's logits, beside those of losses."""

    def entries(self, node: fx.Node) -> int:
        """The number of entries of the vocabulary that a value had before ``padding``."""
        return self.padded.get(node, self.size)


def find_layers(graph: fx.Graph) -> VocabularyLayers:
    """Find the layers.  Raises VocabularyError, naming the failed condition and its place, if there are
    none."""
    heads = picked_losses(graph)
    projections = [_projection(head) for head in heads]
    size = max(table.meta["val"].shape[0] for table, _ in projections)
    tables: dict[fx.Node, None] = {}
    for table, biases in projections:
        if table.meta["val"].shape[0] == size:
            tables |= dict.fromkeys([table, *biases])
    for node in call_nodes(graph):
        if node.target not in LOOKUPS or not is_of_batch(node_arg(node, 1)):
            continue
        table = node_arg(node, 0)
        if _is_parameter(table) and table.meta["val"].shape[0] == size:
            tables[table] = None
    mask_filled_columns(graph, {size, *(head.meta["val"].shape[head.args[1]] for head in heads)})
    axes, padded = pad(graph, vocabulary_axes(graph, set(tables)), size)
    layers = VocabularyLayers(size, tuple(tables), axes, padded)
    _sort(graph, layers)
    return layers


def picked_losses(graph: fx.Graph) -> list[fx.Node]:
    """The log-softmaxes of cross-entropies.  Raises VocabularyError if there are none."""
    heads = [n for n in call_nodes(graph) if n.target is aten._log_softmax.default and _is_picked(n)]
    if not heads:
        loss = graph_outputs(graph).loss
        place = "There is no loss." if loss is None else f"The loss comes from {_place(loss)}."
        raise VocabularyError(
            "There is no cross-entropy in the training step: no log-softmax whose entries the labels pick "
            f"(F.cross_entropy, nn.CrossEntropyLoss, F.nll_loss or .gather of F.log_softmax). {place} Leave "
            "out what splits it, or compute the loss by one of these."
        )
    return heads


def _is_picked(loss: fx.Node) -> bool:
    """Whether labels pick entries of a log-softmax."""
    todo = [loss]
    while todo:
        users = list(todo.pop().users)
        if any(user.target in PICKS or labels_of(user) is not None for user in users):
            return True
        todo += [user for user in users if user.target in RESHAPES]
    return False


def projection_of(loss: fx.Node) -> fx.Node:
    """The matrix product that gives a loss's logits.  Raises VocabularyError if none does."""
    return _product_and_vectors(loss)[0]


def _product_and_vectors(loss: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The matrix product that gives a loss's logits, and what other parameters are on their way."""
    node, vectors = node_arg(loss, 0), list[fx.Node]()
    while node.op == "call_function" and node.target not in _PROJECTIONS:
        inputs = node.all_input_nodes
        roots = {n: _root(n) for n in inputs}
        vectors += roots.values()
        values = [n for n, root in roots.items() if not (_is_parameter(root) or is_of_batch(n))]
        if not values:
            break
        # Of the values that an op takes beside parameters, the logits are the largest.
        node = max(values, key=_elements)
    if node.target not in _PROJECTIONS:
        raise _not_projected(loss, "they do not come from a matrix product of two dimensions (nn.Linear, @)")
    return node, vectors


def _projection(loss: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The table of a loss's logits, and the bias if there is one."""
    size = loss.meta["val"].shape[loss.args[1]]
    node, vectors = _product_and_vectors(loss)
    table = _root(node_arg(node, _PROJECTIONS[node.target]))  # type: ignore[index]
    if node.target is aten.addmm.default:
        vectors.append(_root(node_arg(node, 0)))
    if not _is_parameter(table):
        raise _not_projected(loss, f"the matrix product {node.name} is not with a parameter")
    shape = tuple(table.meta["val"].shape)
    if shape[0] < size:
        raise _not_projected(
            loss, f"its table has shape {shape}, whose first dimension is not that of the {size} logits"
        )
    return table, [v for v in vectors if _is_parameter(v) and v.meta["val"].shape == shape[:1]]


def _root(node: fx.Node) -> fx.Node:
    """What a table or a bias is a view or a cast of."""
    while node.op == "call_function" and node.target in _OF_TABLES:
        node = node_arg(node, 0)
    return node


def _elements(node: fx.Node) -> int:
    val: object = node.meta.get("val")
    if isinstance(val, (list, tuple)):
        val = val[0]
    return val.numel() if isinstance(val, torch.Tensor) else 0


def _is_parameter(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.meta["input"].kind is Kind.PARAMETER


def _not_projected(loss: fx.Node, why: str) -> VocabularyError:
    return VocabularyError(
        f"There is a cross-entropy in {_place(loss)}, but not the projection that gives its logits: {why}."
    )


def _place(node: fx.Node) -> str:
    origin = node.meta["origin"]
    return f"{origin.module} ({origin.source})"


def _sort(graph: fx.Graph, layers: VocabularyLayers) -> None:
    """Sort the uses of tables and logits.  Raises VocabularyError for a use that cannot be split."""
    axes = layers.axes
    layers.losses += (n for n in axes if n.target is aten._log_softmax.default)
    logs: set[fx.Node] = set()  # they and views of them
    for node in call_nodes(graph):
        if node in axes:
            if node in layers.losses or (node.target in RESHAPES and node.args[0] in logs):
                logs.add(node)
            elif node.target in UNPICKS or node.target is aten._log_softmax_backward_data.default:
                continue  # a gradient
            elif any(n in logs for n in node.all_input_nodes):
                raise whole(node)
        elif not any(n in axes for n in node.all_input_nodes):
            continue
        elif is_total(node, axes):
            layers.totals.append(node)
        elif is_argmax(node, axes):
            layers.argmaxes.append(node)
        elif is_logsumexp(node, axes):
            layers.logsumexps.append(node)
        elif node.target in LOOKUPS and is_of_batch(node_arg(node, 1)):
            layers.lookups.append(node)
        elif node.target in PICKS and node_arg(node, 0) in logs:
            layers.label_gathers.append(_without_weights(node))
        elif node.target is aten.sum.dim_IntList and node.args[0] in logs:
            layers.vocab_sums.append(node)
        elif node.target is aten.mm.default and node.meta["origin"].backward:
            layers.products.append(node)
        else:
            raise whole(node)
    named = graph_outputs(graph)
    for name, node in named.outputs.items():
        if node in axes:
            raise VocabularyError(
                f"The output {name!r} has an entry for each word of the vocabulary, and with vocab_parallel "
                "no rank computes all of them. Leave it out of outputs, or compile without vocab_parallel."
            )
    for result in (named.loss, named.count, *named.buffers.values()):
        if result is not None and result in axes:
            raise whole(result)


def _without_weights(pick: fx.Node) -> fx.Node:
    if pick.args[2] is not None:
        raise VocabularyError(
            f"vocab_parallel cannot split a cross-entropy with class weights ({pick.meta['origin'].source}). "
            "Compile without vocab_parallel, or weight the tokens' losses yourself."
        )
    return pick
