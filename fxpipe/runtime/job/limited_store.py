"""The store that ranks share, with a time limit of its calls.

Torch's waits without one for an answer: where the process that has the store is stopped, every call hangs,
and with it whatever would tell of that.  So one thread makes the calls, and where an answer does not come the
store counts as gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist

from fxpipe.runtime.torch_private import PrefixStore, Store

#: What a wait for a key may take longer than its own time limit.
MORE = timedelta(seconds=5)

T = TypeVar("T")


class NoStore(dist.DistNetworkError):
    """The store has given no answer within the limit, now or before."""


class LimitedStore(Store):
    """A store whose calls end after a time limit.  ``store``: one that nothing else uses: as it waits for a
    key, it answers no other thread."""

    def __init__(self, store: Store, limit: timedelta, caller: _Caller | None = None) -> None:
        super().__init__()
        self._store, self._limit = store, limit
        self._caller = caller or _Caller()

    def under(self, prefix: str) -> LimitedStore:
        """The same store for keys of their own."""
        return LimitedStore(PrefixStore(prefix, self._store), self._limit, self._caller)

    def root(self) -> LimitedStore:
        """The same store with the keys of everybody, without a prefix."""
        store = self._store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        return LimitedStore(store, self._limit, self._caller)

    def hurry(self, limit: timedelta) -> None:
        """Wait no longer than this for answers to later calls."""
        self._limit = min(limit, self._limit)

    def get(self, key: str) -> bytes:
        return self._call(lambda: self._store.get(key))

    def set(self, key: str, value: str) -> None:
        self._call(lambda: self._store.set(key, value))

    def check(self, keys: list[str]) -> bool:
        return self._call(lambda: self._store.check(keys))

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return self._call(lambda: self._store.compare_set(key, expected_value, desired_value))

    def list_keys(self) -> list[str]:
        return self._call(lambda: self._store.list_keys())

    def delete_key(self, key: str) -> bool:
        return self._call(lambda: self._store.delete_key(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until the keys are there, for at most the time limit by default."""
        most = self._limit if timeout is None else timeout
        self._caller.call(lambda: self._store.wait(keys, most), most + MORE)

    def _call(self, function: Callable[[], T]) -> T:
        return self._caller.call(function, self._limit)


class _Caller:
    """The thread that makes the calls, one after the other."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._changes, self._gone = threading.Lock(), ""
        # Nobody joins it: it may wait for ever.
        threading.Thread(target=_make_calls, args=(self._calls,), name="fxpipe-store", daemon=True).start()

    def call(self, function: Callable[[], T], limit: timedelta) -> T:
        """Raises NoStore unless the answer comes within the limit."""
        answer: Future[T] = Future()
        with self._changes:  # a call that came behind those that are failed would wait for nothing
            if self._gone:
                raise NoStore(self._gone)
            self._calls.put((answer, function))
        try:
            return answer.result(limit.total_seconds())
        except TimeoutError:
            self._give_up(f"no answer for {limit}")
            raise NoStore(self._gone) from None

    def _give_up(self, why: str) -> None:
        """No call is made any more, and those that wait for their turn fail."""
        with self._changes:
            self._gone = self._gone or why
            # Not ``while not empty(): get()``: the thread takes calls meanwhile, and would let this wait.
            with suppress(Empty):
                while True:
                    answer, _ = self._calls.get_nowait()
                    answer.set_exception(NoStore(self._gone))


def _make_calls(calls: SimpleQueue[tuple[Future[object], Callable[[], object]]]) -> None:
    while True:
        answer, function = calls.get()
        try:
            answer.set_result(function())
        except Exception as error:  # noqa: BLE001 - of any kind: whoever waits for the answer raises it
            answer.set_exception(error)
