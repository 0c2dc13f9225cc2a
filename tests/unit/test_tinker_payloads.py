"""The datums of requests of the training service: matrices that may be sparse, and what is wrong with them."""

from typing import Any

import numpy as np
import pytest

from drivetrain.engine.config import ModelConfig
from drivetrain.engine.errors import BatchError
from drivetrain.losses.token_sums import TokenSumLoss
from drivetrain.serve.tinker import messages, payloads, sample_answers
from drivetrain.serve.tinker.chunks import ModelImages
from drivetrain.serve.tinker.json_requests import TokenMatrix
from drivetrain.serve.tinker.payloads import batches_of, dense, dense_size, parse_forward_backward
from drivetrain.serve.tinker.sample_answers import asked_targets
from drivetrain.serve.tinker.training_queue import ModelQueue, QueuedRequest
from helpers.tinker_service import forward_backward

LOSS = TokenSumLoss("cross_entropy")
TEXT_ALONE = ModelImages(ModelConfig(path="tiny"), None)
DATUM = {"tokens": [1, 2], "target_tokens": [[0, 5, 0], [7, 0, 9]], "weights": [[0.0, 1.0, 0.0], [2.0, 0.0, -1.0]]}


def request(datum: dict[str, Any] = DATUM, *, sparse: bool = True) -> Any:
    return parse_forward_backward(forward_backward("m", 1, [datum], sparse=sparse))


def indices(*values: int) -> bytes:
    return np.asarray(values, dtype="<i8").tobytes()


def test_a_sparse_matrix_is_the_dense_one() -> None:
    for sparse in (False, True):
        (batch,) = batches_of(request(sparse=sparse).data, LOSS, 8, TEXT_ALONE)
        assert batch.token_fields["targets"].tolist() == DATUM["target_tokens"]
        assert batch.token_fields["loss_weights"].tolist() == DATUM["weights"]
        assert batch.labels.tolist() == [0, 7]


def test_datums_in_a_row_with_as_many_targets_are_one_batch() -> None:
    one: dict[str, Any] = {"tokens": [1], "target_tokens": [3], "weights": [1.0]}
    data = [parse_forward_backward(forward_backward("m", 1, [d])).data[0] for d in (one, one, DATUM, DATUM, one)]
    batches = batches_of(data, LOSS, 8, TEXT_ALONE)
    assert [(batch.lengths, batch.names) for batch in batches] == [
        ([1, 1], ("datum 0", "datum 1")),
        ([2, 2], ("datum 2", "datum 3")),
        ([1], ("datum 4",)),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"crow_indices": indices(0, 1)}, "not a sparse matrix"),
        ({"crow_indices": indices(0, 1, 4)}, "not a sparse matrix"),
        ({"crow_indices": indices(1, 1, 3)}, "not a sparse matrix"),
        ({"crow_indices": indices(0, 9, 3)}, "not a sparse matrix"),
        ({"crow_indices": indices(0, -(2**63), 3)}, "not a sparse matrix"),
        ({"crow_indices": b"123"}, "crow_indices of target_tokens of datum 0 has 3 bytes"),
        ({"col_indices": indices(1, 0, 3)}, "not a sparse matrix"),
        ({"col_indices": indices(1, -1, 2)}, "not a sparse matrix"),
        ({"col_indices": indices(1, 0)}, "not a sparse matrix"),
        ({"col_indices": indices(1, 2, 2)}, "do not ascend"),
        ({"values": indices(5, -7, 9)}, "has the token id -7"),
    ],
)
def test_a_damaged_sparse_matrix_is_refused(change: dict[str, bytes], message: str) -> None:
    damaged = request()
    for name, value in change.items():
        setattr(damaged.data[0].loss_fn_inputs["target_tokens"].sparse_csr, name, value)
    with pytest.raises(BatchError, match=message):
        batches_of(damaged.data, LOSS, 8, TEXT_ALONE)


def test_differences_that_wrap_around_do_not_pass_for_counts() -> None:
    """Each difference is positive in int64, and their sum is the number of values."""
    starts = [0, 2**63 - 1, -(2**63), -1, 3]
    with pytest.raises(BatchError, match="not a sparse matrix"):
        dense(np.ones(3), np.asarray(starts), np.asarray([0, 1, 2]), (4, 5), "weights")
    asked = TokenMatrix(data=[1, 2, 3], shape=[4, 5], sparse_crow_indices=starts, sparse_col_indices=[0, 1, 2])
    with pytest.raises(BatchError, match="not a sparse matrix"):
        asked_targets(asked, 4)


def test_tokens_that_a_sample_request_names_are_not_built_larger_than_they_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = TokenMatrix(data=[], shape=[4, 6], sparse_crow_indices=[0] * 5, sparse_col_indices=[])
    assert asked_targets(asked, 4).tolist() == [[-1] * 6] * 4
    monkeypatch.setattr(sample_answers, "MOST_NUMBERS", 23)
    with pytest.raises(BatchError, match="is 24 numbers, more than the limit of 23"):
        asked_targets(asked, 4)


def test_shapes_that_do_not_fit() -> None:
    for shape, message in (
        ([2, 2, 1], r"one number per token of model_input, or \[2, K\]"),
        ([3, 2], r"one number per token of model_input, or \[2, K\]"),
        ([2, 0], "must be from 1 to 1024"),
        ([2, 1025], "must be from 1 to 1024"),
        ([2], "is sparse with the shape"),
    ):
        wrong = request()
        for tensor in wrong.data[0].loss_fn_inputs.values():
            tensor.shape[:] = shape
        with pytest.raises(BatchError, match=message):
            batches_of(wrong.data, LOSS, 8, TEXT_ALONE)
    with pytest.raises(BatchError, match="more than the maximum of 1 "):
        batches_of(request().data, LOSS, 1, TEXT_ALONE)
    other = request()
    other.data[0].loss_fn_inputs["weights"].dtype = messages.INT32
    other.data[0].loss_fn_inputs["weights"].shape[:] = [2, 2]
    with pytest.raises(BatchError, match=r"weights of datum 0 has the shape \[2, 2\]"):
        batches_of(other.data, LOSS, 8, TEXT_ALONE)


def test_what_is_small_because_it_is_sparse_is_not_built_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "MOST_NUMBERS", 23)
    data = request().data
    assert len(batches_of(data, LOSS, 8, TEXT_ALONE)) == 1
    with pytest.raises(BatchError, match="datums 0 to 1 have 24 numbers, more than the limit of 23"):
        batches_of([*data, *data], LOSS, 8, TEXT_ALONE)


def test_what_is_sparse_counts_as_what_it_is_built_to() -> None:
    zeros = np.zeros((128, 1024))
    body = forward_backward("m", 1, [{"tokens": [1] * 128, "target_tokens": zeros, "weights": zeros}], sparse=True)
    assert len(body) < 4096
    message = parse_forward_backward(body)
    (batch,) = batches_of(message.data, LOSS, 128, TEXT_ALONE)
    fields = [batch.input_ids, batch.position_ids, *batch.token_fields.values()]
    assert dense_size(message) == sum(field.nbytes for field in fields) == 2 * 8 * 128 + (8 + 4) * 128 * 1024
    assert dense_size(request()) == dense_size(request(sparse=False)) == 2 * 8 * 2 + (8 + 4) * 6
    # What is refused counts no more than what is built, whatever it says that it is.
    for tensor in message.data[0].loss_fn_inputs.values():
        tensor.shape[:] = [2**62, 2**62]
    assert dense_size(message) == 2 * 8 * 128 + 8 * payloads.MOST_NUMBERS
    queue = ModelQueue("m", "o", waiting={n: QueuedRequest(n, "k", "f", 1, dense=10 * n) for n in (1, 2)})
    assert queue.dense == 30
    queue.done(queue.waiting[1])
    assert queue.dense == 20
