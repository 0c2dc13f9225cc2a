"""The interfaces of the gateway, as the real clients of OpenAI and Anthropic read them, in front of a policy that answers from a script."""

import json
from typing import Any

import anthropic
import httpx
import openai
import pytest

from drivetrain.engine.errors import ConfigError
from drivetrain.serve.gateway.conversations import Answer, ChatPath, History, TextPrompt, TokenPrompt
from drivetrain.serve.gateway.formats.anthropic import read_anthropic
from drivetrain.serve.gateway.formats.responses import read_items
from drivetrain.serve.gateway.messages import ChatTurn, read_answer, read_messages
from helpers.gateway import ScriptedPolicy, Served, scripted

CALL = 'I ask.\n<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": [1]}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "array"}, "b": {"type": "integer"}}}


def openai_of(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.root}/sessions/key/v1", api_key="none", max_retries=0, timeout=20.0)


def anthropic_of(served: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=f"{served.root}/sessions/key", api_key="none", max_retries=0, timeout=20.0)


def path_of(policy: ScriptedPolicy, number: int) -> ChatPath:
    conversation = policy.of_agent.asked[number].conversation
    assert isinstance(conversation, ChatPath)
    return conversation


def is_continued(policy: ScriptedPolicy, first: int, second: int, turn: ChatTurn) -> bool:
    """Return whether the second conversation begins with the first one and its answer."""
    history: History[str] = History()
    before, after = path_of(policy, first), path_of(policy, second)
    history.add(before, Answer(index=0, turn=turn, text=""), "answer")
    return history.find(after) == (len(before.messages) + 1, "answer")


CALLED = ChatTurn(role="assistant", content="I ask.", calls=tuple(read_messages([
    {"role": "assistant", "content": "", "tool_calls": [{"id": "x", "function": {"name": "add", "arguments": '{"a":[1],"b":2}'}}]},
    {"role": "user", "content": ""},
])[0].calls))  # fmt: skip


@pytest.mark.parametrize("streams", [False, True])
def test_responses_with_calls_go_on_by_items_and_by_their_id(streams: bool) -> None:
    policy = ScriptedPolicy([CALL, "three", "again"])
    tools: Any = [{"type": "function", "name": "add", "description": "adds", "parameters": SCHEMA}]
    with scripted(policy) as served:
        client = openai_of(served)

        def ask(**more: Any) -> Any:
            if not streams:
                return client.responses.create(model="policy", **more)
            with client.responses.stream(model="policy", **more) as stream:
                events = list(stream)
                final = stream.get_final_response()
            numbers = [event.sequence_number for event in events]
            assert numbers == list(range(len(numbers)))
            parts = [event.delta for event in events if event.type == "response.output_text.delta"]
            assert "".join(parts) == final.output_text
            return final

        first = ask(input="What is 1+2?", instructions="Be brief.", tools=tools)
        message, call = first.output
        assert (first.status, message.content[0].text) == ("completed", "I ask.")
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": [1], "b": 2})
        assert (first.usage.input_tokens, first.usage.output_tokens) == (7, len(CALL))
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        question: Any = {"role": "user", "content": [{"type": "input_text", "text": "What is 1+2?"}]}
        returned: Any = [item.model_dump(exclude_none=True) for item in first.output]
        ask(input=[question, *returned, result], instructions="Be brief.", tools=tools)
        ask(input=[result], previous_response_id=first.id, instructions="Be brief.", tools=tools)
        with pytest.raises(openai.BadRequestError, match="is not a response of this session"):
            client.responses.create(input="x", previous_response_id="resp_x")
    path = path_of(policy, 0)
    assert [(turn.role, turn.content) for turn in path.messages] == [("system", "Be brief."), ("user", "What is 1+2?")]
    # The tools are those of the chat interface, so that the template writes the same.
    assert path.tools == ({"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}},)
    assert is_continued(policy, 0, 1, CALLED)
    assert path_of(policy, 2).messages == path_of(policy, 1).messages
    assert path_of(policy, 1).messages[-1].name == "add"


@pytest.mark.parametrize("streams", [False, True])
def test_anthropics_messages_with_calls(streams: bool) -> None:
    policy = ScriptedPolicy([CALL, "three"])
    tools: Any = [{"name": "add", "description": "adds", "input_schema": SCHEMA}]
    with scripted(policy) as served:
        client = anthropic_of(served)

        def ask(**more: Any) -> Any:
            if not streams:
                return client.messages.create(model="policy", max_tokens=9, **more)
            with client.messages.stream(model="policy", max_tokens=9, **more) as stream:
                text = "".join(stream.text_stream)
                final = stream.get_final_message()
            assert text == "".join(block.text for block in final.content if block.type == "text")
            return final

        question: Any = {"role": "user", "content": "What is 1+2?"}
        first = ask(messages=[question], system="Be brief.", tools=tools)
        text, call = first.content
        assert (first.stop_reason, text.text, call.name, call.input) == ("tool_use", "I ask.", "add", {"a": [1], "b": 2})
        assert (first.usage.input_tokens, first.usage.output_tokens) == (7, len(CALL))
        results: Any = [
            {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "3"}]},
            {"type": "text", "text": "Go on."},
        ]
        returned: Any = [block.model_dump(exclude_none=True) for block in first.content]
        history: Any = [question, {"role": "assistant", "content": returned}, {"role": "user", "content": results}]
        second = ask(messages=history, system=[{"type": "text", "text": "Be brief."}], tools=tools)
        assert (second.stop_reason, second.content[0].text) == ("end_turn", "three")
        assert client.messages.count_tokens(model="policy", messages=[question]).input_tokens == len("What is 1+2?")
    assert is_continued(policy, 0, 1, CALLED)
    assert [(turn.role, turn.content) for turn in path_of(policy, 1).messages[-2:]] == [("tool", "3"), ("user", "Go on.")]
    assert path_of(policy, 1).tools[0]["function"]["parameters"] == SCHEMA


def test_the_interfaces_make_one_conversation_of_the_same_messages() -> None:
    call: Any = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    chat: Any = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ]
    items: Any = [
        {"role": "user", "content": "q"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x":1}'},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]
    blocks: Any = [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "a"}, {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}]},
    ]
    paths = [read_messages(chat), read_items(items), read_anthropic(blocks)]
    assert ChatPath.of(paths[0]) == ChatPath.of(paths[1]) == ChatPath.of(paths[2])
    assert ChatPath.of(paths[0][:2]).digests != ChatPath.of(paths[0][:1]).digests


def test_limits_and_stop_strings_have_their_names() -> None:
    policy = ScriptedPolicy(["cut"] * 8)
    policy.is_cut = True
    with scripted(policy) as served:
        client, other = openai_of(served), anthropic_of(served)
        question: Any = [{"role": "user", "content": "q"}]
        response = client.responses.create(model="policy", input="q", max_output_tokens=3)
        assert (response.status, response.incomplete_details and response.incomplete_details.reason) == (
            "incomplete",
            "max_output_tokens",
        )
        assert other.messages.create(model="policy", max_tokens=3, messages=question).stop_reason == "max_tokens"
        assert client.chat.completions.create(model="policy", messages=question).choices[0].finish_reason == "length"
        assert client.completions.create(model="policy", prompt="q").choices[0].finish_reason == "length"
        policy.is_cut, policy.stop = False, "END"
        message = other.messages.create(model="policy", max_tokens=3, messages=question, stop_sequences=["END"])
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    assert policy.of_agent.asked[-1].sampling.stops == ["END"]
    assert [asked.max_tokens for asked in policy.of_agent.asked[:2]] == [3, 3]


def test_texts_and_tokens_are_continued() -> None:
    policy = ScriptedPolicy(["one", "two", "three", "four"])
    with scripted(policy) as served:
        client = openai_of(served)
        answer = client.completions.create(model="policy", prompt="Count:", n=2)
        assert [choice.text for choice in answer.choices] == ["one", "two"]
        parts = list(client.completions.create(model="policy", prompt=[1, 2], stream=True))
        assert "".join(part.choices[0].text for part in parts) == "three"
        for prompt in ("", ["a", "b"], []):
            with pytest.raises(openai.BadRequestError, match="give one prompt that is not empty"):
                client.completions.create(model="policy", prompt=prompt)
    asked = [request.conversation for request in policy.of_agent.asked]
    assert asked == [TextPrompt(text="Count:"), TokenPrompt(ids=(1, 2))]


def test_what_texts_and_tokens_go_on_from() -> None:
    history: History[str] = History()

    def answer(text: str, whole: str = "", tokens: tuple[int, ...] = ()) -> Answer:
        turn = ChatTurn(role="assistant", content=text)
        return Answer(index=0, turn=turn, text=text, whole_text=whole or text, tokens=tokens)

    history.add(TextPrompt(text="ab"), answer("c", "cSTOP"), "first")
    history.add(TextPrompt(text="ab"), answer("c", "cSTOP"), "second")
    history.add(TextPrompt(text="abcd"), answer("e"), "third")
    history.add(TokenPrompt(ids=(1, 2)), answer("", tokens=(3,)), "fourth")
    assert history.find(TextPrompt(text="abc!")) == (3, "second")
    assert history.find(TextPrompt(text="abcSTOP!")) == (7, "second")
    assert history.find(TextPrompt(text="abcdef")) == (5, "third")
    assert history.find(TextPrompt(text="abd")) == (0, None)
    assert history.find(TokenPrompt(ids=(1, 2, 3, 4))) == (3, "fourth")
    assert history.find(TokenPrompt(ids=(1, 2, 4))) == (0, None)


def test_what_is_refused_is_refused_in_the_words_of_the_interface() -> None:
    policy = ScriptedPolicy([])
    question: Any = [{"role": "user", "content": "q"}]
    with scripted(policy) as served:
        other = anthropic_of(served)
        cases: list[tuple[dict[str, Any], type[anthropic.APIStatusError], str]] = [
            ({"extra_body": {"temperature": 0.5}}, anthropic.BadRequestError, "all completions are sampled at 1"),
            ({"model": "claude"}, anthropic.NotFoundError, "'claude' is not served here"),
            ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "the policy must choose itself"),
            ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, anthropic.BadRequestError, "thinking"),
            ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, anthropic.BadRequestError, "only client tools"),
            ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, anthropic.BadRequestError, "'image'"),
            (
                {"messages": [*question, {"role": "assistant", "content": "x"}]},
                anthropic.BadRequestError,
                "the last message is from the assistant",
            ),
        ]
        for more, error, message in cases:
            with pytest.raises(error, match=message) as caught:
                other.messages.create(**{"model": "policy", "max_tokens": 5, "messages": question, **more})
            body: Any = caught.value.body
            assert body["type"] == "error"
            assert message in body["error"]["message"]
        client: Any = openai_of(served)
        for more, message in (
            ({"text": {"format": {"type": "json_object"}}}, "text.format"),
            ({"text": {"format": "json"}}, "text.format"),
            ({"tools": [{"type": "function", "name": "f", "parameters": "x"}]}, "tools.0 has parameters"),
            ({"tools": [{"type": "function", "name": "f", "parameters": {"properties": {"a": 5}}}]}, "tools.0 has parameters"),
            ({"tools": [{"type": "web_search"}]}, "only functions are supported"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference'"),
            ({"input": [{"type": "function_call_output", "output": "x"}]}, "no call_id"),
            ({"background": True}, "background"),
            ({"input": []}, "no messages"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                client.responses.create(**{"model": "policy", "input": "q", **more})
        with pytest.raises(openai.BadRequestError, match="logprobs"):
            client.chat.completions.create(model="policy", messages=question, logprobs=True)
        for path in ("chat/completions", "responses", "messages", "completions", "messages/count_tokens"):
            for content in (b"", b"[]", b"{", b'{"messages": 1}', b'{"input": [1]}', b'"\\ud800"'):
                answer = httpx.post(
                    f"{served.root}/sessions/key/v1/{path}", content=content, headers={"content-type": "application/json"}
                )
                assert answer.status_code == 400, (path, content)
                assert answer.json()["error"]["message"]
        with pytest.raises(anthropic.NotFoundError, match="no open session"):
            anthropic.Anthropic(base_url=served.root, api_key="other", max_retries=0).messages.create(
                model="policy", max_tokens=5, messages=question
            )
        # By the header of its clients.
        by_key = anthropic.Anthropic(base_url=served.root, api_key="key", max_retries=0)
        assert by_key.messages.create(model="policy", max_tokens=5, messages=question).content
    assert len(policy.of_agent.asked) == 1


def test_calls_that_no_json_can_hold_are_texts() -> None:
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    for arguments in ('{"a": NaN}', '{"a": -Infinity}', '{"a": "\\ud83d"}'):
        text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
        turn = read_answer(text, tools=tools, new_id=lambda: "x")
        assert (turn.calls, turn.content) == ((), text)
    calls = "".join('<tool_call>{"name": "f", "arguments": {}}</tool_call>' for _ in range(20))
    assert len(read_answer(calls, tools=tools, new_id=lambda: "x").calls) == 20


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "", "tool_calls": 5},
        {"role": "assistant", "content": "", "tool_calls": True},
        {"role": "user", "content": "x", "tool_call_id": ["a"]},
    ],
)
def test_calls_that_are_no_calls(message: Any) -> None:
    with pytest.raises(ConfigError, match=r"messages\.0 has tool_call"):
        read_messages([message, {"role": "user", "content": "x"}])


def test_malformed_messages() -> None:
    wrong: Any = [{"role": "user", "content": 5}]
    for read in (read_messages, read_items, read_anthropic):
        with pytest.raises(ConfigError, match=r"\.0 has a content that is neither"):
            read(wrong)
    for read in (read_messages, read_anthropic):
        with pytest.raises(ConfigError, match="no messages"):
            read([])
