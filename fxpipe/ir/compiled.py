"""What Inductor compiles of the sections.

F and B are compiled as they are.  W adds to gradients in place, by matrix products that Inductor would give
memory of their own; between these ops it is compiled where its values would else go through memory.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import fx

from fxpipe.ir.graph import Section, offload, read_buffer, reload
from fxpipe.ir.storage import call_nodes, is_view, leading_to, node_bytes, storage_root, written_arguments
from fxpipe.plan.rewrites import Rule
from fxpipe.runtime.program.checks import expect
from fxpipe.schedule.ops import Color, Phase

#: Fewest bytes of a value between two ops of W for which they are compiled: the call of a compiled function
#: takes the host some 20 µs, in which a device moves that value many times.
LEAST = 1 << 20

_NO_WORK = (read_buffer, expect, offload, reload, operator.getitem)


def compiled_phases(backend: str, rules: Collection[Rule]) -> frozenset[Phase]:
    """The phases whose sections, or parts of them, a backend compiles; rules: that may be applied."""
    if backend != "inductor":
        return frozenset()
    return frozenset(phase for phase in Phase if phase is not Phase.W or "compiled-weights" in rules)


def is_compiled(section: Section, compiled: Collection[Phase]) -> bool:
    """Whether the section, or parts of it, are compiled.  compiled: the phases of which they are."""
    nodes = call_nodes(section.graph)
    if section.phase not in compiled:
        return False
    return bool(stretches(nodes)) if section.phase is Phase.W else any(computing(nodes))


def compiled_ops(graph: fx.Graph, compiled: Collection[Phase]) -> set[fx.Node]:
    """The ops of all sections that are compiled, of these phases."""
    by_color = defaultdict[Color, list[fx.Node]](list)
    for node in call_nodes(graph):
        by_color[node.meta["color"]].append(node)
    functions = (
        compiled_functions(nodes, color.phase) for color, nodes in by_color.items() if color.phase in compiled
    )
    return {node for parts in functions for part in parts for node in part}


def compiled_functions(nodes: Sequence[fx.Node], phase: Phase) -> list[list[fx.Node]]:
    """The ops of a section, in the order in which they run, that are compiled, by function."""
    return stretches(nodes) if phase is Phase.W else [[*nodes]]


def computing(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """The ops that compute something: no views, no items of results, no transfers."""
    return (n for n in nodes if n.target not in _NO_WORK and not is_view(n))


def stretches(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The ops of a W, in the order in which they run, that are compiled: between its additions to gradients,
    those that give each other large values, and what leads to these."""
    between = list[list[fx.Node]]([[]])
    for node in nodes:
        if any(written_arguments(node.target, node.args, node.kwargs)):
            between.append([])
        else:
            between[-1].append(node)
    return [stretch for each in between if (stretch := _fused(each))]


def _fused(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    working = set(computing(nodes))
    roots = {storage_root(x) for node in working for x in node.all_input_nodes}
    if not any(root in working and node_bytes(root) >= LEAST for root in roots):
        return []
    # A view for the addition behind them stays with that.
    needed = leading_to(working, set(nodes).__contains__)
    return [node for node in nodes if node in needed]
