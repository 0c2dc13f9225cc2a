"""A process that runs the environments of many episodes at the same time.

Coroutines share an event loop and other methods run in threads, so an episode that waits for a network or a program does not block the
others.
"""

import asyncio
import inspect
import pickle
import resource
import traceback
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from ..engine.errors import ConfigError
from ..engine.parallel.fork_pool import import_program
from ..engine.parallel.fork_server import Messages
from .environment import (
    Environment,
    EnvironmentResultError,
    EpisodeLostError,
    EpisodeRow,
    Turn,
    check_first,
    check_next,
)
from .registry import build_environment

THREADS = 256
"""The maximum number of methods that run in a process at the same time."""

EpisodeKey = Hashable
CallKind = Literal["describe", "reset", "step", "close"]
ReplyKind = Literal["value", "settings", "invalid", "error", "timeout", "lost"]


@dataclass(frozen=True, kw_only=True)
class EnvironmentDescription:
    """An environment's description of itself.

    Args:
        tools: Its tools, as JSON schemas.
        processes: The maximum number of processes that run instances at the same time; None for no limit.
        independent: Whether episodes do not wait for each other to end.
    """

    tools: list[dict[str, Any]]
    processes: int | None = None
    independent: bool = True


@dataclass(frozen=True, kw_only=True)
class HostCall:
    """A call of the environment of an episode.

    Args:
        key: The episode.
        kind: The method; `describe` builds an environment and returns its description, without an episode.
        argument: Its argument.
        timeout_s: The time limit, in seconds.
    """

    key: EpisodeKey
    kind: CallKind
    argument: EpisodeRow | Turn | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class HostReply:
    """The outcome of a call.

    Args:
        key: The episode.
        kind: `value`; `settings`, if the environment cannot be built; `invalid`, if it returned an invalid result; `timeout`, if the
            call took too long; `lost`, if the environment raised `EpisodeLostError`; or `error`.
        value: The result or the error message.
        trace: The traceback of an error.
        goes_on: Whether a method that took too long may keep running, unlike a coroutine, which is cancelled; or whether something of a
            closed episode keeps running.
    """

    key: EpisodeKey
    kind: ReplyKind
    value: Any
    trace: str = ""
    goes_on: bool = False


class _TooLongError(Exception):
    """A call has taken too long.

    Args:
        goes_on: Whether it may keep running.
    """

    def __init__(self, *, goes_on: bool) -> None:
        super().__init__(goes_on)
        self.goes_on = goes_on


def serve_one(messages: Messages) -> None:
    """Run environments until the pool is closed or its program has ended."""
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            preparation, start = messages.receive()
            import_program(preparation)
            location, settings, memory = pickle.loads(start)
            # Limits private memory; a limit of the address space would also count reserved memory.
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        except BaseException as e:  # importing the program can raise anything, including SystemExit
            messages.send(f"{type(e).__name__}: {e}")
            return
        # An empty text tells the pool that the process is ready.
        messages.send("")
        asyncio.run(_Host(messages, location, settings).serve())


class _Host:
    """Runs environments.

    Args:
        messages: The messages from and to the pool.
        location: The class of the environments, as `module:class`.
        settings: The arguments of its constructor.
    """

    def __init__(self, messages: Messages, location: str, settings: Mapping[str, Any]) -> None:
        self._messages, self._location, self._settings = messages, location, settings
        self._environments: dict[EpisodeKey, Environment] = {}
        self._threads = ThreadPoolExecutor(THREADS)
        # A separate sender: the pool may send more calls before it reads replies, and these have to be read in the meantime.
        self._writer = ThreadPoolExecutor(1)
        # The event loop has only weak references to its tasks.
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Run incoming calls."""
        loop = asyncio.get_running_loop()
        # A dedicated thread, so that it never waits for a free one.
        reader = ThreadPoolExecutor(1)
        try:
            while True:
                call = await loop.run_in_executor(reader, self._messages.receive)
                task = asyncio.create_task(self._answer(call))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            # A normal exit would wait for threads that never end.
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._writer.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, call: HostCall) -> None:
        try:
            value = await self._call(call)
            # A `close` that returns True reports that something keeps running.
            reply = HostReply(key=call.key, kind="value", value=value, goes_on=call.kind == "close" and value is True)
            # Inside the block, so that a result that cannot be pickled is an error of this call.
            data = pickle.dumps(reply)
        except _TooLongError as e:
            message = "the call took longer than environment.timeout_s"
            data = pickle.dumps(HostReply(key=call.key, kind="timeout", value=message, goes_on=e.goes_on))
        except BaseException as e:  # the environment can raise anything, including SystemExit; sent to the pool
            data = pickle.dumps(_failed(call.key, e))
        await asyncio.get_running_loop().run_in_executor(self._writer, self._messages.send_bytes, data)

    async def _call(self, call: HostCall) -> Any:
        if call.kind == "describe":
            environment = await self._run(self._build)
            description = EnvironmentDescription(
                tools=[dict(schema) for schema in environment.tools],
                processes=environment.processes,
                independent=environment.independent,
            )
            await self._run(environment.close)
            return description
        if call.kind == "close":
            # Removed first, so that it is closed only once, even if closing it fails.
            closed = self._environments.pop(call.key, None)
            return None if closed is None else await self._run(closed.close)
        if call.kind == "reset":
            self._environments[call.key] = await self._run(self._build)
            return check_first(await self._run(self._environments[call.key].reset, call.argument, seconds=call.timeout_s))
        return check_next(await self._run(self._environments[call.key].step, call.argument, seconds=call.timeout_s))

    def _build(self) -> Environment:
        return build_environment(self._location, self._settings)

    async def _run(self, method: Callable[..., Any], *arguments: Any, seconds: float | None = None) -> Any:
        is_coroutine = inspect.iscoroutinefunction(method)
        try:
            async with asyncio.timeout(seconds) as limit:
                if is_coroutine:
                    return await method(*arguments)
                return await asyncio.get_running_loop().run_in_executor(self._threads, method, *arguments)
        except TimeoutError:
            # The environment itself may raise this error too.
            if limit.expired():
                raise _TooLongError(goes_on=not is_coroutine) from None
            raise


def _failed(key: EpisodeKey, error: BaseException) -> HostReply:
    trace = "".join(traceback.format_exception(error))
    try:
        text = str(error)
    except Exception as e:  # the exception's __str__ failed
        text = f"(its message cannot be formatted: {type(e).__name__})"
    if isinstance(error, EnvironmentResultError):
        return HostReply(key=key, kind="invalid", value=text, trace=trace)
    if isinstance(error, ConfigError):
        return HostReply(key=key, kind="settings", value=text, trace=trace)
    if isinstance(error, EpisodeLostError):
        return HostReply(key=key, kind="lost", value=text, trace=trace)
    return HostReply(key=key, kind="error", value=f"{type(error).__name__}: {text}", trace=trace)
