"""The environment `gateway`: any agent whose requests to the policy are the turns of its episode.

the run's prompt -> agent -> HTTP request -> observation -> the policy's turn -> HTTP response -> agent -> ... -> reward
"""

import asyncio
import math
import os
from collections.abc import Sequence
from functools import cache

from ...engine.errors import ConfigError
from ...environments.environment import (
    Done,
    Environment,
    EnvironmentResultError,
    EpisodeLostError,
    EpisodeRow,
    Observation,
    Turn,
)
from ...rewards.registry import Locations
from ..openai.settings import KEY_VARIABLE, ServeSettings, is_loopback
from .agent_runner import Agent, AgentRun, AgentTask
from .agent_server import AgentServer, AgentServers, EpisodeReward, EpisodeSession

AGENTS = Locations(
    kind="agent", setting="environment.settings.agent", attribute="function", group="drivetrain.agents", named={}
)
END_S = 10.0
"""The number of seconds to wait for an agent whose episode has ended."""


# One set of servers for each event loop: a server runs in the loop that has started it.
@cache
def _servers(loop: asyncio.AbstractEventLoop) -> AgentServers:
    return AgentServers()


def _agent_of(location: str) -> Agent:
    if not isinstance(location, str) or ":" not in location:
        raise ConfigError(f"environment.settings.agent={location!r:.80}; it must be module:function")
    agent = AGENTS.load(location)
    if not callable(agent):
        raise ConfigError(f"the agent {location} is a {type(agent).__name__}, which cannot be called")
    return agent  # type: ignore[no-any-return]


class GatewayEnvironment(Environment):
    """An agent that talks to the policy over HTTP. Exactly one of `agent`, `command` and `port` selects it.

    Args:
        agent: A function `module:function`, plain or a coroutine. It is called with an `AgentTask` and returns the reward: a number, None
            to leave it to the rewards, or a mapping with `reward` and numbers that are averaged.
        command: The words of a program. It finds the policy in OPENAI_BASE_URL and ANTHROPIC_BASE_URL and reads the task as JSON from
            standard input. Its last line of output is the reward as JSON; it may also print nothing.
        port: A port at which remote agents take sessions with `POST /sessions`.
        host: The address to listen on. Any but the loopback address needs `api_key`.
        api_key: The key for sessions; with `port` also DRIVETRAIN_API_KEY, which is not stored with the settings.
        allowed_hosts: Additional host names that agents may use.
        model: The name of the policy in requests.
        silence_s: With `port`: the number of seconds without a request of an agent after which its prompt goes to another agent.

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
                f"environment.settings has {which} of agent, command and port; set exactly one, to select the agent"
            )
        for name, value in (("command", command), ("allowed_hosts", allowed_hosts)):
            # A text is a sequence of its characters, and would otherwise pass as a list of words.
            if value is not None and (isinstance(value, str) or not all(isinstance(word, str) for word in value)):
                raise ConfigError(f"environment.settings.{name}={value!r:.80}; it must be a list of words")
        if command is not None and not command:
            raise ConfigError("environment.settings.command=[]; it must be a list of words")
        if port is not None and (isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 2**16):
            raise ConfigError(f"environment.settings.port={port!r:.40}; it must be from 1 to 65535, or 0 for a free one")
        if isinstance(silence_s, bool) or not isinstance(silence_s, int | float) or not 0 < silence_s < math.inf:
            raise ConfigError(f"environment.settings.silence_s={silence_s!r:.40}; it must be a number above 0, and finite")
        for name, text in (("host", host), ("model", model), ("api_key", api_key)):
            if text is not None and (not isinstance(text, str) or not text):
                raise ConfigError(f"environment.settings.{name}={text!r:.40}; it must be a string")
        # Without `port` there are no sessions to take, so no key is needed.
        key = api_key or (os.environ.get(KEY_VARIABLE) if port is not None else None)
        if not is_loopback(host) and not key:
            raise ConfigError(
                f"environment.settings.host={host} can be reached from other machines; set the environment variable {KEY_VARIABLE} (or "
                "environment.settings.api_key, which is stored with the settings), or leave the host out"
            )
        self._agent: Agent | Sequence[str] | None = _agent_of(agent) if agent is not None else command
        self._gives, self._silence_s = port is not None, silence_s
        self._settings = ServeSettings(
            name=model,
            host=host,
            port=port or 0,
            api_keys=() if key is None else (key,),
            allowed_hosts=tuple(allowed_hosts),
        )
        self._server: AgentServer | None = None
        self._session: EpisodeSession | None = None
        self._run: AgentRun | None = None

    @property
    def processes(self) -> int | None:
        """One with `port`, since only one process can listen on it."""
        return 1 if self._gives else None

    @property
    def independent(self) -> bool:
        """False with `port`: there may be fewer agents than episodes."""
        return not self._gives

    async def reset(self, row: EpisodeRow) -> Observation:
        """Start the agent; return its first request."""
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
            assert self._agent is not None
            self._run = AgentRun(self._agent, task)
            # An agent may end without another request; its result then ends the episode.
            self._run.when_done(self._ended)
        first = await self._next()
        if isinstance(first, Done):
            raise EnvironmentResultError("the agent ended without a request to the policy")
        return first

    async def step(self, turn: Turn) -> Observation | Done:
        """Answer the agent's request with the policy's turn; return the next request, or the end."""
        assert self._session is not None
        self._session.answer(turn)
        return await self._next()

    async def _next(self) -> Observation | Done:
        assert self._session is not None
        try:
            result = await self._session.next(silence_s=self._silence_s if self._gives else None)
        except asyncio.CancelledError:
            # Either the agent has returned its session, which cancels `finished`, or the episode itself was cancelled.
            if not self._session.finished.cancelled():
                raise
            raise EpisodeLostError("the agent has returned its session") from None
        if result is None:
            raise EpisodeLostError(f"the agent made no request for environment.settings.silence_s={self._silence_s:g}")
        if isinstance(result, Observation):
            return result
        return Done(reward=result.reward, metrics=result.metrics, unread=self._session.take_unread())

    async def close(self) -> bool:
        """End the session, and the agent if possible; return whether the agent keeps running."""
        if self._server is not None and self._session is not None:
            # First the session, so that an agent which waits for a completion gets an error and can end.
            self._server.close_session(self._session)
        return self._run is not None and await self._run.end(END_S)

    def _ended(self, running: "asyncio.Future[EpisodeReward]") -> None:
        session = self._session
        if running.cancelled():
            return
        error = running.exception()
        # The result of an agent after the end of its episode is ignored.
        if session is None or session.is_closed or session.finished.done():
            return
        if error is None:
            session.finished.set_result(running.result())
        else:
            session.finished.set_exception(error)
