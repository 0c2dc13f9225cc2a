"""The gateway inside a run by itself: requests of an agent are observations, turns are answers, and each session ends once."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from drivetrain.engine.errors import ConfigError
from drivetrain.environments.environment import (
    Done,
    EnvironmentResultError,
    EpisodeLostError,
    EpisodeRow,
    Observation,
    Turn,
    check_first,
    check_next,
)
from drivetrain.serve.gateway.agent_environment import GatewayEnvironment
from drivetrain.serve.gateway.agent_runner import AgentError, AgentRun, AgentTask, reward_of
from drivetrain.serve.gateway.agent_server import EpisodeReward, EpisodeSession
from drivetrain.serve.gateway.conversations import TextPrompt
from drivetrain.serve.gateway.formats.base import AnswerRequest, SessionEndedError
from drivetrain.serve.openai.schema import Sampling
from helpers.server import until

ROW = EpisodeRow(prompt="q", seed=3, columns={"answer": "1"})


def turn(number: int, text: str = "a", **more: Any) -> Turn:
    return Turn(number=number, tokens=[5, 6], text=text, context_length=9, **more)


def client_of(task: AgentTask) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=task.base_url, api_key="none", max_retries=0, timeout=10.0)


async def ask(task: AgentTask, messages: list[Any], **more: Any) -> Any:
    async with client_of(task) as client:
        return await client.chat.completions.create(model=task.model, messages=messages, **more)


class OneAgent(GatewayEnvironment):
    """The environment of a function."""

    def __init__(self, agent: Callable[[AgentTask], Any], **settings: Any) -> None:
        super().__init__(agent="json:dumps", **settings)
        self._agent = agent


USER: Any = [{"role": "user", "content": "q"}]


def test_requests_are_observations_and_turns_are_answers() -> None:
    async def agent(task: AgentTask) -> Any:
        assert (task.prompt, task.seed, dict(task.columns)) == ("q", 3, {"answer": "1"})
        first = await ask(task, USER, stop="END", max_tokens=7, n=2)
        assert [choice.message.content for choice in first.choices] == ["one", "two"]
        assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (9, 4)
        history = [*USER, {"role": "assistant", "content": "two"}, {"role": "user", "content": "on"}]
        second = await ask(task, history)
        assert second.choices[0].finish_reason == "length"
        async with client_of(task) as client:
            await client.completions.create(model="policy", prompt="text")
            await client.completions.create(model="policy", prompt=[1, 2])
            await client.completions.create(model="policy", prompt=[1, 2, 5, 6, 3])
            await client.completions.create(model="policy", prompt=[1, 2, 5, 6])
        return {"reward": 2, "calls": 5}

    async def run() -> None:
        environment = OneAgent(agent)
        observation = check_first(await environment.reset(ROW))
        assert observation is not None
        assert (observation.messages, observation.after) == ([{"role": "user", "content": "q"}], -1)
        assert (observation.stop, observation.max_tokens) == (["END"], 7)
        again = check_next(await environment.step(turn(0, "one", stop="END")))
        assert (again.messages, again.after) == (observation.messages, -1)  # type: ignore[union-attr]
        third = check_next(await environment.step(turn(1, "two")))
        assert isinstance(third, Observation)
        assert (third.messages, third.after) == ([{"role": "user", "content": "on"}], 1)
        assert third.history == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "two"}]
        text = check_next(await environment.step(turn(2, finished=False)))
        tokens = check_next(await environment.step(turn(3)))
        more = check_next(await environment.step(turn(4)))
        same = check_next(await environment.step(turn(5)))
        kinds = [(one.text, one.tokens, one.after) for one in (text, tokens, more, same) if isinstance(one, Observation)]
        assert kinds == [("text", None, -1), (None, [1, 2], -1), (None, [3], 4), ("", None, 4)]
        assert check_next(await environment.step(turn(6))) == Done(reward=2.0, metrics={"calls": 5.0})
        await environment.close()

    asyncio.run(run())


def test_a_turn_that_nobody_reads_is_not_learned() -> None:
    async def agent(task: AgentTask) -> float:
        asking = asyncio.create_task(ask(task, USER))
        # It is being written by now.
        await asyncio.to_thread(seen.wait, 10)
        asking.cancel()
        await asyncio.wait({asking})
        gone.set()
        await ask(task, USER)
        return 1.0

    async def run() -> None:
        environment = OneAgent(agent)
        await environment.reset(ROW)
        seen.set()
        await asyncio.to_thread(gone.wait, 10)
        # The server has noticed that the connection was closed.
        await asyncio.sleep(0.1)
        second = await environment.step(turn(0))
        assert isinstance(second, Observation)
        assert (second.unread, second.after) == ((0,), -1)
        assert await environment.step(turn(1)) == Done(reward=1.0)
        await environment.close()

    seen, gone = threading.Event(), threading.Event()
    asyncio.run(run())


@pytest.mark.parametrize(
    ("ends", "error", "message"),
    [
        (ValueError("broken"), AgentError, "ValueError: broken"),
        (SystemExit(3), AgentError, "SystemExit: 3"),
        (StopIteration(), AgentError, "StopIteration"),
        (asyncio.CancelledError(), AgentError, "CancelledError"),
        (10**400, EnvironmentResultError, "reward=1000"),
        ("much", EnvironmentResultError, "reward='much'"),
        (float("inf"), EnvironmentResultError, "reward=inf"),
        ({"reward": 1, "x": None}, EnvironmentResultError, "x=None"),
    ],
)
@pytest.mark.parametrize("plain", [True, False])
def test_an_agent_that_fails(ends: Any, error: type[Exception], message: str, plain: bool) -> None:
    def agent(task: AgentTask) -> Any:
        client = openai.OpenAI(base_url=task.base_url, api_key="none", max_retries=0, timeout=10.0)
        client.chat.completions.create(model=task.model, messages=USER)
        if isinstance(ends, BaseException):
            raise ends
        return ends

    async def coroutine(task: AgentTask) -> Any:
        # It blocks its loop, which is not that of the server.
        try:
            return agent(task)
        except StopIteration:
            raise AgentError("StopIteration") from None

    async def run() -> None:
        environment = OneAgent(agent if plain else coroutine)
        await environment.reset(ROW)
        with pytest.raises(error, match=message):
            await environment.step(turn(0))
        await environment.close()

    asyncio.run(run())


def test_an_agent_that_asks_nothing_and_one_whose_episode_has_ended() -> None:
    errors: list[str] = []

    async def silent(task: AgentTask) -> float:
        return 1.0

    async def late(task: AgentTask) -> float:
        try:
            await ask(task, USER)
        except openai.APIStatusError as e:
            errors.append(str(e))
        return 1.0

    async def run() -> None:
        environment = OneAgent(silent)
        with pytest.raises(EnvironmentResultError, match="without a request"):
            await environment.reset(ROW)
        await environment.close()
        environment = OneAgent(late)
        await environment.reset(ROW)
        session = environment._session
        assert session is not None
        assert environment._server is not None
        environment._server.close_session(session)
        while not errors:
            await asyncio.sleep(0.01)
        await environment.close()

    asyncio.run(run())
    assert "the episode has ended" in errors[0]


def program(text: str) -> GatewayEnvironment:
    return GatewayEnvironment(command=["python", "-c", text])


ASKS = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
body = json.dumps({"messages": [{"role": "user", "content": task["prompt"]}]}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {"Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        ("print('noise' * 100000); print(len(answer) / 2)", Done(reward=2.0)),
        ("", Done()),
        ("print('no JSON')", EnvironmentResultError),
        ("sys.exit('it broke')", AgentError),
        ("os.kill(os.getpid(), 9)", AgentError),
        ("import subprocess; subprocess.Popen(['sleep', '1000']); print(1.0)", Done(reward=1.0)),
        ("import subprocess; subprocess.Popen(['setsid', 'sleep', '3']); print(1.0)", Done(reward=1.0)),
    ],
)
def test_programs(ending: str, expected: Any) -> None:
    async def run() -> None:
        environment = program(ASKS + ending)
        await environment.reset(ROW)
        if isinstance(expected, Done):
            assert await environment.step(turn(0, "four")) == expected
        else:
            with pytest.raises(expected):
                await environment.step(turn(0, "four"))
        await environment.close()

    asyncio.run(run())


def test_a_program_and_its_children_end_with_their_episode(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    starts = f"import subprocess; open({str(file)!r}, 'w').write(str(subprocess.Popen(['sleep', '1000']).pid)); answer = "

    async def run() -> None:
        environment = program(ASKS.replace("answer = ", starts))
        await environment.reset(ROW)
        child = int(file.read_text())
        os.kill(child, 0)
        assert await environment.close() is False
        until(lambda: not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2])

    asyncio.run(run())


def test_a_program_that_prints_much_before_it_reads_much() -> None:
    async def run() -> None:
        environment = program("print('x' * 2_000_000)\n" + ASKS + "print(0.5)")
        await environment.reset(EpisodeRow(prompt="q" * 300_000))
        assert await environment.step(turn(0)) == Done(reward=0.5)
        await environment.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_function_that_never_ends_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{GatewayEnvironment.__module__}.END_S", 0.1)
    ends = threading.Event()

    def agent(task: AgentTask) -> None:
        with suppress(openai.APIStatusError):
            openai.OpenAI(base_url=task.base_url, api_key="none").chat.completions.create(model="policy", messages=USER)
        ends.wait(60)

    class Callable:
        async def __call__(self, task: AgentTask) -> float:
            await ask(task, USER)
            return 1.0

    async def run() -> None:
        environment = OneAgent(agent)
        await environment.reset(ROW)
        assert await environment.close() is True
        ends.set()
        # The control: a callable object whose call is a coroutine, and which ends.
        environment = OneAgent(Callable())
        await environment.reset(ROW)
        assert await environment.step(turn(0)) == Done(reward=1.0)
        assert await environment.close() is False

    asyncio.run(run())


def test_an_agent_that_is_ended_before_it_begins_does_not_keep_running(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    async def coroutine(task: AgentTask) -> None:
        begun.append("coroutine")

    agents: list[Any] = [lambda task: begun.append("function"), coroutine, [sys.executable, "-c", "print('program')"]]
    task = AgentTask(base_url="", anthropic_base_url="", model="policy", prompt="q")

    async def run() -> None:
        for agent in agents:
            # Before the first turn of the event loop.
            assert await AgentRun(agent, task).end(60.0) is False
        # The only thread is busy, so that the second function waits for it.
        busy, ends = AgentRun(lambda task: ends_busy.wait(60), task), AgentRun(agents[0], task)
        await asyncio.sleep(0.05)
        assert await ends.end(60.0) is False
        # The control: one that has begun.
        assert await busy.end(0.05) is True
        ends_busy.set()
        assert await busy.end(60.0) is False

    ends_busy = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        monkeypatch.setattr(f"{AgentRun.__module__}._threads", lambda: threads)
        asyncio.run(asyncio.wait_for(run(), 20))
    assert not begun


def test_answers_to_a_request_that_was_given_up_are_not_learned() -> None:
    """Two that would have been sent together, of which the first was written; and the texts of empty answers are nothing to go on from."""

    async def agent(task: AgentTask) -> float:
        asking = asyncio.create_task(ask(task, USER, n=3))
        await asyncio.wait_for(asyncio.to_thread(first.wait), 10)
        asking.cancel()
        await asyncio.wait({asking})
        gone.set()
        async with client_of(task) as client:
            await client.completions.create(model="policy", prompt="A", n=2, stop=["", "x"])
        return 1.0

    async def run() -> None:
        environment = OneAgent(agent)
        await environment.reset(ROW)
        await environment.step(turn(0))
        first.set()
        await asyncio.to_thread(gone.wait, 10)
        await asyncio.sleep(0.1)
        text = await environment.step(turn(1))
        assert isinstance(text, Observation)
        assert (text.text, text.after, sorted(text.unread), text.stop) == ("A", -1, [0, 1], ["x"])
        again = await environment.step(turn(2, ""))
        assert isinstance(again, Observation)
        assert (again.text, again.after) == ("A", -1)
        assert await environment.step(turn(3)) == Done(reward=1.0)
        await environment.close()

    first, gone = threading.Event(), threading.Event()
    asyncio.run(run())


def test_agents_elsewhere() -> None:
    async def run() -> None:
        environment = GatewayEnvironment(port=0, api_key="admin", silence_s=0.3)
        assert (environment.processes, environment.independent) == (1, False)
        waiting = asyncio.create_task(environment.reset(ROW))
        while environment._server is None:
            await asyncio.sleep(0.01)
        root = environment._server.root
        async with httpx.AsyncClient(base_url=root, timeout=10.0) as http:
            assert (await http.post("/sessions")).status_code == 401
            given = await http.post("/sessions", headers={"Authorization": "Bearer admin"})
            assert (given.json()["prompt"], given.json()["seed"]) == ("q", 3)
            none = await http.post("/sessions", headers={"Authorization": "Bearer admin"})
            assert (none.status_code, none.headers["retry-after"]) == (503, "1")
            path = f"/sessions/{given.json()['session']}"
            asking = asyncio.create_task(http.post(f"{path}/v1/chat/completions", json={"messages": USER}))
            assert isinstance(await waiting, Observation)
            stepping = asyncio.create_task(environment.step(turn(0)))
            assert (await asking).status_code == 200
            # Nothing is heard of it any more.
            with pytest.raises(EpisodeLostError, match=r"silence_s=0\.3"):
                await asyncio.wait_for(stepping, 10)
            await environment.close()
            assert (await http.post(f"{path}/v1/chat/completions", json={"messages": USER})).status_code == 404

    asyncio.run(run())


def test_a_reward_is_given_once_and_nothing_is_asked_after_it() -> None:
    async def run() -> None:
        session = EpisodeSession(ROW)
        session.finish(EpisodeReward(reward=0.25))
        with pytest.raises(SessionEndedError, match="has already ended"):
            session.finish(EpisodeReward(reward=1.0))
        request: Any = None
        with pytest.raises(SessionEndedError, match="has ended"):
            session.ask(request, request)
        assert await session.next() == EpisodeReward(reward=0.25)

    asyncio.run(run())


@pytest.mark.parametrize("loop_turns", range(6))
def test_a_request_is_refused_whenever_its_episode_is_cancelled(loop_turns: int) -> None:
    """Also in the few turns of the event loop after the request was taken from the queue."""

    async def run() -> None:
        session = EpisodeSession(ROW)
        waiting = asyncio.create_task(session.next())
        await asyncio.sleep(0.01)
        form: Any = None
        (pending,) = session.ask(AnswerRequest(conversation=TextPrompt(text="a"), sampling=Sampling()), form)
        for _ in range(loop_turns):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        session.close()
        with pytest.raises(SessionEndedError, match="the episode has ended"):
            await asyncio.wait_for(pending.outcome, 5)

    asyncio.run(run())


def test_rewards_of_agents() -> None:
    assert reward_of(None).reward is None
    assert reward_of(True).reward == 1.0
    assert reward_of({"steps": 3}).metrics == {"steps": 3.0}
    with pytest.raises(EnvironmentResultError, match="reward=nan"):
        reward_of(float("nan"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "none of agent, command and port"),
        ({"agent": "json:dumps", "port": 8100}, "agent and port"),
        ({"agent": "helpers.agents:missing"}, "missing"),
        ({"command": []}, "must be a list of words"),
        ({"command": "python agent.py"}, "must be a list of words"),
        ({"port": 8100, "host": "0.0.0.0"}, "can be reached from other machines"),
        ({"port": 70000}, "port=70000; it must be from 1"),
        ({"port": "8100"}, "port='8100'"),
        ({"port": True}, "port=True"),
        ({"agent": "json:dumps", "model": 5}, "model=5"),
        ({"agent": "json:dumps", "allowed_hosts": "abc"}, "allowed_hosts='abc'"),
        ({"agent": "dumps"}, "must be module:function"),
        ({"agent": "json:__version__"}, "agent json:__version__"),
        ({"agent": "json:dumps", "silence_s": 0}, "silence_s=0"),
    ],
)
def test_settings_that_cannot_be_used(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GatewayEnvironment(**settings)
