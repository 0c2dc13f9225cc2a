"""Agents for tests, which know nothing of the policy but its address."""

import asyncio
import json
import sys
import time
from typing import Any

import anthropic
import openai

from drivetrain.serve.gateway.agent_runner import AgentTask


def question_of(task: AgentTask) -> list[Any]:
    """The prompt of a row as messages."""
    if isinstance(task.prompt, str):
        return [{"role": "user", "content": task.prompt}]
    return [dict(message) for message in task.prompt]


def client_of(task: AgentTask) -> Any:
    """OpenAI's client."""
    return openai.OpenAI(base_url=task.base_url, api_key="none", max_retries=0, timeout=60.0)


def counts(task: AgentTask) -> dict[str, float]:
    """What `helpers.environments.CountingEnvironment` does: tells how many digits there were, twice."""
    messages = question_of(task)
    digits = characters = 0
    with client_of(task) as client:
        for turn in range(3):
            text = client.chat.completions.create(model=task.model, messages=messages).choices[0].message.content
            count = sum(character.isdigit() for character in text)
            digits += count
            characters += len(text)
            if turn < 2:
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": str(count)}]
    return {"reward": digits / max(1, characters), "digits": digits}


async def branches(task: AgentTask) -> float:
    """Goes on twice from its first answer, with a conversation of its own in between, and asks a question to which nobody waits for the answer."""
    question = question_of(task)
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key="none", max_retries=0, timeout=60.0) as client:

        async def ask(messages: list[Any], **more: Any) -> str:
            answer = await client.chat.completions.create(model=task.model, messages=messages, **more)
            return answer.choices[0].message.content or ""

        first = await ask(question)
        texts = [first]
        for number in (1, 2):
            texts.append(
                await ask([*question, {"role": "assistant", "content": first}, {"role": "user", "content": str(number)}])
            )
            if number == 1:
                texts.append(await ask([{"role": "user", "content": "1+1="}], max_tokens=2))
        stream = await client.chat.completions.create(model=task.model, messages=question, stream=True)
        await stream.close()
        # Two at the same time.
        texts += await asyncio.gather(*(ask([{"role": "user", "content": f"{number}+1="}]) for number in (2, 3)))
    characters = "".join(texts)
    return sum(character.isdigit() for character in characters) / max(1, len(characters))


def troubled(task: AgentTask) -> Any:
    """Fails in a way of its own for each remainder of the seed."""
    trouble = task.seed % 4
    if trouble == 0:
        return 1.0
    client_of(task).chat.completions.create(model=task.model, messages=question_of(task))
    if trouble == 1:
        raise KeyError("lost")
    return float("nan") if trouble == 2 else 0.5


async def never_ends(task: AgentTask) -> float:
    """Waits for ever after its first answer."""
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key="none", max_retries=0) as client:
        await client.chat.completions.create(model=task.model, messages=question_of(task))
        await asyncio.sleep(10**6)
    return 0.0


def program() -> None:
    """A program: two turns by Anthropic's client, which finds the policy in the environment."""
    task = json.load(sys.stdin)
    client = anthropic.Anthropic(max_retries=0, timeout=60.0)
    prompt = task["prompt"]
    messages: list[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    for number in range(2):
        message = client.messages.create(model="policy", max_tokens=4, messages=messages)
        texts = [block.text for block in message.content if block.type == "text"]
        messages += [{"role": "assistant", "content": "".join(texts)}, {"role": "user", "content": str(number)}]
    print("a line of its own")
    print(json.dumps({"reward": 0.5, "turns_of_program": 2}))


def elsewhere(address: str, key: str, stop: Any) -> list[str]:
    """An agent that is given sessions until it is to stop; returns the prompts that it had, of which it gives the first back."""
    import httpx

    prompts = []
    with httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=60.0) as http:
        while not stop.is_set():
            try:
                given = http.post(f"{address}/sessions")
            except httpx.TransportError:
                time.sleep(0.05)
                continue
            if given.status_code == 503:
                time.sleep(0.01)
                continue
            assert given.status_code == 200, given.text
            session = given.json()
            prompts.append(str(session["prompt"]))
            reward = {"Authorization": f"Bearer {session['reward_key']}"}
            client = openai.OpenAI(base_url=session["base_url"], api_key="none", max_retries=0, timeout=60.0)
            prompt = session["prompt"]
            messages: list[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            client.completions.create(model="policy", prompt=[6, 7]) if len(prompts) == 2 else client.chat.completions.create(
                model="policy", messages=messages
            )
            where = f"{address}/sessions/{session['session']}"
            if len(prompts) == 1:
                assert http.delete(where, headers=reward).status_code == 200
                continue
            assert http.post(f"{where}/reward", json={"reward": 1.0}).status_code == 401
            assert http.post(f"{where}/reward", json={"reward": 0.25}, headers=reward).status_code == 200
            assert http.post(f"{where}/reward", json={"reward": 1.0}, headers=reward).status_code in (404, 410)
    return prompts


if __name__ == "__main__":
    program()
