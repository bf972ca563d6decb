"""A fake op on the layouts of an earlier one has a result of its layout, in memory of its own arguments."""

import pytest
import torch

from fxpipe.ir.compat import FakeMode
from fxpipe.ir.fake_op_cache import SameLayouts

aten = torch.ops.aten


def layout(x):
    return x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.untyped_storage().nbytes()


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (aten.mul.Tensor, [(1,), (1.0,), (True,)]),
        (aten.select.int, [(0, 1), (1, 1), (0, 2)]),
        (aten.clone.default, [()]),
        (aten.sort.default, [(0,), (1,)]),
        (aten.split.Tensor, [(2,), (2, 1)]),
    ],
)
def test_results_are_those_of_torch(op, arguments):
    run = SameLayouts().run
    with FakeMode():
        for given in arguments * 2:
            for x in (torch.ones(3, 4, dtype=torch.int64), torch.ones(3, 4), torch.ones(6, 4)[::2]):
                pair = run(op, (x, *given), {})[0], op(x, *given)
                assert type(pair[0]) is type(pair[1])
                found, expected = (y if isinstance(y, (tuple, list)) else (y,) for y in pair)
                assert list(map(layout, found)) == list(map(layout, expected))
                own = [y.untyped_storage()._cdata == x.untyped_storage()._cdata for y in found]
                assert own == [op in (aten.select.int, aten.split.Tensor)] * len(found)


def test_an_op_that_writes_is_run_once_for_each_layout():
    """Its result is the tensor that it writes to; one that changes the layout is run each time."""
    run, calls = SameLayouts().run, []

    def noted(*args):
        calls.append(1)
        return aten.add_.Tensor(*args)

    noted.tags = aten.add_.Tensor.tags
    with FakeMode():
        for _ in range(3):
            x, y = torch.ones(3, 4), torch.ones(4)
            assert run(noted, (x, y), {})[0] is x
            assert run(aten.t_.default, (x,), {})[0] is x
            assert x.shape == (4, 3)
    assert len(calls) == 1


def test_what_depends_on_values_is_run_each_time():
    """An op on constants alone has a constant result, which a known layout does not tell."""
    run, mode = SameLayouts().run, FakeMode()
    for number in (1.0, 2.0):
        real = torch.tensor([number])
        x = mode.fake_tensor_converter.from_real_tensor(mode, real, make_constant=True)
        with mode:
            assert run(aten.add.Tensor, (x, x), {})[0].constant.tolist() == [2 * number]
            assert run(aten.add.Tensor, (x, torch.ones(1)), {})[0].constant is None


def test_nodes_on_the_same_layouts_have_one_value():
    """It keeps the layout of its op's result, whatever becomes of that."""
    run = SameLayouts().run
    with FakeMode():
        first, value = run(aten.mul.Tensor, (torch.ones(3, 4), 2), {})
        second, same = run(aten.mul.Tensor, (torch.ones(3, 4), 2), {})
        other = run(aten.mul.Tensor, (torch.ones(4, 4), 2), {})[1]
        parts = [run(aten.split.Tensor, (torch.ones(3, 4), 2), {})[1] for _ in range(2)]
        second.t_()
    assert value is same is not other
    assert first is not second
    assert not any(value is x for x in (first, second))
    assert layout(value) == layout(first) != layout(second)
    assert parts[0] is parts[1]
    assert [x.shape for x in parts[0]] == [(2, 4), (1, 4)]
