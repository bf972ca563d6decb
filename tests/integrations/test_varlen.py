"""Attention of packed documents as one op, against a dense masked product, and in pipelines."""

import warnings

import pytest
import torch
import torch.nn.attention.varlen
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import fxpipe
from fxpipe.api.varlen import boundaries_of, flash_attn_varlen_func, packed_attention, varlen_attn
from fxpipe.capture.reads.documents import documents_of
from fxpipe.cost.batch_order import BatchPlanner
from fxpipe.cost.kinds import kind_of
from fxpipe.ir.ops import node_flops
from fxpipe.plan.step import BatchSpec, Documents, Leaf, NamedLength, StepSpec
from fxpipe.runtime.batch.documents import agreed_shares, shares_of

LENGTH, WIDTH, WORDS = 24, 8, 16
AT = slice(3), slice(3, 5)
ENDS = torch.tensor([0, 3, 4, 9, 11, 11, 11], dtype=torch.int32)


@pytest.fixture(autouse=True)
def double(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def dense(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, left: int, right: int) -> Tensor:
    """Attention of all positions to all, with a mask of documents and windows; 0 behind the last document."""
    at = torch.arange(len(q))
    document = torch.searchsorted(ends, at, right=True)
    ahead = at - at[:, None]
    seen = (document == document[:, None]) & (at < ends[-1])
    seen &= (ahead <= right) | (right < 0)
    seen &= (ahead >= -left) | (left < 0)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -1e30).softmax(-1) * seen, v)


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (2, 0), (1, 1)])
def test_one_op_is_a_masked_product(window):
    tensors = [torch.randn(12, heads, 5, requires_grad=True) for heads in (4, 2, 2)]

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attn(q, k, v, ENDS, None, 12, 12, window_size=window, enable_gqa=True)

    found, expected = packed(*tensors), dense(*tensors, ENDS, *window)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    gradients = (torch.autograd.grad((x * weights).sum(), tensors) for x in (found, expected))
    torch.testing.assert_close(*gradients)
    assert not found[11:].any()
    half = [x.detach().to(torch.bfloat16).requires_grad_() for x in tensors]
    (rough := packed(*half)).sum().backward()
    torch.testing.assert_close(rough, found.to(torch.bfloat16), atol=0.03, rtol=0.03)


def test_more_keys_than_queries():
    """The last ones stand side by side, as in the kernel for GPUs."""
    q, k, v = torch.randn(2, 1, 3), torch.randn(5, 1, 3), torch.randn(5, 1, 3)
    ends = torch.tensor([[0, 2], [0, 5]])
    found = flash_attn_varlen_func(q, k, v, *ends, 2, 5, softmax_scale=1.0, causal=True)
    seen = torch.ones(2, 5, dtype=torch.bool).tril(3)
    scores = (q[:, 0] @ k[:, 0].T).masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(found[:, 0], scores.softmax(-1) @ v[:, 0])


def test_the_op_keeps_torchs_contract():
    arguments = *(torch.randn(12, 2, 4, requires_grad=True) for _ in range(3)), ENDS, ENDS, 12, 12, 0.5, -1, 0
    torch.library.opcheck(torch.ops.fxpipe.varlen_attention.default, arguments)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_results_lie_without_gaps(device):
    """However queries do, so that traces at other lengths have the same layouts."""
    q, k, v = (torch.randn(2, 12, 4, device=device).transpose(0, 1) for _ in range(3))
    ends = ENDS.to(device)
    result, sums = torch.ops.fxpipe.varlen_attention(q, k, v, ends, ends, 12, 12, 0.5, -1, 0)
    more = ends, ends, 12, 12, 0.5, -1, 0
    gradients = torch.ops.fxpipe.varlen_attention_backward(result, q, k, v, result, sums, *more)
    assert all(x.is_contiguous() for x in (result, *gradients))


def test_boundaries_of_positions():
    """Wherever they begin."""
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [3, 4, 3, 4, 5, 6]])
    assert boundaries_of(positions).tolist() == [0, 3, 4, 6, 8, *[12] * 8]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        _, n, _ = x.shape
        q, k, v = self.mix(x).view(n, 3, 2, WIDTH // 2).unbind(1)
        return x + self.out(flash_attn_varlen_func(q, k, v, ends, ends, n, n, causal=True).reshape(x.shape))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor, ends: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, ends[0])
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def microbatch(n: int) -> dict[str, Tensor]:
    """One of three documents, beside a fourth boundary."""
    ends = torch.cat([torch.zeros(1), torch.randint(1, n, (2,)).sort().values, torch.tensor([n, n])])
    ids, labels = torch.randint(WORDS, (2, 1, n))
    return {"ids": ids, "labels": labels, "ends": ends[None].to(torch.int32)}


@pytest.mark.parametrize(
    ("documents", "leaf", "share"),
    [
        (Documents("ends", False), torch.tensor([[0, 700, 1000, 1024, 1024]]), 9),
        (Documents("ends", False), torch.tensor([[0, 1024, 1024]]), 16),
        (Documents("at", True), torch.tensor([[*range(700), *range(300), *range(24)]]), 9),
        (Documents("at", True), torch.arange(4, 1028)[None], 16),
        (Documents("at", True), torch.zeros(1, 1024, dtype=torch.long), 1),
        (Documents("at", True), None, 16),
        (Documents("ends", False), torch.tensor([[5, 0, 4000]]), 16),
        (None, torch.zeros(1, 1024), 16),
    ],
)
def test_the_share_of_attention_that_documents_have(documents, leaf, share):
    shape = (1, 1024), (1024, 1), "torch.int64", ""
    spec = StepSpec(
        ranks=1,
        microbatches=1,
        batch=BatchSpec((Leaf("ids", *shape), Leaf("at", *shape), Leaf("ends", (1, 5), (5, 1), *shape[2:]))),
        loss_rank=0,
        loss_dtype="torch.float32",
        has_count=False,
        seed=0,
        default_dtype="torch.float32",
        leaves=(("ids",),),
        lengths=(NamedLength("time", 1024, 2, 1),),
        documents=documents,
    )
    item = {"at" if documents is None else documents.leaf: leaf}
    assert shares_of(spec, [item, item], [{"time": 1024}, None]) == [share, 16]


def test_ranks_agree_on_shares():
    """By those that know them; one without leaves has another number of microbatches."""
    assert agreed_shares(3, [[16, 2, 16], [16, 16, 5], [16, 16]]) == [16, 2, 5]


@pytest.mark.variation
def test_the_order_of_a_batch_knows_its_documents():
    """Of equal tokens, those of a long document take longer."""
    model, length = Packed(), 768
    pipe = fxpipe.compile(
        model, microbatch(length), ranks=2, microbatches=3, schedule="1f1b", dimensions={"sequence": length}
    )
    assert pipe.plan.step.documents == Documents("ends", False)
    batch = [{**microbatch(length), "ends": torch.tensor([[0, a, 768, 768, 768]])} for a in (384, 0, 192)]
    batch = [{**one, "ends": one["ends"].to(torch.int32)} for one in batch]
    loss = sum(model(**one) for one in batch) / 3
    torch.testing.assert_close(pipe.run_local(batch).loss, loss.detach())
    (key,) = pipe._runner._orders._programs or [None]
    assert key == ((((length, 8), (length, 16), (length, 10)),), False)
    planner = BatchPlanner.of(pipe.plan)
    shares, lengths = [share / 16 for _, share in key[0][0]], [{"sequence": length}] * 3
    few, one, _ = planner.timeline(lengths, shares).of_each
    assert few.stages[0].forward < 0.8 * one.stages[0].forward
    packed = [[384, 384], [768], [192, 576]]
    timeline = pipe.simulate(lengths=[length] * 3, documents=packed)
    assert timeline.seconds == planner.timeline(lengths, shares).seconds
    assert timeline.seconds < pipe.simulate(lengths=[length] * 3).seconds
    with pytest.raises(fxpipe.SizeError, match="documents are of 1 microbatches, and lengths of 3"):
        pipe.simulate(lengths=[length] * 3, documents=[[length]])
    a, b = pipe.sample_cost
    busiest = max(stage.forward + stage.backward + stage.weight for stage in one.stages)
    assert a * length + b * length**2 == pytest.approx(busiest)
    assert b * length**2 > 0.2 * busiest


def compiled(model: nn.Module, **options: object) -> fxpipe.Pipeline:
    given = {"ranks": 2, "microbatches": 3, "schedule": "zb-h1", "dimensions": {"sequence": LENGTH}}
    return fxpipe.compile(model, microbatch(LENGTH), **(given | options))


@pytest.mark.variation
@pytest.mark.parametrize("recompute", [False, "full"])
def test_documents_are_data_of_a_pipeline(tmp_path, recompute):
    model = Packed()
    pipe = compiled(model, recompute=recompute)
    assert pipe.lengths[0].least == 2
    batch = [microbatch(n) for n in (24, 7, 13, 20)]
    loss = sum(model(**one) * one["ids"].numel() for one in batch) / 64
    gradients = torch.autograd.grad(loss, [*model.parameters()])
    result = pipe.run_local(batch)
    torch.testing.assert_close(result.loss, loss.detach())
    torch.testing.assert_close([result.grads[name] for name, _ in model.named_parameters()], [*gradients])
    assert pipe.check().holds
    ops = [node for node in pipe.graph.nodes if node.target is torch.ops.fxpipe.varlen_attention.default]
    # Half of a square: q @ k and weights @ v, for both heads.
    assert {node_flops(node) for node in ops} == {2 * 2 * LENGTH * LENGTH * WIDTH // 2}
    planner, long = BatchPlanner.of(pipe.plan), {"sequence": 1000 * LENGTH}
    whole, quarters = (planner.costs(long, share).stages[0] for share in (1.0, 0.25))
    assert 0.25 < quarters.forward / whole.forward < 0.3
    assert quarters.weight == whole.weight
    if recompute:
        return
    # Where a saved program is loaded, it registers the op.
    assert "import fxpipe.runtime.program.varlen" in pipe.artifact.programs[0]
    pipe.save(tmp_path / "saved")
    torch.testing.assert_close(fxpipe.load(tmp_path / "saved").run_local(batch).grads, result.grads)


@pytest.mark.in_ci("ends1-5 before 3 in 'ends'")
@pytest.mark.parametrize(
    ("ends", "wrong"),
    [
        ([0, 4, 9, 9, 9], "9 in 'ends'"),
        ([0, 5, 3, 8, 8], "5 before 3 in 'ends'"),
        ([1, 5, 8, 8, 8], "1 in 'ends'"),
        ([-1, 5, 8, 8, 8], "-1 in 'ends'"),
    ],
)
def test_boundaries_that_are_none(ends, wrong):
    """Refused before a step; behind the last one is padding."""
    pipe = compiled(Packed(), ranks=1, schedule="1f1b")
    good, bad = microbatch(12), microbatch(8)
    bad["ends"] = torch.tensor([ends], dtype=torch.int32)
    text = (
        f"^Microbatch 1, of sequence 8, has {wrong}: boundaries of packed samples begin with 0 .* tokens, 8."
    )
    for step in (pipe.step, pipe.run_local):
        with pytest.raises(fxpipe.BatchError, match=text):
            step([good, bad])
    bad["ends"] = torch.tensor([[0, 3, 3, 7, 7]], dtype=torch.int32)
    assert pipe.step([good, bad]).isfinite()
    assert pipe.step_number == 1


@pytest.mark.in_ci("None")
@pytest.mark.parametrize("dimensions", [None, {"sequence": 16}])
def test_boundaries_of_a_whole_batch(dimensions, tmp_path):
    """Each microbatch has its own, whether or not a dimension has a name."""
    model, given = Packed(), {} if dimensions is None else {"dimensions": dimensions}
    given |= {"ranks": 1, "microbatches": 2, "schedule": "1f1b", "evaluation": True}
    pipe = fxpipe.compile(model, microbatch(16), **given)
    pipe.save(tmp_path / "saved")
    both = [microbatch(16), microbatch(16)]
    batch = {name: torch.cat([one[name] for one in both]) for name in both[0]}
    loss = sum(model(**one) for one in both) / 2
    for each in (pipe, fxpipe.load(tmp_path / "saved")):
        for step in (each.step, lambda batch, each=each: each.run_local(batch).loss, each.evaluate):
            torch.testing.assert_close(step(batch), loss)
            ends = torch.tensor([[0, 3, 16, 16, 16], [0, 9, 7, 16, 16]], dtype=torch.int32)
            with pytest.raises(fxpipe.BatchError, match=r"^The batch.* has 9 before 7 in 'ends': boundaries"):
                step({**batch, "ends": ends})
            with pytest.raises(fxpipe.BatchError, match="'ends' has shape"):
                step({**batch, "ends": ends[0]})
        assert each.step_number == 1
    of_two = fxpipe.compile(model, microbatch(16), replicas=2, **given)
    twice = {name: torch.cat([value, value]) for name, value in batch.items()}
    torch.testing.assert_close(of_two.run_local(twice).loss, loss)


class ToOthers(nn.Module):
    """Queries of one length and keys of another, each with boundaries of its own, in two rows of a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, others: Tensor, ends: Tensor) -> Tensor:
        q, k = (self.embed(x)[0, :, None] for x in (ids, others[:, 1:]))
        mixed = flash_attn_varlen_func(q, k, k, *ends[0].unbind(), q.shape[0], k.shape[0])
        return F.cross_entropy(self.head(mixed[:, 0]), ids[0])


def test_boundaries_of_keys():
    def part(n: int, m: int, *ends: int) -> dict[str, Tensor]:
        rows = torch.tensor([[0, n, n], [0, *ends]], dtype=torch.int32)
        words = {"ids": torch.arange(n)[None] % WORDS, "others": torch.arange(m)[None] % WORDS}
        return {**words, "ends": rows[None]}

    sizes = {"source": 16, "target": 12}
    example = part(12, 16, 15, 15)
    pipe = fxpipe.compile(ToOthers(), example, ranks=1, microbatches=1, dimensions=sizes)
    found = {
        each.margins[1]: {term[2:]: term[:2] for term in each.tokens} for each in pipe.plan.step.boundaries
    }
    assert found == {(0, 1): {(0, 1): (1, 1)}, (1, 0): {(1, 0): (1, 1), (0, 0): (-1, 1)}}
    with pytest.raises(fxpipe.BatchError, match=r"has 8 in 'ends': .* the number of tokens, 7"):
        pipe.step([part(9, 8, 7, 8)])
    assert pipe.step([part(9, 8, 3, 7)]).isfinite()


class OfTorch(Block):
    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        _, n, _ = x.shape
        q, k, v = self.mix(x).view(n, 3, 2, WIDTH // 2).unbind(1)
        mixed = torch.nn.attention.varlen.varlen_attn(q, k, v, ends, ends, n, n, window_size=(-1, 0))
        return x + self.out(mixed.reshape(x.shape))


def test_torchs_own_attention():
    """It runs on GPUs alone; for these it is planned, and its programs are proved."""
    model = Packed()
    model.blocks = nn.ModuleList(OfTorch() for _ in range(2))
    pipe = compiled(model.to(torch.bfloat16), costs="H100")
    assert pipe.lengths
    assert pipe.check().holds
    ops = [n for n in pipe.graph.nodes if n.target is torch.ops.torch_attn._varlen_attn.default]
    assert [(kind_of(node), node_flops(node)) for node in ops] == [("attention", 2 * LENGTH**2 * WIDTH)] * 2


def small(model: type[nn.Module], config: type, **more: object) -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 64, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    return model(config(**sizes, **heads, **more, use_cache=False)).eval()


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 4])
def test_models_of_transformers(window):
    """Against their attention with a mask."""
    kind = (LlamaForCausalLM, LlamaConfig) if window is None else (MistralForCausalLM, MistralConfig)
    model = small(*kind, **({} if window is None else {"sliding_window": window}))
    batch = fxpipe.pack([torch.randint(64, (n,)) for n in (9, 5, 3, 12, 7)], tokens=16)
    expected = [model(**one).loss.detach() for one in batch]
    fxpipe.use_packed_attention(model)
    torch.testing.assert_close([model(**one).loss.detach() for one in batch], expected)
    model.config.use_cache = True  # with which other attentions look at all samples
    torch.testing.assert_close([model(**one).loss.detach() for one in batch], expected)
    if window is None:
        example = fxpipe.pack([torch.randint(64, (16,))], tokens=16)[0]
        pipe = fxpipe.compile(model, example, ranks=2, microbatches=2, dimensions={"sequence": 16})
        counts = [(one["labels"][:, 1:] != -100).sum() for one in batch]
        assert documents_of(pipe.graph) == Documents("position_ids", True)
        loss = sum(x * n for x, n in zip(expected, counts, strict=True)) / sum(counts)
        torch.testing.assert_close(pipe.run_local(batch).loss, loss)


class Rotated(nn.Module):
    """Its positions turn tokens and, with ``masks``, keep documents apart."""

    def __init__(self, masks: bool) -> None:
        super().__init__()
        self.embed, self.head, self.masks = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS), masks

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids) * position_ids[..., None].to(torch.float64).cos()
        document = (position_ids == 0).cumsum(1)
        mask = document[:, None] == document[..., None] if self.masks else None
        x = x + F.scaled_dot_product_attention(x, x, x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.in_ci("True")
@pytest.mark.parametrize("masks", [False, True])
def test_packed_samples_that_look_at_each_other(masks):
    """A warning with the first step that has several in a row, and no other."""
    samples = [torch.randint(WORDS, (n,)) for n in (8, 3, 5)]
    alone, both = fxpipe.pack(samples, tokens=8)
    options = {"ranks": 1, "microbatches": 1, "dimensions": {"sequence": 8}}
    pipe = fxpipe.compile(Rotated(masks), alone, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.run_local([alone])
        if masks:
            pipe.run_local([alone, both])
            return
    with pytest.warns(UserWarning, match="position_ids begin anew within rows, and the model only adds or"):
        pipe.run_local([alone, both])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.run_local([alone, both])


def test_values_that_are_narrower_than_queries():
    """As in latent attention."""
    q, k, v = (torch.randn(1, 2, 5, width) for width in (6, 6, 3))
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    found, _ = packed_attention(nn.Linear(2, 2), q, k, v, None, is_causal=True, position_ids=positions)
    alone = [F.scaled_dot_product_attention(*(x[:, :, at] for x in (q, k, v)), is_causal=True) for at in AT]
    torch.testing.assert_close(found, torch.cat(alone, 2).transpose(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ((RobertaForCausalLM, RobertaConfig), "RobertaForCausalLM does not count positions from 0"),
        ((MambaForCausalLM, MambaConfig), "MambaForCausalLM mixes the samples of a row"),
        ((Gemma2ForCausalLM, Gemma2Config), "takes no attention mask, soft cap or sink"),
        (
            (T5ForConditionalGeneration, T5Config),
            "was tried on two packed samples on cpu, and cannot",
        ),
    ],
)
def test_models_that_do_not_keep_samples_apart(kind, message):
    """They are refused, and stay as they were."""
    model = small(*kind, d_model=8, d_ff=8).train()
    before = model.config._attn_implementation
    with pytest.raises(fxpipe.OptionError, match=message):
        fxpipe.use_packed_attention(model)
    assert model.config._attn_implementation == before
    assert model.training


def test_what_it_does_not_take():
    q, k = torch.randn(4, 3, 2), torch.randn(4, 2, 2)
    ends = torch.tensor([0, 4])
    with pytest.raises(fxpipe.OptionError, match="Queries have 3 heads, and keys 2: make the one a multiple"):
        varlen_attn(q, k, k, ends, None, 4, 4)
    with pytest.raises(fxpipe.OptionError, match="Queries have 2 heads, and keys 1: give enable_gqa=True"):
        varlen_attn(k, k[:, :1], k[:, :1], ends, None, 4, 4)
    with pytest.raises(fxpipe.OptionError, match="Queries are 2 wide, and values 1"):
        varlen_attn(k, k, k[..., :1], ends, None, 4, 4)
    with pytest.raises(fxpipe.OptionError, match=r"dropout_p is 0.1, and attention of packed documents"):
        flash_attn_varlen_func(k, k, k, ends, ends, 4, 4, dropout_p=0.1)
    x = torch.randn(1, 2, 4, 2)
    with pytest.raises(fxpipe.OptionError, match="Linear gives attention no position_ids of its keys"):
        packed_attention(nn.Linear(2, 2), x, x, x, None)
    with pytest.raises(fxpipe.OptionError, match="no position_ids of its keys"):
        packed_attention(
            nn.Linear(2, 2), x, x[:, :, :3], x[:, :, :3], None, position_ids=torch.arange(4)[None]
        )
    with pytest.raises(fxpipe.OptionError, match='"packed" takes no attention mask'):
        packed_attention(nn.Linear(2, 2), x, x, x, torch.ones(1), position_ids=torch.arange(4)[None])
    model = fxpipe.use_packed_attention(small(LlamaForCausalLM, LlamaConfig))
    ids = torch.ones(1, 3, dtype=torch.long)
    with pytest.raises(fxpipe.OptionError, match='"packed" takes no attention_mask'):
        model(ids, attention_mask=torch.tensor([[0, 1, 1]]))
    with pytest.raises(fxpipe.OptionError, match="Linear is no model of transformers"):
        fxpipe.use_packed_attention(nn.Linear(2, 2))
