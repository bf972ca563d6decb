"""Ranks compare the messages of their programs: digests first, then the messages that differ."""

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
from zoo import CASES, Shape, compiled

from fxpipe.errors import RunError
from fxpipe.runtime.program.load_program import load_program
from fxpipe.runtime.program.program_text import ProgramTraffic
from fxpipe.runtime.ranks.agreement import check_agreement

RANKS = 3


@cache
def programs(microbatches: int) -> tuple[str, ...]:
    """Each rank sends to the next one, gets gradients from it, and takes part in collectives."""
    case = CASES["tied_head"]
    pipe = compiled(case, case.build(), microbatches, Shape(RANKS, vocab_parallel=True))
    return pipe.artifact.programs


class Gathered:
    """``gather`` of ranks in threads; ``texts``: all that they gave, by call."""

    def __init__(self) -> None:
        self.barrier, self.texts = threading.Barrier(RANKS, timeout=60), [[""] * RANKS]

    def of(self, rank: int) -> Callable[[list[str]], list[str]]:
        def gather(own: list[str]) -> list[str]:
            (self.texts[-1][rank],) = own
            self.barrier.wait()
            found = self.texts[-1]
            if self.barrier.wait() == 0:
                self.texts.append([""] * RANKS)
            self.barrier.wait()
            return found

        return gather


def traffic_of(sources: Sequence[str]) -> dict[int, ProgramTraffic]:
    return {rank: load_program(source, f"rank{rank}.py").traffic for rank, source in enumerate(sources)}


def agree(sources: Sequence[str]) -> tuple[list[bool | str], list[list[str]]]:
    """What ``check_agreement`` returns, or its error, on each rank; and the texts that the ranks gathered."""
    gathered = Gathered()
    traffic = traffic_of(sources)

    def check(rank: int) -> bool | str:
        try:
            return check_agreement({rank: traffic[rank]}, gathered.of(rank))
        except RunError as error:
            return str(error)

    with ThreadPoolExecutor(RANKS) as pool:
        return [*pool.map(check, range(RANKS))], gathered.texts[:-1]


@pytest.mark.slow
def test_ranks_that_agree_give_three_numbers_once():
    """However many microbatches, messages and other ranks there are."""
    for microbatches in (4, 12):
        results, (texts,) = agree(programs(microbatches))
        assert results == [True] * RANKS
        assert max(map(len, texts)) < 240


#: The rank whose program is edited, the edit, and the error of all ranks.
EDITS = {
    "a send less": (
        1,
        r" +rt\.send\(.*, to=2\)\n",
        "",
        r"Message \d+ of a step from rank 1 to rank 2 is .* program of rank 1, and .* in that of rank 2",
    ),
    "a collective less": (
        2,
        r" +\w+\[m\] = rt\.all_gather\(.*\n",
        "",
        r"Collective \d+ of a step in group \d is .* in the program of rank 0, and .* in that of rank 2",
    ),
    "a message to itself": (
        1,
        r"to=2\)",
        "to=1)",
        r"Message \d+ of a step from rank 1 to rank 1 is .* program of rank 1, and none in that of rank 1",
    ),
    "another shape": (
        2,
        r"\(\(2, 5, 8\), \(40, 8, 1\)",
        "((2, 40), (40, 1)",
        r"Message '\w+' is \(2, 5, 8\) .* in the program of rank \d, and \(2, 40\) .* in that of rank 2",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_all_ranks_raise_the_same(name):
    rank, pattern, text, error = EDITS[name]
    sources = [*programs(4)]
    edited = re.sub(pattern, text, sources[rank], count=1)
    assert edited != sources[rank]
    sources[rank] = edited
    (message, *others), _ = agree(sources)
    assert others == [message] * (RANKS - 1)
    assert re.match(error, str(message)), message
    with pytest.raises(RunError, match=re.escape(str(message))):
        check_agreement(traffic_of(sources), lambda own: own)


#: Edits with which the text of a step does not show its messages.
UNSHOWN = {
    "another name of rt": (r"\n    return rt", r"\n    rt = rt\n    return rt"),
    "a loop": (r"\n    (\w+)\((\d)\)\n", r"\n    for m in [\2]: \1(m)\n"),
    "no microbatch": (r"\n    (\w+)\((\d)\)\n", r"\n    \1(*[\2])\n"),
    "a condition": (r"( +)(rt\.send\(.*\n)", r"\1if m > 0: \2"),
    "a return": (r"( +)(rt\.op\(.*\n)", r"\1\2\1if m < 0: return\n"),
    "a second function": (r"\n    (\w+)\((\d)\)\n", r"\n    def \1(m): pass\n    \1(\2)\n"),
}


@pytest.mark.parametrize("name", UNSHOWN)
def test_a_step_that_shows_no_calls_is_not_compared(name):
    sources = [*programs(4)]
    edited = re.sub(*UNSHOWN[name], sources[0], count=1)
    assert edited != sources[0]
    sources[0] = edited
    assert agree(sources)[0] == [False] * RANKS


def test_the_ops_of_a_program_are_those_of_its_schedule():
    """Also where the step has no functions, as in programs of earlier versions."""
    step = """
def step(rt, batch):
    def F0(m, at):
        rt.op(f"F0.{m}")

    F0(1, 64); F0(0, 0)
    rt.op("B0.0")
    return rt.finish()
"""
    assert load_program(step, "rank0.py").ops == ("F0.1", "F0.0", "B0.0")
