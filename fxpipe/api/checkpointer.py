"""Checkpoints of a training run: periodic, in the background, a few kept, resumed on any number of ranks."""

from __future__ import annotations

import dataclasses
import json
import secrets
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful

from fxpipe.errors import ArtifactError, FxpipeError, OptionError, RunError, at_least_one, one_of
from fxpipe.plan.saved.files import as_path, checksum, writing
from fxpipe.runtime.job.collectives import gather_bytes
from fxpipe.runtime.job.process import agreed, agreed_by
from fxpipe.runtime.job.tracebacks import brief_methods
from fxpipe.runtime.program.comm import NoAnswer, answered
from fxpipe.training.checkpoint import files, tensor_store
from fxpipe.training.checkpoint.plain import from_json, to_json
from fxpipe.training.checkpoint.restore import contents_for, restore
from fxpipe.training.checkpoint.tensor_store import Part
from fxpipe.training.checkpoint.training_state import (
    CheckpointRecord,
    averages_of,
    kinds_from,
    kinds_of,
    record_of,
    tensors_of,
)
from fxpipe.training.checkpoint.user_state import replica_state, state_of_replicas
from fxpipe.training.optimizer.average import Average, OfAverage
from fxpipe.training.optimizer.optimizer import PipelineOptimizer

if TYPE_CHECKING:
    from fxpipe.api.pipeline import Pipeline


def _check_given(pipe: object, optimizer: object, state: object) -> None:
    """Raise OptionError for what a ``Checkpointer`` cannot keep."""
    if not hasattr(pipe, "model_state"):
        raise OptionError(f"fxpipe.Checkpointer keeps a pipeline, and got {pipe!r:.60}.")
    if not isinstance(optimizer, PipelineOptimizer | None):
        raise OptionError(f"optimizer is what pipe.optimizer(…) makes, and not {type(optimizer).__name__}.")
    if not isinstance(state, Mapping | None):
        raise OptionError(f'state maps names to objects, as {{"loader": loader}} does, and is {state!r:.60}.')
    for name, thing in (state or {}).items():
        if not isinstance(thing, Stateful | Average):
            raise OptionError(
                f"state[{name!r}] is {thing!r:.60} and must have the methods state_dict and load_state_dict."
            )
        if isinstance(thing, torch.optim.Optimizer):  # of which rank 0's state is no other rank's
            raise OptionError(
                f"state[{name!r}] is an optimizer, whose state is another on each rank: make it by "
                "pipe.optimizer(…) and give it as optimizer=."
            )


@brief_methods
class Checkpointer:
    """Writes checkpoints of a run to a directory, and resumes from them.

        with fxpipe.Checkpointer(pipe, "checkpoints", optimizer=opt, every=500) as checkpoints:
            checkpoints.resume()
            while pipe.step_number < steps:
                pipe.step(batch_of(pipe.step_number)); opt.step(); opt.zero_grad()
                checkpoints.step()

    All ranks make it and call its methods alike.  A checkpoint is complete or absent, whenever a process is
    killed.  It holds the parameters, buffers, the optimizer's state and the step's number by the model's
    names, and can be resumed with other numbers of ranks and stages, and by ``fxpipe.read_checkpoint``
    without any.  A directory belongs to one run; one that is resumed is the same run.
    """

    def __init__(
        self,
        pipe: Pipeline,
        directory: str | Path,
        *,
        optimizer: PipelineOptimizer | None = None,
        state: Mapping[str, Stateful | Average] | None = None,
        every: int | None = None,
        keep: int = 3,
        asynchronous: bool = True,
    ):
        """directory: on a disk that all ranks see.
        state: objects with ``state_dict`` and ``load_state_dict``, by name (schedulers, loaders), and
            averages of weights (``pipe.average``), of which each rank keeps its part.  Of an object rank 0's
            state is kept, and all ranks get it, as all ranks of a pipeline take the same batches.
            Where replicas have different ones, that of the first rank of each is kept, for its ranks: such
            a checkpoint resumes with as many replicas.
        every: steps from one checkpoint to the next; None for those of ``save`` alone, and of a SIGTERM.
        keep: the number of checkpoints that are kept.
        asynchronous: copy the tensors and write them in the background, while training goes on.
        Raises ArtifactError, on every rank, for a directory that a rank cannot see or write, or that another
        run has, and RunError if ranks differ in ``optimizer`` or ``every``.
        """
        at_least_one("keep", keep)
        if every is not None:
            at_least_one("every", every)
        one_of("asynchronous", asynchronous, (True, False))
        _check_given(pipe, optimizer, state)
        self.pipe, self.optimizer = pipe, optimizer
        self.user: dict[str, Stateful] = {
            name: OfAverage(x) if isinstance(x, Average) else x for name, x in (state or {}).items()
        }
        self.directory, self.every = as_path(directory, "fxpipe.Checkpointer"), every
        self.keep, self.asynchronous = keep, asynchronous
        self._process = pipe.process
        self._number = 0 if self._process is None else self._process.world_rank
        if self._process is None and pipe.artifact.plan.ranks * pipe.lanes > 1:
            raise RunError(
                "Checkpoints are of a run under torchrun, or of a pipeline of one rank. Start the script "
                f"with torchrun --nproc-per-node {pipe.artifact.plan.ranks * pipe.lanes}."
            )
        # Of its own, as the background thread uses it while the main thread uses the others.
        self._group: dist.ProcessGroup | None = None
        if self._process is not None:
            arguments = {"optimizer": "None" if optimizer is None else "given", "every": str(every)}
            # Also whether all ranks make one: a new group does not tell.
            self._process.check_alike(arguments, "its Checkpointer", "Give all ranks the same.")
            with self._process.watch.collective():
                self._group = self._process.group_of_each([[*range(self._processes)]])
            assert self._group is not None
            self._drop_group = self._process.drop_with(self, [self._group])
        self._lock: files.Lock | None = None
        self._is_closed = False
        self._has_warned = False
        self._is_this_run = False  # whether the checkpoints in the directory are known to be this run's
        try:
            self._check_directory()
        except FxpipeError:
            self._release()
            raise
        self._background = ThreadPoolExecutor(1, "fxpipe-checkpoint")
        self._writing: Future[Path] | None = None
        self._handler: Any = None
        if threading.current_thread() is threading.main_thread():  # Python lets no other one set a handler
            self._handler = signal.signal(
                signal.SIGTERM, partial(_stop, weakref.ref(pipe), before=signal.getsignal(signal.SIGTERM))
            )

    def resume(self) -> bool:
        """Load the newest checkpoint; False if there is none.

        Raises ArtifactError, before anything has changed, for one that is damaged, naming the file, and for
        one of another model, naming the first tensor that differs.
        """
        newest = files.newest(self.directory) if self._number == 0 else None
        name = self._from_first("" if newest is None else newest.name)
        if not name:
            return False
        path, state = self.directory / name, self.pipe.model_state
        self.pipe.updates.settle()
        with agreed(self._process, f"resume from {path}"):
            record = self._verified(path)  # each rank some of the files: all are whole once all agree
        with agreed(self._process, f"resume from {path}"):
            contents = contents_for(state, self.optimizer, self.user, path, record, self._rank)
        restore(state, self.optimizer, self.user, contents)
        self.pipe.step_number = contents.step_number
        return True

    def step(self) -> None:
        """Write a checkpoint if one is due; call it behind each step of the optimizer.

        After a SIGTERM to any rank, all write one and end their processes with exit code 143.
        Raises RunError if the last one could not be written.
        """
        self._check_run()
        if self._writing is not None and self._writing.done():  # so that its error comes early
            self.wait()
        if self.pipe.stops():
            self.save()
            self.close()
            sys.exit(128 + signal.SIGTERM)
        if self.every is not None and self.pipe.step_number % self.every == 0:
            self._start()
            if not self.asynchronous:
                self.wait()

    def save(self) -> Path:
        """Write a checkpoint now; return its directory when it is complete."""
        self._start()
        path = self.wait()
        assert path is not None
        return path

    def wait(self) -> Path | None:
        """Wait until the checkpoint that is being written is complete.  Raises RunError if it failed."""
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        with nullcontext() if self._process is None else self._process.watch.collective():
            try:
                return writing.result()
            except NoAnswer:  # of another rank, in the background
                raise
            except (OSError, RuntimeError, FxpipeError, CheckpointException) as error:
                raise RunError(
                    f"The checkpoint in {self.directory} could not be written: {_reason(error)}. "
                    "The earlier ones are whole."
                ) from error

    def close(self) -> None:
        """Wait for the last checkpoint, and handle SIGTERM as before; the threads and sockets go."""
        self._is_closed = True
        self._restore_handler()
        try:
            self.wait()
        finally:
            self._background.shutdown()
            self._release()
            if self._process is not None:
                self._group = None
                self._drop_group()
                self._process.destroy_dropped()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or self._process is None:
            self.close()
        else:  # another rank may have ended, and the one being written may never be complete
            self._restore_handler()
            self._background.shutdown(wait=False, cancel_futures=True)
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _restore_handler(self) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)
            self._handler = None

    def _check_run(self) -> None:
        """Raise RunError after ``close``, and ArtifactError on all ranks if the directory has checkpoints of
        another run, which would stay instead of this one's if they are newer."""
        if self._is_closed:
            raise RunError(f"The Checkpointer of {self.directory} is closed. Make another one to write more.")
        if self._is_this_run:
            return
        with agreed(self._process, "write a checkpoint"):
            path = files.newest(self.directory) if self._number == 0 else None
            if (
                path is not None
                and CheckpointRecord.from_json(files.read_state(path), path).run != self.pipe.model_state.run
            ):
                raise ArtifactError(
                    f"{path} is of another run. Call resume() to go on from it, name another directory, or "
                    "remove it."
                )
        self._is_this_run = True

    def _start(self) -> None:
        self._check_run()
        self.wait()  # one at a time, as each has a copy of all tensors
        if any(isinstance(thing, OfAverage) and thing.average.is_applied for thing in self.user.values()):
            raise RunError("The weights are those of an average now: write checkpoints outside of applied().")
        self._warn_of_optimizer()
        self.pipe.check_alike()
        step, state = self.pipe.step_number, self.pipe.model_state
        tensors: dict[str, torch.Tensor | Part] = {}
        with agreed(self._process, f"begin the checkpoint of step {step}"):
            state.follow_model()
            ours = replica_state(self._process, self.user)
        user = state_of_replicas(self._process, ours)  # outside of ``agreed``, as all ranks exchange in it
        with agreed(self._process, f"begin the checkpoint of step {step}"):
            record = record_of(state, self.optimizer, step, user, tensors)
            tensors |= tensors_of(state, self.optimizer, self._rank) | averages_of(state, self.user)
            if self.asynchronous:  # copied before this returns: the next step overwrites what is written
                tensors = {name: _staged(tensor) for name, tensor in tensors.items()}
        self._writing = self._background.submit(self._write, step, record, tensors)

    def _warn_of_optimizer(self) -> None:
        """Say once, on the first rank, that checkpoints leave out an optimizer that the pipeline has: a
        resumed run goes on without its averages, which nobody sees."""
        if self.optimizer is not None or self.pipe.last_optimizer is None or self._number:
            return
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"The checkpoints in {self.directory} hold no state of the optimizer, with which a resumed "
                "run would go on: give it as fxpipe.Checkpointer(pipe, directory, optimizer=opt).",
                stacklevel=5,
            )

    def _write(self, step: int, record: CheckpointRecord, tensors: dict[str, torch.Tensor | Part]) -> Path:
        """Runs in the background thread on every rank."""
        try:
            return self._written(step, record, tensors)
        finally:
            if self._number == 0:
                files.discard(self.directory, step)

    def _written(self, step: int, record: CheckpointRecord, tensors: dict[str, torch.Tensor | Part]) -> Path:
        with self._agreed("begin"):  # no rank writes before the directory is there
            if self._number == 0:
                files.begin(self.directory, step)
        draft = files.draft_of(self.directory, step)
        with answered():  # an error of this rank's own is a CheckpointException
            tensor_store.write(tensors, draft, self._group)
        with self._agreed("compute checksums"):
            kinds = kinds_of(tensors)
            written = json.dumps([self._sums(draft), record.fields, kinds])
        sums: dict[str, str] = {}
        fields: dict[str, object] = {}
        kinds = {}
        for text in self._gather(written.encode()):
            part_sums, plain, stored = json.loads(text)
            sums |= part_sums
            fields |= from_json(plain, {})
            kinds |= kinds_from(stored)
        with self._agreed("complete"):  # all have written and synchronized their files
            if self._number == 0:
                encoded = to_json(fields, None, "", "the optimizer's state")
                whole = dataclasses.replace(record, fields=encoded, tensors=kinds)
                files.complete(self.directory, step, whole.as_json(), sums)
                files.keep_newest(self.directory, self.keep)
        return files.path_of(self.directory, step)

    @property
    def _rank(self) -> int:
        """The rank whose tensors this process holds."""
        return 0 if self._process is None else self._process.rank

    @property
    def _processes(self) -> int:
        return 1 if self._process is None else self._process.world_size

    def _agreed(self, what: str) -> AbstractContextManager[None]:
        """``Process.agreed``, in the background thread."""
        return agreed_by(self._gather, f"{what} the checkpoint")

    def _sums(self, path: Path) -> dict[str, str]:
        """Checksums of the files that this rank looks at; the ranks share them."""
        names = sorted(p.name for p in path.glob("*.safetensors"))
        return {name: checksum(path / name) for name in names[self._number :: self._processes]}

    def _verified(self, path: Path) -> CheckpointRecord:
        sums = files.read_sums(path)
        names = sorted(sums)[self._number :: self._processes]
        files.verify(path, {name: sums[name] for name in names})
        return CheckpointRecord.from_json(files.read_state(path), path)

    def _check_directory(self) -> None:
        """Raise ArtifactError unless all ranks see what rank 0 writes."""
        probe = self.directory / f".probe-{self._from_first(secrets.token_hex(8))}"
        with agreed(self._process, f"write to {self.directory}"), writing(self.directory):
            if self._number == 0:
                self.directory.mkdir(parents=True, exist_ok=True)
                # Under the lock: what is half done here is of a run that was killed.
                self._lock = files.Lock(self.directory)
                files.put_back(self.directory)
                probe.write_text("")
        try:
            with agreed(self._process, "see the directory of checkpoints"):
                end = time.monotonic() + files.PATIENCE
                while not probe.exists():
                    if time.monotonic() > end:
                        raise ArtifactError(
                            f"Rank {self._number} does not see what rank 0 writes to "
                            f"{self.directory.absolute()}. "
                            "Name a directory on a disk that all machines have."
                        )
                    time.sleep(0.1)
        finally:
            if self._number == 0:
                probe.unlink(missing_ok=True)

    def _from_first(self, text: str) -> str:
        """Rank 0's text, on every rank."""
        if self._process is None:
            return text
        return self._process.broadcast_bytes(text.encode() if self._number == 0 else None).decode()

    def _gather(self, data: bytes) -> list[bytes]:
        """The bytes of every rank, in the background thread."""
        if self._process is None:
            return [data]
        assert self._group is not None
        with answered():
            # The sizes first, by which all ranks pad their bytes alike.
            sizes = gather_bytes(len(data).to_bytes(8, "little"), [8] * self._processes, self._group)
            return gather_bytes(data, [int.from_bytes(size, "little") for size in sizes], self._group)


def _stop(pipe: weakref.ref[Pipeline], number: int, _: object, *, before: Any) -> None:
    """Handle a SIGTERM; as before where the pipeline is gone, and its Checkpointer was not closed."""
    if (running := pipe()) is not None:
        running.ask_to_stop()
        return
    signal.signal(number, before)
    signal.raise_signal(number)


def _reason(error: BaseException) -> str:
    """Why a checkpoint could not be written; torch's own exception has those of all ranks."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in sorted(error.failures.items()))
    return str(error)


def _staged(tensor: torch.Tensor | Part) -> torch.Tensor | Part:
    """A copy in the memory of the CPU, which training does not change."""
    if isinstance(tensor, Part):
        return dataclasses.replace(tensor, tensor=tensor.tensor.detach().to("cpu", copy=True))
    return tensor.detach().to("cpu", copy=True)
