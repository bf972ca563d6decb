"""The trials of optimizers, which each rank makes of each optimizer anew: most ranks make several alike."""

from __future__ import annotations

import os
from collections.abc import Collection, Hashable, Sequence
from typing import Any

from fxpipe.training.optimizer import make_optimizer
from fxpipe.training.optimizer.groups import Group
from fxpipe.training.optimizer.optimizer_trial import Table


def made_once() -> None:
    """From now on the first rank alone tries groups, and once those that have the same classes, options and
    tables.  All ranks would find the same."""
    check = make_optimizer.check_groups
    passed: dict[Hashable, object] = {}

    def check_once(
        groups: Sequence[Group], kinds: Sequence[Collection[Table]], *others: Hashable, **asked: Hashable
    ) -> None:
        of_groups = [(each.cls, repr((each.defaults, each.options))) for each in groups]
        key = (*of_groups, *map(frozenset[Any], kinds), *others, *asked.items())
        if key not in passed and os.environ["RANK"] == "0":
            check(groups, kinds, *others, **asked)  # type: ignore[arg-type]
            passed[key] = groups  # what is kept has its address, which some texts have, to itself

    make_optimizer.check_groups = check_once  # type: ignore[assignment]
