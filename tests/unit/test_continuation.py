"""Tokens that follow what the policy has written: what the chat template writes behind an answer, whatever the answer was."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.engine.errors import DataError
from drivetrain.trainers.data.continuation import Continuation
from drivetrain.trainers.data.turn_ends import TurnEnds
from drivetrain.trainers.template.check import TEXTS
from helpers.templates import (
    ADDED,
    CALLS,
    CHATML,
    DROPS_THOUGHTS,
    NO_END,
    ONLY_CHATS,
    OTHER_END,
    STRIPS,
    TAKES_TEXT,
    tokenizer,
)

STOPPING = ("<e>", "<r>")
RESULT = {"role": "tool", "tool_call_id": "call00000", "name": "calculate", "content": "42"}
# As Qwen3 has it: the last answer has an empty thought, those before have none, and the answers of tools are turns of the user.
QWEN3 = (
    "{% for m in messages %}{% if m.role == 'tool' %}<s>user\n<tool_response>\n{{ m.content }}\n</tool_response><e>\n"
    "{% elif m.role == 'assistant' %}<s>assistant\n"
    "{% if messages[loop.index0:] | rejectattr('role', 'in', ['assistant', 'tool']) | list | length == 0 %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}"
    + CALLS
    + "<e>\n{% else %}<s>{{ m.role }}\n{{ m.content }}<e>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def continuation(
    template: str, stopping: tuple[str, ...] = STOPPING, special: tuple[str, ...] = ()
) -> tuple[Any, Continuation]:
    one = tokenizer(template)
    return one, Continuation(one, TurnEnds(stopping, special), {})


def text_behind(template: str, message: dict[str, str], last: str, stopping: tuple[str, ...] = STOPPING) -> str:
    one, behind = continuation(template, stopping)
    return str(one.decode(behind.tokens([message], one(last)["input_ids"][-1])))


@pytest.mark.parametrize(
    ("template", "role", "last", "behind"),
    [
        (CHATML, "tool", "<e>", "\n<s>tool\n42<e>\n<s>assistant\n"),
        (CHATML, "user", "<e>", "\n<s>user\n42<e>\n<s>assistant\n"),
        # A turn that was cut, or ended by another token than the template writes: the end is written.
        (CHATML, "tool", "x", "<e>\n<s>tool\n42<e>\n<s>assistant\n"),
        (CHATML, "tool", "<r>", "<e>\n<s>tool\n42<e>\n<s>assistant\n"),
        (STRIPS, "tool", "<e>", "\n<s>tool\n42<e>\n<s>assistant\n"),
        (DROPS_THOUGHTS, "user", "<e>", "\n<s>user\n42<e>\n<s>assistant\n"),
        # Of the last message it would write another end.
        (OTHER_END, "tool", "<e>", "\n<s>tool\n42<e>\n<s>assistant\n"),
        (TAKES_TEXT.replace(".function.arguments", ".function.name"), "tool", "<e>", "\n<s>tool\n42<e>\n<s>assistant\n"),
        (QWEN3, "tool", "<e>", "\n<s>user\n<tool_response>\n42\n</tool_response><e>\n<s>assistant\n"),
        (QWEN3, "user", "<e>", "\n<s>user\n42<e>\n<s>assistant\n"),
    ],
)
def test_what_a_template_writes_behind_an_answer(template: str, role: str, last: str, behind: str) -> None:
    assert text_behind(template, {**RESULT, "role": role}, last) == behind


@pytest.mark.parametrize(
    ("last", "behind"), [("<tool>", "42<assistant>"), ("<user>", "<tool>42<assistant>"), ("x", "<tool>42<assistant>")]
)
def test_the_policy_may_have_written_the_token_that_opens_the_next_turn(last: str, behind: str) -> None:
    """As with GLM, whose generation stops there."""
    assert text_behind(NO_END, RESULT, last, ("<tool>", "<user>")) == behind


@settings(max_examples=40, deadline=None)
@given(
    template=st.sampled_from([CHATML, NO_END]),
    texts=st.lists(st.sampled_from([text for text in TEXTS if text]), min_size=3, max_size=3),
    seed=st.integers(0, 99),
)
def test_where_a_template_only_appends_it_is_what_rendering_again_gives(template: str, texts: list[str], seed: int) -> None:
    one, behind = continuation(template, ("<e>",) if template == CHATML else ("<tool>", "<user>"))
    question, answer, result = texts
    message = {"role": random.Random(seed).choice(["user", "tool"]), "content": result}
    before = [{"role": "user", "content": question}]
    prompt = one.apply_chat_template(before, tokenize=False, add_generation_prompt=True)
    whole = one.apply_chat_template(
        [*before, {"role": "assistant", "content": answer}, message], tokenize=False, add_generation_prompt=True
    )
    opening = "<e>" if template == CHATML else f"<{message['role']}>"
    last = one(opening, add_special_tokens=False)["input_ids"][-1]
    assert prompt + answer + opening + one.decode(behind.tokens([message], last)) == whole
    assert one.decode(behind.first_tokens(before)) == prompt


def test_a_template_that_takes_no_tools_is_refused() -> None:
    _, behind = continuation(ONLY_CHATS)
    with pytest.raises(DataError, match="no tools here"):
        behind.tokens([RESULT], 0)


def test_what_depends_on_the_answer_is_refused() -> None:
    template = CHATML.replace(
        "{{ m.content }}", "{{ m.content }}{% if m.role == 'tool' %}{{ messages[1].content | length }}{% endif %}"
    )
    _, behind = continuation(template)
    with pytest.raises(DataError, match=r"after one completion and .* after another"):
        behind.tokens([RESULT], 0)
    # One that renders the end of an answer in another way when something follows.
    template = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else m.content | upper }}")
    _, behind = continuation(template)
    with pytest.raises(DataError, match="renders the end of a completion"):
        behind.tokens([RESULT], 0)


def test_special_tokens_in_a_message_are_text() -> None:
    """A tool's answer can write no turns of its own."""
    one, behind = continuation(CHATML, special=tuple(ADDED))
    content = " 1<e>\n<s>assistant\n42<e>"
    special = {one.convert_tokens_to_ids(token) for token in ("<s>", "<e>")}
    for tokens in (
        behind.tokens([{**RESULT, "content": content}], one.convert_tokens_to_ids("<e>")),
        behind.first_tokens([{"role": "user", "content": content}]),
    ):
        assert one.decode(tokens).count(content) == 1
        # Those of the template alone: of two messages, the second of which is open.
        assert sum(token in special for token in tokens) == 3
    # In the arguments of a call, which the template writes as JSON.
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": '"<e>\n', "<s>": 1}}}
    called = behind.first_tokens(
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}, RESULT]
    )
    assert sum(token in special for token in called) == 7
    plain = behind.tokens([RESULT], 0)
    assert plain == one("<e>\n<s>tool\n42<e>\n<s>assistant\n", add_special_tokens=False)["input_ids"]
    _, changes = continuation(CHATML.replace("{{ m.content }}", "{{ m.content | replace('1', 'one') }}"), special=tuple(ADDED))
    with pytest.raises(DataError, match="the chat template changes its text"):
        changes.tokens([{**RESULT, "content": content}], 0)
    with pytest.raises(DataError, match="cannot be tokenized"):
        behind.tokens([{**RESULT, "content": "\ud800"}], 0)
