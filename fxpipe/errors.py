"""The errors that fxpipe raises.  Each message says what is wrong, where, and what to do; ``printable`` shows
any name in it on one line, ``suggested`` the known name that was probably meant."""

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches


class FxpipeError(Exception):
    """Base class of all errors of fxpipe."""


class OptionError(FxpipeError):
    """An option has a value that it cannot have, or that does not go with another option."""


class CaptureError(FxpipeError):
    """The model or its loss cannot be traced.

    ``fixable``: the inputs whose values decide the untraceable part; with them in ``fixed`` it can be traced.
    """

    def __init__(self, message: str, fixable: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.fixable = tuple(fixable)


class SizeError(FxpipeError):
    """A named dimension is unknown, or costs for its other lengths are unknown."""


class PartitionError(FxpipeError):
    """The model cannot be cut as requested."""


class VerifyError(FxpipeError):
    """A rewrite violated an invariant of the graph: a bug in fxpipe."""


class ScheduleError(FxpipeError):
    """A schedule is unknown, incomplete, or cannot run."""


class LimitError(ScheduleError):
    """A schedule does not fit a memory limit; ``smallest``: the smallest limit that it can keep.

    ``is_least``: whether it needs more than ``smallest``, which leaves nothing for activations.
    """

    def __init__(self, message: str, smallest: float, is_least: bool = False) -> None:
        super().__init__(message)
        self.smallest, self.is_least = smallest, is_least


class DeadlockError(ScheduleError):
    """A schedule in which ranks would wait for each other forever."""


class ArtifactError(FxpipeError):
    """A saved pipeline cannot be read or written."""


class BatchError(FxpipeError):
    """A batch differs from the example with which the pipeline was compiled."""


class RunError(FxpipeError):
    """A rank failed while the programs ran."""


class CallsDifferError(RunError):
    """Ranks make different calls.  All of them raise it, or end with its message."""


class VocabularyError(FxpipeError):
    """The vocabulary layers cannot be found, or cannot be split over the ranks."""


def at_least_one(name: str, value: object) -> None:
    """Raise OptionError, naming the option, for anything but a whole number above 0."""
    if type(value) is not int or value < 1:
        raise OptionError(f"{name} is {value!r} and must be a whole number, at least 1.")


def one_of(name: str, value: object, choices: Collection[object]) -> None:
    """Raise OptionError, naming the option, for anything but one of these values."""
    if any(type(value) is type(choice) and value == choice for choice in choices):
        return
    *most, last = map(repr, choices)
    texts = [choice for choice in choices if isinstance(choice, str)]
    raise OptionError(
        f"{name} is {value!r} and must be {', '.join(most)} or {last}.{suggested(value, texts)}"
    )


def suggested(given: object, known: Iterable[str]) -> str:
    """`` Did you mean 'zb-h1'?`` for ``ZB_H1``; empty where no known name is like the given one."""
    plain = {_plain(name): name for name in known}
    close = get_close_matches(_plain(str(given)), plain, 1)
    return f" Did you mean {plain[close[0]]!r}?" if close else ""


def _plain(name: str) -> str:
    return name.casefold().replace("_", "-").replace(" ", "-")


def printable(text: str) -> str:
    """The text on one line: unprintable characters become escapes such as ``\\n`` or ``\\u202e``.

    The result can be encoded, is allowed in XML, ends no comment and moves no terminal's cursor.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shortened(text: str, longest: int = 60) -> str:
    """The printable text, without its middle if it is too long."""
    text = printable(text)
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}…{text[1 - half :]}"


def number_of(count: int, thing: str) -> str:
    """``1 rank``, ``2 ranks``, ``2 microbatches``."""
    return f"{count} {thing}{'' if count == 1 else 'es' if thing.endswith(('ch', 'ss')) else 's'}"
