"""The search for a fast schedule within memory limits.

It looks at one pool of *problems*: the settings of a step (stages a rank, placement) with their costs and
limits.

1. Starts (:mod:`.starts`): the orders of all published families, and orders of list scheduling
   (``dispatch.py``) with due dates (:mod:`.due_dates`) that are drawn at random: a point of the
   unit cube says how a lone microbatch's times are slowed, stretched and repeated. Half of the draws
   cross two of the best so far.
2. Local search (:mod:`.local_search`): simulated annealing; an op of the critical path jumps over some of
   its neighbors on its rank, the memory limit kept.
3. Halving (:mod:`.pool`): all starts are annealed a little, the better half twice as long, and so on.

:mod:`.auto` puts all settings that ``schedule="auto"`` chooses from into one pool; a family that searches
by name (:mod:`fxpipe.schedule.families.registry`) puts in its own. Nothing is recorded and nothing is
tuned to a case. The work is counted in ops that are looked at, not in seconds, so that the same input
gives the same order on any machine, with any number of cores; ``effort`` is that work in seconds of one
current core, about.
"""
