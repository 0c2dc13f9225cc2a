"""The training service after errors and kills at bad moments: loads that fail, sessions half ended, results that cannot be stored."""

import asyncio
import json
import sqlite3
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import DrivetrainError, WorkerError
from drivetrain.engine.packing.convert import from_lists
from drivetrain.serve.tinker import database as database_module
from drivetrain.serve.tinker.scoring import Scoring
from drivetrain.serve.tinker.training_group import TrainingGroup
from drivetrain.workers.roles.adapters import AdapterReply
from helpers.tinker_service import (
    KEY,
    Service,
    body_of,
    datums,
    forward_backward,
    group_of,
    log_probs,
    running,
    sampler_of,
)

pytestmark = pytest.mark.usefixtures("process_group")
HEADERS = {"x-api-key": KEY}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model", "llama", vocab_size=300)


def serve(
    model: Path,
    *tests: Callable[[Service], Coroutine[Any, Any, None]],
    group: Callable[[], Any] | None = None,
    **settings: Any,
) -> None:
    """Run tests one after the other, each with a service that continues from the state of the one before."""

    async def run(test: Callable[[Service], Coroutine[Any, Any, None]]) -> None:
        state = model.parent / "state"
        made = None if group is None else group()
        async with running(model, state, build=group_of(model, invariant=True), group=made, **settings) as service:
            await test(service)

    for test in tests:
        asyncio.run(run(test))


# ---- loads that fail ---------------------------------------------------------------------------------------------------


class FullDisk(TrainingGroup):
    """A group whose states cannot be written while `is_full_disk` is set, and which loads nevertheless."""

    is_full_disk = False

    async def save(self, name: str, folder: str) -> str:
        if self.is_full_disk:
            raise OSError(28, "No space left on device")
        return await super().save(name, folder)


@pytest.mark.parametrize("failure", ["full disk", pytest.param("damaged", marks=pytest.mark.slow)])
def test_a_load_that_fails_changes_nothing(model: Path, failure: str) -> None:
    """Neither the weights nor the gradients of requests before it, also after a restart."""
    groups: list[FullDisk] = []

    def group() -> FullDisk:
        groups.append(FullDisk(group_of(model, invariant=True)))
        return groups[-1]

    random = Random(4)
    first, second, third = datums(random, 3), datums(random, 2), datums(random, 2)

    async def trained(service: Service, name: str, seq: int, data: Any) -> Any:
        return await service.result(await service.post("/forward_backward", forward_backward(name, seq, data)))

    async def before(service: Service) -> None:
        session = await service.session()
        for number in range(2):
            name = await service.model(session, number)
            path = (
                await service.result(await service.post("/save_weights", {"model_id": name, "seq_id": 1, "path": "zero"}))
            )["path"]
            await trained(service, name, 2, first)
            assert "error" not in await service.result(await service.step(name, 3))
            await trained(service, name, 4, second)
            if number:
                continue
            # The other model has no request with this number's effects: a forward pass takes its place.
            if failure == "damaged":
                (row,) = service.database.read("SELECT folder FROM checkpoints")
                # The last file alone, and its end alone: the others have been read when the damage is noticed.
                file = sorted(Path(row["folder"]).rglob("*.safetensors"))[-1]
                content = file.read_bytes()
                file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            groups[-1].is_full_disk = failure == "full disk"
            load = {"model_id": name, "seq_id": 5, "path": path, "optimizer": True}
            answer = await service.result(await service.post("/load_weights", load))
            groups[-1].is_full_disk = False
            assert "error" in answer
        undisturbed = f"{session}:train:1"
        await service.result(
            await service.post("/forward_backward", forward_backward(undisturbed, 5, third, forward_only=True))
        )
        steps = [await service.result(await service.step(f"{session}:train:{number}", 6)) for number in range(2)]
        assert steps[0]["metrics"] == steps[1]["metrics"]
        answers = [await trained(service, f"{session}:train:{number}", 7, third) for number in range(2)]
        assert log_probs(answers[0]) == log_probs(answers[1])

    async def after(service: Service) -> None:
        names = sorted(row["id"] for row in service.database.read("SELECT id FROM models WHERE state = 'open'"))
        steps = [await service.result(await service.step(name, 8)) for name in names]
        assert steps[0]["metrics"] == steps[1]["metrics"]

    serve(model, before, after, group=group)


# ---- limits that must not stop anything --------------------------------------------------------------------------------


def test_the_missing_request_is_accepted_when_those_behind_it_use_up_the_limit(model: Path) -> None:
    """Clients send the parts of a request in any order. A small first one is tested elsewhere."""

    async def test(service: Service) -> None:
        name = await service.model(await service.session())
        zeros = np.zeros((100, 200))
        datum = {"tokens": [1] * 100, "target_tokens": zeros, "weights": zeros}
        bodies = [forward_backward(name, seq, [datum], sparse=True) for seq in (1, 2, 3)]
        futures = [await service.post("/forward_backward", body) for body in bodies[1:]]
        # Others are still refused, and so is a request that only waits too.
        await service.post("/forward_backward", forward_backward(name, 4, [datum], sparse=True), status=429)
        futures.append(await service.post("/forward_backward", bodies[0]))
        for future in futures:
            assert (await service.result(future)).metrics["loss:sum"] == 0

    serve(model, test, max_queued_mib=0.5)


def test_the_missing_request_is_accepted_when_bodies_use_up_the_limit(model: Path) -> None:
    async def test(service: Service) -> None:
        name = await service.model(await service.session())
        data = [{"tokens": [1] * 100, "target_tokens": [1] * 100, "weights": [1.0] * 100}] * 20
        bodies = [forward_backward(name, seq, data) for seq in range(1, 6)]
        assert 3 * len(bodies[0]) < 0.1 * 2**20 < 4 * len(bodies[0])
        for body in bodies[:2]:
            await service.result(await service.post("/forward_backward", body))
        # With the two whose effects are not saved yet, the fourth uses up the limit, and the third is missing.
        futures = [await service.post("/forward_backward", bodies[number]) for number in (3, 2)]
        for future in futures:
            assert (await service.result(future)).metrics["loss:sum"] > 0
        # The log stays bounded: a pass that nothing waits for is refused, and a step is not.
        await service.post("/forward_backward", bodies[4], status=429)
        assert "error" not in await service.result(await service.step(name, 5))
        await service.result(await service.post("/forward_backward", forward_backward(name, 6, data)))

    serve(model, test, max_queued_mib=0.1)


def test_requests_other_than_passes_count_while_they_wait(model: Path) -> None:
    async def test(service: Service) -> None:
        name = await service.model(await service.session())
        note = "x" * 30000
        statuses = []
        for seq in range(2, 20):
            body = {"model_id": name, "seq_id": seq, "adam_params": {"learning_rate": 1e-3}, "note": note}
            response = await service.http.post("/api/v1/optim_step", content=json.dumps(body), headers=HEADERS)
            statuses.append(response.status_code)
        assert statuses.count(200) * len(note) <= 2 * 0.1 * 2**20
        assert statuses.count(429) > 3
        # When its turn comes, a step is accepted, and the others run behind it.
        await service.result(await service.step(name, 1))
        await service.result(await service.step(name, 2 + statuses.count(200)))

    serve(model, test, max_queued_mib=0.1)


def test_sample_requests_count_with_their_bytes(model: Path) -> None:
    async def test(service: Service) -> None:
        sampler = await sampler_of(service, await service.session(), 0)
        # Nothing answers: the sampling processes of this service are missing, so that requests stay pending.
        body = {**body_of(sampler, 0, [1, 2, 3]), "note": "x" * 60000}
        service.sampling._answer = lambda *_: asyncio.sleep(60)  # type: ignore[method-assign]
        await service.post("/asample", body)
        error = await service.post("/asample", {**body, "seq_id": 1}, status=429)
        assert "--max-queued-mib=0.1" in str(error)
        await service.post("/asample", body_of(sampler, 2, [1, 2, 3]))

    serve(model, test, max_queued_mib=0.1)


def test_a_checkpoint_that_is_overwritten_counts_while_a_sampler_uses_it(model: Path) -> None:
    async def test(service: Service) -> None:
        session = await service.session()
        name = await service.model(session)
        answers = []
        for number in range(8):
            body = {"model_id": name, "seq_id": 1 + number, "path": "same", "overwrite": True}
            answers.append(await service.result(await service.post("/save_weights_for_sampler", body)))
            if "error" in answers[-1]:
                break
            await sampler_of(service, session, number, answers[-1]["path"])
        assert "--max-disk-mib" in answers[-1]["error"]
        folders = {row["folder"] for row in service.database.read("SELECT folder FROM samplers")}
        assert len(folders) == len(answers) - 1
        assert all(Path(folder).is_dir() for folder in folders)

    serve(model, test, max_disk_mib=1.0)


def test_a_sampler_that_is_created_while_its_checkpoint_is_overwritten_keeps_the_folder(model: Path) -> None:
    async def test(service: Service) -> None:
        session = await service.session()
        name = await service.model(session)
        body = {"model_id": name, "seq_id": 1, "path": "same", "overwrite": True}
        await service.result(await service.post("/save_weights_for_sampler", body))
        (row,) = service.database.read("SELECT * FROM checkpoints")
        operations = service.training._operations
        execute = operations.run

        async def run(*args: Any, **options: Any) -> Any:
            outcome = await execute(*args, **options)
            # Between the checks of the overwriting request and its transaction.
            sql = "INSERT INTO samplers (id, session, owner, base, path, folder) VALUES ('s', ?, ?, 'tiny', '', ?)"
            service.database.execute((sql, (session, row["owner"], row["folder"]))).result()
            return outcome

        operations.run = run  # type: ignore[method-assign]
        assert "error" not in await service.result(await service.post("/save_weights_for_sampler", {**body, "seq_id": 2}))
        assert Path(row["folder"]).is_dir()

    serve(model, test)


# ---- kills between two writes ------------------------------------------------------------------------------------------


def open_models(service: Service) -> list[str]:
    return [row["id"] for row in service.database.read("SELECT id FROM models WHERE state = 'open'")]


def test_a_session_whose_end_was_interrupted_ends_at_the_next_start(model: Path) -> None:
    async def before(service: Service) -> None:
        session = await service.session()
        name = await service.model(session)
        future = await service.post("/forward_backward", forward_backward(name, 3, datums(Random(0), 1)))
        # The first of the writes of an ending session, and nothing after it. The cleanup must not see it.
        service.cleanup.cancel()
        service.database.execute(("UPDATE sessions SET finished = 1", ())).result()
        # A request whose write came after the end, and which was not answered any more.
        service.database.execute(("INSERT INTO futures VALUES ('lost', 'x', 'optim_step', 'pending', NULL, 0)", ())).result()
        (model.parent / "future.json").write_text(json.dumps(future))

    async def after(service: Service) -> None:
        assert open_models(service) == []
        future = json.loads((model.parent / "future.json").read_text())
        assert "has ended" in (await service.result(future))["error"]
        assert service.database.read("SELECT state FROM futures WHERE id = 'lost'")[0]["state"] == "json"
        # Its place is free.
        await service.model(await service.session())

    serve(model, before, after, max_adapters=1)


def test_a_session_whose_end_failed_is_ended_by_the_cleanup(model: Path) -> None:
    async def test(service: Service) -> None:
        name = await service.model(await service.session())
        future = await service.post("/forward_backward", forward_backward(name, 3, datums(Random(0), 1)))
        service.database.execute(("UPDATE sessions SET finished = 1", ())).result()
        assert "has ended" in (await service.result(future))["error"]
        assert open_models(service) == []
        for _ in range(100):
            if await service.training._group.call("adapter_names") == []:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the adapter is still there")

    serve(model, test)


def test_a_refused_creation_has_its_result_with_the_request(model: Path) -> None:
    """In one transaction: a service that is killed between two would never answer."""

    async def test(service: Service) -> None:
        session = await service.session()
        states: list[str] = []
        write = service.database.write

        def watched(change: Callable[[sqlite3.Connection], Any]) -> Any:
            future = write(change)
            future.result()
            states.extend(
                row["state"] for row in service.database.read("SELECT state FROM futures WHERE kind = 'create_model'")
            )
            return future

        service.database.write = watched  # type: ignore[method-assign]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 0}}
        created = await service.post("/create_model", body)
        assert "rank=0" in (await service.result(created))["error"]
        assert set(states) == {"json"}

    serve(model, test)


def test_a_result_that_cannot_be_stored_is_stored_later(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "STORE_RETRY_S", 0.01)

    async def test(service: Service) -> None:
        name = await service.model(await service.session())
        future = await service.post("/forward_backward", forward_backward(name, 2, datums(Random(1), 2)))
        write, failures = service.database.write, [0]

        def full(change: Callable[[sqlite3.Connection], Any]) -> Any:
            # Only of changes of the scheduler, which are methods or functions of its module.
            if "_finish" in getattr(change, "__qualname__", "") and failures[0] < 5:
                failures[0] += 1

                def fail(connection: sqlite3.Connection) -> None:
                    raise sqlite3.OperationalError("database or disk is full")

                return write(fail)
            return write(change)

        service.database.write = full  # type: ignore[method-assign]
        first = await service.post("/forward_backward", forward_backward(name, 1, datums(Random(0), 2)))
        assert (await service.result(first)).metrics["loss:sum"] != 0
        assert (await service.result(future)).metrics["loss:sum"] != 0
        assert "error" not in await service.result(await service.step(name, 3))
        assert failures == [5]
        assert service.training.failed is None

    serve(model, test)


# ---- prompts -----------------------------------------------------------------------------------------------------------


class NarrowGroup:
    """Processes that fail for several prompts at once, and for the prompt of token 7 also alone."""

    snapshots = 1

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def forward_backward(self, requests: Any) -> list[AdapterReply]:
        self.sizes.append(len(requests))
        if len(requests) > 1 or 7 in requests[0].batch.input_ids.tolist():
            raise WorkerError("out of memory")
        return [AdapterReply(loss=float(requests[0].batch.input_ids[0]))]


def test_an_error_of_a_prompt_is_not_that_of_others() -> None:
    async def run() -> tuple[list[int], list[Any]]:
        group = NarrowGroup()
        scoring = Scoring(group, 100, lambda: None)  # type: ignore[arg-type]
        waiting = [asyncio.create_task(scoring.score(f"key-{n}", "", from_lists([[n, n]]))) for n in (5, 7, 9)]
        await asyncio.sleep(0)
        await scoring.compute()
        return group.sizes, await asyncio.gather(*waiting, return_exceptions=True)

    sizes, replies = asyncio.run(run())
    assert sizes == [3, 1, 1, 1]
    assert [replies[0].loss, replies[2].loss] == [5.0, 9.0]
    assert isinstance(replies[1], DrivetrainError)
    assert "out of memory" in str(replies[1])
