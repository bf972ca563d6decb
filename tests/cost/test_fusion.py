"""The kernels that a section is compiled to, by their ops and by the bytes that go through memory."""

from collections.abc import Callable

import pytest
import torch
from models import gpt2, words
from torch import fx, nn

import fxpipe
from fxpipe.cost.fusion import Kernel, kernels_of
from fxpipe.ir.compat import make_fx
from fxpipe.ir.storage import call_nodes
from fxpipe.schedule.ops import Color, Phase

ROWS, WIDTH = 64, 32
FLOATS = ROWS * WIDTH * 4
"""The bytes of a value of ``ROWS`` rows."""


def found(step: Callable[..., object], *inputs: torch.Tensor) -> tuple[list[str], list[Kernel]]:
    """The ops of libraries, and the fused kernels, of a function."""
    graph = make_fx(step)(*inputs).graph
    ops, fused = kernels_of(call_nodes(graph), Phase.F, {*Phase})
    return [str(op.target).split(".")[1] for op in ops], fused


def names(kernel: Kernel) -> list[str]:
    return [str(op.target).split(".")[1] for op in kernel.ops]


def rows(*more: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, *more)


def test_a_chain_between_two_products_is_one_kernel():
    library, (kernel,) = found(lambda x, w: (x @ w).cos().exp() @ w, rows(), torch.randn(WIDTH, WIDTH))
    assert library == ["mm", "mm"]
    assert names(kernel) == ["exp"]  # the cosine is computed there
    assert kernel.bytes_moved() == 2 * FLOATS


@pytest.mark.slow
def test_many_ways_from_a_norm_are_followed_once():
    """Through x * sigmoid(x) there are two, and so 2 ** 600 through all of these."""

    def step(x):
        x = nn.functional.layer_norm(x, (WIDTH,))
        for _ in range(600):
            x = x * x.sigmoid()
        return x

    _, (kernel,) = found(step, rows())
    assert kernel.bytes_moved() == 2 * FLOATS


def test_views_and_casts_are_in_it():
    def step(x):
        return x.double().view(WIDTH, ROWS).t().sin().float()

    _, (kernel,) = found(step, rows())
    assert kernel.bytes_moved() == 2 * FLOATS


def test_a_value_that_is_read_twice_is_read_once_by_a_kernel():
    _, (kernel,) = found(lambda x, y: (x * y + x).exp() * x, rows(), rows())
    assert kernel.bytes_moved() == 3 * FLOATS


def test_what_a_library_reads_is_written():
    library, kernels = found(lambda x, w: (x.exp() @ w, x.exp().sin()), rows(), torch.randn(WIDTH, WIDTH))
    assert library == ["mm"]
    assert sum(kernel.bytes_moved() for kernel in kernels) == 3 * FLOATS  # one kernel, as both read x


def test_a_kernel_waits_for_a_later_one_that_reads_the_same():
    """Unless something in between waits for it."""
    w = torch.randn(WIDTH, WIDTH)
    _, kernels = found(lambda x, d, w: (x.exp(), (d @ w) * x), rows(), rows(), w)
    assert [kernel.bytes_moved() for kernel in kernels] == [4 * FLOATS]
    _, kernels = found(lambda x, d, w: (x.exp() @ w) * x, rows(), rows(), w)
    assert [kernel.bytes_moved() for kernel in kernels] == [2 * FLOATS, 3 * FLOATS]


def test_a_norm_that_is_made_again_is_in_the_kernel_of_its_gradient():
    def step(x, d, w):
        above = d @ w
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return normed, above - normed * (above * normed).mean(-1, keepdim=True)

    _, kernels = found(step, rows(), rows(), torch.randn(WIDTH, WIDTH))
    assert [kernel.bytes_moved() for kernel in kernels] == [4 * FLOATS]


def test_what_the_results_need_is_written():
    def step(x):
        y = x.exp()
        return y, y.sin()

    _, (kernel,) = found(step, rows())
    assert kernel.bytes_moved() == 3 * FLOATS


def test_a_norm_is_fused_with_what_is_around_it():
    def step(x, y, scale):
        x = x + y
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * scale
        return x, normed.sin()

    _, (kernel,) = found(step, rows(), rows(), torch.randn(WIDTH))
    assert kernel.bytes_moved() == 4 * FLOATS + WIDTH * 4


def test_a_layer_norm_is_fused_with_what_is_around_it():
    norm = nn.LayerNorm(WIDTH)
    _, (kernel,) = found(lambda x, w, b: nn.functional.layer_norm(x.exp(), (WIDTH,), w, b).sin(), rows(),
                         norm.weight.detach(), norm.bias.detach())  # fmt: skip
    assert kernel.bytes_moved() == 2 * FLOATS + 2 * WIDTH * 4


def test_a_sum_over_all_rows_is_a_kernel_of_its_own():
    def step(x, y, w):
        d = x * y
        return d @ w, d.sum(0)

    _, kernels = found(step, rows(), rows(), torch.randn(WIDTH, WIDTH))
    assert sorted(map(names, kernels)) == [["mul"], ["sum"]]
    assert sum(kernel.bytes_moved() for kernel in kernels) == 3 * FLOATS + FLOATS + WIDTH * 4


def test_kernels_do_not_wait_for_each_other():
    """The second addition needs the product of the first one's result."""

    def step(x, w):
        y = x + 1
        return y * (y @ w)

    library, kernels = found(step, rows(), torch.randn(WIDTH, WIDTH))
    assert (library, [*map(names, kernels)]) == (["mm"], [["add"], ["mul"]])


def test_loops_over_different_numbers_are_different_kernels():
    _, kernels = found(lambda x, y: (x.sin(), y.sin()), rows(), rows(2))
    assert [kernel.bytes_moved() for kernel in kernels] == [2 * FLOATS, 4 * FLOATS]


def test_a_lookup_reads_the_rows_that_it_returns():
    table = torch.randn(1000, WIDTH)
    _, (kernel,) = found(lambda t, i: nn.functional.embedding(i, t).sin(), table, torch.arange(ROWS))
    assert kernel.bytes_moved() == 2 * FLOATS + ROWS * 8


def test_sorting_is_no_loop():
    library, kernels = found(lambda x: x.sin().sort(-1)[0], rows())
    assert library == ["sort"]
    assert [*map(names, kernels)] == [["sin"]]


def test_a_norm_of_a_batch_reads_its_input_twice():
    def step(x):
        return nn.functional.batch_norm(x, None, None, training=True).relu()

    _, kernels = found(step, rows(8, 8))
    assert sum(kernel.bytes_moved() for kernel in kernels) == pytest.approx(3 * 64 * FLOATS, rel=0.05)
    assert len(kernels) == 2


# -- whole sections ------------------------------------------------------------------------------------------


def pipeline(backend: str, **options: object) -> fxpipe.Pipeline:
    given = {"ranks": 1, "microbatches": 2, "schedule": "zb-h1", "check": False, "costs": "H200"} | options
    return fxpipe.compile(gpt2(n_layer=2), words(2), backend=backend, **given)


@pytest.fixture(scope="module")
def by_backend() -> dict[str, fxpipe.Pipeline]:
    return {backend: pipeline(backend, dimensions={}) for backend in ("eager", "inductor")}


@pytest.mark.variation
@pytest.mark.slow
def test_the_backend_decides_the_times(by_backend):
    eager, fused = (by_backend[name].plan.costs.stages[0] for name in ("eager", "inductor"))
    assert fused.forward < 0.7 * eager.forward
    assert fused.backward < 0.7 * eager.backward
    assert fused.weight == pytest.approx(eager.weight, rel=0.1)  # its products add in place, in both


@pytest.mark.slow
def test_other_sizes_have_fused_times(by_backend):
    pipe = by_backend["inductor"]
    (stage,), (there,) = pipe.plan.costs.stages, pipe.simulate(device="H200").costs.stages
    assert (there.forward, there.backward) == pytest.approx((stage.forward, stage.backward))
    assert pipe.simulate(device="A100").costs.stages[0].forward > stage.forward


@pytest.mark.slow
def test_kernels_of_a_section(by_backend):
    graph: fx.Graph = by_backend["inductor"].graph
    nodes = [n for n in call_nodes(graph) if n.meta["color"] == Color(0, Phase.F)]
    ops, fused = kernels_of(nodes, Phase.F, {*Phase})
    one_by_one, none = kernels_of(nodes, Phase.F, set())
    assert (one_by_one, none) == (nodes, [])
    # Of each layer the products and attention; the head.
    assert len(ops) == 2 * 5 + 1
    # Of each layer the two norms and the activation; what is before the first norm, the last norm, the loss.
    assert 8 <= len(fused) <= 12


class Chains(nn.Module):
    """Layers whose ops Inductor makes one kernel of, and then others, of products."""

    def __init__(self):
        super().__init__()
        self.linear = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(16)])

    def forward(self, x):
        for k, layer in enumerate(self.linear):
            x = layer(x)
            for _ in range(30 if k < 8 else 1):
                x = x * 1.01
        return x.square().mean()


def test_stages_are_balanced_by_fused_kernels():
    def times(backend):
        with torch.device("meta"):
            model, x = Chains(), torch.ones(1024, 1024)
        given = {"ranks": 2, "microbatches": 4, "schedule": "1f1b", "check": False, "costs": "H100"}
        stages = fxpipe.compile(model, (x,), backend=backend, **given).plan.costs.stages
        return [stage.forward + stage.backward + stage.weight for stage in stages]

    for backend in ("eager", "inductor"):
        first, last = times(backend)
        assert first == pytest.approx(last, rel=0.15), backend
