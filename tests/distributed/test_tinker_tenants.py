"""The users of a training service beside each other: heartbeats, keys in logs, requests of others, and a huge request beside a small one."""

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

import pytest

from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.serve.tinker import passes as passes_module
from drivetrain.serve.tinker import training as training_module
from helpers.tinker_service import KEY, Service, body_of, datums, forward_backward, group_of, running, sampler_of

pytestmark = pytest.mark.usefixtures("process_group")
OTHER = "tml-a-key-of-another-user"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model", "llama", vocab_size=300)


def serve(model: Path, test: Callable[[Service], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def run() -> None:
        async with running(model, model.parent / "state", build=group_of(model), **settings) as service:
            await test(service)

    asyncio.run(run())


def test_heartbeats_keep_a_session(model: Path) -> None:
    async def test(service: Service) -> None:
        session = await service.session()
        silent = await service.model(await service.session(), seed=2)
        name = await service.model(session)
        for _ in range(9):
            await asyncio.sleep(0.25)
            await service.post("/session_heartbeat", {"session_id": session})
        # The session without heartbeats has ended in this time, and the other one has not.
        await service.post("/optim_step", {"model_id": silent, "seq_id": 1}, status=404)
        await service.result(await service.post("/forward_backward", forward_backward(name, 1, datums(Random(0), 1))))

    serve(model, test, session_s=1.5)


def test_keys_and_telemetry_are_in_no_log(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test(service: Service) -> None:
        caplog.set_level(logging.DEBUG)
        # A trainer sets the level of this logger, and one may have run in this process before.
        caplog.set_level(logging.DEBUG, logger="drivetrain")
        session = await service.session()
        name = await service.model(session)
        assert (await service.post("/telemetry", {"events": [{"text": f"secret of {KEY}"}]}))["status"] == "accepted"
        # Also if it is not JSON at all.
        await service.post("/telemetry", b"\xff secret " + KEY.encode())
        # Errors of all kinds: in the request, in its result, and of the key itself.
        await service.post("/optim_step", {"model_id": name, "seq_id": 0, "key": KEY}, status=400)
        wrong = {"model_id": name, "seq_id": 1, "adam_params": {"learning_rate": -1.0}, "key": KEY}
        assert "learning_rate" in (await service.result(await service.post("/optim_step", wrong)))["error"]
        await service.post("/create_session", {}, key=f"wrong-{KEY}", status=401)
        logging.getLogger("drivetrain.serve.tinker").debug("logs of this level are seen")
        assert "logs of this level are seen" in caplog.text
        assert KEY not in caplog.text
        assert "secret" not in caplog.text

    serve(model, test)
    text = b"".join(file.read_bytes() for file in (model.parent / "state").glob("service.sqlite*"))
    assert b"secret" not in text


def test_requests_of_another_key_are_unknown(model: Path) -> None:
    """Samples, cancellations, several results at once, and losses."""

    async def test(service: Service) -> None:
        session = await service.session()
        sampler = await sampler_of(service, session, 0)
        # Nothing answers, so that the request stays pending.
        service.sampling._answer = lambda *_: asyncio.sleep(60)  # type: ignore[method-assign]
        pending = await service.post("/asample", body_of(sampler, 0, [1, 2, 3]))
        await service.post("/asample", body_of(sampler, 1, [1, 2, 3]), key=OTHER, status=404)
        await service.post("/cancel_future", pending, key=OTHER, status=404)
        body = {"sampling_session_id": sampler, "cloned_sampler_id": 0, "last_completed": 0}
        response = await service.http.post("/api/v1/retrieve_futures", json=body, headers={"x-api-key": OTHER})
        assert response.status_code in (404, 422)
        assert pending["request_id"] not in response.text
        await service.get(f"/samplers/{sampler}", key=OTHER, status=404)
        nodes = [
            {"op": "placeholder", "name": "p", "target": "logprobs", "args": []},
            {"op": "call_method", "name": "s", "target": "sum", "args": [{"ref": "p"}]},
            {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": "s"}, {"dict": {}}]}]},
        ]
        loss = {
            "session_id": session,
            "custom_loss_seq_id": 0,
            "name": "one",
            "inputs": [{"name": "logprobs", "rank": 1}],
            "graph": {"format": 1, "nodes": nodes},
        }
        created = await service.result(await service.post("/create_custom_loss", loss))
        await service.post("/create_custom_loss", {**loss, "custom_loss_seq_id": 1}, key=OTHER, status=404)
        theirs = await service.model(await service.session(OTHER), key=OTHER)
        data = [{"tokens": [1, 2], "target_tokens": [1, 2]}]
        used = forward_backward(theirs, 1, data, "custom", loss_id=created["loss_id"])
        answer = await service.result(await service.post("/forward_backward", used, key=OTHER), key=OTHER)
        assert created["loss_id"] in answer["error"]

    serve(model, test)


def test_a_small_request_does_not_wait_for_a_huge_one(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes_module, "PIECE_TOKENS", 128)
    monkeypatch.setattr(training_module, "MAX_TOKENS_AT_ONCE", 256)

    async def test(service: Service) -> None:
        # The key with the huge requests has several models.
        session = await service.session(OTHER)
        names = [await service.model(session, number, key=OTHER) for number in range(3)]
        small = await service.model(await service.session())
        datum = {"tokens": [1] * 100, "target_tokens": [1] * 100, "weights": [1.0] * 100}
        huge = [await service.post("/forward_backward", forward_backward(name, 1, [datum] * 20), key=OTHER) for name in names]
        await service.result(await service.post("/forward_backward", forward_backward(small, 1, datums(Random(0), 2))))
        await service.result(await service.step(small, 2))
        states = [
            service.database.read("SELECT state FROM futures WHERE id = ?", one["request_id"])[0]["state"] for one in huge
        ]
        assert states == ["pending"] * 3
        for one in huge:
            assert (await service.result(one, key=OTHER)).metrics["loss:sum"] > 0

    serve(model, test)


def test_bodies_that_are_nested_too_deeply_are_refused(model: Path) -> None:
    async def test(service: Service) -> None:
        deep = b'{"model_id":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        await service.post("/optim_step", deep, status=422)
        # A message in a message in a message: field 1 of the request's `data`, over and over.
        nested = b""
        for _ in range(300):
            size, prefix = len(nested), b""
            while size > 127:
                prefix, size = prefix + bytes([size & 127 | 128]), size >> 7
            nested = b"\x1a" + prefix + bytes([size]) + nested
        response = await service.http.post("/api/v1/forward_backward", content=nested, headers={"x-api-key": KEY})
        assert response.status_code in (400, 404, 422)
        assert json.loads(response.text)["detail"]
        await service.model(await service.session())

    serve(model, test)
