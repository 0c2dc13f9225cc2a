"""Rows to samples: what is learned of each form."""

from typing import Any

import pytest

from drivetrain.engine.errors import DataError
from drivetrain.trainers.config.data import DataConfig
from drivetrain.trainers.data.chat import encode_chat, read_chat
from drivetrain.trainers.data.dataset import Budget
from drivetrain.trainers.data.encode import encode_completion, encode_row, mark_supervised
from drivetrain.trainers.data.files import Chunk
from drivetrain.trainers.data.sample import Sample
from drivetrain.trainers.data.tokenize import Encoder
from drivetrain.trainers.tasks.addition import make_tokenizer, pairs, question

TOKENIZER = make_tokenizer()
BUDGET = Budget(tokens=100, setting="engine.micro_batch.max_tokens=100")
CHAT = [*question(3, 4), {"role": "assistant", "content": "7"}, *question(10, 5), {"role": "assistant", "content": "15"}]


def learned(sample: Sample, tokenizer: Any = TOKENIZER) -> str:
    return str(tokenizer.decode([i for i, s in zip(sample.ids, sample.supervised, strict=True) if s]))


def chat(messages: Any, tokenizer: Any = TOKENIZER, turns: Any = "auto", **row: Any) -> list[Sample]:
    return encode_chat(tokenizer, read_chat({"messages": messages, **row}, "row", {}), turns)


def with_template(template: str) -> Any:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


# ---- what is learned from --------------------------------------------------------------------------------------------


def test_only_the_assistants_turns_are_learned() -> None:
    (sample,) = chat(CHAT)
    assert TOKENIZER.decode(sample.ids) == "<user>3+4=<assistant>7<end><user>10+5=<assistant>15<end>"
    assert learned(sample) == "7<end>15<end>"


def test_a_turn_may_be_left_out() -> None:
    first = [*question(3, 4), {"role": "assistant", "content": "7", "train": False}, *CHAT[2:]]
    (sample,) = chat(first)
    assert TOKENIZER.decode(sample.ids) == "<user>3+4=<assistant>7<end><user>10+5=<assistant>15<end>"
    assert learned(sample) == "15<end>"
    with pytest.raises(DataError, match=r"row: every assistant message is excluded from learning \(train=false"):
        chat(first[:2])
    with pytest.raises(DataError, match="row: message 1 has train=true and the role 'user'"):
        chat([{**question(1, 2)[0], "train": True}, {"role": "assistant", "content": "3"}])


def test_a_prompt_is_not_learned_and_its_completion_ends() -> None:
    sample = encode_completion(TOKENIZER, "3+4=", "7", "row")
    assert TOKENIZER.decode(sample.ids) == "3+4=7<end>"
    assert learned(sample) == "7<end>"


def test_prompt_and_completion_may_be_chats() -> None:
    (sample,) = encode_row(TOKENIZER, {"prompt": CHAT[:3], "completion": CHAT[3:]}, "row", DataConfig())
    assert TOKENIZER.decode(sample.ids) == "<user>3+4=<assistant>7<end><user>10+5=<assistant>15<end>"
    assert learned(sample) == "15<end>"
    with pytest.raises(DataError, match="row: prompt is list; it must be text"):
        encode_row(TOKENIZER, {"prompt": CHAT[:3], "completion": "15"}, "row", DataConfig())


def test_all_of_a_text_is_learned() -> None:
    (sample,) = encode_row(TOKENIZER, {"text": "3+4=7"}, "row", DataConfig())
    assert learned(sample) == "3+4=7<end>"
    with pytest.raises(DataError, match="row: the text is empty"):
        encode_row(TOKENIZER, {"text": ""}, "row", DataConfig(format="text"))


def test_parts_of_text_are_joined_and_others_refused() -> None:
    (sample,) = chat([{"role": "user", "content": [{"type": "text", "text": "3+"}, {"type": "text", "text": "4="}]}, CHAT[1]])
    assert TOKENIZER.decode(sample.ids) == "<user>3+4=<assistant>7<end>"
    with pytest.raises(DataError, match="row: message 1 has a part of type image, but the model takes no media in"):
        chat([{"role": "user", "content": [{"type": "text", "text": "3"}, {"type": "image"}]}, CHAT[1]])


TOOLS = "{% for t in tools or [] %}{{ t['name'] }}{% endfor %}{% if sign %}{{ sign }}{% endif %}"


def test_tools_and_variables_reach_the_template() -> None:
    tokenizer = with_template(TOOLS + TOKENIZER.chat_template)
    messages = CHAT[:2]
    (sample,) = chat(messages, tokenizer, tools=[{"name": "5"}], chat_template_kwargs={"sign": "="})
    assert tokenizer.decode(sample.ids) == "5=<user>3+4=<assistant>7<end>"
    # As text, for a parquet column whose rows have no common type; the row's own variables go before the settings'.
    row = {"messages": messages, "tools": '[{"name": "6"}]', "chat_template_kwargs": '{"sign": "="}'}
    (sample,) = encode_row(tokenizer, row, "row", DataConfig(chat_template_kwargs={"sign": "+"}))
    assert tokenizer.decode(sample.ids) == "6=<user>3+4=<assistant>7<end>"
    (sample,) = encode_row(tokenizer, {"messages": messages}, "row", DataConfig(chat_template_kwargs={"sign": "+"}))
    assert tokenizer.decode(sample.ids) == "+<user>3+4=<assistant>7<end>"
    with pytest.raises(DataError, match="row: tools is a dict; it must be a list"):
        chat(messages, tokenizer, tools={"name": "5"})
    with pytest.raises(DataError, match="row: tools is not valid JSON"):
        chat(messages, tokenizer, tools="[{")


def test_a_message_that_only_calls_tools_needs_no_content() -> None:
    calls = (
        "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}"
        "{% for c in m.tool_calls or [] %}{{ c['name'] }}{% endfor %}"
        "{% if m['role'] == 'assistant' %}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (sample,) = chat(
        [*question(3, 4), {"role": "assistant", "content": None, "tool_calls": [{"name": "7"}]}], with_template(calls)
    )
    assert learned(sample) == "7<end>"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "messages is str"),
        ([], "messages is empty; it must be a list"),
        ([{"role": "user"}], "message 1 has no role or no content"),
        ([{"role": None, "content": "1"}], "message 1 has no role or no content"),
        ([{"role": "robot", "content": "1"}], "role 'robot'"),
        ([{"role": "user", "content": None}], "content of message 1 is null"),
        (question(1, 2), "no message has the role assistant"),
        ([*question(1, 2), {"role": "assistant", "content": "3", "train": "no"}], "train of message 2 is 'no'"),
    ],
)
def test_malformed_chats_are_refused_with_their_row(messages: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"^f\.jsonl:7: .*{message}|^f\.jsonl:7: {message}"):
        encode_row(TOKENIZER, {"messages": messages}, "f.jsonl:7", DataConfig())


# As Qwen3's does: an empty thought stands only in the last answer.
FORGETFUL = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}{% if m['role'] == 'assistant' and loop.last %}=={% endif %}"
    "{{ m['content'] }}{% if m['role'] == 'assistant' %}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_template_that_rewrites_the_past_makes_a_sample_of_each_answer() -> None:
    tokenizer = with_template(FORGETFUL)
    (one,) = chat(CHAT[:2], tokenizer)
    assert learned(one) == "==7<end>"
    first, second = chat(CHAT, tokenizer)
    assert tokenizer.decode(first.ids) == "<user>3+4=<assistant>==7<end>"
    assert tokenizer.decode(second.ids) == "<user>3+4=<assistant>7<end><user>10+5=<assistant>==15<end>"
    assert (learned(first), learned(second)) == ("==7<end>", "==15<end>")
    with pytest.raises(DataError, match="row: the chat template renders an earlier turn differently once others follow"):
        chat(CHAT, tokenizer, turns="single")
    assert [learned(s) for s in chat(CHAT, turns="per_turn")] == ["7<end>", "15<end>"]


def test_a_template_whose_prompt_is_no_part_of_the_answer_is_refused() -> None:
    tokenizer = with_template(FORGETFUL.replace("<assistant>{% endif %}", "<assistant>5{% endif %}"))
    with pytest.raises(
        DataError,
        match=r"row: the chat template begins the completion of message 2 with '.*<assistant>5' in the generation prompt",
    ):
        chat(CHAT, tokenizer)


@pytest.mark.parametrize("greeting", [False, True])
def test_a_chat_may_begin_with_the_assistant(greeting: bool) -> None:
    opening = [{"role": "assistant", "content": "1", "train": greeting}, *CHAT[:2]]
    (sample,) = chat(opening)
    assert TOKENIZER.decode(sample.ids) == "<assistant>1<end><user>3+4=<assistant>7<end>"
    assert learned(sample) == ("1<end>7<end>" if greeting else "7<end>")


def test_a_tokenizer_may_have_a_template_for_tools_alone() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": TOKENIZER.chat_template, "tool_use": TOOLS + TOKENIZER.chat_template}
    (plain,), (tools,) = chat(CHAT[:2], tokenizer), chat(CHAT[:2], tokenizer, tools=[{"name": "5"}])
    assert tokenizer.decode(plain.ids) == "<user>3+4=<assistant>7<end>"
    assert tokenizer.decode(tools.ids) == "5<user>3+4=<assistant>7<end>"


def bytes_tokenizer(template: str) -> Any:
    """Byte-level BPE that has merged ' 7' into a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {w: i for i, w in enumerate([*letters, "Ġ7", "<end>"])}
    made = Tokenizer(models.BPE(vocabulary, [("Ġ", "7")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    tokenizer.chat_template = template
    return tokenizer


def test_no_token_stands_across_the_border_of_prompt_and_answer() -> None:
    """When the model answers, its prompt ends there: the token before it is a space of its own."""
    tokenizer = bytes_tokenizer(
        "{% for m in messages %}{{ m.role[0] + ': ' + m.content }}{% if m.role == 'assistant' %}<end>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}a: {% endif %}"
    )
    (sample,) = chat([{"role": "user", "content": "3 7"}, {"role": "assistant", "content": "7"}], tokenizer)
    assert tokenizer.decode(sample.ids) == "u: 3 7a: 7<end>"
    assert learned(sample, tokenizer) == "7<end>"
    prompt = tokenizer("u: 3 7a: ", add_special_tokens=False)["input_ids"]
    assert list(sample.ids[: len(prompt)]) == prompt
    # Without the cut the answer's first token is the one with the space.
    assert tokenizer("u: 3 7a: 7<end>", add_special_tokens=False)["input_ids"] != list(sample.ids)


def test_rows_that_teach_nothing_or_are_broken_are_refused() -> None:
    with pytest.raises(DataError, match="row: the content of message 2 is empty; there is nothing to train on"):
        chat([CHAT[0], {"role": "assistant", "content": ""}])
    with pytest.raises(DataError, match="row: message 1 has a part of type text without any text"):
        chat([{"role": "user", "content": [{"type": "text", "text": None}]}, CHAT[1]])
    with pytest.raises(DataError, match="chat_template_kwargs has tokenize, which cannot be a template variable"):
        chat(CHAT, chat_template_kwargs={"tokenize": True})
    chunk = Chunk(
        "f.jsonl", [(1, b'{"prompt": "1", "completion": "2"}'), (2, b'{"prompt": "1", "completion": "2\\ud800"}')], 1.0
    )
    with pytest.raises(DataError, match=r"f.jsonl:2: '\\ud800' is an unpaired surrogate"):
        Encoder(TOKENIZER, DataConfig()).chunk(chunk)


# ---- other programs' conventions -------------------------------------------------------------------------------------


def told(row: dict[str, Any], tokenizer: Any = TOKENIZER, kind: Any = "completions") -> list[tuple[str, str]]:
    """Each sample's text, and what is learned of it."""
    samples = encode_row(tokenizer, row, "row", DataConfig(), kind)
    return [(str(tokenizer.decode(s.ids)), learned(s, tokenizer)) for s in samples]


def plain() -> Any:
    tokenizer = bytes_tokenizer("")
    tokenizer.chat_template = None
    return tokenizer


def names_roles() -> Any:
    return bytes_tokenizer(
        "{% for m in messages %}{{ m.role + ': ' + m.content }}{% if m.role == 'assistant' %}<end>{% endif %}{{ '|' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )


def test_alpaca_rows_are_read_with_their_input() -> None:
    row = {"instruction": "add", "input": "1 2", "output": "3"}
    template = names_roles()
    assert told(row, template) == [("user: add\n\n1 2|assistant: 3<end>|", "3<end>|")]
    assert told(row | {"input": ""}, template) == told({"instruction": "add", "output": "3"}, template)
    assert told(row | {"input": ""}, template)[0][0] == "user: add|assistant: 3<end>|"
    # The column text of tatsu-lab/alpaca is all of the row again.
    assert told(row | {"text": "add 1 2 3"}, template) == told(row, template)
    more = row | {"system": "be brief", "history": [["add 1 1", "2"]]}
    assert told(more, template) == [
        (
            "system: be brief|user: add 1 1|assistant: 2<end>|user: add\n\n1 2|assistant: 3<end>|",
            "2<end>|3<end>|",
        )
    ]
    # Without a chat template they are texts.
    assert told(row, plain()) == [("add\n\n1 2\n\n3<end>", "3<end>")]
    for column, value in (("system", "be brief"), ("history", [["a", "b"]])):
        with pytest.raises(DataError, match=f"row has {column}, which is part of a chat"):
            encode_row(plain(), row | {column: value}, "row", DataConfig())


def test_sharegpt_rows_are_read_with_their_roles() -> None:
    turns = [
        {"from": "human", "value": "1+1"},
        {"from": "gpt", "value": "2"},
        {"from": "human", "value": "1+2"},
        {"from": "gpt", "value": "3"},
    ]
    ours = [{"role": "user" if t["from"] == "human" else "assistant", "content": t["value"]} for t in turns]
    template = names_roles()
    assert told({"conversations": turns}, template) == told({"messages": ours}, template)
    assert told({"conversations": ours}, template) == told({"messages": ours}, template)
    assert told({"conversations": turns, "system": "s"}, template)[0][0].startswith("system: s|user: 1+1|")
    assert told({"conversations": [{"from": "system", "value": "s"}, *turns]}, template)[0][0].startswith("system: s|")
    # As parquet has them, and as others write the roles.
    nulls = [{**t, "from": t["from"].title(), "role": None, "content": None, "weight": None} for t in turns]
    assert told({"conversations": nulls}, template) == told({"messages": ours}, template)
    both = [{**t, "from": None, "value": None} for t in ours]
    assert told({"conversations": both}, template) == told({"messages": ours}, template)
    weighed = [*turns[:1], turns[1] | {"weight": 0}, *turns[2:]]
    assert told({"conversations": weighed}, template)[0][1] == "3<end>|"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"instruction": "a", "output": ""}, "row: output is empty"),
        ({"instruction": "", "input": "", "output": "b"}, "instruction and input are empty"),
        ({"instruction": "a", "input": 3, "output": "b"}, "input is int; it must be text"),
        ({"instruction": "a", "output": ["b"]}, "output is list; it must be text"),
        ({"instruction": "a", "output": "b", "history": "c"}, "history is a str"),
        ({"instruction": "a", "output": "b", "history": [["c"]]}, "turn 1 of history must be"),
        ({"conversations": []}, "conversations is empty"),
        ({"conversations": "a"}, "conversations is a str"),
        ({"conversations": [{"from": "alien", "value": "a"}]}, "conversations 1 has from='alien'"),
        ({"conversations": [{"from": ["human"], "value": "a"}]}, r"conversations 1 has from=\['human'\]"),
        ({"conversations": [{"from": "human", "text": "a"}]}, "it must have value and from"),
        ({"conversations": [{"from": "gpt", "value": "a", "weight": 0.5}]}, "weight of conversations 1 is 0.5"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "no message has the role assistant"),
        ({"conversations": [{"from": "system", "value": "a"}], "system": "b"}, "row has a column system and also begins"),
        ({"instruction": "a", "chosen": "b"}, "it needs .*, or instruction and output, or .*drivetrain dpo or rm"),
    ],
)
def test_rows_of_other_conventions_that_are_broken_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        encode_row(names_roles(), row, "row", DataConfig())


def want_prompt() -> list[dict[str, str]]:
    return [{"role": "user", "content": "add\n\n1 2"}]


def test_preferences_in_other_conventions_keep_their_prompt() -> None:
    template = names_roles()
    want = told(
        {"prompt": [{"role": "user", "content": "add\n\n1 2"}], "chosen": CHAT[1:2], "rejected": CHAT[3:]}, template, "pairs"
    )
    row = {"instruction": "add", "input": "1 2", "chosen": "7", "rejected": "15"}
    assert told(row, template, "pairs") == want
    conversation = [{"from": "human", "value": "add\n\n1 2"}]
    sides = {"chosen": {"from": "gpt", "value": "7"}, "rejected": {"from": "gpt", "value": "15"}}
    assert told({"conversations": conversation, **sides}, template, "pairs") == want
    assert told({"conversations": conversation, "chosen": "7", "rejected": "15"}, template, "pairs") == want
    inside = {side: [*conversation, turn] for side, turn in sides.items()}
    assert told(inside, template, "pairs") == want
    assert told({"prompt": want_prompt(), **sides}, template, "pairs") == want
    # An empty prompt is none.
    assert told({**row, "prompt": ""}, template, "pairs") == want
    ended = [*conversation, {"from": "gpt", "value": "7"}]
    with pytest.raises(DataError, match="row: conversations ends with an assistant turn"):
        encode_row(template, {"conversations": ended, **sides}, "row", DataConfig(), "pairs")
    assert told(row, plain(), "pairs")[0] == ("add\n\n1 2\n\n7<end>", "7<end>")


def test_what_is_learned_is_shown() -> None:
    (sample,) = chat(CHAT)
    assert mark_supervised(TOKENIZER, sample) == "<user>3+4=<assistant>«7<end>»<user>10+5=<assistant>«15<end>»"
    assert mark_supervised(TOKENIZER, sample, 20) == "<user>3+4= ... >«15<end>»"


MARKED = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}<end>{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)


def test_generation_marks_are_taken_at_their_word() -> None:
    tokenizer = with_template(MARKED)
    (sample,) = chat(CHAT, tokenizer)
    assert TOKENIZER.decode(sample.ids) == "<user>3+4=<assistant>7<end><user>10+5=<assistant>15<end>"
    assert learned(sample) == "715"
    (sample,) = chat([*CHAT[:1], {**CHAT[1], "train": False}, *CHAT[2:]], tokenizer)
    assert learned(sample) == "15"
    assert [learned(s) for s in chat(CHAT, tokenizer, turns="per_turn")] == ["7", "15"]
    # Marks of two answers that run together cannot be told apart.
    merged = with_template(
        MARKED.replace("{% endgeneration %}<end>", "<end>{% endgeneration %}").replace("'<' + m['role'] + '>'", "''")
    )
    twice = [*CHAT[:1], {**CHAT[1], "train": False}, CHAT[3]]
    with pytest.raises(DataError, match="marks 1 spans as generated for 2 completions"):
        chat(twice, merged)


def test_chats_without_a_template_are_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"row is a chat, but .* no chat template; set model.chat_template=FILE"):
        encode_row(tokenizer, {"messages": CHAT}, "row", DataConfig())


def test_held_out_operands_are_not_in_the_training_data() -> None:
    parts = pairs(0)
    train, deciding, test = ({frozenset(p) for p in part} for part in parts)
    assert [len(part) >= size for part, size in zip(parts, (8500, 250, 800), strict=True)] == [True] * 3
    assert sum(map(len, parts)) == 100 * 100
    assert not train & deciding | train & test | deciding & test


@pytest.mark.parametrize(
    ("supervised", "wanted"),
    [
        ([False, False, True, True, False, True], [3, 4]),
        ([True] * 6, [1, 2, 3, 4, 5, 6]),
        ([False] * 5 + [True], [6]),
        ([True, False, False, True, False, False], [1]),
    ],
)
def test_the_expected_answer_is_that_of_one_turn(supervised: list[bool], wanted: list[int]) -> None:
    from drivetrain.trainers.loop.samples import _first_completion

    assert _first_completion(Sample("a", [1, 2, 3, 4, 5, 6], supervised)) == wanted
