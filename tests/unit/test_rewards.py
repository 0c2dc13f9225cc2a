"""Reward functions: what they return at the edges, and how functions of other frameworks are called."""

import asyncio
import json
import math
import random
import re
from typing import Any

import numpy as np
import pytest

from drivetrain.engine.errors import ConfigError
from drivetrain.rewards.answers import final_answer, match_answer, match_exact, match_number
from drivetrain.rewards.formats import check_format, check_json
from drivetrain.rewards.registry import REWARDS, import_function
from drivetrain.rewards.rules import length_within, overlong_penalty, repetition_penalty, script_share
from drivetrain.rewards.sample import RewardOutcome, RewardSample
from drivetrain.rewards.signatures import judge, outcome_of, signature_of


@pytest.mark.parametrize(
    ("text", "extract", "found"),
    [
        ("<answer> 7 </answer> then <answer>8</answer>", "auto", "8"),
        (r"so \boxed{1} and \boxed{\frac{1}{2}}", "auto", r"\frac{1}{2}"),
        (" 12 ", "auto", "12"),
        (r"\boxed{never closed", "boxed", None),
        ("", "boxed", None),
        ("it is 3 or -4.5e3", "number", "-4.5e3"),
        ("1,234 apples", "number", "1,234"),
        ("none", "number", None),
        ("<a>x\ny</a>", "tag:a", "x\ny"),
        ("#### 42", r"regex:####\s*(\S+)", "42"),
        ("#### 42", r"regex:\d+", "42"),
        ("<answer>7", "tag:answer", None),
        ("<answer></answer>", "auto", ""),
    ],
)
def test_where_the_final_answer_stands(text: str, extract: str, found: str | None) -> None:
    assert final_answer(text, extract) == found


@pytest.mark.parametrize("extract", ["last", "tag:", "regex:", ""])
def test_an_unknown_place_is_refused(extract: str) -> None:
    with pytest.raises(ValueError, match="it must be auto, all, boxed, number, tag:NAME or regex:PATTERN"):
        final_answer("1", extract)


@pytest.mark.parametrize(
    ("completion", "reference", "reward"),
    [
        ("12", "12", 1.0),
        ("12", 12, 1.0),
        ("12.0", "12", 1.0),
        ("1,200", "1200", 1.0),
        ("$5", 5, 1.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{x+1}", "1+x", 1.0),
        (r"\boxed{x+2}", "1+x", 0.0),
        ("Paris", "Paris", 1.0),
        ("paris", "Paris", 1.0),
        ("silent", "listen", 0.0),
        ("3,14", "314", 0.0),
        (r"<answer>\boxed{7}</answer>", "7", 1.0),
        ("London", "Paris", 0.0),
        ("", "12", 0.0),
        ("112", "12", 0.0),
        ("nan", "nan", 1.0),
        ("nan", "3", 0.0),
        ("inf", "3", 0.0),
        # As floats they would be the same.
        ("9007199254740993", "9007199254740992", 0.0),
        ("1e400", "1e400", 1.0),
    ],
)
def test_answers(completion: str, reference: Any, reward: float) -> None:
    assert match_answer(completion, answer=reference) == reward


def test_numbers_and_texts() -> None:
    assert match_number("about 3.14", answer="3.14159", extract="number", tolerance=1e-3) == 1.0
    assert match_number("about 3.14", answer="3.14159", extract="number") == 0.0
    assert match_number("no", answer="1") == 0.0
    assert match_exact(" yes\n", answer="yes") == 1.0
    assert match_exact("12.0", answer="12") == 0.0
    with pytest.raises(ValueError, match="the reference Paris is not a number"):
        match_number("1", answer="Paris")
    for empty in (None, "", "  "):
        with pytest.raises(ValueError, match="the reference is empty"):
            match_answer("1", answer=empty)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think>\n<answer>b</answer>\n", 1.0),
        ("<think>a\nb</think><answer></answer>", 1.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>b</answer> more", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a<answer>b</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_tags(text: str, reward: float) -> None:
    assert check_format(text) == reward


def test_patterns_and_json() -> None:
    assert check_format("ab12", regex=r"[a-z]+\d+") == 1.0
    assert check_format("ab12!", regex=r"[a-z]+\d+") == 0.0
    schema = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}
    assert check_json('{"n": 1}', schema=schema) == 1.0
    assert check_json('```json\n{"n": 1}\n```', schema=json.dumps(schema)) == 1.0
    for text in ('{"n": "1"}', "{}", "{", "", '{"n": NaN}', "[" * 100_000):
        assert check_json(text, schema=schema) == 0.0
    with pytest.raises(ValueError, match="the schema is invalid"):
        check_json("{}", schema={"type": "number or so"})


def test_rules() -> None:
    assert [length_within([0] * n, minimum=2, maximum=4) for n in (1, 2, 4, 5)] == [0.0, 1.0, 1.0, 0.0]
    # DAPO's figures: no penalty up to 16384 - 4096 tokens, half of it in the middle.
    lengths = (0, 12288, 14336, 16384, 20000)
    assert [overlong_penalty([0] * n, maximum=16384, buffer=4096) for n in lengths] == [0.0, 0.0, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match="buffer=0 with maximum=4"):
        overlong_penalty([], maximum=4, buffer=0)
    assert repetition_penalty("a b c d") == 0.0
    assert repetition_penalty("a a a a a") == pytest.approx(-2 / 3)
    assert repetition_penalty("", words=2) == repetition_penalty("one", words=2) == 0.0
    assert script_share("abc АБВ", script="cyrillic") == 0.5
    assert script_share("1 + 2", script="LATIN") == 1.0
    assert script_share("中文", script="CJK") == 1.0


SAMPLES = [
    RewardSample(prompt="1+1=", completion="2", completion_ids=[5], columns={"answer": "2", "level": 3}),
    RewardSample(prompt="1+2=", completion="4", completion_ids=[6, 7], truncated=True, columns={"answer": "3", "level": 4}),
]


def values(function: Any, samples: list[RewardSample] = SAMPLES, **settings: Any) -> list[Any]:
    found, _ = judge(function, samples, settings, 5.0)
    return [o.value if o.kind == "value" else (o.kind, o.message) for o in found]


def test_functions_with_the_names_that_they_ask_for() -> None:
    assert values(lambda completion, answer: completion == answer) == [1.0, 0.0]
    assert values(lambda completion_ids, truncated, *, scale=1: len(completion_ids) * scale - truncated, scale=3) == [3.0, 5.0]
    assert values(lambda sample: sample.columns["level"]) == [3.0, 4.0]
    # A setting comes before a column of the same name.
    assert values(lambda completion, level, other: level + other, level=100, other=0.5) == [100.5, 100.5]
    assert values(lambda completion, **rest: len(rest)) == [2.0, 2.0]


def test_functions_of_trl() -> None:
    def trl(completions: list[str], answer: list[str], **kwargs: Any) -> list[float | None]:
        assert kwargs["prompts"] == ["1+1=", "1+2="]
        assert kwargs["completion_ids"] == [[5], [6, 7]]
        assert kwargs["level"] == [3, 4]
        return [1.0 if c == a else None for c, a in zip(completions, answer, strict=True)]

    assert values(trl) == [1.0, ("not_applicable", "")]
    assert values(lambda completions, trainer_state, log_metric: [log_metric("a", 1) is trainer_state] * 2) == [1.0, 1.0]
    chat = [RewardSample(prompt=[{"role": "user", "content": "hi"}], completion="ho")]
    assert values(lambda completions: [c[0]["content"] == "ho" for c in completions], chat) == [1.0]


def test_functions_of_verl() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
        return {"score": float(solution_str == ground_truth), "acc": 1, "source": data_source, "extra": extra_info}

    assert values(compute_score) == [1.0, 0.0]
    nested = [RewardSample(prompt="p", completion="x", columns={"reward_model": {"ground_truth": "x", "style": "rule"}})]
    assert values(compute_score, nested) == [1.0]
    kind, message = values(compute_score, [RewardSample(prompt="p", completion="x")])[0]
    assert kind == "error"
    assert "no column ground_truth, reward_model.ground_truth or answer" in message
    assert values(
        lambda solution_strs, ground_truths: [a == b for a, b in zip(solution_strs, ground_truths, strict=True)]
    ) == [1, 0]


def test_functions_that_wait() -> None:
    async def wait(completion: str, answer: str) -> float:
        await asyncio.sleep(0.0 if completion == answer else 60.0)
        return 1.0

    found, _ = judge(wait, SAMPLES, {}, 0.2)
    assert [o.kind for o in found] == ["value", "timeout"]

    async def together(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return [float(c) for c in completions]

    assert values(together) == [2.0, 4.0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "it returned None, a NoneType; it must return a number"),
        ("1", "it returned '1', a str"),
        (float("nan"), "it returned nan; a reward must be finite"),
        (float("-inf"), "it returned -inf"),
        ([1.0], "it returned \\[1.0\\], a list"),
        ({"value": 1}, "a dict"),
        (1j, "a complex"),
        (np.ones(2), "a ndarray"),
    ],
)
def test_values_that_are_no_rewards(value: Any, message: str) -> None:
    found = outcome_of(value)
    assert found.kind == "error"
    assert found.value is None
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(found.message)


@pytest.mark.parametrize("value", [1, True, 1.0, np.float32(1), np.array(1.0), np.array([1.0]), {"score": 1}])
def test_values_that_are(value: Any) -> None:
    assert outcome_of(value) == RewardOutcome(kind="value", value=1.0)


def test_functions_that_fail() -> None:
    assert values(lambda completions: [1.0]) == [("error", "ValueError: it returned 1 values for 2 completions")] * 2
    assert values(lambda completions: 1.0)[0][1].startswith("TypeError: it returned a float; it must return a list")
    kind, message = values(lambda completion: 1 / 0)[0]
    assert (kind, message.partition(" (")[0]) == ("error", "ZeroDivisionError: division by zero")
    assert re.search(r"test_rewards\.py:\d+, in <lambda>\)$", message)
    assert "no column or setting other" in values(lambda completion, other: 1.0)[0][1]
    with pytest.raises(ConfigError, match="does not take the completion"):
        signature_of(lambda text: 1.0)
    with pytest.raises(ConfigError, match="has positional-only parameters"):
        signature_of(lambda *args: 1.0)


class Unreadable(float):
    """A number that raises when it is read."""

    def __float__(self) -> float:
        raise RuntimeError("unreadable")


def test_an_answer_is_judged_alike_whichever_others_are_passed_with_it() -> None:
    def sync(completion: str, tests: list[str]) -> Any:
        # A call that changes its arguments changes its own.
        tests.append(completion)
        returned: dict[str, Any] = {"none": None, "nan": math.nan, "huge": 10**400, "unreadable": Unreadable(1)}
        return returned[completion] if completion in returned else len(tests) + 6 / int(completion)

    async def concurrent(completion: str, tests: list[str]) -> Any:
        return sync(completion, tests)

    def batch(completions: list[str], tests: list[list[str]]) -> Any:
        return [sync(*one) for one in zip(completions, [list(of_one) for of_one in tests], strict=True)]

    words = ["2", "0", "none", "nan", "huge", "unreadable", "x", "3"]
    shared = {"tests": ["one"]}
    for seed in range(4):
        drawn = random.Random(seed).choices(words, k=12)
        samples = [RewardSample(prompt="p", completion=word, columns=shared) for word in drawn]
        for function in (sync, concurrent):
            singly = [outcome for sample in samples for outcome in values(function, [sample])]
            for size in (2, 5, 12):
                assert [o for i in range(0, 12, size) for o in values(function, samples[i : i + size])] == singly
            assert [isinstance(outcome, float) for outcome in singly] == [word in ("2", "3") for word in drawn]
    # What a function of all returns is looked at value by value; what it raises stands for all, and is reported as that.
    good = [RewardSample(prompt="p", completion=word, columns=shared) for word in ("2", "huge", "unreadable", "3")]
    outcomes, separate = judge(batch, good, {}, 5.0)
    assert ([o.value for o in outcomes], separate) == ([5.0, None, None, 4.0], True)
    outcomes, separate = judge(batch, [*good, RewardSample(prompt="p", completion="x", columns=shared)], {}, 5.0)
    assert ([o.kind for o in outcomes], separate) == (["error"] * 5, False)


def test_names() -> None:
    assert {"answer", "exact", "format", "json", "length", "numeric", "overlong", "repetition", "script"} <= set(REWARDS.all())
    for name in REWARDS.all():
        signature_of(import_function(REWARDS.of(name)))
    with pytest.raises(ConfigError, match=r"rewards.use='answr' is unknown; .*did you mean 'answer'"):
        REWARDS.of("answr")
    for location in ("no_such_module:f", "json:no_such_function"):
        with pytest.raises(ConfigError, match=f"the reward {location} cannot be imported"):
            import_function(location)
    with pytest.raises(ConfigError, match="is a str, which cannot be called"):
        import_function("string:digits")
