"""``fxpipe plan``: meshes for a model on devices that are not here."""

import json

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F

import fxpipe
from fxpipe.api.arguments import DOCS
from fxpipe.cli import main
from fxpipe.cost.devices.known_devices import peak_rate

pytestmark = pytest.mark.slow

WIDTH, WORDS, ROWS, LENGTH, BLOCKS = 512, 1000, 4, 256, 4


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = hidden + torch.relu(block(hidden))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


def words():
    model = Words()
    assert model.head.weight.is_meta
    return model, {"ids": torch.zeros(ROWS, LENGTH, dtype=torch.long)}


def numbers():
    return nn.Linear(8, 8), (torch.zeros(2, 8),), lambda y, x: y.square().mean()


def a_model():
    return Words()


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 3 * 128) for _ in range(2))
        self.dropout = dropout

    def forward(self, x):
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (3, 4, 32)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
            x = x + mixed.transpose(1, 2).flatten(2)
        return x.square().mean()


def over(model, mesh):
    parallelize_module(model, mesh, fxpipe.ContextParallel({"ids": 1}))


def over_words(model, mesh):
    style = fxpipe.PaddedParallel(ColwiseParallel())
    parallelize_module(
        model, mesh, {name: style for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    )


def attention():
    return Attention(0.0), (torch.zeros(2, 256, 128),)


def attention_with_dropout():
    return Attention(0.1), (torch.zeros(2, 256, 128),)


@pytest.mark.variation
def test_steps_of_samples_of_a_distribution(capsys):
    """For the fastest mesh, beside its step of microbatches that are as long as the example."""
    given = ["--ranks", "2", "--replicas", "2", "--microbatches", "8", "--dimension", f"length={LENGTH}"]
    (entry,) = planned(capsys, *given, "--lengths", "lognormal:mean=40,sigma=1", "--seed", "5")
    assert (entry["steps"], entry["samples"], entry["seed"]) == (4, 8 * ROWS * 2, 5)
    longest, buckets, *packed = entry["ways"]
    assert [way["way"] for way in packed] == ["packed to 64", "packed to 128", "packed to 256"]
    (mesh,) = entry["meshes"][:1]
    full = mesh["seconds"] * 1.01
    # Samples that are padded take no longer than the example's length, and less where they are packed.
    assert full >= longest["seconds"] > buckets["seconds"] > min(way["seconds"] for way in packed)
    assert all(way["filled"] > buckets["filled"] > longest["filled"] for way in packed[:1])
    rows = ["--dimension", f"rows={ROWS}", "--lengths", "lognormal:mean=40,sigma=1", "--seed", "5"]
    (entry,) = planned(capsys, *given, *rows)
    by_length = entry["ways"][2]
    assert by_length["way"] == "rows by length"
    assert longest["filled"] < by_length["filled"] < 1
    assert by_length["microbatches"] < buckets["microbatches"]
    assert by_length["seconds"] < buckets["seconds"]
    split = ["--vocab-parallel", "2-barrier"]
    assert main([*GIVEN, *given, *split, "--lengths", "40,41", "--tokens", "80"]) == 0
    assert "packed to 80 *" in capsys.readouterr().out
    assert main([*GIVEN, "--ranks", "2", "--microbatches", "8", "--lengths", "40"]) != 0
    assert "--lengths needs one --dimension NAME=N" in capsys.readouterr().err


GIVEN = ["plan", "--model", f"{__name__}:words", "--device", "H100", "--schedule", "1f1b"]


def planned(capsys, *more: str) -> list[dict]:
    assert main([*GIVEN, *more, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_throughput_and_utilization(capsys):
    """Of all replicas; matrix products alone count, three for each of the forward but the first block's."""
    ((entry),) = planned(capsys, "--devices", "4", "--batch", "32")
    rows = [row for row in entry["meshes"] if row["seconds"] is not None]
    assert {(row["ranks"], row["replicas"]) for row in entry["meshes"]} == {(1, 4), (2, 2), (4, 1)}
    assert {row["shard"] for row in entry["meshes"]} == {"", "optimizer", "parameters"}
    flops = 3 * 2 * 32 * LENGTH * WIDTH * (BLOCKS * WIDTH + WORDS)
    for row in rows:
        assert row["microbatches"] * row["replicas"] * ROWS == 32
        assert row["tokens_per_second"] == pytest.approx(32 * LENGTH / row["seconds"])
        utilization = flops / (4 * row["seconds"] * peak_rate("H100", "float32"))
        assert row["mfu"] == pytest.approx(utilization)


def test_fused_kernels_post_validation_and_a_head_in_parts(capsys):
    where = ["--ranks", "2", "--replicas", "1", "--microbatches", "4"]
    ways = [], ["--backend", "inductor"], ["--validation", "post"], ["--head-chunks", "8"]
    plain, fused, ahead, parts = (planned(capsys, *where, *way)[0]["meshes"][0] for way in ways)
    assert fused["seconds"] < plain["seconds"]
    assert parts["seconds"] > plain["seconds"]  # smaller products, and the logits twice
    # A step of many has its update, and the copies that undo it.
    assert ahead["seconds"] > plain["seconds"]
    assert ahead["memory"] > plain["memory"]


@pytest.mark.variation
def test_lanes_are_compared_as_ranks_are(capsys):
    given = ["--devices", "8", "--nodes", "2", "--batch", "64"]
    here = [f"{__name__}:over"]
    (entry,) = planned(capsys, *given, "--lanes", "1,2,4", "--parallelize", *here)
    sizes = [(one["ranks"], one["replicas"], one["lanes"]) for one in entry["meshes"]]
    assert {ranks * replicas * lanes for ranks, replicas, lanes in sizes} == {8}
    assert {lanes for *_, lanes in sizes} == {1, 2, 4}
    (alone,) = planned(capsys, *given, "--lanes", "4", "--parallelize", *here)
    assert {(one["lanes"], one["way"]) for one in alone["meshes"]} == {(4, "")}
    ways = ["--parallelize", *here, "--parallelize", f"{__name__}:over_words"]
    (both,) = planned(capsys, *given, "--lanes", "1,4", *ways)
    assert {(one["lanes"], one["way"]) for one in both["meshes"]} == {(1, ""), (4, "over"), (4, "over_words")}
    # Four lanes do the arithmetic of one device in less than its time, and not in a quarter of it.
    (plain,) = planned(capsys, "--devices", "2", "--batch", "64")
    four, one = (
        next(row for row in each["meshes"] if (row["ranks"], row["shard"]) == (1, "optimizer"))
        for each in (alone, plain)
    )
    assert one["seconds"] / 4 < four["seconds"] < one["seconds"]
    assert all(one["mfu"] < 1 for one in entry["meshes"] if one["seconds"])


def test_sizes_are_planned_without_another_trace(capsys):
    """As a plan for an example of that size; a batch has as many rows as before."""
    given = "--devices", "2", "--ranks", "2", "--batch", "16", "--dimension", f"length={LENGTH}"
    whole, half, rows = planned(capsys, *given, "--size", "length=128", "--size", "microbatch=2")
    assert whole["sizes"] == {"microbatch": ROWS, "length": LENGTH}
    (at,), (shorter,), (fewer,) = (entry["meshes"] for entry in (whole, half, rows))
    assert (half["sizes"]["length"], rows["sizes"]["microbatch"]) == (128, 2)
    assert (at["microbatches"], shorter["microbatches"], fewer["microbatches"]) == (4, 4, 8)
    assert shorter["tokens_per_second"] * shorter["seconds"] == pytest.approx(16 * 128)
    assert fewer["tokens_per_second"] * fewer["seconds"] == pytest.approx(16 * LENGTH)
    assert shorter["seconds"] < at["seconds"]
    assert shorter["memory"] < at["memory"]
    flops = [entry["mfu"] * entry["seconds"] for entry in (at, shorter, fewer)]
    assert flops == pytest.approx([flops[0], flops[0] / 2, flops[0]])


def test_tables_fit_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    limit = "--memory-limit", "24MiB"
    assert (
        main([*GIVEN, "--devices", "64", "--nodes", "8", "--batch", "512", *limit, "--recompute", "auto"])
        == 0
    )
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith(
        "Words on 64 x H100 SXM, 8 on each machine; batch of 512 rows; optimizer state 8 B"
    )
    table = lines[: next(k for k, line in enumerate(lines) if line.startswith("mesh: ranks x replicas"))]
    assert max(map(len, table)) <= 80
    assert {"tokens/s", "MFU"} <= set(table[0].split())
    assert sum(" * " in line for line in table) == 1
    assert not [line for line in table[2:] if line.strip() and " x " not in line[:12]], "a row is one line"


def test_the_table_says_what_is_missing(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*GIVEN, "--devices", "4", "--batch", "32", "--memory-limit", "1MiB"]) == 2
    printed = capsys.readouterr()
    assert printed.out.count("≥") == 7 + 1
    assert "No mesh (ranks x replicas) fits: the least memory is needed by" in printed.err


def large_model():
    model = nn.Sequential(*(nn.Linear(65536, 65536, bias=False) for _ in range(8)))
    return model, (torch.zeros(1, 65536),), lambda y, x: y.sum()


def test_a_plan_that_no_such_device_holds(capsys):
    where = ["plan", "--model", f"{__name__}:large_model", "--device", "H100", "--schedule", "1f1b"]
    asked = [*where, "--ranks", "1", "--replicas", "1", "--microbatches", "1"]
    assert main(asked) == 0
    text = "No H100 SXM holds 512 GiB: it has 80 GB. Give --memory-limit."
    assert text in " ".join(capsys.readouterr().out.split())
    assert main([*where, "--ranks", "8", "--replicas", "1", "--microbatches", "1"]) == 0
    assert "holds" not in capsys.readouterr().out


def test_samples_where_the_example_has_no_tokens(capsys):
    model = ["--model", f"{__name__}:numbers", "--ranks", "1", "--replicas", "2", "--microbatches", "3"]
    (entry,) = planned(capsys, *model)
    assert entry["meshes"][0]["samples_per_second"] == pytest.approx(12 / entry["meshes"][0]["seconds"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "8"], "Give ranks, or devices"),
        (["--devices", "4"], "Give microbatches, of each replica, or batch"),
        (["--devices", "4", "--batch", "32", "--nodes", "3"], "4 devices are no multiple of 3 nodes"),
        (["--devices", "4", "--batch", "32", "--device", "H1000"], "'H1000'"),
        (
            ["--devices", "4", "--batch", "32", "--lanes", "1,2"],
            "--lanes of several numbers and --parallelize",
        ),
        (
            [*("--devices", "4", "--batch", "32", "--lanes", "3"), "--parallelize", f"{__name__}:over"],
            "3 lanes share a machine: 4 devices on 1 node are no multiple of them",
        ),
        (["--devices", "4", "--batch", "32", "--schedule", "2f2b"], "Unknown schedule '2f2b'"),
        (["--devices", "4", "--batch", "32", "--without", "head-chunks"], "invalid choice: 'head-chunks'"),
        (["--devices", "4", "--batch", "32", "--size", "length=8"], "No dimension is called 'length'"),
        (["--devices", "4", "--batch", "32", "--model", f"{__name__}:none"], "There is no function"),
        (
            ["--devices", "4", "--batch", "32", "--model", "./mine/models.py:Large"],
            "names a file: write the module, mine.models:Large",
        ),
        (
            ["--devices", "4", "--batch", "32", "--model", "mine"],
            "is no function: write module:function",
        ),
        (
            ["--devices", "4", "--batch", "32", "--model", f"{__name__}:a_model"],
            "it must give (model, example)",
        ),
    ],
)
def test_refused(capsys, arguments, message):
    assert main([*GIVEN, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_help_of_an_option_is_the_first_sentence_of_its_docs(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    for name in ("recompute", "replicas", "memory_limit", "schedule"):
        sentence = DOCS[name].split(". ")[0].rstrip(".").replace("`", "")
        assert f"{sentence[0].lower()}{sentence[1:]}" in printed.replace("- ", "-")


@pytest.mark.in_ci("A100-True")
@pytest.mark.parametrize(("device", "has_a_kernel"), [("A100", True), ("EPYC 7763", False)])
def test_attention_with_dropout_is_a_kernel_of_accelerators_alone(capsys, device, has_a_kernel):
    def seconds_and_memory(model: str) -> list[tuple[float, object]]:
        given = ["--model", f"{__name__}:{model}", "--device", device, "--devices", "2", "--batch", "8"]
        assert main(["plan", *given, "--schedule", "1f1b", "--json"]) == 0
        (entry,) = json.loads(capsys.readouterr().out)
        return [(row["seconds"], row["memory"]) for row in entry["meshes"] if row["seconds"]]

    with_dropout, without = seconds_and_memory("attention_with_dropout"), seconds_and_memory("attention")
    assert (with_dropout == without) == has_a_kernel
