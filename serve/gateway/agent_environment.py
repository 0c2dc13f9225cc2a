"""The environment `gateway`: an agent of any making, whose requests to the policy are the turns of its episode. Imports no torch.

the run's prompt -> agent -> HTTP request -> observation -> the policy's turn -> HTTP answer -> agent -> ... -> reward
"""

import asyncio
import inspect
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from numbers import Real
from typing import Any

from ...engine.errors import ConfigError
from ...engine.parallel.orphans import die_with_parent
from ...environments.environment import (
    Done,
    Environment,
    EnvironmentResultError,
    EpisodeLostError,
    EpisodeRow,
    Observation,
    Turn,
)
from ...rewards.registry import import_function
from ..openai.settings import ServeSettings
from .agent_server import AgentServer, AgentServers, EpisodeReward, EpisodeSession

THREADS = 256
"""How many agents that are plain functions may run in a process at the same time."""
_OUTPUT_BYTES = 2**16
"""How much of what a program prints is kept."""


@dataclass(frozen=True, kw_only=True)
class AgentTask:
    """What an agent is given.

    Args:
        base_url: Where the policy is, for clients of OpenAI's interface; the API key does not matter.
        anthropic_base_url: Where it is for clients of Anthropic's interface.
        model: The name of the policy.
        prompt: The prompt of the row: a text, or the messages of a chat.
        columns: The other columns of the row, by name.
        seed: A number for whatever the agent draws, so that another run draws the same.
    """

    base_url: str
    anthropic_base_url: str
    model: str
    prompt: str | Sequence[Mapping[str, Any]]
    columns: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


class AgentError(Exception):
    """An agent has failed."""


@cache
def _servers(loop: asyncio.AbstractEventLoop) -> AgentServers:
    return AgentServers()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS)


class GatewayEnvironment(Environment):
    """An agent that talks to the policy by HTTP. Exactly one of `agent`, `command` and `port` says which.

    Args:
        agent: A function `module:function`, plain or a coroutine, which is called with an `AgentTask` and returns the reward: a number, None to leave it
            to the rewards, or a mapping with `reward` and numbers that are averaged.
        command: The words of a program. It finds the policy in OPENAI_BASE_URL and ANTHROPIC_BASE_URL, reads the task as JSON from its standard input, and
            prints the reward, as JSON, as its last line, or nothing.
        port: A port at which agents that run elsewhere are given sessions by `POST /sessions`.
        host: The address to listen at. Other than the loopback address needs `api_key`.
        api_key: The key for sessions.
        allowed_hosts: Further names under which agents may address the gateway.
        model: The name of the policy in requests.
        silence_s: With `port`: after how many seconds in which nothing was heard of an agent its prompt is given to another one.

    Raises:
        ConfigError: A setting is invalid.
    """

    def __init__(
        self,
        *,
        agent: str | None = None,
        command: Sequence[str] | None = None,
        port: int | None = None,
        host: str = "127.0.0.1",
        api_key: str | None = None,
        allowed_hosts: Sequence[str] = (),
        model: str = "policy",
        silence_s: float = 300.0,
    ) -> None:
        kinds = {"agent": agent, "command": command, "port": port}
        chosen = [name for name, value in kinds.items() if value is not None]
        if len(chosen) != 1:
            which = "none" if not chosen else " and ".join(chosen)
            raise ConfigError(
                f"environment.settings has {which} of agent, command and port; set exactly one, which says what the agent is"
            )
        if command is not None and (isinstance(command, str) or not command or not all(isinstance(w, str) for w in command)):
            raise ConfigError(f"environment.settings.command={command!r:.80}; it must be a list of words")
        if not 0 < silence_s < math.inf:
            raise ConfigError(f"environment.settings.silence_s={silence_s}; it must be above 0 and finite")
        self._agent: Callable[[AgentTask], Any] | None = None if agent is None else import_function(agent)
        self._command, self._gives, self._silence_s = command, port is not None, silence_s
        self._settings = ServeSettings(
            name=model,
            host=host,
            port=port or 0,
            api_keys=() if api_key is None else (api_key,),
            allowed_hosts=tuple(allowed_hosts),
        )
        self._server: AgentServer | None = None
        self._session: EpisodeSession | None = None
        self._running: asyncio.Future[Any] | None = None

    @property
    def processes(self) -> int | None:
        """One with `port`, at which only one can listen."""
        return 1 if self._gives else None

    @property
    def independent(self) -> bool:
        """Not with `port`: there may be fewer agents than episodes."""
        return not self._gives

    async def reset(self, row: EpisodeRow) -> Observation:
        """Let the agent begin; return its first request."""
        self._server = await _servers(asyncio.get_running_loop()).of(self._settings, gives=self._gives)
        self._session = session = self._server.open(row)
        if self._gives:
            await session.claimed.wait()
        else:
            task = AgentTask(
                **self._server.addresses(session),
                model=self._settings.name,
                prompt=row.prompt,
                columns=row.columns,
                seed=row.seed,
            )
            self._running = asyncio.ensure_future(self._run(task))
            self._running.add_done_callback(self._ended)
        first = await self._next()
        if isinstance(first, Done):
            raise EnvironmentResultError("the agent has ended without a request to the policy")
        return first

    async def step(self, turn: Turn) -> Observation | Done:
        """Answer the agent's request with what the policy has written; return the next one, or the end."""
        assert self._session is not None
        self._session.answer(turn)
        return await self._next()

    async def _next(self) -> Observation | Done:
        assert self._session is not None
        try:
            result = await self._session.next(silence_s=self._silence_s if self._gives else None)
        except asyncio.CancelledError:
            if not self._session.finished.cancelled():
                raise
            raise EpisodeLostError("the agent has given its session back") from None
        if result is None:
            raise EpisodeLostError(f"nothing was heard of the agent for environment.settings.silence_s={self._silence_s:g}")
        if isinstance(result, Observation):
            return result
        return Done(reward=result.reward, metrics=result.metrics, unread=self._session.take_unread())

    async def close(self) -> None:
        """End the session, and the agent if it can be ended."""
        if self._server is not None and self._session is not None:
            self._server.close_session(self._session)
        if self._running is not None:
            self._running.cancel()

    # ---- the agent -------------------------------------------------------------------------------------------------------

    async def _run(self, task: AgentTask) -> Any:
        if self._command is not None:
            return await _run_command(self._command, task)
        assert self._agent is not None
        if inspect.iscoroutinefunction(self._agent):
            return await self._agent(task)
        return await asyncio.get_running_loop().run_in_executor(_threads(), self._agent, task)

    def _ended(self, running: "asyncio.Future[Any]") -> None:
        session = self._session
        if session is None or session.is_closed or session.finished.done():
            # What an agent does after the end of its episode concerns nobody.
            if not running.cancelled():
                running.exception()
            return
        if running.cancelled():
            session.finished.cancel()
        elif (error := running.exception()) is not None:
            session.finished.set_exception(error)
        else:
            try:
                session.finished.set_result(reward_of(running.result()))
            except EnvironmentResultError as e:
                session.finished.set_exception(e)


def reward_of(result: Any) -> EpisodeReward:
    """Return what an agent has returned as a reward.

    Raises:
        EnvironmentResultError: It is neither None, a finite number, nor a mapping of these.
    """
    numbers = dict(result) if isinstance(result, Mapping) else {"reward": result}
    reward = numbers.pop("reward", None)
    for name, value in {**numbers, **({} if reward is None else {"reward": reward})}.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            raise EnvironmentResultError(
                f"the agent returned {name}={value!r:.40}; it must return a finite number, None, or a mapping of such by name"
            )
    metrics = {str(name): float(value) for name, value in numbers.items()}
    return EpisodeReward(reward=None if reward is None else float(reward), metrics=metrics)


async def _run_command(command: Sequence[str], task: AgentTask) -> Any:
    """Run a program; return what its last line says.

    Raises:
        AgentError: It has failed.
        EnvironmentResultError: Its last line is no JSON.
    """
    addresses = {
        "OPENAI_BASE_URL": task.base_url,
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
        start_new_session=True,
        preexec_fn=die_with_parent,  # it calls one function of the kernel, and takes no lock
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        with suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(json.dumps(asdict(task)).encode())
            await process.stdin.drain()
            process.stdin.close()
        printed, errors, code = await asyncio.gather(_tail(process.stdout), _tail(process.stderr), process.wait())
    finally:
        # With all that it has started.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.shield(process.wait())
    if code:
        raise AgentError(f"the program {command[0]} has ended with exit code {code}: {errors.strip()[-500:]}")
    lines = printed.strip().splitlines()
    if not lines:
        return None
    try:
        return json.loads(lines[-1])
    except ValueError:
        raise EnvironmentResultError(
            f"the program {command[0]} has printed {lines[-1]!r:.80} as its last line; it must be a number, or an object of numbers, as JSON"
        ) from None


async def _tail(stream: asyncio.StreamReader) -> str:
    """Return the last part of what comes from a pipe."""
    kept = b""
    while chunk := await stream.read(_OUTPUT_BYTES):
        kept = (kept + chunk)[-_OUTPUT_BYTES:]
    return kept.decode(errors="replace")
