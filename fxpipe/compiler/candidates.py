"""The decisions that a compilation leaves open, and what each of them may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxpipe.compiler.options import Settings
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


@dataclass(frozen=True)
class Candidates:
    """The candidate decisions of a compilation.

    ``placements``: the model's stages -> the names of their placements, each with the rank of every stage.
    ``barriers``: a microbatch, of vocabulary layers split over the ranks; None if they are not split.
    ``levels``: of recomputation; None for none.
    """

    placements: Mapping[int, Mapping[str, tuple[int, ...]]]
    barriers: tuple[int | None, ...]
    levels: tuple[Level | None, ...]


def candidates(options: Settings) -> Candidates:
    """All combinations of these are tried; of stages only as many as the model can be cut into."""
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
    barriers = BARRIERS[options.vocab_parallel] if ranks > 1 else (None,)
    levels: tuple[Level | None, ...] = (None,)
    if options.gradients and options.recompute is not False:
        every = (None, *LEVELS)
        levels = tuple(level for level in every if options.recompute in (AUTO, level))
    if options.memory_limit is None and options.recompute == AUTO:
        levels = (None,)  # nothing to gain: recomputation takes time for less memory
    return Candidates(placements, barriers, levels)
