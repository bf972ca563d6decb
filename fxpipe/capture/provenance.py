"""Finds the origin of every traced node: module path, source line, forward or backward, forward op.

A backward node is identified by the forward op that it differentiates.  Autograd numbers the ops that it
records; a hook on each recorded op runs when the op is differentiated, and the nodes traced meanwhile get its
number.  (Operands cannot identify it: a weight gradient uses values of any stage.)
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx, nn

from fxpipe.capture.functional import writes_to_a_constant
from fxpipe.capture.gradient_names import mark_gradients, mark_results
from fxpipe.capture.reads.kernel_dtypes import check_dtypes
from fxpipe.capture.reads.specialization import Specialization
from fxpipe.capture.reads.varying_values import Values
from fxpipe.capture.state.frozen_state import warn_of_seed
from fxpipe.capture.state.replay import Replay, RunOp, key_of
from fxpipe.capture.traced_nodes import last_node, nodes_after
from fxpipe.errors import CaptureError
from fxpipe.ir import compat
from fxpipe.ir.fake_op_cache import SameLayouts
from fxpipe.ir.graph import Input, Origin
from fxpipe.ir.storage import written_arguments

_LIBRARY = tuple(f"{Path(file).parents[up]}{os.sep}" for file, up in ((torch.__file__, 0), (__file__, 1)))
_PYTHON = f"{sysconfig.get_path('stdlib')}{os.sep}"  # packages may be installed below it

#: The name of its overload is a keyword, which FX and programs cannot write.
_RANDOM_FROM = getattr(torch.ops.aten.random_, "from")


def _random_from(x: torch.Tensor, low: int, high: int) -> torch.Tensor:
    drawn: torch.Tensor = torch.ops.aten.random_.to(x, high - low)
    return drawn.add_(low)


class Provenance(compat.TorchDispatchMode):
    """While entered, gives every node of the running make_fx trace its ``origin``.

    ``answers`` has the values that the model's code reads, with at most ``most_checks`` checks; ``inputs``
    are the graph's placeholders with their real tensors.  ``backward_from(loss)`` must be called before the
    gradient is taken.
    """

    def __init__(
        self, model: nn.Module, inputs: Sequence[tuple[Input, torch.Tensor]], most_checks: float = inf
    ):
        super().__init__()  # type: ignore[no-untyped-call]
        this = weakref.proxy(self)  # without a circle, which would keep the model until it is collected
        self.answers = Specialization(inputs, lambda: this.place(), most_checks)
        self._paths: list[str] = []
        self._seq: int | None = None  # of the op that runs backward
        self._last_seq: int | None = None  # of the last one that did
        self._backward = False
        self.backward_runs_code = False  # whether autograd calls Python code of custom functions
        self._forward_origin: dict[int, Origin] = {}
        self._random_states: dict[bytes, int] = {}
        self._reached = {bytes(torch.get_rng_state().numpy())}  # states of the generator without a new seed
        self._seen: fx.Node | None = None
        self.calls: list[RunOp] = []  # the ops of this run of the forward
        self.compares = True  # whether it adds to them
        self.read: dict[int, weakref.ref[torch.Tensor]] = {}  # what it reads that is no input, by id
        self._replay: Replay | None = None
        self._layouts = SameLayouts()
        self._model = model
        self.communicates: Callable[[str], object] | None = None  # called with the name of such an op
        self._handles: list[Any] = []
        self._default_dtype = torch.get_default_dtype()
        self._entered: FrameType | None = None  # what enters this: no frame of the model is above it

    def __enter__(self) -> Provenance:
        self._entered = sys._getframe(1)
        self._label_new_nodes()  # what is in the graph before the model's first op
        for path, module in self._model.named_modules():
            push = _Push(self._paths, path)
            self._handles.append(module.register_forward_pre_hook(push, prepend=True))
            self._handles.append(module.register_forward_hook(self._pop))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._entered = None
        while self._handles:
            self._handles.pop().remove()
        # Their tensors' history has hooks that lead back here, through cycles that Python cannot see.
        self.calls, self._replay = [], None

    def __deepcopy__(self, memo: object) -> Provenance:
        return self  # its hooks hang on the modules of which the forward makes copies

    def _pop(self, module: nn.Module, args: object, output: object) -> None:
        # Not called for a module that raised: an error message wants the innermost path.
        self._paths.pop()

    @property
    def path(self) -> str:
        """Path of the module that runs now ("" for the model itself)."""
        return self._paths[-1] if self._paths else ""

    def last_origin(self) -> Origin:
        """The origin of the last op; in the backward, of the forward op that was differentiated, if known."""
        forward = self._forward_origin.get(self._last_seq) if self._last_seq is not None else None
        return forward if self._backward and not self._paths and forward else Origin(self.path)

    def source(self) -> str:
        """The innermost frame that belongs neither to torch nor to fxpipe, nor to Python's library if there
        is another one, as ``file:line``; "" for an op that fxpipe itself adds."""
        return self.users_line(self._frames(sys._getframe(1)))

    def _frames(self, frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
        """A frame and those around it, each with its line, up to what entered this."""
        while frame is not None and frame is not self._entered:
            yield frame, frame.f_lineno
            frame = frame.f_back

    @classmethod
    def users_line(cls, frames: Iterable[tuple[FrameType, int]]) -> str:
        """Find the user's line among these frames, the innermost first, each with its line."""
        of_python = ""
        for frame, line in frames:
            file = frame.f_code.co_filename
            if cls.is_users(file):
                if not cls.is_pythons(file):
                    return f"{file}:{line}"
                of_python = of_python or f"{file}:{line}"
        return of_python

    @staticmethod
    @functools.cache
    def is_users(file: str) -> bool:
        return not file.startswith((*_LIBRARY, "<"))

    @staticmethod
    @functools.cache
    def is_pythons(file: str) -> bool:
        module = file.removeprefix(_PYTHON).partition(os.sep)[0].removesuffix(".py")
        return file.startswith(_PYTHON) and module in sys.stdlib_module_names

    def repeat(
        self, calls: Sequence[RunOp], inputs: Sequence[torch.Tensor], values: Callable[[], Values]
    ) -> None:
        """Treat all further ops as those of a new forward; the arguments are those of ``Replay``."""
        self._backward, self._seq, self._last_seq = False, None, None
        self._paths.clear()
        self.answers.count_again()
        self._replay = Replay(calls, self.calls, inputs, values)

    def backward_from(self, loss: torch.Tensor) -> None:
        """Treat all further nodes as backward nodes, and track the recorded op of each."""
        self._backward = True
        mark_results(loss)
        seen = set()
        todo = [loss.grad_fn]
        while todo:
            fn = todo.pop()
            if fn is None or fn in seen:
                continue
            seen.add(fn)
            self.backward_runs_code |= isinstance(fn, torch.autograd.function.BackwardCFunction)
            seq = compat.sequence_number(fn)
            fn.register_prehook(_SetSeq(self, seq))
            fn.register_hook(_SetSeq(self, None))
            todo.extend(next_fn for next_fn, _ in fn.next_functions)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        if func is torch.ops.prim.device.default and isinstance(args[0], compat.FakeTensor):
            return args[0].device  # it knows, and is asked about twice an op
        kwargs = kwargs or {}
        is_traced = compat.is_tracing()
        if is_traced and not self._backward:
            mark_results((args, kwargs))
        if any(map(compat.is_made_of_tensors, types)):
            return NotImplemented  # it comes back with ops on the parts, as those of a DTensor
        if not is_traced:
            return func(*args, **kwargs)
        return self.answers.refusals.judged(self._run, func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: object) -> object:
        if real := [x for x in written_arguments(func, args, kwargs) if compat.is_real(x)]:
            raise writes_to_a_constant(self.place(), real[0])  # before it does
        if torch.get_default_dtype() is not self._default_dtype:
            raise CaptureError(
                f"The forward changes torch's default dtype, and runs {func} under it, at {self.place()}. A "
                "program has one default dtype: give dtype= there, or set the default before you compile."
            )
        if self.communicates is not None and "c10d" in getattr(func, "namespace", ""):
            self.communicates(func.overloadpacket.__name__.strip("_"))
        key = key_of(func, args, kwargs) if self.compares else []
        if self._replay is not None:
            result = self._replay.run(func, key, args, kwargs)
            if result is not NotImplemented:
                if self.calls[-1].nodes and not self._backward:
                    origin = self.calls[-1].nodes[-1].meta["origin"]
                    self._forward_origin.setdefault(compat.current_sequence_number(), origin)
                return result
            self._replay.record()
            self._replay, self._seen = None, last_node()
        if func is torch.ops.aten._local_scalar_dense.default:
            result = self.answers.numbers(args[0])[0]
        else:
            check_dtypes(func, args, self.place)
            if func is _RANDOM_FROM and args[2] is not None:
                func = _random_from
            try:
                result = compat.recorded(func, args, kwargs, self._layouts.run)
            except compat.DATA_DEPENDENT:
                graph = compat.traced_graph()
                for node in reversed(nodes_after(self._seen, graph)):
                    graph.erase_node(node)  # of the op that has no result
                result = self.answers.result(func, args, kwargs)
                if result is None:
                    raise
        nodes = self._label_new_nodes()
        if self.compares:
            self.calls.append(RunOp.of(key, nodes, result))
        return result

    def place(self) -> str:
        """The current place in the model's code, for messages."""
        return f"{self.source() or 'an unknown line'} ({Origin(self.path).module})"

    def _label_new_nodes(self) -> list[fx.Node]:
        new = nodes_after(self._seen, compat.traced_graph())
        if new:
            self._seen = new[-1]
            origin, recorded = self._origin(), torch.is_grad_enabled()
            for node in new:
                node.meta.update(origin=origin, grad=recorded)
                if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                    node.meta["random_position"] = self._random_position()
        return new

    def _origin(self) -> Origin:
        if not self._backward:
            seq = compat.current_sequence_number()
            origin = Origin(self.path, self.source(), seq)
            self._forward_origin.setdefault(seq, origin)
            return origin
        if self._paths:  # a forward that runs again inside backward: activation checkpointing
            return Origin(self.path, self.source(), self._seq, backward=True)
        forward = self._forward_origin.get(self._seq) if self._seq is not None else None
        if forward is None:
            return Origin(source=self.source(), seq=self._seq, backward=True)  # the line of a hook, if any
        return Origin(forward.path, forward.source, self._seq, backward=True)

    def _random_position(self) -> int:
        """The position of a random op in the model.

        It follows from the state of torch's generator, which is advanced at each op, so that an op that
        activation checkpointing repeats under a restored state gets the same position again.
        """
        with compat.no_modes():
            state = bytes(torch.get_rng_state().numpy())
            if state not in self._reached:
                warn_of_seed(self.source())
            torch.rand(())
            self._reached.add(bytes(torch.get_rng_state().numpy()))
        return self._random_states.setdefault(state, len(self._random_states))


class _Push:
    def __init__(self, paths: list[str], path: str):
        self._paths, self._path = paths, path

    def __call__(self, module: nn.Module, args: object) -> None:
        self._paths.append(self._path)

    def __deepcopy__(self, memo: object) -> _Push:
        return self


class _SetSeq:
    def __init__(self, provenance: Provenance, seq: int | None):
        self._provenance, self._seq = provenance, seq

    def __call__(self, gradients: Any, *of_outputs: object) -> None:
        """Follow autograd, which calls this before it differentiates an op, with the gradients of the op's
        outputs, and behind that, with those of its inputs first."""
        self._provenance._seq = self._seq
        if self._seq is not None:
            self._provenance._last_seq = self._seq
            mark_gradients(self._seq, gradients)
