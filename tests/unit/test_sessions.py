"""Sessions of a gateway: the policy's own tokens are kept, whatever an agent does with its history."""

import asyncio
import json
import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.exceptions import HTTPException
from starlette.requests import Request

from drivetrain.engine.errors import ConfigError, DataError
from drivetrain.environments.tools import ToolCall
from drivetrain.generation.result import Generation
from drivetrain.generation.trajectories import trajectories_of
from drivetrain.serve.gateway.app import Gateway, GatewaySettings
from drivetrain.serve.gateway.conversations import Answer, ChatPath
from drivetrain.serve.gateway.formats.base import SessionEndedError, SessionsFullError, SessionUnknownError
from drivetrain.serve.gateway.messages import ChatTurn, read_answer, read_messages
from drivetrain.serve.gateway.session import Session, SessionLimits, Sessions
from drivetrain.serve.openai.schema import CompletionRequest
from drivetrain.serve.openai.settings import ServeSettings
from drivetrain.trainers.data.continuation import Continuation
from drivetrain.trainers.data.turn_ends import TurnEnds
from helpers.templates import CHATML, tokenizer

TOKENIZER: Any = tokenizer(CHATML)
END = TOKENIZER.convert_tokens_to_ids("<e>")
CONTINUATION = Continuation(TOKENIZER, TurnEnds(("<e>",), ()), {})
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": [2]}'}}


def tokenize(path: Any, first: int, last: int | None) -> list[int]:
    messages = [message.for_template() for message in path.messages[first:]]
    return CONTINUATION.first_tokens(messages) if last is None else CONTINUATION.tokens(messages, last)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def new_session(**limits: Any) -> Session:
    return Session("key", "reward", SessionLimits(**limits))


def answer(session: Session, messages: list[dict[str, Any]], text: str, version: int = 0) -> tuple[list[int], list[int]]:
    """Let the policy answer; return what it has read and written. It writes its tokens one character at a time, as no tokenizer would."""
    place = session.place(ChatPath.of(read_messages(messages)), tokenize)
    tokens = [token for character in text for token in TOKENIZER(character, add_special_tokens=False)["input_ids"]] + [END]
    turn = Generation(
        prompt=place.prompt,
        response=tokens,
        log_probs=[-float(token) for token in tokens],
        versions=[version] * len(tokens),
        finish_reason="stop",
    )
    session.add(place, Answer(index=0, turn=read_answer(text, tools=[{}], new_id=lambda: "x"), text=text), turn)
    return place.prompt, tokens


def test_equal_turns_are_the_policys_own_tokens() -> None:
    session = new_session()
    first, one = answer(session, [user(":4" * 5)], ":4:4")
    # The tokenizer would merge what the policy has written token by token.
    assert one != [*TOKENIZER(":4:4", add_special_tokens=False)["input_ids"], END]
    second, two = answer(session, [user(":4" * 5), assistant(":4:4"), user("more")], "yes")
    assert second[: len(first) + len(one)] == [*first, *one]
    assert TOKENIZER.decode(second[len(first) + len(one) :]) == "\n<s>user\nmore<e>\n<s>assistant\n"
    (document,) = session.trajectories()
    assert document.prompt == first
    assert [*document.prompt, *document.response] == [*second, *two]
    assert document.sampled is not None
    own = [token for token, sampled in zip(document.response, document.sampled, strict=True) if sampled]
    assert own == [*one, *two]
    assert [log_prob for log_prob, s in zip(document.log_probs, document.sampled, strict=True) if s] == [
        -float(t) for t in own
    ]


@pytest.mark.parametrize(
    ("returned", "sent"),
    [
        ("yes", {"role": "assistant", "content": "yes", "refusal": None, "audio": None, "annotations": []}),
        ("yes", {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}),
        ("", {"role": "assistant", "content": None}),
        (
            '<tool_call>{"name": "f", "arguments": {"a": [2], "b": 1}}</tool_call>',
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
        ),
        (
            'So <tool_call>{"name": "f", "arguments": {}}</tool_call>',
            {
                "role": "assistant",
                "content": "So",
                "tool_calls": [{**CALL, "id": "other", "function": {"name": "f", "arguments": " { } "}}],
            },
        ),
    ],
)
def test_a_message_is_the_same_in_other_words(returned: str, sent: dict[str, Any]) -> None:
    session = new_session()
    first, one = answer(session, [user("q")], returned)
    follow = {"role": "tool", "tool_call_id": "a", "content": "42"} if "tool_calls" in sent else user("42")
    second, _ = answer(session, [user("q"), sent, follow], "end")
    assert second[: len(first) + len(one)] == [*first, *one]
    assert len(session.trajectories()) == 1


@pytest.mark.parametrize(
    "changed",
    [
        [user("q"), assistant("no"), user("more")],
        [user("Q"), assistant("yes"), user("more")],
        [{"role": "system", "content": "s"}, user("q"), assistant("yes"), user("more")],
        [user("q"), {**assistant("yes"), "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "a", "content": "1"}],
        [user("q"), user("more")],
    ],
)
def test_an_edited_history_is_a_branch(changed: list[dict[str, Any]]) -> None:
    session = new_session()
    _, one = answer(session, [user("q")], "yes")
    read, two = answer(session, changed, "end")
    assert TOKENIZER.decode(read) == TOKENIZER.apply_chat_template(
        [message.for_template() for message in read_messages(changed)], tokenize=False, add_generation_prompt=True
    )
    documents = session.trajectories()
    assert [one.sampled and sum(one.sampled) for one in documents] == [len(one), len(two)]
    assert documents[1].prompt == read


def test_a_branch_begins_at_the_last_equal_answer_and_its_beginning_is_learned_once() -> None:
    session = new_session()
    start = [user("a"), assistant("1"), user("b")]
    _, one = answer(session, [user("a")], "1")
    _, two = answer(session, start, "2")
    _, three = answer(session, [*start, assistant("2"), user("c")], "3")
    # The agent tries another answer to b, and goes on from there.
    _, four = answer(session, start, "4")
    _, five = answer(session, [*start, assistant("4"), user("c")], "5")
    first, second = session.trajectories()
    assert first.sampled is not None
    assert second.sampled is not None
    assert [t for t, s in zip(first.response, first.sampled, strict=True) if s] == [*one, *two, *three]
    assert [t for t, s in zip(second.response, second.sampled, strict=True) if s] == [*four, *five]
    common = len(first.prompt) + len(one)
    assert [*first.prompt, *first.response][:common] == [*second.prompt, *second.response][:common]
    # Nothing that is not learned there has a version or a log-probability.
    assert {v for v, s in zip(second.versions, second.sampled, strict=True) if not s} == {-1}
    assert {p for p, s in zip(second.log_probs, second.sampled, strict=True) if not s} == {0.0}


def test_of_two_equal_answers_the_later_one_counts() -> None:
    session = new_session()
    answer(session, [user("a")], "1", version=3)
    _, other = answer(session, [user("a")], "1", version=4)
    read, _ = answer(session, [user("a"), assistant("1"), user("b")], "2")
    assert session.turns()[2].parent is session.turns()[1]
    assert [{*turn.versions} for turn in session.turns()] == [{3}, {4}, {0}]
    assert read[-len(other) :] != other
    assert len(session.trajectories()) == 2


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 9999))
def test_every_answer_is_learned_once_behind_what_it_has_read(seed: int) -> None:
    """Of an agent that goes on, goes back, edits and asks the same twice."""
    numbers, session = random.Random(seed), new_session()
    histories: list[list[dict[str, Any]]] = [[]]
    written = []
    for _ in range(numbers.randint(1, 9)):
        history = list(numbers.choice(histories))
        if history and numbers.random() < 0.2:
            history[numbers.randrange(len(history))] = user(numbers.choice(["edited", "q1"]))
        history.append(user(numbers.choice(["q1", "q2", ":4:4"])))
        text = numbers.choice(["yes", ":4:4", "no end "])
        read, tokens = answer(session, history, text)
        histories.append([*history, assistant(text)])
        written.append((read, tokens))
    documents = [[*one.prompt, *one.response] for one in session.trajectories()]
    learned = []
    for document, one in zip(documents, session.trajectories(), strict=True):
        assert one.sampled is not None
        at = len(one.prompt)
        while at < len(document):
            if not one.sampled[at - len(one.prompt)]:
                at += 1
                continue
            end = document.index(END, at) + 1
            learned.append((document[:at], document[at:end]))
            at = end
    assert sorted(learned) == sorted(written)


def test_what_a_template_cannot_continue_is_a_document_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    def refuses(path: Any, first: int, last: int | None) -> list[int]:
        if last is not None:
            raise DataError("it depends on the answer")
        return tokenize(path, first, last)

    session = new_session()
    answer(session, [user("a")], "1")
    place = session.place(ChatPath.of(read_messages([user("a"), assistant("1"), user("b")])), refuses)
    assert place.parent is None
    assert "it depends on the answer" in caplog.text
    with pytest.raises(DataError):
        session.place(ChatPath.of(read_messages([user("a")])), lambda *_: refuses(ChatPath.of([]), 0, 1))


def test_other_tools_are_another_conversation() -> None:
    messages = read_messages([user("a")])
    tool = {"type": "function", "function": {"name": "f"}}
    assert ChatPath.of(messages, [tool]).digests[-1] != ChatPath.of(messages).digests[-1]
    assert ChatPath.of(messages, [dict(reversed(tool.items()))]).digests == ChatPath.of(messages, [tool]).digests


def test_limits_of_a_session() -> None:
    session = new_session(turns=2, tokens=5)
    answer(session, [user("a")], "12")
    session.running = 1
    with pytest.raises(SessionEndedError, match="1 of 2 completions"):
        session.place(ChatPath.of(read_messages([user("b")])), tokenize)
    session.running = 0
    assert session.room() == 2
    answer(session, [user("b")], "3456")
    with pytest.raises(SessionEndedError, match="2 of 2 completions"):
        answer(session, [user("c")], "1")
    with pytest.raises(SessionEndedError, match="the 5 tokens of the session"):
        answer(full := new_session(turns=9, tokens=5), [user("a")], "123456789") and answer(full, [user("b")], "1")
    late = new_session(seconds=0.01)
    time.sleep(0.02)
    with pytest.raises(SessionEndedError, match=r"older than its limit of 0\.01 s"):
        answer(late, [user("a")], "1")
    with pytest.raises(ConfigError, match="turns=0"):
        SessionLimits(turns=0)


def test_a_reward_is_posted_once_also_by_many_at_once() -> None:
    ended: list[Session] = []
    sessions = Sessions(SessionLimits(), ended=ended.append)
    session, reward_key = sessions.open()
    assert session.holds(reward_key)
    assert not session.holds("")
    assert not session.holds(reward_key[:-1])
    results: list[str] = []

    def post() -> None:
        try:
            sessions.finish(session.key, "rewarded", 1.0)
            results.append("posted")
        except (SessionUnknownError, SessionEndedError):
            results.append("refused")

    threads = [threading.Thread(target=post) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["posted", *["refused"] * 15]
    assert ended == [session]
    assert (session.end, session.reward) == ("rewarded", 1.0)
    assert (sessions.counts.opened, sessions.counts.ended, sessions.open_count) == (1, {"rewarded": 1}, 0)
    with pytest.raises(SessionEndedError, match="has ended"):
        answer(session, [user("a")], "1")


def test_sessions_are_random_numbers_and_not_more_than_there_may_be() -> None:
    sessions = Sessions(SessionLimits(seconds=0.05), most=2)
    keys = {key for _ in range(2) for session, reward_key in [sessions.open()] for key in (session.key, reward_key)}
    assert len(keys) == 4
    assert {len(key) for key in keys} == {22}
    with pytest.raises(SessionsFullError, match="2 sessions are open"):
        sessions.open()
    time.sleep(0.06)
    # Those that are too old make room.
    sessions.open()
    assert sessions.counts.ended == {"expired": 2}
    with pytest.raises(SessionUnknownError):
        sessions.find("guess")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one"),
        ([user("a"), assistant("b")], "the last message is from the assistant"),
        ([{"role": "robot", "content": "x"}], r"messages.0 needs a role"),
        (["x"], r"messages.0 needs a role"),
        ([{"role": "tool", "content": "x"}], "no tool_call_id"),
        ([user("a"), {"role": "user", "content": 3}], r"messages.1 has a content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "parts of the type text"),
        ([{**assistant(""), "tool_calls": [{"id": "a"}]}, user("x")], "without a function"),
    ],
)
def test_malformed_messages_are_refused(messages: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_messages(messages)


def test_calls_are_read_where_there_are_tools() -> None:
    text = 'I ask.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    turn = read_answer(text, tools=[{}], new_id=lambda: "x")
    assert (turn.content, turn.calls) == ("I ask.", (("x", ToolCall(name="f", arguments={"a": 1})),))
    assert read_answer(text, tools=[], new_id=lambda: "x").content == text
    broken = "<tool_call>{oh</tool_call>"
    assert read_answer(broken, tools=[{}], new_id=lambda: "x") == ChatTurn(role="assistant", content=broken)
    # Arguments that are no JSON are still the same when they come back.
    odd = {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{oh"}}]}
    assert (
        read_messages([odd, user("x")])[0].canonical()
        == read_messages([json.loads(json.dumps(odd)), user("x")])[0].canonical()
    )


def test_no_answers_make_no_documents() -> None:
    assert trajectories_of([]) == []
    session = new_session()
    place = session.place(ChatPath.of(read_messages([user("a")])), tokenize)
    empty = Answer(index=0, turn=read_answer("", tools=[], new_id=lambda: "x"), text="")
    session.add(place, empty, Generation(prompt=place.prompt, response=[], log_probs=[]))
    assert session.trajectories() == []


def test_keys_of_a_gateway_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare_digest(a: bytes, b: bytes) -> bool:
        compared.append(a)
        return a == b

    monkeypatch.setattr("hmac.compare_digest", compare_digest)
    model: Any = SimpleNamespace(texts=None)
    nothing: Any = None
    gateway = Gateway(GatewaySettings(service=ServeSettings(name="m", api_keys=("k", "l"))), model, nothing, nothing)

    def session(key: str) -> dict[str, str]:
        headers = [(b"authorization", f"Bearer {key}".encode("latin-1")), (b"host", b"localhost")]
        return asyncio.run(gateway.open(Request({"type": "http", "scheme": "http", "path": "/", "headers": headers})))

    assert session("l")["base_url"].startswith("http://localhost/sessions/")
    for key in ("", "K", "kl", "\xfc"):
        with pytest.raises(HTTPException, match="401: the key is missing or wrong"):
            session(key)
    assert set(compared) == {b"l", b"", b"K", b"kl", "\xfc".encode()}


def test_an_empty_list_is_no_prompt() -> None:
    assert CompletionRequest(prompt=[]).prompts() == []
    assert CompletionRequest(prompt=[1, 2]).prompts() == [[1, 2]]
    assert CompletionRequest(prompt=[[1], [2]]).prompts() == [[1], [2]]


def test_images_may_be_switched_off() -> None:
    assert ServeSettings(name="m", max_images=0).max_images == 0
    wrong: list[dict[str, Any]] = [{"max_images": -1}, {"max_samples": 0}, {"max_body_mib": 0.0}]
    for limits in wrong:
        with pytest.raises(ConfigError, match=f"{next(iter(limits))}="):
            ServeSettings(name="m", **limits)
