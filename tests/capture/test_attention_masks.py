"""Masks of attention by value: dropped where they say what the kernel knows, and only there."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from equality import assert_equals_eager
from rich.console import Console
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.capture.capture_options import CaptureOptions
from fxpipe.capture.reads import example
from fxpipe.capture.rules import attention_masks
from fxpipe.capture.trace import capture
from fxpipe.errors import OptionError, RunError, SizeError
from fxpipe.ir.ops import is_causal, node_flops
from fxpipe.ir.storage import graph_outputs
from fxpipe.viz.explanation import explain

pytestmark = pytest.mark.usefixtures("double")

LENGTH, WIDTH = 6, 8
Make = Callable[["Attentions", torch.Tensor], torch.Tensor]


class Attentions(nn.Module):
    """Three layers of attention, each with the mask that ``make`` gives."""

    def __init__(self, make: Make, keys: int = LENGTH) -> None:
        super().__init__()
        self.make, self.keys = make, keys
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(3))
        self.register_buffer("triangle", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
        self.bias = nn.Parameter(torch.zeros(LENGTH, LENGTH))
        self.frozen = nn.Parameter(lower(), requires_grad=False)
        self.attribute = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            q, k, v = layer(x).view(len(x), LENGTH, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
            mask = self.make(self, x)
            attended = F.scaled_dot_product_attention(q, k[..., : self.keys, :], v[..., : self.keys, :], mask)
            x = x + attended.transpose(1, 2).flatten(2)
        return (x + 0 * self.bias.sum()).square().mean()


def lower(n: int = LENGTH) -> torch.Tensor:
    return torch.ones(LENGTH, n, dtype=torch.bool).tril()


def infinite(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=torch.get_default_dtype()).masked_fill(~mask, -torch.inf)


def by_index(window: int) -> torch.Tensor:
    rows, columns = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    return (columns <= rows) & (columns > rows - window)


def opened(mask: torch.Tensor) -> torch.Tensor:
    mask[0, -1] = True
    return mask


CASES: dict[str, tuple[Make, str]] = {
    "causal": (lambda m, x: lower(), "causal"),
    "infinite": (lambda m, x: infinite(lower())[None, None], "causal"),
    "of each row of the batch": (lambda m, x: lower().expand(len(x), 1, -1, -1), "causal"),
    "a window over all": (lambda m, x: by_index(LENGTH), "causal"),
    "nothing masked": (lambda m, x: torch.ones(LENGTH, LENGTH, dtype=torch.bool), "none"),
    "zeros": (lambda m, x: torch.zeros(LENGTH, LENGTH), "none"),
    "a window": (lambda m, x: by_index(LENGTH - 1), "dense"),
    "large numbers": (lambda m, x: infinite(lower()).clamp(min=-1e30), "dense"),
    "written later": (lambda m, x: opened(lower()), "dense"),
    "the other triangle": (lambda m, x: lower().T, "dense"),
    "from the batch": (lambda m, x: lower() & (x[:, None, :, :1] > -torch.inf), "dense"),
    "a buffer": (lambda m, x: m.triangle, "causal"),
    "a part of a buffer": (lambda m, x: infinite(m.triangle[None, None, :LENGTH, :LENGTH]), "causal"),
    "the rest of a buffer": (lambda m, x: m.triangle ^ m.triangle.T, "dense"),
    "a buffer and the batch": (lambda m, x: m.triangle & (x[:, None, :, :1] > -torch.inf), "dense"),
    "a frozen parameter": (lambda m, x: m.frozen, "causal"),
    "an attribute": (lambda m, x: m.attribute, "causal"),
    "a part of an attribute": (lambda m, x: m.attribute[:LENGTH, :LENGTH], "causal"),
    "trained": (lambda m, x: m.bias, "dense"),
    "random": (lambda m, x: lower() & (torch.rand(LENGTH, LENGTH) > -1), "dense"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mask_is_dropped_by_its_value(case: str) -> None:
    make, needed = CASES[case]
    model, x = Attentions(make), torch.randn(2, LENGTH, WIDTH)
    masks = capture(model, (x,), None, 1.0, torch.device("cpu")).masks
    assert masks.needed == [needed] * 3


@pytest.mark.in_ci("causal-6", "infinite-12", "a part of a buffer-24", "written later-6", "a window-1")
@pytest.mark.parametrize("block", [1, LENGTH, 2 * LENGTH, 4 * LENGTH])
@pytest.mark.parametrize("case", ["causal", "infinite", "of each row of the batch", "a window over all",
                                  "nothing masked", "a window", "written later", "an attribute",
                                  "a part of a buffer"])  # fmt: skip
def test_a_large_mask_is_read_in_blocks_of_its_rows(case: str, block: int, monkeypatch) -> None:
    """With the same result; an op that needs more than its rows is computed as a whole."""
    monkeypatch.setattr(example, "BLOCK", block)
    monkeypatch.setattr(attention_masks, "BLOCK", block)
    monkeypatch.setattr(attention_masks, "_SAID", {})
    sizes: list[int] = []
    monkeypatch.setattr(attention_masks, "_said_by", lambda blocks: SAID_BY(map(noted(sizes), blocks)))
    test_a_mask_is_dropped_by_its_value(case)
    if case.startswith("a window") and block > 1:  # else the positions themselves are larger
        rows = max(1, block // LENGTH)
        assert {*sizes} <= {rows, LENGTH % rows}, sizes


def test_a_mask_is_read_once_for_all_traces(monkeypatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(attention_masks, "_said_by", lambda blocks: SAID_BY(map(noted(sizes), blocks)))
    monkeypatch.setattr(attention_masks, "_SAID", {})
    for window in (LENGTH, LENGTH, LENGTH - 1, LENGTH):  # each by three layers
        model, x = Attentions(lambda m, x: by_index(window)), torch.randn(2, LENGTH, WIDTH)  # noqa: B023
        masks = capture(model, (x,), None, 1.0, torch.device("cpu")).masks
        assert masks.needed == ["causal" if window == LENGTH else "dense"] * 3
    assert len(sizes) == 2


SAID_BY = attention_masks._said_by


def noted(sizes: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    def note(block: torch.Tensor) -> torch.Tensor:
        sizes.append(block.shape[-2])
        return block

    return note


def test_numbers_stay_those_of_the_model_with_masks() -> None:
    for case in ("infinite", "nothing masked", "a window", "written later", "a part of a buffer"):
        assert_equals_eager(
            lambda: Attentions(CASES[case][0]),  # noqa: B023 - called in this round
            lambda rows: (torch.randn(rows, LENGTH, WIDTH),),
            ranks=2,
            schedule="1f1b",
        )


@pytest.mark.parametrize("case", ["a part of a buffer", "a frozen parameter"])
def test_a_mask_of_buffers_is_checked_in_each_step(case: str, tmp_path: Path) -> None:
    model, batch = Attentions(CASES[case][0]), (torch.randn(4, LENGTH, WIDTH),)
    compiled = fxpipe.compile(model, (batch[0][:2],), ranks=2, microbatches=2, schedule="zb-h1")
    compiled.save(tmp_path / "saved")
    name = "frozen" if case == "a frozen parameter" else "triangle"
    with torch.no_grad():
        for pipe in (compiled, fxpipe.load(tmp_path / "saved")):
            mask = (pipe.buffers | dict(pipe.parameters))[name]
            loss = pipe.run_local(batch).loss
            pipe.load_state_dict(pipe.state_dict())  # the same values
            assert torch.equal(pipe.run_local(batch).loss, loss)
            mask[0, 1] = True  # a query looks ahead
            with pytest.raises(RunError, match=f"made from {name} was causal .* is another one now"):
                pipe.run_local(batch)
            mask[0, 1] = False
            assert torch.equal(pipe.run_local(batch).loss, loss)


@pytest.mark.parametrize("case", ["a part of a buffer", "a frozen parameter"])
def test_a_mask_of_buffers_is_no_constant_of_the_program(case: str) -> None:
    """Of a rank that does not hold it there is nothing to compare."""
    model = Attentions(CASES[case][0])
    captured = capture(model, (torch.randn(2, LENGTH, WIDTH),), None, 1.0, torch.device("cpu"))
    held = [*model.buffers(), *model.parameters()]
    assert not [ref for ref in captured.sources if any(ref() is x for x in held)]


@pytest.mark.variation
def test_layers_with_masks_of_their_own_have_one_function_and_one_triangle() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
            self.register_buffer("mask", lower(), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x)[:, None].chunk(3, -1)
            return x + F.scaled_dot_product_attention(q, k, v, self.mask)[:, 0]

    class Layers(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    def layers() -> nn.Module:
        return Layers(*(Layer() for _ in range(4)))

    x = torch.randn(2, LENGTH, WIDTH)
    (program,) = fxpipe.compile(layers(), (x,), ranks=1, microbatches=1).artifact.programs
    assert [program.count(word) for word in (" expect(", "made from *.mask was", "= tril(")] == [1, 1, 1]
    assert_equals_eager(layers, lambda rows: (torch.randn(rows, LENGTH, WIDTH),), ranks=2)


@pytest.mark.in_ci("False")
@pytest.mark.parametrize("in_place", [False, True])
def test_a_mask_in_a_buffer_that_the_step_changes_stays(in_place: bool) -> None:
    class Changing(Attentions):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = super().forward(x)
            if in_place:
                self.triangle.copy_(self.triangle.T.clone())
            else:
                self.triangle = self.triangle.T.contiguous()
            return loss

    def model() -> Attentions:
        return Changing(CASES["a buffer"][0])

    x = torch.randn(2, LENGTH, WIDTH)
    assert capture(model(), (x,), None, 1.0, torch.device("cpu")).masks.needed == ["dense"] * 3
    assert_equals_eager(model, lambda rows: (torch.randn(rows, LENGTH, WIDTH),), microbatches=1, ranks=2)


def test_a_mask_that_the_forward_writes_to_stays() -> None:
    def opened_in_place(model: Attentions, x: torch.Tensor) -> torch.Tensor:
        model.attribute[0, 1] = ~model.attribute[0, 1]
        return model.attribute

    masks = capture(
        Attentions(opened_in_place), (torch.randn(2, LENGTH, WIDTH),), None, 1.0, torch.device("cpu")
    ).masks
    assert masks.needed == ["dense"] * 3


def test_with_other_keys_than_queries_kernels_differ_in_what_is_causal() -> None:
    model = Attentions(lambda m, x: lower(LENGTH - 1), keys=LENGTH - 1)
    masks = capture(model, (torch.randn(2, LENGTH, WIDTH),), None, 1.0, torch.device("cpu")).masks
    assert masks.needed == ["dense"] * 3


@pytest.mark.in_ci("a part of a buffer-True")
@pytest.mark.skipif(torch.__version__ < "2.13", reason="fake attention has its sums in float32")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("case", ["infinite", "a part of a buffer"])
def test_a_checkpoint_drops_a_mask_again(case: str, reentrant: bool) -> None:
    """What it computes a second time has to keep the same values."""

    class Checkpointed(Attentions):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 0 * self.bias[0, 0]  # reentrant ones need an input with a gradient
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    def batch(rows: int) -> tuple[torch.Tensor]:
        return (torch.randn(rows, LENGTH, WIDTH),)

    def model() -> Attentions:
        return Checkpointed(CASES[case][0])

    assert {*capture(model(), batch(2), None, 1.0, torch.device("cpu")).masks.needed} == {"causal"}
    assert_equals_eager(model, batch, ranks=2)


def test_a_mask_that_changes_between_layers() -> None:
    def make(model: Attentions, x: torch.Tensor) -> torch.Tensor:
        if x is model.first:  # in the first layer
            model.mask = lower()
        else:
            model.mask[0, -1] = True
        return model.mask

    class Changing(Attentions):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.first = x
            try:
                return super().forward(x)
            finally:
                del self.first, self.mask

    model = Changing(make)
    masks = capture(model, (torch.randn(2, LENGTH, WIDTH),), None, 1.0, torch.device("cpu")).masks
    assert masks.needed == ["causal", "dense", "dense"]
    assert masks.freed("causal") == 0


def test_the_attention_within_torchs_own_module() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = infinite(lower())
            return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0].square().mean()

    def batch(rows: int) -> tuple[torch.Tensor]:
        return (torch.randn(rows, LENGTH, WIDTH),)

    assert capture(Encoder(), batch(2), None, 1.0, torch.device("cpu")).masks.needed == ["causal"]
    assert_equals_eager(Encoder, batch, ranks=1)


def test_a_plan_tells_what_was_dropped_and_a_rule_can_be_left_out() -> None:
    model, x = Attentions(CASES["causal"][0]), torch.randn(2, LENGTH, WIDTH)
    pipe = fxpipe.compile(model, (x,), ranks=1, microbatches=1)
    rewrite, *_ = pipe.plan.rewrites
    assert (rewrite.rule, rewrite.ops, rewrite.bytes) == ("causal-masks", 3, LENGTH * LENGTH * 3)
    attentions = [node for node in pipe.graph.nodes if is_causal(node)]
    assert len(attentions) == 6  # forward and backward
    with (console := Console(width=200)).capture() as shown:
        explain(pipe.plan, console)
    assert "causal-masks: 3 attentions call the kernel that knows causality" in shown.get()

    dense = fxpipe.compile(model, (x,), ranks=1, microbatches=1, without=["causal-masks"])
    assert "causal-masks" not in {each.rule for each in dense.plan.rewrites}
    assert not any(map(is_causal, dense.graph.nodes))
    flops = [
        sum(node_flops(n) for n in p.graph.nodes if "scaled_dot" in str(n.target)) for p in (pipe, dense)
    ]
    assert 2 * flops[0] == flops[1] > 0
    with pytest.raises(OptionError, match="without has 'causal' and takes the names of rules"):
        fxpipe.compile(model, (x,), ranks=1, microbatches=1, without=["causal"])


def test_at_other_sizes_a_mask_is_dropped_where_it_is_so_in_all() -> None:
    class Windowed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows, length = x.shape[:2]
            place = torch.arange(length)
            mask = (place[None] <= place[:, None]) & (place[None] > place[:, None] - 12)
            q, k, v = self.layer(x).view(rows, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v, mask)
            return attended.square().mean() + F.scaled_dot_product_attention(q, k, v, lower_of(length)).mean()

    def lower_of(length: int) -> torch.Tensor:
        return torch.ones(length, length, dtype=torch.bool).tril()

    x = torch.randn(2, 16, WIDTH)
    pipe = fxpipe.compile(Windowed(), (x,), ranks=1, microbatches=1, dimensions={"length": 16})
    assert [r.ops for r in pipe.plan.rewrites] == [1]
    x = torch.randn(2, 12, WIDTH)  # of which fxpipe takes shorter ones, within the window as well
    pipe = fxpipe.compile(Windowed(), (x,), ranks=1, microbatches=1, dimensions={"length": 12})
    assert [r.ops for r in pipe.plan.rewrites] == [2]


@pytest.mark.variation
def test_a_number_of_masks_that_depends_on_the_length():
    """The traces at other sizes never agree on these masks, so another try would be without end."""

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            length = x.shape[1]
            x = self.layer(x)
            for _ in range(length // 4):
                mask = torch.ones(length, length, dtype=torch.bool).tril()
                x = x + F.scaled_dot_product_attention(x, x, x, mask)
            return x.square().mean()

    x = torch.randn(2, 12, WIDTH)
    with pytest.raises(SizeError, match="made of other ops at other sizes"):
        fxpipe.compile(Repeated(), (x,), ranks=1, microbatches=1, dimensions={"length": 12})


class TwoWidths(nn.Module):
    """Heads of keys and of values have widths of their own, as in latent attention."""

    def __init__(self, keys: int, values: int, dropout: float = 0.0, scale: float | None = None) -> None:
        super().__init__()
        self.parts = [2 * keys, 2 * keys, 2 * values]
        self.layer, self.dropout, self.scale = nn.Linear(WIDTH, sum(self.parts)), dropout, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.layer(x).split(self.parts, -1)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, None, self.dropout, True, scale=self.scale)
        return attended.square().mean()


@pytest.mark.parametrize(
    ("keys", "values", "scale"), [(6, 4, None), (4, 6, None), (4, 6, 0.3), (4, 4, None)], ids=str
)
def test_a_plan_for_accelerators_has_their_kernel_for_heads_of_two_widths(
    keys: int, values: int, scale: float | None
) -> None:
    """The CPU alone computes all products then, which are more memory; the numbers are the same."""
    model, x = TwoWidths(keys, values, scale=scale), torch.randn(2, LENGTH, WIDTH)
    expected = torch.autograd.grad(model(x), [*model.parameters()])
    fused = attention_masks.AttentionMasks(None, (), None, is_fused=True)  # type: ignore[arg-type]
    with fused:
        found = torch.autograd.grad(model(x), [*model.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    options = CaptureOptions(fused_attention=True)
    graph = capture(model, (x,), None, 1.0, torch.device("cpu"), options).graph
    kernels = [node for node in graph.nodes if "scaled_dot_product_flash" in str(node.target)]
    assert len(kernels) == 2  # and its backward
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten._safe_softmax.default)
    padded = graph.find_nodes(op="call_function", target=torch.ops.aten.constant_pad_nd.default)
    assert bool(padded) == (keys != values)  # else copies would be a part of the costs of every plan


def test_a_plan_for_accelerators_has_their_kernel_for_a_bias_with_a_gradient() -> None:
    model, x = Attentions(lambda self, _: self.bias), torch.randn(2, LENGTH, WIDTH)
    options = CaptureOptions(fused_attention=True)
    graph = capture(model, (x,), None, 1.0, torch.device("cpu"), options).graph
    assert sum("scaled_dot_product_flash" in str(node.target) for node in graph.nodes) == 6
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten._safe_softmax.default)
    assert "bias" in graph_outputs(graph).grads


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: TwoWidths(6, 4), True),
        (lambda: TwoWidths(4, 4, 0.1), True),
        (lambda: TwoWidths(4, 4), False),
    ],
    ids=["two widths", "dropout", "one kernel"],
)
def test_costs_of_an_accelerator_that_are_not_its_kernels_give_a_warning(build, told: bool) -> None:
    def warned(**options) -> bool:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            fxpipe.compile(build(), (torch.randn(2, LENGTH, WIDTH),), ranks=1, microbatches=2, **options)
        return any("1 attention of the step became products" in str(each.message) for each in found)

    assert warned(costs="H100") == told
    assert not warned()
