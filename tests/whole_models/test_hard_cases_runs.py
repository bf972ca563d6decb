"""Random numbers, mixed precision, memory layouts and repeated steps, on the zoo's models."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from zoo import (
    CASES,
    Case,
    Chain,
    Checkpointed,
    Dropout,
    Shape,
    Transformer,
    built_and_compiled,
    check_against_eager,
    compiled,
    cut,
    eager,
    images,
    numbers,
    relative_error,
    sequences,
    too_far,
)

import fxpipe

pytestmark = pytest.mark.slow

RANDOM = {
    "dropout": Case(Dropout, numbers),
    "attention_dropout": Case(lambda: Transformer(0.2), sequences),
    "checkpointed_dropout": Case(lambda: Checkpointed(0.4), numbers),
}
SHAPES = [Shape(1), Shape(2, "gpipe", 2, "v"), Shape(4, "zb-h1")]


# -- random numbers -------------------------------------------------------------------------------------


@pytest.mark.in_ci("checkpointed_dropout")
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_depend_on_no_rank_and_no_schedule(name):
    case = RANDOM[name]
    batch = case.data(4)
    first = built_and_compiled(case, 4, SHAPES[0])[1].run_local(batch, step=3)
    assert first.loss != eager(case.build().eval(), batch, 4).loss
    for shape in SHAPES[1:]:
        result = built_and_compiled(case, 4, shape)[1].run_local(batch, step=3)
        assert relative_error(result.loss, first.loss) <= 1e-14, shape
        assert too_far(result.grads, first.grads, 1e-13) == {}, shape


@pytest.mark.in_ci("dropout", "checkpointed_dropout")
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", RANDOM)
def test_gradients_are_those_of_the_drawn_numbers(name):
    """Along a random direction, against a central difference of the loss of the same step."""
    case = RANDOM[name]
    model, batch = case.build(), case.data(2)
    pipe = compiled(case, model, 2, Shape(2, "zb-h1"))
    grads = pipe.run_local(batch).grads
    ways = {n: torch.randn_like(p) for n, p in model.named_parameters()}

    def moved(length: float) -> torch.Tensor:
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.add_(ways[n], alpha=length)
        return pipe.run_local(batch).loss

    length = 1e-6
    difference = moved(length) - moved(-2 * length)
    slope = sum((grads[n] * ways[n]).sum() for n in grads)
    assert slope.item() == pytest.approx(difference.item() / (2 * length), rel=1e-6)


@pytest.mark.variation
@pytest.mark.usefixtures("double")
def test_a_repeated_forward_draws_what_the_first_one_drew():
    class NotRepeated(Checkpointed):
        def forward(self, x, y):
            for i in range(0, len(self.blocks), 2):
                x = self.pair(x, i)
            return F.mse_loss(x, y)

    case, plain = RANDOM["checkpointed_dropout"], Case(lambda: NotRepeated(0.4), numbers)
    for shape in (Shape(1), Shape(2, "zb-h1"), Shape(4, "gpipe")):
        repeated = built_and_compiled(case, 3, shape)[1].run_local(case.data(3))
        expected = built_and_compiled(plain, 3, shape)[1].run_local(case.data(3))
        assert relative_error(repeated.loss, expected.loss) <= 1e-14
        assert too_far(repeated.grads, expected.grads, 1e-13) == {}


@pytest.mark.usefixtures("double")
def test_random_numbers_differ_between_steps_seeds_and_microbatches():
    case = RANDOM["dropout"]
    model, one = case.build(), case.data(1)
    twice = {name: torch.cat([x, x]) for name, x in one.items()}
    single, other_seed = compiled(case, model, 1, Shape(2)), compiled(case, model, 1, Shape(2, seed=1))
    double = compiled(case, model, 2, Shape(2)).run_local(twice).loss
    losses = [single.run_local(one, step=s).loss.item() for s in (0, 1, 2)]
    losses += [other_seed.run_local(one).loss.item(), 2 * double.item() - losses[0]]
    assert len(set(losses)) == 5
    assert single.run_local(one, step=1).loss.item() == losses[1]


@pytest.mark.usefixtures("double")
def test_torch_generator_is_left_alone():
    case = RANDOM["dropout"]
    model, batch = case.build(), case.data(2)
    example, before = case.example(), torch.get_rng_state()
    fxpipe.compile(model, example, ranks=2, microbatches=2).run_local(batch)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("double")
def test_eval_mode_draws_nothing():
    check_against_eager(Case(lambda: Transformer(0.2).eval(), sequences), 2, Shape(2))


# -- mixed precision --------------------------------------------------------------------------------------


class Mixed(Chain):
    def forward(self, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            for block in self.blocks:
                x = block(x)
        return F.mse_loss(x.float(), y)


# Both round to bfloat16 in the same places. The sums in between are taken in another order at most, which
# may turn the rounding of single values: by 2^-8 of their size, far less of a whole gradient's.
ROUNDED = 2**-8


@pytest.mark.parametrize("shape", [Shape(2, "gpipe"), Shape(4, "zb-h1"), Shape(2, "1f1b", 2, "v")], ids=str)
def test_autocast_in_the_forward(shape):
    check_against_eager(Case(Mixed, numbers), 4, shape, ROUNDED)


def test_autocast_around_compile():
    case = Case(Chain, numbers)
    model, batch = case.build(), case.data(4)
    with torch.autocast("cpu", torch.bfloat16):
        pipe = compiled(case, model, 4, Shape(2, "zb-h1"))
    result = pipe.run_local(batch)
    expected = eager(Case(Mixed, numbers).build(), batch, 4)
    assert relative_error(result.loss, expected.loss) <= ROUNDED
    assert too_far(result.grads, expected.grads, ROUNDED) == {}


def test_autocast_computes_and_sends_in_bfloat16():
    case = Case(Mixed, numbers)
    pipe = compiled(case, case.build(), 4, Shape(2))
    used = {n.meta["val"].dtype for n in pipe.graph.nodes if "addmm" in str(n.target)}
    assert torch.bfloat16 in used
    assert pipe.run_local(case.data(4)).loss.dtype == torch.float32


def test_bfloat16_model():
    case = Case(lambda: Chain().bfloat16(), lambda rows: {k: v.bfloat16() for k, v in numbers(rows).items()})
    model, batch = case.build(), case.data(4)
    result = compiled(case, model, 4, Shape(2, "zb-h1")).run_local(batch)
    exact = eager(model.float(), {k: v.float() for k, v in batch.items()}, 4)
    assert {g.dtype for g in result.grads.values()} == {torch.bfloat16}
    assert too_far({n: g.float() for n, g in result.grads.items()}, exact.grads, 0.05) == {}


# -- memory layouts ---------------------------------------------------------------------------------------


@pytest.mark.in_ci("unet", "sliced")
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", ["unet", "sliced", "encoder_decoder"])
def test_batch_laid_out_unlike_the_example(name):
    case = CASES[name]
    batch = case.data(4)
    turned = {k: v.transpose(0, -1).contiguous().transpose(0, -1) for k, v in batch.items()}
    pipe = compiled(case, case.build(), 4, Shape(4, "zb-h1"))
    expected, result = pipe.run_local(batch), pipe.run_local(turned)
    assert relative_error(result.loss, expected.loss) <= 1e-12
    assert too_far(result.grads, expected.grads) == {}


@pytest.mark.usefixtures("double")
def test_example_in_channels_last():
    def batch(rows):
        return {k: v.contiguous(memory_format=torch.channels_last) for k, v in images(rows).items()}

    check_against_eager(Case(CASES["channels_last"].model, batch), 4, Shape(4, "zb-h1"))
    check_against_eager(Case(CASES["unet"].model, batch), 4, Shape(4, "zb-h1"))


@pytest.mark.in_ci("sum_and_count")
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    "name", ["channels_last", "tied_thrice", "reassigned_buffers", "in_place", "sum_and_count"]
)
def test_saved_and_loaded_gives_the_same(name, tmp_path):
    case = CASES[name]
    model, batch = case.build(), case.data(2)
    pipe = compiled(case, model, 2, Shape(2, "zb-h1"))
    pipe.save(tmp_path / "pipe")
    loaded, result = fxpipe.load(tmp_path / "pipe").run_local(batch), pipe.run_local(batch)
    assert relative_error(loaded.loss, result.loss) <= 1e-14
    assert too_far(loaded.grads, result.grads, 1e-13) == {}


# -- hooks -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("double")
def test_hooks_of_parameters_and_modules_are_called():
    case = CASES["tied_thrice"]
    model, batch = case.build(), case.data(3)
    model.embedding.weight.register_hook(lambda gradient: gradient * 0.5)
    model.blocks[3].inner.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    model.blocks[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))
    model.blocks[3].register_forward_hook(lambda module, inputs, output: output * 2)
    result = compiled(case, model, 3, Shape(4, "zb-h1")).run_local(batch)
    for microbatch in cut(batch, 3):
        (model(**microbatch) / 3).backward()
    assert too_far(result.grads, {n: p.grad for n, p in model.named_parameters()}) == {}


# -- one step after another -------------------------------------------------------------------------------


@pytest.mark.in_ci("2-1f1b-v-batch_norm", "4-zb-h1-reassigned_buffers", "4-zb-h1-keeps_input")
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", ["batch_norm", "reassigned_buffers", "keeps_input"])
@pytest.mark.parametrize("shape", [Shape(2, "1f1b", 2, "v"), Shape(4, "zb-h1")], ids=["2-1f1b-v", "4-zb-h1"])
def test_buffers_go_on_from_step_to_step(name, shape):
    case = CASES[name]
    model, batch = case.build(), case.data(3)
    pipe = compiled(case, model, 3, shape)
    expected = model
    for _ in range(3):
        expected = eager(expected, batch, 3).model
    results = [pipe.run_local(batch) for _ in range(3)]
    buffers = dict(model.named_buffers())
    assert too_far(buffers, dict(expected.named_buffers())) == {}
    assert [results[0].grads.keys()] * 3 == [r.grads.keys() for r in results]


@pytest.mark.usefixtures("double")
def test_batch_norm_counts_microbatches():
    case = CASES["batch_norm"]
    model = case.build()
    compiled(case, model, 4, Shape(2)).run_local(case.data(4))
    counts = [m.num_batches_tracked.item() for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert counts == [4] * 4


@pytest.mark.usefixtures("double")
def test_model_is_left_as_it_was():
    """Compiling changes no parameter, buffer, mode or hook, and run_local no parameter and no .grad."""
    case = CASES["batch_norm"]
    model = case.build()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    pipe = compiled(case, model, 2, Shape(2))
    assert too_far(model.state_dict(), before, 0.0) == {}
    pipe.run_local(case.data(2))
    parameters = dict(model.named_parameters())
    assert all(p.grad is None for p in parameters.values())
    assert too_far(parameters, {name: before[name] for name in parameters}, 0.0) == {}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model.training
