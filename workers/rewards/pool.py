"""Processes for reward functions, each of which can be killed. Imports no torch."""

import logging
import pickle
import queue
import resource
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import current_process, spawn
from typing import Any, Self

from ...engine.errors import ConfigError
from .fork_server import ForkedProcess, ForkServer, Messages, ProcessEndedError
from .registry import import_function
from .sample import Outcome, RewardSample
from .signatures import Signature, judge, signature_of

log = logging.getLogger(__name__)

MIB = 2**20
_LOAD_S = 120.0
"""For how many seconds the module of a function may import."""
_SEND_S = 60.0
"""For how many seconds a process may take to read a call."""
_TRIES = 3
"""How often a call is made for which no process could be started."""

Done = Callable[[list[Outcome], bool], None]
Target = str | Callable[..., Any]
"""A reward function, or its location as `module:function`."""
_importing = False
"""Whether this process, one of a pool, is importing the program that started it."""


class _StartError(Exception):
    """No process could be started; says why."""


class _ClosedError(ConfigError):
    """The pool was closed."""

    def __init__(self) -> None:
        super().__init__("the reward pool was closed")


class _CallError(Exception):
    """What a call raised, as text: its class may be one that only the process can import."""


@dataclass(eq=False)
class _Call:
    """A call that has no outcome yet.

    Args:
        work: The function of this module that a process runs.
        arguments: Its arguments.
        timeout_s: For how many seconds it may run.
        outcome: What it returns or raises.
    """

    work: Callable[..., Any]
    arguments: tuple[Any, ...]
    timeout_s: float
    outcome: "Future[Any]" = field(default_factory=Future)


class RewardPool:
    """Runs reward functions in processes of their own, with limits on time and memory. Use it with `with`, or close it.

    A process whose call takes too long is killed and replaced; so is one that ends by itself, or with all others when the system runs out
    of memory. Calls that were running there have no value; those that wait are made when there is a process again.

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
        if _importing or getattr(current_process(), "_inheriting", False):
            raise ConfigError(
                "a process of rewards imports this program, which must start its run under if __name__ == '__main__':"
            )
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
        preparation = spawn.get_preparation_data("rewards")
        # A key for connections, which there are none of.
        del preparation["authkey"]
        # The functions can be loaded once the program has been imported.
        self._start = (preparation, memory_mb * MIB, pickle.dumps(tuple(targets)))
        self._closed = False
        self._lock = threading.Lock()
        self._server = ForkServer(__name__)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._serve, name=f"rewards-{i}", daemon=True) for i in range(workers)]
        for thread in self._threads:
            thread.start()

    def describe(self, target: Target) -> Signature:
        """Import a function, in one of the processes, and return how it is called.

        Raises:
            ConfigError: It cannot be imported or called, or importing it takes too long.
        """
        try:
            found: Signature = self._enqueue(_Call(_describe, (target,), _LOAD_S)).result()
        except ConfigError:
            raise
        except TimeoutError:
            raise ConfigError(f"the module of the reward {title_of(target)} took more than {_LOAD_S:g} s to import") from None
        except _StartError as e:
            raise ConfigError(
                f"the processes of rewards end as soon as they start ({e}): they import this program, which must start its run under "
                "if __name__ == '__main__':"
            ) from e
        except Exception as e:  # what the module raises, or what cannot be pickled
            raise ConfigError(
                f"the reward {title_of(target)} cannot be used: {_text(e)}; it must be at the top level of a module"
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

        Raises:
            ConfigError: The pool was closed.
        """
        call = _Call(_judge, (target, list(samples), dict(settings), self.timeout_s), self.timeout_s * calls)
        call.outcome.add_done_callback(lambda ended: done(*_outcomes(ended, len(samples), call.timeout_s)))
        self._enqueue(call)

    def _enqueue(self, call: _Call) -> "Future[Any]":
        with self._lock:
            if self._closed:
                raise _ClosedError
            self._calls.put(call)
        return call.outcome

    def _serve(self) -> None:
        """Make calls in one process after another, until the pool is closed."""
        worker = _Worker(self._fork, self._start)
        while (call := self._calls.get()) is not None:
            try:
                value = worker.run(call)
            except BaseException as e:  # whatever it is, it is for whoever waits
                call.outcome.set_exception(_ClosedError() if self._closed else e)
            else:
                call.outcome.set_result(value)
        worker.close()

    def _fork(self) -> ForkedProcess:
        with self._lock:
            if self._closed:
                raise _ClosedError
            if self._server.lost:
                log.warning("the process that starts those of rewards was lost and is replaced")
                self._server.close()
                self._server = ForkServer(__name__)
            return self._server.fork()

    @property
    def closed(self) -> bool:
        """Whether it takes no more calls."""
        return self._closed

    def close(self) -> None:
        """End all processes; calls that run are killed, and those that wait are not made."""
        with self._lock:
            for _ in () if self._closed else self._threads:
                self._calls.put(None)
            self._closed = True
        self._server.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """One of the processes of a pool, and those that follow it when it has ended.

    Args:
        fork: Starts a process.
        start: What a process is sent first.
    """

    def __init__(self, fork: Callable[[], ForkedProcess], start: tuple[Any, ...]) -> None:
        self._fork, self._start = fork, start
        self._process: ForkedProcess | None = None

    def run(self, call: _Call) -> Any:
        """Make a call and return its value.

        Raises:
            TimeoutError: It took too long; the process was killed.
            ProcessEndedError: The process has ended.
            _StartError: No process could be started.
            ConfigError: What the call has raised, if it was one.
            _CallError: What else the call has raised.
        """
        for _ in range(_TRIES):
            process = self._ready()
            # One that ended while it had no call is not the fault of this one.
            with suppress(ProcessEndedError):
                process.send((call.work, call.arguments), _SEND_S)
                break
        else:
            raise _StartError("they end before they are given a call")
        kind, value = process.receive(call.timeout_s)
        if kind == "config":
            raise ConfigError(value)
        if kind == "error":
            raise _CallError(value)
        return value

    def _ready(self) -> ForkedProcess:
        reason = ""
        for _ in range(_TRIES):
            if self._process is not None and not self._process.ended:
                return self._process
            try:
                self._process = self._fork()
                self._process.send(self._start, _SEND_S)
                reason = self._process.receive(_LOAD_S)
            except ProcessEndedError as e:
                reason = str(e)
            else:
                if not reason:
                    return self._process
                self._process.kill()
        raise _StartError(reason)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()


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
    except ProcessEndedError as e:
        outcome = Outcome(kind="error", message=f"its process ended ({e})")
    except BaseException as e:  # what the call raises, and what pickle does
        outcome = Outcome(kind="error", message=_text(e))
    return [outcome] * count, False


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, _CallError | _ClosedError) else f"{type(error).__name__}: {error}"


# ---- in a process -------------------------------------------------------------------------------------------------------


def serve_one(messages: Messages) -> None:
    """Make the calls of a pool, one after the other, until it is closed."""
    try:
        _prepare(*messages.receive())
    except BaseException as e:  # of the program, or its end, when it is imported
        messages.send(f"{type(e).__name__}: {e}")
        return
    messages.send("")
    with suppress(EOFError):
        while True:
            data = messages.receive_bytes()
            messages.send(_answer(data))


def _prepare(preparation: dict[str, Any], size: int, targets: bytes) -> None:
    global _importing
    current: Any = current_process()
    # What starts processes while it is imported is refused, or it would start itself without end.
    current._inheriting = _importing = True
    try:
        spawn.prepare(preparation)
    finally:
        _importing = False
        del current._inheriting
    # Private memory; a limit of the address space would count what is only reserved.
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    # The call itself says what is wrong.
    with suppress(Exception):
        for target in pickle.loads(targets):
            with suppress(Exception):
                _resolve(target)
                if str(target).endswith(":match_answer"):
                    import_module("math_verify")


def _answer(data: bytearray) -> tuple[str, Any]:
    try:
        work, arguments = pickle.loads(data)
        return "value", work(*arguments)
    except ConfigError as e:
        return "config", str(e)
    except BaseException as e:  # of a user's function or module
        return "error", f"{type(e).__name__}: {e}"


def _resolve(target: Target) -> Callable[..., Any]:
    return import_function(target) if isinstance(target, str) else target


def _describe(target: Target) -> Signature:
    return signature_of(_resolve(target))


def _judge(target: Target, samples: list[RewardSample], settings: dict[str, Any], timeout_s: float) -> list[Outcome]:
    return judge(_resolve(target), samples, settings, timeout_s)
