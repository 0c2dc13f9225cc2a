"""The gateway as clients of all its interfaces use it, in one session, and an agent that nobody here has written."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from transformers import AutoTokenizer

from helpers.gateway_process import begin, check_log_probs, post_reward, write_policy
from helpers.server import Server


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy") / "tiny")


@pytest.fixture(scope="module")
def gateway(policy: Path) -> Iterator[Server]:
    server = Server(policy, "--api-key", "admin", "--name", "policy", "--turn-tokens", "24", command="gateway").wait()
    yield server
    server.process.terminate()
    server.process.wait()


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
    assert len(documents) == 2
    assert check_log_probs(policy, documents, 1.0) == written
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


def test_an_agent_framework_by_its_base_url_alone(gateway: Server, policy: Path) -> None:
    """`smolagents` renders its own prompts, stops at strings of its own, and tells the policy what was wrong with each of its answers."""
    smolagents = pytest.importorskip("smolagents")
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
    assert check_log_probs(policy, ended["trajectories"], 1.0) == sum(sampled)
    # It puts the end of a block of code behind each answer that has none, which is an edited history: a document for each of three steps and the end.
    assert len(ended["trajectories"]) == 4
