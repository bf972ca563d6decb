"""The certificate (``fxpipe/certificate/``): what it accepts, what it rejects, and how long it takes.

    python benchmarks/certificate.py --settings 100 --output benchmarks/results/certificate_settings.txt
    python benchmarks/certificate.py --mutations 10000 --output benchmarks/results/certificate_mutations.txt
    python benchmarks/certificate.py --mutations 900 --lanes --output benchmarks/results/certificate_lanes.txt
    python benchmarks/certificate.py --mutations 2000 --chunks --output certificate_chunks.txt
    python benchmarks/certificate.py --attribution 200 --output benchmarks/results/certificate_attribution.txt
    python benchmarks/certificate.py --large --output benchmarks/results/certificate_large.txt

``--settings``: models of ``tests/zoo.py`` and ``tests/models.py`` in random settings, each of which must be
accepted, and run as the plan has it.  ``--mutations``: random edits of their programs (``mutations.py``), in
pieces with ``--tally``.  An edit that is accepted is run, and must give the same bits of loss, gradients and
outputs and the same messages; where it holds more memory between two ops, sends two values in each other's
place, or adds to a gradient in another order, which rounds differently, the certificate must say that it runs
otherwise than the plan ("told").
``--chunks``: of language models whose output layer is in parts of the tokens, with several losses, in the
lines that compute it.
``--attribution``: edits of programs of small pipelines that are rejected: whether the first problem is at the
line that was edited, or names it or what was edited, and how many problems one edit has.
``--large``: GPT-2 of 96 layers, 64 ranks and 256 microbatches on the meta device.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import inf
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from harmless import HARMLESS, harmless
from mutations import edited_lines, exchange_mutated, mutated, part_mutated
from report import ROOT, Report

import fxpipe
from fxpipe.certificate import check as checking
from fxpipe.certificate.check import check_against, check_artifact
from fxpipe.certificate.reference import reference_of
from fxpipe.certificate.terms.identities import RULES
from fxpipe.certificate.terms.terms import Terms
from fxpipe.plan.captured import CapturedStep
from fxpipe.runtime.ranks.local import LocalComm

sys.path.insert(0, str(ROOT / "tests"))
import tensor_parallel
from models import MODELS, next_word_loss
from zoo import CASES, EFFORT, Case, captured_once

import fxpipe.ir.liveness

#: Models with a vocabulary layer.
FAMILIES = ("gpt2", "llama", "qwen3", "gemma2", "gpt_neox", "opt", "mixtral")
ROUNDING = 1e-5  # of single precision, in sums


def logits_and_labels(output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a language model, with its labels shifted instead of its logits."""
    return output.logits, F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]


def entropy(output: Any, batch: Any, **options: Any) -> torch.Tensor:
    logits, labels = logits_and_labels(output, batch)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def with_z_loss(output: Any, batch: Any) -> torch.Tensor:
    return entropy(output, batch) + 1e-2 * torch.logsumexp(output.logits, -1).square().mean()


def sum_and_count(output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    _, labels = logits_and_labels(output, batch)
    return entropy(output, batch, reduction="sum"), (labels != -100).sum()


def of_tokens(output: Any, batch: Any) -> torch.Tensor:
    """Each token by a number of the batch, at a temperature."""
    logits, labels = logits_and_labels(output, batch)
    losses = F.cross_entropy((logits / 0.7).flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * (1.0 + batch["input_ids"].flatten() % 3)).mean()


def turned(output: Any, batch: Any) -> torch.Tensor:
    logits, labels = logits_and_labels(output, batch)
    return F.cross_entropy(logits.transpose(1, 2), labels)


def of_a_policy(output: Any, batch: Any, by_rows: bool) -> torch.Tensor:
    """As TRL has it: of logits beside their log-sum-exp, or of the log-softmax of one row after the other."""
    logits, labels = output.logits[:, :-1] / 0.7, batch["input_ids"][:, 1:].unsqueeze(-1)
    if by_rows:
        rows = zip(logits, labels, strict=True)
        logs = torch.stack([F.log_softmax(row, -1).gather(-1, words) for row, words in rows])
    else:
        logsum = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
        logs = logits.gather(-1, labels) - logsum.unsqueeze(-1)
    ratio = (logs - 0.9 * logs.detach()).exp()
    return -torch.min(ratio * labels, ratio.clamp(0.8, 1.2) * labels).mean()


def of_two_slices(output: Any, batch: Any) -> torch.Tensor:
    logits, labels = output.logits, batch["labels"]
    pairs = (logits[:, :-1], labels[:, 1:]), (logits[:, :-2], labels[:, 2:])
    return sum(F.cross_entropy(x.flatten(0, 1), y.flatten()) for x, y in pairs)


#: Losses of an output layer in parts of the tokens.
LOSSES = {
    "mean": entropy,
    "smoothed": partial(entropy, label_smoothing=0.1),
    "z-loss": with_z_loss,
    "sum and count": sum_and_count,
    "of tokens": of_tokens,
    "turned": turned,
    "of a policy": partial(of_a_policy, by_rows=False),
    "of a policy, by rows": partial(of_a_policy, by_rows=True),
    "of two slices": of_two_slices,
}
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-v", "v-half", "interleaved")


@dataclass(frozen=True)
class Setting:
    name: str
    microbatches: int
    options: dict[str, Any]
    loss: str = ""

    def __str__(self) -> str:
        options = {key: value for key, value in self.options.items() if value not in (None, False)}
        given = ", ".join(f"{key}={value}" for key, value in options.items())
        return f"{self.name}{f' ({self.loss})' * bool(self.loss)}: m={self.microbatches}, {given}"


@dataclass(frozen=True)
class Kind:
    """Of pipelines: ``lanes``: whether parameters are DTensors; ``shards``: whether replicas, or lanes,
    divide what they have alike; ``chunks``: whether output layers are in parts of the tokens."""

    lanes: bool = False
    shards: bool = False
    chunks: bool = False

    def __str__(self) -> str:
        return "".join(f" with {name}" for name, has in vars(self).items() if has)

    @property
    def rounds(self) -> bool:
        """Whether an edit may change the order in which the same numbers are added."""
        return self.shards or self.chunks

    def mutated(self, program: str, generator: random.Random) -> tuple[str, str, str]:
        edit = exchange_mutated if self.shards else part_mutated if self.chunks else mutated
        return edit(program, generator)


def drawn(generator: random.Random, microbatches: tuple[int, ...], kind: Kind) -> Setting:
    """A model, an order, and how memory is saved."""
    plans = sorted(tensor_parallel.PLANS)
    models = (*FAMILIES, "tied_head", "tied_thrice", *CASES)
    name = generator.choice(FAMILIES if kind.chunks else plans if kind.lanes else models)
    words = name in (*FAMILIES, "tied_head")
    share = generator.choice((False, False, 0.5, True))
    options = {
        "ranks": generator.choice((1, 2, 2, 3, 4)),
        "schedule": generator.choice(SCHEDULES),
        "vocab_parallel": generator.choice((False, "1-barrier", "2-barrier")) if words else False,
        "recompute": generator.choice((False, False, "norms", "full")),
        "offload": fxpipe.Offload(share, bandwidth=1e12) if share else False,
        "grad_dtype": generator.choice((None, None, torch.float64)),
    }
    if kind.shards:
        options["replicas"] = generator.choice((1, 2) if kind.lanes else (2, 3))
        options["shard"] = generator.choice(("optimizer", "gradients", "parameters", "parameters"))
        options["each_use"] = options["shard"] == "parameters" and generator.random() < 0.6
    number = generator.choice(microbatches)
    if not kind.chunks:
        return Setting(name, number, options)
    options["head_chunks"] = generator.choice((2, 3, 3, 7))
    return Setting(name, number, options, generator.choice(sorted(LOSSES)))


def case_of(setting: Setting) -> Case:
    if setting.name in tensor_parallel.PLANS:
        return Case(lambda: tensor_parallel.Words(layers=2), tensor_parallel.batch)
    if setting.name in CASES:
        return CASES[setting.name]
    case = MODELS[setting.name]
    return Case(case.model, case.batch, LOSSES.get(setting.loss, next_word_loss), case.rows)


def pipeline(setting: Setting) -> fxpipe.Pipeline | None:
    """None where the model does not fit the setting: too few places to cut, barriers in an order without."""
    case, options = case_of(setting), dict(setting.options)
    each_use = options.pop("each_use", False)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        model = case.build()
        whole = {name: value.clone() for name, value in model.state_dict().items()}
        if is_on_lanes := setting.name in tensor_parallel.PLANS:
            mesh = stack.enter_context(fxpipe.local_lanes(2))
            stack.enter_context(tensor_parallel.parallelized(model, mesh, setting.name))
        else:
            stack.enter_context(captured_once(setting.name, setting.loss, setting.microbatches))
        compile_it = partial(
            fxpipe.compile,
            model,
            case.example(),
            loss_fn=case.loss_fn,
            microbatches=setting.microbatches,
            effort=EFFORT,
            check=False,
        )
        try:
            pipe = compile_it(**options)
            if each_use:  # below what it takes to have all parameters for the step
                peaks = zip(pipe.plan.held, pipe.plan.prediction.peak_memory, strict=True)
                limit = int(0.97 * max(held.total + saved for held, saved in peaks))
                pipe = compile_it(**options, memory_limit=limit)
            if is_on_lanes:
                pipe.load_state_dict(whole)
            return pipe
        except (fxpipe.PartitionError, fxpipe.ScheduleError, fxpipe.VocabularyError, fxpipe.CaptureError):
            return None


def pipelines(
    seed: int,
    microbatches: tuple[int, ...] = (2, 3, 6),
    kind: Kind = Kind(),
) -> Iterator[tuple[Setting, fxpipe.Pipeline]]:
    generator = random.Random(seed)
    while True:
        setting = drawn(generator, microbatches, kind)
        pipe = pipeline(setting)
        if pipe is not None:
            yield setting, pipe


def try_settings(report: Report, count: int, seed: int, kind: Kind) -> None:
    rejected = 0
    seconds = []
    for _, (setting, pipe) in zip(range(count), pipelines(seed, kind=kind), strict=False):
        before = time.perf_counter()
        found = check_artifact(pipe.artifact)
        seconds.append(time.perf_counter() - before)
        if not found.holds or found.otherwise:
            rejected += 1
            report.line(f"rejected: {setting}\n{found}")
    report.line(
        f"{count} settings{kind}, {rejected} rejected; a check takes {1e3 * sum(seconds) / count:.0f} ms"
    )


# -- mutations --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """All results, the bits of all messages in order, and the memory that the ranks hold between ops."""

    results: dict[str, torch.Tensor]
    messages: str
    memory: tuple[int, ...]


def run(pipe: fxpipe.Pipeline, batch: Any) -> Run | str:
    """A step of all ranks; the error as text if it fails."""
    sent: dict[tuple[int, Any], list[str]] = {}
    send, collective = LocalComm.send, LocalComm.collective

    def noted(self: LocalComm, tensors: Any, to: int) -> None:
        sent.setdefault((self._number, to), []).extend(map(_bits, tensors))
        send(self, tensors, to)

    def joined(
        self: LocalComm, verb: Any, tensor: torch.Tensor | None, layout: Any, root: int, group: int
    ) -> Any:
        bits = "" if tensor is None else _bits(tensor)
        sent.setdefault((self._number, f"group {group}"), []).append(f"{verb} of {root}: {bits}")
        return collective(self, verb, tensor, layout, root, group)

    state = {name: tensor.clone() for name, tensor in pipe.buffers.items()}
    with mock.patch.object(LocalComm, "send", noted), mock.patch.object(LocalComm, "collective", joined):
        try:
            done = pipe.run_local(batch, outputs=pipe.outputs)
            # Of what replicas divide a measured step has all.
            peak = () if pipe.plan.shard else pipe.run_local(batch, measure_memory=True).peak_saved
        except (fxpipe.FxpipeError, AssertionError, RuntimeError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
    tensors = {
        "loss": done.loss,
        **done.grads,
        **{f"output {n}": x for n, x in done.outputs.items()},
        **pipe.buffers,
    }
    results = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    with torch.no_grad():
        for name, tensor in pipe.buffers.items():
            tensor.copy_(state[name])
    return Run(results, repr(sorted(sent.items(), key=str)), peak)


def _bits(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().cpu()
    flat = torch.view_as_real(data) if data.is_complex() else data
    return f"{tuple(tensor.shape)} {hashlib.sha1(flat.numpy().tobytes()).hexdigest()}"


def edited(pipe: fxpipe.Pipeline, programs: tuple[str, ...]) -> fxpipe.Pipeline:
    return replace(pipe, artifact=replace(pipe.artifact, programs=programs))


@dataclass
class Tally:
    """Edits by kind and by what came of them, of all pieces of a run."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    pipelines: int = 0
    seconds: float = 0.0
    pieces: list[str] = field(default_factory=list)
    escaped: list[str] = field(default_factory=list)

    @staticmethod
    def of(path: Path | None) -> Tally:
        if path is None or not path.exists():
            return Tally()
        data = json.loads(path.read_text())
        data["counts"] = Counter({(kind, column): n for kind, column, n in data["counts"]})
        return Tally(**data)

    def save(self, path: Path) -> None:
        counts = [[*key, n] for key, n in sorted(self.counts.items())]
        path.write_text(json.dumps({**vars(self), "counts": counts}, indent=1))

    def print(self, report: Report) -> None:
        columns = ("rejected", "told", "equal", "escaped")
        kinds = sorted({kind for kind, _ in self.counts})
        rows = [[kind, *(str(self.counts[kind, c]) for c in columns)] for kind in kinds]
        sums = [sum(self.counts[kind, c] for kind in kinds) for c in columns]
        report.line("pieces: " + "; ".join(self.pieces))
        report.table(["edit", *columns], [*rows, ["all", *map(str, sums)]])
        for text in self.escaped:
            report.line(text)
        count = sum(sums)
        report.line(
            f"{count} edits of {self.pipelines} pipelines, {sums[-1]} escaped; a check takes "
            f"{1e3 * self.seconds / count:.0f} ms"
        )


def try_mutations(
    tally: Tally,
    count: int,
    seed: int,
    each: int,
    seconds: float,
    path: Path | None,
    pipelines_kind: Kind,
) -> None:
    """``each`` edits of every pipeline, for at most so many seconds; with shards of what it exchanges."""
    checking.parse = lru_cache(8)(checking.parse)  # of several programs one has changed
    signal.signal(signal.SIGALRM, _endless)
    generator = random.Random(seed)
    made, left, end = pipelines(seed, (2, 3), pipelines_kind), count, time.monotonic() + seconds
    while left and time.monotonic() < end:
        setting, pipe = next(made)
        step = reference_of(CapturedStep.from_json(pipe.artifact.captured, "captured.json"), Terms(RULES))
        batch = case_of(setting).data(setting.microbatches * pipe.plan.replicas)
        expected = run(pipe, batch)
        if isinstance(expected, str):
            raise SystemExit(f"{setting} does not run: {expected}")
        tally.pipelines += 1
        print(f"{count - left} edits, {len(tally.escaped)} escaped; {setting}", file=sys.stderr, flush=True)
        for _ in range(min(each, left)):
            if time.monotonic() > end:
                break
            left -= 1
            rank = generator.randrange(pipe.plan.ranks)
            programs = [*pipe.artifact.programs]
            kind, done, programs[rank] = pipelines_kind.mutated(programs[rank], generator)
            before = time.process_time()
            signal.alarm(60)
            found = check_against(step, pipe.plan, programs)
            signal.alarm(0)
            tally.seconds += time.process_time() - before
            if not found.holds:
                tally.counts[kind, "rejected"] += 1
                continue
            # Parts of a sum over replicas may be added in another order, which rounds otherwise.
            is_told = bool(found.otherwise)
            done_with = run(edited(pipe, tuple(programs)), batch)
            difference = _difference(done_with, expected, is_told, rounds=is_told or pipelines_kind.rounds)
            column = "escaped" if difference else "told" if found.otherwise else "equal"
            tally.counts[kind, column] += 1
            if difference:
                text = f"escaped: {kind}, rank {rank}: {done}\n  {setting}\n  {difference}"
                print(text, file=sys.stderr, flush=True)
                tally.escaped.append(text)
        if path:
            tally.save(path)
    tally.pieces.append(f"{count - left} of seed {seed}{pipelines_kind}")


def _endless(*_: object) -> None:
    """Ends the run: no edit may make a check endless."""
    raise KeyboardInterrupt("a check takes more than a minute")


def _difference(done: Run | str, expected: Run, is_told: bool, rounds: bool) -> str:
    """What an accepted edit changes; "" for nothing.  is_told: that it runs otherwise than the plan.
    rounds: whether results may be rounded otherwise."""
    if isinstance(done, str):
        return done
    if done.results.keys() != expected.results.keys():
        return "other results"
    for name, tensor in expected.results.items():
        own = done.results[name]
        if _bits(own) != _bits(tensor) and not (rounds and torch.allclose(own, tensor, ROUNDING)):
            return f"another {name}"
    if done.messages != expected.messages and not is_told:
        return "other messages"
    more = any(a > b for a, b in zip(done.memory, expected.memory, strict=True))
    return f"more memory: {done.memory} instead of {expected.memory}" if more and not is_told else ""


# -- attribution ------------------------------------------------------------------------------------------

#: One for each kind of program: tied weights over ranks, barriers of a vocabulary, buffers, offloads, several
#: stages on a rank, random keys.
SMALL = (
    Setting("tied_head", 3, {"ranks": 2, "schedule": "zb-h1"}),
    Setting("gpt2", 2, {"ranks": 2, "schedule": "1f1b"}),
    Setting("llama", 2, {"ranks": 2, "schedule": "zb-h1", "vocab_parallel": "1-barrier"}),
    Setting("mixtral", 3, {"ranks": 2, "schedule": "interleaved", "recompute": "norms"}),
    Setting("gemma2", 2, {"ranks": 3, "schedule": "1f1b", "offload": fxpipe.Offload(0.5, bandwidth=1e12)}),
    Setting("opt", 3, {"ranks": 2, "schedule": "zb-v"}),
)


def try_attribution(report: Report, count: int, seed: int) -> None:
    """``count`` edits that are rejected, of all small pipelines."""
    generator = random.Random(seed)
    sizes: dict[str, list[int]] = {}
    places: dict[str, Counter[str]] = {}
    for setting in SMALL:
        pipe = pipeline(setting)
        assert pipe is not None
        step = reference_of(CapturedStep.from_json(pipe.artifact.captured, "captured.json"), Terms(RULES))
        left = -(-count // len(SMALL))
        while left:
            rank = generator.randrange(pipe.plan.ranks)
            programs = [*pipe.artifact.programs]
            kind, done, programs[rank] = mutated(programs[rank], generator)
            problems = check_against(step, pipe.plan, programs).problems
            if not problems:
                continue
            left -= 1
            lines = edited_lines(pipe.artifact.programs[rank], programs[rank])
            place = _place(str(problems[0]), rank, lines, done)
            places.setdefault(kind, Counter())[place] += 1
            sizes.setdefault(kind, []).append(len(problems))
            if place != "at it":
                where = f"{place}: {setting.name}, {kind}, rank {rank}, lines {sorted(lines)}: {done}"
                print(where, *problems[:4], sep="\n    ", file=sys.stderr)
    columns = ("at it", "names it", "elsewhere")
    rows = [
        [kind, *(str(places[kind][c]) for c in columns), f"{sum(sizes[kind]) / len(sizes[kind]):.1f}"]
        for kind in sorted(places)
    ]
    together = [size for each in sizes.values() for size in each]
    sums = [str(sum(each[c] for each in places.values())) for c in columns]
    report.table(
        ["edit", *columns, "problems"], [*rows, ["all", *sums, f"{sum(together) / len(together):.1f}"]]
    )
    report.line(
        f"{sum(size == 1 for size in together)} of {len(together)} edits have one problem, "
        f"{sum(size > 3 for size in together)} more than three, and {max(together)} are the most"
    )


def _place(problem: str, rank: int, lines: set[int], done: str) -> str:
    """Where the first problem is: at the edit, or elsewhere; "names it": with the line of the edit, or with
    what was edited, in its text."""
    at, *others = [int(line) for line in re.findall(rf"(?:rank{rank}\.py:|line )(\d+)", problem)] or [0]
    if problem.startswith(f"rank{rank}.py:{at}:") and at in lines:
        return "at it"
    called = re.sub(r"^(\w+)\((\d+)\)$", r"\1.\2", done)  # F0(1) is the op F0.1
    names = set(re.findall(r"[\w.]{4,}", called))
    is_named = {at, *others} & lines or names & set(re.findall(r"[\w.]{4,}", problem))
    return "names it" if is_named else "elsewhere"


# -- harmless edits ---------------------------------------------------------------------------------------


def try_harmless(report: Report, count: int, each: int, seed: int, pipelines_kind: Kind) -> None:
    """``count`` edits that change nothing: each is to be accepted as the plan's program."""
    generator = random.Random(seed)
    outcomes: Counter[tuple[str, str]] = Counter()
    made, left, number = pipelines(seed, (2, 3), pipelines_kind), count, 0
    while left > 0:
        setting, pipe = next(made)
        number += 1
        step = reference_of(CapturedStep.from_json(pipe.artifact.captured, "captured.json"), Terms(RULES))
        for _ in range(min(each, left)):
            left -= 1
            rank = generator.randrange(pipe.plan.ranks)
            programs = [*pipe.artifact.programs]
            kind, done, programs[rank] = harmless(programs[rank], generator)
            found = check_against(step, pipe.plan, programs)
            outcome = "refused" if not found.holds else "told" if found.otherwise else "accepted"
            outcomes[kind, outcome] += 1
            if outcome != "accepted":
                report.line(f"{outcome}: {kind}, rank {rank} of {setting}: {done}\n  {found}")
    columns = ("accepted", "told", "refused")
    rows = [[kind, *(str(outcomes[kind, c]) for c in columns)] for kind in HARMLESS]
    report.table(["harmless edit", *columns], rows)
    sums = ", ".join(f"{sum(outcomes[kind, c] for kind in HARMLESS)} {c}" for c in columns)
    report.line(f"{count} harmless edits of {number} pipelines{pipelines_kind}, seed {seed}: {sums}")


# -- a large step -----------------------------------------------------------------------------------------


def try_large(report: Report, layers: int, ranks: int, microbatches: int) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=12288, n_head=96, vocab_size=50304, n_positions=2048)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config).train()
    ids = torch.zeros(1, 2048, dtype=torch.long)
    before = time.perf_counter()
    pipe = fxpipe.compile(
        model,
        {"input_ids": ids, "labels": ids},
        ranks=ranks,
        microbatches=microbatches,
        schedule="zb-h1",
        check=False,
    )
    compiled, processor = time.perf_counter(), time.process_time()
    found = check_artifact(pipe.artifact)
    seconds, processor = time.perf_counter() - compiled, time.process_time() - processor
    report.line(
        f"{layers} layers, {ranks} ranks, {microbatches} microbatches: compiled in {compiled - before:.1f} s"
    )
    report.line(f"checked in {seconds:.1f} s ({processor:.1f} s of the processor)")
    report.line("\n".join(str(found).splitlines()[:3]))
    lines = sum(program.count("\n") for program in pipe.artifact.programs)
    report.line(f"{lines} lines of programs; captured.json has {len(pipe.artifact.captured) / 1e6:.1f} MB")


def main() -> None:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", type=int, default=0)
    parser.add_argument("--mutations", type=int, default=0)
    parser.add_argument("--each", type=int, default=100, help="mutations of one pipeline")
    parser.add_argument("--seconds", type=float, default=inf, help="of wall time, for a piece of mutations")
    parser.add_argument("--tally", type=Path, help="a file with the edits of earlier pieces, to add to")
    parser.add_argument("--attribution", type=int, default=0, help="edits that are rejected")
    parser.add_argument("--harmless", type=int, default=0, help="edits that change nothing")
    parser.add_argument("--lanes", action="store_true", help="settings and mutations of models with DTensors")
    parser.add_argument("--shards", action="store_true", help="mutations of what replicas and lanes divide")
    parser.add_argument("--chunks", action="store_true", help="of output layers in parts of the tokens")
    parser.add_argument("--large", action="store_true")
    parser.add_argument(
        "--size", type=int, nargs=3, default=(96, 64, 256), help="layers, ranks, microbatches"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fxpipe.ir.liveness.SMALLEST = 1  # small values are offloaded, too
    report = Report("The certificate")
    kind = Kind(options.lanes, options.shards, options.chunks)
    if options.settings:
        try_settings(report, options.settings, options.seed, kind)
    if options.mutations:
        tally = Tally.of(options.tally)
        asked = options.mutations, options.seed, options.each, options.seconds
        try_mutations(tally, *asked, options.tally, kind)
        tally.print(report)
        if options.tally:
            tally.save(options.tally)
    if options.attribution:
        try_attribution(report, options.attribution, options.seed)
    if options.harmless:
        try_harmless(report, options.harmless, options.each, options.seed, kind)
    if options.large:
        try_large(report, *options.size)
    report.save(options.output)


if __name__ == "__main__":
    main()
