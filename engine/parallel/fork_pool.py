"""A pool of processes, each of which can be killed."""

import pickle
import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import current_process, spawn
from typing import Any, Self

from .. import errors
from .fork_server import ForkedProcess, ForkServer, Messages, ProcessEndedError

LOAD_S = 120.0
"""The timeout in seconds for the imports at the start of a process."""
_SEND_S = 60.0
"""The timeout in seconds for a process to read a call."""
_TRIES = 3
"""The number of attempts to start a process, and to make a call whose process ends before it begins."""
_importing = False
"""Whether this process, one of a pool, is importing the program that started it."""


class StartError(Exception):
    """No process could be started; the message gives the reason."""


class PoolClosedError(Exception):
    """The pool was closed."""


class CallError(Exception):
    """The error of a call, as text, because only the process may be able to import its class. The traceback is attached as a note."""


@dataclass(eq=False)
class _Call:
    """A call that has no outcome yet.

    Args:
        message: The pickled function and its arguments.
        timeout_s: The timeout in seconds; None for no limit.
        outcome: The future for its result or error.
    """

    message: bytes
    timeout_s: float | None
    outcome: "Future[Any]" = field(default_factory=Future)


def is_importing_program() -> bool:
    """Return whether this process, of a pool or of multiprocessing, is importing the program that started it."""
    return _importing or bool(getattr(current_process(), "_inheriting", False))


def program_to_import(name: str) -> dict[str, Any]:
    """Return what a process of a pool needs to import this program; see `import_program`.

    Args:
        name: The name of the process.
    """
    preparation = spawn.get_preparation_data(name)
    # The authentication key of connections, which a pool does not use.
    preparation.pop("authkey", None)
    return preparation


class ForkPool:
    """Makes calls in separate processes, one at a time in each. Use it as a context manager, or close it.

    A process is killed and replaced if its call times out. It is also replaced if it exits, or if the system runs out of memory and
    all processes end. Calls that were running there fail; pending calls run once there is a process again.

    Args:
        workers: The number of processes.
        preload: The name of the module with the functions to call; it is imported once for all processes.
        start: A function of this module that each process runs at its start; its time does not count toward any call's timeout.
        arguments: Its arguments.
        imports_program: Whether processes import the program that started them, so that calls may refer to its functions.
    """

    def __init__(
        self,
        workers: int,
        preload: str,
        start: Callable[..., Any],
        arguments: tuple[Any, ...] = (),
        *,
        imports_program: bool = False,
    ) -> None:
        preparation = program_to_import(preload) if imports_program else {}
        self._start = (preparation, pickle.dumps((start, arguments)))
        self._closed = False
        self._lock = threading.Lock()
        self._server = ForkServer(__name__, preload)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._serve, name=f"forks-{i}", daemon=True) for i in range(workers)]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[..., Any], *arguments: Any, timeout_s: float | None = None) -> "Future[Any]":
        """Schedule a call in the next free process.

        Args:
            work: The function, of a module that processes can import.
            arguments: Its arguments.
            timeout_s: The timeout in seconds; None for no limit.

        Returns:
            The future of the result. Its error is a `TimeoutError` if the process was killed, a `ProcessEndedError`, a `StartError`, a
            `DrivetrainError` if the call raised one, or else a `CallError`.

        Raises:
            PoolClosedError: The pool was closed.
            Exception: The arguments cannot be pickled.
        """
        call = _Call(pickle.dumps((work, arguments)), timeout_s)
        with self._lock:
            if self._closed:
                raise PoolClosedError("the pool was closed")
            self._calls.put(call)
        return call.outcome

    def _serve(self) -> None:
        """Make calls in one process after another, until the pool is closed."""
        worker = _Worker(self._fork, self._start)
        while (call := self._calls.get()) is not None:
            if not call.outcome.set_running_or_notify_cancel():
                continue
            try:
                value = worker.run(call)
            except BaseException as e:  # any error belongs to the caller that waits for the outcome
                call.outcome.set_exception(PoolClosedError("the pool was closed") if self._closed else e)
            else:
                call.outcome.set_result(value)
        worker.close()

    def _fork(self) -> ForkedProcess:
        with self._lock:
            if self._closed:
                raise PoolClosedError("the pool was closed")
            # All threads share one server, so the lock keeps two of them from replacing it.
            self._server = self._server.replaced_if_lost()
            return self._server.fork()

    @property
    def server(self) -> int:
        """The process id of the server, the parent of all processes."""
        return self._server.pid

    @property
    def closed(self) -> bool:
        """Whether the pool no longer accepts calls."""
        return self._closed

    def close(self) -> None:
        """End all processes. Running calls are killed, and pending calls are never made."""
        with self._lock:
            # One end mark for each thread, and only at the first call.
            for _ in () if self._closed else self._threads:
                self._calls.put(None)
            self._closed = True
        # Outside the lock, which a thread that is about to start a process needs to see that the pool is closed.
        self._server.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """One of the processes of a pool, including its replacements after it has ended.

    Args:
        fork: Starts a process.
        start: The first message to each process.
    """

    def __init__(self, fork: Callable[[], ForkedProcess], start: tuple[Any, ...]) -> None:
        self._fork, self._start = fork, start
        self._process: ForkedProcess | None = None

    def run(self, call: _Call) -> Any:
        """Make a call and return its value; see `ForkPool.submit` for what it raises."""
        for _ in range(_TRIES):
            process = self._ready()
            # A process that ends before it reports that it has begun the call is not this call's fault.
            with suppress(ProcessEndedError):
                process.send(call.message, _SEND_S)
                process.receive(_SEND_S)
                break
        else:
            raise StartError(
                f"{_TRIES} processes ended before they began a call; a module that they import may end the program"
            )
        kind, value, trace = process.receive(call.timeout_s)
        if not kind:
            return value
        error: Exception = getattr(errors, kind)(value) if hasattr(errors, kind) else CallError(value)
        error.add_note(trace)
        raise error

    def _ready(self) -> ForkedProcess:
        reason = ""
        for _ in range(_TRIES):
            if self._process is not None and not self._process.ended:
                return self._process
            try:
                self._process = self._fork()
                self._process.send(self._start, _SEND_S)
                reason = self._process.receive(LOAD_S)
            except ProcessEndedError as e:
                reason = str(e)
            else:
                if not reason:
                    return self._process
                self._process.kill()
        raise StartError(reason)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()


# ---- in a process -------------------------------------------------------------------------------------------------------


def serve_one(messages: Messages) -> None:
    """Make the calls of a pool one by one, until the pool is closed or its program has ended."""
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            preparation, start = messages.receive()
            import_program(preparation)
            run, arguments = pickle.loads(start)
            run(*arguments)
        except BaseException as e:  # the program's code raises or exits while it is imported
            messages.send(f"{type(e).__name__}: {e}")
            return
        messages.send("")
        while True:
            message = messages.receive()
            messages.send("begins")
            messages.send_bytes(_answer(message))


def import_program(preparation: dict[str, Any]) -> None:
    """Import the program that started this process, as multiprocessing does.

    Args:
        preparation: The return value of `program_to_import` in that program.
    """
    global _importing
    current: Any = current_process()
    # A program that starts processes while it is imported is rejected, because it would start itself endlessly.
    current._inheriting = _importing = True
    try:
        spawn.prepare(preparation)
    finally:
        _importing = False
        del current._inheriting


def _answer(message: bytes) -> bytes:
    """Return, pickled: the kind of error if any, the value or the error's text, and its traceback."""
    try:
        work, arguments = pickle.loads(message)
        return pickle.dumps(("", work(*arguments), ""))
    except BaseException as e:  # a user's function or module raises anything
        kind = type(e).__name__
        if isinstance(e, errors.DrivetrainError) and hasattr(errors, kind):
            return pickle.dumps((kind, str(e), traceback.format_exc()))
        return pickle.dumps(("CallError", f"{kind}: {e}", traceback.format_exc()))
