"""Models of bfloat16 with gradients in float32, and with master weights, against loops in plain torch."""

import copy
import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from zoo import LENGTH, WIDTH, WORDS, Case, Shape, captured_once, compiled, cut, tokens

import fxpipe
from fxpipe.errors import ArtifactError, LimitError, OptionError
from fxpipe.plan.saved.check import plan_of

pytestmark = pytest.mark.slow

MANY = 32  # microbatches


class Tied(nn.Module):
    """A table that is embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids, labels):
        logits = self.head(self.layers(self.embedding(ids)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


LOW = Case(lambda: Tied().bfloat16(), tokens, rows=1)
FLOAT32 = {"grad_dtype": torch.float32}


def pipeline(model: nn.Module, microbatches: int, shape: Shape, case: Case = LOW) -> fxpipe.Pipeline:
    with captured_once(case, microbatches):
        return compiled(case, model, microbatches, shape)


def summed(model: nn.Module, batch, microbatches: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The gradients of each microbatch by torch, added in a dtype."""
    model = copy.deepcopy(model)
    sums = {name: torch.zeros_like(p, dtype=dtype) for name, p in model.named_parameters()}
    for microbatch in cut(batch, microbatches):
        model.zero_grad()
        (model(**microbatch) / microbatches).backward()
        for name, parameter in model.named_parameters():
            sums[name] += parameter.grad
    return sums


def error(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """The norm of the difference as a share of that of the exact gradients."""
    assert found.keys() == exact.keys()
    apart = sum((found[name].double() - g).square().sum() for name, g in exact.items())
    return float((apart / sum(g.square().sum() for g in exact.values())).sqrt())


# -- values -----------------------------------------------------------------------------------------------


class Steady(nn.Module):
    """Microbatches with equal gradients, whose sum in bfloat16 stands still."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x):
        return self.last(self.first(x)).float().square().mean()


def steady(rows: int) -> dict[str, torch.Tensor]:
    return {"x": torch.linspace(-1, 1, 16).repeat(rows, 1).bfloat16()}


def test_sums_in_float32_are_as_exact_as_one_microbatch():
    case = Case(lambda: Case(Steady, steady).build().bfloat16(), steady, rows=2)
    model, batch = case.build(), case.data(64)
    exact = summed(copy.deepcopy(model).double(), {"x": batch["x"].double()}, 64, torch.float64)
    errors = {}
    for dtype in (None, torch.float32):
        pipe = pipeline(model, 64, Shape(1, grad_dtype=dtype), case)
        errors[dtype] = error(pipe.run_local(batch).grads, exact)
    assert errors[torch.float32] < 2**-8 < 2**-6 < errors[None]


def test_they_are_the_sums_of_a_loop_that_adds_in_float32():
    """All bits, but for a table, whose rows are added in float32 within a microbatch as well."""
    model, batch = LOW.build(), LOW.data(MANY)
    untied = copy.deepcopy(model)
    untied.head.weight = nn.Parameter(model.head.weight.detach().clone())
    expected = summed(untied, batch, MANY, torch.float32)
    table = expected.pop("embedding.weight") + expected.pop("head.weight")
    for shape in (Shape(2, **FLOAT32), Shape(3, "zb-h1", **FLOAT32)):
        grads = pipeline(model, MANY, shape).run_local(batch).grads
        tied = grads.pop("embedding.weight")
        assert grads.keys() == expected.keys()
        assert all(torch.equal(g, expected[name]) for name, g in grads.items())
        assert (tied - table).norm() <= 2**-10 * table.norm()


@pytest.mark.variation
def test_they_add_what_a_split_vocabulary_gives():
    model, batch = LOW.build(), LOW.data(MANY)
    exact = summed(copy.deepcopy(model).double(), batch, MANY, torch.float64)
    eager = error(summed(model, batch, MANY, torch.float32), exact)
    split = Shape(2, vocab_parallel=True)
    narrow = pipeline(model, MANY, split).run_local(batch).grads
    wide = pipeline(model, MANY, replace(split, **FLOAT32)).run_local(batch).grads
    assert {g.dtype for g in wide.values()} == {torch.float32}
    assert error(wide, exact) <= 1.3 * eager  # shards round in other places than the whole
    assert error(narrow, exact) > 1.3 * error(wide, exact)


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(LENGTH, 8), nn.Linear(8, LENGTH)

    def forward(self, ids, labels):
        return self.last(self.first(ids.bfloat16() / WORDS).tanh())


def test_the_mean_over_all_counts_is_taken_in_float32():
    def loss(output, batch):
        errors = (output.float() - batch["labels"]).square()
        return errors.sum(), torch.tensor(errors.numel())

    case = Case(lambda: Case(Scores, tokens).build().bfloat16(), tokens, loss)
    model, batch = case.build(), case.data(3)
    grads = pipeline(model, 3, Shape(2, **FLOAT32), case).run_local(batch).grads
    plain = copy.deepcopy(model)
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in plain.named_parameters()}
    count = 0
    for part in cut(batch, 3):
        plain.zero_grad()
        total, number = loss(plain(**part), part)
        total.backward()
        count += number
        for name, parameter in plain.named_parameters():
            sums[name] += parameter.grad
    assert all(torch.equal(g, sums[name] / count) for name, g in grads.items())


def test_no_gradient_is_narrower_than_its_parameter():
    model = Tied().double()
    pipe = pipeline(model, 2, Shape(2, **FLOAT32), Case(lambda: model, tokens))
    batch = tokens(4)
    assert {g.dtype for g in pipe.run_local(batch).grads.values()} == {torch.float64}


def test_steps_add_to_gradients_of_either_dtype():
    """A parameter may have a gradient of its own dtype, from eager or from another pipeline."""
    model, batch = LOW.build(), LOW.data(2)
    wide, narrow = (pipeline(model, 2, Shape(1, grad_dtype=dtype)) for dtype in (torch.float32, None))
    once = wide.run_local(batch).grads["embedding.weight"]
    model(**cut(batch, 2)[0]).backward()
    before = model.embedding.weight.grad.clone()
    wide.step(batch)
    assert model.embedding.weight.grad_dtype == torch.float32
    assert torch.equal(model.embedding.weight.grad, before + once)
    wide.step(batch)
    torch.testing.assert_close(model.embedding.weight.grad, before + 2 * once)
    narrow.step(batch)
    assert model.embedding.weight.grad.dtype == torch.bfloat16
    narrow.optimizer(torch.optim.SGD, lr=0.1).zero_grad(set_to_none=True)
    model(**cut(batch, 2)[0]).backward()
    assert torch.equal(model.embedding.weight.grad, before)


# -- the optimizer ----------------------------------------------------------------------------------------

ADAM = {"lr": 0.01, "weight_decay": 0.1}
CLIP = 0.1


def trained(pipe: fxpipe.Pipeline, optimizer, seeds) -> None:
    for seed in seeds:
        torch.manual_seed(seed)
        pipe.step(LOW.batch(4))
        optimizer.step()
        optimizer.zero_grad()


def gradients(pipe: fxpipe.Pipeline, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Of one step, clipped in their dtype, with their norm before."""
    torch.manual_seed(seed)
    grads = pipe.run_local(LOW.batch(4)).grads
    ordered = [grads[name] for name in pipe.plan.tensors[0].gradients]  # for the same bits of the norm
    norm = nn.utils.get_total_norm(ordered).double()
    held = [nn.Parameter(torch.zeros_like(g)) for g in ordered]
    for parameter, grad in zip(held, ordered, strict=True):
        parameter.grad = grad
    nn.utils.clip_grads_with_norm_(held, CLIP, norm)
    return grads, norm


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_gets_gradients_in_the_dtype_of_its_parameters(fused):
    model = LOW.build()
    pipe = pipeline(model, 4, Shape(1, **FLOAT32))
    ours = pipe.optimizer(torch.optim.AdamW, clip_grad_norm=CLIP, fused=fused, **ADAM)
    plain = copy.deepcopy(model)
    theirs = torch.optim.AdamW(plain.parameters(), fused=fused, **ADAM)
    for seed in range(3):
        grads, norm = gradients(pipe, seed)
        assert norm > CLIP
        for name, parameter in plain.named_parameters():
            parameter.grad = grads[name].bfloat16()
        theirs.step()
        torch.manual_seed(seed)
        pipe.step(LOW.batch(4))
        ours.step()
        assert ours.last_norm == norm
        accumulated = pipe.parameters["embedding.weight"].grad
        assert torch.equal(accumulated, grads["embedding.weight"]), "it is the sum in float32 again"
        ours.zero_grad()
        assert all(torch.equal(p, model.state_dict()[n]) for n, p in plain.named_parameters())
        assert pipe.parameters["embedding.weight"].grad is accumulated
        assert not accumulated.any()


@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_master_weights_are_trained_as_a_model_of_float32(dtype):
    """And the parameters are these, rounded: steps too small for bfloat16 add up."""
    model = LOW.build()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    pipe = pipeline(model, 4, Shape(1, grad_dtype=dtype))
    small = {"lr": 1e-5}
    ours = pipe.optimizer(torch.optim.AdamW, clip_grad_norm=CLIP, master_weights=True, **small)
    wide = {name: nn.Parameter(p.float()) for name, p in start.items()}
    theirs = torch.optim.AdamW(wide.values(), **small)
    for seed in range(4):
        grads, _ = gradients(pipe, seed)
        for name, parameter in wide.items():
            parameter.grad = grads[name].float()
        theirs.step()
        trained(pipe, ours, [seed])
        assert all(p.grad is None for p in ours.masters)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, wide[name].bfloat16())
    held = {ours.names[master]: master for master in ours.masters}
    assert all(torch.equal(held[name], parameter) for name, parameter in wide.items())
    assert not any(torch.equal(parameter, start[name].float()) for name, parameter in wide.items())


def test_parameters_of_float32_are_their_own_masters():
    case = Case(Tied, tokens)
    pipe = pipeline(case.build(), 2, Shape(1), case)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1, master_weights=True)
    assert optimizer.masters == {}
    assert optimizer.param_groups[0]["params"] == [pipe.parameters[n] for n in pipe.plan.tensors[0].gradients]


def master_run(model: nn.Module, **options):
    pipe = pipeline(model, 4, Shape(1, **FLOAT32))
    options = {"master_weights": True, "lr": 1e-4, **options}
    return pipe, pipe.optimizer(torch.optim.AdamW, **options)


def test_state_dicts_hold_the_masters():
    model = LOW.build()
    pipe, optimizer = master_run(model)
    trained(pipe, optimizer, [0])
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    trained(pipe, optimizer, [1])
    expected = copy.deepcopy(model.state_dict())
    other_pipe, other = master_run(LOW.build())
    other_pipe.load_state_dict(weights)
    other.load_state_dict(saved)
    trained(other_pipe, other, [1])
    assert all(torch.equal(t, expected[name]) for name, t in other_pipe.state_dict().items())
    # Without them, masters are what the parameters are.
    for state in saved["state"].values():
        del state["master_weight"]
    other_pipe.load_state_dict(weights)
    other.load_state_dict(saved)
    assert all(torch.equal(master, parameter.float()) for master, parameter in other.masters.items())


def test_masters_that_nobody_takes_are_told():
    pipe, optimizer = master_run(LOW.build())
    trained(pipe, optimizer, [0])
    _, without = master_run(LOW.build(), master_weights=False)
    with pytest.warns(UserWarning, match="master_weights=True"):
        without.load_state_dict(optimizer.state_dict())
    assert len(without.state) == len(without.names)


def test_a_run_resumed_from_a_checkpoint_has_the_same_bits(tmp_path):
    def run(steps: int) -> dict[str, torch.Tensor]:
        model = LOW.build()
        pipe, optimizer = master_run(model, clip_grad_norm=CLIP)
        with fxpipe.Checkpointer(pipe, tmp_path, optimizer=optimizer) as checkpoints:
            checkpoints.resume()
            trained(pipe, optimizer, range(pipe.step_number, steps))
            checkpoints.save()
        return {optimizer.names[master]: master.detach() for master in optimizer.masters}

    first = run(2)
    found = fxpipe.read_checkpoint(tmp_path)
    assert all(torch.equal(found.optimizer[name]["master_weight"], master) for name, master in first.items())
    assert all(torch.equal(found.model[name], master.bfloat16()) for name, master in first.items())
    resumed = run(4)
    model = LOW.build()
    pipe, optimizer = master_run(model, clip_grad_norm=CLIP)
    trained(pipe, optimizer, range(4))
    assert all(torch.equal(resumed[optimizer.names[m]], m) for m in optimizer.masters)


# -- the plan ---------------------------------------------------------------------------------------------


def test_a_saved_pipeline_keeps_it(tmp_path):
    model, batch = LOW.build(), LOW.data(2)
    pipe = pipeline(model, 2, Shape(2, **FLOAT32))
    pipe.save(tmp_path / "saved")
    assert "accumulated in torch.float32" in (tmp_path / "saved" / "rank0.py").read_text()
    loaded = fxpipe.load(tmp_path / "saved").run_local(batch).grads
    for name, grad in pipe.run_local(batch).grads.items():
        assert grad.dtype == torch.float32
        assert torch.equal(grad, loaded[name])
    for other in ("torch.bfloat16", "torch.int64", "float32"):
        text = replace(pipe.plan, grad_dtype=other).to_json()
        with pytest.raises(ArtifactError, match="grad_dtype"):
            plan_of(text, "a plan")


def test_the_memory_limit_counts_the_wider_gradients():
    model = LOW.build()
    weights = sum(p.nbytes for p in model.parameters())

    def least(dtype: torch.dtype | None) -> int:
        with pytest.raises(LimitError) as raised:
            fxpipe.compile(model, LOW.example(), ranks=1, microbatches=2, memory_limit=1, grad_dtype=dtype)
        return raised.value.smallest

    count = 4  # of labels, the mean over the batch
    assert least(None) == 2 * weights + count
    assert least(torch.float32) == 3 * weights + count
    assert least(torch.float64) == 5 * weights + count


@pytest.mark.variation
def test_costs_at_other_lengths():
    model = LOW.build()
    given = {"ranks": 1, "microbatches": 2, "schedule": "1f1b", "dimensions": {"sequence": LENGTH}}
    pipe = fxpipe.compile(model, LOW.example(), **given, **FLOAT32)
    narrow = fxpipe.compile(model, LOW.example(), **given)
    assert pipe.simulate({"sequence": 10000 * LENGTH}).seconds > pipe.simulate().seconds
    assert pipe.stages[0].expressions.flops == narrow.stages[0].expressions.flops


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, "float32"])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(OptionError, match=re.escape("torch.float32 or torch.float64")):
        fxpipe.compile(LOW.build(), LOW.example(), ranks=1, microbatches=2, grad_dtype=dtype)


def test_it_is_refused_without_gradients():
    with pytest.raises(OptionError, match="leave out grad_dtype"):
        fxpipe.compile(LOW.build(), LOW.example(), ranks=1, microbatches=2, gradients=False, **FLOAT32)


def test_from_a_model_on_the_meta_device():
    real, batch = LOW.build(), LOW.data(2)
    with torch.device("meta"):
        model = Tied().bfloat16()
    pipe = compiled(LOW, model, 2, Shape(2, **FLOAT32))
    pipe.load_state_dict(real.state_dict())
    expected = pipeline(real, 2, Shape(2, **FLOAT32)).run_local(batch).grads
    assert all(torch.equal(g, expected[name]) for name, g in pipe.run_local(batch).grads.items())


# -- float16 ----------------------------------------------------------------------------------------------


class Half(nn.Module):
    def __init__(self, autocast: bool) -> None:
        super().__init__()
        self.autocast, self.layer = autocast, nn.Linear(8, 8)

    def forward(self, x):
        with torch.autocast("cpu", torch.float16, enabled=self.autocast):
            return self.layer(x).float().square().mean()


@pytest.mark.parametrize("autocast", [False, True])
def test_a_backward_in_float16_is_told(autocast):
    """The remedy of its warning: the loss times a constant, by which the gradients are divided."""
    torch.manual_seed(0)
    model = Half(autocast).to(torch.float32 if autocast else torch.float16)
    x = 3e-4 * torch.randn(4, 8, dtype=model.layer.weight.dtype)
    nn.init.zeros_(model.layer.bias)
    given = {"ranks": 1, "microbatches": 2, "schedule": "1f1b", **FLOAT32}
    scale = 2.0**14
    with pytest.warns(UserWarning, match=r"float16 \(the model itself, .*:\d+\).*bfloat16"):
        plain = fxpipe.compile(model, (x[:2],), **given)
    with pytest.warns(UserWarning, match="GradScaler"):
        scaled = fxpipe.compile(model, (x[:2],), loss_fn=lambda loss, batch: loss * scale, **given)
    exact = copy.deepcopy(model).double()
    (exact.layer(x.double()).square().mean()).backward()
    expected = exact.layer.weight.grad
    assert (plain.run_local((x,)).grads["layer.weight"] - expected).norm() > 0.5 * expected.norm()
    found = scaled.run_local((x,)).grads["layer.weight"] / scale
    assert (found - expected).norm() < 2**-9 * expected.norm()


def test_a_forward_in_float16_is_not(recwarn):
    model = Half(False).half()
    given = (torch.ones(2, 8).half(),)
    fxpipe.compile(model, given, ranks=1, microbatches=2, schedule="1f1b", gradients=False)
    assert [str(w.message) for w in recwarn if "float16" in str(w.message)] == []
