"""Forwards that read values of the data: folded, or decided by the example and then checked as they run."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from equality import assert_equals_eager
from marks import slow_except
from torch import nn
from zoo import captured_once

import fxpipe
from fxpipe.capture.reads import example
from fxpipe.capture.trace import capture

WIDTH = 8


pytestmark = pytest.mark.usefixtures("double")


class Reads(nn.Module):
    """Five layers; ``read`` comes after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(5)])
        self.register_buffer("table", torch.ones(WIDTH))

    def read(self, x, mask):
        raise NotImplementedError

    def forward(self, x, mask):
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i == 1:
                x = self.read(x, mask)
        return x.square().mean()


def batch(count: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(count, WIDTH), "mask": torch.ones(count, WIDTH, dtype=torch.long)}


class AllOfAMask(Reads):
    def read(self, x, mask):
        return x if mask.all() else x * mask


class Finite(Reads):
    def read(self, x, mask):
        if not torch.isfinite(x).all():
            raise ValueError("not finite")
        return x


class InRange(Reads):
    def read(self, x, mask):
        torch._check(int(mask.max()) < 2, lambda: "out of range")
        return x * mask


class Equal(Reads):
    def read(self, x, mask):
        ones, table = torch.ones_like(mask), torch.ones(WIDTH)
        same = torch.equal(mask, ones) and torch.allclose(self.table, table)
        return x if same and mask.equal(ones) and self.table.allclose(table) else -x


class Lengths(Reads):
    """Python numbers from data decide shapes."""

    def read(self, x, mask):
        lengths = mask.sum(0).tolist()
        return torch.cat([part * (1 + k) for k, part in enumerate(x.T.split([n // 2 for n in lengths]))]).T


class ThroughNumpy(Reads):
    def read(self, x, mask):
        widths = np.asarray(mask)[0] * (np.arange(WIDTH) < self.table.cpu().numpy().sum() - 2)
        return x * torch.from_numpy(widths * 2.0)


class Constants(Reads):
    """Of constants alone: nothing to check."""

    def read(self, x, mask):
        width = int(torch.arange(WIDTH).max()) + 1
        return x * width * torch.linspace(0.5, 2, 3).tolist()[1]


class InPlace(Reads):
    """What is read was written in place."""

    def read(self, x, mask):
        seen = mask.clone()
        seen[0] = 0
        seen[0].add_(1)
        return x if (seen == 1).all() else -x


class PicksAll(Reads):
    """Leaves out what is padding, and nothing is: as images that are zero, or loops in a graph."""

    def read(self, x, mask):
        rows = mask.any(1).nonzero().squeeze(1)
        return x[rows][mask.bool()].view(x.shape) + x[mask == 0].sum()


class PicksAllInPlace(PicksAll):
    def read(self, x, mask):
        return super().read(x.clone().mul_(2), mask)


class TensorOfTensors(Reads):
    def read(self, x, mask):
        counts = torch.tensor([[row.sum(), 1] for row in mask], dtype=x.dtype)
        return x * counts[:, :1] * torch.tensor([x.detach().max(), 2.0])[1]


class FrozenParameter(Reads):
    """Numbers of a parameter that is not trained are as those of a buffer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH), requires_grad=False)

    def read(self, x, mask):
        kept = self.scale.gt(0.5).nonzero().flatten()
        return x.index_fill(1, kept, 0.5) * self.scale[0].item()


class GraphInABuffer(Reads):
    """Drops the loops of a graph that is a buffer, and scales by a number of one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 3], [1, 1, 0, 2, 3]]))

    def read(self, x, mask):
        edges = self.edges[:, self.edges[0] != self.edges[1]]
        kept = torch.repeat_interleave(torch.arange(WIDTH), self.edges.max())[:WIDTH]
        return x.index_add(1, edges[0], x[:, edges[1]])[:, kept] * float(self.table.mean())


class WritesToWhatAConstantGives(Reads):
    """Positions in a plain tensor, moved in a copy of it, and those left out that lie outside."""

    def __init__(self) -> None:
        super().__init__()
        self.places = torch.tensor([[0, 1, 2, 7], [3, 5, 4, 0]])

    def read(self, x, mask):
        places = self.places.clone()
        places[0] += 1
        places = places[:, places[0] < WIDTH]
        table = torch.zeros(WIDTH, WIDTH)
        table[places[0], places[1]] = self.layers[0].bias[:3]
        return x + x @ table


class ReadsAnOlderView(Reads):
    """What several ops in turn have written to is read through a view that is older than they."""

    def read(self, x, mask):
        counts = torch.ones(3)
        first = counts[:1]
        counts.add_(1)
        counts.mul_(3)
        return x * 10 if first.item() > 5 else x


class NeverDrops(Reads):
    """Layer drop with a probability of nothing."""

    def read(self, x, mask):
        return x * 3 if torch.rand(()) < 0.0 else x * 2


class ValidatedDistribution(Reads):
    def read(self, x, mask):
        return x + torch.distributions.Normal(x, self.table.exp(), validate_args=True).log_prob(mask)


class Encoder(Reads):
    """nn.TransformerEncoder looks whether its mask is causal."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def read(self, x, mask):
        causal = nn.Transformer.generate_square_subsequent_mask(4, dtype=x.dtype)
        y = x.unsqueeze(1).expand(-1, 4, -1)
        return self.encoder(y, mask=causal).mean(1)


class FirstOfAll(Reads):
    """The first op of the model picks what a mask says."""

    def forward(self, x, mask):
        return super().forward(x[mask.bool()].view(x.shape), mask)

    def read(self, x, mask):
        return x


class SelectsAll(Reads):
    def read(self, x, mask):
        return torch.masked_select(x, mask[:1] > 0).view(x.shape) + torch.masked_select(x, mask == 0).sum()


class Truth(Reads):
    """Of numbers that are others in each microbatch."""

    def read(self, x, mask):
        return x * 2 if x.square().sum() and mask.sum() and torch.is_nonzero(x[0, 0]) else x


class Comparisons(Reads):
    """Of a floating-point number of the data."""

    def read(self, x, mask):
        largest, smallest = x.max().item(), x.min().item()
        if largest > 65504 or not smallest < largest or largest == 0.5 or not largest:
            raise ValueError("not finite")
        mean = mask.double().mean()
        return x * (int(mean + 0.5) + math.ceil(mean.item()) + math.floor(mean.item()))


class CountsExperts(Reads):
    """Mixture of experts whose load is balanced by a bias that its counts move, without a loss."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.register_buffer("bias", torch.zeros(4))

    def read(self, x, mask):
        scores = self.gate(x).sigmoid()
        chosen = (scores + self.bias).topk(2).indices
        counts = torch.bincount(chosen.flatten(), minlength=4)
        load = torch.bincount(chosen[:, 0], scores[:, 0].detach(), minlength=4)
        self.bias += 0.01 * torch.sign(counts.double().mean() - counts) - 0.01 * load
        weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        return x + sum(weights[:, k, None] * self.layers[k](x) for k in range(4))


class OneChoice(Reads):
    """A random choice of one, as torchvision's detectors draw a size."""

    def read(self, x, mask):
        sizes = [2]
        return x * sizes[int(torch.empty(1).uniform_(0.0, float(len(sizes))).item())]


RIGHT = [
    AllOfAMask,
    Finite,
    InRange,
    Equal,
    Lengths,
    ThroughNumpy,
    Constants,
    InPlace,
    PicksAll,
    PicksAllInPlace,
    TensorOfTensors,
    GraphInABuffer,
    FrozenParameter,
    WritesToWhatAConstantGives,
    ReadsAnOlderView,
    NeverDrops,
    ValidatedDistribution,
    Encoder,
    FirstOfAll,
    SelectsAll,
    Truth,
    Comparisons,
    CountsExperts,
    OneChoice,
]


@pytest.mark.in_ci(
    "AllOfAMask-options0",
    "Finite-options0",
    "InRange-options0",
    "Equal-options0",
    "Lengths-options0",
    "ThroughNumpy-options0",
    "Constants-options0",
    "InPlace-options0",
    "PicksAll-options0",
    "PicksAllInPlace-options0",
    "TensorOfTensors-options0",
    "GraphInABuffer-options0",
    "FrozenParameter-options0",
    "WritesToWhatAConstantGives-options0",
    "ReadsAnOlderView-options0",
    "NeverDrops-options0",
    "ValidatedDistribution-options0",
    "Encoder-options0",
    "FirstOfAll-options0",
    "SelectsAll-options0",
    "Truth-options0",
    "Comparisons-options0",
    "CountsExperts-options0",
    "OneChoice-options0",
)
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "zb-h1"},
        pytest.param({"schedule": "1f1b", "recompute": "full"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "model",
    slow_except(RIGHT, AllOfAMask, ThroughNumpy, InPlace, PicksAll, FirstOfAll, Comparisons, CountsExperts),
)
def test_equals_eager(model, options):
    with captured_once(model):
        assert_equals_eager(model, batch, ranks=2, **options)


@pytest.mark.parametrize(
    "model", slow_except([AllOfAMask, InRange, Equal, ThroughNumpy, InPlace, PicksAll], AllOfAMask, PicksAll)
)
def test_another_microbatch_that_would_take_another_branch(model):
    options = {"ranks": 2, "microbatches": 3, "schedule": "1f1b", "without": ["batch-branches"]}
    pipe = fxpipe.compile(model(), batch(2), **options)
    data = batch(6)
    pipe.run_local(data)
    data["mask"][3, 2] = 5 if model is InRange else 0
    with pytest.raises(fxpipe.RunError) as caught:
        pipe.run_local(data)
    message = str(caught.value)
    assert "test_capture_checks.py:" in message
    assert "this microbatch gives" in message


def test_a_buffer_that_gets_other_values():
    model = GraphInABuffer()
    pipe = fxpipe.compile(model, batch(2), ranks=2, microbatches=2, schedule="1f1b")
    pipe.run_local(batch(4))
    model.edges[0, 0] = 1
    with pytest.raises(fxpipe.RunError, match=r"test_capture_checks\.py:"):
        pipe.run_local(batch(4))


def test_a_number_that_is_none():
    class Bounded(Reads):
        def __init__(self):
            super().__init__()
            self.register_buffer("bounds", torch.tensor([float("nan"), float("inf")]))

        def read(self, x, mask):
            low, high = self.bounds.tolist()
            return x.clamp(0.1 if low != low else low, high)

    torch.manual_seed(0)
    model, data = Bounded(), batch(4)
    pipe = fxpipe.compile(model, batch(2), ranks=2, microbatches=2, schedule="1f1b")
    torch.testing.assert_close(pipe.run_local(data).loss, model(**data).detach())
    model.bounds[0] = 1.0
    with pytest.raises(fxpipe.RunError, match=r"compiled for nan.* gives 1\.0"):
        pipe.run_local(data)


def test_constants_are_not_checked():
    pipe = fxpipe.compile(Constants(), batch(2), ranks=2, microbatches=2, schedule="1f1b")
    assert "expect" not in "".join(pipe.artifact.programs)


def refused(model: type[nn.Module], example=None, **options) -> str:
    with pytest.raises(fxpipe.FxpipeError) as caught:
        fxpipe.compile(
            model(), example or batch(2), ranks=2, microbatches=2, **{"schedule": "1f1b", **options}
        )
    return str(caught.value)


def test_a_real_number_of_the_data():
    class Scales(Reads):
        def read(self, x, mask):
            return x / x.abs().max().item()

    class ScalesByNumpy(Reads):
        def read(self, x, mask):
            return x / x.detach().numpy().max()

    for model in (Scales, ScalesByNumpy):
        message = refused(model)
        assert "reads the number" in message
        assert "test_capture_checks.py:" in message


def test_a_real_number_of_a_trained_parameter():
    class Scales(Reads):
        def read(self, x, mask):
            return x * torch.sigmoid(self.layers[0].bias[0]).item()

    message = refused(Scales)
    assert "from the parameter 'layers.0.bias', which is trained" in message
    assert "fixed=" not in message


def test_a_mask_that_picks_some():
    class Some(Reads):
        def read(self, x, mask):
            return x + x[x > 0].mean()

    message = refused(Some)
    assert "depend on data" in message
    assert "torch.where" in message
    assert "fixed=" not in message  # of no use: the parameters decide as well


def test_layer_drop():
    class Drops(Reads):
        def read(self, x, mask):
            return x if torch.rand(()) < 0.1 else x * 2

    message = refused(Drops)
    assert "layerdrop=0" in message
    assert "no .item()" not in message
    assert "test_capture_checks.py:" in message


def test_a_random_number_that_python_computes_with():
    class Drops(Reads):
        def read(self, x, mask):
            return x * (1 + torch.rand(()).item())

    message = refused(Drops)
    assert "compare the number as a tensor (no .item()" in message
    assert "test_capture_checks.py:" in message


@pytest.mark.parametrize(
    "use", [str, float, lambda n: n * 2, lambda n: 2 - n, lambda n: n.is_integer(), hash]
)
def test_a_number_of_the_data_that_leaves_the_graph(use):
    class Uses(Reads):
        def read(self, x, mask):
            use(x.max().item())
            return x

    assert "no .item()" in refused(Uses)


def test_a_number_of_the_data_in_an_op():
    class Fills(Reads):
        def read(self, x, mask):
            return x + torch.full((WIDTH,), x.max().item())

    message = refused(Fills)
    assert "no .item() or .tolist() there" in message
    assert "test_capture_checks.py:" in message


def test_a_number_of_the_data_that_the_model_keeps():
    class Keeps(Reads):
        def __init__(self):
            super().__init__()
            self.best = 0.0

        def read(self, x, mask):
            self.best = x.max().item()
            return x

    with pytest.warns(UserWarning, match="changes the model's best"):
        fxpipe.compile(Keeps(), batch(2), ranks=2, microbatches=2, schedule="1f1b")


def test_a_number_of_the_data_beside_the_loss():
    class Records(AllOfAMask):
        def forward(self, x, mask):
            loss = super().forward(x, mask)
            return {"loss": loss, "value": loss.item()}

    pipe = fxpipe.compile(Records(), batch(2), ranks=2, microbatches=2, schedule="1f1b")
    assert pipe.run_local(batch(4)).loss > 0


def test_more_experts_than_were_named():
    class Counts(Reads):
        def read(self, x, mask):
            return x * torch.bincount(mask.flatten(), minlength=3)[1]

    pipe = fxpipe.compile(Counts(), batch(2), ranks=2, microbatches=3, schedule="1f1b")
    data = batch(6)
    data["mask"][3, 2] = 3
    with pytest.raises(fxpipe.RunError, match=r"test_capture_checks\.py:"):
        pipe.run_local(data)


def test_a_count_of_experts_that_training_changes():
    class Widest(Reads):
        def read(self, x, mask):
            chosen = x.argmax(-1)
            return x * F.one_hot(chosen, max(int(chosen.max()) + 1, 2)).sum()

    with pytest.warns(UserWarning, match=r"integer .* of the trained parameters.*one_hot\(i, n\)"):
        pipe = fxpipe.compile(Widest(), batch(2), ranks=2, microbatches=8, schedule="1f1b")
    with pytest.raises(fxpipe.RunError, match=r"one_hot\(i, n\)"):
        pipe.run_local(batch(16))


@pytest.mark.slow
def test_a_random_branch_that_is_hardly_ever_taken():
    class Rarely(Reads):
        def read(self, x, mask):
            return x if torch.rand(()) < 0.01 else x * 2

    pipe = fxpipe.compile(Rarely(), batch(2), ranks=2, microbatches=64, schedule="1f1b")
    data = batch(128)

    def train():
        for step in range(20):
            pipe.run_local(data, step=step)

    with pytest.raises(fxpipe.RunError, match=r"test_capture_checks\.py:.* compiled for False"):
        train()  # at one of 1280 microbatches


def test_a_number_of_a_buffer_that_the_step_changes():
    class Cumulative(Reads):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH, momentum=None)

        def read(self, x, mask):
            return self.norm(x)

    message = refused(Cumulative)
    assert "'norm.num_batches_tracked'" in message


def test_a_model_on_the_meta_device():
    class OnMeta(AllOfAMask):
        def __init__(self):
            super().__init__()
            self.to("meta")

        def read(self, x, mask):
            return x if (self.table > 0).all() else -x

    assert "meta device" in refused(OnMeta)


def test_a_mask_on_the_meta_device_in_an_attribute():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.mask = nn.Linear(8, 8), torch.ones(8, 8, device="meta", dtype=torch.bool).tril()

        def forward(self, x):
            return F.scaled_dot_product_attention(self.layer(x), x, x, attn_mask=self.mask).square().mean()

    message = refused(Masked, {"x": torch.randn(2, 8, 8)})
    assert "An op reads a tensor on the meta device" in message
    assert "Register it as a buffer" in message


def test_a_fixed_input():
    class Grid(Reads):
        """Its mask's values decide shapes in a way that no fake tensor can follow."""

        def read(self, x, mask):
            index = torch.repeat_interleave(torch.arange(WIDTH), mask[0])
            return x[:, index] * mask.nonzero().shape[0]

    message = refused(Grid)
    assert "depend on data" in message
    assert "if 'mask' is the same in all batches, compile with fixed=['mask']" in message
    assert_equals_eager(Grid, batch, ranks=2, schedule="zb-h1", fixed=["mask"])
    pipe = fxpipe.compile(Grid(), batch(2), ranks=2, microbatches=2, schedule="1f1b", fixed=("mask",))
    data = batch(4)
    data["mask"][3, 2] = 2
    with pytest.raises(fxpipe.RunError, match="the fixed input 'mask'"):
        pipe.run_local(data)


def test_bad_values_of_fixed():
    assert "'masks', which is no tensor of the example" in refused(AllOfAMask, fixed=["masks"])
    assert "a list of names" in refused(AllOfAMask, fixed="mask")
    big = {"x": torch.randn(600, WIDTH), "mask": torch.ones(600, WIDTH, dtype=torch.long)}
    assert "4800 elements" in refused(AllOfAMask, big, fixed=["mask"])
    assert "dimensions" in refused(AllOfAMask, fixed=["mask"], dimensions={"width": WIDTH})


def test_ctc_loss():
    class Speech(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])

        def forward(self, x, targets, lengths):
            scores = self.layers(x).log_softmax(-1).transpose(0, 1)
            given = torch.full((x.shape[0],), x.shape[1], dtype=torch.long)
            return F.ctc_loss(scores, targets, given, lengths)

    def speech(count):
        targets = torch.randint(1, WIDTH, (count, 3))
        return {
            "x": torch.randn(count, 10, WIDTH),
            "targets": targets,
            "lengths": torch.full((count,), 3, dtype=torch.long),
        }

    assert_equals_eager(Speech, speech, ranks=2, schedule="zb-h1")


def test_the_way_of_eager_and_not_one_for_compilers():
    class Rounds(Reads):
        def read(self, x, mask):
            special = torch.compiler.is_compiling() or torch.compiler.is_exporting()
            return x.float().double() if special else x * mask

    assert_equals_eager(Rounds, batch, ranks=2, schedule="zb-h1")


def test_the_way_for_compilers_where_the_other_hangs_on_data():
    class Skips(Reads):
        def read(self, x, mask):
            return x if not torch.compiler.is_compiling() and mask.all() else x * mask

    def holes(count: int) -> dict[str, torch.Tensor]:
        return batch(count) | {"mask": (torch.arange(count * WIDTH).view(count, WIDTH) < 2 * WIDTH).long()}

    assert holes(2)["mask"].all()
    assert not holes(6)["mask"].all()
    assert_equals_eager(Skips, holes, ranks=2, schedule="zb-h1")


@pytest.mark.parametrize("message", [["a mask has zeros and ones"], []])
def test_an_assert_of_a_tensor_holds_of_each_microbatch(message):
    way = mock.Mock()

    class Asserts(Reads):
        def read(self, x, mask):
            way(torch.compiler.is_compiling())
            torch._assert_async((mask <= 1).all(), *message)
            return x * mask

    assert_equals_eager(Asserts, batch, ranks=2, schedule="zb-h1")
    way.reset_mock()
    pipe = fxpipe.compile(Asserts(), batch(2), ranks=2, microbatches=2, schedule="1f1b")
    assert mock.call(True) not in way.mock_calls  # no code for compilers has fewer
    wrong = batch(4)
    wrong["mask"][3, 2] = 5
    says = message[0] if message else "An assert of the model does not hold of this microbatch"
    with pytest.raises(fxpipe.RunError, match=rf"^{says} \(.*test_capture_checks\.py:\d+\)\.$"):
        pipe.run_local(wrong)
    pipe.run_local(batch(4))


@pytest.mark.parametrize("op", ["cholesky", "inv", "solve"])
def test_matrices_are_factorized_in_each_microbatch(op):
    class Factorizes(Reads):
        def read(self, x, mask):
            matrix = torch.diag_embed(mask + 1.0)
            factor = getattr(torch.linalg, op)
            return factor(matrix, x) if op == "solve" else (factor(matrix) @ x.unsqueeze(-1)).squeeze(-1)

    assert_equals_eager(Factorizes, batch, ranks=2, schedule="zb-h1")
    pipe = fxpipe.compile(Factorizes(), batch(2), ranks=2, microbatches=2, schedule="1f1b")
    wrong = batch(4)
    wrong["mask"][3, 2] = -1
    says = rf"^(torch\.)?linalg\.{op}: a matrix of this microbatch is singular or not positive-def"
    with pytest.raises(fxpipe.RunError, match=says):
        pipe.run_local(wrong)
    pipe.run_local(batch(4))


def test_code_for_compilers_that_fails():
    """Eager's way hangs on data, and is taken all the same."""

    class Broken(Reads):
        def read(self, x, mask):
            if torch.compiler.is_compiling():
                return x * None
            return x * mask if mask.all() else x

    assert_equals_eager(Broken, batch, ranks=2, schedule="zb-h1")


def test_a_way_for_compilers_that_reads_as_much_is_given_up():
    way = mock.Mock()  # which compile leaves as it is after the trace, unlike a list

    class Same(Reads):
        def read(self, x, mask):
            way("reads", torch.compiler.is_compiling())
            x = x * mask if mask.all() else x
            way("goes on", torch.compiler.is_compiling())
            return x

    fxpipe.compile(Same(), batch(2), ranks=2, microbatches=2, schedule="1f1b")
    ways = [call.args for call in way.mock_calls]
    assert [*dict.fromkeys(ways)] == [("reads", False), ("goes on", False), ("reads", True)]


@pytest.mark.parametrize(
    "fails", [lambda x: x * x.max().item(), lambda x: x * float(x.max()), lambda x: x + x.unique()[0]]
)
def test_a_refusal_that_the_model_catches(fails):
    class Catches(Reads):
        def read(self, x, mask):
            try:
                return fails(x)
            except Exception:  # noqa: BLE001 - as models do
                return x

    assert "test_capture_checks.py:" in refused(Catches)


def test_what_the_way_for_compilers_catches_is_still_counted():
    class Catches(Reads):
        def read(self, x, mask):
            try:
                return x * mask if mask.all() else x
            except Exception:  # noqa: BLE001 - as models do
                return x * 2

    assert_equals_eager(Catches, batch, ranks=2, schedule="zb-h1")


@pytest.mark.slow
def test_dropout_of_nothing_is_no_random_number():
    class Zero(Reads):
        def read(self, x, mask):
            x = F.scaled_dot_product_attention(*[F.dropout(x, 0.0)[None, None]] * 3, dropout_p=0.0)[0, 0]
            return x if torch.isfinite(x).all() else -x

    assert_equals_eager(Zero, batch, ranks=2, schedule="zb-h1")


def test_packed_sequences():
    class Packs(Reads):
        def read(self, x, mask):
            return nn.utils.rnn.pack_padded_sequence(x[None], mask.sum()[None].cpu(), batch_first=True).data

    assert "Give the layer the padded batch" in refused(Packs)


def test_checks_of_the_backward_that_are_the_same():
    class Puts(Reads):
        def read(self, x, mask):
            keep, y = x.detach() < 1e9, torch.zeros_like(x)
            y[keep] = x[keep] * 2
            y[keep] = y[keep] + x[keep]
            nothing = torch.empty(0, dtype=torch.float32)
            return y * torch.cat([nothing, x.sum()[None]])

    assert_equals_eager(Puts, batch, ranks=2, schedule="zb-h1")


def test_a_read_looks_only_at_what_leads_to_the_value():
    """Of ops elsewhere in a long trace it would take the square of their number."""
    with mock.patch.object(example, "overwritten", wraps=example.overwritten) as looked_at:
        capture(AllOfAMask(), batch(2), None, 1.0, torch.device("cpu"))
    assert not looked_at.called
