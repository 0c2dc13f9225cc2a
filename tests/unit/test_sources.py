"""Where rows come from, how they are tokenised and kept, and how long they may be."""

import csv
import gzip
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordPiece
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from drivetrain.engine.errors import DataError, ModelError
from drivetrain.engine.hf.model_path import check_model_path
from drivetrain.trainers.config.data import DataConfig, PromptsConfig
from drivetrain.trainers.data.dataset import Budget, TokenDataset
from drivetrain.trainers.data.files import _opened
from drivetrain.trainers.data.length_bound import LengthBound
from drivetrain.trainers.data.prompts import load_prompts
from drivetrain.trainers.data.sample import Sample
from drivetrain.trainers.data.sources import open_source
from drivetrain.trainers.data.tokenize import load_token_caches
from drivetrain.trainers.tasks.addition import make_tokenizer, question
from helpers.hub import serve

TOKENIZER = make_tokenizer()
CHAT = [*question(3, 4), {"role": "assistant", "content": "7"}]
BUDGET = Budget(tokens=100, setting="engine.micro_batch.max_tokens=100")


def learned(sample: Sample, tokenizer: Any = TOKENIZER) -> str:
    return str(tokenizer.decode([i for i, s in zip(sample.ids, sample.supervised, strict=True) if s]))


def with_template(template: str) -> Any:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


MARKED = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}<end>{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)


def write_rows(path: Path, rows: list[Any]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


@pytest.fixture
def cache(tmp_path: Path) -> dict[str, Any]:
    return {"cache_dir": str(tmp_path / "cache")}


def load(paths: list[str], cache: dict[str, Any], tokenizer: Any = TOKENIZER, **data: Any) -> TokenDataset:
    config = DataConfig(**{**cache, **data})
    return TokenDataset(load_token_caches(paths, tokenizer, config, training=True), config, BUDGET, paths)


def every(samples: TokenDataset) -> list[Sample]:
    return [samples.document(i, 0) for i in range(len(samples))]


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
    assert samples[1][0].name == f"{jsonl}:2"
    assert samples[5][0].name == f"{folder}/1.json:1"
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
    assert samples.lengths.tolist() == [[len(s.ids)] for s in every(samples)]
    with pytest.raises(DataError, match=r"a.jsonl:2 has 9 tokens, more than data.max_length=6"):
        load([path], cache, max_length=6)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("template", [None, MARKED])
def test_what_certainly_is_too_long_is_not_tokenized(
    template: str | None, tmp_path: Path, cache: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.trainers.data.length_bound.QUICK", 50)
    tokenizer = TOKENIZER if template is None else with_template(template)
    chat = {"messages": [CHAT[0], {"role": "assistant", "content": "1" * 200}]}
    for row in ({"text": "1" * 200}, {"prompt": "1+1=", "completion": "1" * 200}, chat):
        path = write_rows(tmp_path / "a.jsonl", [{"text": "1+1=2"}, row])
        message = r"a.jsonl:2 has at least (199|200|20\d) tokens, more than engine.micro_batch.max_tokens=100; raise it, or set data.too_long"
        with pytest.raises(DataError, match=message):
            load_token_caches([path], tokenizer, DataConfig(**cache), training=True, limit=BUDGET)
        # What is left out is tokenized all the same, so that another limit finds it in the cache.
        config = DataConfig(**cache, too_long="skip")
        caches = load_token_caches([path], tokenizer, config, training=True, limit=BUDGET)
        assert len(TokenDataset(caches, config, BUDGET, [path])) == 1
        assert len(caches[0]) == 2
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": "1+1="}, {"prompt": "1" * 200}])
    with pytest.raises(
        DataError, match=r"p.jsonl:2 has a prompt of at least \d+ tokens, more than engine.micro_batch.max_tokens=100; raise"
    ):
        load_prompts([prompts], tokenizer, PromptsConfig(), BUDGET, training=True)
    assert len(load_prompts([prompts], tokenizer, PromptsConfig(too_long="skip"), BUDGET, training=True)) == 1
    assert load_prompts([prompts], tokenizer, PromptsConfig(too_long="truncate_left"), BUDGET, training=True).longest == 100


def trained(normalizer: Any, splits: Any, model: Any, special: list[str], texts: list[str], size: int) -> Any:
    """A tokenizer of merges that are learned from texts, with a token that takes the white space around it."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splits
    alphabet = pre_tokenizers.ByteLevel.alphabet() if isinstance(splits, pre_tokenizers.ByteLevel) else []
    trainer = BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, limit_alphabet=300, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_tokens([AddedToken("<user>", lstrip=True, rstrip=True, normalized=False)], special_tokens=True)
    fast.add_tokens([AddedToken("ZQZQZQZQ", normalized=True)])
    return fast


def test_a_text_has_at_least_the_tokens_of_the_bound() -> None:
    rng = random.Random(0)
    words = [
        "hello ",
        "world ",
        "-" * 40,
        " " * 30,
        "  <user>   ",
        "1234",
        "é中\u3000文",
        "\U0001f600",
        "\n\n\t",
        "▁▁",
        "x\u0301",
        "<user>" * 3,
    ]
    texts = ["".join(rng.choices(words, k=rng.choice([1, 5, 60]))) for _ in range(60)]
    texts += ["\u3000" * 50 + "<user>", "ZQZQZQZQ" * 50]
    level, bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False), [f"<0x{i:02X}>" for i in range(256)]
    spaces, joined = normalizers.Replace(" ", "▁"), normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    fallback = BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    cases = [
        (trained(None, level, BPE(), [], texts, 400), True),
        (trained(joined, level, BPE(), [], texts, 400), True),
        (trained(normalizers.Lowercase(), level, BPE(), [], texts[:9], 300), True),
        (trained(spaces, pre_tokenizers.Split("▁", "merged_with_next"), fallback, ["<unk>", *bytes_], texts[:9], 600), True),
        (TOKENIZER, True),
        # A word of any length may be one token, and a character without a token none.
        (PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordPiece({"?": 0}, unk_token="?"))), False),
        (trained(None, None, BPE(), [], texts, 400), False),
    ]
    prose = "hello world 1234 " * 500
    for tokenizer, known in cases:
        bound = LengthBound(tokenizer)
        assert all(bound.least(text) <= len(tokenizer(text)["input_ids"]) for text in texts)
        # It is of use where it is known.
        assert (bound.least(prose) > len(tokenizer(prose)["input_ids"]) / 20) == known
        assert bound.least(prose) == 0 or known


@pytest.mark.usefixtures("process_group")
def test_what_counts_is_told(tmp_path: Path, cache: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    a, b = write_rows(tmp_path / "d" / "a.jsonl", ROWS), write_rows(tmp_path / "d" / "b.jsonl", ROWS)
    (tmp_path / "d" / "link.jsonl").symlink_to(a)
    other = f"{tmp_path}/d/../d/a.jsonl"
    for names, told in (
        ([a, b], ""),
        ([a, a], f"data.train has {a} twice, as {a}: its samples are used that many times per epoch"),
        ([a, other], f"data.train has {a} twice, as {a} and {other}: its samples are used that many times per epoch"),
        (
            [a, str(tmp_path / "d")],
            f"data.train has {a} twice, as {a} and {tmp_path / 'd'}: its samples are used that many times per epoch",
        ),
        (
            [str(tmp_path / "d")],
            f"data.train has {a} twice, as {tmp_path / 'd'}: its samples are used that many times per epoch",
        ),
    ):
        caplog.clear()
        load(names, cache)
        assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == ([told] if told else [])
    caplog.clear()
    row = {"prompt": "1+1=", "question": "2+2=", "completion": "4"}
    mapped = write_rows(tmp_path / "c.jsonl", [row, row])
    (first, _) = every(load([mapped], cache, columns={"prompt": "question"}))
    assert TOKENIZER.decode(first.ids) == "2+2=4<end>"
    assert (
        f"{mapped}:1: its column 'prompt' is not used, because data.columns.prompt=question (and 1 more rows)" in caplog.text
    )
    caplog.clear()
    load_prompts([mapped, mapped], TOKENIZER, PromptsConfig(columns={"prompt": "question"}), BUDGET, training=False)
    assert "its column 'prompt' is not used" in caplog.text
    assert f"data.eval has {mapped} twice" in caplog.text


@pytest.mark.usefixtures("process_group")
def test_files_of_all_kinds_hold_the_same_rows(tmp_path: Path, cache: dict[str, Any]) -> None:
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(600)]
    plain = write_rows(tmp_path / "a.jsonl", rows)
    content = Path(plain).read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    with pyarrow.CompressedOutputStream(str(tmp_path / "a.jsonl.zst"), "zstd") as out:
        out.write(content)
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        with open(tmp_path / name, "w", newline="") as file:
            writer = csv.DictWriter(file, ["prompt", "completion"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    wanted = [(s.ids, s.supervised) for s in every(load([plain], cache))]
    assert len(wanted) == 600
    for name in ("a.jsonl.gz", "a.jsonl.zst", "a.csv", "a.tsv", "a.csv.gz", "a.json"):
        assert [(s.ids, s.supervised) for s in every(load([str(tmp_path / name)], cache))] == wanted, name
    # A pattern and a folder take all of them.
    (tmp_path / "LICENSE.txt").write_text("not data")
    elsewhere = {"cache_dir": str(tmp_path.parent / "other-cache")}
    shutil.rmtree(tmp_path / "cache")
    assert len(load([str(tmp_path / "a.*")], elsewhere)) == 7 * 600 == len(load([str(tmp_path)], elsewhere))
    assert len(load([str(tmp_path / "a.jsonl*")], elsewhere)) == 3 * 600
    # A row is named by the line where an editor shows it, the header counted.
    assert every(load([str(tmp_path / "a.csv")], elsewhere))[0].name.endswith("a.csv:2")


@pytest.mark.usefixtures("process_group")
def test_texts_are_lines_or_files(tmp_path: Path, cache: dict[str, Any]) -> None:
    file = tmp_path / "a.txt"
    file.write_text("1+2=3\r\n\n4+4=8")
    lines = every(load([str(file)], cache))
    assert [TOKENIZER.decode(s.ids) for s in lines] == ["1+2=3<end>", "4+4=8<end>"]
    assert [s.name for s in lines] == [f"{file}:1", f"{file}:3"]
    (whole,) = every(load([str(file)], cache, txt="file"))
    assert len(whole.ids) > sum(len(s.ids) for s in lines) - 1


@pytest.mark.usefixtures("process_group")
def test_cells_of_a_csv_may_be_chats(tmp_path: Path, cache: dict[str, Any]) -> None:
    with open(tmp_path / "a.csv", "w", newline="") as file:
        csv.writer(file).writerows([["messages"], [json.dumps(CHAT)]])
    (sample,) = every(load([str(tmp_path / "a.csv")], cache))
    assert learned(sample) == "7<end>"


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("table", [False, True])
def test_columns_may_have_other_names(table: bool, tmp_path: Path, cache: dict[str, Any]) -> None:
    rows = [{"question": "1+2=", "solution": "3", "text": "9", "other": 1}]
    name = write_rows(tmp_path / "a.jsonl", rows)
    if table:
        name = str(tmp_path / "a.parquet")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), name)
    (sample,) = every(load([name], cache, columns={"prompt": "question", "completion": "solution"}))
    assert (TOKENIZER.decode(sample.ids), learned(sample)) == ("1+2=3<end>", "3<end>")
    # Other names are other data: the cache of the names before is not taken for it.
    (text,) = every(load([name], cache))
    assert learned(text) == "9<end>"


@pytest.mark.usefixtures("process_group")
def test_a_long_text_is_split_and_nothing_of_it_is_lost(tmp_path: Path, cache: dict[str, Any]) -> None:
    texts = ["1" * 25, "2" * 9, "3" * 20]
    path = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    samples = every(load([path], cache, too_long="split", max_length=10))
    assert [len(s.ids) for s in samples] == [10, 10, 6, 10, 10, 10, 1][: len(samples)]
    whole = [s.ids for s in every(load([path], cache))]
    pieces = [i for s in samples for i in s.ids]
    # A last piece of one token has nothing to predict.
    assert pieces == [i for ids in whole for i in ids][: len(pieces)]
    assert len(pieces) >= sum(map(len, whole)) - 1
    chat = write_rows(tmp_path / "b.jsonl", [{"messages": [{"role": "user", "content": "1" * 30}, CHAT[-1]]}])
    (rest,) = every(load([chat], cache, too_long="split", max_length=10))
    assert learned(rest).endswith("7<end>")


@pytest.mark.usefixtures("process_group")
def test_what_is_learned_can_be_chosen(tmp_path: Path, cache: dict[str, Any]) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"messages": [*CHAT, *question(1, 1), {"role": "assistant", "content": "2"}]}])
    for train_on, wanted in (("completions", "7<end>2<end>"), ("last_completion", "2<end>")):
        (sample,) = every(load([path], cache, train_on=train_on))
        assert learned(sample) == wanted
    (sample,) = every(load([path], cache, train_on="all"))
    assert learned(sample) == TOKENIZER.decode(sample.ids)


@pytest.mark.usefixtures("process_group")
def test_rows_that_are_probably_mistakes_are_told_once(
    tmp_path: Path, cache: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    user, answer = question(3, 4)[0], CHAT[-1]
    lines = [json.dumps({"messages": [user, user, answer]}), json.dumps({"messages": [user, answer, answer]})]
    calls = [
        user,
        {"role": "assistant", "content": "1"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        answer,
    ]
    doubled = f'{{"text": "1", "text": "{"2" * 5}"}}'
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps({"messages": CHAT}), *lines, json.dumps({"messages": calls})]))
    (tmp_path / "b.jsonl").write_text(doubled)
    with caplog.at_level("WARNING", "drivetrain"):
        load([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], cache)
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"{tmp_path}/a.jsonl:2: messages 1 and 2 of messages both have the role 'user' (and 1 more rows)",
        f"{tmp_path}/b.jsonl:1: the key 'text' occurs twice; the last one is used",
    ]


@pytest.mark.usefixtures("process_group")
def test_what_truncation_leaves_nothing_of_is_left_out(
    tmp_path: Path, cache: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows(
        tmp_path / "a.jsonl", [{"prompt": "1+1=", "completion": "2"}, {"prompt": "111+111=", "completion": "222"}]
    )
    assert len(load([path], cache, max_length=6, too_long="truncate_right")) == 1
    assert "left out: 1 samples" in caplog.text
    with pytest.raises(DataError, match=r"no sample of .*a.jsonl is left to train on"):
        load([path], cache, max_length=3, too_long="truncate_right")


@pytest.mark.usefixtures("process_group")
def test_tokenised_data_is_kept_and_made_again_when_anything_changes(
    tmp_path: Path, cache: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "drivetrain")
    path = write_rows(tmp_path / "a.jsonl", ROWS)

    def made() -> bool:
        told = "tokenized" in caplog.text
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
    # A file of it is damaged, or cut short: it is not taken at its name.
    for name, content in (("ids", b"x" * 24 * 4), ("supervised", b"x")):
        (store,) = [f for f in Path(cache["cache_dir"]).iterdir() if (f / "lengths").stat().st_size == 4 * 4]
        (store / name).write_bytes(content)
        assert [learned(s) for s in every(load([path], cache))] == ["2<end>", "4<end>"] * 2
        assert made()
    assert not [f for f in Path(cache["cache_dir"]).iterdir() if f.name.startswith(".tmp")]


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
def test_processes_tokenise_as_one_does(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(1500)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    alone = load([path], {"cache_dir": str(tmp_path / "alone")}, workers=0)
    several = load([path], {"cache_dir": str(tmp_path / "several")}, workers=2)
    assert alone.digest == several.digest
    assert several[1000][0].name == f"{path}:1001"
    write_rows(tmp_path / "a.jsonl", [*rows, {"prompt": "1", "completion": ""}])
    with pytest.raises(DataError, match=r"a.jsonl:1501: the completion is empty"):
        load([path], {"cache_dir": str(tmp_path / "several")}, workers=2)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no rows"),
        (
            '{"picture": "x"}\n',
            "a.jsonl:1 has the columns picture; it needs messages, or prompt and completion, or conversations",
        ),
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
    (tmp_path / "a.xml").write_text("<a/>")
    (tmp_path / "b.json").write_text('{"text": "x"}\n{"text": "y"}\n')
    (tmp_path / "c.parquet").write_text("no parquet")
    for name, message in (
        ("nowhere.jsonl", "data file nowhere.jsonl does not exist"),
        (str(tmp_path / "empty"), "has no .jsonl, .json, .parquet, .csv, .tsv, .txt files, .*; it is empty"),
        (str(tmp_path / "a.xml"), "is a .xml; use"),
        ("nobody/nothing", "is not a file or folder, and loading it as a Hugging Face Hub dataset failed"),
    ):
        with pytest.raises(DataError, match=message):
            open_source(name, training=True)
    for file, message in (
        ("b.json", "is not JSON: .*; a file with one object per line must end in .jsonl"),
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
for name, training, streaming in json.loads(sys.argv[1]):
    try:
        source = open_source(name, training=training, streaming=streaming)
        found.append([row for chunk in source.chunks() for row in chunk.rows])
    except Exception as e:
        found.append(f"{type(e).__name__}: {e}")
print(json.dumps(found))
"""


@pytest.mark.usefixtures("process_group")
def test_a_tables_nulls_are_no_keys(tmp_path: Path, cache: dict[str, Any]) -> None:
    """Rows of a table all have the keys that any has; the template sees those of the row alone, as from a jsonl file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"messages": CHAT, "tools": [{"name": "5"}]},
        {"messages": [{**CHAT[0], "name": "6"}, CHAT[1]], "tools": [{"sign": "="}]},
    ]
    tokenizer = with_template(
        "{% for t in tools %}{% for k in t %}{{ t[k] }}{% endfor %}{% endfor %}" + str(TOKENIZER.chat_template)
    )
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    paths = [write_rows(tmp_path / "a.jsonl", rows), str(tmp_path / "a.parquet")]
    one, two, three, four = (s.ids for s in every(load(paths, cache, tokenizer)))
    assert (one, two) == (three, four)
    pq.write_table(pa.Table.from_pylist([{"prompt": "1", "answer": "2"}]), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b.parquet has the columns prompt, answer; it needs"):
        load([str(tmp_path / "b.parquet")], cache)


ENDLESS = """
import sys
from drivetrain.engine.parallel.process_groups import init_distributed
from drivetrain import DataConfig
from drivetrain.trainers.config.data import PromptsConfig
from drivetrain.trainers.tasks.addition import make_tokenizer
from drivetrain.trainers.data.tokenize import load_token_caches
if __name__ == "__main__":
    init_distributed()
    load_token_caches([sys.argv[1]], make_tokenizer(), DataConfig(cache_dir=sys.argv[2], workers=2), training=True)
"""


@pytest.mark.slow
def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "1", "completion": "2"}] * 400_000)
    (tmp_path / "program.py").write_text(ENDLESS)
    words = [sys.executable, str(tmp_path / "program.py"), path, str(tmp_path / "cache")]
    with open(tmp_path / "said", "w") as said:
        parent = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=said)
    try:
        workers = waited(lambda: found if len(found := forked(parent.pid)) == 2 and made(tmp_path / "cache") else None)
        # Nothing that could be left in the shared memory, such as named semaphores.
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in (parent.pid, *workers)]
        assert not any("/dev/shm" in places for places in maps)
    finally:
        parent.kill()
        parent.wait()
    assert waited(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    assert (tmp_path / "said").read_text() == ""


def children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def forked(parent: int) -> list[int]:
    """The processes of a program's server of forks."""
    return [grandchild for child in children(parent) for grandchild in children(child)]


def made(folder: Path) -> bool:
    """Whether samples have arrived."""
    return any(f.stat().st_size for f in folder.glob(".tmp-*/ids"))


def waited(check: Any) -> Any:
    for _ in range(600):
        if found := check():
            return found
        time.sleep(0.1)
    raise AssertionError("nothing happened in a minute")


@pytest.mark.slow
def test_data_sets_of_the_hub(tmp_path: Path) -> None:
    files = {"train.jsonl": b'{"text": "1"}\n{"text": "2"}\n', "test.jsonl": b'{"text": "3"}\n', "README.md": CARD}
    asked = [
        ("org/some", True, False),
        ("org/some:test", False, False),
        ("org/some/default:train[1:]", True, False),
        ("org/some", False, False),
        ("org/some:nix", True, False),
        ("org/other", True, False),
        ("org/some", True, True),
        ("org/some/default:test", True, True),
        ("org/some:nix", True, True),
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
    whole, test, part, unnamed, no_split, no_name, streamed, streamed_test, streamed_no_split = json.loads(
        done.stdout.splitlines()[-1]
    )
    assert whole == [[1, {"text": "1"}], [2, {"text": "2"}]]
    assert test == [[1, {"text": "3"}]]
    assert part == [[1, {"text": "2"}]]
    assert unnamed == "DataError: dataset org/some has the splits train, test; name one, for example org/some:test"
    assert 'Unknown split "nix". Should be one of' in no_split
    assert (streamed, streamed_test) == (whole, test)
    assert (
        "DataError: org/some:nix is not a file or folder, and loading it as a Hugging Face Hub dataset failed"
        in streamed_no_split
    )
    assert "DataError: org/other is not a file or folder, and loading it as a Hugging Face Hub dataset failed" in no_name


@pytest.mark.usefixtures("process_group")
def test_chats_whose_answers_came_apart_are_counted(tmp_path: Path, cache: dict[str, Any]) -> None:
    chat = [*CHAT, *question(10, 5), {"role": "assistant", "content": "15"}]
    path = write_rows(tmp_path / "a.jsonl", [{"messages": chat}, {"messages": CHAT}])
    apart = load([path], cache, turns="per_turn")
    assert [s.name for s in every(apart)] == [f"{path}:1 (completion 1)", f"{path}:1 (completion 2)", f"{path}:2"]
    assert (apart.sizes, apart.split_chats) == ([3], [1])
    assert load([path], cache).split_chats == [0]


def test_a_data_set_of_a_hub_out_of_reach_is_refused_after_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import datasets

    asked: list[str] = []

    def load_dataset(name: str, *_: Any, **__: Any) -> Any:
        asked.append(name)
        return {"train": datasets.Dataset.from_list([{"text": "1"}])}

    # Nothing listens at the first port. The library would try six times.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for module in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(f"{module}.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(
        DataError, match=r"^org/some is not a file or folder, and .* the Hub cannot be reached from here \(.*\)"
    ) as found:
        open_source("org/some", training=True)
    assert "\n" not in str(found.value)
    with pytest.raises(
        ModelError, match=r"model.path=org/some: there is no such folder, .* the Hub cannot be reached from here"
    ):
        check_model_path("org/some")
    assert not asked
    # A copy is used, which a line says.
    (tmp_path / "org___some").mkdir()
    assert [len(chunk.rows) for chunk in open_source("org/some", training=True).chunks()] == [1]
    assert asked == ["org/some"]
    assert f"its copy in {tmp_path / 'org___some'} is used" in caplog.text
    # Where the Hub answers, the library is asked for its data set.
    with serve("org/none", {}) as address:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        open_source("org/none", training=True)
    assert asked == ["org/some", "org/none"]


@pytest.mark.parametrize("error", [ValueError(), OSError("\n"), OSError("two\nlines")])
def test_an_error_without_a_message_is_named(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> Any:
        raise error

    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(DataError, match=rf"loading it as a Hugging Face Hub dataset failed: {reason}$"):
        open_source("org/some", training=True)
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(b"{}"))
    if isinstance(error, OSError):
        with pytest.raises(DataError, match=rf"is not gzip data, or is damaged: {reason}$"), _opened(file):
            raise error
