"""Where the schedule runs B and W as one op, the program has one function for both."""

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.compiler.generate import joined_stages
from fxpipe.ir.storage import call_nodes, storage_root, tensors
from fxpipe.schedule.ops import Direction, Phase, Schedule, Transfer, parse_order

LAYERS, WIDTH, ROWS = 4, 32, 256


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))


def compiled(schedule: str, **options) -> fxpipe.Pipeline:
    given = {"ranks": 1, "microbatches": 2, "loss_fn": lambda y, batch: y.square().mean()}
    return fxpipe.compile(model(), (torch.ones(ROWS, WIDTH),), schedule=schedule, **given | options)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_one_function_gives_the_same_bits(schedule):
    torch.manual_seed(1)
    batch = (torch.randn(2 * ROWS, WIDTH),)
    one, two = compiled(schedule), compiled("zb-h1")
    sources = [pipe.artifact.programs[0] for pipe in (one, two)]
    assert ["def stage0_weight(" in source for source in sources] == [False, True]
    assert "saved_for_weight" not in sources[0]
    found = [pipe.run_local(batch) for pipe in (one, two)]
    assert torch.equal(found[0].loss, found[1].loss)
    assert all(torch.equal(grad, found[1].grads[name]) for name, grad in found[0].grads.items())


def most_live(pipe: fxpipe.Pipeline) -> int:
    """The most bytes that are live at once of what B and W allocate, run one after the other."""
    phases = {Phase.B: 0, Phase.W: 1}
    nodes = [n for n in call_nodes(pipe.graph) if n.meta["color"].phase in phases]
    nodes.sort(key=lambda n: phases[n.meta["color"].phase])  # in the graph's order within each
    last = {storage_root(used): node for node in nodes for used in (node, *node.all_input_nodes)}
    live = most = 0
    for node in nodes:
        if storage_root(node) is node:
            live += sum(t.nbytes for t in tensors(node))
        most = max(most, live)
        live -= sum(
            t.nbytes for root, end in last.items() if end is node and root in nodes for t in tensors(root)
        )
    return most


def test_gradients_die_at_once():
    """Those of all layers are kept for W, and those of one layer where W is no op of its own."""
    one, two = most_live(compiled("1f1b")), most_live(compiled("zb-h1"))
    assert two >= LAYERS * ROWS * WIDTH * 4
    assert one <= 3 * ROWS * WIDTH * 4


def test_it_is_joined_where_costs_are_measured():
    assert "def stage0_weight(" not in compiled("1f1b", costs="measured").artifact.programs[0]


def test_inductor_leaves_the_weight_gradients_apart():
    """They write to their accumulators, op by op."""
    assert "def stage0_weight(" in compiled("1f1b", backend="inductor").artifact.programs[0]


def test_the_stages_that_are_joined():
    order = parse_order("F0.0 F1.0 F2.0 BW2.0 B1.0 W1.0 BW0.0")
    schedule = Schedule("own", (0, 0, 0), 1, order)
    assert joined_stages(schedule) == {0, 2}
    reloads = (Transfer(Direction.IN, 0, 0, Phase.W, 4, 6),)
    assert joined_stages(Schedule("own", (0, 0, 0), 1, order, transfers=reloads)) == {2}
