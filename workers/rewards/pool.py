"""Processes for reward functions, each of which can be killed. Imports no torch."""

import logging
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import forkserver, resource_tracker
from typing import Any, Self

from pebble import ProcessExpired, ProcessPool

from ...engine.errors import ConfigError
from .registry import import_function
from .sample import Outcome, RewardSample
from .signatures import Signature, judge, signature_of

log = logging.getLogger(__name__)

MIB = 2**20
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LOAD_S = 120.0
"""For how many seconds the module of a function may import."""
_TRIES = 3
"""How often a call is made whose process was lost with all others."""

Done = Callable[[list[Outcome], bool], None]
Target = str | Callable[..., Any]
"""A reward function, or its location as `module:function`."""


@dataclass
class _Call:
    """A call that has no outcome yet."""

    arguments: tuple[Any, ...]
    count: int
    timeout_s: float
    done: Done
    tries: int = 0


class RewardPool:
    """Runs reward functions in processes of their own, with limits on time and memory. Use it with `with`, or close it.

    A process whose call takes too long is killed and replaced.

    Args:
        workers: The number of processes.
        timeout_s: For how many seconds a call may run.
        memory_mb: How much memory a process may have for data, in MiB.
        targets: Functions whose modules every process imports at its start, which is not a part of any call's time.

    Raises:
        ConfigError: A function cannot be sent to another process.
    """

    def __init__(
        self, workers: int = 2, timeout_s: float = 10.0, memory_mb: int = 4096, targets: Sequence[Target] = ()
    ) -> None:
        for target in targets:
            if getattr(target, "__module__", "") == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
                raise ConfigError(
                    f"the reward {title_of(target)} is defined in a program without a file (a notebook, python -c or standard input), "
                    "which other processes cannot import; define it in a module"
                )
            try:
                pickle.dumps(target)
            except Exception as e:  # of many types
                raise ConfigError(
                    f"the reward {title_of(target)} cannot be used: {type(e).__name__}: {e}; it must be at the top level of a module"
                ) from e
        self.timeout_s = timeout_s
        self._workers, self._start = workers, (memory_mb * MIB, tuple(targets))
        self._pool = self._new_pool()
        self._closed = False
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._count = 0

    def _new_pool(self) -> ProcessPool:
        context = multiprocessing.get_context("forkserver")
        # Its start would unblock signals below.
        resource_tracker.ensure_running()
        # A signal to the process group of a run is for the run, which saves and then ends these processes.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            # What a fresh process would otherwise import for each call that was killed.
            context.set_forkserver_preload([__name__])
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return ProcessPool(self._workers, initializer=_prepare, initargs=self._start, context=context)

    def describe(self, target: Target) -> Signature:
        """Import a function, in one of the processes, and return how it is called.

        Raises:
            ConfigError: It cannot be imported or called, or importing it takes too long.
        """
        try:
            found: Signature = self._pool.schedule(_describe, args=(target,), timeout=_LOAD_S).result(_LOAD_S)
        except ConfigError:
            raise
        except TimeoutError:
            raise ConfigError(f"the module of the reward {title_of(target)} took more than {_LOAD_S:g} s to import") from None
        except BrokenProcessPool as e:
            raise ConfigError(
                f"the processes of rewards end as soon as they start ({e}): they import this program, which must start its run under "
                "if __name__ == '__main__':"
            ) from e
        except Exception as e:  # what the module raises, or what cannot be pickled
            raise ConfigError(
                f"the reward {title_of(target)} cannot be used: {type(e).__name__}: {e}; it must be at the top level of a module"
            ) from e
        return found

    def submit(
        self,
        target: Target,
        samples: Sequence[RewardSample],
        settings: Mapping[str, Any],
        done: Done,
        *,
        calls: int = 1,
    ) -> None:
        """Judge answers in one of the processes, when it is free.

        Args:
            target: The function.
            samples: The answers.
            settings: Further arguments of the function.
            done: Called in a thread of the pool, with an outcome for each answer, and whether the call came to its end: not if it was
                killed, or its process died.
            calls: For how many calls of `timeout_s` the answers may take.
        """
        if self._closed:
            raise ConfigError("the reward pool was closed")
        arguments = (target, list(samples), dict(settings), self.timeout_s)
        call = _Call(arguments, len(samples), self.timeout_s * calls, done)
        with self._lock:
            self._count += 1
            number = self._count
            self._calls[number] = call
        self._schedule(number, call)

    def _schedule(self, number: int, call: _Call) -> None:
        pool = self._pool
        call.tries += 1
        try:
            future = pool.schedule(_judge, args=call.arguments, timeout=call.timeout_s)
        except RuntimeError:
            # Whoever waits for the outcome replaces the processes; or they were closed, and so is the call.
            if pool.active and not self._closed:
                raise
            return
        future.add_done_callback(lambda ended: self._end(number, call, ended))

    def _end(self, number: int, call: _Call, ended: "Future[Any]") -> None:
        # All processes are lost, and calls that wait in a queue never hear of it: they are made again together.
        if ended.cancelled() or not isinstance(ended.exception(), BrokenProcessPool):
            self._settle(number, *_outcomes(ended, call.count, call.timeout_s))

    def recover(self) -> None:
        """Replace the processes if they were lost together, as when the system runs out of memory, and make their calls again. To be
        called now and then while one waits for outcomes.
        """
        with self._lock:
            if self._closed or self._pool.active:
                return
            lost, self._pool = self._pool, self._new_pool()
            calls = list(self._calls.items())
        log.warning("the processes of rewards were lost and are replaced; %d calls are made again", len(calls))
        lost.stop()
        threading.Thread(target=lost.join, daemon=True).start()
        for number, call in calls:
            if self._closed:
                # Whoever closes it settles what is left.
                return
            if call.tries < _TRIES:
                self._schedule(number, call)
            else:
                message = f"the processes of rewards were lost {_TRIES} times"
                self._settle(number, [Outcome(kind="error", message=message)] * call.count, False)

    @property
    def closed(self) -> bool:
        """Whether it takes no more calls."""
        return self._closed

    def _settle(self, number: int, outcomes: list[Outcome], completed: bool) -> None:
        with self._lock:
            call = self._calls.pop(number, None)
        if call is not None:
            call.done(outcomes, completed)

    def close(self) -> None:
        """End all processes; calls that run are killed."""
        with self._lock:
            closes, self._closed = not self._closed, True
        if closes:
            self._pool.stop()
            self._pool.join()
            # It leaves those that wait without an answer.
            for number, call in list(self._calls.items()):
                self._settle(number, [Outcome(kind="error", message="the reward pool was closed")] * call.count, False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def title_of(target: Target) -> str:
    """Return the name of a function for messages."""
    return target if isinstance(target, str) else getattr(target, "__qualname__", type(target).__name__)


def _outcomes(ended: "Future[Any]", count: int, limit: float) -> tuple[list[Outcome], bool]:
    """Return the outcome of each answer, and whether the call came to its end."""
    try:
        return ended.result(), True
    except TimeoutError:
        outcome = Outcome(
            kind="timeout", message=f"it took more than {limit:g} s and was killed", seconds=limit / max(1, count)
        )
    except ProcessExpired as e:
        outcome = Outcome(kind="error", message=f"its process ended (exit code {e.exitcode})")
    except BaseException as e:  # of whatever the pool and pickle raise; cancelled futures among them
        outcome = Outcome(kind="error", message=f"{type(e).__name__}: {e}")
    return [outcome] * count, False


def _prepare(size: int, targets: Sequence[Target]) -> None:
    os.setsid()
    # They were blocked in the server that this process was forked from; the pool ends it by one of them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    # Private memory; a limit of the address space would count what is only reserved.
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    for target in targets:
        # The call itself says what is wrong.
        with suppress(Exception):
            _resolve(target)
            if str(target).endswith(":match_answer"):
                import_module("math_verify")


def _resolve(target: Target) -> Callable[..., Any]:
    return import_function(target) if isinstance(target, str) else target


def _describe(target: Target) -> Signature:
    return signature_of(_resolve(target))


def _judge(target: Target, samples: list[RewardSample], settings: dict[str, Any], timeout_s: float) -> list[Outcome]:
    return judge(_resolve(target), samples, settings, timeout_s)
