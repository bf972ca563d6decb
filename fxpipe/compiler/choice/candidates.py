"""The decisions that a compilation leaves open, and what each of them may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from fxpipe.compiler.options import Settings
from fxpipe.errors import OptionError
from fxpipe.ir.storage import call_nodes
from fxpipe.partition.parts import EXCHANGES, PartsOfStage
from fxpipe.passes.captured.begin_exchanges import is_exchange
from fxpipe.passes.level.recompute import LEVELS, Level
from fxpipe.schedule.ops import Schedule
from fxpipe.schedule.placement import name_of, place
from fxpipe.schedule.search.fastest import AUTO, stages_and_placements

BARRIERS: dict[str | bool, tuple[int | None, ...]] = {
    False: (None,),
    "1-barrier": (1,),
    True: (1,),
    "2-barrier": (2,),
    AUTO: (None, 1, 2),
}


class Head(NamedTuple):
    """How the output layer is computed: split over all ranks with so many ``barriers`` a microbatch, or, if
    these are None, on one rank; in ``chunks`` of the tokens."""

    barriers: int | None
    chunks: int = 1


@dataclass(frozen=True)
class Candidates:
    """The candidate decisions of a compilation.

    ``placements``: the model's stages -> the names of their placements, each with the rank of every stage.
    ``heads``: the ways to compute the output layer.
    ``levels``: of recomputation; None for none.
    ``parts``: of each stage: a number, or as many as its exchanges between lanes make.
    """

    placements: Mapping[int, Mapping[str, tuple[int, ...]]]
    heads: tuple[Head, ...]
    levels: tuple[Level | None, ...]
    parts: tuple[PartsOfStage, ...] = (1,)


def candidates(options: Settings, graph: fx.Graph) -> Candidates:
    """All combinations of these are tried; of stages only as many as the model can be cut into.

    graph: the captured step.
    """
    schedule, ranks = options.schedule, options.mesh.ranks
    placements: dict[int, dict[str, tuple[int, ...]]] = {}
    if isinstance(schedule, Schedule):
        placement = tuple(schedule.placement[stage] for stage in schedule.model_stages)
        placements[len(placement)] = {name_of(placement, ranks): placement}
    else:
        per_rank = options.stages_per_rank
        if schedule == AUTO and per_rank is None:
            if options.split_points is not None:
                per_rank = max(1, (len(options.split_points) + 1) // ranks)
            elif ranks == 1:
                per_rank = 1
        for stages, name in stages_and_placements(schedule, per_rank, options.placement):
            placements.setdefault(ranks * stages, {})[name] = place(name, ranks, stages)
    heads = dict[Head, None]()
    for barriers in BARRIERS[options.vocab_parallel] if ranks > 1 else (None,):
        chunks = options.head_chunks
        if isinstance(chunks, str):
            from fxpipe.vocabulary.chunks import chunks_for  # imported here, as few models split a head

            heads[Head(barriers)] = None
            chunks = chunks_for(graph, ranks if barriers else 1) if options.dimensions is None else 1
        heads[Head(barriers, chunks)] = None
    levels: tuple[Level | None, ...] = (None,)
    if options.gradients and options.recompute is not False:
        every = (None, *LEVELS)
        levels = tuple(level for level in every if options.recompute in (AUTO, level))
    if options.memory_limit is None and options.recompute == AUTO:
        levels = (None,)  # nothing to gain: recomputation takes time for less memory
    return Candidates(placements, tuple(heads), levels, _parts(options, graph))


def _parts(options: Settings, graph: fx.Graph) -> tuple[PartsOfStage, ...]:
    has_exchanges = any(map(is_exchange, call_nodes(graph)))
    if options.parts == EXCHANGES and not has_exchanges:
        raise OptionError(
            "parts='exchanges' cuts stages where lanes exchange rows, and this model has no such exchange: "
            "it has with fxpipe.ExpertParallel(tokens='divided'), or SequenceParallel. Leave it out, or give "
            "a number of parts."
        )
    if options.parts != "auto":
        return (options.parts,)
    if isinstance(options.schedule, Schedule) or options.dimensions is not None or options.on_ranks:
        return (1,)
    return (1, EXCHANGES) if has_exchanges else (1,)
