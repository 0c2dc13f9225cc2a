"""Single requests to a model in a worker process: streams, batches, cancellation, failures, new weights."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from drivetrain.engine.config import ModelConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import ConfigError, QueueFullError, WorkerError, WorkerLostError
from drivetrain.generation.options import RolloutConfig, SamplingOptions
from drivetrain.generation.registry import build_generator
from drivetrain.generation.scheduler import SchedulerSettings
from drivetrain.generation.token_scheduler import GenerationRequest
from drivetrain.serve.openai.replicas import Replicas
from drivetrain.serve.openai.weights import WeightLoader
from drivetrain.workers.roles.generator import RolloutWorker
from drivetrain.workers.supervision.supervisor import SupervisedWorker, SupervisorSettings, start_model_worker
from helpers.serving import FaultyRollout

GREEDY = SamplingOptions(max_tokens=24, temperature=0.0, ignore_eos=True)
ENDLESS = replace(GREEDY, max_tokens=2000)
SAMPLED = SamplingOptions(max_tokens=20, temperature=1.5, seed=3)
PROMPTS = [[(i * 7 + 3 + j) % 250 for i in range(1 + 5 * j)] for j in range(10)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("serving")
    save_tiny_model(root / "other", "qwen3", seed=1)
    return save_tiny_model(root / "model", "qwen3")


def config_of(folder: Path, **more: Any) -> RolloutConfig:
    return RolloutConfig(
        model=ModelConfig(path=str(folder)), **{"generator": "continuous", "max_batch_total_tokens": 4096, **more}
    )


def asked(prompt: list[int], options: SamplingOptions = GREEDY, **more: Any) -> GenerationRequest:
    return GenerationRequest(prompt=prompt, options=options, **more)


@asynccontextmanager
async def served(folder: Path, rollout: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[SupervisedWorker]:
    supervision = SupervisorSettings(**{"pause_s": 0.1, **settings})
    async with start_model_worker(FaultyRollout, config_of(folder, **(rollout or {})), supervision) as worker:
        yield worker


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 120))


async def tokens_of(worker: SupervisedWorker, request: GenerationRequest) -> list[int]:
    return [token.token for token in await worker.stream(request).read()]


def test_many_clients_are_answered_as_a_generator_alone_would(folder: Path) -> None:
    expected = build_generator(config_of(folder)).generate(PROMPTS, replace(SAMPLED, samples=3))

    async def test() -> None:
        async with start_model_worker(RolloutWorker, config_of(folder)) as queue:
            streams = [
                queue.stream(asked(prompt, SAMPLED, row=row, sample=sample))
                for row, prompt in enumerate(PROMPTS)
                for sample in range(3)
            ]
            found = await asyncio.gather(*(stream.read() for stream in streams))
            for stream, tokens, answer in zip(streams, found, [a for some in expected for a in some], strict=True):
                assert [token.token for token in tokens] == answer.response
                assert [token.log_prob for token in tokens] == pytest.approx(answer.log_probs, abs=1e-5)
                assert {token.version for token in tokens} == {0}
                assert stream.finish_reason == answer.finish_reason
            stats = await queue.acall("stats")
            # At the same time, however late a busy machine lets some of them begin: one after the other they take a step for each token.
            assert stats.steps < stats.tokens / 5
            assert (stats.waiting, stats.running, stats.requests) == (0, 0, 30)
            # Without an event loop.
            alone = await asyncio.to_thread(lambda: [t.token for t in queue.stream(asked(PROMPTS[1], SAMPLED, row=1))])
            assert alone == expected[1][0].response

    run(test)


def test_a_response_ends_with_its_tokens_so_far_when_it_is_cancelled_or_left(folder: Path) -> None:
    async def test() -> None:
        async with served(folder, {"max_batch_size": 2}) as worker:
            await worker.acall("slow_down", 0.01)
            whole = await tokens_of(worker, asked(PROMPTS[2]))
            stream, count = worker.stream(asked(PROMPTS[2], ENDLESS)), 0
            read: list[int] = []
            async for token in stream:
                read.append(token.token)
                count += 1
                if count == 3:
                    stream.cancel()
            assert stream.finish_reason == "aborted"
            # On a busy machine many more arrive before the cancellation does, though not all.
            assert len(read) >= 3
            assert read[: len(whole)] == whole[: len(read)]
            # One that waits in the queue, behind two that run.
            running = [worker.stream(asked(PROMPTS[i], ENDLESS)) for i in (1, 2)]
            await anext(running[1])
            waiting = worker.stream(asked(PROMPTS[3]))
            waiting.cancel()
            assert await waiting.read() == []
            assert waiting.finish_reason == "aborted"
            # Streams that nobody holds any more, and a loop that is left.
            del running
            async for _ in worker.stream(asked(PROMPTS[4], ENDLESS)):
                break
            deadline = time.monotonic() + 20
            while (stats := await worker.acall("stats")).running and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            assert (stats.waiting, stats.running) == (0, 0)
            assert await tokens_of(worker, asked(PROMPTS[2])) == whole

    run(test)


@pytest.mark.slow
def test_a_full_queue_refuses_at_once_and_serves_the_rest(folder: Path) -> None:
    async def test() -> None:
        async with served(folder, {"max_batch_size": 1}, queue_size=2) as worker:
            await worker.acall("slow_down", 0.02)
            first = worker.stream(asked(PROMPTS[0]))
            await anext(first)
            waiting = [worker.stream(asked(PROMPTS[1])) for _ in range(2)]
            began = time.monotonic()
            with pytest.raises(QueueFullError, match="2 requests are waiting; send it again later"):
                await worker.stream(asked(PROMPTS[2])).read()
            assert time.monotonic() - began < 10
            assert len(await first.read()) == 23
            for stream in waiting:
                assert len(await stream.read()) == 24
            assert len(await tokens_of(worker, asked(PROMPTS[2]))) == 24

    run(test)


def test_what_is_wrong_with_a_request_fails_that_request(folder: Path) -> None:
    async def test() -> None:
        async with served(folder) as worker:
            other = worker.stream(asked(PROMPTS[3], replace(GREEDY, max_tokens=150)))
            for request, error, message in (
                (asked([]), ConfigError, "the prompt has 0 tokens"),
                (asked([5, 256]), ConfigError, "token ids from 5 to 256"),
                (asked([5] * 4096), ConfigError, "leaves no room for a completion"),
                (GenerationRequest(prompt=[5], options="greedy"), ConfigError, "give SamplingOptions"),  # type: ignore[arg-type]
            ):
                with pytest.raises(WorkerError, match=message) as found:
                    await worker.stream(request).read()
                assert isinstance(found.value.__cause__, error)
            # Memory that runs out fails the latest request.
            latest = worker.stream(asked(PROMPTS[4], ENDLESS))
            await anext(latest)
            await worker.acall("fail", "memory", 5)
            with pytest.raises(WorkerError, match="out of memory"):
                await latest.read()
            assert len(await other.read()) == 150
            # Any other error fails those that ran, and no later one.
            running = [worker.stream(asked(PROMPTS[i], ENDLESS)) for i in (1, 2)]
            for stream in running:
                await anext(stream)
            await worker.acall("fail", "kernel", 5)
            for stream in running:
                with pytest.raises(WorkerError, match="RuntimeError: a broken kernel"):
                    await stream.read()
            assert len(await tokens_of(worker, asked(PROMPTS[1]))) == 24
            assert worker.control.restarts == 0

    run(test)


def test_a_worker_that_dies_fails_its_requests_and_comes_back(folder: Path) -> None:
    async def test() -> None:
        async with served(folder, restarts=1) as worker:
            expected = await tokens_of(worker, asked(PROMPTS[1]))
            running = [worker.stream(asked(PROMPTS[i], ENDLESS)) for i in (1, 2)]
            for stream in running:
                await anext(stream)
            ticks = asyncio.create_task(_longest_pause())
            with suppress(WorkerLostError):  # it may be gone before its answer has left
                await worker.acall("fail", "exit", 3)
            for stream in running:
                with pytest.raises(
                    WorkerLostError, match=r"exited with code 3; last output:\n(.*\n)*the last output of a model"
                ):
                    await stream.read()
            # Requests during the restart wait for it; the event loop does not.
            assert await tokens_of(worker, asked(PROMPTS[1])) == expected
            ticks.cancel()
            assert await ticks < 1.0
            with suppress(WorkerLostError):  # it may be gone before its answer has left
                await worker.acall("fail", "exit", 3)
            with pytest.raises(WorkerLostError):
                await worker.stream(asked(PROMPTS[1], ENDLESS)).read()
            while not worker.control.is_completed():
                await asyncio.sleep(0.02)
            with pytest.raises(WorkerLostError, match=r"the worker was restarted 1 times \(restarts=1\)"):
                worker.stream(asked(PROMPTS[1]))

    run(test)


async def _longest_pause() -> float:
    longest, last = 0.0, time.monotonic()
    try:
        while True:
            await asyncio.sleep(0.01)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
    except asyncio.CancelledError:
        return longest


def test_new_weights_interrupt_and_no_token_is_of_a_stale_cache(folder: Path) -> None:
    prompt = PROMPTS[9]
    long = replace(GREEDY, max_tokens=60)
    old, new = (build_generator(config_of(path)) for path in (folder, folder.parent / "other"))

    async def test() -> None:
        async with served(folder) as worker:
            await worker.acall("slow_down", 0.01)
            flying = worker.stream(asked(prompt, long))
            read = [await anext(flying) for _ in range(4)]
            assert await worker.acall("load_folder", str(folder.parent / "other"), version=7) == 7
            fresh = await worker.stream(asked(prompt, long)).read()
            read += await flying.read()
            count = sum(token.version == 0 for token in read)
            assert 4 <= count < 60
            assert [token.version for token in read] == [0] * count + [7] * (60 - count)
            ((before,),) = old.generate([prompt], replace(long, max_tokens=count))
            ((after,),) = new.generate([prompt + before.response], replace(long, max_tokens=60 - count))
            assert [token.token for token in read] == before.response + after.response
            assert [token.log_prob for token in read] == pytest.approx(before.log_probs + after.log_probs, abs=1e-5)
            ((alone,),) = new.generate([prompt], long)
            assert [token.token for token in fresh] == alone.response
            assert [token.log_prob for token in fresh] == pytest.approx(alone.log_probs, abs=1e-5)
            # A folder of another model leaves nothing that could be generated from; requests are refused until one fits.
            with pytest.raises(WorkerError, match=r"has neither model\.safetensors"):
                await worker.acall("load_folder", str(folder.parent))
            with pytest.raises(WorkerError, match="weights are a mix of two models"):
                await worker.stream(asked(prompt)).read()
            await worker.acall("load_folder", str(folder))
            assert len(await tokens_of(worker, asked(prompt))) == 24
            # During a pause requests wait, and the worker answers.
            await worker.acall("pause")
            paused = worker.stream(asked(prompt))
            assert (await worker.acall("stats")).running == 0
            await worker.acall("resume")
            assert len(await paused.read()) == 24

    run(test)


@pytest.mark.slow
def test_the_first_requests_to_an_idle_model_are_batched(folder: Path) -> None:
    async def test() -> None:
        for wait_ms, together in ((0.0, False), (1500.0, True)):
            async with served(folder, {"generator": "static"}, max_wait_ms=wait_ms) as worker:
                await worker.acall("slow_down", 0.01)
                first = worker.stream(asked(PROMPTS[1]))
                while not together and not (await worker.acall("stats")).running:
                    await asyncio.sleep(0.01)
                second = worker.stream(asked(PROMPTS[2]))
                await first.read()
                await second.read()
                # Static batching serves those that come later in a batch of their own.
                assert (await worker.acall("stats")).steps == (24 if together else 48)

    run(test)


@pytest.mark.parametrize(
    ("name", "value"), [("max_wait_ms", -1.0), ("max_wait_ms", float("nan")), ("queue_size", 0), ("queue_size", 1.5)]
)
def test_settings_out_of_range_are_refused(name: str, value: Any) -> None:
    for settings in (SchedulerSettings, SupervisorSettings):
        with pytest.raises(ConfigError, match=name):
            settings(**{name: value})


@pytest.mark.parametrize(
    ("error", "remembered"),
    [(WorkerError("damaged"), "first"), (QueueFullError("full"), "first"), (WorkerLostError("died"), "second")],
)
def test_weights_that_cannot_be_loaded_are_not_loaded_after_a_restart(
    error: Exception, remembered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But those in whose load a worker died are: other workers have them, and the worker has not refused them."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        save_file({"w": torch.zeros(2)}, tmp_path / name / "model.safetensors")
    replicas = Replicas(FaultyRollout, config_of(tmp_path), 1, SupervisorSettings())
    (worker,), failures = replicas.workers, [None, error]

    async def acall(worker: SupervisedWorker, method: str, *args: Any, **options: Any) -> int:
        # The call is remembered while it runs: a restart in the meantime repeats it.
        assert worker._remembered[method].args == list(args)
        if (failure := failures.pop(0)) is not None:
            raise failure
        return int(options["version"])

    async def test() -> None:
        loader = WeightLoader(tmp_path, replicas, {"w": (2,)})
        await loader.load("first")
        with pytest.raises(type(error), match=str(error)):
            await loader.load("second")
        assert worker._remembered["load_folder"].args == [str(tmp_path / remembered)]

    monkeypatch.setattr(SupervisedWorker, "acall", acall)
    run(test)


def test_a_remembered_call_is_undone_unless_another_has_replaced_it() -> None:
    worker = start_model_worker(FaultyRollout, None)
    undo = [worker.remember("load_folder", name) for name in ("a", "b")]
    undo[0]()
    assert worker._remembered["load_folder"].args == ["b"]
    undo[1]()
    assert worker._remembered["load_folder"].args == ["a"]
    undo[0]()
    assert not worker._remembered
