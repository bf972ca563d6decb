"""The search for a fast schedule within memory limits: docs/schedules.md explains it.

:mod:`.due_dates` draws orders of list scheduling; :mod:`.local_search` improves an order; :mod:`.pool`
divides the work among these and the published orders; :mod:`.auto` searches all problems of a step, each in
the :mod:`.variants` that keep its limits, and :mod:`.comparison` completes and compares the candidates.
"""
