"""Steps whose gradients a script sets to zero before an update has used them.

In plain torch ``zero_grad()`` may stand between the forward and the backward.  Behind ``pipe.step``, which
runs both, it takes away what the update is to use.  Some scripts leave out a batch in this way now and then:
it is a mistake where it comes before each update from the first on.
"""

from dataclasses import dataclass

#: The updates, from the first on, that must have lost gradients.
UPDATES = 2


@dataclass
class LostSteps:
    """``_lost``: whether a step's gradients were zeroed since the last update."""

    _lost: bool = False
    _updates: int = 0
    _always: bool = True

    def stepped(self, *, zeroed: bool) -> None:
        """Another step begins.  zeroed: whether the gradients of the last one were, without an update."""
        self._lost |= zeroed

    def updated(self, *, zeroed: bool) -> bool:
        """Whether to warn, at this update.  zeroed: whether it has none of the last step's gradients."""
        self._updates += 1
        self._always &= self._lost or zeroed
        self._lost = False
        return self._always and self._updates == UPDATES


LOST = (
    "Before each update so far gradients of pipe.step were set to zero, or to None, unused: pipe.step runs "
    "the backward too. Call zero_grad() before pipe.step, or behind the optimizer's step()."
)
