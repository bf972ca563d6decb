"""A rank that ran ahead with weights that do not stand runs its warm-up once more."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from zoo import CASES, Shape, built_and_compiled

from fxpipe.runtime.program.record import Record
from fxpipe.training.run.runner import Runner

M = 4


@contextmanager
def undone_updates(model: torch.nn.Module) -> Iterator[None]:
    """Within, all ranks begin with other weights, and get these back when they ask for the verdict."""
    right = {name: p.detach().clone() for name, p in model.named_parameters()}
    local_runtime = Runner._local_runtime

    def with_verdict(runner: Runner, *args: object, **options: bool) -> object:
        rt = local_runtime(runner, *args, **options)  # type: ignore[arg-type]
        # Each rank has weights of its own, as in processes of their own.
        rt.params = {name: value + 0.5 for name, value in rt.params.items()}
        own = {name: runner.state.parameter(name).detach() for name in rt.params}

        def validate() -> bool:
            for name, value in rt.params.items():
                value.copy_(own[name])
            return False

        rt.validate = validate
        return rt

    with patch.object(Runner, "_local_runtime", with_verdict):
        yield
    assert all(torch.equal(p, right[name]) for name, p in model.named_parameters())


CASES_AND_SHAPES = [
    ("transformer_layer", Shape(4, "1f1b")),
    pytest.param("transformer_layer", Shape(2, "gpipe"), marks=pytest.mark.variation),
    pytest.param("transformer_layer", Shape(4, "zb-h2"), marks=pytest.mark.variation),
    ("transformer_layer", Shape(2, "zb-v", placement="v", stages_per_rank=2)),
    pytest.param(
        "transformer_layer",
        Shape(2, "v-half", placement="v", stages_per_rank=2),
        marks=pytest.mark.variation,
    ),
    pytest.param(
        "transformer_layer", Shape(2, "interleaved", stages_per_rank=2), marks=pytest.mark.variation
    ),
    ("transformer_layer", Shape(2, "zb-h1", offload=True)),
    pytest.param("transformer_layer", Shape(2, "1f1b", recompute="full"), marks=pytest.mark.variation),
    ("transformer_layer", Shape(2, "1f1b", replicas=2)),
    ("batch_norm", Shape(3, "1f1b")),
    ("reassigned_buffers", Shape(2, "gpipe")),
    ("sum_and_count", Shape(2, "zb-h2")),
    pytest.param("encoder_decoder", Shape(3, "zb-h1"), marks=pytest.mark.variation),
    ("unet", Shape(2, "zb-v", placement="v", stages_per_rank=2)),
    pytest.param("tied_head", Shape(3, "1f1b", vocab_parallel=True), marks=pytest.mark.variation),
    ("tied_head", Shape(3, "zb-h1", vocab_parallel="2-barrier")),
]


SLOW = [
    pytest.param(*case, marks=pytest.mark.slow) if type(case) is tuple else case
    for case in CASES_AND_SHAPES[1:]
]


@pytest.mark.in_ci("batch_norm-shape9", "unet-shape13")
@pytest.mark.parametrize(("name", "shape"), [CASES_AND_SHAPES[0], *SLOW])
def test_a_step_whose_warm_up_runs_twice_is_the_same(name, shape):
    case = CASES[name]
    model, pipe = built_and_compiled(case, M, shape)
    batch = case.data(M * (shape.replicas or 1))
    begin = {name: value.clone() for name, value in model.state_dict().items()}
    results, states = [], []
    for undone in (False, True):
        model.load_state_dict(begin)
        if undone:
            with undone_updates(model), patch.object(Record, "forget", autospec=True) as forget:
                results.append(pipe.run_local(batch))
            assert forget.call_count == shape.ranks * (shape.replicas or 1)
        else:
            results.append(pipe.run_local(batch))
        states.append({name: value.clone() for name, value in model.named_buffers()})
    expected, found = results
    assert torch.equal(found.loss, expected.loss)
    assert found.grads.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        assert torch.equal(found.grads[name], grad), name
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())
