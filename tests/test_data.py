"""Rows to samples: what is learned of each form, where rows come from, how they are kept, and in which order they come."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.engine.batch import IGNORE
from drivetrain.engine.errors import CheckpointError, DataError
from drivetrain.trainers.config import DataConfig
from drivetrain.trainers.data.chat import encode_chat, read_chat
from drivetrain.trainers.data.demo import make_tokenizer, pairs, question
from drivetrain.trainers.data.encode import encode_completion, encode_row
from drivetrain.trainers.data.loader import Cursor, Loader, Order
from drivetrain.trainers.data.sample import Sample
from drivetrain.trainers.data.samples import Budget, Samples
from drivetrain.trainers.data.sources import open_source
from drivetrain.trainers.data.store import Encoded, Store, StoreWriter, is_complete
from drivetrain.trainers.data.tokenise import load_stores
from hub import serve

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
    with pytest.raises(DataError, match=r"row: no message of the assistant is to be learned \(train=false"):
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
    with pytest.raises(DataError, match="row: message 1 has parts of the kinds text, image"):
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
    with pytest.raises(DataError, match="row: tools is no JSON"):
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
        ([{"role": "user", "content": None}], "content of message 1 is NoneType"),
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
        chat(CHAT, tokenizer, turns="together")
    assert [learned(s) for s in chat(CHAT, turns="apart")] == ["7<end>", "15<end>"]


def test_a_template_whose_prompt_is_no_part_of_the_answer_is_refused() -> None:
    tokenizer = with_template(FORGETFUL.replace("<assistant>{% endif %}", "<assistant>5{% endif %}"))
    with pytest.raises(DataError, match="row: the chat template begins the answer of message 2 otherwise"):
        chat(CHAT, tokenizer)


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
    assert [learned(s) for s in chat(CHAT, tokenizer, turns="apart")] == ["7", "15"]
    # Marks of two answers that run together cannot be told apart.
    merged = with_template(
        MARKED.replace("{% endgeneration %}<end>", "<end>{% endgeneration %}").replace("'<' + m['role'] + '>'", "''")
    )
    twice = [*CHAT[:1], {**CHAT[1], "train": False}, CHAT[3]]
    with pytest.raises(DataError, match="marks 1 spans as generated for 2 answers"):
        chat(twice, merged)


# ---- where rows come from, and how they are kept ----------------------------------------------------------------------


def write_rows(path: Path, rows: list[Any]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


@pytest.fixture
def cache(tmp_path: Path) -> dict[str, Any]:
    return {"cache_dir": str(tmp_path / "cache")}


def load(paths: list[str], cache: dict[str, Any], tokenizer: Any = TOKENIZER, **data: Any) -> Samples:
    config = DataConfig(**{**cache, **data})
    return Samples(load_stores(paths, tokenizer, config, training=True), config, BUDGET, paths)


def every(samples: Samples) -> list[Sample]:
    return [samples[i] for i in range(len(samples))]


ROWS = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "2+2=", "completion": "4"}]


@pytest.mark.usefixtures("process_group")
def test_formats_files_and_folders(tmp_path: Path, cache: dict[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    jsonl = write_rows(tmp_path / "a.jsonl", ROWS)
    parquet = str(tmp_path / "b.parquet")
    pq.write_table(pa.Table.from_pylist([{**r, "picture": b"x"} for r in ROWS]), parquet)
    chats = write_rows(tmp_path / "c.jsonl", [{"messages": [*question(1, 2), {"role": "assistant", "content": "3"}]}])
    folder = tmp_path / "folder"
    write_rows(folder / "2.jsonl", [{"text": "5"}])
    (folder / "1.json").write_text(json.dumps([{"text": "6", "prompt": None}]))
    write_rows(folder / ".hidden.jsonl", [{"text": "7"}])
    samples = load([jsonl, parquet, chats, str(folder)], cache)
    assert [learned(s) for s in every(samples)] == ["2<end>", "4<end>", "2<end>", "4<end>", "3<end>", "6<end>", "5<end>"]
    assert samples[1].name == f"{jsonl}:2"
    assert samples[5].name == f"{folder}/1.json:1"
    assert samples.sizes == [2, 2, 1, 2]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("too_long", "kept"),
    [("skip", ["1+1=2<end>"]), ("truncate_right", ["1+1=2<end>", "1+1=22"]), ("truncate_left", ["1+1=2<end>", "=2222<end>"])],
)
def test_long_samples(too_long: Any, kept: list[str], tmp_path: Path, cache: dict[str, Any]) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "1+1=", "completion": "2"}, {"prompt": "1+1=", "completion": "2222"}])
    samples = load([path], cache, max_length=6, too_long=too_long)
    assert [TOKENIZER.decode(s.ids) for s in every(samples)] == kept
    assert samples.lengths.tolist() == [len(s.ids) for s in every(samples)]
    with pytest.raises(DataError, match=r"a.jsonl:2 has 9 tokens, more than data.max_length=6"):
        load([path], cache, max_length=6)
    with pytest.raises(DataError, match=r"data.max_length=200 is more than engine.micro_batch.max_tokens=100"):
        load([path], cache, max_length=200)


@pytest.mark.usefixtures("process_group")
def test_what_truncation_leaves_nothing_of_is_left_out(
    tmp_path: Path, cache: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows(
        tmp_path / "a.jsonl", [{"prompt": "1+1=", "completion": "2"}, {"prompt": "111+111=", "completion": "222"}]
    )
    assert len(load([path], cache, max_length=6, too_long="truncate_right")) == 1
    assert "left out: 1 of the samples" in caplog.text
    with pytest.raises(DataError, match=r"no sample of .*a.jsonl is left to learn from"):
        load([path], cache, max_length=3, too_long="truncate_right")


@pytest.mark.usefixtures("process_group")
def test_tokenised_data_is_kept_and_made_again_when_anything_changes(
    tmp_path: Path, cache: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "drivetrain")
    path = write_rows(tmp_path / "a.jsonl", ROWS)

    def made() -> bool:
        told = "tokenised" in caplog.text
        caplog.clear()
        return told

    load([path], cache)
    assert made()
    load([path], cache, max_length=50, too_long="skip")
    assert not made()
    load([path], cache, format="prompt_completion")
    assert made()
    load([path], cache, with_template(MARKED))
    assert made()
    write_rows(tmp_path / "a.jsonl", [*ROWS, *ROWS])
    assert len(load([path], cache)) == 4
    assert made()
    # A file of it is cut short: it is not taken at its name.
    (store,) = [f for f in Path(cache["cache_dir"]).iterdir() if (f / "ids").stat().st_size == 24 * 4]
    (store / "ids").write_bytes(b"x")
    assert not is_complete(store)
    assert len(load([path], cache)) == 4
    assert made()
    assert not [f for f in Path(cache["cache_dir"]).iterdir() if f.name.startswith(".tmp")]


@pytest.mark.usefixtures("process_group")
def test_processes_tokenise_as_one_does(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(1500)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    alone = load([path], {"cache_dir": str(tmp_path / "alone")}, workers=0)
    several = load([path], {"cache_dir": str(tmp_path / "several")}, workers=2)
    assert alone.digest == several.digest
    assert several[1000].name == f"{path}:1001"
    write_rows(tmp_path / "a.jsonl", [*rows, {"prompt": "1", "completion": ""}])
    with pytest.raises(DataError, match=r"a.jsonl:1501: the completion is empty"):
        load([path], {"cache_dir": str(tmp_path / "several")}, workers=2)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no rows"),
        ('{"picture": "x"}\n', "a.jsonl:1 has the columns picture; it needs messages or prompt and completion or text"),
        (
            '{"prompt": "1", "completion": "2"}\n\n{"prompt": null, "completion": "2"}\n',
            r"a.jsonl:3 has the columns prompt \(null\), completion",
        ),
        ('{"prompt": "1", "completion": ""}\n', "a.jsonl:1: the completion is empty"),
        ('{"prompt": "1", "completion": 2}\n', "a.jsonl:1: completion is int; it must be text"),
        ('{"prompt": "1", "completion": "2"}\nnot json\n', "a.jsonl:2 is not JSON"),
        ("[1]\n", "a.jsonl:1 is a JSON list"),
    ],
)
def test_bad_files_are_named(content: str, message: str, tmp_path: Path, cache: dict[str, Any]) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        load([str(tmp_path / "a.jsonl")], cache)
    assert not list(Path(cache["cache_dir"]).glob("*"))


def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text("a,b\n")
    (tmp_path / "b.json").write_text('{"text": "x"}\n{"text": "y"}\n')
    (tmp_path / "c.parquet").write_text("no parquet")
    for name, message in (
        ("nowhere.jsonl", "data file nowhere.jsonl does not exist"),
        (str(tmp_path / "empty"), "has no .jsonl, .json, .parquet file"),
        (str(tmp_path / "a.csv"), "is a .csv; use"),
        ("nobody/nothing", "is no file or folder, and loading it as a data set of the Hugging Face Hub failed"),
    ):
        with pytest.raises(DataError, match=message):
            open_source(name, training=True)
    for file, message in (
        ("b.json", "is not JSON: .*; a file of one object a line ends in .jsonl"),
        ("c.parquet", "cannot be read"),
    ):
        with pytest.raises(DataError, match=message):
            list(open_source(str(tmp_path / file), training=True).chunks())


CARD = b"""---
configs:
- config_name: default
  data_files:
  - {split: train, path: train.jsonl}
  - {split: test, path: test.jsonl}
---
"""
LOADED = """
import json, sys
from drivetrain.trainers.data.sources import open_source
found = []
for name, training in json.loads(sys.argv[1]):
    try:
        found.append([row for chunk in open_source(name, training=training).chunks() for row in chunk.rows])
    except Exception as e:
        found.append(f"{type(e).__name__}: {e}")
print(json.dumps(found))
"""


def test_data_sets_of_the_hub(tmp_path: Path) -> None:
    files = {"train.jsonl": b'{"text": "1"}\n{"text": "2"}\n', "test.jsonl": b'{"text": "3"}\n', "README.md": CARD}
    asked = [
        ("org/some", True),
        ("org/some:test", False),
        ("org/some/default:train[1:]", True),
        ("org/some", False),
        ("org/some:nix", True),
        ("org/other", True),
    ]
    with serve("org/some", files) as address:
        environment = {
            **os.environ,
            "HF_ENDPOINT": address,
            "HF_HOME": str(tmp_path),
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
        }
        words = [sys.executable, "-c", LOADED, json.dumps(asked)]
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment, timeout=100)
    whole, test, part, unnamed, no_split, no_name = json.loads(done.stdout.splitlines()[-1])
    assert whole == [[1, {"text": "1"}], [2, {"text": "2"}]]
    assert test == [[1, {"text": "3"}]]
    assert part == [[1, {"text": "2"}]]
    assert unnamed == "DataError: data set org/some has the splits train, test; name one, as in org/some:test"
    assert 'Unknown split "nix". Should be one of' in no_split
    assert "DataError: org/other is no file or folder, and loading it as a data set of the Hugging Face Hub failed" in no_name


def test_chats_without_a_template_are_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"row is a chat, but .* no chat template; give one by model.chat_template=FILE"):
        encode_row(tokenizer, {"messages": CHAT}, "row", DataConfig())


# ---- the order -------------------------------------------------------------------------------------------------------


def store(folder: Path, lengths: list[int]) -> Store:
    writer = StoreWriter(folder)
    samples = [Sample("", list(range(2, n + 2)), [True] * n) for n in lengths]
    writer.add(Encoded.of([(0, i, 0, s) for i, s in enumerate(samples)]))
    writer.commit(["s"])
    return Store(folder)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> list[Samples]:
    """Samples by count."""
    root = tmp_path_factory.mktemp("stores")
    return [Samples([store(root / str(n), [i % 7 + 2 for i in range(n)])], DataConfig(), BUDGET, ["s"]) for n in range(1, 24)]


def loader(samples: Samples, size: int, rank: int = 0, ranks: int = 1, *, shuffle: bool = True, seed: int = 3) -> Loader:
    order = Order(samples.sizes, weights=None, seed=seed, shuffle=shuffle)
    return Loader(samples, order, batch_size=size, dp_rank=rank, dp_size=ranks, ratio=1e-4)


@settings(deadline=None, max_examples=50)
@given(count=st.integers(1, 23), size=st.integers(1, 9), ranks=st.integers(1, 5), steps=st.integers(1, 12))
def test_order_depends_on_the_seed_alone(many: list[Samples], count: int, size: int, ranks: int, steps: int) -> None:
    """Any number of ranks sees the same batches; each epoch has every sample once; a cursor resumes at the next sample."""
    samples = many[count - 1]
    streams = [loader(samples, size, r, ranks).batches(Cursor()) for r in range(ranks)]
    whole = loader(samples, size).batches(Cursor())
    seen, cursors = [], []
    for _ in range(steps):
        shares = [next(s) for s in streams]
        one, cursor = next(whole)
        assert all(c == cursor for _, c in shares)
        together = sorted(n for batch, _ in shares for n in batch.names or ())
        assert together == sorted(one.names or ())
        seen.append(one.names)
        cursors.append(cursor)
    for at, cursor in enumerate(cursors[:-1]):
        again = loader(samples, size)
        assert next(again.batches(again.restore(json.loads(json.dumps(again.state(cursor))))))[0].names == seen[at + 1]
    per_epoch = -(-count // size)
    if steps >= per_epoch:
        assert sorted(n for names in seen[:per_epoch] for n in names or ()) == sorted(f"s:{i}" for i in range(count))


def order(sizes: list[int], weights: list[float] | None = None, *, seed: int = 3, shuffle: bool = True) -> Order:
    return Order(sizes, weights=weights, seed=seed, shuffle=shuffle)


def test_orders_differ_by_epoch_and_seed_and_follow_the_file_unshuffled(many: list[Samples]) -> None:
    assert order([20]).epoch(0).tolist() != order([20]).epoch(1).tolist()
    assert order([20]).epoch(0).tolist() != order([20], seed=4).epoch(0).tolist()
    assert order([12, 8], shuffle=False).epoch(5).tolist() == list(range(20))
    assert [b.names for b in loader(many[4], 2).once()] == [("s:0", "s:1"), ("s:2", "s:3"), ("s:4",)]


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    seed=st.integers(0, 9),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_weights_are_kept_in_every_epoch_and_no_sample_is_favoured(
    sizes: list[int], seed: int, shuffle: bool, data: st.DataObject
) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 10), min_size=len(sizes), max_size=len(sizes)))
    mixed = order(sizes, weights, seed=seed, shuffle=shuffle)
    starts = np.cumsum([0, *sizes])
    uses = np.zeros(sum(sizes), int)
    for epoch in range(5):
        drawn = mixed.epoch(epoch)
        assert len(drawn) == sum(sizes)
        np.add.at(uses, drawn, 1)
        for (begin, end), weight in zip(pairwise(starts), weights, strict=True):
            share = ((drawn >= begin) & (drawn < end)).sum()
            assert abs(share - sum(sizes) * weight / sum(weights)) < 1
    for begin, end in pairwise(starts):
        assert np.ptp(uses[begin:end]) <= 1
    again = order(sizes, weights, seed=seed, shuffle=shuffle)
    assert again.epoch(3).tolist() == mixed.epoch(3).tolist()


def test_weighted_sources_are_spread_evenly_in_file_order() -> None:
    assert order([4, 4], [3.0, 1.0], shuffle=False).epoch(0).tolist() == [0, 1, 4, 2, 3, 0, 5, 1]


def test_another_order_is_not_resumed(many: list[Samples], caplog: pytest.LogCaptureFixture) -> None:
    mine = loader(many[9], 2)
    state = mine.state(Cursor(epoch=1, position=4))
    assert mine.restore(state) == Cursor(epoch=1, position=4)
    for other, message in (
        (loader(many[8], 2), r"the number of samples = \[10\], now it is \[9\]"),
        (loader(many[9], 2, seed=4), "data.seed = 3, now it is 4"),
        (loader(many[9], 2, shuffle=False), "data.shuffle = True, now it is False"),
    ):
        with pytest.raises(CheckpointError, match=message):
            other.restore(state)
    with pytest.raises(CheckpointError, match="does not say where in the data"):
        mine.restore({})
    assert "contents have changed" not in caplog.text
    mine.restore({**state, "digest": "another"})
    assert "contents have changed" in caplog.text


def test_labels_survive_packing(many: list[Samples]) -> None:
    batch = next(loader(many[0], 1).batches(Cursor()))[0]
    assert batch.labels.tolist() == [3, IGNORE]


def test_held_out_operands_are_not_in_the_training_data() -> None:
    train, held = pairs(0)
    assert len(held) >= 500
    assert len(train) + len(held) == 100 * 100
    assert not {frozenset(p) for p in train} & {frozenset(p) for p in held}
