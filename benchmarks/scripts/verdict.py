"""What a script did, beside what its table expects of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from benchmarks.scripts.script import SETTINGS, Script
from benchmarks.scripts.worker import LIMIT, Outcome, path_of, read

#: The difference that values near zero may have.
ATOL = 1e-10


@dataclass(frozen=True)
class Verdict:
    """word: equal, error, warning, differs, wrong, fails or hangs.

    expected: whether the script may do that.
    """

    script: Script
    setting: str
    word: str
    text: str

    @property
    def expected(self) -> bool:
        script = self.script
        return {
            "equal": script.equal,
            "error": bool(script.error),
            "warning": bool(script.warning),
            "differs": bool(script.differs),
        }.get(self.word, False)


def judge(directory: Path, setting: str, script: Script, hung: bool) -> Verdict:
    def verdict(word: str, text: str = "") -> Verdict:
        return Verdict(script, setting, word, " ".join(text.split()))

    outcomes = [read(path_of(directory, setting, script.name, rank)) for rank in range(SETTINGS[setting][0])]
    errors = [outcome.error for outcome in outcomes if outcome is not None and outcome.error]
    if script.error and (match := next((e for e in errors if re.search(script.error, e)), "")):
        return verdict("error", match)
    if hung:
        return verdict("hangs", errors[0] if errors else f"not over after {LIMIT} s")
    if errors:
        return verdict("fails", errors[0])
    if any(outcome is None for outcome in outcomes):
        return verdict("fails", "a process ended without a word")
    expected = read(path_of(directory, "1", script.plain, 0))
    difference = compare(expected, [o for o in outcomes if o is not None], script.tolerance)
    if not difference:
        return verdict("equal")
    if script.differs:
        return verdict("differs", f"{difference}; {script.differs}")
    warnings = [text for outcome in outcomes if outcome is not None for text in outcome.warnings]
    if script.warning and (match := next((w for w in warnings if re.search(script.warning, w)), "")):
        return verdict("warning", f"{match} ({difference})")
    return verdict("wrong", difference)


def compare(expected: Outcome | None, outcomes: list[Outcome], tolerance: float) -> str:
    """The first difference in words, and the largest; nothing if all values are those of plain torch."""
    assert expected is not None
    worst, text, noted = 0.0, "", set()
    for rank, outcome in enumerate(outcomes):
        for name, values in outcome.values.items():
            wanted = expected.values.get(name)
            if wanted is None:
                return f"process {rank} notes {name!r}, which plain torch does not"
            noted.add(name)
            if len(values) != len(wanted):
                return f"process {rank} notes {name!r} {len(values)} times, plain torch {len(wanted)} times"
            for i, (a, b) in enumerate(zip(values, wanted, strict=True)):
                if a.shape != b.shape:
                    return f"process {rank}: {name!r} has the shape {list(a.shape)}, not {list(b.shape)}"
                off = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
                scale = float(b.double().abs().max()) if b.numel() else 0.0
                if not off <= ATOL + tolerance * scale and not off <= worst:
                    worst, text = off, f"process {rank}: {name!r} ({i}) is {off:.1e} off, of {scale:.1e}"
    return text or ("" if noted else "no process notes anything")
