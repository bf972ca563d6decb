"""One rank's program: a head, functions of what is computed once and of each section, and the function
``step``."""

from __future__ import annotations

from fxpipe.codegen.expressions import Aliases
from fxpipe.codegen.functions import function_sources
from fxpipe.codegen.head import head_source
from fxpipe.codegen.rank_plan import RankPlan
from fxpipe.codegen.step.step import called_ops, step_calls, step_source
from fxpipe.codegen.step_invariants import counts_source, once_source


def program_source(plan: RankPlan) -> str:
    names, calls = Aliases(plan.own), step_calls(plan)
    functions = [once_source(plan.once, names)] if plan.once else []
    functions += [counts_source(plan.counts, names)] if plan.counts else []
    functions += function_sources(plan.own, plan.calls, names, plan.compiled)
    head = head_source(plan, names, called_ops(plan, calls))
    return "\n\n\n".join([head, *functions, step_source(plan, calls)]) + "\n"
