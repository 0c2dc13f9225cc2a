"""The gateway as agents use it: a process of its own, and the client of OpenAI's interface."""

import asyncio
import random
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import smolagents
from transformers import AutoTokenizer

from helpers.gateway_process import begin, check_log_probs, post_reward, write_policy
from helpers.server import Server

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy") / "tiny")


@pytest.fixture(scope="module")
def gateway(policy: Path) -> Iterator[Server]:
    arguments = ["--turn-tokens", "1000", "--max-turns", "24", "--api-key", "admin", "--name", "policy"]
    server = Server(policy, *arguments, "--temperature", "0.8", command="gateway").wait()
    yield server
    server.process.terminate()
    server.process.wait()


def agent(session: dict[str, str], **more: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=session["base_url"], api_key="none", max_retries=0, timeout=60.0, **more)


def ask(client: Any, messages: list[Any], **more: Any) -> Any:
    return client.chat.completions.create(model="policy", messages=messages, **{"max_tokens": 24, **more})


def test_an_agent_in_turns_and_every_token_is_the_policys_own(gateway: Server, policy: Path) -> None:
    session = begin(gateway)
    client = agent(session)
    assert [model.id for model in client.models.list()] == ["policy"]
    messages: list[Any] = [{"role": "user", "content": "What is 6*7?"}]
    texts, written = [], 0
    for turn in range(3):
        if turn == 1:
            parts = list(ask(client, messages, stream=True, stream_options={"include_usage": True}))
            text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
            assert parts[-1].usage is not None
            written += parts[-1].usage.completion_tokens
            message: Any = {"role": "assistant", "content": text}
        else:
            answer = ask(client, messages, tools=[] if turn else openai.NOT_GIVEN)
            written += answer.usage.completion_tokens
            message = answer.choices[0].message
            text = message.content
            assert answer.choices[0].finish_reason in ("stop", "length")
        texts.append(text)
        messages += [message, {"role": "user", "content": f"and {turn}?"}]
    # The agent tries its second question again, with n answers.
    answer = ask(client, messages[:3], n=2, max_tokens=5)
    assert len(answer.choices) == 2
    written += answer.usage.completion_tokens
    ended = post_reward(gateway, session, 0.5).json()
    assert (ended["end"], ended["reward"]) == ("rewarded", 0.5)
    documents = ended["trajectories"]
    assert len(documents) == 3
    assert check_log_probs(policy, documents, 0.8) == written
    words = AutoTokenizer.from_pretrained(policy)
    first = documents[0]
    segments = groupby(zip(first["response"], first["sampled"], strict=True), key=lambda pair: pair[1])
    turns = [[token for token, _ in segment] for sampled, segment in segments if sampled]
    assert [words.decode(turn, skip_special_tokens=True) for turn in turns] == texts


def test_what_is_refused(gateway: Server) -> None:
    session = begin(gateway)
    client = agent(session)
    question: list[Any] = [{"role": "user", "content": "q"}]
    for more, status, message in (
        ({"temperature": 0.1}, 400, "all completions are sampled at 0.8"),
        ({"top_p": 0.5}, 400, "top_p=0.5"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"tools": TOOLS, "tool_choice": "required"}, 400, "tool_choice"),
        ({"tools": [{"type": "function"}]}, 400, "tools.0 needs a function"),
        ({"extra_body": {"chat_template": "x"}}, 400, "chat_template"),
    ):
        with pytest.raises(openai.APIStatusError, match=message) as caught:
            ask(client, question, **more)
        assert caught.value.status_code == status
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client.chat.completions.create(model="other", messages=question)
    with pytest.raises(openai.BadRequestError, match=r"messages.0 needs a role"):
        ask(client, [{"role": "robot", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="leaves no room"):
        ask(client, [{"role": "user", "content": "x" * 5000}])
    with pytest.raises(openai.NotFoundError, match="no open session"):
        ask(agent({"base_url": f"{gateway.root}/sessions/guess/v1"}), question)
    with pytest.raises(openai.NotFoundError, match="no open session"):
        ask(agent({"base_url": f"{gateway.root}/v1"}), question)
    assert httpx.post(f"{gateway.root}/sessions").status_code == 401
    assert httpx.post(f"{gateway.root}/sessions", headers={"Host": "evil.example"}).status_code == 400
    for key in ("x", "admin", session["session"]):
        assert post_reward(gateway, session, 1.0, key).status_code == 401
    for reward in (float("nan"), float("inf"), "much", None):
        assert post_reward(gateway, session, reward).status_code in (400, 422)
    assert httpx.get(f"{gateway.root}/sessions/{session['session']}/trajectories").status_code == 401
    # Nothing of this has ended it, and a reward does so once.
    assert post_reward(gateway, session, -1.0).json()["trajectories"] == []
    assert post_reward(gateway, session, 1.0).status_code == 404
    with pytest.raises(openai.NotFoundError):
        ask(client, question)


def test_a_session_by_its_key_and_its_limits(gateway: Server) -> None:
    session = begin(gateway)
    client = openai.OpenAI(base_url=f"{gateway.root}/v1", api_key=session["session"], max_retries=0, timeout=60.0)
    for _ in range(24):
        ask(client, [{"role": "user", "content": "q"}], max_tokens=1, tools=TOOLS)
    with pytest.raises(openai.APIStatusError, match="24 of 24 completions"):
        ask(client, [{"role": "user", "content": "q"}])
    headers = {"Authorization": f"Bearer {session['reward_key']}"}
    address = f"{gateway.root}/sessions/{session['session']}"
    assert len(httpx.get(f"{address}/trajectories", headers=headers).json()["trajectories"]) == 24
    assert httpx.delete(address, headers=headers).json()["end"] == "closed"
    assert httpx.delete(address, headers=headers).status_code == 404


def test_a_stream_that_breaks_off_is_no_answer(gateway: Server) -> None:
    session = begin(gateway)
    question: list[Any] = [{"role": "user", "content": "q"}]
    with agent(session) as client:
        stream = ask(client, question, stream=True, max_tokens=1000, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
    address = f"{gateway.root}/sessions/{session['session']}/trajectories"
    headers = {"Authorization": f"Bearer {session['reward_key']}"}
    ask(agent(session), question, max_tokens=5, extra_body={"ignore_eos": True})
    (document,) = httpx.get(address, headers=headers).json()["trajectories"]
    assert len(document["response"]) == 5


async def one_agent(gateway: Server, http: httpx.AsyncClient, number: int, numbers: random.Random) -> dict[str, Any]:
    """An agent that goes away now and then, and begins again where it was."""
    answer = await http.post(f"{gateway.root}/sessions", headers={"Authorization": "Bearer admin"})
    session = answer.json()
    client = openai.AsyncOpenAI(base_url=session["base_url"], api_key="none", max_retries=0, timeout=120.0)
    messages: list[Any] = [{"role": "user", "content": f"agent {number:03d}"}]
    answers = 0
    while answers < 2:
        stream = await client.chat.completions.create(model="policy", messages=messages, stream=True, max_tokens=8)
        breaks, text, ended = numbers.random() < 0.4, "", False
        async for part in stream:
            text += part.choices[0].delta.content or ""
            ended |= part.choices[0].finish_reason is not None
            if breaks and not ended:
                await stream.close()
                break
        if ended:
            answers += 1
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"still {number:03d}"}]
    posted = await http.post(
        f"{gateway.root}/sessions/{session['session']}/reward",
        headers={"Authorization": f"Bearer {session['reward_key']}"},
        json={"reward": float(number)},
    )
    ended_session: dict[str, Any] = posted.json()
    return ended_session


@pytest.mark.slow
def test_many_sessions_at_once_with_clients_that_go_away(gateway: Server, policy: Path) -> None:
    """Every session ends once, none is lost, none doubled, and nothing of one is seen in another."""
    before = httpx.get(f"{gateway.root}/health").json()

    async def run() -> list[dict[str, Any]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=180, limits=limits) as http:
            numbers = random.Random(0)
            return list(
                await asyncio.gather(*(one_agent(gateway, http, i, random.Random(numbers.random())) for i in range(64)))
            )

    ended = asyncio.run(run())
    words = AutoTokenizer.from_pretrained(policy)
    assert len({one["session"] for one in ended}) == 64
    for number, one in enumerate(ended):
        assert one["reward"] == number
        # Streams that broke off may have come to their end before anybody saw it.
        assert one["trajectories"]
        for document in one["trajectories"]:
            text = words.decode([*document["prompt"], *document["response"]])
            assert f"agent {number:03d}" in text
            assert not any(f"agent {other:03d}" in text for other in range(64) if other != number)
        assert max(sum(document["sampled"]) for document in one["trajectories"]) >= 2
    check_log_probs(policy, [document for one in ended[:8] for document in one["trajectories"]], 0.8)
    after = httpx.get(f"{gateway.root}/health").json()
    assert after["opened"] - before["opened"] == 64
    assert after["ended"]["rewarded"] - before["ended"].get("rewarded", 0) == 64
    assert after["open"] == before["open"]


def test_all_interfaces_in_one_session(gateway: Server, policy: Path) -> None:
    session = begin(gateway)
    client = openai.OpenAI(base_url=session["base_url"], api_key="none", max_retries=0, timeout=60.0)
    other = anthropic.Anthropic(base_url=session["anthropic_base_url"], api_key="none", max_retries=0, timeout=60.0)
    question: Any = {"role": "user", "content": "What is 6*7?"}
    first = client.chat.completions.create(model="policy", messages=[question], max_tokens=12)
    written = first.usage.completion_tokens if first.usage else 0
    texts = [first.choices[0].message.content or ""]
    history: Any = [question, {"role": "assistant", "content": texts[0]}, {"role": "user", "content": "and?"}]
    # The same conversation goes on in the other interfaces, behind the policy's own tokens.
    response = client.responses.create(model="policy", input=history, max_output_tokens=12)
    texts.append(response.output_text)
    written += response.usage.output_tokens if response.usage else 0
    history += [{"role": "assistant", "content": texts[1]}, {"role": "user", "content": "and now?"}]
    with other.messages.stream(model="policy", max_tokens=12, messages=history) as stream:
        texts.append("".join(stream.text_stream))
        written += stream.get_final_message().usage.output_tokens
    # A text with a template of the client's own, which goes on from what it was given.
    prompt = "<user>hello<e>\n<assistant>"
    text = client.completions.create(model="policy", prompt=prompt, max_tokens=12, stop=["e"])
    again = client.completions.create(model="policy", prompt=f"{prompt}{text.choices[0].text}<e>\n<user>", max_tokens=12)
    for one in (text, again):
        written += one.usage.completion_tokens if one.usage else 0
    ended = post_reward(gateway, session, 1.0).json()
    documents = ended["trajectories"]
    # An answer that stops at once has no text by which it could be found again.
    assert len(documents) == (2 if text.choices[0].text else 3)
    assert check_log_probs(policy, documents, 0.8) == written
    words = AutoTokenizer.from_pretrained(policy)
    assert turns_of(words, documents[0]) == texts
    assert turns_of(words, documents[1])[0].startswith(text.choices[0].text)
    assert documents[1]["prompt"] == words(prompt)["input_ids"]


def turns_of(words: Any, document: dict[str, Any]) -> list[str]:
    turns: list[list[int]] = []
    before = False
    for token, sampled in zip(document["response"], document["sampled"], strict=True):
        if sampled and not before:
            turns.append([])
        if sampled:
            turns[-1].append(token)
        before = sampled
    return [words.decode(turn, skip_special_tokens=True) for turn in turns]


@pytest.mark.slow
def test_an_agent_framework_by_its_base_url_alone(gateway: Server, policy: Path) -> None:
    """`smolagents` renders its own prompts, stops at strings of its own, and tells the policy what was wrong with each of its answers."""
    session = begin(gateway)
    model = smolagents.OpenAIServerModel(model_id="policy", api_base=session["base_url"], api_key="none", max_tokens=16)
    prompts = {
        "system_prompt": "Act.",
        "planning": {"initial_plan": "", "update_plan_pre_messages": "", "update_plan_post_messages": ""},
        "managed_agent": {"task": "", "report": ""},
        "final_answer": {"pre_messages": "What is it?", "post_messages": "Say it."},
    }
    agent = smolagents.CodeAgent(tools=[], model=model, max_steps=3, prompt_templates=prompts, verbosity_level=0)
    agent.run("What is 6*7?")
    ended = post_reward(gateway, session, 0.0).json()
    sampled = [sum(document["sampled"]) for document in ended["trajectories"]]
    assert min(sampled) > 0
    assert check_log_probs(policy, ended["trajectories"], 0.8) == sum(sampled)
    # It puts the end of a block of code behind each answer that has none, which is an edited history: a document for each of three steps and the end.
    assert len(ended["trajectories"]) == 4
