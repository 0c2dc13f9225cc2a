"""Preference data: every form that it comes in, what is refused, and pairs that stay together."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.engine.errors import DataError
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.packing.microbatch import balance, partition
from drivetrain.losses.sequences import CHOSEN, MARGIN
from drivetrain.trainers.config.data import DataConfig
from drivetrain.trainers.config.parse import parse
from drivetrain.trainers.config.runs import DPOConfig
from drivetrain.trainers.data.dataset import Budget, TokenDataset
from drivetrain.trainers.data.encode import DataKind, encode_row
from drivetrain.trainers.data.loader import GlobalBatch, Loader
from drivetrain.trainers.data.order import Sampler
from drivetrain.trainers.data.preference import split_preference
from drivetrain.trainers.data.sample import Sample
from drivetrain.trainers.data.tokenize import load_token_caches
from drivetrain.trainers.methods.preference import PreferenceMethod, mismatched
from drivetrain.trainers.tasks.addition import make_tokenizer

TOKENIZER = make_tokenizer()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def encoded(row: dict[str, Any], kind: DataKind = "pairs", **data: Any) -> list[Sample]:
    return encode_row(TOKENIZER, row, "f.jsonl:3", DataConfig(**data), kind)


def texts(samples: list[Sample]) -> list[tuple[str, str]]:
    """Of each document the prompt and what is learned."""
    found = []
    for s in samples:
        begin = list(s.supervised).index(True)
        assert all(s.supervised[begin:])
        found.append((TOKENIZER.decode(s.ids[:begin]), TOKENIZER.decode(s.ids[begin:])))
    return found


WANTED = [("<user>3+4=<assistant>", "7<end>"), ("<user>3+4=<assistant>", "8<end>")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [user("3+4=")], "chosen": [answer("7")], "rejected": [answer("8")]},
        {"chosen": [user("3+4="), answer("7")], "rejected": [user("3+4="), answer("8")]},
        {"prompt": None, "chosen": [user("3+4="), answer("7")], "rejected": [user("3+4="), answer("8")], "label": None},
    ],
)
def test_chats_with_the_prompt_apart_and_inside(row: dict[str, Any]) -> None:
    samples = encoded(row)
    assert texts(samples) == WANTED
    assert [s.chosen for s in samples] == [True, False]


def test_texts_with_the_prompt_apart_and_inside() -> None:
    assert texts(encoded({"prompt": "3+4=", "chosen": "7", "rejected": "85"})) == [("3+4=", "7<end>"), ("3+4=", "85<end>")]
    # No word is cut in two, and a word keeps the space before it.
    sides = split_preference({"chosen": "Q: how many? A: seven.", "rejected": "Q: how many? A: several."}, "row")
    assert (sides.prompt, sides.chosen, sides.rejected) == ("Q: how many? A:", " seven.", " several.")
    sides = split_preference({"chosen": "Human: a\n\nAssistant:\nyes", "rejected": "Human: a\n\nAssistant:\nno"}, "row")
    assert (sides.prompt, sides.chosen, sides.rejected) == ("Human: a\n\nAssistant:\n", "yes", "no")
    # A question under a name that nobody reads must not be lost without a word.
    with pytest.raises(
        DataError, match=r"row: chosen and rejected have no word in common at the beginning, so there is no prompt"
    ):
        split_preference({"question": "well?", "chosen": "yes", "rejected": "no"}, "row")
    sides = split_preference({"prompt": "", "chosen": "yes", "rejected": "no"}, "row")
    assert (sides.prompt, sides.chosen, sides.rejected) == ("", "yes", "no")


def test_pairs_of_many_turns_compare_all_answers_after_the_prompt() -> None:
    turns = [user("1+1="), answer("2"), user("2+2=")]
    both = encoded({"prompt": turns, "chosen": [answer("4"), user("5"), answer("6")], "rejected": [answer("5")]})
    chosen = both[0]
    learned = TOKENIZER.decode([t for t, s in zip(chosen.ids, chosen.supervised, strict=True) if s])
    assert learned == "4<end>6<end>"
    assert texts(both[1:]) == [("<user>1+1=<assistant>2<end><user>2+2=<assistant>", "5<end>")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1=", "chosen": "2", "rejected": "2"},
        {"chosen": [user("1"), answer("2")], "rejected": [user("1"), answer("2")]},
        {"prompt": [user("1")], "chosen": [answer("2")], "rejected": [answer("2")]},
    ],
)
def test_equal_sides_make_no_sample(row: dict[str, Any]) -> None:
    assert encoded(row) == []


def test_single_answers_for_kto() -> None:
    (good,) = encoded({"prompt": "1=", "completion": "2", "label": True}, "unpaired")
    (bad,) = encoded({"prompt": [user("1")], "completion": [answer("2")], "label": False}, "unpaired")
    assert (good.chosen, bad.chosen) == (True, False)
    assert texts([good, bad]) == [("1=", "2<end>"), ("<user>1<assistant>", "2<end>")]
    assert [s.chosen for s in encoded({"prompt": "1=", "chosen": "2", "rejected": "3"}, "unpaired")] == [True, False]


@pytest.mark.parametrize(
    ("row", "kind", "message"),
    [
        ({"prompt": "1", "chosen": "2"}, "pairs", "it needs chosen and rejected"),
        ({"prompt": "1", "chosen": "2", "rejected": None}, "pairs", r"rejected \(null\); it needs chosen and rejected"),
        ({"prompt": "1", "chosen": "2", "rejected": ""}, "pairs", "rejected has nothing beyond the prompt"),
        ({"chosen": [user("1")], "rejected": [user("1"), answer("2")]}, "pairs", "chosen has nothing beyond the prompt"),
        ({"chosen": [answer("1")], "rejected": [answer("2")]}, "pairs", "no message in common"),
        ({"prompt": "1", "chosen": [answer("2")], "rejected": "3"}, "pairs", "mixes texts and messages"),
        ({"prompt": "1", "chosen": 2, "rejected": "3"}, "pairs", "chosen is a int; it must be text"),
        ({"prompt": "1", "chosen": "2", "rejected": "3", "margin": "big"}, "pairs", "margin is 'big'"),
        ({"prompt": [user("1")], "chosen": [user("2")], "rejected": [answer("3")]}, "pairs", r"f.jsonl:3 \(chosen\)"),
        ({"messages": [user("1"), answer("2")]}, "pairs", "it needs chosen and rejected"),
        ({"prompt": "1", "chosen": "2", "rejected": "3"}, "completions", "use it with drivetrain dpo or rm"),
        ({"prompt": "1", "completion": "2", "label": "yes"}, "unpaired", "label is 'yes'; it must be true"),
        ({"prompt": "1", "completion": "2", "label": True}, "pairs", "use them with drivetrain dpo and dpo.loss=kto"),
        ({"messages": [user("1"), answer("2")]}, "unpaired", "use them with drivetrain sft"),
        ({"prompt": "1", "completion": "2"}, "unpaired", "it needs chosen and rejected, or prompt and completion and label"),
    ],
)
def test_what_is_no_preference_is_refused_by_its_row(row: dict[str, Any], kind: DataKind, message: str) -> None:
    with pytest.raises(DataError, match=message):
        encoded(row, kind)


# ---- stores, samples and batches ----------------------------------------------------------------------------------------


def load(path: Path, rows: list[dict[str, Any]], tokens: int = 100, kind: DataKind = "pairs", **data: Any) -> TokenDataset:
    path.mkdir(exist_ok=True)
    file = path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(train=(str(file),), cache_dir=str(path / "cache"), **data)
    budget = Budget(tokens=tokens, setting=f"engine.micro_batch.max_tokens={tokens}")
    stores = load_token_caches([str(file)], TOKENIZER, config, training=True, kind=kind)
    return TokenDataset(stores, config, budget, [str(file)])


def row(prompt: str, chosen: str, rejected: str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


@pytest.mark.usefixtures("process_group")
def test_a_pair_is_a_sample_and_equal_ones_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [row("1=", "22", "3", margin=0.5), row("2=", "1", "1"), row("3=", "4", "555"), row("4=", "5", "5")]
    for _ in range(2):
        # The second time from the cache.
        caplog.clear()
        samples = load(tmp_path, rows)
        assert (
            f"left out of {tmp_path}/pairs.jsonl: 2 pairs with equal sides, the first is {tmp_path}/pairs.jsonl:2"
            in caplog.text
        )
    assert len(samples) == 2
    assert samples.lengths.tolist() == [[5, 4], [4, 6]]
    assert [s.name.rpartition("/")[2] for s in samples[1]] == ["pairs.jsonl:3 (chosen)", "pairs.jsonl:3 (rejected)"]
    (drawn,) = Loader(samples, Sampler([2], weights=None, seed=0, shuffle=False), batch_size=2).once()
    batch = drawn.shard(0, 1, 0.0).batch
    assert batch.sequence_fields[CHOSEN].tolist() == [1, 0, 1, 0]
    assert batch.sequence_fields[MARGIN].tolist() == [0.5, 0.5, 0, 0]
    assert batch.group_ids is not None
    assert batch.group_ids.tolist() == [0, 0, 1, 1]
    with pytest.raises(DataError, match="all of its pairs have equal sides"):
        load(tmp_path / "none", rows[1:2])


def all_of(samples: TokenDataset) -> list[tuple[Sample, ...]]:
    return [samples[i] for i in range(len(samples))]


LONG = [row("1=", "2" * 10, "3"), row("4444444444=", "5", "66"), row("7=", "8", "9")]


@pytest.mark.usefixtures("process_group")
def test_long_pairs_are_refused_skipped_or_cut_as_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"pairs.jsonl:1 \(chosen\) has 13 tokens, more than data.max_length=8; raise it"):
        load(tmp_path, LONG, max_length=8)
    assert [s[0].name.rpartition(":")[2] for s in all_of(load(tmp_path, LONG, max_length=8, too_long="skip"))] == [
        "3 (chosen)"
    ]
    right = load(tmp_path, LONG, max_length=12, too_long="truncate_right")
    assert [[TOKENIZER.decode(d.ids) for d in s] for s in all_of(right)][:2] == [
        ["1=2222222222", "1=3<end>"],
        ["4444444444=5", "4444444444=6"],
    ]
    # Both sides lose the same part of the prompt; a pair of which a side would lose its answer is left out.
    left = load(tmp_path, LONG, max_length=8, too_long="truncate_left")
    assert [[TOKENIZER.decode(d.ids) for d in s] for s in all_of(left)] == [
        ["4444=5<end>", "4444=66<end>"],
        ["7=8<end>", "7=9<end>"],
    ]
    # Without a length it is the micro-batch that both sides share.
    with pytest.raises(
        DataError,
        match=r"two sides of .*pairs.jsonl:1 \(chosen\) have 17 tokens together, .*more than engine.micro_batch.max_tokens=16; raise",
    ):
        load(tmp_path, LONG, tokens=16)
    assert len(load(tmp_path, LONG[2:], tokens=8)) == 1


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(2, 20), st.integers(2, 20)), min_size=1, max_size=12),
    ranks=st.integers(1, 4),
    budget=st.integers(40, 80),
)
def test_no_share_and_no_micro_batch_splits_a_pair(lengths: list[tuple[int, int]], ranks: int, budget: int) -> None:
    flat = [n for pair in lengths for n in pair]
    drawn = GlobalBatch(
        lengths=flat, read=lambda i: Sample(str(i), [1] * flat[i], [True] * flat[i], i % 2 == 0), width=2, compared=True
    )
    seen = []
    for rank in range(ranks):
        share = drawn.shard(rank, ranks, 1e-3)
        assert [p for p in share.positions if p % 2 == 0] == [p - 1 for p in share.positions if p % 2]
        seen += share.positions
        parts = partition(share.batch.lengths, budget, groups=share.batch.groups())
        for part in parts:
            groups = [share.batch.groups()[i] for i in part]
            assert all(groups.count(g) == 2 for g in groups)
    assert sorted(seen) == list(range(len(flat)))
    # The control: without groups a pair does come apart.
    if len(lengths) == 1 and ranks == 2:
        assert balance(flat, 2) == [[0], [1]] or balance(flat, 2) == [[1], [0]]


def test_kto_pairs_each_prompt_with_the_answer_before() -> None:
    documents = [Sample(str(i), [10 + i, 20 + i, 30 + i], [False, True, True], True) for i in range(3)]
    others = mismatched(GlobalBatch(lengths=[3, 3, 3], read=lambda i: documents[i]), 100)
    assert [list(others.read(i).ids) for i in range(3)] == [[10, 22, 32], [11, 20, 30], [12, 21, 31]]
    cut = mismatched(GlobalBatch(lengths=[3, 3, 3], read=lambda i: documents[i]), 2)
    assert cut.lengths == [2, 2, 2]
    assert from_lists([cut.read(0).ids], supervised=[cut.read(0).supervised]).labels.tolist() == [22, -100]


def test_kto_takes_no_answer_to_the_same_question() -> None:
    """Two sides of a pair stand beside each other; a batch of one question has no mismatched answer."""
    documents = [Sample(str(i), [10 + i // 2, 20 + i, 30 + i], [False, True, True], i % 2 == 0) for i in range(4)]
    others = mismatched(GlobalBatch(lengths=[3] * 4, read=lambda i: documents[i]), 100)
    assert [list(others.read(i).ids) for i in range(4)] == [[10, 23, 33], [10, 23, 33], [11, 21, 31], [11, 21, 31]]
    assert len(mismatched(GlobalBatch(lengths=[3, 3], read=lambda i: documents[i]), 100)) == 0


def test_documents_of_kto_fit_the_layouts_of_both_models() -> None:
    words = ["model.path=/tmp", "data.train=[x.jsonl]", "dpo.loss=kto", "engine.micro_batch.max_tokens=9"]
    layouts = ["engine.parallel.cp=2", "reference.backend=mcore", "reference.parallel.cp=3"]
    assert PreferenceMethod(parse(DPOConfig, words, ""))._longest == 9
    # Both 2 and 3 must divide the number of tokens of a micro-batch.
    assert PreferenceMethod(parse(DPOConfig, [*words, *layouts], ""))._longest == 6
    assert PreferenceMethod(parse(DPOConfig, [*words, *layouts, "data.max_length=5"], ""))._longest == 5


@pytest.mark.parametrize(
    ("label", "chosen"),
    [(True, True), (False, False), (1, True), (0.0, False), (1.0, True), ("true", True), ("False", False), ("0", False)],
)
def test_labels_of_single_answers_may_be_of_several_kinds(label: Any, chosen: bool) -> None:
    row = {"prompt": "1+1=", "completion": "2", "label": label}
    (sample,) = encode_row(make_tokenizer(), row, "a.csv:2", DataConfig(), "unpaired")
    assert sample.chosen is chosen


@pytest.mark.parametrize("label", [2, "yes", "", float("nan"), 0.5])
def test_other_labels_are_refused(label: Any) -> None:
    row = {"prompt": "1+1=", "completion": "2", "label": label}
    with pytest.raises(DataError, match=r"a.csv:2: label is .*; it must be true \(a good completion\) or false"):
        encode_row(make_tokenizer(), row, "a.csv:2", DataConfig(), "unpaired")
