"""What two ranks run in tests of the model that a script holds: whole scripts beside plain torch."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torchrun_worker import Rank
from zoo import captured_once

import fxpipe

WIDTH, WORDS, ROWS, MICROBATCHES = 8, 16, 4, 4
SHAPE = {"microbatches": MICROBATCHES, "schedule": "1f1b", "check": False}
#: Replicas of one rank, which have two rows each.
REPLICAS = {"microbatches": 2, "schedule": "gpipe", "check": False, "ranks": 1, "replicas": 2}


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Normed(Words):
    """Has statistics that each step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.cross_entropy(self.head(self.norm(x.flatten(0, 1))), labels.flatten())


def words(length: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(length)
    return torch.randint(WORDS, (ROWS, length)), torch.randint(WORDS, (ROWS, length))


def rows_of(batch: tuple[torch.Tensor, ...], begin: int, end: int) -> tuple[torch.Tensor, ...]:
    return tuple(x[begin:end] for x in batch)


def built(kind: type[nn.Module] = Words) -> tuple[nn.Module, nn.Module]:
    """A model, and one that plain torch trains."""
    torch.manual_seed(0)
    model = kind()
    return model, copy.deepcopy(model)


def difference(found: dict[str, torch.Tensor], expected: nn.Module) -> float:
    return max(float((found[n].double() - t.double()).abs().max()) for n, t in expected.state_dict().items())


class Script:
    """A pipeline and plain torch, each with an optimizer, on the same batches."""

    def __init__(self, kind: type[nn.Module] = Words, **options: object) -> None:
        self.model, self.plain = built(kind)
        self.whole = words()
        options = {**SHAPE, "ranks": 2, **options}
        rows = ROWS // (options["microbatches"] * options.get("replicas", 1))
        with captured_once(kind, options["microbatches"], rows):
            self.pipe = fxpipe.compile(self.model, rows_of(self.whole, 0, rows), **options)
        begin = 2 * self.pipe.replica if self.pipe.replicas > 1 else 0
        self.batch = rows_of(self.whole, begin, begin + ROWS // self.pipe.replicas)
        self.optimizer = self.pipe.optimizer(torch.optim.Adam, lr=0.05)
        self.plain_optimizer = torch.optim.Adam(self.plain.parameters(), lr=0.05)

    def step(self) -> None:
        self.pipe.step(self.batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.plain(*self.whole).backward()
        self.plain_optimizer.step()
        self.plain_optimizer.zero_grad()

    def synchronized(self) -> float:
        self.pipe.synchronize()
        return difference(self.model.state_dict(), self.plain)


def renamed(model: Words) -> None:
    """Use parameters that have got other names, as pruning gives."""
    for layer in model.layers:
        layer.other = layer._parameters.pop("weight")
    try:
        sum(layer.other.sum() for layer in model.layers)
    finally:
        for layer in model.layers:
            layer.weight = layer._parameters.pop("other")


def uses(script: Script) -> dict[str, Callable[[], object]]:
    model, plain = script.model, script.plain
    other = dict(plain.named_parameters())
    return {
        "forward": lambda: model(*script.whole),
        "state_dict": model.state_dict,
        "torch.save": lambda: torch.save(model, io.BytesIO()),
        "deepcopy": lambda: copy.deepcopy(model),
        "load_state_dict": lambda: model.load_state_dict(plain.state_dict()),
        "to": lambda: model.to(torch.float64),
        "vmap": lambda: [torch.vmap(torch.sum)(p) for p in model.parameters()],
        "renamed": lambda: renamed(model),
        "average by hand": lambda: [other[n].data.lerp_(p, 0.0) for n, p in model.named_parameters()],
        "average in the model": lambda: [p.data.lerp_(other[n], 0.0) for n, p in model.named_parameters()],
    }


def model_in_hands(rank: Rank) -> None:
    """What a script does with the model after some steps."""
    script = Script(Normed, microbatches=1)
    counted = sum(p.nbytes for p in script.plain.parameters())
    for _ in range(2):
        script.step()
    rank.text("counts parameters", sum(p.nbytes for p in script.model.parameters()) == counted)
    held = {id(p) for p in script.pipe.parameters.values()}
    rank.text("part", len(held) < len([*script.model.parameters()]))
    for name, use in uses(script).items():
        rank.error(f"use {name}", use)
    rank.error("a random buffer", script.model.norm.running_mean.normal_)
    rank.error(
        "a sum into a buffer", lambda: script.model.norm.running_mean.add_(script.model.norm.running_var)
    )
    for model in (script.model, script.plain):  # as before the last epoch with other weights
        model.norm.reset_running_stats()
        model.norm.running_mean += 0.25
    zeros = [torch.zeros_like(p) for p in script.model.parameters()]
    rank.text("zeros", all(type(x) is torch.Tensor and not x.any() for x in zeros))
    differences = [
        script.synchronized(),
        float((script.model(*script.whole) - script.plain(*script.whole)).detach()),
    ]
    script.pipe.step(script.batch)
    rank.error("use after a step", lambda: script.model(*script.whole))
    script.optimizer.zero_grad()
    script.plain(*script.whole)
    script.step()
    rank.text("synchronized", [*differences, script.synchronized()])


def old_state_dicts(rank: Rank) -> None:
    """They are taken while the model is whole, and saved after a step."""
    model, _ = built()
    before = model.state_dict()
    pipe = fxpipe.compile(model, rows_of(words(), 0, 1), ranks=2, **SHAPE)
    optimizer = pipe.optimizer(torch.optim.Adam, lr=0.05)
    rank.error("state dict before a step", lambda: copy.deepcopy(before))
    pipe.step(words())
    optimizer.step()
    rank.error("state dict of before compile", lambda: torch.save(before, io.BytesIO()))
    pipe.synchronize()
    after = model.state_dict()
    values = copy.deepcopy(after)
    pipe.step(words())
    optimizer.step()
    rank.error("state dict of after synchronize", lambda: [value.sum() for value in after.values()])
    rank.error("copy of a state dict", lambda: [value.sum() for value in values.values()])


def changed_on_one_rank(rank: Rank) -> None:
    """Weights that rank 0 alone loads into a whole model, and then all ranks."""
    script = Script()
    script.step()
    script.synchronized()
    state = {name: 0.5 * value for name, value in script.plain.state_dict().items()}
    for on in ("no rank", "one rank", "all ranks"):
        if on == "all ranks" or (on == "one rank" and rank.number == 0):
            script.model.load_state_dict(state)
        rank.error(f"weights changed on {on}", script.pipe.check_alike)
    script.plain.load_state_dict(state)
    script.step()
    rank.text("changed on all ranks", script.synchronized())


def changed_in_place_on_one_rank(rank: Rank) -> None:
    """Weights of a whole model that rank 0 alone scales before a step."""
    script = Script()
    script.step()
    script.synchronized()
    if rank.number == 0:
        with torch.no_grad():
            for parameter in script.model.parameters():
                parameter.mul_(0.5)
    rank.error("weights scaled on one rank", lambda: script.pipe.step(script.batch))


def drawn_on_each_rank(rank: Rank) -> None:
    """Weights of a whole model that each rank draws by a seed of its own, and then by the same one."""
    script = Script()
    script.step()
    script.synchronized()
    for how, seed in (("by own seeds", rank.number), ("alike", 7)):
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in script.model.parameters():
                parameter.normal_()
        rank.error(f"weights drawn {how}", script.pipe.check_alike)
    rank.error("a step of weights drawn alike", lambda: script.pipe.step(script.batch))


def own_optimizer(rank: Rank) -> None:
    """Made of the model's parameters: it trains what the rank holds, and copies of the rest are gone then."""
    script = Script()
    script.optimizer = torch.optim.Adam(script.model.parameters(), lr=0.05)
    script.step()
    norm_by_hand(rank, script)
    script.pipe.synchronize()
    script.optimizer.step()
    rank.error("use after an own step", lambda: script.model(*script.whole))
    script.plain(*script.whole).backward()
    script.plain_optimizer.step()
    rank.text("own optimizer", script.synchronized())


class Reads(torch.optim.Optimizer):
    def __init__(self, parameters: Iterable[nn.Parameter]):
        super().__init__(parameters, {})

    def step(self) -> None:  # type: ignore[override]
        self.gradients = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]


def norm_by_hand(rank: Rank, script: Script) -> None:
    """Of the gradients that are here; an optimizer asks for them, too."""
    model = script.model
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        Reads(model.parameters()).step()
        model.zero_grad()
        of_optimizers = len(told)
        for _ in range(2):
            sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
        script.pipe.step(script.batch)
    rank.text("norm by hand", [of_optimizers, *(str(warning.message) for warning in told)])


def scaled_by_hand(rank: Rank) -> None:
    """Weights behind an update, by the norm of those that are here."""
    script = Script()
    script.step()
    parameters = script.pipe.parameters.values()
    with torch.no_grad():
        norm = torch.stack([p.norm() for p in parameters]).norm()
        for parameter in parameters:
            parameter.div_(norm)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        script.pipe.step(script.batch)
    rank.text("scaled by hand", [str(warning.message) for warning in told])


def changed_between(rank: Rank, name: str, **options: object) -> None:
    """Weights that a script changes between steps, in a model that is whole then, or that it loads."""
    script = Script(**options)
    script.step()
    rank.error(f"{name} use", lambda: script.model(*script.whole))
    found = [script.synchronized()]
    with torch.no_grad():
        for parameter in (*script.model.parameters(), *script.plain.parameters()):
            parameter.mul_(0.9)
    script.step()
    found.append(script.synchronized())
    state = {n: 0.5 * t for n, t in script.plain.state_dict().items()}
    script.pipe.load_state_dict(state)
    script.plain.load_state_dict(state)
    script.step()
    script.step()
    rank.text(f"{name} changed", [*found, script.synchronized()])


def two_lengths(rank: Rank) -> None:
    """A model compiled for two lengths, with one optimizer, in turns."""
    script = Script(split_points=["layers.1"])
    example = rows_of(words(9), 0, 1)
    rank.error(
        "cut otherwise",
        lambda: fxpipe.compile(script.model, example, ranks=2, split_points=["layers.3"], **SHAPE),
    )
    longer = fxpipe.compile(script.model, example, like=script.pipe, **SHAPE)
    rank.text(
        "like", [stage.parameters for stage in longer.stages] == [s.parameters for s in script.pipe.stages]
    )
    script.pipe.full_state_dict()  # the model was whole to be compiled once more, and is not any more
    pipes = {5: script.pipe, 9: longer}
    for length in (5, 9, 9, 5):
        script.pipe, script.batch, script.whole = pipes[length], words(length), words(length)
        script.step()
    rank.text("two lengths", script.synchronized())
    rank.text("steps", [pipe.step_number for pipe in pipes.values()])


class Players(nn.Module):
    def __init__(self, maker: nn.Module, judge: nn.Module) -> None:
        super().__init__()
        self.maker, self.judge = maker, judge


class Makes(Players):
    def forward(self, noise, real):
        return F.softplus(-self.judge(self.maker(noise))).mean()


class Judges(Players):
    def forward(self, noise, real):
        made = self.judge(self.maker(noise).detach())
        return (F.softplus(made) + F.softplus(-self.judge(real))).mean()


def players() -> tuple[nn.Module, nn.Module]:
    def made(layers: int) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)))

    return made(3), made(2)


def only(trained: nn.Module, other: nn.Module) -> None:
    trained.requires_grad_(True)
    other.requires_grad_(False)


def two_players(rank: Rank) -> None:
    """Two pipelines of wrappers that share their modules and are gone, each with an optimizer of its own."""
    torch.manual_seed(0)
    own = players()
    plain = copy.deepcopy(own)
    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    example = rows_of(batch, 0, 1)
    only(*own)
    first = fxpipe.compile(Makes(*own), example, ranks=2, **SHAPE)
    only(*own[::-1])
    second = fxpipe.compile(Judges(*own), example, like=first, **SHAPE)
    optimizers = [pipe.optimizer(torch.optim.Adam, lr=0.02) for pipe in (first, second)]
    theirs = [torch.optim.Adam(module.parameters(), lr=0.02) for module in plain]
    for turn in (1, 0, 1, 0):
        for modules in (own, plain):
            only(*(modules if turn == 0 else modules[::-1]))
        (first, second)[turn].step(batch)
        (Makes, Judges)[turn](*plain)(*batch).backward()
        for optimizer in (optimizers[turn], theirs[turn]):
            optimizer.step()
            optimizer.zero_grad()
    first.synchronize()
    found = [difference(a.state_dict(), b) for a, b in zip(own, plain, strict=True)]
    rank.text("two players", max(found))


def judged_first(rank: Rank) -> None:
    """The judge is called twice in its own step, where both ranks have it; the maker's step follows."""
    torch.manual_seed(0)
    own = players()
    plain = copy.deepcopy(own)
    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    first = fxpipe.compile(Judges(*own), rows_of(batch, 0, 1), ranks=2, **SHAPE)
    second = fxpipe.compile(Makes(*own), rows_of(batch, 0, 1), like=first, **SHAPE)
    optimizers, theirs = (
        [torch.optim.Adam(module.parameters(), lr=0.02) for module in modules] for modules in (own, plain)
    )
    for turn in (1, 0, 1, 0):
        (second, first)[turn].step(batch)
        (Makes, Judges)[turn](*plain)(*batch).backward()
        for each in (optimizers, theirs):
            each[turn].step()
            for optimizer in each:
                optimizer.zero_grad()
    second.synchronize()
    found = [difference(a.state_dict(), b) for a, b in zip(own, plain, strict=True)]
    rank.text("judged first", max(found))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = players()[0], nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)


class Head(nn.Module):
    def __init__(self, model: Heads, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, x):
        return getattr(self.model, self.name)(self.model.trunk(x)).square().mean()


def two_heads(rank: Rank) -> None:
    """Each pipeline uses a head that the other one has for the whole model's sake alone."""
    model, plain = built(Heads)
    batch = (torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)),)
    first = fxpipe.compile(Head(model, "first"), rows_of(batch, 0, 1), ranks=2, **SHAPE)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    second = fxpipe.compile(Head(model, "second"), rows_of(batch, 0, 1), like=first, **SHAPE)
    theirs = torch.optim.Adam(plain.parameters(), lr=0.02)
    for name in ("first", "second", "second", "first"):
        (first if name == "first" else second).step(batch)
        Head(plain, name)(*batch).backward()
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()
    states = [pipe.full_state_dict(rank=None) for pipe in (first, second)]
    found = [difference({n.removeprefix("model."): t for n, t in s.items()}, plain) for s in states]
    second.synchronize()
    rank.text("two heads", [*found, difference(model.state_dict(), plain)])
    own = first.optimizer(torch.optim.SGD, lr=0.02)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            second.step(batch)
            own.step()
            own.zero_grad()
    rank.text("unused gradients", [str(w.message) for w in caught if "no optimizer" in str(w.message)])


def decay(updates: int) -> float:
    return min(0.9, (1 + updates) / (10 + updates))


def averages(rank: Rank, name: str, **options: object) -> None:
    """An average beside the model: evaluated, gathered, synchronized, and resumed from a checkpoint."""
    script = Script(evaluation=True, **options)
    average, plain = script.pipe.average(decay), copy.deepcopy(script.plain)

    def steps() -> None:
        for _ in range(2):
            rate = 1 - decay(average.updates)
            script.step()
            average.step()
            for mean, weight in zip(plain.parameters(), script.plain.parameters(), strict=True):
                mean.data.lerp_(weight.data, rate)

    steps()
    with average.applied():
        loss = script.pipe.evaluate(script.batch)
        found = [difference(script.pipe.full_state_dict(rank=None), plain)]
        script.pipe.synchronize()
        found += [difference(script.model.state_dict(), plain), float((loss - plain(*script.whole)).detach())]
    found.append(difference(script.pipe.full_state_dict(rank=None), script.plain))
    rank.error(f"{name} use", lambda: script.model(*script.whole))
    objects = {"optimizer": script.optimizer, "state": {"average": average}}
    with fxpipe.Checkpointer(script.pipe, rank.directory / f"{name} checkpoints", **objects) as checkpoints:
        checkpoints.save()
        kept = copy.deepcopy((script.plain, script.plain_optimizer.state_dict(), plain))
        steps()
        checkpoints.resume()
    rank.text(f"{name} updates", average.updates)
    script.plain.load_state_dict(kept[0].state_dict())
    script.plain_optimizer.load_state_dict(kept[1])
    plain.load_state_dict(kept[2].state_dict())
    steps()
    with average.applied():
        found.append(difference(script.pipe.full_state_dict(rank=None), plain))
    rank.text(f"{name} averages", found)


def trained_inside(rank: Rank) -> None:
    script = Script()
    average = script.pipe.average(0.5)

    def train() -> None:
        with average.applied():
            script.pipe.step(script.batch)
            script.optimizer.step()

    rank.error("trained inside", train)


class Taught(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = players()[0], players()[0]
        self.teacher.requires_grad_(False)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return (self.last(self.student(x)) - self.teacher(x + 0.1)).square().mean()


def teacher(rank: Rank, name: str, **options: object) -> None:
    """A teacher that lies on another rank than its student, or with other rows on each replica."""
    model, plain = built(Taught)
    torch.manual_seed(1)
    whole = torch.randn(ROWS, WIDTH)
    pipe = fxpipe.compile(model, (whole[:1],), **{**SHAPE, "ranks": 2, **options})
    own = whole[2 * pipe.replica : 2 * pipe.replica + 2] if pipe.replicas > 1 else whole
    average = pipe.average(0.9, into={"teacher.*": "student.*"})
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.5)
    trained = [p for p in plain.parameters() if p.requires_grad]
    for _ in range(3):
        pipe.step((own,))
        optimizer.step()
        optimizer.zero_grad()
        average.step()
        grads = torch.autograd.grad(plain(whole), trained)
        with torch.no_grad():
            for parameter, grad in zip(trained, grads, strict=True):
                parameter.sub_(grad, alpha=0.5)
            for mean, weight in zip(plain.teacher.parameters(), plain.student.parameters(), strict=True):
                mean.lerp_(weight, 0.1)
    rank.text(f"{name} taught", difference(pipe.full_state_dict(rank=None), plain))


def main(directory: Path) -> None:
    rank = Rank(directory)
    model_in_hands(rank)
    old_state_dicts(rank)
    changed_on_one_rank(rank)
    own_optimizer(rank)
    scaled_by_hand(rank)
    changed_between(rank, "split", vocab_parallel=True)
    changed_between(rank, "rows", **REPLICAS, shard="parameters")
    changed_between(rank, "updated", **REPLICAS, shard="optimizer")
    two_lengths(rank)
    two_players(rank)
    judged_first(rank)
    two_heads(rank)
    averages(rank, "plain")
    averages(rank, "split tables", vocab_parallel=True, validation="post")
    averages(rank, "divided", **REPLICAS, shard="optimizer")
    trained_inside(rank)
    teacher(rank, "apart")
    teacher(rank, "divided", **REPLICAS, shard="parameters")
    drawn_on_each_rank(rank)
    changed_in_place_on_one_rank(rank)
