"""Environments that are shipped, and what is checked of those of others."""

import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.engine.errors import ConfigError
from drivetrain.environments.calculator import CalculatorEnvironment, calculate
from drivetrain.environments.environment import (
    Done,
    EnvironmentResultError,
    EpisodeRow,
    Observation,
    Turn,
    check_first,
    check_next,
)
from drivetrain.environments.registry import ENVIRONMENTS, build_environment
from drivetrain.environments.search import CorpusIndex, SearchEnvironment
from drivetrain.environments.tools import CallFormatError, ToolCall, parse_calls


def turn(text: str, number: int = 0) -> Turn:
    return Turn(number=number, tokens=[1], text=text)


CALL = '{"name": "calculate", "arguments": {"expression": "2+3"}}'
UNTYPED = ToolCall(name="calculate", arguments={"expression": "2+3"}, untyped=True)
ADDS = ToolCall(name="calculate", arguments={"expression": "2+3"})


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("The answer is 5.", []),
        ("", []),
        (f"So:\n<tool_call>\n{CALL}\n</tool_call>", [ADDS]),
        # The end of a turn may be the end of the call.
        (f"<tool_call>{CALL}", [ADDS]),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", [ADDS, ADDS]),
        (CALL.replace("arguments", "parameters"), [ADDS]),
        (f"[{CALL}, {CALL}]", [ADDS, ADDS]),
        (json.dumps({"name": "calculate", "arguments": '{"expression": "2+3"}'}), [ADDS]),
        ("<tool_call>\n<function=calculate>\n<parameter=expression>\n2+3\n</parameter>\n</function>\n</tool_call>", [UNTYPED]),
        ("<function=calculate><parameter=expression>2+3</parameter></function>", [UNTYPED]),
        ("<tool_call>calculate\n<arg_key>expression</arg_key>\n<arg_value>2+3</arg_value>\n</tool_call>", [UNTYPED]),
        ("<tool_call>" + '{"name": "f"}' + "</tool_call>", [ToolCall(name="f")]),
        # Texts of the form without quotes are what the schema says.
        (
            "<function=calculate><parameter=expression>42</parameter><parameter=n>42</parameter><parameter=left",
            [ToolCall(name="calculate", arguments={"expression": "42", "n": "42"}, untyped=True)],
        ),
        ("<tool_call>now</tool_call>", [ToolCall(name="now")]),
        # What is thought is not called.
        (f"<think>perhaps <tool_call>{CALL}</tool_call></think>5", []),
        ("<think>a <tool_call> perhaps</think>\n" + CALL, [ADDS]),
        # Text that only looks like a call.
        ('{"name": "Bob", "age": 3}', []),
        ("[" * 5000, []),
        ('{"a": 1}', []),
        ("{2, 3}", []),
        ("[1, 2]", []),
    ],
)
def test_calls_of_tools_are_read(text: str, calls: list[ToolCall]) -> None:
    assert parse_calls(text) == calls


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("2+3", "not valid JSON"),
        ("23", "an object with name"),
        ("{'name': 'f'}", "not valid JSON"),
        ('{"name": 3}', "an object with name"),
        ('{"name": "f", "arguments": [1]}', "not an object"),
        ('{"name": "f", "arguments": "x"}', "not valid JSON"),
        ("", "not valid JSON"),
        ("[" * 5000, "not valid JSON"),
        ('{"name": "f", "arguments": "' + "[" * 5000 + '"}', "not valid JSON"),
    ],
)
def test_calls_that_cannot_be_read_are_said_to_the_policy(content: str, message: str) -> None:
    with pytest.raises(CallFormatError, match=message):
        parse_calls(f"<tool_call>{content}</tool_call>")
    answer = CalculatorEnvironment().step(turn(f"<tool_call>{content}</tool_call>"))
    assert isinstance(answer, Observation)
    assert message in answer.messages[0]["content"]
    assert answer.messages[0]["role"] == "tool"


def test_arguments_without_quotes_have_the_types_of_the_schema() -> None:
    properties = {"text": {"type": "string"}, "number": {"type": "integer"}}
    schema = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    call = ToolCall(name="f", arguments={"text": "42", "number": "42", "other": "[1]", "word": "null?"}, untyped=True)
    assert call.typed([schema]).arguments == {"text": "42", "number": 42, "other": [1], "word": "null?"}
    assert call.typed([]).arguments["text"] == 42
    assert contents(CalculatorEnvironment(), "<function=calculate><parameter=expression>42</parameter></function>") == ["42"]


def test_a_long_turn_without_ends_takes_no_time() -> None:
    begin = time.process_time()
    for text in ("<function=a>" + "<parameter=b>" * 10**5, "<tool_call>f" + "<arg_key>" * 10**5, "<tool_call>" * 10**5):
        CalculatorEnvironment().step(turn(text))
    # With a search that begins anew for each of them it would be hours.
    assert time.process_time() - begin < 60


def test_half_of_a_character_in_a_call_is_said_to_the_policy() -> None:
    answer = CalculatorEnvironment().step(turn(json.dumps({"name": "\ud800", "arguments": {}})))
    assert check_next(answer) is answer


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet='<>{}[]"tool_cal/functin=parmekyvu: 0', max_size=60))
def test_any_text_is_a_turn(text: str) -> None:
    assert isinstance(CalculatorEnvironment().step(turn(text)), Observation | Done)


def contents(environment: Any, text: str) -> list[str]:
    answer = environment.step(turn(text))
    assert isinstance(answer, Observation)
    return [message["content"] for message in answer.messages]


def test_the_calculator_in_turns() -> None:
    environment = CalculatorEnvironment(max_calls=2, max_characters=20)
    assert [schema["function"]["name"] for schema in environment.tools] == ["calculate"]
    assert contents(environment, CALL) == ["5"]
    bad = CALL.replace("calculate", "compute")
    assert contents(environment, f"[{CALL}, {bad}, {CALL}]")[::2] == [
        "5",
        "error: at \n[... 12 characters are left out ...]\n in a turn",
    ]
    assert CalculatorEnvironment().step(turn(bad)).messages[0]["content"] == (  # type: ignore[union-attr]
        "error: there is no tool 'compute'; the tools are calculate"
    )
    assert contents(environment, CALL.replace("expression", "x")) == [
        "error: the\n[... 21 characters are left out ...]\nis missing"
    ]
    assert isinstance(environment.step(turn("It is 5.")), Done)
    with pytest.raises(ValueError, match="max_calls=0"):
        CalculatorEnvironment(max_calls=0)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", "14"),
        (" (2 + 3) * -4 ", "-20"),
        ("7/2", "3.5"),
        ("1/3", "0.333333333333"),
        ("7//2 + 7 % 4", "6"),
        ("2**10", "1024"),
        ("2**-1", "0.5"),
        ("2**0.5 * sqrt(2)", "2"),
        ("abs(-3) + max(1, 2) + round(2.6)", "8"),
        ("sin(pi / 2) + log(e)", "2"),
        ("10**60", str(10**60)),
        ("0**0", "1"),
    ],
)
def test_arithmetic(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "2+",
        "x",
        "__import__('os')",
        "(1).__class__",
        "[1][0]",
        "'a' * 10",
        "True + 1",
        "1/0",
        "10**61",
        "9**9**9**9",
        "2.0**10000",
        "(-8)**0.5",
        "log(0)",
        "exp(10000)",
        "round(1.5, x)",
        "min()",
        "1e400",
        "1" * 600,
        "(" * 300 + ")" * 300,
        "1 if 2 else 3",
        "lambda: 1",
        "sqrt(x=4)",
        "1j",
        "a := 1",
        "\x00",
    ],
)
def test_what_is_no_arithmetic_has_no_value(expression: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        calculate(expression)


@pytest.mark.parametrize(("expression", "message"), [("3^2", r"with \*\*"), ("1,000+1", "without commas")])
def test_what_policies_write_in_another_way_is_explained(expression: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calculate(expression)


@settings(max_examples=100, deadline=None)
@given(st.integers(-1000, 1000), st.integers(-1000, 1000), st.sampled_from("+-*"))
def test_whole_numbers_are_exact(a: int, b: int, sign: str) -> None:
    expected = {"+": a + b, "-": a - b, "*": a * b}[sign]
    assert calculate(f"{a} {sign} ({b})") == str(expected)


def write_corpus(file: Path, documents: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return file


DOCUMENTS = [
    {"title": "Paris", "text": "Paris is the capital of France. " * 20},
    {"title": "Rome", "text": "Rome is the capital of Italy."},
    {"text": "The capital of a company is its money."},
    {"title": "Zürich", "text": "Zürich liegt in der Schweiz."},
]


def search(corpus: Path, query: str, **settings: Any) -> str:
    (content,) = contents(
        SearchEnvironment(corpus=str(corpus), **settings), json.dumps({"name": "search", "arguments": {"query": query}})
    )
    return content


def test_a_search_over_a_corpus(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", DOCUMENTS)
    assert search(corpus, "capital of Italy").splitlines()[:2] == ["[1] Rome", "Rome is the capital of Italy."]
    assert search(corpus, "capital", results=1, characters=10).count("\n") <= 1
    assert search(corpus, "zürich") == "[1] Zürich\nZürich liegt in der Schweiz."
    # What would be operators, or an error, are words or nothing.
    for query in ('"', "NOT", "a AND", "text:", "*", "", "((", "title : Rome NEAR/2", "\x00"):
        assert search(corpus, query)
    assert search(corpus, "***") == "nothing was found"
    assert search(corpus, "quantum") == "nothing was found"


def test_an_index_is_made_once_and_again_when_the_corpus_changes(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", DOCUMENTS)
    search(corpus, "Rome")
    made = (tmp_path / "corpus.jsonl.index").stat().st_mtime_ns
    search(corpus, "Rome")
    assert (tmp_path / "corpus.jsonl.index").stat().st_mtime_ns == made
    write_corpus(corpus, [{"text": "Berlin"}])
    os.utime(corpus, ns=(made + 10**9, made + 10**9))
    assert search(corpus, "Berlin") == "[1] Berlin"
    assert search(corpus, "Rome") == "nothing was found"
    # A damaged one is made again, and another file may be named.
    (tmp_path / "other").write_bytes(b"SQLite format 3\x00 or not")
    assert search(corpus, "Berlin", index=str(tmp_path / "other")) == "[1] Berlin"


def test_the_best_document_has_the_most_of_the_rare_words(tmp_path: Path) -> None:
    """Against BM25 written out, with the constants of SQLite."""
    numbers = random.Random(0)
    texts = [" ".join(numbers.choice("abcdefgh") for _ in range(numbers.randint(5, 30))) for _ in range(60)]
    corpus = write_corpus(tmp_path / "corpus.jsonl", [{"text": text} for text in texts])
    index = CorpusIndex(corpus, tmp_path / "index")
    index.prepare()
    mean = sum(len(text.split()) for text in texts) / len(texts)

    def score(text: str, words: list[str]) -> float:
        tokens, total = text.split(), 0.0
        for word in words:
            having = sum(word in other.split() for other in texts)
            # SQLite's rarest weight is above 0.
            weight = max(1e-6, math.log((len(texts) - having + 0.5) / (having + 0.5)))
            count = tokens.count(word)
            total += weight * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * len(tokens) / mean))
        return total

    for words in (["a"], ["a", "b"], ["c", "d", "e"]):
        found = [score(text, words) for _, text in index.search(" ".join(words), 60)]
        # Titles are empty here, so they change nothing.
        assert found == sorted(found, reverse=True)


@pytest.mark.parametrize(
    ("line", "message"),
    [("[1]", "needs text"), ('{"title": "x"}', "needs text"), ('{"text": 3}', "must be strings"), ("{", "needs text")],
)
def test_a_corpus_that_cannot_be_used(tmp_path: Path, line: str, message: str) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "x"}\n\n' + line + "\n")
    with pytest.raises(ConfigError, match=rf"corpus.jsonl:3 is not a document: .*{message}"):
        SearchEnvironment(corpus=str(corpus))
    with pytest.raises(ConfigError, match="cannot be read"):
        SearchEnvironment(corpus=str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"cannot be written .*environment.settings.index=FILE"):
        SearchEnvironment(corpus=str(corpus), index=str(tmp_path / "no" / "index"))
    with pytest.raises(ConfigError, match="at least 1"):
        SearchEnvironment(corpus=str(corpus), results=0)
    with pytest.raises(ConfigError, match="integers of at least 1"):
        SearchEnvironment(corpus=str(corpus), results="3")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is not a file"):
        SearchEnvironment(corpus=str(tmp_path))
    for bytes_ in (b'{"text": "\xe9"}\n', b'{"text": "\\ud800"}\n'):
        corpus.write_bytes(bytes_)
        with pytest.raises(ConfigError, match=r"corpus.jsonl:1 is not a document"):
            SearchEnvironment(corpus=str(corpus))
    assert not list(tmp_path.glob("*.new"))


def test_an_empty_corpus_and_a_path_that_looks_like_an_address(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a?b#c %20.jsonl", DOCUMENTS)
    assert search(corpus, "Rome").startswith("[1] Rome")
    assert search(write_corpus(tmp_path / "empty.jsonl", []), "Rome") == "nothing was found"
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}{end}" for name in (corpus.name, "empty.jsonl") for end in ("", ".index", ".index.lock")
    }


def test_names_of_environments() -> None:
    assert {"single_turn", "calculator", "python", "search"} <= set(ENVIRONMENTS.all())
    for name in ("single_turn", "calculator"):
        assert build_environment(ENVIRONMENTS.of(name), {}).reset(EpisodeRow(prompt="x")) is None
    assert isinstance(build_environment(ENVIRONMENTS.of("single_turn"), {}).step(turn("x")), Done)
    with pytest.raises(ConfigError, match="did you mean 'calculator'"):
        ENVIRONMENTS.of("calculater")
    for location, settings_, message in (
        ("string:digits", {}, "must be a subclass of Environment"),
        ("builtins:dict", {}, "returns a dict"),
        ("no_such_module:X", {}, "cannot be imported"),
        ("helpers/environments.py:X", {}, "is the path of a file"),
        (ENVIRONMENTS.of("calculator"), {"speed": 3}, "does not accept environment.settings"),
        (ENVIRONMENTS.of("calculator"), {"max_calls": -1}, "max_calls=-1"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_environment(location, settings_)


MESSAGE = {"role": "tool", "content": "x"}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("text", "the text 'text'"),
        (None, "step returned None"),
        (3, "a int"),
        (Observation(), "none of messages, tokens and text"),
        (Observation(messages=[MESSAGE], tokens=[1]), "both messages and tokens"),
        (Observation(tokens="12"), "token ids"),  # type: ignore[arg-type]
        (Observation(tokens=[1.0]), "token ids"),  # type: ignore[list-item]
        (Observation(tokens=[True]), "token ids"),
        (Observation(messages="x"), "list of mappings with role and content"),  # type: ignore[arg-type]
        (Observation(messages=MESSAGE), "list of mappings with role and content"),  # type: ignore[arg-type]
        (Observation(messages=[{"role": "tool"}]), "a role and a content"),
        (Observation(messages=[{"role": "tool", "content": None}]), "a role and a content"),
        (Observation(messages=["x"]), "a role and a content"),  # type: ignore[list-item]
        (Observation(messages=[MESSAGE], reward=math.nan), "finite"),
        (Done(reward=math.inf), "finite"),
        (Done(reward="1"), "finite"),  # type: ignore[arg-type]
        (Done(reward=1e31), "finite"),
        (Done(metrics={"x": math.nan}), "finite"),
        (Done(metrics=None), "must be numbers"),  # type: ignore[arg-type]
        (Observation(messages=[{**MESSAGE, "content": "\ud800"}]), "a lone surrogate"),
        (Observation(messages=[{**MESSAGE, "more": object()}]), "not JSON"),
        (Done(metrics={"x": "y"}), "must be finite numbers"),  # type: ignore[dict-item]
    ],
)
def test_what_an_environment_must_not_return(result: Any, message: str) -> None:
    with pytest.raises(EnvironmentResultError, match=message):
        check_next(result)
    if isinstance(result, Observation) and result.reward is None:
        with pytest.raises(EnvironmentResultError, match=message):
            check_first(result)


def test_what_an_environment_may_return() -> None:
    assert check_first(None) is None
    for result in (
        Observation(messages=[MESSAGE], reward=0),
        Observation(tokens=[1, 2]),
        Done(),
        Done(reward=-1.5),
        Done(reward=True),
    ):
        assert check_next(result) is result
    for bad, message in ((Done(), "a Done"), (Observation(tokens=[1], reward=1.0), "before any turn")):
        with pytest.raises(EnvironmentResultError, match=message):
            check_first(bad)
