"""Samplers of the training service over its routes: what is refused, more snapshots than fit, cancelling, and beginning anew."""

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import NoAdapterError, QueueFullError, WorkerError
from drivetrain.serve.tinker import sampling
from drivetrain.serve.tinker.sampling import SamplingService
from drivetrain.serve.tinker.turns import AdapterSemaphore
from helpers.tinker_replicas import LocalReplicas
from helpers.tinker_service import (
    KEY,
    Service,
    answer_of,
    body_of,
    datums,
    forward_backward,
    group_of,
    running,
    sampler_of,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model", "llama", vocab_size=300)


def serve(model: Path, *tests: Callable[[Service], Coroutine[Any, Any, None]], **settings: Any) -> None:
    """Run tests one after the other, each with a service that goes on from the state of the one before."""

    async def run(test: Callable[[Service], Coroutine[Any, Any, None]]) -> None:
        replicas = settings.get("replicas", LocalReplicas)(model)
        try:
            options = {**settings, "replicas": replicas}
            async with running(model, model.parent / "state", build=group_of(model), **options) as service:
                await test(service)
        finally:
            replicas.close()

    for test in tests:
        asyncio.run(run(test))


def test_what_is_asked_about_the_prompt_and_the_response(model: Path) -> None:
    """The most likely tokens and the tokens that the request names, by plain transformers."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()

    def log_probs_of(tokens: list[int]) -> Any:
        with torch.no_grad():
            return plain(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)

    def top_of(message: Any) -> tuple[Any, Any]:
        shape = message.length, message.k
        return np.frombuffer(message.token_ids, "<i4").reshape(shape), np.frombuffer(message.logprobs, "<f4").reshape(shape)

    async def test(service: Service) -> None:
        sampler, prompt = await sampler_of(service, await service.session(), 0), [5, 6, 7, 8, 250]
        asked = [[6, 0, 9], [7, 299, -1], [-1, 8, 8], [250, -1, -1]]
        rows = [(i, j) for i in range(4) for j in range(3) if asked[i][j] >= 0]
        columns = [j for _, j in rows]
        starts = [sum(i < row for i, _ in rows) for row in range(5)]
        values = [asked[i][j] for i, j in rows]
        dense = {"data": [v for row in asked for v in row], "dtype": "int64", "shape": [4, 3]}
        sparse = {"data": values, "shape": [4, 3], "sparse_crow_indices": starts, "sparse_col_indices": columns}
        expected = log_probs_of(prompt)
        for seq, (targets, last) in enumerate(((dense, None), (sparse, 2))):
            body = body_of(
                sampler,
                seq,
                prompt,
                num_samples=2,
                prompt_logprobs=True,
                prompt_logprobs_last_n=last,
                topk_prompt_logprobs=4,
                topk_sample_logprobs=3,
                target_prompt_logprobs=targets,
            )
            answer = await answer_of(service, await service.post("/asample", body))
            tokens, log_probs = top_of(answer.topk_prompt_logprobs)
            hidden = 1 if last is None else 3
            assert tokens.shape == (5, 4)
            assert not tokens[:hidden].any()
            assert (log_probs[:hidden] == -99999.0).all()
            likeliest = expected[hidden - 1 : 4].topk(4)
            assert tokens[hidden:].tolist() == likeliest.indices.tolist()
            np.testing.assert_allclose(log_probs[hidden:], likeliest.values, rtol=1e-5, atol=1e-5)
            named = answer.target_prompt_logprobs
            assert list(named.shape) == [4, 3]
            of_named = [float(expected[i, asked[i][j]]) for i, j in rows]
            if last is None:
                got = np.frombuffer(named.dense, dtype="<f4").reshape(4, 3)
                assert [[bool(v) for v in row] for row in got.tolist()] == [[v >= 0 for v in row] for row in asked]
                found = [got[i, j] for i, j in rows]
            else:
                assert np.frombuffer(named.sparse_csr.crow_indices, dtype="<i8").tolist() == starts
                assert np.frombuffer(named.sparse_csr.col_indices, dtype="<i8").tolist() == columns
                found = np.frombuffer(named.sparse_csr.values, dtype="<f4").tolist()
            np.testing.assert_allclose(found, of_named, rtol=1e-5, atol=1e-5)
            for response, ids in zip(answer.sequences, tokens_of(answer), strict=True):
                tokens, log_probs = top_of(response.topk_sampled_logprobs)
                likeliest = log_probs_of([*prompt, *ids])[4:-1].topk(3)
                assert tokens.tolist() == likeliest.indices.tolist()
                np.testing.assert_allclose(log_probs, likeliest.values, rtol=1e-5, atol=1e-5)

    serve(model, test)


def test_alternatives_to_the_tokens_of_a_prompt(model: Path) -> None:
    """Draws from the model's distribution at each position, with replacement and at the temperature of the request."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    prompt, k, temperature = [5, 6, 7, 8, 250], 64, 0.02
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([prompt])).logits[0, :-1]
    probability, likeliest = (logits / temperature).softmax(-1).max(-1)
    # Far from certain, and from as likely as the others.
    assert 2 / 300 < float(probability.mean()) < 0.9

    async def test(service: Service) -> None:
        sampler = await sampler_of(service, await service.session(), 0)

        async def drawn(seq: int, count: int, **params: Any) -> tuple[Any, Any, list[list[int]]]:
            body = body_of(sampler, seq, prompt, prompt_alt_tokens_k=count, params={"max_tokens": 2, **params})
            answer = await answer_of(service, await service.post("/asample", body))
            got = answer.prompt_alt_tokens
            assert list(got.tokens.shape) == list(got.logprobs.shape) == [4, count]
            tokens = np.frombuffer(got.tokens.dense, dtype="<i8").reshape(4, count)
            log_probs = np.frombuffer(got.logprobs.dense, dtype="<f4").reshape(4, count)
            # Of the model itself, whatever the temperature of the draws.
            expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens))
            np.testing.assert_allclose(log_probs, expected, rtol=1e-5, atol=1e-5)
            return tokens, log_probs, tokens_of(answer)

        tokens, _, completions = await drawn(0, k, temperature=temperature, seed=1)
        share = float((tokens == likeliest[:, None].numpy()).mean())
        expected = float(probability.mean())
        assert abs(share - expected) < 5 * (expected * (1 - expected) / (4 * k)) ** 0.5
        again, _, same = await drawn(1, k, temperature=temperature, seed=1)
        other, _, _ = await drawn(2, k, temperature=temperature, seed=2)
        assert (tokens == again).all()
        assert completions == same
        assert (tokens != other).any()
        greedy, _, _ = await drawn(3, 2, temperature=0.0)
        assert greedy.tolist() == [[token, token] for token in likeliest.tolist()]
        for count, message in ((-1, "prompt_alt_tokens_k=-1"), (5000, "draws 20000 tokens in this prompt, more than 8192")):
            wrong = body_of(sampler, 4, prompt, prompt_alt_tokens_k=count)
            assert message in (await service.post("/asample", wrong, status=400))["detail"]

    serve(model, test)


async def polled(service: Service, sampler: str, cursor: int, clone: int = 0, timeout: float | None = None) -> Any:
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": clone}
    return await service.post("/retrieve_futures", {"target": target, "prev_cursor": cursor, "timeout": timeout})


def test_one_poll_for_all_requests_of_a_sampler(model: Path) -> None:
    first: dict[str, Any] = {}

    async def test(service: Service) -> None:
        sampler = first["sampler"] = await sampler_of(service, await service.session(), 0)
        assert await polled(service, sampler, 0, timeout=0.0) == {"completions": [], "cursor": 0}
        waiting = asyncio.create_task(polled(service, sampler, 0))
        await asyncio.sleep(0.05)
        futures = [await service.post("/asample", body_of(sampler, seq, [5, 6])) for seq in (0, 1)]
        wrong = await service.post("/asample", body_of(sampler, 2, [10**6]))
        of_copy = await service.post("/asample", body_of(sampler, 3 * 10**9, [5]))
        known: dict[str, Any] = {}
        cursor, answer = 0, await waiting
        # The poll that was there first is answered by the first result.
        assert answer["completions"]
        while True:
            known |= {one["request_id"]: one for one in answer["completions"]}
            assert answer["cursor"] > cursor
            cursor = answer["cursor"]
            if len(known) == 3:
                break
            answer = await polled(service, sampler, cursor)
        assert known[wrong["request_id"]] == {"state": "failed", "request_id": wrong["request_id"]}
        for future in futures:
            payload = await service.post("/retrieve_future", {"request_id": future["request_id"]})
            assert known[future["request_id"]]["response_payload_uncompressed_size"] == len(payload)
        answer = await polled(service, sampler, 0, clone=3)
        assert [one["request_id"] for one in answer["completions"]] == [of_copy["request_id"]]
        await service.post("/retrieve_futures", {"target": {"sampling_session_id": "other"}}, status=404)
        await service.post(
            "/retrieve_futures", {"target": {"sampling_session_id": sampler, "cloned_sampler_id": -1}}, status=400
        )
        first["cursor"] = max(cursor, answer["cursor"])

    async def again(service: Service) -> None:
        # Results that were dropped since do not let the numbers begin again.
        await asyncio.wrap_future(service.database.execute(("DELETE FROM samples", ())))
        await service.post("/asample", body_of(first["sampler"], 7, [5, 6]))
        answer = await polled(service, first["sampler"], first["cursor"])
        assert len(answer["completions"]) == 1
        assert answer["cursor"] > first["cursor"]

    serve(model, test, again)


def test_samplers_that_take_over_new_weights(model: Path) -> None:
    """One that is inflight answers with the newest weights of its model, a snapshot with its own."""

    async def scores_of(service: Service, sampler: str, seq: int) -> list[float]:
        body = body_of(sampler, seq, [5, 6, 7, 8], prompt_logprobs=True, params={"temperature": 0.0, "max_tokens": 2})
        answer = await answer_of(service, await service.post("/asample", body))
        sampled = [float(v) for one in answer.sequences for v in np.frombuffer(one.logprobs, dtype="<f4")]
        return [*np.frombuffer(answer.prompt_logprobs, dtype="<f4").tolist()[1:], *sampled]

    async def test(service: Service) -> None:
        session = await service.session()
        name, seq = await service.model(session), 0

        async def save(kind: str) -> str:
            nonlocal seq
            seq += 1
            body = {"model_id": name, "seq_id": seq, "sampling_session_seq_id": seq, "kind": kind}
            saved = await service.result(await service.post("/save_weights_for_sampler", body))
            return str(saved["sampling_session_id"])

        async def train() -> None:
            nonlocal seq
            seq += 2
            await service.post("/forward_backward", forward_backward(name, seq - 1, datums(Random(3), 4)))
            await service.result(await service.step(name, seq, learning_rate=0.1))

        await train()
        fixed, live = await save("snapshot"), await save("inflight")
        before = await scores_of(service, fixed, 0)
        assert await scores_of(service, live, 0) == pytest.approx(before, rel=1e-5)
        await train()
        assert await scores_of(service, live, 1) == pytest.approx(before, rel=1e-5)
        newer = await save("inflight")
        after = await scores_of(service, newer, 0)
        assert after != pytest.approx(before, rel=1e-2)
        assert await scores_of(service, live, 2) == pytest.approx(after, rel=1e-5)
        assert await scores_of(service, fixed, 1) == pytest.approx(before, rel=1e-5)
        rows = service.database.read("SELECT folder FROM published")
        assert [Path(row["folder"]).is_dir() for row in rows] == [True, True]
        await asyncio.wrap_future(service.database.execute(("UPDATE published SET created = created - 1000", ())))
        for _ in range(100):
            if not Path(rows[0]["folder"]).exists():
                break
            await asyncio.sleep(0.05)
        # What newer weights have replaced for some time is removed; the newest stay.
        assert [Path(row["folder"]).is_dir() for row in rows] == [False, True]
        named = {"model_id": name, "seq_id": seq + 1, "path": "x", "kind": "inflight"}
        answer = await service.result(await service.post("/save_weights_for_sampler", named))
        assert "weights that change have no path" in answer["error"]

    serve(model, test)


def test_samples_and_what_is_refused(model: Path) -> None:
    async def test(service: Service) -> None:
        sampler = await sampler_of(service, await service.session(), 0)
        info = await service.get(f"/samplers/{sampler}")
        assert info == {"sampler_id": sampler, "base_model": "tiny", "model_path": None}
        good = body_of(
            sampler, 0, [5, 6, 7], params={"seed": 3}, num_samples=2, prompt_logprobs=True, prompt_logprobs_last_n=1
        )
        future = await service.post("/asample", good)
        assert len(future["sample_sequence_ids"]) == 2
        # The same request has the same result, and another one under its number is refused.
        assert (await service.post("/asample", good))["request_id"] == future["request_id"]
        await service.post("/asample", {**good, "num_samples": 3}, status=400)
        answer = await answer_of(service, future)
        one, two = tokens_of(answer)
        assert [len(one), len(two)] == [4, 4]
        assert one != two
        scores = np.frombuffer(answer.prompt_logprobs, dtype="<f4").tolist()
        assert [math.isnan(score) for score in scores] == [True, True, False]
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs=-1"),
            ({"topk_sample_logprobs": 2000}, "topk_sample_logprobs=2000"),
            ({"topk_sample_logprobs": 400}, "topk_sample_logprobs=400; it must be from 0 to 300"),
            ({"topk_prompt_logprobs": 301}, "topk_prompt_logprobs=301; it must be from 0 to 300"),
            ({"prompt_logprobs": True, "prompt": {"chunks": [{"tokens": [1] * 130}]}}, "engine.micro_batch.max_tokens=128"),
            (
                {"topk_sample_logprobs": 1, "params": {"max_tokens": 128}},
                "at most 129 tokens (engine.micro_batch.max_tokens=128)",
            ),
            ({"topk_sample_logprobs": 1, "prompt": {"chunks": [{"tokens": [1] * 129}]}}, "with a prompt of 129 tokens"),
            ({"prompt_alt_tokens_k": 1, "prompt": {"chunks": [{"tokens": [1]}]}}, "has no alternatives"),
            ({"target_prompt_logprobs": {"data": [1, 2], "shape": [2, 1]}}, "must be [1, K]"),
            ({"target_prompt_logprobs": {"data": [1], "shape": [1, 2]}}, "has 1 numbers"),
            ({"target_prompt_logprobs": {"data": [300], "shape": [1, 1]}}, "has token ids from 300 to 300"),
            ({"target_prompt_logprobs": {"data": [-2], "shape": [1, 1]}}, "has token ids from -2 to 0"),
            (
                {
                    "target_prompt_logprobs": {
                        "data": [1],
                        "shape": [1, 1],
                        "sparse_crow_indices": [0, 2],
                        "sparse_col_indices": [0],
                    }
                },
                "not a sparse matrix",
            ),
            (
                {
                    "prompt": {"chunks": [{"tokens": [1, 2, 3, 4, 5]}]},
                    "target_prompt_logprobs": {
                        "data": [1, 2, 3],
                        "shape": [4, 5],
                        "sparse_crow_indices": [0, 2**63 - 1, -(2**63), -1, 3],
                        "sparse_col_indices": [0, 1, 2],
                    },
                },
                "not a sparse matrix",
            ),
            ({"params": {"top_k": 0}}, "top_k=0"),
            ({"params": {"top_p": 0.0}}, "top_p=0.0"),
            ({"params": {"temperature": -1.0}}, "temperature=-1.0"),
            ({"params": {"max_tokens": 10_000}}, "more than a completion of this prompt can have"),
            ({"params": {"max_tokens": 0}}, "max_tokens=0"),
            ({"params": {"stop": ["x"]}}, "no tokenizer"),
            ({"params": {"stop": ""}}, "empty text"),
            ({"prompt": {"chunks": [{"type": "image", "format": "png"}]}}, "takes no images; send encoded_text alone"),
            ({"prompt": {"chunks": [{"type": "dmel"}]}}, "a chunk of dmel"),
            ({"prompt": {"chunks": []}}, "the prompt has no tokens"),
            ({"prompt": {"chunks": [{"tokens": [1] * 400}]}}, "the prompt has 400 tokens"),
            ({"prompt": {"chunks": [{"tokens": [10**6]}]}}, "10"),
        ]
        for seq, (change, message) in enumerate(wrong, 1):
            answer = await answer_of(
                service,
                await service.post(
                    "/asample",
                    {
                        **body_of(sampler, seq, [5, 6]),
                        **change,
                        **(
                            {"sampling_params": {"max_tokens": 4, "stop": [], **change["params"]}}
                            if "params" in change
                            else {}
                        ),
                    },
                ),
            )
            assert message in answer["error"], (message, answer)
        await service.post("/asample", {**good, "seq_id": 99, "num_samples": 0}, status=400)
        for number in (-1, 2**63, 2**63 // 10**9 * 10**9):
            answer = await service.post("/asample", {**good, "seq_id": number}, status=400)
            assert f"seq_id={number}; it must be from 0 to" in answer["detail"]
        await service.post("/asample", {**good, "seq_id": 2**63 // 10**9 * 10**9 - 1})
        for cursor in (-1, 2**63):
            target = {"sampling_session_id": sampler}
            answer = await service.post("/retrieve_futures", {"target": target, "prev_cursor": cursor}, status=400)
            assert f"prev_cursor={cursor}; it must be" in answer["detail"]
        # As many tokens as there may be, and as many as fit if nobody says how many.
        long = body_of(sampler, 200, [1] * 129, prompt_logprobs=True)
        assert len((await answer_of(service, await service.post("/asample", long))).prompt_logprobs) == 4 * 129
        long = body_of(sampler, 201, [1] * 120, topk_sample_logprobs=1, params={"max_tokens": None})
        (response,) = (await answer_of(service, await service.post("/asample", long))).sequences
        assert response.topk_sampled_logprobs.length == len(response.tokens) // 4 == 9
        await service.post("/asample", {**good, "seq_id": 99, "sampling_session_id": "other"}, status=404)
        assert (await service.post("/join_sampling_session", {"sampling_session_id": sampler}))["client_counter"] == 1

    serve(model, test)


class Slow(LocalReplicas):
    """Generates nothing for a while."""

    seconds = 0.5

    def generate(self, request: Any) -> Any:
        time.sleep(self.seconds)
        return super().generate(request)


class LessSlow(Slow):
    """Generates nothing for a short while."""

    seconds = 0.05


class Counting(LocalReplicas):
    """Counts what is generated."""

    generated = 0

    def generate(self, request: Any) -> Any:
        Counting.generated += 1
        return super().generate(request)


def test_what_cannot_be_scored_is_not_generated(model: Path) -> None:
    async def test(service: Service) -> None:
        Counting.generated = 0
        sampler = await sampler_of(service, await service.session(), 0)
        changes: list[dict[str, Any]] = [
            {"topk_sample_logprobs": 301},
            {"topk_sample_logprobs": 1, "params": {"max_tokens": 250}},
        ]
        for seq, change in enumerate(changes):
            answer = await answer_of(service, await service.post("/asample", body_of(sampler, seq, [5], **change)))
            assert answer["category"] == "user"
        assert Counting.generated == 0

    serve(model, test, replicas=Counting)


def test_responses_are_counted_not_requests(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MOST_PENDING", 10)

    async def test(service: Service) -> None:
        sampler = await sampler_of(service, await service.session(), 0)
        one = await service.post("/asample", body_of(sampler, 0, [5, 6], num_samples=8))
        answer = await service.post("/asample", body_of(sampler, 1, [5, 6], num_samples=3), status=429)
        assert answer["detail"].startswith(
            "this key has 8 pending completions, and this request adds 3: more than the maximum of 10;"
        )
        two = await service.post("/asample", body_of(sampler, 1, [5, 6], num_samples=2))
        assert [len(tokens_of(await answer_of(service, future))) for future in (one, two)] == [8, 2]
        # There is room again when they are there.
        again = await service.post("/asample", body_of(sampler, 2, [5, 6], num_samples=10))
        assert len(tokens_of(await answer_of(service, again))) == 10

    serve(model, test, replicas=LessSlow)


@pytest.mark.slow
def test_more_snapshots_than_the_samplers_hold(model: Path) -> None:
    """Each has its own tokens, whatever was put aside for it; a checkpoint that was deleted, or overwritten, stays in its sampler."""

    async def test(service: Service) -> None:
        session = await service.session()
        name = await service.model(session)
        seq, samplers = 1, []
        for number in range(6):
            saved = await service.post("/save_weights_for_sampler", {"model_id": name, "seq_id": seq, "path": f"s{number}"})
            path = (await service.result(saved))["path"]
            samplers.append(await sampler_of(service, session, number, path))
            await service.post("/forward_backward", forward_backward(name, seq + 1, datums(Random(number), 2)))
            await service.result(await service.step(name, seq + 2, learning_rate=0.1))
            seq += 3

        async def all_scores(begin: int) -> list[list[float]]:
            futures = [
                await service.post("/asample", body_of(sampler, begin, [5, 6, 7, 8], prompt_logprobs=True, params={"seed": 1}))
                for sampler in samplers
            ]
            answers = [await answer_of(service, future) for future in futures]
            return [
                np.frombuffer(answer.prompt_logprobs, dtype="<f4").tolist()[1:] + tokens_of(answer)[0] for answer in answers
            ]

        first = await all_scores(0)
        assert len({tuple(scores) for scores in first}) == 6
        run = f"/api/v1/training_runs/{name}/checkpoints/sampler_weights/s0"
        assert (await service.http.delete(run, headers={"x-api-key": KEY})).status_code == 204
        again = {"model_id": name, "seq_id": seq, "path": "s1", "overwrite": True}
        assert "error" not in await service.result(await service.post("/save_weights_for_sampler", again))
        # Which prompts share a pass depends on time, and roundings on which do.
        for scores, expected in zip(await all_scores(1), first, strict=True):
            assert scores == pytest.approx(expected, abs=1e-5)

    serve(model, test)


@pytest.mark.slow
def test_a_request_is_cancelled_or_goes_on_after_a_restart(model: Path) -> None:
    kept: dict[str, Any] = {}

    async def first(service: Service) -> None:
        sampler = await sampler_of(service, await service.session(), 0)
        cancelled = await service.post("/asample", body_of(sampler, 0, [5, 6]))
        kept["future"] = await service.post("/asample", body_of(sampler, 1, [5, 6]))
        response = await service.http.post("/api/v1/cancel_future", content=json.dumps(cancelled), headers={"x-api-key": KEY})
        assert response.status_code == 204
        assert "was cancelled" in (await answer_of(service, cancelled))["error"]

    async def then(service: Service) -> None:
        kept.setdefault("tokens", tokens_of(await answer_of(service, kept["future"])))
        assert tokens_of(await answer_of(service, kept["future"])) == kept["tokens"]

    serve(model, first, then, then, replicas=Slow)


class Narrow(SamplingService):
    """Has one adapter in its workers at a time, and four slots."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._adapters, self._slots = 1, AdapterSemaphore(4, 1)


@pytest.mark.slow
def test_a_key_that_floods_its_sampler_lets_others_have_theirs(model: Path) -> None:
    other = "tml-the-key-of-another"

    async def test(service: Service) -> None:
        samplers = []
        for key in (KEY, other):
            name = await service.model(await service.session(key), key=key)
            body = {"model_id": name, "seq_id": 1, "sampling_session_seq_id": 0}
            saved = await service.result(await service.post("/save_weights_for_sampler", body, key=key), key=key)
            samplers.append(saved["sampling_session_id"])
        flood = [await service.post("/asample", body_of(samplers[0], seq, [5, 6])) for seq in range(60)]
        one = await service.post("/asample", body_of(samplers[1], 0, [5, 6]), key=other)

        def state(future: Any) -> str:
            (row,) = service.database.read("SELECT state FROM futures WHERE id = ?", future["request_id"])
            return str(row["state"])

        while state(one) == "pending":
            await asyncio.sleep(0.01)
        assert state(one) == "protobuf"
        # As soon as the responses that were under way have ended.
        assert sum(state(future) == "pending" for future in flood) > 20
        assert not [future for future in flood if "error" in str(await answer_of(service, future))]

    serve(model, test, sampling_class=Narrow, replicas=LessSlow)


class Failing(LocalReplicas):
    """Fails with some errors first, and counts what is loaded."""

    errors: ClassVar[list[Exception]] = []
    loads = 0

    @contextmanager
    def streams(self, requests: Any) -> Iterator[Any]:
        if Failing.errors:
            raise Failing.errors.pop()
        with super().streams(requests) as streams:
            yield streams

    async def acall(self, method: str, *args: Any) -> Any:
        Failing.loads += method == "load_adapter"
        return await super().acall(method, *args)


def test_samplers_that_are_busy_or_were_started_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "TRIES", 3)
    monkeypatch.setattr(sampling, "RETRY_S", 0.01)

    async def test(service: Service) -> None:
        session = await service.session()
        saved = await service.post(
            "/save_weights_for_sampler",
            {"model_id": await service.model(session), "seq_id": 1, "sampling_session_seq_id": 0},
        )
        sampler = (await service.result(saved))["sampling_session_id"]
        # That they are busy is not the fault of who asks, who is told what helps.
        Failing.errors, Failing.loads = [QueueFullError("the queue is full")] * 3, 0
        answer = await answer_of(service, await service.post("/asample", body_of(sampler, 0, [5, 6])))
        assert answer["category"] == "server"
        assert "the queue is full" in answer["error"]
        assert "raise --samplers or --max-batch-total-tokens" in answer["error"]
        assert Failing.loads == 1
        # One that was started again gets its adapters again.
        missing = WorkerError("a worker failed")
        missing.__cause__ = NoAdapterError("there is no adapter 'x'")
        Failing.errors = [missing]
        answer = await answer_of(service, await service.post("/asample", body_of(sampler, 1, [5, 6])))
        assert [len(tokens) for tokens in tokens_of(answer)] == [4]
        assert Failing.loads == 2
        # Another error is that of the request, whatever its words.
        Failing.errors = [WorkerError("there is no adapter")]
        answer = await answer_of(service, await service.post("/asample", body_of(sampler, 2, [5, 6])))
        assert "there is no adapter" in answer["error"]
        assert Failing.loads == 2

    serve(model, test, replicas=Failing)


class Finishing(SamplingService):
    """Says when it writes a result."""

    inside: asyncio.Event

    async def _finish(self, *args: Any) -> None:
        self.inside.set()
        await super()._finish(*args)


def test_cancelling_while_the_result_is_written_is_too_late(model: Path) -> None:
    async def test(service: Service) -> None:
        Finishing.inside = asyncio.Event()
        sampler = await sampler_of(service, await service.session(), 0)
        for seq in range(8):
            Finishing.inside.clear()
            future = await service.post("/asample", body_of(sampler, seq, [5, 6]))
            await Finishing.inside.wait()
            content = json.dumps(future)
            response = await service.http.post("/api/v1/cancel_future", content=content, headers={"x-api-key": KEY})
            assert response.status_code == 204
            assert [len(tokens) for tokens in tokens_of(await answer_of(service, future))] == [4]
        # Each is counted once.
        answer = await polled(service, sampler, 0)
        assert answer["cursor"] == len(answer["completions"]) == 8
        assert (await service.get("/healthz"))["status"] == "ok"

    serve(model, test, sampling_class=Finishing)


class Ended(LocalReplicas):
    """Workers that have ended for good."""

    def is_over(self) -> bool:
        return True


def test_a_service_whose_samplers_have_ended_is_not_healthy(model: Path) -> None:
    async def test(service: Service) -> None:
        assert (await service.get("/healthz", status=503))["status"] == "failed"
        # What is trained can still be saved.
        await service.model(await service.session())

    serve(model, test, replicas=Ended)


def test_a_service_whose_database_writes_nothing_says_so(model: Path) -> None:
    async def test(service: Service) -> None:
        service.database._queue.put(None)
        await asyncio.to_thread(service.database._thread.join)
        assert (await service.get("/healthz", status=503))["status"] == "failed"
        answer = await service.post("/create_session", {}, status=503)
        assert "the database no longer accepts writes" in answer["detail"]
        # So that the end of the test can write.
        service.database._thread = threading.Thread(target=service.database._run, daemon=True)
        service.database._thread.start()

    serve(model, test)
