"""Runs an agent, a function or a program that talks to the policy over HTTP.

Agents never run in the event loop of the server that answers them, which would deadlock. Coroutines run in a loop in a separate thread,
plain functions in one thread each, and programs in one process each.
"""

import asyncio
import inspect
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from numbers import Real
from typing import Any

from ...engine.parallel.orphans import die_with_parent
from ...environments.environment import EnvironmentResultError
from .agent_server import EpisodeReward

THREADS = 256
"""The maximum number of agents that are plain functions and run in a process at the same time."""
_OUTPUT_BYTES = 2**16
"""The number of bytes that are kept of a program's output."""
_CLOSE_S = 1.0
"""The number of seconds to keep reading the pipes of a program that has exited."""
_LOOK_S = 0.02
"""The polling interval for the end of a program or an agent, in seconds."""


@dataclass(frozen=True, kw_only=True)
class AgentTask:
    """The task of an agent.

    Args:
        base_url: The address of the policy for OpenAI clients; any API key is accepted.
        anthropic_base_url: The address of the policy for Anthropic clients.
        model: The name of the policy.
        prompt: The prompt of the row: a text, or the messages of a chat.
        columns: The other columns of the row, by name.
        seed: The seed for the agent's random numbers, so that runs are reproducible.
    """

    base_url: str
    anthropic_base_url: str
    model: str
    prompt: str | Sequence[Mapping[str, Any]]
    columns: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


Agent = Callable[[AgentTask], Any]


class AgentError(Exception):
    """An agent has failed."""


class AgentRun:
    """A running agent.

    Args:
        agent: A function, or the words of a program.
        task: Its task.
    """

    def __init__(self, agent: Agent | Sequence[str], task: AgentTask) -> None:
        self._agent, self._task = agent, task
        # Cleared by the agent itself when it has really ended: cancelling the future below does not stop a function in a
        # thread. Work that is cancelled while it waits for its turn never runs, and so must not count.
        self._is_working = self._is_ending = False
        self._lock = threading.Lock()
        self._running: asyncio.Future[EpisodeReward] = asyncio.ensure_future(self._run())

    def when_done(self, call: Callable[["asyncio.Future[EpisodeReward]"], None]) -> None:
        """Register a callback for the end of the agent, which receives its reward or its error."""
        self._running.add_done_callback(call)

    async def end(self, seconds: float) -> bool:
        """End the agent, whose requests are already refused; return whether it keeps running because it cannot be ended.

        Args:
            seconds: The number of seconds to wait for it.
        """
        with self._lock:
            self._is_ending = True
        self._running.cancel()
        deadline = asyncio.get_running_loop().time() + seconds
        while self._is_working and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_LOOK_S)
        return self._is_working

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Mark the agent as working.

        Raises:
            CancelledError: It has been ended before this work began.
        """
        # Under a lock, because the work may begin in another thread just when `end` looks whether it has.
        with self._lock:
            if self._is_ending:
                raise asyncio.CancelledError
            self._is_working = True
        try:
            yield
        finally:
            self._is_working = False

    async def _run(self) -> EpisodeReward:
        if callable(self._agent):
            return reward_of(await self._call(self._agent))
        with self._working():
            return reward_of(await run_program(self._agent, self._task))

    async def _call(self, agent: Agent) -> Any:
        if not inspect.iscoroutinefunction(agent):
            # A plain function may block, so it gets a thread, and not the loop of the coroutines.
            result = await asyncio.wrap_future(_threads().submit(self._in_thread, agent))
            if not inspect.isawaitable(result):
                return result
            # A callable object may return a coroutine.
        else:
            result = agent(self._task)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._in_loop(result), _loop()))

    def _in_thread(self, agent: Agent) -> Any:
        with self._working():
            try:
                return agent(self._task)
            except BaseException as e:  # also SystemExit, which must end only the agent
                raise AgentError(described(e)) from e

    async def _in_loop(self, work: Awaitable[Any]) -> Any:
        with self._working():
            try:
                return await work
            except asyncio.CancelledError as e:
                task = asyncio.current_task()
                # Cancelled from outside. Otherwise the agent has raised the error itself, which is a failure.
                if task is not None and task.cancelling():
                    raise
                raise AgentError(described(e)) from e
            except BaseException as e:  # as above
                raise AgentError(described(e)) from e


def described(error: BaseException) -> str:
    """Return an error as text, even if its own text cannot be computed."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # `str` of a third-party error may raise anything
        return type(error).__name__


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "agents")


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    # A daemon, so that an agent which never ends does not keep the process from exiting.
    threading.Thread(target=loop.run_forever, name="agents", daemon=True).start()
    return loop


def reward_of(result: Any) -> EpisodeReward:
    """Return an agent's result as a reward.

    Raises:
        EnvironmentResultError: It is neither None, nor a finite number, nor a mapping to such numbers.
    """
    numbers = dict(result) if isinstance(result, Mapping) else {"reward": result}
    if numbers.get("reward", 0) is None:
        del numbers["reward"]
    for name, value in numbers.items():
        # `Real` also covers numpy's numbers and fractions.
        if not isinstance(value, Real) or not _is_finite(value):
            raise EnvironmentResultError(
                f"the agent returned {name}={value!r:.40}; it must return a finite number, None, or a mapping of names to finite numbers"
            )
    reward = numbers.pop("reward", None)
    metrics = {str(name): float(value) for name, value in numbers.items()}
    return EpisodeReward(reward=None if reward is None else float(reward), metrics=metrics)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:
        # An integer that is too large for a float.
        return False


async def run_program(command: Sequence[str], task: AgentTask) -> Any:
    """Run a program; return the value of its last line. All processes that it has started end with it.

    Raises:
        AgentError: It failed.
        EnvironmentResultError: Its last line is not valid JSON.
    """
    addresses = {
        "OPENAI_BASE_URL": task.base_url,
        # The clients of both APIs need a key, of any value. The session is named in the path of the address.
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_BASE_URL": task.anthropic_base_url,
        "ANTHROPIC_API_KEY": "none",
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable if word == "python" else word for word in command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **addresses},
        # A process group of its own, so that everything it starts can be ended with it.
        start_new_session=True,
        preexec_fn=die_with_parent,  # safe after fork: it makes one system call and takes no lock
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    printed, errors = bytearray(), bytearray()
    # Write and read concurrently: the program may print before it reads.
    piping = [
        asyncio.ensure_future(_feed(process.stdin, json.dumps(asdict(task)).encode())),
        asyncio.ensure_future(_keep_tail(process.stdout, printed)),
        asyncio.ensure_future(_keep_tail(process.stderr, errors)),
    ]
    try:
        await _exit_of(process)
    finally:
        # Also after a regular exit, because processes that the program has left behind must not outlive the episode.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await _exit_of(process)
        # A process that has left the process group may keep a pipe open.
        await asyncio.wait(piping, timeout=_CLOSE_S)
        for one in piping:
            one.cancel()
    # The exit code comes first: the output of a program that failed is not a reward.
    code = process.returncode
    if code:
        raise AgentError(f"the program {command[0]} exited with code {code}: {errors.decode(errors='replace').strip()[-500:]}")
    lines = printed.decode(errors="replace").strip().splitlines()
    if not lines:
        return None
    try:
        return json.loads(lines[-1])
    except ValueError:
        raise EnvironmentResultError(
            f"the program {command[0]} printed {lines[-1]!r:.80} as its last line; it must be a JSON number, or a JSON object of numbers"
        ) from None


async def _exit_of(process: asyncio.subprocess.Process) -> None:
    # `Process.wait` would also wait for child processes that inherited the pipes.
    while process.returncode is None:
        await asyncio.sleep(_LOOK_S)


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):
        stream.write(data)
        await stream.drain()
    stream.close()


async def _keep_tail(stream: asyncio.StreamReader, kept: bytearray) -> None:
    """Read a pipe to its end, and keep the last part."""
    while chunk := await stream.read(_OUTPUT_BYTES):
        kept += chunk
        # Only the end is of interest. Reading on keeps the program from blocking on a full pipe.
        del kept[:-_OUTPUT_BYTES]
