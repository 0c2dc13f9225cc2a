"""The workers' door: every form that callers hold, there and back, to the number."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from drivetrain.engine.errors import BatchError
from drivetrain.engine.packing.batch import IGNORE
from drivetrain.workers.roles.batch_adapters import adapt_batch as open_any

LENGTHS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=5).filter(
    lambda r: any(n for _, n in r)
)


def tokens_of(row: int, count: int, start: int) -> list[int]:
    return [100 * (row + 1) + start + i for i in range(count)]


def padded(lengths: list[tuple[int, int]], extra: int = 0) -> dict[str, Tensor]:
    """Prompts padded on the left, responses on the right; a field that says of each response token which it is."""
    p, r = max(a for a, _ in lengths) + extra, max(b for _, b in lengths) + extra
    ids, mask = torch.zeros(len(lengths), p + r, dtype=torch.int64), torch.zeros(len(lengths), p + r, dtype=torch.int64)
    field = torch.full((len(lengths), r), float("nan"))
    for row, (a, b) in enumerate(lengths):
        ids[row, p - a : p + b] = torch.tensor(tokens_of(row, a + b, 0))
        mask[row, p - a : p + b] = 1
        field[row, :b] = torch.tensor([float(t) for t in tokens_of(row, b, a)])
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "responses": ids[:, p:],
        "advantages": field,
        "scores": torch.arange(len(lengths)) * 1.0,
    }


def opened(data: Any) -> Any:
    return open_any(data, extra_fields=("scores",))


@settings(deadline=None, max_examples=60)
@given(lengths=LENGTHS, extra=st.integers(0, 2))
def test_padded_rows_and_back(lengths: list[tuple[int, int]], extra: int) -> None:
    data = padded(lengths, extra)
    adapter = opened(data)
    batch = adapter.batch
    assert batch.lengths == [a + b for a, b in lengths]
    assert batch.position_ids.tolist() == [i for a, b in lengths for i in range(a + b)]
    # A number of a response token stands where that token is the label.
    said = batch.token_fields["advantages"]
    learned = batch.labels != IGNORE
    assert torch.equal(said[learned], batch.labels[learned].float())
    assert int(learned.sum()) == sum(b for _, b in lengths)
    assert not said[~learned].any()
    assert batch.sequence_fields["scores"].tolist() == data["scores"].tolist()
    back = adapter.answer({"mine": said})
    wanted = torch.nan_to_num(data["advantages"], nan=0.0)
    assert torch.equal(back["mine"], wanted)
    rows = torch.arange(len(lengths)) * 2.0
    assert torch.equal(adapter.answer_rows({"rows": rows})["rows"], rows)


def jagged(values: list[list[float]], dtype: torch.dtype = torch.int64) -> Any:
    return torch.nested.nested_tensor([torch.tensor(v, dtype=dtype) for v in values], layout=torch.jagged)


@settings(deadline=None, max_examples=30)
@given(lengths=LENGTHS)
def test_the_forms_agree(lengths: list[tuple[int, int]]) -> None:
    data = padded(lengths)
    ids: list[list[float]] = [list(tokens_of(i, a + b, 0)) for i, (a, b) in enumerate(lengths)]
    answers = [row[a:] for row, (a, _) in zip(ids, lengths, strict=True)]
    nested = TensorDict(
        {
            "input_ids": jagged(ids),
            "responses": jagged(answers),
            "advantages": torch.nested.nested_tensor_from_jagged(
                jagged(answers, torch.float32).values(), jagged(answers).offsets()
            ),
            "scores": data["scores"],
        },
        batch_size=[len(lengths)],
    )
    one, other = opened(data), opened(nested)
    assert torch.equal(one.batch.input_ids, other.batch.input_ids)
    assert torch.equal(one.batch.labels, other.batch.labels)
    assert torch.equal(one.batch.token_fields["advantages"], other.batch.token_fields["advantages"])
    assert one.batch.bounds == other.batch.bounds
    back = other.answer({"mine": other.batch.token_fields["advantages"]})
    assert isinstance(back, TensorDict)
    assert back["mine"].offsets().tolist() == nested["responses"].offsets().tolist()
    assert back["mine"].values().tolist() == [x for row in answers for x in row]
    # A packed batch goes through as it is.
    packed = opened(one.batch)
    assert packed.batch.input_ids is one.batch.input_ids
    assert packed.answer({"x": one.batch.labels})["x"] is one.batch.labels
    # The same rows in a TensorDict of padded tensors come back as one.
    dense = opened(TensorDict(data, batch_size=[len(lengths)]))
    again = dense.answer({"mine": dense.batch.token_fields["advantages"]})
    assert isinstance(again, TensorDict)
    assert torch.equal(again["mine"], torch.nan_to_num(data["advantages"], nan=0.0))


def test_a_mask_over_all_columns_and_answers_of_several_turns() -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9, 0], [0, 0, 1, 2, 3, 4]])
    attention = torch.tensor([[1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]])
    own = torch.tensor([[0, 0, 1, 0, 1, 0], [0, 0, 0, 1, 1, 1]])
    adapter = opened({"input_ids": ids, "attention_mask": attention, "response_mask": own})
    assert [x for x in adapter.batch.labels.tolist() if x != IGNORE] == [7, 9, 2, 3, 4]
    back = adapter.answer({"labels": adapter.batch.labels.float()})["labels"]
    assert back.tolist() == [[0, 0, 7, 0, 9, 0], [0, 0, 0, 2, 3, 4]]
    # As wide as the responses it says which of their tokens are the policy's; all of them still have log-probabilities.
    inside = opened({"input_ids": ids, "attention_mask": attention, "response_mask": own[:, 3:]})
    assert [x for x in inside.batch.labels.tolist() if x != IGNORE] == [8, 9, 2, 3, 4]
    assert inside.batch.token_fields["response_mask"].tolist() == [0, 0, 0, 1, 0, 1, 1, 1, 0]
    nested = TensorDict(
        {"input_ids": jagged([[5, 6, 7, 8, 9], [1, 2, 3, 4]]), "response_mask": jagged([[0, 0, 1, 0, 1], [0, 1, 1, 1]])},
        batch_size=[2],
    )
    assert [x for x in opened(nested).batch.labels.tolist() if x != IGNORE] == [7, 9, 2, 3, 4]


GOOD = padded([(2, 3), (1, 2)])


def test_responses_that_stand_elsewhere_are_not_taken_for_none() -> None:
    """Prompt and response against each other, padded on the right: the last columns of a short row are padding."""
    ids = torch.tensor([[1, 2, 8, 9, 0, 0], [1, 2, 3, 4, 8, 9]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    with pytest.raises(BatchError, match=r"row 0: responses are not the last 2 columns .*give response_mask \[B, L\]"):
        opened({"input_ids": ids, "attention_mask": mask, "responses": torch.tensor([[8, 9], [8, 9]])})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantages": torch.zeros(2)}, r"advantages is \[2\]; it must be \[2, 3\]"),
        ({"advantages": torch.zeros(2, 5)}, r"advantages is \[2, 5\]; it must be \[2, 3\]"),
        ({"attention_mask": None}, "need attention_mask"),
        ({"responses": None}, r"need responses \[B, R\]"),
        ({"responses": torch.zeros(2, 9)}, "R <= L"),
        ({"responses": GOOD["input_ids"]}, "there is no prompt"),
        ({"attention_mask": torch.ones(2, 4)}, r"attention_mask is \[2, 4\]"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 1, 0]])}, "has a gap"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 0]])}, "row 1 has no prompt"),
        ({"input_ids": None}, "this is a dict with"),
        ({"input_ids": [[1, 2], [3]]}, "input_ids is a list that cannot be converted to a tensor"),
        ({"input_ids": GOOD["input_ids"].float()}, "input_ids are float32; token ids are integers"),
        ({"input_ids": "text"}, "input_ids is a str; a field must be a tensor"),
        ({"rewards": "text"}, r"rewards is a str; a field must be a tensor; .*declare it: extra_fields=\('rewards',\)"),
        ({"reponse_mask": GOOD["responses"]}, "the field 'reponse_mask', which is never read; did you mean 'response_mask'"),
        ({"importance_weight": GOOD["responses"]}, "did you mean 'importance_weights'"),
        ({"uid": torch.zeros(2)}, r"'uid', which is never read; known fields: advantages.*extra_fields=\('uid',\)"),
        ({"rewards": torch.zeros(2, 1)}, r"rewards is \[2, 1\]; it must be \[2\]"),
        ({"advantages": [["a", "b"], ["c", "d"]]}, r"advantages is a list that cannot be .*extra_fields=\('advantages',\)"),
        ({"responses": GOOD["responses"] + 1}, "row 0: responses are not the last 3 columns"),
        ({"response_mask": torch.tensor([[1, 1, 1], [1, 1, 1]])}, "response_mask is 1 where attention_mask is 0"),
        ({"response_mask": torch.tensor([[1, 1, 0.3], [1, 1, 0]])}, "neither 0 nor 1"),
        ({"attention_mask": torch.full((2, 5), float("nan"))}, "attention_mask has values that are neither 0 nor 1"),
        ({"old_log_probs": [[1.0]]}, r"old_log_probs is \[1, 1\]; it must be \[2, 3\]"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    data = {k: v for k, v in {**GOOD, **change}.items() if v is not None}
    with pytest.raises(BatchError, match=message):
        opened(data)


def test_media_of_rows_are_those_of_their_documents() -> None:
    rows: list[Any] = [
        {"pixel_values": torch.ones(3, 2), "image_grid_thw": np.array([[1, 1, 3]]), "mm_token_type_ids": torch.zeros(1, 5)},
        None,
        {"pixel_values": torch.full((5, 2), 2.0), "image_grid_thw": [[1, 1, 2], [1, 1, 3]]},
    ]
    dense = padded([(2, 3), (1, 2), (3, 1)])
    ids = [row[mask.bool()].tolist() for row, mask in zip(dense["input_ids"], dense["attention_mask"], strict=True)]
    responses = jagged([ids[0][2:], ids[1][1:], ids[2][3:]])
    nested = TensorDict({"input_ids": jagged(ids), "responses": responses}, batch_size=[3])
    forms: list[Any] = [{**dense, "multi_modal_inputs": rows}, {**dense, "multi_modal_inputs": np.array(rows, dtype=object)}]
    for form in (TensorDict({k: v for k, v in dense.items() if k != "scores"}, batch_size=[3]), nested):
        form["multi_modal_inputs"] = NonTensorStack(*map(NonTensorData, rows))
        forms.append(form)
    for form in forms:
        media = opened(form).batch.media
        assert {name: field.counts.tolist() for name, field in media.items()} == {
            "pixel_values": [3, 0, 5],
            "image_grid_thw": [1, 0, 2],
        }
        assert media["pixel_values"].values[:, 0].tolist() == [1.0] * 3 + [2.0] * 5
        assert media["image_grid_thw"].values.tolist() == [[1, 1, 3], [1, 1, 2], [1, 1, 3]]
    wrong: list[tuple[Any, str]] = [
        (rows[:2], "multi_modal_inputs is 2 values for 3 rows"),
        ({"pixel_values": torch.ones(3, 2)}, "multi_modal_inputs is a dict for 3 rows"),
        ([None, torch.ones(2), None], "row 1: multi_modal_inputs is a Tensor"),
        ([None, {"pixel_values": "a.png"}, None], "row 1: pixel_values of multi_modal_inputs is a str, not a tensor"),
        ([None, {"pixel_values": 3.0}, None], "row 1: pixel_values of multi_modal_inputs is a single number"),
        ([rows[0], {"pixel_values": torch.ones(3)}, None], "rows of pixel_values have the shapes"),
    ]
    for value, message in wrong:
        with pytest.raises(BatchError, match=message):
            opened({**dense, "multi_modal_inputs": value})


def test_lists_and_other_integers_are_taken() -> None:
    want = opened(GOOD).batch
    for change in (
        {name: value.tolist() for name, value in GOOD.items()},
        {name: value.numpy() for name, value in GOOD.items()},
        {name: value if value.is_floating_point() else value.int() for name, value in GOOD.items()},
        {"attention_mask": GOOD["attention_mask"].bool().tolist(), "response_mask": GOOD["attention_mask"][:, 2:].tolist()},
    ):
        got = opened({**GOOD, **change}).batch
        assert torch.equal(got.input_ids, want.input_ids)
        assert torch.equal(got.labels, want.labels)
        assert torch.equal(got.token_fields["advantages"].float(), want.token_fields["advantages"])
    for width in (torch.uint8, torch.uint16, torch.int16):
        small = {name: value % 50 if name in ("input_ids", "responses") else value for name, value in GOOD.items()}
        cast = {name: value.to(width) if name in ("input_ids", "responses") else value for name, value in small.items()}
        assert torch.equal(opened(cast).batch.labels, opened(small).batch.labels)
    whole = TensorDict({"input_ids": jagged([[1, 2], [3]], torch.int32), "responses": jagged([[2], []])}, batch_size=[2])
    assert opened(whole).batch.input_ids.dtype == torch.int64
    packed = replace(want, input_ids=want.input_ids.int(), labels=want.labels.int(), cu_seqlens=want.cu_seqlens.long())
    assert (packed.input_ids.dtype, packed.labels.dtype, packed.cu_seqlens.dtype) == (torch.int64, torch.int64, torch.int32)


def test_answers_of_no_tokens_and_batches_of_no_rows() -> None:
    none = {name: value[:, :0] if name in ("responses", "advantages") else value for name, value in GOOD.items()}
    adapter = opened(none)
    assert (adapter.batch.labels == IGNORE).all()
    assert adapter.answer({"log_probs": adapter.batch.labels.float()})["log_probs"].shape == (2, 0)
    empty = opened({name: value[:0] for name, value in GOOD.items()})
    assert empty.batch.num_sequences == 0
    assert empty.answer({"log_probs": torch.zeros(0)})["log_probs"].shape == (0, 3)


def test_extra_fields_are_kept() -> None:
    data = {**GOOD, "uid": torch.tensor([4.0, 5.0]), "source": ["a", "b"], "pixels": torch.zeros(2, 3, 4)}
    with pytest.raises(BatchError, match="'uid'"):
        opened(data)
    odd = {
        "scalar": torch.tensor(1.0),
        "other": torch.zeros(5),
        "ids": torch.zeros(2, 3, dtype=torch.uint16),
        "none": {"a": 1},
    }
    batch = open_any({**data, **odd}, extra_fields=("uid", "source", "pixels", "scores", *odd)).batch
    assert {*batch.token_fields, *batch.sequence_fields} == {"advantages", "uid", "scores", "ids"}
    assert batch.select([1]).sequence_fields["uid"].tolist() == [5.0]
    assert batch.select([1]).extra_fields >= {"uid"}
    # Declared once, they pass every other door; undeclared ones do not.
    assert open_any(batch).batch.extra_fields == batch.extra_fields
    with pytest.raises(BatchError, match=r"'(uid|scores|ids)', which is never read"):
        open_any(replace(batch, extra_fields=frozenset()))
    # A reward function reads all numbers, and what is no number has a way of its own.
    assert "uid" in open_any({k: v for k, v in data.items() if k != "source"}, every=True).batch.sequence_fields
    with pytest.raises(BatchError, match=r"source is a list that cannot be converted to a tensor .*as columns"):
        open_any(data, every=True)
    assert open_any(data, extra_fields=("source",), every=True).batch.extra_fields >= {"uid", "source"}


def test_a_known_field_in_another_place_is_refused() -> None:
    batch = opened(GOOD).batch
    for name in ("response_mask", "importance_weights"):
        with pytest.raises(BatchError, match=f"'{name}', which is never read"):
            opened(batch.with_sequence_fields(**{name: torch.zeros(2)}))
    with pytest.raises(BatchError, match="'margin', which is never read"):
        opened(batch.with_fields(margin=torch.zeros(batch.num_tokens)))
    with pytest.raises(BatchError, match=r"extra_fields='uid'; pass a collection"):
        replace(batch, extra_fields="uid")  # type: ignore[arg-type]
    assert replace(batch, extra_fields=("uid",)).with_extra_fields("x").extra_fields == {"uid", "x"}  # type: ignore[arg-type]


def test_jagged_fields_of_other_borders_are_refused() -> None:
    rows: dict[str, Any] = {"input_ids": jagged([[1, 2, 3], [4, 5]]), "responses": jagged([[3], [5]])}
    with pytest.raises(BatchError, match="advantages has different boundaries"):
        opened(TensorDict({**rows, "advantages": jagged([[1], [1, 2]], torch.float32)}, batch_size=[2]))
    with pytest.raises(BatchError, match="it must be jagged as well"):
        opened(TensorDict({**rows, "advantages": torch.zeros(2)}, batch_size=[2]))
    with pytest.raises(BatchError, match="do not match"):
        opened(TensorDict({**rows, "responses": jagged([[3], [4, 5, 6]])}, batch_size=[2]))
    with pytest.raises(BatchError, match="row 1 has no prompt"):
        opened(TensorDict({**rows, "responses": jagged([[3], [4, 5]])}, batch_size=[2]))
    with pytest.raises(BatchError, match="a batch is a PackedBatch"):
        opened([1, 2])
