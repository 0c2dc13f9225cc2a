"""The training service at its limits and in races: creating while a session ends, states that are damaged or of others, quotas, wrong numbers."""

import asyncio
import json
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import ConfigError, ModelError
from drivetrain.serve.openai.text import Texts
from drivetrain.serve.tinker.checkpoints import Checkpoints
from drivetrain.serve.tinker.database import FORMAT, Database
from helpers.tinker_service import KEY, Service, datums, forward_backward, group_of, running

pytestmark = pytest.mark.usefixtures("process_group")
HEADERS = {"x-api-key": KEY}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model", "llama", vocab_size=300)


def serve(model: Path, *tests: Callable[[Service], Coroutine[Any, Any, None]], **settings: Any) -> None:
    """Run tests one after the other, each with a service that goes on from the state of the one before."""

    async def run(test: Callable[[Service], Coroutine[Any, Any, None]]) -> None:
        async with running(model, model.parent / "state", build=group_of(model), **settings) as service:
            await test(service)

    for test in tests:
        asyncio.run(run(test))


async def creating(service: Service, session: str, number: int, **lora: Any) -> Any:
    body = {"session_id": session, "model_seq_id": number, "base_model": "tiny", "lora_config": {"rank": 2, **lora}}
    response = await service.http.post("/api/v1/create_model", content=json.dumps(body), headers=HEADERS)
    return response.json() if response.status_code == 200 else response.status_code


def test_models_are_counted_before_they_are_there_and_failures_do_not_count(model: Path) -> None:
    async def test(service: Service) -> None:
        session = await service.session()
        # What cannot be created takes no place, however often it is asked for.
        for _ in range(2):
            answers = await asyncio.gather(*(creating(service, session, number, rank=0) for number in range(4)))
            errors = [(await service.result(answer))["error"] for answer in answers]
            assert all("rank=0" in error for error in errors)
        results = [
            await service.result(a) for a in await asyncio.gather(*(creating(service, session, 10 + n) for n in range(6)))
        ]
        assert sum("error" not in result for result in results) == 2
        assert all("already has 2 adapters" in result["error"] for result in results if "error" in result)
        await service.post("/optim_step", {"model_id": f"{session}:train:0", "seq_id": 1}, status=404)

    serve(model, test, max_adapters=2)


def test_ranks_are_limited_for_new_models_only(model: Path) -> None:
    names = []

    async def with_four(service: Service) -> None:
        session = await service.session()
        result = await service.result(await creating(service, session, 0, rank=5))
        assert "rank=5" in result["error"]
        assert "--max-lora-rank=4" in result["error"]
        result = await service.result(await creating(service, session, 1, rank=4))
        names.append(result["model_id"])
        save = {"model_id": names[0], "seq_id": 1, "path": "a"}
        assert "error" not in await service.result(await service.post("/save_weights", save))

    async def with_two(service: Service) -> None:
        # Also a model that begins with a checkpoint is new.
        session, path = await service.session(), f"tinker://{names[0]}/weights/a"
        load = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": False}
        result = await service.result(await service.post("/load_weights", load))
        assert "rank=4" in result["error"]
        assert "--max-lora-rank=2" in result["error"]
        # A model that is in training is restored, whatever the limit is now.
        step = await service.post("/forward_backward", forward_backward(names[0], 2, datums(Random(0), 1)))
        assert (await service.result(step)).metrics["loss:sum"] > 0
        load = {"model_id": names[0], "seq_id": 3, "path": path, "optimizer": True}
        assert "error" not in await service.result(await service.post("/load_weights", load))

    serve(model, with_four, max_lora_rank=4)
    serve(model, with_two, max_lora_rank=2)


def test_a_model_that_is_created_while_its_session_ends_is_not_left_behind(model: Path) -> None:
    async def test(service: Service) -> None:
        for _ in range(10):
            session = await service.session()
            finish = service.http.post(f"/api/v1/sessions/{session}/finish", json={}, headers=HEADERS)
            await asyncio.gather(*(creating(service, session, n) for n in range(3)), finish)
            for _ in range(100):
                left = service.database.read("SELECT id FROM models WHERE state = 'open'")
                if not left and await service.training._group.call("adapter_names") == []:
                    break
                await asyncio.sleep(0.02)
            assert left == []
        assert service.training._queues == {}

    serve(model, test)


def test_whatever_is_wrong_with_a_numbered_request_its_number_counts(model: Path) -> None:
    async def test(service: Service) -> None:
        name = await service.model(await service.session())
        wrong = [
            b'{"model_id": "%s", "seq_id": 1, "adam_params": {"learning_rate": null}}' % name.encode(),
            b'{"model_id": "%s", "seq_id": 2, "adam_params": {"learning_rate": 20.0}}' % name.encode(),
            b'{"model_id": "%s", "seq_id": 3, "optimizer_params": {"type": "dimuon"}}' % name.encode(),
        ]
        futures = [await service.post("/optim_step", body) for body in wrong]
        futures.append(await service.post("/save_weights", {"model_id": name, "seq_id": 4, "path": 7}))
        futures.append(await service.post("/load_weights", {"model_id": name, "seq_id": 5, "path": 7}))
        last = await service.post("/forward_backward", forward_backward(name, 6, datums(Random(0), 1)))
        messages = ["learning_rate", "learning_rate=20.0", "dimuon", "path", "path"]
        for future, message in zip(futures, messages, strict=True):
            assert message in (await service.result(future))["error"]
        assert (await service.result(last)).metrics["loss:sum"] != 0
        # A checkpoint that one before it saves is there when it is its turn, and its name is taken.
        path = f"tinker://{name}/weights/a"
        late = [await service.post("/load_weights", {"model_id": name, "seq_id": 9, "path": path, "optimizer": True})]
        late.append(await service.post("/save_weights", {"model_id": name, "seq_id": 8, "path": "a"}))
        first = await service.post("/save_weights", {"model_id": name, "seq_id": 7, "path": "a"})
        assert "error" not in await service.result(first)
        assert "already" in (await service.result(late[1]))["error"]
        assert (await service.result(late[0]))["path"] == path

    serve(model, test)


def test_requests_that_arrive_together_count_together(model: Path) -> None:
    """Each alone would fit when it arrives: none of the others is written yet."""

    async def test(service: Service) -> None:
        name = await service.model(await service.session())
        data = [{"tokens": [1] * 100, "target_tokens": [1] * 100, "weights": [1.0] * 100}] * 20
        bodies = [forward_backward(name, seq, data) for seq in range(2, 12)]
        assert 0.05 * 2**20 < 4 * len(bodies[0]) < 0.2 * 2**20

        async def send(body: bytes) -> int:
            headers = {"x-api-key": KEY}
            return (await service.http.post("/api/v1/forward_backward", content=body, headers=headers)).status_code

        statuses = await asyncio.gather(*map(send, bodies))
        assert statuses.count(200) * len(bodies[0]) <= 0.1 * 2**20
        assert 0 < statuses.count(200) == len(bodies) - statuses.count(429)
        # What was refused leaves nothing behind, and what was not is done.
        done = service.database.read("SELECT seq FROM requests WHERE model = ? AND kind = 'forward_backward'", name)
        assert len(done) == statuses.count(200)

    serve(model, test, max_queued_mib=0.1)


@pytest.mark.slow
def test_requests_of_a_key_are_kept_up_to_a_limit_and_steps_make_room(model: Path) -> None:
    async def test(service: Service) -> None:
        session = await service.session()
        names = [await service.model(session, number) for number in range(4)]
        data = [{"tokens": [1] * 100, "target_tokens": [1] * 100, "weights": [1.0] * 100}] * 2
        size = len(forward_backward(names[0], 1, data))
        # Passes that change nothing do not count, however many there are.
        for seq in range(1, 60):
            body = forward_backward(names[0], seq, data, forward_only=True)
            await service.result(await service.post("/forward_backward", body))
        for round_number in range(20):
            for name in names:
                seq = 60 + 2 * round_number if name == names[0] else 1 + 2 * round_number
                body = forward_backward(name, seq, data)
                await service.result(await service.post("/forward_backward", body))
                await service.result(await service.step(name, seq + 1))
        assert 20 * len(names) * size > 2 * 0.1 * 2**20

    serve(model, test, max_queued_mib=0.1, steps_per_save=1000)


def test_disk_is_counted_for_snapshots_too_and_freed_with_their_session(model: Path) -> None:
    async def test(service: Service) -> None:
        session = await service.session()
        name = await service.model(session)
        first = await service.result(await service.post("/save_weights", {"model_id": name, "seq_id": 1, "path": "last"}))
        assert "error" not in first
        # What it takes the place of does not count.
        again = {"model_id": name, "seq_id": 2, "path": "last", "overwrite": True}
        assert "error" not in await service.result(await service.post("/save_weights", again))
        results = []
        for number in range(6):
            body = {"model_id": name, "seq_id": 3 + number, "sampling_session_seq_id": number}
            results.append(await service.result(await service.post("/save_weights_for_sampler", body)))
        refused = [result for result in results if "error" in result]
        assert refused
        assert all("--max-disk-mib" in result["error"] for result in refused)
        folders = model.parent / "state" / "checkpoints"
        assert len(list(folders.iterdir())) == 7 - len(refused)
        await service.http.post(f"/api/v1/sessions/{session}/finish", json={}, headers=HEADERS)
        for _ in range(200):
            if len(list(folders.iterdir())) == 1:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("snapshots of a session that has ended are still there")

    serve(model, test, max_disk_mib=1.0, session_s=1.0)


def test_weights_that_newer_ones_replace_do_not_count(model: Path) -> None:
    async def test(service: Service) -> None:
        name = await service.model(await service.session())
        for seq in range(1, 9):
            body = {"model_id": name, "seq_id": seq, "sampling_session_seq_id": seq, "kind": "inflight"}
            assert "error" not in await service.result(await service.post("/save_weights_for_sampler", body))
        # The newest do.
        results = []
        for seq in range(9, 15):
            body = {"model_id": name, "seq_id": seq, "sampling_session_seq_id": seq}
            results.append(await service.result(await service.post("/save_weights_for_sampler", body)))
        assert "--max-disk-mib" in results[-1]["error"]

    serve(model, test, max_disk_mib=1.0)


def test_a_number_of_a_sampler_is_one_sampler(model: Path) -> None:
    async def test(service: Service) -> None:
        session = await service.session()
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        assert await service.post("/create_sampling_session", body) == await service.post("/create_sampling_session", body)
        name = await service.model(session)
        saved = await service.result(
            await service.post("/save_weights_for_sampler", {"model_id": name, "seq_id": 1, "path": "s"})
        )
        other = {"session_id": session, "sampling_session_seq_id": 0, "model_path": saved["path"]}
        await service.post("/create_sampling_session", other, status=400)
        taken = {"model_id": name, "seq_id": 2, "sampling_session_seq_id": 0}
        assert (
            "use a new number for each"
            in (await service.result(await service.post("/save_weights_for_sampler", taken)))["error"]
        )
        assert (await service.get(f"/training_runs?offset={10**25}"))["training_runs"] == []

    serve(model, test)


def test_a_damaged_state_ends_its_model_alone(model: Path) -> None:
    names: list[str] = []

    async def first(service: Service) -> None:
        session = await service.session()
        names.extend([await service.model(session, number) for number in range(2)])
        for name in names:
            await service.result(await service.post("/forward_backward", forward_backward(name, 1, datums(Random(0), 1))))
            await service.result(await service.step(name, 2))
        row = service.database.one("SELECT saved_folder FROM models WHERE id = ?", names[0])
        assert row is not None
        shutil.rmtree(row["saved_folder"])

    async def then(service: Service) -> None:
        await service.post("/forward_backward", forward_backward(names[0], 3, datums(Random(0), 1)), status=404)
        answer = await service.result(
            await service.post("/forward_backward", forward_backward(names[1], 3, datums(Random(0), 1)))
        )
        assert answer.metrics["loss:sum"] != 0

    serve(model, first, then, steps_per_save=1)


@pytest.mark.slow
def test_one_service_at_a_time_and_one_model_has_a_state(tmp_path: Path) -> None:
    file = tmp_path / "service.sqlite"
    database = Database(file)
    database.claim("model", "one", "model")
    with pytest.raises(ConfigError, match="another service uses"):
        Database(file)
    database.close()
    again = Database(file)
    again.claim("model", "one", "model")
    with pytest.raises(ConfigError, match="belongs to another model"):
        again.claim("model", "two", "model")
    # Another program that holds the file for a while holds up what is written, and nothing is lost.
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    future = again.execute(("INSERT INTO about VALUES ('a', 'b')", ()))
    with pytest.raises(TimeoutError):
        future.result(2.5)
    other.execute("COMMIT")
    future.result(10)
    assert again.one("SELECT value FROM about WHERE name = 'a'")["value"] == "b"  # type: ignore[index]
    failing = again.execute(("INSERT INTO about VALUES ('a', 'c')", ()))
    with pytest.raises(sqlite3.IntegrityError):
        failing.result(10)
    again.close()
    other.close()
    file.write_bytes(b"not a database")
    with pytest.raises(ConfigError, match="cannot be used"):
        Database(file)


def test_a_database_of_another_format_stays_as_it_is(tmp_path: Path) -> None:
    for number, (script, message) in enumerate(
        (
            (
                "CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL); CREATE TABLE samplers (id TEXT); "
                "INSERT INTO about VALUES ('format', '1')",
                f"has format 1, but this version of the service reads format {FORMAT}; choose another folder",
            ),
            ("CREATE TABLE notes (text TEXT)", "of another program; choose another folder"),
        )
    ):
        file = tmp_path / f"{number}.sqlite"
        connection = sqlite3.connect(file)
        connection.executescript(script)
        connection.close()
        content = file.read_bytes()
        for _ in range(2):
            with pytest.raises(ConfigError, match=message):
                Database(file)
        assert file.read_bytes() == content


def test_changes_that_are_cancelled_or_fail_do_not_end_the_database(tmp_path: Path) -> None:
    class OddError(BaseException):
        """No Exception."""

    database = Database(tmp_path / "service.sqlite")
    entered, go_on = threading.Event(), threading.Event()

    def slow(connection: sqlite3.Connection) -> int:
        entered.set()
        go_on.wait()
        return 1

    def odd(connection: sqlite3.Connection) -> None:
        raise OddError

    running_now = database.write(slow)
    entered.wait()
    waiting = database.execute(("INSERT INTO about VALUES ('a', 'b')", ()))
    # What is being made cannot be cancelled any more; what waits can, and is not made.
    assert not running_now.cancel()
    assert waiting.cancel()
    go_on.set()
    assert running_now.result(10) == 1
    with pytest.raises(OddError):
        database.write(odd).result(10)
    database.execute(("INSERT INTO about VALUES ('c', 'd')", ())).result(10)
    assert database.is_alive
    assert [row["name"] for row in database.read("SELECT name FROM about ORDER BY name")] == ["c", "format"]
    database.close()
    assert not database.is_alive


def test_of_weights_that_follow_each_other_fast_the_newest_stay_and_those_in_use(tmp_path: Path) -> None:
    database = Database(tmp_path / "service.sqlite")
    folders = {f"{model}{number}": tmp_path / f"{model}{number}" / "step" for model in "ab" for number in range(5)}
    now = time.time()
    database.execute(
        ("INSERT INTO sessions (id, owner, created, seen) VALUES ('s', 'o', ?, ?)", (now, now)),
        *(
            (
                "INSERT INTO models (id, session, owner, base, config, source, source_path, source_optimizer, metadata, created, seen, state) "
                "VALUES (?, 's', 'o', '', '', '', '', 0, '', 0, 0, 'open')",
                (model,),
            )
            for model in "ab"
        ),
        *(
            (
                "INSERT INTO published (model, owner, folder, bytes, created) VALUES (?, 'o', ?, 1, ?)",
                (name[0], str(folder), now),
            )
            for name, folder in folders.items()
        ),
    ).result(10)

    for folder in folders.values():
        folder.mkdir(parents=True)

    def left(ended_before: float, used: set[str]) -> str:
        paths = {str(folders[name]) for name in used}
        asyncio.run(Checkpoints(database).remove_published(ended_before, paths))
        rows = [Path(row["folder"]) for row in database.read("SELECT folder FROM published ORDER BY number")]
        assert {name for name, folder in folders.items() if folder.exists()} == {folder.parent.name for folder in rows}
        return " ".join(folder.parent.name for folder in rows)

    assert left(0.0, {"a1", "b4"}) == "a1 a3 a4 b3 b4"
    assert left(0.0, set()) == "a3 a4 b3 b4"
    database.execute(("UPDATE published SET created = created - 1000", ())).result(10)
    assert left(0.0, {"b3"}) == "a4 b3 b4"
    database.execute(("UPDATE sessions SET finished = 1", ())).result(10)
    assert left(now + 1, {"b3"}) == ""
    database.close()


def test_a_folder_without_a_tokenizer_has_no_texts(tmp_path: Path) -> None:
    """transformers makes an empty tokenizer of such a folder, and no text would ever end a response."""
    with pytest.raises(ModelError, match="has no tokenizer"):
        Texts(save_tiny_model(tmp_path / "model", "qwen3"))


def test_small_requests_that_are_large_as_tensors_do_not_pile_up(model: Path) -> None:
    """Sparse ones, which wait for a request before them."""

    async def test(service: Service) -> None:
        name = await service.model(await service.session())
        zeros = np.zeros((100, 200))
        datum = {"tokens": [1] * 100, "target_tokens": zeros, "weights": zeros}
        bodies = [forward_backward(name, seq, [datum], sparse=True) for seq in (2, 3, 4)]
        assert len(bodies[0]) < 5000
        futures = [await service.post("/forward_backward", body) for body in bodies[:2]]
        error = await service.post("/forward_backward", bodies[2], status=429)
        assert "--max-queued-mib=0.5" in str(error)
        assert "as tensors" in str(error)
        # As soon as the one before them is there, all are computed, and there is room.
        await service.result(await service.post("/forward_backward", forward_backward(name, 1, datums(Random(0), 1))))
        for future in futures:
            await service.result(future)
        await service.result(await service.post("/forward_backward", bodies[2]))

    serve(model, test, max_queued_mib=0.5)
