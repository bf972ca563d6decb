"""The last update of a pipeline's parameters, as long as this rank does not know whether it stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class PendingUpdate:
    """The last update of a pipeline and its evaluation.

    An optimizer with ``validation="post"`` updates before all ranks have told whether their gradients are
    finite, and what their norm is.  ``settle`` waits for that, and corrects an update that was wrong.
    """

    _settle: Callable[[], bool] | None = None
    _check: Callable[[], None] | None = None
    _repeats: bool = False

    def begin(self, settle: Callable[[], bool], check: Callable[[], None]) -> None:
        """An update without a verdict.

        settle: waits for it, and corrects the update; whether what any rank has computed since then stands.
        check: raises RunError where the user has changed what may have to be corrected.
        """
        self._settle, self._check = settle, check

    @property
    def are_settled(self) -> bool:
        return self._settle is None

    def check(self) -> None:
        if self._check is not None:
            self._check()

    def settle(self) -> None:
        """Wait until all ranks have made the last step: from here on the parameters are those behind it."""
        self.check()
        self._correct()

    def stand(self) -> bool:
        """Settle; return whether what the ranks have computed since the last update stands.  The same on all
        ranks, whichever of them has settled before."""
        self._correct()
        stand, self._repeats = not self._repeats, False
        return stand

    def _correct(self) -> None:
        # Cleared first: a settlement that fails must not be tried again by the next call.
        settle, self._settle, self._check = self._settle, None, None
        if settle is not None and not settle():
            self._repeats = True
