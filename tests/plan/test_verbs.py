"""The table of the verbs of programs: both runtimes have each one."""

import ast
import inspect

import pytest

from fxpipe.certificate.ranks.runtime import TermRuntime
from fxpipe.plan.program.verbs import ATTRIBUTES, VERBS
from fxpipe.runtime.program.bucket_verbs import BucketVerbs
from fxpipe.runtime.program.rank import Runtime


def arguments(runtime: type, verb: str) -> list[str]:
    """The arguments of a method, with ``*`` for those of any number."""
    assert hasattr(runtime, verb), f"add {verb} to {inspect.getsourcefile(runtime)}"
    signature = inspect.signature(getattr(runtime, verb))
    several = inspect.Parameter.VAR_POSITIONAL
    return ["*" if each.kind is several else each.name for each in signature.parameters.values()][1:]


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
@pytest.mark.parametrize("runtime", [Runtime, TermRuntime])
def test_both_runtimes_take_the_arguments_of_the_table(runtime, verb):
    assert arguments(runtime, verb.name) == ["*" if name[0] == "*" else name for name in verb.arguments]


def is_of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def waiting_methods() -> set[str]:
    """The methods of a rank in which it says that it waits, or that call one of these."""
    classes = [ast.parse(inspect.getsource(cls)).body[0] for cls in (Runtime, BucketVerbs)]
    uses = {
        method.name: {node.attr: type(node.ctx) for node in ast.walk(method) if is_of_self(node)}
        for cls in classes
        for method in cls.body
        if isinstance(method, ast.FunctionDef)
    }
    waits = {name for name, used in uses.items() if used.get("waiting") is ast.Store} - {"start"}
    for _ in uses:
        waits |= {name for name, used in uses.items() if not waits.isdisjoint(used)}
    return waits


def test_what_may_wait_is_in_the_table():
    """``start`` forgets what the last step waited for."""
    waits, told = VERBS.keys() & waiting_methods(), {verb.name for verb in VERBS.values() if verb.waits_for}
    assert waits == told, f"plan/program/verbs.py: waits_for of {waits - told}, none of {told - waits}"


def test_the_other_rank_is_an_argument():
    for verb in VERBS.values():
        assert not verb.peer or verb.peer in verb.arguments


def test_what_is_read_of_rt_is_no_verb():
    assert not ATTRIBUTES & VERBS.keys()
