"""Values in the functions of a step, each of which is freed behind its last reader."""

from fxpipe.codegen.step.instruction_text import Hole, Use
from fxpipe.codegen.step.lifetimes import OpFunction, lifetimes


def function(name: str, *lines: str) -> OpFunction:
    """``<h`` gives the value h, ``>h`` reads it, ``?h`` is what stands in its place."""
    uses = {"<": Use.GIVE, ">": Use.READ, "?": Use.PENDING}
    parts = [[Hole(uses[w[0]], w[1:]) if w[0] in uses else w for w in line.split()] for line in lines]
    return OpFunction(name, "", (), tuple(map(tuple, parts)))


def test_a_value_that_one_function_uses_is_local_and_deleted():
    f = function("F0", "<h =f()", "send( >h )", "add( )")
    assert lifetimes([(f,)]).written(f) == ["h=f()", "send(h)", "del h", "add()"]
    f = function("F0", "<h =f()", "rt.send( >h )", "<x =g()", "rt.add_loss( >x )", "rt.send( >x )")
    expected = ["h=f()", "rt.send(h)", "del h", "x=g()", "rt.add_loss(x)", "rt.send(x)"]
    assert lifetimes([(f,)]).written(f) == expected  # no memory is taken behind rt.add_loss


def test_the_last_reader_takes_a_value():
    f, b = function("F0", "<h =f()", "send( >h )"), function("B0", "b( >h , >h )")
    found = lifetimes([(f, b)])
    assert found.written(f) == ["h[m]=f()", "send(h[m])"]
    assert found.written(b) == ["b(h[m],h.pop(m))"]


def test_a_pending_value_is_where_the_value_comes():
    post, op = function("receive_F0", "?h =receive()"), function("F0", "<h =wait( ?h )", "f( >h )")
    found = lifetimes([(post, op)])
    assert found.written(post) == ["h[m]=receive()"]
    assert found.written(op) == ["h[m]=wait(h[m])", "f(h.pop(m))"]


def test_readers_in_either_order():
    """The value is freed behind the later one of each microbatch."""
    f, a, b = function("F0", "<h =f()"), function("F1", "a( >h )"), function("F2", "b( >h )")
    found = lifetimes([(f, a, b), (f, b, a)])
    assert found.written(f) == ["h[m]=f()", "h[m] = [h[m]] * 2  # one for each reader, in any order"]
    assert found.written(a) == ["a(h[m].pop())"]
    assert found.written(b) == ["b(h[m].pop())"]


def test_two_functions_may_read_in_turns():
    """As B0 of one microbatch and BW0 of another one."""
    f, b, bw = function("F0", "<h =f()"), function("B0", "b( >h )"), function("BW0", "b( >h )", "w( )")
    found = lifetimes([(f, b), (f, bw)])
    assert found.written(b) == ["b(h.pop(m))"]
    assert found.written(bw) == ["b(h.pop(m))", "w()"]
