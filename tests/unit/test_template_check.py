"""Chat templates in conversations of several turns: what becomes of an answer when the next turn comes."""

from pathlib import Path
from typing import Any

import pytest

from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.trainers.data.turn_ends import TurnEnds
from drivetrain.trainers.template.check import KINDS, check_template
from drivetrain.trainers.template.template_command import main
from helpers.templates import CHATML, DROPS_THOUGHTS, NO_END, ONLY_CHATS, OTHER_END, STRIPS, TAKES_TEXT, tokenizer


def verdicts(template: str, stopping: tuple[str, ...] = ("<e>", "<r>"), **more: Any) -> dict[str, Any]:
    one = tokenizer(template, **more)
    return {v.kind: v for v in check_template(one, ends=TurnEnds(stopping, ()), conversations=150)}


def test_a_template_that_writes_each_message_alike_is_safe() -> None:
    found = verdicts(CHATML)
    assert found.keys() == KINDS.keys()
    # It knows no reasoning_content, so nothing of it comes back that was not there.
    assert {v.verdict for v in found.values()} == {"safe"}
    assert not any(v.detail or v.example for v in found.values())


def test_text_that_is_stripped_is_another_text() -> None:
    found = verdicts(STRIPS)
    one = found["a question after an answer"]
    assert one.verdict == "rewritten"
    assert (
        one.detail == "the policy has ' leading and trailing spaces ' and the next turn 'leading and trailing spaces<e>\\n'"
        or (one.detail.startswith("the policy has ") and one.example[-1]["content"].strip() != one.example[-1]["content"])
    )


def test_thoughts_that_later_turns_drop() -> None:
    found = verdicts(DROPS_THOUGHTS)
    rewritten = {kind for kind, v in found.items() if v.verdict == "rewritten"}
    assert rewritten == {"a thought in the text", "a thought as reasoning_content", "a call of a tool after a thought"}
    one = found["a thought as reasoning_content"]
    assert "<s>assistant\\n" in one.detail
    assert "the policy has '<think>" in one.detail


def test_an_end_that_only_the_last_answer_has() -> None:
    found = verdicts(OTHER_END)
    assert {v.verdict for v in found.values()} == {"rewritten"}
    assert "the policy has 'r>" in found["a question after an answer"].detail


def test_an_answer_that_ends_with_the_opening_of_the_next_turn() -> None:
    """As GLM's: the policy writes the token at which generation stops."""
    found = verdicts(NO_END, stopping=("<user>", "<tool>"))
    assert {v.verdict for v in found.values()} == {"safe"}


def test_tokens_that_are_merged_with_what_follows_have_to_be_kept() -> None:
    """Where nothing special stands between an answer and the next turn."""
    plain = "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    plain = plain.replace("{{ m.content }}", "{{ ':' if m.role == 'assistant' else '' }}{{ m.content }}")
    found = verdicts(plain, stopping=(), added=["<pad>"])
    one = found["a question after an answer"]
    assert one.verdict == "splice", one
    assert one.detail.endswith("of the same text")


@pytest.mark.slow
def test_what_a_template_does_not_take() -> None:
    found = verdicts(ONLY_CHATS)
    assert (found["a call of a tool"].verdict, found["a call of a tool"].detail) == ("refused", "no tools here")
    assert found["a question after an answer"].verdict == "safe"
    # Arguments as text are tried where arguments as values are not taken.
    assert {v.verdict for v in verdicts(TAKES_TEXT).values()} == {"safe"}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    tokenizer(CHATML).save_pretrained(folder)
    template = tmp_path / "other.jinja"
    template.write_text(DROPS_THOUGHTS)
    assert main(["check", str(folder)]) == 0
    assert "a question after an answer        safe\n" in capsys.readouterr().out
    assert main(["check", str(folder), "--template", str(template), "--conversations", "5"]) == 1
    out = capsys.readouterr().out
    assert "a thought as reasoning_content    rewritten  token " in out
    assert 'for example, with a thought in the text: [{"role": "user"' in out
    for words, message in (
        (["check", str(folder), "--variables", "{"], "--variables='{' is not JSON"),
        (["check", str(folder), "--variables", "[]"], "it must be a JSON object"),
        (["check", str(folder), "--conversations", "0"], "--conversations=0; it must be at least 1"),
        (["check", str(tmp_path)], "has no config.json; did you mean"),
    ):
        assert main(words) == 1
        assert message in capsys.readouterr().err
    assert main(["other"]) == 2
    tokenizer(None).save_pretrained(folder)  # type: ignore[arg-type]
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert main(["check", str(folder)]) == 1
    assert "has no chat template; give one with --template" in capsys.readouterr().err
