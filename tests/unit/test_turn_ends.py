"""Templates that write no end behind an answer, as GLM-4's: the token that opens the next turn ends it, and is learned."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from drivetrain import SFTConfig, SFTTrainer
from drivetrain.engine.config import ModelConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.trainers.config.data import DataConfig
from drivetrain.trainers.data.chat import encode_chat, read_chat
from drivetrain.trainers.data.dataset import Budget
from drivetrain.trainers.data.encode import encode_row, mark_supervised
from drivetrain.trainers.data.sources import DataSource
from drivetrain.trainers.data.stream import SampleStream, StreamCursor, StreamLoader
from drivetrain.trainers.data.tokenize import Encoder, load_token_caches
from drivetrain.trainers.data.turn_ends import TurnEnds, ends_to_learn

# As GLM-4.5's: thoughts stand only in the answers to the last question.
GLM = (
    "[gMASK]<sop>{% set last = namespace(user=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}{% elif m.role == 'assistant' %}<|assistant|>\n"
    "{% if loop.index0 > last.user and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.name }}</tool_call>{% endfor %}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
STOPS = ("<|endoftext|>", "<|user|>", "<|observation|>")


def glm_tokenizer(template: str = GLM) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=end, pad_token=end, additional_special_tokens=SPECIAL
    )
    tokenizer.chat_template = template
    return tokenizer


TOKENIZER = glm_tokenizer()
STOP_IDS = [TOKENIZER.convert_tokens_to_ids(token) for token in STOPS]
ENDS = TurnEnds.of(TOKENIZER, STOP_IDS)
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def marked(
    messages: list[dict[str, Any]], ends: TurnEnds | None = ENDS, turns: Any = "auto", template: str = GLM
) -> list[str]:
    tokenizer = TOKENIZER if template == GLM else glm_tokenizer(template)
    samples = encode_chat(tokenizer, read_chat({"messages": messages}, "row", {}), turns, ends)
    prefix = "[gMASK]<sop>"
    return [mark_supervised(tokenizer, s).removeprefix(prefix) + ("" if s.ended else " (endless)") for s in samples]


CHAT = [user("a"), answer("b"), user("c"), answer("d")]
Q, A = "<|user|>\\n", "<|assistant|>"


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        (CHAT, [f"{Q}a{A}«\\nb<|user|>»\\nc{A}«\\nd<|user|>»"]),
        (CHAT[:3], [f"{Q}a{A}«\\nb<|user|>»\\nc"]),
        ([user("a"), answer("b", train=False), *CHAT[2:]], [f"{Q}a{A}\\nb{Q}c{A}«\\nd<|user|>»"]),
        ([answer("a"), *CHAT[2:]], [f"{A}«\\na<|user|>»\\nc{A}«\\nd<|user|>»"]),
        # A thought is dropped once a question follows, so each answer is a sample, with the end that it has in any chat.
        (
            [user("a"), answer("b", reasoning_content="t"), *CHAT[2:]],
            [f"{Q}a{A}«\\n<think>t</think>b<|user|>»", f"{Q}a{A}\\nb{Q}c{A}«\\nd<|user|>»"],
        ),
        # A call ends at the token that opens its result.
        ([user("a"), CALL], [f"{Q}a{A}«\\n<tool_call>f</tool_call><|observation|>»"]),
        (
            [user("a"), CALL, {"role": "tool", "content": "4"}, answer("b")],
            [f"{Q}a{A}«\\n<tool_call>f</tool_call><|observation|>»\\n4{A}«\\nb<|user|>»"],
        ),
        # Generation does not stop at the token that opens another answer.
        ([user("a"), answer("b"), answer("d")], [f"{Q}a{A}«\\nb»{A}«\\nd<|user|>» (endless)"]),
    ],
)
def test_an_answer_ends_with_the_token_that_opens_the_next_turn(messages: list[dict[str, Any]], wanted: list[str]) -> None:
    assert marked(messages) == wanted


def test_each_answer_on_its_own_and_each_side_of_a_pair_ends() -> None:
    assert marked(CHAT, turns="per_turn") == [f"{Q}a{A}«\\nb<|user|>»", f"{Q}a{A}\\nb{Q}c{A}«\\nd<|user|>»"]
    pair = {"prompt": CHAT[:1], "chosen": CHAT[1:2], "rejected": [answer("z")]}
    sides = [encode_row(TOKENIZER, pair, "row", DataConfig(), "pairs", ends) for ends in (ENDS, None)]
    shown = [[mark_supervised(TOKENIZER, side).removeprefix("[gMASK]<sop>") for side in pair] for pair in sides]
    # A reward model scores the chat as the template renders it.
    assert shown == [[f"{Q}a{A}«\\n{x}<|user|>»" for x in "bz"], [f"{Q}a{A}«\\n{x}»" for x in "bz"]]


@pytest.mark.parametrize("end", ["<|endoftext|>", "<|endoftext|>\n", "<sop>\n"])
def test_templates_that_write_an_end_stay_as_they_are(end: str) -> None:
    """Also with an end to which generation is not set, as that of a base model's template."""
    template = GLM.replace("{% else %}<|{{ m.role", end + "{% else %}<|{{ m.role")
    assert marked(CHAT, template=template) == marked(CHAT, None, template=template)
    assert marked(CHAT, template=template)[0].count(end.strip()) == 2


def test_what_has_no_end_is_told() -> None:
    # Generation stops at a token that the template never writes.
    assert marked(CHAT[:2], TurnEnds.of(TOKENIZER, [STOP_IDS[0]])) == [f"{Q}a{A}«\\nb» (endless)"]
    # A template may refuse the chat that would show what follows an answer.
    strict = GLM + "{% if messages[0].content == '0' %}{{ raise_exception('no') }}{% endif %}"
    assert marked(CHAT[:2], template=strict) == [f"{Q}a{A}«\\nb» (endless)"]
    # Marks say what is learned.
    marks = "{% for m in messages %}<|{{ m.role }}|>{% generation %}{{ m.content }}END{% endgeneration %}{% endfor %}"
    assert marked(CHAT[1:2], template=marks.replace("END", "")) == [f"{A}«b» (endless)"]
    assert marked(CHAT[1:2], template=marks.replace("END", "<|endoftext|>\n")) == [f"{A}«b<|endoftext|>\\n»"]


def test_answers_without_an_end_are_warned_of_once(
    tmp_path: Path, process_group: None, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"messages": CHAT[:2]}] * 3
    files = [tmp_path / name for name in ("one.jsonl", "two.jsonl")]
    data = DataConfig(train=("s",), cache_dir=str(tmp_path), streaming=True, stream_rows=1)
    for file in files:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for ends, warnings in ((None, 0), (STOP_IDS, 0), (STOP_IDS[:1], 1)):
        caplog.clear()
        load_token_caches([str(file) for file in files], TOKENIZER, data, training=True, ends=ends)
        assert caplog.text.count("the chat template ends an assistant turn without a token") == warnings
        caplog.clear()
        stream = SampleStream(
            sources=[DataSource("s", rows=rows)],
            names=["s"],
            encoder=Encoder(TOKENIZER, data, ends=ends),
            data=data,
            budget=Budget(tokens=40, setting="x"),
            gather=lambda value, error=None: [value],
            broadcast=lambda value, error=None: value,
            rank=0,
            ranks=1,
        )
        batches = StreamLoader(stream, batch_size=1).batches(StreamCursor())
        assert len([next(batches) for _ in rows]) == 3
        assert caplog.text.count("the chat template ends an assistant turn without a token") == warnings


def test_the_tokens_that_end_answers_are_those_of_the_model(tmp_path: Path) -> None:
    model = ModelConfig(path=str(tmp_path))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": STOP_IDS}))
    assert ends_to_learn(model) == frozenset(STOP_IDS)
    assert ends_to_learn(ModelConfig(path=str(tmp_path), overrides={"eos_token_id": 7})) == frozenset([7])
    assert ends_to_learn(ModelConfig(path=str(tmp_path), head="value")) is None
    # Without the file, or without the setting in it, the config's.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": [3, 5]}))
    (tmp_path / "generation_config.json").write_text("{}")
    assert ends_to_learn(model) == frozenset([3, 5])
    (tmp_path / "generation_config.json").unlink()
    assert ends_to_learn(model) == frozenset([3, 5])


@pytest.mark.slow
def test_a_model_learns_to_stop_in_plain_transformers(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "glm4", vocab_size=len(TOKENIZER), max_position_embeddings=64)
    TOKENIZER.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": STOP_IDS}))
    rows = [{"messages": [user(str(i)), answer(f"yes {i}")]} for i in range(4)]
    config = SFTConfig.parse(
        f"model.path={folder}",
        f"trainer.output_dir={tmp_path / 'run'}",
        f"data.cache_dir={tmp_path}",
        "data.batch_size=4",
        "trainer.max_steps=60",
        "optim.lr=0.01",
        "engine.micro_batch.max_tokens=128",
    )
    SFTTrainer(config, train_data=rows).train()
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "run" / "hf")
    inputs = tokenizer.apply_chat_template([user("2")], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "\nyes 2<|user|>"
