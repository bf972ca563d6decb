"""Buffers that the step changes, tensors under several names, and Python state: as in eager, or an error."""

import copy
import functools
import random
import warnings

import numpy as np
import pytest
import torch
from equality import LIMIT, assert_equals_eager, attributes, eager_step
from marks import slow_except
from torch import nn
from zoo import captured_once, relative_error, too_far

import fxpipe

WIDTH = 8


pytestmark = pytest.mark.usefixtures("double")


class Layers(nn.Module):
    """Six layers; ``between`` comes after each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.prepare()

    def prepare(self) -> None:
        pass

    def between(self, x, i):
        return x

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = self.between(torch.tanh(layer(x)), i)
        return x.square().mean()


def rows(count: int) -> tuple[torch.Tensor]:
    return (torch.randn(count, WIDTH),)


OPTIONS = {
    "zb-h1, offload": {"schedule": "zb-h1", "offload": fxpipe.Offload(bandwidth=1e12)},
    "gpipe, v, recompute": {
        "schedule": "gpipe",
        "stages_per_rank": 2,
        "placement": "v",
        "recompute": "full",
    },
}


class BatchNorm(Layers):
    def prepare(self):
        self.norm = nn.BatchNorm1d(WIDTH)

    def between(self, x, i):
        return self.norm(x) if i == 2 else x


class BatchNormTwice(BatchNorm):
    def between(self, x, i):
        return self.norm(x) if i in (2, 3) else x


class DiscardedBatchNorm(BatchNorm):
    """Called for its statistics alone."""

    def between(self, x, i):
        if i == 2:
            self.norm(x)
        return x


class InstanceNorm(Layers):
    def prepare(self):
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True)

    def between(self, x, i):
        return self.norm(x.reshape(2, 2, 4)).reshape(2, WIDTH) if i == 1 else x


class SpectralNorm(Layers):
    def prepare(self):
        self.layers[2] = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


class OldSpectralNorm(Layers):
    """Keeps its weight as a plain attribute of the module."""

    def prepare(self):
        self.layers[2] = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


class Scale(Layers):
    def prepare(self):
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))


class RunningScale(Scale):
    """What W would repeat depends on the buffer as it was before this microbatch."""

    def between(self, x, i):
        if i != 2:
            return x
        y = torch.sin(x) * self.scale.exp()
        self.scale.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return y


class ReplacedScale(Scale):
    def between(self, x, i):
        if i != 2:
            return x
        y = x * self.scale.exp()
        self.scale = self.scale * 0.9 + 0.1 * x.detach().abs().mean(0)
        return y


class WrittenThenReplaced(Scale):
    def between(self, x, i):
        if i == 2:
            self.scale.mul_(0.9)
            self.scale = self.scale + 0.01
            return x * self.scale
        return x


class DataOfABuffer(Scale):
    def between(self, x, i):
        if i == 1:
            self.scale.data = self.scale.data * 0.9 + 0.1
            return x * self.scale
        return x


class DataOfABufferInUse(Scale):
    """Views and products of the old value are used once more; frozen parameters are as buffers."""

    def prepare(self):
        super().prepare()
        self.frozen = nn.Parameter(torch.rand(WIDTH), requires_grad=False)

    def between(self, x, i):
        if i != 1:
            return x
        y, old = x * self.scale * self.frozen, self.scale.view(2, 4)
        self.scale.data = self.scale.data * 0.9 + x.detach().mean(0) * 0.1
        self.frozen.data, z = self.scale.flip(0), y * y
        y.data = y.data + 1
        return (y + z) * old.view(-1) * self.scale * self.frozen


class WrittenThroughData(Scale):
    def between(self, x, i):
        if i == 1:
            self.scale.data.mul_(0.9)
            return x * self.scale
        return x


class MomentumEncoder(Layers):
    """A frozen copy of two layers follows the trained ones, and is used in both stages."""

    def prepare(self):
        self.keys = nn.ModuleList([nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(6)])

    def between(self, x, i):
        if i == 0:
            for key, layer in zip(self.keys.parameters(), self.layers.parameters(), strict=True):
                key.data = key.data * 0.9 + layer.data * 0.1
        return x + torch.tanh(self.keys[i](x)) if i in (1, 4) else x


class Annealed(Layers):
    """Counted in one place, used in two stages."""

    def prepare(self):
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def between(self, x, i):
        if i == 0:
            self.steps += 1
        return x * torch.exp(-self.steps * 0.1) if i in (0, 4) else x


class Previous(Layers):
    """A buffer is the activation of the microbatch before."""

    def prepare(self):
        self.register_buffer("previous", torch.zeros(2, WIDTH))

    def between(self, x, i):
        if i != 1:
            return x
        y = x + self.previous * 0.1
        self.previous = x.detach()
        return y


class KeepsTheBatch(Layers):
    """A buffer's new value is an input as it is."""

    def prepare(self):
        self.register_buffer("seen", torch.zeros(2, WIDTH))

    def forward(self, x):
        loss = super().forward(x + self.seen * 0.1)
        self.seen = x
        return loss


class Swapped(Layers):
    def prepare(self):
        self.register_buffer("one", torch.zeros(WIDTH))
        self.register_buffer("other", torch.ones(WIDTH))

    def between(self, x, i):
        if i == 1:
            self.one, self.other = self.other, self.one
            return x * self.one.cos()
        return x


class ReplacedThenSwapped(Swapped):
    def between(self, x, i):
        if i == 1:
            self.other = self.other * 0.8 + x.detach().mean(0)
        if i == 5:
            self.one, self.other = self.other, self.one
        return x


class PartOfAnother(Layers):
    """A buffer's new value is a view of another one, which changes as well."""

    def prepare(self):
        self.register_buffer("ahead", torch.arange(2.0 * WIDTH).view(2, WIDTH))
        self.register_buffer("whole", torch.ones(2, WIDTH))

    def between(self, x, i):
        if i == 1:
            self.ahead, self.whole = self.whole.flip(0).view(WIDTH, 2).view(2, WIDTH), self.ahead + 1
            return x * self.ahead.cos()
        return x


class ViewOfAnother(Layers):
    def prepare(self):
        self.register_buffer("last", torch.zeros(WIDTH))
        self.register_buffer("all", torch.ones(2, WIDTH))

    def between(self, x, i):
        if i == 1:
            self.last, self.all = self.all[0], self.all * 0.5 + x.detach()
            return x + self.last
        return x


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.scale.mul_(0.5)
        return gradient * ctx.scale, None


class WrittenInBackward(Scale):
    def between(self, x, i):
        return _Halves.apply(x, self.scale) if i == 1 else x


class _SummedInRows(torch.autograd.Function):
    """The gradients of ``gain`` and ``bias`` are rows of one tensor, as parts of an adjoint state are."""

    @staticmethod
    def forward(ctx, x, gain, bias, seen):
        ctx.save_for_backward(x, gain)
        ctx.seen = seen
        return x * gain + bias

    @staticmethod
    def backward(ctx, gradient):
        x, gain = ctx.saved_tensors
        rows = torch.zeros(2, WIDTH)
        of_gain, of_bias = rows
        of_gain += (gradient * x).sum(0)
        of_bias += gradient.sum(0)  # after which of_gain is a view of another value of rows
        ctx.seen[1] += rows[0, 0]
        return gradient * gain, of_gain, of_bias, None


class ViewsWrittenInBackward(Layers):
    def prepare(self):
        self.gain, self.bias = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("seen", torch.zeros(2))

    def between(self, x, i):
        return _SummedInRows.apply(x, self.gain, self.bias, self.seen) if i == 2 else x


class SharedLayers(Layers):
    def prepare(self):
        self.layers = nn.ModuleList([self.layers[0]] * 4)


class Aliases(Layers):
    """One parameter as two attributes, in a list and in a tied layer."""

    def prepare(self):
        self.again, self.weight = self.layers[1], self.layers[2].weight
        self.several = [self.layers[3].weight]

    def between(self, x, i):
        if i == 3:
            x = x @ self.several[0]
        return x @ self.weight + (self.again(x) if i == 4 else 0)


class CachedTable(Layers):
    """A table that the first forward makes and keeps, as a plain attribute."""

    def prepare(self):
        self.table, self.tables = None, {}

    def between(self, x, i):
        if self.table is None:
            self.table = torch.arange(float(WIDTH)).cos()
        self.tables.setdefault(WIDTH, torch.arange(float(WIDTH)).sin())
        return x * self.table + self.tables[WIDTH] if i in (1, 4) else x


class _Rotation:
    """A table that is made when it is called for the first time, in an object that is no module."""

    def __init__(self):
        self.table = None

    def __call__(self, x):
        if self.table is None:
            self.table = torch.arange(float(WIDTH)).cos()
        return x * self.table


@functools.lru_cache
def _ramp(width):
    return torch.linspace(0.0, 1.0, width)


class CachedElsewhere(Layers):
    def prepare(self):
        self.rotate = _Rotation()

    def between(self, x, i):
        return self.rotate(x) + _ramp(WIDTH) if i in (1, 4) else x


class PlainTensor(Layers):
    def prepare(self):
        self.table = torch.arange(float(WIDTH))

    def between(self, x, i):
        return x * self.table.cos() if i in (0, 4) else x


class Converts(Layers):
    """Casts a layer to the type that it has, as routers of experts do."""

    def between(self, x, i):
        self.layers[3].to(x.dtype)
        return x


class MakesModules(Layers):
    """Modules that the forward makes, converts and copies."""

    def between(self, x, i):
        if i == 1:
            x = nn.Sequential(nn.LayerNorm(WIDTH, dtype=torch.float32), nn.Softmax(-1)).to(x.dtype)(x)
        return x + copy.deepcopy(self.layers[i])(x).square() if i == 3 else x


class ComplexNumbers(Layers):
    """Autograd conjugates Python's numbers."""

    def between(self, x, i):
        if i != 2:
            return x
        return (torch.exp(-2j * 3.5 * x) + (1j - x) / (2 + 1j) + torch.where(x > 0, x, 1j) ** 2j).abs()


class CompiledModules(Layers):
    def prepare(self):
        self.layers[1] = torch.compile(nn.Sequential(self.layers[1], nn.Tanh()), backend="eager")
        self.layers[3].compile(backend="eager")
        self.sine = torch.compile(torch.sin, backend="eager")

    def between(self, x, i):
        return self.sine(x) * (0.5 if torch.compiler.is_compiling() else 1.0)


class MaskOfTheFirstForward(Layers):
    """A buffer that the first forward makes, of nothing that changes."""

    def prepare(self):
        self.register_buffer("mask", None)

    def between(self, x, i):
        if self.mask is None:
            self.mask = torch.ones(WIDTH, WIDTH).tril()
        return x @ self.mask if i == 2 else x


class Lstm(Layers):
    def prepare(self):
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, bidirectional=True)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def between(self, x, i):
        return self.out(self.lstm(x.unsqueeze(1))[0].squeeze(1)) if i == 1 else x


RIGHT = [
    BatchNorm,
    BatchNormTwice,
    DiscardedBatchNorm,
    InstanceNorm,
    SpectralNorm,
    OldSpectralNorm,
    RunningScale,
    ReplacedScale,
    WrittenThenReplaced,
    DataOfABuffer,
    DataOfABufferInUse,
    WrittenThroughData,
    MomentumEncoder,
    Annealed,
    Previous,
    KeepsTheBatch,
    Swapped,
    ReplacedThenSwapped,
    PartOfAnother,
    ViewOfAnother,
    WrittenInBackward,
    ViewsWrittenInBackward,
    SharedLayers,
    Aliases,
    CachedTable,
    CachedElsewhere,
    PlainTensor,
    Converts,
    MakesModules,
    ComplexNumbers,
    CompiledModules,
    Lstm,
]


@pytest.mark.in_ci(
    "BatchNorm-gpipe, v, recompute",
    "BatchNormTwice-gpipe, v, recompute",
    "DiscardedBatchNorm-gpipe, v, recompute",
    "InstanceNorm-gpipe, v, recompute",
    "SpectralNorm-gpipe, v, recompute",
    "OldSpectralNorm-gpipe, v, recompute",
    "RunningScale-gpipe, v, recompute",
    "ReplacedScale-gpipe, v, recompute",
    "WrittenThenReplaced-gpipe, v, recompute",
    "DataOfABuffer-gpipe, v, recompute",
    "DataOfABufferInUse-gpipe, v, recompute",
    "WrittenThroughData-gpipe, v, recompute",
    "MomentumEncoder-gpipe, v, recompute",
    "Annealed-gpipe, v, recompute",
    "Previous-gpipe, v, recompute",
    "KeepsTheBatch-gpipe, v, recompute",
    "Swapped-gpipe, v, recompute",
    "ReplacedThenSwapped-gpipe, v, recompute",
    "PartOfAnother-gpipe, v, recompute",
    "ViewOfAnother-gpipe, v, recompute",
    "WrittenInBackward-gpipe, v, recompute",
    "ViewsWrittenInBackward-gpipe, v, recompute",
    "SharedLayers-gpipe, v, recompute",
    "Aliases-gpipe, v, recompute",
    "CachedTable-gpipe, v, recompute",
    "CachedElsewhere-gpipe, v, recompute",
    "PlainTensor-gpipe, v, recompute",
    "Converts-gpipe, v, recompute",
    "MakesModules-gpipe, v, recompute",
    "ComplexNumbers-gpipe, v, recompute",
)
@pytest.mark.parametrize(
    "options",
    slow_except(
        ["zb-h1, offload", "gpipe, v, recompute"], "gpipe, v, recompute", variations=["zb-h1, offload"]
    ),
)
@pytest.mark.parametrize(
    "model",
    slow_except(
        RIGHT,
        BatchNorm,
        ReplacedScale,
        MomentumEncoder,
        Previous,
        ViewsWrittenInBackward,
        Aliases,
        DataOfABufferInUse,
        MakesModules,
        ComplexNumbers,
    ),
)
def test_equals_eager(model, options):
    with captured_once(model):
        assert_equals_eager(model, rows, ranks=2, **OPTIONS[options])


@pytest.mark.parametrize("model", slow_except([MomentumEncoder, Annealed, BatchNorm], BatchNorm))
def test_a_saved_pipeline_goes_on_from_its_buffers(model, tmp_path):
    torch.manual_seed(0)
    built, expected = model(), model()
    expected.load_state_dict(built.state_dict())
    data = rows(6)
    pipe = fxpipe.compile(built, rows(2), ranks=2, microbatches=3, schedule="zb-h1")
    pipe.run_local(data)
    pipe.save(tmp_path / "saved")
    eager_step(expected, data, 3, None)
    loss, grads = eager_step(expected, data, 3, None)
    result = fxpipe.load(tmp_path / "saved").run_local(data, step=1)
    assert relative_error(result.loss, loss) <= LIMIT
    assert too_far(result.grads, grads, LIMIT) == {}


@pytest.mark.slow
def test_caches_outside_of_modules_hold_no_fake_tensors():
    _ramp.cache_clear()
    model = CachedElsewhere()
    fxpipe.compile(model, rows(2), ranks=2, microbatches=2, schedule="1f1b")
    assert model.rotate.table is None
    assert type(_ramp(WIDTH)) is torch.Tensor
    model(*rows(2)).backward()


@pytest.mark.slow
def test_one_microbatch_at_a_time():
    """A new value that is a view of another buffer is stored before or after that one, with the
    same result."""
    for model in (Swapped, PartOfAnother, ViewOfAnother):
        assert_equals_eager(model, rows, ranks=2, microbatches=1, schedule="1f1b")


def refused(model: type[nn.Module], **options) -> str:
    """The message of the error; the model must be as it was."""
    built = model()
    before = attributes(built)
    with pytest.raises(fxpipe.FxpipeError) as caught:
        fxpipe.compile(built, rows(2), ranks=2, microbatches=2, **{"schedule": "1f1b", **options})
    assert attributes(built) == before
    return str(caught.value)


def test_a_buffer_that_grows():
    class Grows(Scale):
        def between(self, x, i):
            if i == 1:
                self.scale = torch.cat([self.scale, self.scale])
            return x

    message = refused(Grows)
    assert "'scale'" in message
    assert "(8,)" in message
    assert "(16,)" in message


class SetByTheFirstBatch(Layers):
    """An activation norm: its trained shift starts as the mean of the first batch."""

    def prepare(self):
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("is_set", torch.tensor(False))

    def between(self, x, i):
        if i == 2 and not self.is_set:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.is_set.fill_(True)
        return x + self.shift if i == 2 else x


def test_a_trained_parameter_that_the_first_batch_sets():
    message = refused(SetByTheFirstBatch)
    assert "the parameter 'shift'" in message
    assert "run the model on one batch before you compile it" in message

    def build() -> nn.Module:
        model = SetByTheFirstBatch()
        model(*rows(4))
        return model

    assert_equals_eager(build, rows, ranks=2, steps=1, schedule="1f1b")


def test_a_trained_parameter_that_the_forward_moves():
    class Clamped(Layers):
        def between(self, x, i):
            if i == 0:
                self.layers[4].weight.data = self.layers[4].weight.data.clamp(-1, 1)
            return x

    message = refused(Clamped)
    assert "the parameter 'layers.4.weight'" in message
    assert "test_capture_state.py:" in message


def test_data_of_another_shape():
    class Shrinks(Scale):
        def between(self, x, i):
            self.scale.data = self.scale[:4]
            return x

    message = refused(Shrinks)
    assert ".data" in message
    assert "shape" in message


def test_a_parameter_that_is_replaced():
    class Replaces(Layers):
        def between(self, x, i):
            self.layers[1].bias = nn.Parameter(self.layers[1].bias * 2)
            return x

    assert "'layers.1.bias'" in refused(Replaces)


def test_a_buffer_of_two_names_of_which_one_is_replaced():
    class TwoNames(Scale):
        def prepare(self):
            super().prepare()
            self.register_buffer("again", self.scale)

        def between(self, x, i):
            if i == 1:
                self.scale = self.scale * 0.9
            return x * self.again

    assert "'scale'" in refused(TwoNames)


@pytest.mark.slow
def test_a_view_of_a_buffer_that_changes():
    class View(Layers):
        def prepare(self):
            self.register_buffer("table", torch.ones(2, WIDTH))
            self.register_buffer("row", self.table[0])

        def between(self, x, i):
            y = x * self.row.clone()
            if i == 1:
                self.table.mul_(0.9)
            return y

    message = refused(View)
    assert "'table'" in message
    assert "'row'" in message
    assert "share memory" in message


def test_two_parameters_in_the_same_memory():
    class Shared(Layers):
        def prepare(self):
            earlier, later = torch.rand(2, WIDTH, WIDTH).unbind()
            self.again, self.layers[3].weight = nn.Parameter(later), nn.Parameter(later)
            self.other, self.layers[0].weight = nn.Parameter(earlier), nn.Parameter(earlier)

    # of several pairs the first of the model, wherever it lies in memory
    assert "'again' and 'layers.3.weight' share memory" in refused(Shared)


@pytest.mark.slow
def test_a_buffer_that_backward_writes_and_forward_reads():
    class Both(Scale):
        def between(self, x, i):
            return _Halves.apply(x * self.scale.clone(), self.scale) if i == 1 else x

    message = refused(Both)
    assert "The backward writes to the buffer 'scale'" in message


def test_a_trainable_tensor_of_no_module():
    class Hidden(Layers):
        def prepare(self):
            self.hidden = [nn.Linear(WIDTH, WIDTH)]

        def between(self, x, i):
            return self.hidden[0](x) if i == 1 else x

    assert "registers" in refused(Hidden)


class Closure(Layers):
    def prepare(self):
        weight = self.layers[3].weight
        self.product = lambda x: x @ weight

    def between(self, x, i):
        return self.product(x) if i == 1 else x


class Bound(Layers):
    def prepare(self):
        self.product = functools.partial(torch.mul, self.layers[3].bias.detach())

    def between(self, x, i):
        return self.product(x) if i == 1 else x


def test_a_parameter_from_a_closure():
    assert_equals_eager(Closure, rows, ranks=2, schedule="zb-h1")
    assert "'layers.3.bias' by another way" in refused(Bound)


@pytest.mark.slow
def test_split_points_between_reading_and_writing_a_buffer():
    class Apart(Scale):
        def between(self, x, i):
            if i == 0:
                x = x * self.scale.clone()
            if i == 4:
                self.scale.add_(x.detach().mean(0))
            return x

    message = refused(Apart, split_points=["layers.3"])
    assert "'scale'" in message
    assert "stage 0" in message
    assert "stage 1" in message
    assert_equals_eager(Apart, rows, ranks=2, schedule="1f1b", split_points=["layers.5"])
    assert_equals_eager(Apart, rows, ranks=2, schedule="zb-h1")


@pytest.mark.slow
def test_a_batch_norm_that_is_called_all_along():
    class Everywhere(BatchNorm):
        def between(self, x, i):
            return self.norm(x)

    message = refused(Everywhere, schedule="1f1b", stages_per_rank=4)
    assert "norm.running_mean" in message
    assert "called all along" in message


def test_a_scripted_child():
    class Scripted(Layers):
        def prepare(self):
            self.layers[2] = torch.jit.script(self.layers[2])

    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit"):  # by the version of torch
        message = refused(Scripted)
    assert "'layers.2'" in message
    assert "TorchScript" in message


def log_of_distance(x: torch.Tensor) -> torch.Tensor:
    return ((x - 0.1).abs() + 1.0).log()


def test_a_scripted_function():
    """TorchScript has other ops for its second run, which is no change of the model."""
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit"):
        scripted = torch.jit.script(log_of_distance)

    class CallsScript(Layers):
        def between(self, x, i):
            return scripted(x) if i == 2 else x

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The forward runs other ops")
        assert_equals_eager(CallsScript, rows, ranks=2, schedule="1f1b")


def test_data_parallel():
    built = nn.DataParallel(Layers())
    with pytest.raises(fxpipe.CaptureError, match=r"DataParallel.*\.module"):
        fxpipe.compile(built, rows(2), ranks=2, microbatches=2)


def test_a_failing_forward_leaves_the_model_alone():
    class Fails(CachedTable):
        def between(self, x, i):
            x = super().between(x, i)
            if i == 4:
                self.register_buffer("late", x)
                raise ValueError("no")
            return x

    assert "no" in refused(Fails)


# -- Python state -----------------------------------------------------------------------------------------


def warned(model: type[nn.Module]) -> str:
    with pytest.warns(UserWarning, match="program") as caught:
        fxpipe.compile(model(), rows(2), ranks=2, microbatches=2, schedule="1f1b")
    return "\n".join(str(w.message) for w in caught)


def test_a_count_in_python():
    class Counts(Layers):
        of_layer = {  # the line of its lambda alone is no statement
            "first": lambda layer: layer,
        }["first"]

        def prepare(self):
            self.steps = 0

        def between(self, x, i):
            if i == 1:
                self.steps += 1
            return x * self.steps

    message = warned(Counts)
    assert "the model's steps" in message
    assert "test_capture_state.py:" in message


def test_a_list_that_changes():
    class Moves(Layers):
        def prepare(self):
            self.queue = [1, 2, 3]

        def between(self, x, i):
            if i == 0:
                self.queue.append(self.queue.pop(0))
            return x * self.queue[0]

    assert "the model's queue" in warned(Moves)


def test_a_result_that_later_steps_read():
    class Averages(Layers):
        def prepare(self):
            self.mean = None

        def between(self, x, i):
            if i == 1:
                m = x.detach().mean(0)
                self.mean = m if self.mean is None else 0.9 * self.mean + 0.1 * m
                return x - self.mean
            return x

    message = refused(Averages)
    assert "keeps a result in the model's mean," in message
    assert "make it a buffer" in message
    assert "test_capture_state.py:" in message


@pytest.mark.parametrize("first", [0.0, torch.zeros(()), []], ids=["number", "tensor", "list"])
def test_a_result_that_a_script_would_read_after_a_step(first):
    """It would see what is there before the first one."""

    class Leaves(Layers):
        def prepare(self):
            self.penalty = first

        def between(self, x, i):
            if isinstance(first, list):
                self.penalty.append(x.detach().mean())
            else:
                self.penalty = x.square().mean()
            return x

    message = warned(Leaves)
    assert "leaves a tensor in the model's penalty" in message
    assert 'outputs=["name"]' in message


def test_records_and_tables_are_no_state():
    class Records(Layers):
        def prepare(self):
            self.last, self.table = None, None

        def between(self, x, i):
            if self.table is None:
                self.table = torch.arange(WIDTH, dtype=x.dtype, device=x.device) / WIDTH
            self.last = x
            return x * self.table

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe = fxpipe.compile(Records(), rows(2), ranks=2, microbatches=2, schedule="1f1b")
    assert pipe.run_local(rows(4)).loss > 0


def test_a_seed_in_the_forward():
    class Seeds(Layers):
        def between(self, x, i):
            if i == 1:
                torch.manual_seed(3)
            return x + torch.rand(WIDTH)

    assert "seeds torch's random numbers" in warned(Seeds)


def test_random_numbers_of_python_and_numpy():
    class Draws(Layers):
        def between(self, x, i):
            return x * (1 + random.random() + np.random.rand()) if i == 1 else x

    python, other = random.getstate(), np.random.get_state()[1].tolist()
    message = warned(Draws)
    assert "Python's random numbers" in message
    assert "numpy's random numbers" in message
    assert random.getstate() == python
    assert np.random.get_state()[1].tolist() == other


def test_a_schedule_that_takes_microbatches_out_of_order(tmp_path):
    file = tmp_path / "odd.txt"
    file.write_text("F0.1 F0.0 BW0.0 BW0.1\nF1.1 F1.0 BW1.0 BW1.1\n")
    message = refused(RunningScale, schedule=file)
    assert "F0.1 before F0.0" in message
    assert "'scale'" in message


@pytest.mark.slow
def test_checkpointed_batch_norm():
    class Checkpointed(BatchNorm):
        def between(self, x, i):
            return torch.utils.checkpoint.checkpoint(self.norm, x, use_reentrant=False) if i == 2 else x

    message = refused(Checkpointed)
    assert "'norm.running_mean'" in message
    assert "recompute=" in message


# -- tensors that are registered late, shared, resized, or of classes of their own -------------------------


class MakesALayer(Layers):
    def prepare(self):
        self.target = None

    def between(self, x, i):
        if self.target is None:
            self.target = copy.deepcopy(self.layers[0]).requires_grad_(False)
        return x + self.target(x) if i == 2 else x


class MakesAnAverage(Layers):
    def prepare(self):
        self.register_buffer("mean", None)

    def between(self, x, i):
        if i == 2:
            m = x.detach().mean(0)
            self.mean = m if self.mean is None else self.mean * 0.9 + m * 0.1
            return x - self.mean
        return x


class MakesACounter(Layers):
    def between(self, x, i):
        if i == 2:
            if not hasattr(self, "decay"):
                self.register_buffer("decay", torch.ones(()))
            self.decay.mul_(0.9)
            return x * self.decay
        return x


@pytest.mark.parametrize(
    ("model", "name"), [(MakesALayer, "target.weight"), (MakesAnAverage, "mean"), (MakesACounter, "decay")]
)
def test_state_that_the_first_forward_makes(model, name):
    message = refused(model)
    assert f"'{name}'" in message
    assert "run the model on one batch before you compile it" in message

    def build() -> nn.Module:
        built = model()
        built(*rows(4))
        return built

    assert_equals_eager(build, rows, ranks=2, schedule="1f1b")


def test_a_mask_that_the_first_forward_makes():
    model, data = MaskOfTheFirstForward(), rows(6)
    pipe = fxpipe.compile(model, rows(2), ranks=2, microbatches=3, schedule="zb-h1")
    result = pipe.run_local(data)
    assert model.mask is None
    loss, grads = eager_step(model, data, 3, None)
    assert relative_error(result.loss, loss) <= LIMIT
    assert too_far(result.grads, grads, LIMIT) == {}


class ViewOfAParameter(Layers):
    def prepare(self):
        self.view = self.layers[1].weight.t()

    def between(self, x, i):
        return x @ self.view if i == 2 else x


def test_a_view_of_a_parameter_that_was_made_before():
    assert "make views of it in the forward" in refused(ViewOfAParameter)


@pytest.mark.variation
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
def test_observers_that_get_their_shape_from_the_first_batch():
    torch.set_default_dtype(torch.float32)

    def build(*runs: int, version: int = 1) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        model.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86", version)
        torch.ao.quantization.prepare_qat(model, inplace=True)
        for count in runs:
            model(torch.ones(count, WIDTH))
        return model

    options = {"loss_fn": lambda output, batch: output.square().mean(), "ranks": 2, "schedule": "1f1b"}
    data = (torch.linspace(-1, 1, 6 * WIDTH).view(6, WIDTH),)
    with pytest.raises(fxpipe.CaptureError, match=r"min_val', which is empty .*Run the model on one batch"):
        fxpipe.compile(build(), (data[0][:2],), microbatches=3, **options)
    for runs in ((), (2,)):
        with pytest.raises(fxpipe.CaptureError, match=r"one batch before you compile it.* version=1, whose"):
            fxpipe.compile(build(*runs, version=0), (data[0][:2],), microbatches=3, **options)
    pipe = fxpipe.compile(build(2), (data[0][:2],), microbatches=3, **options)
    loss, grads = eager_step(build(2), data, 3, options["loss_fn"])
    result = pipe.run_local(data)
    assert relative_error(result.loss, loss) < 1e-5
    assert too_far(result.grads, grads, 1e-5) == {}


class Doubled(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.Tensor.mul else result


class Named(torch.Tensor):
    pass


class OwnTensors(Layers):
    """A buffer, a constant, or a tensor of the forward, of a class with ops of its own."""

    kind = "buffer"

    def prepare(self):
        scale = torch.ones(WIDTH).as_subclass(Doubled)
        if self.kind == "buffer":
            self.register_buffer("scale", scale)
        self.scale = scale

    def between(self, x, i):
        if i == 2:
            return x * self.scale if self.kind != "forward" else x.as_subclass(Named) * 2
        return x


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("buffer", "as_subclass(torch.Tensor)"),
        ("constant", "as_subclass(torch.Tensor)"),
        ("forward", "Leave out"),
    ],
)
def test_tensors_of_other_classes(kind, remedy):
    assert remedy in refused(type("Own", (OwnTensors,), {"kind": kind}))


def test_an_example_of_another_class():
    with pytest.raises(fxpipe.CaptureError, match="'0' is a Doubled"):
        fxpipe.compile(Layers(), (rows(2)[0].as_subclass(Doubled),), ranks=2, microbatches=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_an_example_of_another_dtype(dtype):
    with pytest.raises(fxpipe.CaptureError, match=r"addmm.* gets tensors of .* \(module 'layers\.0'"):
        fxpipe.compile(Layers(), (rows(2)[0].to(dtype),), ranks=2, microbatches=2)


def test_classes_of_another_dtype():
    class Classifies(Layers):
        def forward(self, x, labels):
            for layer in self.layers:
                x = layer(x)
            return nn.functional.cross_entropy(x, labels)

    data = (*rows(2), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(fxpipe.CaptureError, match=r"torch\.int32.*Give them as torch\.int64"):
        fxpipe.compile(Classifies(), data, ranks=2, microbatches=2)


def test_shapes_that_do_not_fit_are_not_logged(caplog):
    class Odd(Layers):
        def between(self, x, i):
            return x @ torch.ones(5, 3)

    assert "same reduction dim" in refused(Odd)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


# -- operators that a program cannot hold -----------------------------------------------------------------


@pytest.mark.slow
def test_torch_cond():
    class Branches(Layers):
        def between(self, x, i):
            return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 3, (x,)) if i == 1 else x

    message = refused(Branches)
    assert "torch.cond" in message
    assert "test_capture_state.py:" in message
    Branches()(*rows(2)).backward()  # what compiles within it has not been left half done


def test_nested_tensors():
    class Nested(Layers):
        def between(self, x, i):
            return torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged).to_padded_tensor(0.0)

    assert "nested" in refused(Nested)


@pytest.mark.slow
def test_sparse_tensors():
    """The backward fails, where no line of the model runs."""

    class Sparse(Layers):
        def between(self, x, i):
            if i != 2:
                return x
            places = torch.arange(WIDTH).expand(2, WIDTH)
            weight = torch.sparse_coo_tensor(places, self.layers[0].bias, (WIDTH, WIDTH))
            return torch.sparse.mm(weight, x.T).T

    Sparse()(*rows(2)).backward()
    message = refused(Sparse)
    assert "sparse" in message
    assert "index_add" in message
    assert "test_capture_state.py:" in message


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient[:, 1:]


@pytest.mark.slow
def test_a_backward_that_fails():
    class Fails(Layers):
        def between(self, x, i):
            return _Wrong.apply(x) if i == 2 else x

    message = refused(Fails)
    assert "invalid gradient" in message
    assert "test_capture_state.py:" in message


@torch.library.custom_op("fxpipe_tests::increment", mutates_args={"x"})
def increment(x: torch.Tensor) -> None:
    x.add_(1)


increment.register_fake(lambda x: None)


@pytest.mark.slow
def test_a_custom_op_that_writes():
    class Writes(Scale):
        def between(self, x, i):
            increment(self.scale)
            return x * self.scale.clone()

    message = refused(Writes)
    assert "fxpipe_tests.increment" in message
    assert "test_capture_state.py:" in message


class CallsBackward(Layers):
    def between(self, x, i):
        if i == 2:
            x.sum().backward(retain_graph=True)
        return x


class CallsBackwardOfItsInputs(Layers):
    def between(self, x, i):
        if i != 2:
            return x
        y = x.detach().requires_grad_()
        torch.tanh(self.layers[0](y)).sum().backward(inputs=[y])
        return x + y.grad


@pytest.mark.slow
def test_backward_in_the_forward():
    assert "calls backward(), which adds to the gradient of 'layers.0.weight'" in refused(CallsBackward)
    assert_equals_eager(CallsBackwardOfItsInputs, rows, ranks=2, schedule="zb-h1")


class AfterAccumulation(Layers):
    def prepare(self):
        self.layers[1].weight.register_post_accumulate_grad_hook(lambda p: None)


def test_a_hook_for_accumulated_gradients():
    assert "'layers.1.weight' has a hook for after its gradient" in refused(AfterAccumulation)


class WritesToAGlobal(Layers):
    def between(self, x, i):
        return x * TABLE.mul_(0.5) if i == 0 else x


class WritesToItsView(Layers):
    def between(self, x, i):
        if i == 0:
            TABLE[1:] = 0.5
        return x * TABLE


TABLE = torch.ones(WIDTH, dtype=torch.float64)


@pytest.mark.parametrize("model", [WritesToAGlobal, WritesToItsView])
def test_a_tensor_of_no_module_that_is_written(model):
    with pytest.raises(fxpipe.CaptureError, match=r"writes to a tensor that is no buffer .*test_capture"):
        fxpipe.compile(model(), rows(2), ranks=2, microbatches=3, schedule="zb-h1")
    assert torch.equal(TABLE, torch.ones(WIDTH))


class RunningLoss(nn.Module):
    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.register_buffer("mean", torch.ones(()))

    def forward(self, output, batch):
        if self.replaces:
            self.mean = self.mean * 0.9 + output.detach()
        else:
            self.mean.mul_(0.9).add_(output.detach())
        return output / self.mean


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("closed_over", [False, True])
@pytest.mark.slow
def test_a_loss_function_with_a_buffer_that_it_changes(replaces, closed_over):
    loss = RunningLoss(replaces)
    before = attributes(loss)
    loss_fn = (lambda output, batch: loss(output, batch)) if closed_over else loss
    with pytest.raises(fxpipe.CaptureError, match="make it a buffer"):
        fxpipe.compile(Layers(), rows(2), loss_fn=loss_fn, ranks=2, microbatches=3, schedule="zb-h1")
    assert attributes(loss) == before


class RandomFrom(Layers):
    def prepare(self):
        self.register_buffer("drawn", torch.zeros(WIDTH))

    def between(self, x, i):
        return x + self.drawn.random_(3, 5) if i == 1 else x


def test_integers_drawn_in_place():
    """The op's overload is called "from", which is no name in Python."""
    model = RandomFrom()
    pipe = fxpipe.compile(model, rows(2), ranks=2, microbatches=3, schedule="zb-h1")
    drawn = []
    for step in range(4):
        pipe.run_local(rows(6), step=step)
        drawn += model.drawn.tolist()
    assert set(drawn) == {3.0, 4.0}


COUNTS = {
    "parameters": (lambda output: output.exp(), "depends on parameters"),
    "vector": (lambda output: torch.ones(3), "is no number, but shape (3,)"),
}


@pytest.mark.parametrize("count", COUNTS)
def test_a_count_that_is_none(count):
    of_output, message = COUNTS[count]
    options = {"ranks": 2, "microbatches": 3, "loss_fn": lambda output, batch: (output, of_output(output))}
    with pytest.raises(fxpipe.CaptureError) as error:
        fxpipe.compile(Layers(), rows(2), **options)
    assert message in str(error.value)


def test_a_count_of_zero():
    """As in eager: a batch without a single label has no mean."""
    pipe = fxpipe.compile(
        Layers(), rows(2), ranks=2, microbatches=3, schedule="gpipe",
        loss_fn=lambda output, batch: (output * 0, (batch[0] > 100).sum()),
    )  # fmt: skip
    assert pipe.run_local(rows(6)).loss.isnan()


def test_a_complex_loss():
    with pytest.raises(fxpipe.CaptureError, match="The loss is complex"):
        fxpipe.compile(Layers(), rows(2), ranks=2, microbatches=3, loss_fn=lambda output, batch: output * 1j)


class Expanded(Layers):
    def prepare(self):
        self.register_buffer("scale", torch.ones(1).expand(WIDTH))

    def between(self, x, i):
        if i == 1:
            self.scale = self.scale * 0.9 + x.detach().mean(0)
        return x


def test_an_expanded_buffer_that_is_replaced():
    assert "the buffer 'scale', which is expanded" in refused(Expanded)


class WritesByStrides(Layers):
    def between(self, x, i):
        y = x * 1
        y.t_().diagonal().mul_(2)
        y.as_strided((2, 2), (WIDTH, 1)).add_(1)
        return x + y.sum()


@pytest.mark.slow
def test_writes_that_cannot_be_followed():
    assert "cannot be followed (the model itself" in refused(WritesByStrides)


class Attributes(Layers):
    """Reads what hangs on a parameter."""

    def prepare(self):
        self.layers[1].weight.factor = 3.0

    def between(self, x, i):
        return x * getattr(self.layers[i].weight, "factor", 1.0)


def test_attributes_of_parameters():
    assert_equals_eager(Attributes, rows, ranks=2, schedule="zb-h1")


class GradientOfItsInput(Layers):
    def forward(self, x):
        loss = super().forward(x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()


def test_an_input_that_requires_a_gradient():
    """Of what an equation asks of its solution (physics-informed networks)."""

    def batch(count: int) -> tuple[torch.Tensor]:
        return (torch.randn(count, WIDTH, requires_grad=True),)

    assert_equals_eager(GradientOfItsInput, batch, ranks=2, schedule="zb-h1", recompute="full")


class NeverRead(Layers):
    """The rank that writes the buffer has no other use for buffers."""

    def prepare(self):
        self.register_buffer("last", torch.zeros(WIDTH, WIDTH))

    def between(self, x, i):
        if i == 2:
            self.last = self.copied(self.layers[2].weight.detach())
            return x + x @ self.last
        return x

    def copied(self, weight):
        return weight.clone()


class MemoryOfAParameter(NeverRead):
    def copied(self, weight):
        return weight


def test_a_buffer_that_is_made_of_a_parameter():
    assert_equals_eager(NeverRead, rows, ranks=2, schedule="zb-h1")
    assert "gives the buffer 'last' the memory of the parameter 'layers.2.weight'" in refused(
        MemoryOfAParameter
    )


class MemoryOfABuffer(Layers):
    def prepare(self):
        self.register_buffer("one", torch.zeros(WIDTH))
        self.register_buffer("other", torch.ones(WIDTH))

    def between(self, x, i):
        if i == 1:
            x = x + self.one.clone()
            self.one = self.other.view(-1)
            self.other.mul_(0.5)
        return x


@pytest.mark.slow
def test_a_buffer_that_is_made_of_another():
    assert "'one' and 'other' the same memory and writes to it" in refused(MemoryOfABuffer)


class Counted(Layers):
    """An op of constants whose shape hangs on their values, in a model that writes in place."""

    def between(self, x, i):
        x = x * 1
        x += torch.bincount(torch.tensor([1, 2, 2]), minlength=WIDTH)
        return x


@pytest.mark.slow
def test_shapes_from_constants_beside_writes():
    assert_equals_eager(Counted, rows, ranks=2, schedule="zb-h1")
