"""Results that take the place of operands: only where nobody sees it, and with the same bits."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxpipe
from fxpipe.compiler import passes
from fxpipe.errors import VerifyError
from fxpipe.ir.graph import Input, Kind, Origin, Outputs, reload
from fxpipe.ir.storage import call_nodes
from fxpipe.ir.verify import verify
from fxpipe.passes.captured.compute_marked_values import compute_marked_values
from fxpipe.passes.chosen.use_inplace_ops import use_inplace_ops
from fxpipe.schedule.ops import Color, Phase

aten = torch.ops.aten


class Step:
    """A colored graph, built op by op."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.input = self.graph.placeholder("x")
        self.input.meta.update(val=torch.empty(4, 6), input=Input(Kind.BATCH, "x"))

    def op(self, target, *args, stage=0, phase=Phase.F, **kwargs) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        values, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta.update(val=target(*values, **named), color=Color(stage, phase), origin=Origin())
        return node

    def reused(self, loss: fx.Node, **grads: fx.Node) -> dict[str, str]:
        """The ops that write over something after the pass, and what over."""
        named = {name: (node,) for name, node in grads.items()}
        self.graph.output(Outputs(loss, None, {}, named, {}))
        verify(self.graph, "building")
        use_inplace_ops(self.graph)
        verify(self.graph, "use_inplace_ops")
        found = {}
        for node in call_nodes(self.graph):
            over = [node.kwargs[a] for a in ("out", "grad_input") if a in node.kwargs]
            if not over and node.target is not operator.getitem and node.target._schema.is_mutable:
                over = [node.args[0]]
            if over:
                found[node.name] = over[0].name
        return found


def test_a_chain_of_elementwise_ops_has_one_storage():
    step = Step()
    first = step.op(aten.exp.default, step.input)
    second = step.op(aten.mul.Tensor, first, 0.5)
    third = step.op(aten.tanh.default, second)
    loss = step.op(aten.sum.default, third)
    assert step.reused(loss) == {second.name: first.name, third.name: second.name}


def test_an_input_is_not_written_over():
    step = Step()
    view = step.op(aten.view.default, step.input, [6, 4])
    loss = step.op(aten.sum.default, step.op(aten.exp.default, view))
    assert step.reused(loss) == {}


def test_what_is_used_again_is_left_alone():
    step = Step()
    first = step.op(aten.exp.default, step.input)
    second = step.op(aten.tanh.default, first)
    third = step.op(aten.mul.Tensor, first, second)  # the last one that uses either
    loss = step.op(aten.sum.default, third)
    assert step.reused(loss) == {third.name: second.name}


def test_a_view_that_is_used_later_keeps_its_storage():
    step = Step()
    first = step.op(aten.exp.default, step.input)
    view = step.op(aten.view.default, first, [24])
    second = step.op(aten.tanh.default, first)
    total = step.op(aten.sum.default, view)
    loss = step.op(aten.add.Tensor, step.op(aten.sum.default, second), total)
    assert first.name not in step.reused(loss).values()


def test_a_part_or_a_broadcast_operand_has_no_room():
    step = Step()
    first = step.op(aten.exp.default, step.input)
    part = step.op(aten.slice.Tensor, first, 0, 0, 2)  # dense, but the storage is larger
    second = step.op(aten.tanh.default, part)
    row = step.op(aten.sum.dim_IntList, step.input, [0])
    third = step.op(aten.add.Tensor, row, step.input)
    loss = step.op(aten.add.Tensor, step.op(aten.sum.default, second), step.op(aten.sum.default, third))
    assert list(step.reused(loss)) == [loss.name]


@pytest.mark.parametrize("split", [aten.split.Tensor, aten.unsafe_split.Tensor])
def test_pieces_of_a_storage_are_not_written_over(split):
    step = Step()
    first = step.op(aten.exp.default, step.input)
    pieces = step.op(split, first, 2)
    piece = step.op(operator.getitem, pieces, 0)
    second = step.op(aten.tanh.default, piece)
    loss = step.op(aten.add.Tensor, step.op(aten.sum.default, second), step.op(aten.sum.default, first))
    assert list(step.reused(loss)) == [loss.name]


def test_two_views_of_one_storage_that_meet_are_not_written_over():
    step = Step()
    square = step.op(aten.mm.default, step.input, step.op(aten.t.default, step.input))
    both = step.op(aten.add.Tensor, square, step.op(aten.t.default, square))
    assert step.reused(step.op(aten.sum.default, both)) == {}


def test_another_dtype_does_not_fit():
    step = Step()
    first = step.op(aten.exp.default, step.input)
    second = step.op(aten.ge.Scalar, first, 0.5)
    assert step.reused(step.op(aten.sum.default, second)) == {}


def test_other_ops_write_over_their_first_operand():
    step = Step()
    first = step.op(aten.exp.default, step.input)
    mask = step.op(aten.ge.Scalar, step.input, 0)
    second = step.op(aten.masked_fill.Scalar, first, mask, 0.0)
    third = step.op(aten.cumsum.default, second, 0)
    loss = step.op(aten.sum.default, third)
    assert step.reused(loss) == {second.name: first.name, third.name: second.name}
    assert second.target is aten.masked_fill_.Scalar


def test_what_b_uses_last_b_writes_over_and_what_w_uses_w():
    step = Step()
    first, second = step.op(aten.exp.default, step.input), step.op(aten.tanh.default, step.input)
    loss = step.op(aten.sum.default, step.op(aten.mul.Tensor, first, second))
    in_b = step.op(aten.mul.Tensor, first, second, phase=Phase.B)
    in_w = step.op(aten.sub.Tensor, second, in_b, phase=Phase.W)
    found = step.reused(loss, w=in_w)
    assert found == {in_b.name: first.name, in_w.name: in_b.name}


def test_the_order_of_phases_decides_and_not_that_of_the_graph():
    step = Step()
    first = step.op(aten.exp.default, step.input)
    in_w = step.op(aten.tanh.default, first, phase=Phase.W)
    in_b = step.op(aten.sin.default, first, phase=Phase.B)
    after = step.op(aten.cos.default, in_b, phase=Phase.W)
    found = step.reused(step.op(aten.sum.default, first), w=in_w, v=after)
    assert found == {in_w.name: first.name, after.name: in_b.name}


def test_what_another_stage_uses_or_gave_is_left_alone():
    step = Step()
    first = step.op(aten.exp.default, step.input)
    own = step.op(aten.tanh.default, first)
    sent = step.op(aten.sin.default, own)
    there = step.op(aten.cos.default, sent, stage=1)
    loss = step.op(aten.sum.default, there, stage=1)
    assert step.reused(loss) == {own.name: first.name, sent.name: own.name}


def test_results_of_the_step_are_left_alone():
    step = Step()
    loss = step.op(aten.sum.default, step.input)
    gradient = step.op(aten.mul.Tensor, loss, 2.0, phase=Phase.W)
    assert step.reused(loss, w=gradient) == {}


def test_an_op_of_a_library_has_no_form_in_aten():
    @torch.library.custom_op("reuse_test::relu", mutates_args=())
    def relu(self: torch.Tensor) -> torch.Tensor:
        return self.clamp_min(0.5)

    step = Step()
    first = step.op(aten.exp.default, step.input)
    second = step.op(torch.ops.reuse_test.relu.default, first)
    assert step.reused(step.op(aten.sum.default, second)) == {}


def test_verify_finds_a_value_that_is_written_over_too_soon():
    step = Step()
    first = step.op(aten.exp.default, step.input)
    second = step.op(aten.tanh.default, first)
    third = step.op(aten.mul.Tensor, first, second)
    step.reused(step.op(aten.sum.default, third))
    second.target, second.kwargs = aten.tanh.out, {"out": first}
    with pytest.raises(VerifyError, match=f"After a mistake: {second.name} .*writes over {first.name}"):
        verify(step.graph, "a mistake")


def test_verify_finds_a_value_that_is_used_before_it_is_made():
    step = Step()
    first = step.op(aten.exp.default, step.input)
    second = step.op(aten.tanh.default, first)
    step.reused(step.op(aten.sum.default, second))
    second.append(first)
    message = f"After a mistake: {second.name} uses {first.name}, which does not come before it"
    with pytest.raises(VerifyError, match=message):
        verify(step.graph, "a mistake")


def test_verify_finds_a_value_that_comes_back_and_has_not_left():
    step = Step()
    first = step.op(aten.exp.default, step.input)
    back = step.op(reload, first)
    step.graph.output(Outputs(step.op(aten.sum.default, back), None, {}, {}, {}))
    message = f"After a mistake: {back.name} reloads {first.name}, which was not offloaded"
    with pytest.raises(VerifyError, match=message):
        verify(step.graph, "a mistake")


def test_verify_finds_a_name_that_two_nodes_have():
    step = Step()
    first = step.op(aten.exp.default, step.input)
    second = step.op(aten.tanh.default, first)
    step.reused(step.op(aten.sum.default, second))
    second.name = first.name
    with pytest.raises(VerifyError, match=f"After a mistake: {first.name} is the name of several nodes"):
        verify(step.graph, "a mistake")


class Masked(nn.Module):
    """Elementwise ops of all kinds, some of whose operands live on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x, y):
        hidden = F.relu(self.first(x)) * torch.sigmoid(self.first(x))
        self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        later = self.second(hidden).masked_fill(hidden > 0.5, 0.1).cumsum(0)
        a, b = torch.addmm(later, hidden, self.second.weight).chunk(2, 1)
        hidden = torch.cat([a.exp() * b.tanh(), F.silu(b) - a], 1) + F.dropout(hidden, 0.5)
        return F.smooth_l1_loss(self.third(hidden), y)


def masked():
    generator = torch.Generator().manual_seed(1)
    example = {
        "x": torch.randn(6, 8, generator=generator, dtype=torch.float64),
        "y": torch.randn(6, 8, generator=generator, dtype=torch.float64),
    }
    return Masked().double(), example


@pytest.mark.in_ci("1f1b")
@pytest.mark.parametrize(
    "options",
    [{"schedule": "1f1b"}, pytest.param({"schedule": "zb-v"}, marks=pytest.mark.slow)],
    ids=lambda o: o["schedule"],
)
def test_same_bits_as_without(options, monkeypatch):
    def run() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model, example = masked()
        pipe = fxpipe.compile(model, example, ranks=2, microbatches=3, **options)
        batch = {name: torch.cat([x, x + 1, x.flip(0)]) for name, x in example.items()}
        result = pipe.run_local(batch)
        forms = sum("out=" in program or "relu_(" in program for program in pipe.artifact.programs)
        return {"loss": result.loss, "forms": torch.tensor(forms), **result.grads, **dict(pipe.buffers)}

    with_reuse = run()
    assert with_reuse.pop("forms") == 2
    monkeypatch.setattr(passes, "use_inplace_ops", lambda graph, backend: None)
    without = run()
    assert without.pop("forms") == 0
    assert with_reuse.keys() == without.keys()
    for name, value in without.items():
        torch.testing.assert_close(with_reuse[name], value, rtol=0, atol=0, msg=name)


def test_zeros_without_memory_get_some() -> None:
    """Those of tangents that are zero, which no op may write over."""
    step = Step()
    zeros = step.op(aten._efficientzerotensor.default, [4, 6])
    total = step.op(aten.sum.default, step.op(aten.add.Tensor, zeros, step.op(aten.exp.default, step.input)))
    compute_marked_values(step.graph)
    assert zeros.target is aten.zeros.default
    assert step.reused(total)
